"""A decoded instruction, and the vector sources (plain, DPP, SDWA) that the families build theirs from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.operands import Operand, Reader, modify, read_bits, read_float, read_mask, read_wide
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import SCALAR, Waves, unpack_lanes

Array = npt.NDArray[Any]
Step = Callable[[Waves], None]
Unknowns = list[tuple[int, Array]]
"""Registers and their undefined bits after the instruction: [waves, 64] for vector, [waves] for scalar registers."""
Taint = Callable[[Waves], Unknowns]

ALL = np.uint32(0xFFFFFFFF)
_NONE = np.zeros((1, 1), np.uint32)


@dataclass
class Decoded:
    """An instruction ready to run.

    Attributes:
        step: does it for the selected waves. reads, writes: identifiers of registers. taint: the undefined bits of the
            written registers, computed before ``step``; None if they are all defined afterwards. keeps_unknown: the
            step sets them itself. demands: registers that must be defined in the active lanes, e.g. addresses.
        all_lanes: the execution mask is ignored. queue: of a load: "vm", "lgkm" or "smem".
        control: "", "branch", "indirect", "barrier" or "endpgm"; a branch's step sets ``waves.jump`` to bool, an
            indirect one's to instructions [selected]. target: label of a direct branch. note: what a run of it cannot
            check, for the report. index: place in the kernel.
    """

    step: Step
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()
    taint: Taint | None = None
    keeps_unknown: bool = False
    demands: Sequence[int] = ()
    queue: str = ""
    all_lanes: bool = False
    control: str = ""
    target: str = ""
    note: str = ""
    line: int = 0
    text: str = ""
    index: int = 0
    touched: frozenset[int] = field(default_factory=frozenset)

    def finish(self, instruction: Instruction) -> Decoded:
        """Fill in where it stands."""
        self.line, self.text = instruction.line, instruction.text
        self.touched = frozenset([*self.reads, *self.writes, *self.demands])
        return self


@dataclass(frozen=True)
class Source:
    """A vector source: its values, its undefined bits (uint32, broadcastable), and the registers it reads."""

    read: Reader
    unknown: Reader
    registers: tuple[int, ...]


def read_unknown(operand: Operand, part: int = 0) -> Reader:
    """Undefined bits of one dword of an operand, uint32 [waves, 64] or [waves, 1] or [1, 1]."""
    index = operand.index + part
    if operand.kind == "vector":
        return lambda w: w.vector_unknown[index, w.rows]
    if operand.kind == "scalar":
        return lambda w: w.scalar_unknown[w.rows, index : index + 1]
    return lambda w: _NONE


def make_source(operand: Operand, kind: str) -> Source:
    """A source of kind "u" (bits), "b" (bits, signs changed by float modifiers), "i" (int32), "f" (float32), "q" (64
    bits), "s" (int64), "d" (float64) or "m" (lane mask in scalar registers)."""
    if kind == "m":
        index = operand.index
        if operand.kind != "scalar":
            return Source(read_mask(operand), lambda w: _NONE, ())
        registers = (SCALAR + index, SCALAR + index + 1)
        return Source(
            read_mask(operand),
            lambda w: unpack_lanes(w.scalar_unknown[w.rows, index : index + 2]).astype(np.uint32) * ALL,
            registers,
        )
    if kind in "qsd":
        return _make_wide_source(operand, kind)
    low = read_unknown(operand)
    own = tuple(operand.list_registers(count=1))
    if kind == "f":
        return Source(read_float(operand), low, own)
    bits = modify(operand, read_bits(operand)) if kind == "b" else read_bits(operand)
    if kind == "i":
        return Source(lambda w: bits(w).view(np.int32), low, own)
    return Source(bits, low, own)


def _make_wide_source(operand: Operand, kind: str) -> Source:
    wide = read_wide(operand)
    low, high = read_unknown(operand), read_unknown(operand, 1)
    registers = tuple(operand.list_registers())
    unknown: Reader = low if operand.count == 1 else lambda w: low(w) | high(w)
    if kind == "q":
        return Source(wide, unknown, registers)
    if kind == "s":
        return Source(lambda w: wide(w).view(np.int64), unknown, registers)
    negate, absolute = operand.negate, operand.absolute

    def read_double(w: Waves) -> Array:
        values = wide(w).view(np.float64)
        values = np.abs(values) if absolute else values
        return -values if negate else values

    return Source(read_double, unknown, registers)


def collapse(unknowns: Sequence[Array]) -> Array:
    """All bits undefined where any bit of any source is."""
    total = unknowns[0]
    for unknown in unknowns[1:]:
        total = total | unknown
    return np.where(total != 0, ALL, np.uint32(0))


def spread_scalar(w: Waves, registers: Sequence[int]) -> Array:
    """For scalar instructions: 0xffffffff for the waves in which any of the registers has an undefined bit."""
    total = np.zeros(len(w.waves), np.uint32)
    for register in registers:
        if register >= SCALAR:
            total |= w.scalar_unknown[w.rows, register - SCALAR]
        else:
            total |= np.bitwise_or.reduce(np.where(w.active, w.vector_unknown[register, w.rows], 0), axis=1)
    return np.where(total != 0, ALL, np.uint32(0))


def apply_unknowns(w: Waves, writes: Sequence[int], unknowns: Unknowns) -> None:
    """Store the undefined bits of all written registers; those not listed are defined now."""
    given = dict(unknowns)
    for register in writes:
        mask = given.get(register)
        if mask is not None or register in w.unknown:
            w.set_unknown(register, 0 if mask is None else mask)
