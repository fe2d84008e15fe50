"""Basic blocks of a program as Python functions, compiled when they are first entered; and what is unknown of it."""

from __future__ import annotations

from functools import lru_cache

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import UnknownInstruction
from mmcompile.emulate.ptx.dataflow import Flow
from mmcompile.emulate.ptx.emitter import Block, Emitter
from mmcompile.emulate.ptx.instructions import load_translations
from mmcompile.emulate.ptx.parser import Instruction
from mmcompile.emulate.ptx.program import Program, load_program


class Translator:
    """The blocks of one program, each in a variant for all lanes and one for some of the lanes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow = Flow(program)
        self.notes: set[str] = set()
        self._blocks: dict[tuple[int, bool], Block] = {}

    def find(self, block: int, masked: bool) -> Block:
        """The function of a basic block. Raises EmulationFault("unknown instruction")."""
        found = self._blocks.get((block, masked))
        if found is None:
            emitter = Emitter(self.program, masked=masked, flow=self.flow)
            instructions = self.program.block_instructions(block)
            for instruction in instructions:
                translate(emitter, instruction)
            found = emitter.compile(f"PTX line {instructions[0].line}", block + 1)
            self._blocks[block, masked] = found
            self.notes |= emitter.notes
        return found


def translate(emitter: Emitter, instruction: Instruction) -> None:
    """Append one instruction. Raises EmulationFault("unknown instruction")."""
    translation = load_translations().get(instruction.op)
    if translation is None:
        emitter.instruction = instruction
        raise emitter.refuse()
    emitter.translate(instruction, translation)


@lru_cache(32)
def load_translator(assembly: str, entry: str) -> Translator:
    """The translator of the kernel ``entry`` of a text; translated blocks are kept for the next launch."""
    return Translator(load_program(assembly, entry))


def list_refused(program: Program) -> list[UnknownInstruction]:
    """Instructions of the program that have no translation, by form, in the order of their first line."""
    found: dict[str, tuple[int, int]] = {}
    for instruction in program.instructions:
        try:
            translate(Emitter(program, masked=False), instruction)
        except EmulationFault as fault:
            if fault.kind != "unknown instruction":
                raise
            line, count = found.get(instruction.form, (instruction.line, 0))
            found[instruction.form] = (line, count + 1)
    return [UnknownInstruction(form, line, count) for form, (line, count) in found.items()]
