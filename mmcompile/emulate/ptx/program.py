"""One kernel of a module as a flat list of instructions in basic blocks: functions inlined, registers numbered."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.data_types import WIDTH
from mmcompile.emulate.ptx.parser import (
    Function,
    Instruction,
    Module,
    Operand,
    Statement,
    parse_module,
    parse_operand,
    parse_variable,
    split_commas,
)

SPECIAL_REGISTERS = {
    "%laneid": 4, "%warpid": 4, "%smid": 4, "%nsmid": 4, "%clock": 4, "%clock64": 8, "%globaltimer": 8,
    "%globaltimer_lo": 4, "%cluster_ctarank": 4, "%cluster_nctarank": 4, "%dynamic_smem_size": 4,
    "%total_smem_size": 4, "%lanemask_lt": 4, "%lanemask_le": 4, "%lanemask_gt": 4, "%lanemask_ge": 4,
    "%lanemask_eq": 4, "%locality_domain_id": 4,
}  # fmt: skip
"""Bytes of the special registers (PTX ISA, Special Registers)."""
for _name in ("tid", "ntid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid"):
    SPECIAL_REGISTERS |= {f"%{_name}.{axis}": 4 for axis in "xyz"}

_IGNORED_DIRECTIVES = (".pragma", ".callprototype", ".noreturn", ".loc", ".file")
_PREDICATE = re.compile(r"@(!?)\s*([\w$%]+)\s+")
_CALL = re.compile(r"(?:\(([^)]*)\)\s*,\s*)?([\w$.]+)\s*(?:,\s*\(([^)]*)\))?$")
CONVERGENT = ("elect", "ldmatrix", "stmatrix", "wmma")
"""Instructions that all lanes of a warp execute together, besides those with the modifier .sync."""


class Scope:
    """Names of a block of statements: operands, labels and branch targets."""

    def __init__(self, parent: Scope | None, number: int) -> None:
        self.parent, self.number = parent, number
        self.operands: dict[str, Operand] = {}
        self.labels: set[str] = set()
        self.branch_targets: dict[str, list[str]] = {}

    def find(self, name: str) -> Operand | None:
        """The operand of a name, from the innermost scope outwards."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.operands:
                return scope.operands[name]
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        """The unique spelling of a label."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return f"{scope.number}:{name}"
            scope = scope.parent
        return None

    def find_targets(self, table: str) -> list[str]:
        """The labels of a list of branch targets."""
        scope: Scope | None = self
        while scope is not None:
            if table in scope.branch_targets:
                return scope.branch_targets[table]
            scope = scope.parent
        raise EmulationFault("malformed assembly", f"unknown branch targets {table}")


class Program:
    """A kernel ready for translation.

    Attributes:
        instructions: in text order, functions inlined at their calls, closed by an exit. register_widths: bytes of
            every register, 0 for predicates. local_bytes: local memory of a thread. starts: index of the first
            instruction of every basic block. gates: blocks that only whole warps may enter. shared: offsets of the
            static shared variables, None for the dynamic one. lines: the text.
    """

    def __init__(self, module: Module, entry: str) -> None:
        if entry not in module.functions:
            raise EmulationFault("malformed assembly", f"no kernel {entry!r}; there are {sorted(module.functions)}")
        self.module, self.entry = module, entry
        self.lines = module.text.split("\n")
        self.instructions: list[Instruction] = []
        self.register_widths: list[int] = []
        self.register_names: list[str] = []
        self.local_bytes = 0
        self._labels: dict[str, int] = {}
        self._scopes = 0
        function = module.functions[entry]
        self.parameters, self.parameter_bytes = function.parameters, function.parameter_bytes
        names = {name: Operand("parameter", width=8, offset=at) for name, (at, _) in function.parameters.items()}
        _Inliner(self, function, names, None).run()
        self.instructions.append(Instruction("exit", (), [], 0, "exit"))
        self._find_blocks()

    @property
    def total(self) -> int:
        """Number of instructions of the text."""
        return len({instruction.line for instruction in self.instructions if instruction.line})

    def add_register(self, width: int, name: str) -> Operand:
        """A new register of ``width`` bytes."""
        self.register_widths.append(width)
        self.register_names.append(name)
        return Operand("register", index=len(self.register_widths) - 1, width=width, name=name)

    def count(self, block: int) -> int:
        """Number of instructions of a basic block."""
        return self.starts[block + 1] - self.starts[block]

    def block_instructions(self, block: int) -> list[Instruction]:
        """The instructions of a basic block."""
        return self.instructions[self.starts[block] : self.starts[block + 1]]

    def _find_blocks(self) -> None:
        """Cut at labels, after branches and barriers, and before the first warp-wide instruction of a block."""
        cuts = {0} | set(self._labels.values())
        for index, instruction in enumerate(self.instructions):
            if instruction.op in ("bra", "brx", "exit", "nanosleep") or is_barrier(instruction):
                cuts.add(index + 1)
        gates, passed = set(), False
        for index, instruction in enumerate(self.instructions):
            passed = passed and index not in cuts
            if needs_whole_warp(instruction) and not passed:
                gates.add(index)
                passed = True
        size = len(self.instructions)
        self.starts = [*sorted((cuts | gates) & set(range(size))), size]
        self.gates = [start in gates for start in self.starts]
        numbers = {start: block for block, start in enumerate(self.starts)}
        for instruction in self.instructions:
            instruction.targets = [numbers[self._labels[label]] for label in instruction.labels]


def is_barrier(instruction: Instruction) -> bool:
    """bar and barrier of the block (not of the warp or the cluster)."""
    return instruction.op in ("bar", "barrier") and not {"warp", "cluster"} & set(instruction.modifiers)


def needs_whole_warp(instruction: Instruction) -> bool:
    """Whether the lanes of a warp must execute the instruction together."""
    if is_barrier(instruction):
        return instruction.op == "bar" or "aligned" in instruction.modifiers
    return "sync" in instruction.modifiers or instruction.op in CONVERGENT


class _Inliner:
    """Appends the instructions of one function, or of one inlined call, to the program."""

    def __init__(self, program: Program, function: Function, names: dict[str, Operand], end: str | None) -> None:
        self.program, self.function, self.end = program, function, end
        self.scope = self._open(None)
        self.scope.operands |= names
        self.last_label = ""
        self.line = 0
        self._pending: list[tuple[Instruction, Scope, list[str]]] = []
        self._tables: list[tuple[Instruction, Scope, str]] = []

    def _open(self, parent: Scope | None) -> Scope:
        self.program._scopes += 1
        return Scope(parent, self.program._scopes)

    def run(self) -> None:
        """All statements. Raises EmulationFault("malformed assembly") with the line."""
        for statement in self.function.body:
            self.line = statement.line
            try:
                self._add(statement)
            except EmulationFault as fault:
                if fault.line:
                    raise
                raise EmulationFault(fault.kind, fault.what, statement.line, statement.text) from fault
        for instruction, scope, table in self._tables:
            self._pending.append((instruction, scope, scope.find_targets(table)))
        for instruction, scope, names in self._pending:
            for name in names:
                label = scope.find_label(name)
                if label is None:
                    raise EmulationFault("malformed assembly", f"unknown label {name}", instruction.line)
                instruction.labels.append(label)

    def _add(self, statement: Statement) -> None:
        if statement.kind == "open":
            self.scope = self._open(self.scope)
        elif statement.kind == "close":
            assert self.scope.parent
            self.scope = self.scope.parent
        elif statement.kind == "label":
            self.scope.labels.add(statement.text)
            self.program._labels[f"{self.scope.number}:{statement.text}"] = len(self.program.instructions)
            self.last_label = statement.text
        elif statement.kind == "directive":
            self._declare(statement.text)
        else:
            self._add_instruction(statement.text)

    def _declare(self, text: str) -> None:
        directive, _, rest = text.partition(" ")
        if directive == ".reg":
            kind, names = rest.split(None, 1)
            for name in split_commas(names):
                several = re.match(r"([\w$%]+)<(\d+)>$", name)
                for one in [f"{several[1]}{k}" for k in range(int(several[2]))] if several else [name]:
                    self.scope.operands[one] = self.program.add_register(WIDTH[kind[1:]], one)
        elif directive == ".param":
            self.scope.operands[parse_variable(rest)[2]] = Operand("slots")
        elif directive == ".shared":
            self.program.module.add_shared(rest)
        elif directive == ".local":
            alignment, size, name, count, _ = parse_variable(rest)
            start = math.ceil(self.program.local_bytes / max(alignment, 16)) * max(alignment, 16)
            self.scope.operands[name] = Operand("local", width=8, offset=start)
            self.program.local_bytes = start + size * (count or 1)
        elif directive == ".branchtargets":
            self.scope.branch_targets[self.last_label] = split_commas(rest)
        elif directive not in _IGNORED_DIRECTIVES:
            raise EmulationFault("malformed assembly", f"unknown directive {directive}")

    def _resolve(self, name: str) -> Operand | None:
        found = self.scope.find(name)
        if found is not None:
            return found
        if name in SPECIAL_REGISTERS:
            return Operand("special", width=SPECIAL_REGISTERS[name], name=name)
        if name in self.program.module.shared:
            return Operand("shared", width=4, name=name)
        if name in self.program.module.globals:
            return Operand("global", width=8, name=name)
        return None

    def _add_instruction(self, text: str) -> None:
        predicate, negated, rest = None, False, text
        if match := _PREDICATE.match(text):
            predicate, negated, rest = self.scope.find(match[2]), match[1] == "!", text[match.end() :]
            if predicate is None:
                raise EmulationFault("malformed assembly", f"unknown predicate {match[2]}")
        name, _, arguments = rest.partition(" ")
        op, *modifiers = name.split(".")
        instruction = Instruction(op, tuple(modifiers), [], self.line, text, predicate, negated)
        if op == "call":
            self._inline(instruction, arguments)
            return
        if op in ("ret", "exit"):
            self._add_return(instruction)
        elif op == "bra":
            self._pending.append((instruction, self.scope, [arguments.strip()]))
        elif op == "brx":
            index, table = split_commas(arguments)
            instruction.operands = [parse_operand(index, self._resolve)]
            self._tables.append((instruction, self.scope, table))
        else:
            instruction.operands = [parse_operand(part, self._resolve) for part in split_commas(arguments)]
        if op == "st" and modifiers[0] == "param":
            self._add_slots(instruction)
        self.program.instructions.append(instruction)

    def _add_return(self, instruction: Instruction) -> None:
        """Leave the inlined function, or the kernel."""
        if instruction.op == "ret" and self.end is not None:
            instruction.op, instruction.labels = "bra", [self.end]
        else:
            instruction.op = "exit"

    def _add_slots(self, instruction: Instruction) -> None:
        """Parameters of called functions are registers, one for each variable and offset."""
        place, value = instruction.operands
        width = WIDTH[instruction.type]
        if place.base is None or place.base.kind != "slots":
            raise EmulationFault("malformed assembly", "st.param to something that is not a parameter of a call")
        for number in range(len(value.elements())):
            offset = place.offset + number * width
            if offset not in place.base.slots:
                place.base.slots[offset] = self.program.add_register(width, "parameter")

    def _inline(self, call: Instruction, arguments: str) -> None:
        match = _CALL.match(arguments.strip())
        function = self.program.module.functions.get(match[2]) if match else None
        if match is None or function is None or call.predicate is not None:
            raise EmulationFault("unknown instruction", "a call of an undefined function, or under a predicate")
        find: Callable[[str], Operand | None] = self.scope.find
        names: dict[str, Operand] = {}
        passed = [*zip(function.parameters, split_commas(match[3] or ""), strict=True)]
        for name, value in [*passed, *zip(function.returns, split_commas(match[1] or ""), strict=True)]:
            operand = find(value)
            if operand is None:
                raise EmulationFault("malformed assembly", f"unknown parameter {value}")
            names[name] = operand
        end = f"end of call {len(self.program._labels)} at {len(self.program.instructions)}"
        _Inliner(self.program, function, names, end).run()
        self.program._labels[end] = len(self.program.instructions)


@lru_cache(32)
def load_program(assembly: str, entry: str) -> Program:
    """The kernel ``entry`` of a text. Raises EmulationFault("malformed assembly")."""
    return Program(parse_module(assembly), entry)
