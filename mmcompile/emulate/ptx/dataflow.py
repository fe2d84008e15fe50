"""Which registers may be read before they are written: found once per program, then followed only for those.

A definite-assignment analysis over the basic blocks (Aho et al., Compilers, 9.2). An assignment under a predicate
leaves the other lanes as they were. Registers that may be undefined somewhere, and what is computed from them, carry
a mask of the lanes in which they are defined; it is checked where a value becomes an address, a branch, a store or
an operand of a matrix instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmcompile.emulate.ptx.parser import Instruction, Operand
from mmcompile.emulate.ptx.program import Program
from mmcompile.emulate.ptx.registers import find_block_local, find_by_index, list_reads, list_registers, list_writes

_FROM_MEMORY = ("ld", "ldu", "atom", "ldmatrix", "tcgen05", "mbarrier", "elect", "activemask")
"""Instructions whose results are defined whatever their operands are: those are checked as addresses."""
_PACKING = 3
"""Operands of a cvt that packs two values into one register."""
_MATRIX = ("mma", "wgmma", "redux", "vote")


@dataclass(frozen=True)
class Check:
    """Registers that must be defined in the active lanes, and what they become."""

    registers: list[int]
    what: str


class Flow:
    """What is known about the registers of a program before it runs.

    Attributes:
        undefined: registers that may be read before they are written. tracked: these, and what depends on them.
        packed: tracked registers that only ``mov`` writes, always from the same number of parts. local, by_index: see
            ``registers``.
    """

    def __init__(self, program: Program) -> None:
        self.local, self.by_index = find_block_local(program), find_by_index(program)
        self.undefined = _find_undefined(program)
        self.tracked = self._close(program) if self.undefined else frozenset()
        self.packed = _find_packed(program, self.tracked)

    def list_checks(self, instruction: Instruction) -> list[Check]:
        """Where an undefined value would matter."""
        if not self.tracked or self.tracked.isdisjoint(list_reads(instruction)):
            return []
        checks = []
        for operand in instruction.operands:
            if operand.kind == "memory":
                checks.append(Check(self._pick(operand), "an address"))
        if instruction.predicate is not None and (instruction.op in ("bra", "st", "red", "atom", "cp", "exit")):
            checks.append(Check(self._pick(instruction.predicate), "a condition"))
        if instruction.op == "brx":
            checks.append(Check(self._pick(instruction.operands[0]), "a branch"))
        if instruction.op in ("st", "red", "atom", "stmatrix") and instruction.space not in ("param", "local"):
            values = instruction.operands[1 if instruction.op != "atom" else 2 :]
            checks += [Check(self._pick(value), "a stored value") for value in values]
        if instruction.op in _MATRIX:
            checks.append(Check([r for r in list_reads(instruction) if r in self.tracked], "an operand of all lanes"))
        return [check for check in checks if check.registers]

    def follow(
        self, instruction: Instruction, mask: str | None, moved_from: str, read_raw: Callable[[int], str]
    ) -> list[str]:
        """Python lines that update the masks after an instruction; ``moved_from``: the lanes that values come from."""
        written = [register for register in list_writes(instruction) if register in self.tracked]
        if not written:
            return []
        if instruction.op == "mov" and instruction.operands[0].kind == "vector":
            parts = self._unpack(instruction, mask)
            if parts:
                return parts
        value = self._combine(instruction, read_raw)
        if moved_from and value != "g.everyone":
            value = f"({value})[{moved_from}]"
        lines = [f"d = {value}"]
        for register in written:
            lines.append(f"K[{register}] = " + (f"where({mask}, d, K[{register}])" if mask else "d"))
            lines += self._note_parts(instruction, register, mask)
        return lines

    def _note_parts(self, instruction: Instruction, register: int, mask: str | None) -> list[str]:
        """Masks of the parts of a register that is only ever packed from parts: compilers leave some undefined."""
        if register not in self.packed:
            return []
        masks = [self._mask(part) for part in instruction.operands[1].parts]
        return [
            f"K[{register}, {n}] = " + (f"where({mask}, {part}, K[{register}, {n}])" if mask else part)
            for n, part in enumerate(masks)
        ]

    def _unpack(self, instruction: Instruction, mask: str | None) -> list[str]:
        """Masks of the results of taking a packed register apart; none if its parts are not followed."""
        (source,) = self._pick(instruction.operands[1])
        results = instruction.operands[0].parts
        if self.packed.get(source) != len(results):
            return []
        return [
            f"K[{r}] = " + (f"where({mask}, K[{source}, {n}], K[{r}])" if mask else f"K[{source}, {n}]")
            for n, part in enumerate(results)
            for r in self._pick(part)
        ]

    def _combine(self, instruction: Instruction, read_raw: Callable[[int], str]) -> str:
        """In which lanes the result is defined."""
        if instruction.op in _FROM_MEMORY:
            return "g.everyone"
        if instruction.op == "selp":
            first, second, predicate = instruction.operands[1:4]
            base = predicate.base if predicate.kind == "not" and predicate.base else predicate
            sign = "~" if predicate.kind == "not" else ""
            chosen = f"where({sign}{read_raw(base.index)}, {self._mask(first)}, {self._mask(second)})"
            return f"{chosen} & K[{base.index}]" if base.index in self.tracked else chosen
        sources = dict.fromkeys(register for register in list_reads(instruction) if register in self.tracked)
        if instruction.predicate is not None:
            sources.pop(instruction.predicate.index, None)
        if instruction.op == "cvt" and len(instruction.operands) == _PACKING:
            # Compilers fill the half that they do not need with anything: it takes two undefined halves to matter.
            return " | ".join(self._mask(operand) for operand in instruction.operands[1:])
        return " & ".join(f"K[{register}]" for register in sources) or "g.everyone"

    def _mask(self, operand: Operand) -> str:
        registers = self._pick(operand)
        return f"K[{registers[0]}]" if registers else "g.everyone"

    def _pick(self, operand: Operand) -> list[int]:
        return [register for register in list_registers(operand) if register in self.tracked]

    def _close(self, program: Program) -> frozenset[int]:
        """The undefined registers and all that is computed from them."""
        tracked, size = set(self.undefined), 0
        while len(tracked) > size:
            size = len(tracked)
            for instruction in program.instructions:
                if instruction.op not in _FROM_MEMORY and not tracked.isdisjoint(list_reads(instruction)):
                    tracked.update(list_writes(instruction))
        return frozenset(tracked)


def _find_packed(program: Program, tracked: frozenset[int]) -> dict[int, int]:
    """Number of parts of the tracked registers that are only written by packing that many parts."""
    counts: dict[int, set[int]] = {}
    for instruction in program.instructions:
        packs = instruction.op == "mov" and instruction.operands[1].kind == "vector"
        for register in tracked.intersection(list_writes(instruction)):
            counts.setdefault(register, set()).add(len(instruction.operands[1].parts) if packs else 0)
    return {register: found.pop() for register, found in counts.items() if len(found) == 1 and 0 not in found}


def _find_undefined(program: Program) -> frozenset[int]:
    """Registers that some path reads before an unconditional assignment; sets of registers are bits of an int."""
    blocks = range(len(program.starts) - 1)
    effects = [_summarise(program.block_instructions(block)) for block in blocks]
    everything = (1 << len(program.register_widths)) - 1
    following = [_list_successors(program, block) for block in blocks]
    entry = {block: everything for block in blocks}
    entry[0] = 0
    reached, pending = {0}, [0]
    while pending:
        block = pending.pop()
        after = entry[block] | effects[block][1]
        for successor in following[block]:
            if entry[successor] & ~after or successor not in reached:
                entry[successor] &= after
                reached.add(successor)
                pending.append(successor)
    found = 0
    for block in reached:
        found |= effects[block][0] & ~entry[block]
    return frozenset(register for register in range(len(program.register_widths)) if found >> register & 1)


def _summarise(instructions: list[Instruction]) -> tuple[int, int]:
    """Registers that a block reads before it assigns them, and registers that it assigns for certain."""
    exposed = assigned = 0
    for instruction in instructions:
        for register in list_reads(instruction):
            exposed |= (1 << register) & ~assigned
        if instruction.predicate is None:
            for register in list_writes(instruction):
                assigned |= 1 << register
    return exposed, assigned


def _list_successors(program: Program, block: int) -> list[int]:
    """Blocks that may follow."""
    last = program.instructions[program.starts[block + 1] - 1]
    following = [block + 1] if block + 2 < len(program.starts) else []
    if last.op == "bra":
        return [*last.targets, *(following if last.predicate is not None else [])]
    if last.op == "brx":
        return list(last.targets)
    if last.op == "exit" and last.predicate is None:
        return []
    return following
