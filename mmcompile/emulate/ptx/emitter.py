"""Translates a basic block into one Python function over numpy lanes: the interface of the instruction files.

In generated code ``g`` is the group, ``R`` the list of registers (arrays of unsigned integers, one element per lane;
bools for predicates), ``m`` the mask of the active lanes and ``K`` the definedness of the registers that may be
undefined (see ``dataflow``). Arrays in ``R`` are never changed in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.data_types import HALVES, PACKED_FLOATS, WIDTH, element, is_integer, pack, storage, unpack
from mmcompile.emulate.ptx.dataflow import Flow
from mmcompile.emulate.ptx.parser import Instruction, Operand
from mmcompile.emulate.ptx.program import Program
from mmcompile.emulate.ptx.register_file import RegisterFile, is_exact_view

PARAMETER_WINDOW, LOCAL_WINDOW = 0x5A00_0000, 0x5B00_0000
"""Generic addresses of the kernel's parameters and of a thread's local memory."""

_USES_GROUP = re.compile(r"\bg\b")
Block = Callable[[Any, list[Any], Any], Any]


class Emitter:
    """Python lines of one basic block.

    Attributes:
        program: of the block. masked: whether only some of the lanes may be active. instruction: being translated.
        mask: expression of the active lanes at this instruction, None if all are. ended: whether the block returned.
        notes: what a run of the block cannot check, for the report. moved_from: name of the lane numbers that the
            instruction's values come from, if it moves them between lanes.
    """

    NAMES: ClassVar[dict[str, Any]] = {
        "np": np, "where": np.where, "decode_bf16": formats.decode_bf16, "encode_bf16": formats.encode_bf16,
        "encode_f16": formats.encode_f16, "decode": formats.decode, "encode": formats.encode,
        "fma32": formats.fma32,
        **{name: getattr(np, name) for name in (
            "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
        )},
    }  # fmt: skip
    """Names of generated code, besides those that the instruction files add with ``runtime``."""

    def __init__(self, program: Program, *, masked: bool, flow: Flow | None = None) -> None:
        self.program, self.masked, self.flow = program, masked, flow
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(Emitter.NAMES)
        self.ended = False
        self.notes: set[str] = set()
        self.moved_from = ""
        self.mask: str | None = "m" if masked else None
        self.instruction = program.instructions[0]
        self._constants: dict[tuple[bytes, str], str] = {}
        self._count = 0
        local, by_index = (flow.local, flow.by_index) if flow else (frozenset[int](), frozenset[int]())
        self._file = RegisterFile(self.append, self.new_name, local, by_index)
        self._scalar_only: bool | None = None

    # ------------------------------------------------------------------ the block

    def translate(self, instruction: Instruction, translation: Callable[[Emitter, Instruction], None]) -> None:
        """Append the lines of one instruction. Raises EmulationFault("unknown instruction")."""
        self.instruction, self.mask = instruction, "m" if self.masked else None
        self._scalar_only, self.moved_from = None, ""
        if instruction.predicate is not None and instruction.op != "bra":
            self.append(f"q = {self.condition()}" + (" & m" if self.masked else ""))
            self.mask = "q"
        start = len(self.lines)
        checks = self.flow.list_checks(instruction) if self.flow else []
        for check in checks:
            self.append(f"g.check_defined(K, {check.registers}, {check.what!r}, {self.mask})")
        try:
            translation(self, instruction)
        except (IndexError, KeyError, AttributeError, ValueError, TypeError) as error:
            self.refuse(f"operands not understood ({type(error).__name__}: {error})")
        if self.flow and not self.ended:
            self.lines.extend(self.flow.follow(instruction, self.mask, self.moved_from, self._file.read_raw))
        if any(_USES_GROUP.search(line) for line in self.lines[start:]):
            self.lines.insert(start, f"g.line = {instruction.line}")

    def compile(self, name: str, following: int) -> Block:
        """The function (group, registers, mask) of the block; it returns the next block, or a control record."""
        if not self.ended:
            self.append(f"return {following}")
        head = ["def block(g, R, m):", *([" K = g.defined"] if self.flow and self.flow.tracked else [])]
        source = "\n".join([*head, *(f" {line}" for line in self.lines)])
        exec(compile(source, f"<{name}>", "exec"), self.names)
        block: Block = self.names["block"]
        return block

    # ------------------------------------------------------------------ for the instruction files

    def append(self, line: str) -> None:
        """One line of Python."""
        self.lines.append(line)

    def condition(self) -> str:
        """The predicate of the instruction, negated if need be."""
        assert self.instruction.predicate is not None
        value = self._file.read_raw(self.instruction.predicate.index)
        return f"~{value}" if self.instruction.negated else value

    def new_name(self) -> str:
        """A fresh local variable."""
        self._count += 1
        return f"t{self._count}"

    def constant(self, value: Any) -> str:
        """Name of a constant: a numpy scalar, or anything else that generated code needs."""
        if isinstance(value, (np.generic, np.ndarray)):
            value = np.asarray(value)
            key = (value.tobytes(), f"{value.dtype.str}{value.shape}")
            if key not in self._constants:
                self._constants[key] = f"k{len(self._constants)}"
                self.names[self._constants[key]] = value
            return self._constants[key]
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def refuse(self, reason: str = "") -> NoReturn:
        """Raise EmulationFault("unknown instruction")."""
        instruction = self.instruction
        what = instruction.form + (f": {reason}" if reason else "")
        raise EmulationFault("unknown instruction", what, instruction.line, instruction.text)

    def source(self, operand: Operand, data_type: str) -> str:
        """Expression of an operand read as a PTX type (see ``data_types``): an array, or a scalar for a constant."""
        if data_type == "pred":
            return self._predicate(operand)
        if operand.is_constant:
            return self._literal(operand, data_type)
        self._scalar_only = False
        if operand.kind == "vector":
            return unpack(f"({self._join(operand, data_type)})", data_type)
        if operand.kind == "register":
            if not operand.width:
                self.refuse("a predicate as a value")
            return self._file.read(operand.index, operand.width, data_type)
        expression, width = self._raw(operand)
        if width != WIDTH[data_type]:
            expression = f"{expression}.astype({storage(data_type)})"
        return unpack(expression, data_type)

    def full_source(self, operand: Operand, data_type: str) -> str:
        """Like ``source``, always an array with an element for each lane (two for packed types)."""
        if operand.is_constant and data_type not in PACKED_FLOATS:
            value = self.source(operand, data_type)
            self._scalar_only = False
            return self._fill(value)
        return self.source(operand, data_type)

    def registers(self, operand: Operand, data_type: str = "b32") -> str:
        """List expression of the parts of a vector (or of one operand), all of them full arrays."""
        return "[" + ", ".join(self.full_source(part, data_type) for part in operand.elements()) + "]"

    def address(self, operand: Operand) -> str:
        """Address of each lane of a memory operand, as uint32 or uint64."""
        if operand.kind != "memory" or operand.base is None:
            self.refuse("a memory operand is needed")
        base, offset = operand.base, operand.offset
        self._scalar_only = False
        if base.kind == "immediate":
            return f"g.full(uint64({base.integer + offset}))"
        expression, width = self._raw(base)
        if offset:
            kind = np.dtype(f"uint{8 * width}")
            return f"({expression} + {self.constant(kind.type(offset % (1 << 8 * width)))})"
        return expression

    def put(self, operand: Operand, expression: str, data_type: str, packed: bool = False) -> None:
        """Assign a value of a type to a register (or vector, sink) under the mask; ``packed``: as storage."""
        if operand.kind == "sink":
            return
        if operand.kind == "vector":
            self._put_vector(operand, expression if packed else pack(expression, data_type), data_type)
            return
        if operand.kind != "register":
            self.refuse(f"a {operand.kind} operand as destination")
        value, width = expression, WIDTH[data_type]
        if width > operand.width or (data_type == "pred") != (operand.width == 0):
            self.refuse("the type does not fit the destination register")
        if self._scalar_only:
            value = self._fill(value)
        kept = not packed and width == operand.width and is_exact_view(data_type)
        if data_type != "pred" and not kept:
            value = value if packed else pack(value, data_type)
            value = self._widen(value, data_type, operand.width) if width < operand.width else value
        predicated = self.instruction.predicate is not None
        self._file.write(operand.index, value, data_type if kept else "", self.mask, predicated)

    def put_all(self, operands: Sequence[Operand], call: str, data_type: str) -> None:
        """Assign the arrays that ``call`` returns (storage of the type) to the operands."""
        name = self.new_name()
        self.append(f"{name} = {call}")
        self._scalar_only = False
        for number, operand in enumerate(operands):
            self.put(operand, f"{name}[{number}]", data_type, packed=True)

    # ------------------------------------------------------------------ operands

    def _fill(self, expression: str) -> str:
        """A scalar in every lane; constants are kept by the group."""
        if expression in self.names and isinstance(self.names[expression], np.ndarray):
            value = self.names[expression]
            return f"g.keep({(value.dtype.str, value.tobytes())!r}, {expression})"
        return f"g.full({expression})"

    def _widen(self, value: str, data_type: str, width: int) -> str:
        """Sign-extend signed types, zero-extend others (PTX ISA, Operand Size Exceeding Instruction-Type Size)."""
        if data_type[0] == "s" and is_integer(data_type):
            return f"({value}).view(int{8 * WIDTH[data_type]}).astype(int{8 * width}).view(uint{8 * width})"
        return f"({value}).astype(uint{8 * width})"

    def _put_vector(self, operand: Operand, storage_expression: str, data_type: str) -> None:
        name, size = self.new_name(), 8 * WIDTH[data_type] // len(operand.parts)
        kind = storage(data_type)
        self.append(f"{name} = {storage_expression}")
        for number, part in enumerate(operand.parts):
            shifted = f"{name} >> {self.constant(np.dtype(kind).type(size * number))}" if number else name
            self.put(part, f"({shifted}).astype(uint{size})", f"b{size}", packed=True)

    def _predicate(self, operand: Operand) -> str:
        if operand.kind == "immediate":
            return f"g.full(np.bool_({operand.value != 0}))"
        self._scalar_only = False
        if operand.kind == "not" and operand.base is not None:
            return f"~{self._file.read_raw(operand.base.index)}"
        if operand.kind != "register" or operand.width:
            self.refuse("a predicate is needed")
        return self._file.read_raw(operand.index)

    def _literal(self, operand: Operand, data_type: str) -> str:
        kind = np.dtype(storage(data_type))
        if operand.kind == "float":
            if data_type in PACKED_FLOATS:
                self.refuse("a float literal of a packed type")
            value: Any = np.dtype("float64" if WIDTH[data_type] == 8 else "float32").type(operand.value)
            value = value.view(kind) if is_integer(data_type) else value
        else:
            value = kind.type(operand.integer % (1 << 8 * WIDTH[data_type]))
            if data_type in HALVES or data_type in PACKED_FLOATS:
                self._scalar_only = False
                return unpack(f"g.full({self.constant(value)})", data_type)
            value = value.view(element(data_type))
        if self._scalar_only is None:
            self._scalar_only = True
        return self.constant(value)

    def _join(self, operand: Operand, data_type: str) -> str:
        """The storage of a value whose parts are given, the lowest first."""
        kind, size = storage(data_type), 8 * WIDTH[data_type] // len(operand.parts)
        pieces = []
        for number, part in enumerate(operand.parts):
            piece = f"{self.full_source(part, f'b{size}')}.astype({kind})"
            pieces.append(f"({piece} << {self.constant(np.dtype(kind).type(size * number))})" if number else piece)
        return " | ".join(pieces)

    def _raw(self, operand: Operand) -> tuple[str, int]:
        """Storage expression of a full array, and its width in bytes (0: predicate)."""
        if operand.kind == "register":
            return self._file.read_raw(operand.index), operand.width
        if operand.kind == "special":
            return f"g.special({operand.name!r})", operand.width
        if operand.kind == "shared":
            return f"g.full(g.shared_address({operand.name!r}))", 4
        if operand.kind == "global":
            return f"g.full(g.global_addresses[{operand.name!r}])", 8
        if operand.kind in ("parameter", "local"):
            window = PARAMETER_WINDOW if operand.kind == "parameter" else LOCAL_WINDOW
            return f"g.full({self.constant(np.uint64(window + operand.offset))})", 8
        raise self.refuse(f"a {operand.kind} operand where a register is needed")
