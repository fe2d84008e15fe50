"""Which registers an instruction reads and writes, and which registers live within one basic block only."""

from __future__ import annotations

from mmcompile.emulate.ptx.data_types import WIDTH
from mmcompile.emulate.ptx.parser import Instruction, Operand
from mmcompile.emulate.ptx.program import Program

WITHOUT_RESULT = frozenset(
    ("st", "red", "bar", "barrier", "bra", "brx", "exit", "fence", "membar", "cp", "stmatrix", "tensormap",
     "setmaxnreg", "griddepcontrol", "nanosleep", "trap", "brkpt",
     "prefetch", "prefetchu", "discard", "applypriority", "pmevent")
)  # fmt: skip
"""Instructions whose operands are all sources."""
BY_INDEX = ("wgmma", "tcgen05")
"""Instructions that access ``Group.registers`` by index, now or when they complete."""


def list_registers(operand: Operand) -> list[int]:
    """Indices of the registers that an operand names."""
    if operand.kind == "register":
        return [operand.index]
    inner = [*operand.parts, *([operand.base] if operand.base else [])]
    return [index for part in inner for index in list_registers(part)]


def list_reads(instruction: Instruction) -> list[int]:
    """Registers that an instruction reads, its predicate among them."""
    found = [instruction.predicate.index] if instruction.predicate else []
    sources = instruction.operands[count_results(instruction) :]
    if instruction.op == "ld" and instruction.space == "param":
        found += _list_slots(instruction, instruction.operands[1], len(instruction.operands[0].elements()))
    return found + [index for operand in sources for index in list_registers(operand)]


def list_writes(instruction: Instruction) -> list[int]:
    """Registers that an instruction writes (under its predicate)."""
    if instruction.op == "st" and instruction.space == "param":
        return _list_slots(instruction, instruction.operands[0], len(instruction.operands[1].elements()))
    results = instruction.operands[: count_results(instruction)]
    return [index for operand in results for index in list_registers(operand)]


def count_results(instruction: Instruction) -> int:
    """Number of operands at the front that are written."""
    if instruction.op in WITHOUT_RESULT or not instruction.operands:
        return 0
    if instruction.op == "wgmma":  # the accumulators, which it reads only if its scale-d is not zero
        return int(instruction.modifiers[0] == "mma_async")
    if instruction.op == "tcgen05":
        if instruction.modifiers[0] != "ld":
            return 0
        return next(n for n, operand in enumerate(instruction.operands) if operand.kind == "memory")
    return 0 if instruction.operands[0].kind == "memory" else 1


def _list_slots(instruction: Instruction, place: Operand, count: int) -> list[int]:
    """Registers of a parameter of an inlined call."""
    if place.base is None or place.base.kind != "slots":
        return []
    offsets = [place.offset + number * WIDTH[instruction.type] for number in range(count)]
    return [place.base.slots[offset].index for offset in offsets if offset in place.base.slots]


def find_block_local(program: Program) -> frozenset[int]:
    """Registers that are written, in all lanes that are there, before they are read, and occur in one block only.

    Fragments stop at the ends of blocks, so no lane that is elsewhere can need them: lanes that are not active may
    get any value.
    """
    block_of: dict[int, int] = {}
    excluded: set[int] = set()
    for block in range(len(program.starts) - 1):
        for instruction in program.block_instructions(block):
            reads, writes = list_reads(instruction), list_writes(instruction)
            for register in reads:
                if block_of.get(register) != block:
                    excluded.add(register)
            for register in writes:
                fresh = register not in block_of
                if (fresh and instruction.predicate is not None) or block_of.setdefault(register, block) != block:
                    excluded.add(register)
            if instruction.op in BY_INDEX:
                excluded.update(reads, writes)
    return frozenset(block_of) - excluded


def find_by_index(program: Program) -> frozenset[int]:
    """Registers that change without an assignment in generated code."""
    return frozenset(
        register
        for instruction in program.instructions
        if instruction.op in BY_INDEX
        for register in [*list_reads(instruction), *list_writes(instruction)]
    )
