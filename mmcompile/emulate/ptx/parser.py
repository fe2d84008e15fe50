"""PTX text to a module: functions with their statements, parameters, shared and global variables; and operands.

PTX ISA sections: Syntax; State Spaces, Types, and Variables; Instruction Operands; Directives.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.data_types import WIDTH

OperandKind = Literal[
    "register",  # register: index, width in bytes (0: predicate)
    "immediate",  # value: int
    "float",  # value: float
    "vector",  # parts
    "memory",  # base, offset, parts: the coordinates and other operands inside the brackets
    "pair",  # parts: d|p
    "not",  # base: a negated predicate
    "sink",  # _
    "special",  # name: %tid.x ...
    "shared",  # name: a variable in shared memory
    "global",  # name: a variable in global or constant memory
    "parameter",  # offset in the kernel's parameters
    "local",  # offset in the thread's local memory
    "slots",  # a parameter of a called function: registers by offset
]
ADDRESS_SPACES = ("global", "shared", "param", "local", "const")
_LITERAL = re.compile(r"-?(0[xX][\da-fA-F]+|0[0-7]*|[1-9]\d*)[uU]?$")
_BITS_LITERAL = re.compile(r"0[fFdD]([\da-fA-F]+)$")
_MEMORY = re.compile(r"(.+?)\s*([+-]\s*-?\s*(?:0x[\da-fA-F]+|\d+)[uU]?)?$")
_MODULE_VARIABLE = re.compile(
    r"(?:^|(?<=;))\s*(?:\.(?:visible|extern|weak)\s+)*\.(shared|global|const)\s+([^;]*);", re.MULTILINE
)
_VARIABLE = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*\{?([^};]*)\}?)?\s*$")


@dataclass(frozen=True, eq=False)
class Operand:
    """One operand; which fields count depends on ``kind`` (see ``OperandKind``)."""

    kind: OperandKind
    index: int = -1
    width: int = 0
    value: int | float = 0
    base: Operand | None = None
    offset: int = 0
    parts: tuple[Operand, ...] = ()
    name: str = ""
    slots: dict[int, Operand] = field(default_factory=dict)

    @property
    def is_constant(self) -> bool:
        """An integer or float literal."""
        return self.kind in ("immediate", "float")

    @property
    def integer(self) -> int:
        """The value of an immediate operand."""
        if self.kind != "immediate":
            raise EmulationFault("malformed assembly", f"a literal integer is needed, not a {self.kind}")
        return int(self.value)

    def elements(self) -> tuple[Operand, ...]:
        """The parts of a vector or pair; otherwise the operand itself."""
        return self.parts if self.kind in ("vector", "pair") else (self,)


@dataclass(eq=False)
class Instruction:
    """One instruction: ``@!predicate op.modifiers operands``; ``targets``: block numbers of a branch."""

    op: str
    modifiers: tuple[str, ...]
    operands: list[Operand]
    line: int
    text: str
    predicate: Operand | None = None
    negated: bool = False
    labels: list[str] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    @property
    def form(self) -> str:
        """Opcode with modifiers."""
        return ".".join([self.op, *self.modifiers])

    @property
    def type(self) -> str:
        """The last modifier, in most instructions the type."""
        return self.modifiers[-1] if self.modifiers else ""

    @property
    def space(self) -> str:
        """Address space named by a modifier: global, shared, param, local, const, or generic."""
        names = (m.split("::")[0] for m in self.modifiers)
        return next((n for n in names if n in ADDRESS_SPACES), "generic")


@dataclass(frozen=True)
class Statement:
    """A piece of a function body: "open" and "close" of a scope, "label", "directive" or "instruction"."""

    kind: Literal["open", "close", "label", "directive", "instruction"]
    text: str
    line: int


@dataclass(frozen=True)
class Function:
    """A function: parameters by name as (offset, size) in bytes, names of the return parameters, statements."""

    name: str
    parameters: dict[str, tuple[int, int]]
    parameter_bytes: int
    returns: list[str]
    body: list[Statement]


@dataclass
class Module:
    """A parsed text. ``shared``: offset of each static shared variable, None for the dynamic one."""

    text: str
    functions: dict[str, Function] = field(default_factory=dict)
    shared: dict[str, int | None] = field(default_factory=dict)
    static_shared_bytes: int = 0
    globals: dict[str, bytes] = field(default_factory=dict)

    def add_shared(self, declaration: str) -> None:
        """A ``.shared`` variable, given what follows the word."""
        alignment, size, name, count, _ = parse_variable(declaration)
        if count is None:
            self.shared[name] = None
            return
        start = math.ceil(self.static_shared_bytes / alignment) * alignment
        self.shared[name], self.static_shared_bytes = start, start + size * count


def parse_variable(declaration: str) -> tuple[int, int, str, int | None, str]:
    """Alignment, element size, name, number of elements (None: extern) and initialiser of ``.align 4 .b8 x[3]``."""
    match = _VARIABLE.match(declaration.strip())
    if not match or match[2] not in WIDTH:
        raise EmulationFault("malformed assembly", f"unknown variable declaration: {declaration[:80]}")
    size = WIDTH[match[2]]
    count = None if match[4] == "" else int(match[4] or 1)
    return int(match[1] or size), size, match[3], count, match[5] or ""


def split_commas(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def parse_operand(text: str, resolve: Callable[[str], Operand | None]) -> Operand:
    """One operand; ``resolve`` finds registers, variables and special registers by name."""
    text = text.strip()
    if text[0] == "{":
        return Operand("vector", parts=tuple(parse_operand(part, resolve) for part in split_commas(text[1:-1])))
    if text[0] == "[":
        return _parse_memory(split_commas(text[1:-1]), resolve)
    if "|" in text:
        return Operand("pair", parts=tuple(parse_operand(part, resolve) for part in text.split("|")))
    if text == "_":
        return Operand("sink")
    if text[0] == "!":
        return Operand("not", base=parse_operand(text[1:], resolve))
    literal = _parse_literal(text)
    found = literal or resolve(text)
    if found is None:
        raise EmulationFault("malformed assembly", f"unknown operand {text!r}")
    return found


def _parse_literal(text: str) -> Operand | None:
    bits = _BITS_LITERAL.match(text)
    if bits and len(bits[1]) in (8, 16):
        return Operand("float", value=struct.unpack(">f" if len(bits[1]) == 8 else ">d", bytes.fromhex(bits[1]))[0])
    if _LITERAL.match(text):
        digits = text.rstrip("uU")
        return Operand("immediate", value=int(digits, 8 if re.match(r"-?0\d", digits) else 0))
    if re.match(r"-?\d+\.\d*([eE][-+]?\d+)?$", text):
        return Operand("float", value=float(text))
    return None


def _parse_memory(parts: list[str], resolve: Callable[[str], Operand | None]) -> Operand:
    match = _MEMORY.match(parts[0])
    assert match
    offset = int(match[2].replace(" ", "").replace("+-", "-").rstrip("uU"), 0) if match[2] else 0
    others = tuple(parse_operand(part, resolve) for part in parts[1:])
    return Operand("memory", base=parse_operand(match[1], resolve), offset=offset, parts=others)


def parse_module(text: str) -> Module:
    """The whole text. Raises EmulationFault("malformed assembly")."""
    clean = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    clean = re.sub(r"//[^\n]*", "", clean)
    clean = re.sub(r"^[ \t]*\.(loc|file)\b[^\n]*", "", clean, flags=re.M)
    cluster = re.search(r"\.reqnctapercluster\s+([\d, ]+)", clean)
    if cluster and math.prod(int(n) for n in cluster[1].split(",")) > 1:
        raise EmulationFault("unknown instruction", "clusters of several blocks are not modelled")
    module = Module(text)
    outside = _parse_functions(module, clean)
    for match in _MODULE_VARIABLE.finditer(outside):
        if match[1] == "shared":
            module.add_shared(match[2])
        else:
            _, size, name, count, initialiser = parse_variable(match[2])
            values = [int(value, 0) for value in initialiser.split(",")] if initialiser else []
            contents = b"".join((value % (1 << 8 * size)).to_bytes(size, "little") for value in values)
            module.globals[name] = contents.ljust(size * (count or 1), b"\0")
    return module


def _parse_functions(module: Module, text: str) -> str:
    """Fill in the functions; return the text outside of their bodies."""
    header = re.compile(r"\.(entry|func)\s+(\([^)]*\)\s*)?([\w$.]+)\s*\(([^)]*)\)[^{;]*([{;])")
    outside, position = "", 0
    while match := header.search(text, position):
        outside += text[position : match.start()]
        position = match.end()
        if match[5] == ";":
            continue
        parameters, total = _parse_parameters(match[4])
        returns = re.findall(r"[\w$]+(?=\s*\)?$)", (match[2] or "").strip())
        body, position = _scan_body(text, match.end(), text.count("\n", 0, match.end()) + 1)
        module.functions[match[3]] = Function(match[3], parameters, total, returns, body)
    return outside + text[position:]


def _parse_parameters(text: str) -> tuple[dict[str, tuple[int, int]], int]:
    """Offset and size of each parameter, and the size of all."""
    layout, offset = {}, 0
    for declaration in split_commas(text):
        name = re.search(r"([\w$]+)(?:\[(\d+)\])?$", declaration.strip())
        kind = re.search(r"\.(b8|[bus]\d+|f\d+)", declaration)
        if not name or not kind:
            raise EmulationFault("malformed assembly", f"unknown parameter declaration: {declaration[:80]}")
        width = WIDTH[kind[1]]
        aligned = re.search(r"\.align\s+(\d+)", declaration.split(".ptr")[0])
        alignment = int(aligned[1]) if aligned else width
        offset = math.ceil(offset / alignment) * alignment
        layout[name[1]] = (offset, width * int(name[2] or 1))
        offset += layout[name[1]][1]
    return layout, offset


_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")


def _scan_body(text: str, position: int, line: int) -> tuple[list[Statement], int]:
    """Statements of a body that starts after its opening brace, and the position after the closing one."""
    statements: list[Statement] = []
    depth, last = 1, position
    while depth:
        while position < len(text) and text[position] in " \t\n\r;":
            position += 1
        if position == len(text):
            raise EmulationFault("malformed assembly", "the text ends inside a function", line)
        line += text.count("\n", last, position)
        last = position
        if text[position] in "{}":
            opens = text[position] == "{"
            depth += 1 if opens else -1
            statements.append(Statement("open" if opens else "close", text[position], line))
            position += 1
        elif label := _LABEL.match(text, position):
            statements.append(Statement("label", label[1], line))
            position = label.end()
        else:
            end = text.find(";", position)
            if end < 0:
                raise EmulationFault("malformed assembly", "a statement without semicolon", line)
            statement = " ".join(text[position:end].split())
            statements.append(Statement("directive" if statement[0] == "." else "instruction", statement, line))
            position = end + 1
    return statements[:-1], position
