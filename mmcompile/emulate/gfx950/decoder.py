"""From instructions to basic blocks of decoded steps; the families are asked in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.gfx950 import (
    atomics,
    control,
    convert,
    cross_lane,
    lds,
    memory_global,
    mfma,
    scalar_alu,
    vector_alu,
    vector_float,
)
from mmcompile.emulate.gfx950.decoded import Decoded
from mmcompile.emulate.gfx950.parser import Instruction, Kernel
from mmcompile.emulate.gfx950.state import EXEC, SCALAR

FAMILIES: tuple[Callable[[Instruction], Decoded | None], ...] = (
    control.build, scalar_alu.build, cross_lane.build, lds.build, memory_global.build, atomics.build, convert.build,
    mfma.build, vector_float.build, vector_alu.build,
)  # fmt: skip


@dataclass
class Block:
    """Instructions that run one after the other with one execution mask.

    Attributes:
        first: index of the first instruction. target: block of its last instruction's branch, else -1. following:
            block behind it. refreshes: the execution mask changes at its end.
    """

    first: int
    steps: list[Decoded] = field(default_factory=list)
    control: str = ""
    target: int = -1
    following: int = -1
    refreshes: bool = False
    covered: bool = False


def decode(i: Instruction) -> Decoded | None:
    """The instruction ready to run, None if no family knows it. Raises EmulationFault("malformed assembly")."""
    try:
        for build in FAMILIES:
            decoded = build(i)
            if decoded is not None:
                return decoded.finish(i)
    except EmulationFault as fault:
        raise EmulationFault(fault.kind, fault.what, i.line, i.text) from fault
    except (ValueError, IndexError, KeyError) as error:
        raise EmulationFault("malformed assembly", f"cannot decode this form ({error!r})", i.line, i.text) from error
    return None


def build_blocks(kernel: Kernel) -> tuple[list[Block], dict[int, int]]:
    """Blocks in the order of the text from the start of the kernel on, and the block of each instruction that begins
    one. Raises EmulationFault("unknown instruction")."""
    control.resolve_symbols(kernel)
    starts = set(kernel.labels.values()) | {kernel.start}
    blocks: list[Block] = []
    block_of: dict[int, int] = {}
    current: Block | None = None
    for index in range(kernel.start, len(kernel.instructions)):
        i = kernel.instructions[index]
        if current is None or index in starts:
            current = Block(index, following=len(blocks) + 1)
            block_of[index] = len(blocks)
            blocks.append(current)
        decoded = decode(i)
        if decoded is None:
            raise EmulationFault("unknown instruction", i.form, i.line, i.text)
        decoded.index = index
        current.steps.append(decoded)
        if decoded.control or SCALAR + EXEC in decoded.writes or SCALAR + EXEC + 1 in decoded.writes:
            current.control = decoded.control
            current.refreshes = not decoded.control
            current = None
    for block in blocks:
        name = block.steps[-1].target
        if name:
            if name not in kernel.labels:
                last = block.steps[-1]
                raise EmulationFault("malformed assembly", f"no label {name!r}", last.line, last.text)
            block.target = block_of[kernel.labels[name]]
    return blocks, block_of
