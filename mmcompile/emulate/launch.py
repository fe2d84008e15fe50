"""What a launch of emitted assembly needs, and what comes out of it: the same records for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmcompile.emulate.memory import DeviceMemory

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor (CUtensorMap) as an argument.

    Attributes:
        address: device address of the tensor. element_bytes: size of one element. shape, strides_bytes, box: outermost
            dimension first. swizzle: span in bytes, one of 0, 32, 64, 128. padded_fp4: 16 packed e2m1 values fill 16
            bytes of shared memory (CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B).
    """

    address: int
    element_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    padded_fp4: bool = False


Argument = int | bytes | TensorMap
"""A pointer or integer (as wide as the parameter), raw bytes of the parameter's width, or a TMA descriptor."""


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    Attributes:
        assembly: the whole text (PTX module or gfx950 assembly). entry: name of the kernel in it.
        grid: programs (blocks, workgroups) in x, y, z. threads: threads of a program. shared_bytes: dynamic shared
            memory of a program. arguments: in the order of the kernel's parameters, pointers into ``memory``.
        programs: (x, y, z) of the programs to run, in this order; None for the whole grid.
        schedule: "program" runs the programs side by side as vectors, fastest; "warp" runs every warp on its own in
            seeded random order, so that a missing barrier changes the result; "interleaved" keeps all programs
            resident and switches between them, for kernels in which programs wait for each other.
        late: asynchronous operations complete at the last legal moment, instead of the first.
        check_races: vector clocks over barriers, atomics and mbarriers.
        seed: of the interleaving.
    """

    assembly: str
    entry: str
    grid: Dim3
    threads: int
    shared_bytes: int
    arguments: Sequence[Argument]
    memory: DeviceMemory
    programs: Sequence[Dim3] | None = None
    schedule: Literal["program", "warp", "interleaved"] = "program"
    late: bool = False
    check_races: bool = False
    seed: int = 0

    def list_programs(self) -> list[Dim3]:
        """The programs to run, x fastest."""
        if self.programs is not None:
            return list(self.programs)
        x, y, z = self.grid
        return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]


@dataclass
class Report:
    """What ran.

    Attributes:
        instructions: executed, one for each thread (lane) that was active. covered: lines of the assembly text that
            hold an executed instruction. total: number of instructions of the kernel's text.
        unchecked: what the run could not check, one sentence each.
    """

    instructions: int = 0
    covered: set[int] = field(default_factory=set)
    total: int = 0
    unchecked: list[str] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        """Share of the instructions of the text that were executed at least once."""
        return len(self.covered) / self.total if self.total else 0.0


@dataclass(frozen=True)
class UnknownInstruction:
    """An instruction that the emulator has no semantics for: where it stands and how often its form occurs."""

    form: str
    line: int
    count: int
