"""Operands of the text: registers, constants, and functions that read them for all selected waves."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.gfx950.state import EXEC, M0, SCALAR, SCC, VCC, Waves

Array = npt.NDArray[Any]
Reader = Callable[[Waves], Array]

_NAMED = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "exec": (EXEC, 2), "exec_lo": (EXEC, 1),
          "exec_hi": (EXEC + 1, 1), "m0": (M0, 1), "scc": (SCC, 1), "flat_scratch": (102, 2),
          "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1), "xnack_mask": (104, 2)}  # fmt: skip
_REGISTER = re.compile(r"^([vsa])(\d+)$|^([vsa])\[(\d+):(\d+)\]$")
_SYMBOL = re.compile(r"^([.\w$]+)@rel32@(lo|hi)\+(\d+)$")
_SIGN, _REST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class Operand:
    """A decoded operand.

    Attributes:
        kind: what it is. index: first register: vector registers 0..511 (accumulation registers from 256 on), or
            scalar registers by their encoding (vcc 106, m0 124, exec 126). count: dwords. value: of a constant, as a
            Python integer or float. negate, absolute: float source modifiers, in this order of application: |x|, -x.
        extend: ``sext(...)`` of SDWA.
    """

    kind: Literal["vector", "scalar", "integer", "float", "symbol", "off"]
    index: int = 0
    count: int = 1
    value: float = 0
    text: str = ""
    negate: bool = False
    absolute: bool = False
    extend: bool = False

    def list_registers(self, first: int = 0, count: int | None = None) -> list[int]:
        """Identifiers of the registers (scalar ones from SCALAR on); none for constants."""
        if self.kind not in ("vector", "scalar"):
            return []
        base = self.index + first + (SCALAR if self.kind == "scalar" else 0)
        return list(range(base, base + (self.count - first if count is None else count)))


@functools.lru_cache(maxsize=4096)
def parse_operand(text: str) -> Operand:
    """Decode one operand text. Raises EmulationFault("malformed assembly")."""
    inner = text
    for prefix, flag in (("-", "negate"), ("neg(", "negate"), ("|", "absolute"), ("abs(", "absolute"),
                         ("sext(", "extend")):  # fmt: skip
        if inner.startswith(prefix) and not re.match(r"^-[\d.]", inner):
            closing = {"-": 0, "|": 1}.get(prefix, 1)
            operand = parse_operand(inner[len(prefix) : len(inner) - closing])
            return replace(
                operand,
                negate=operand.negate or flag == "negate",
                absolute=operand.absolute or flag == "absolute",
                extend=operand.extend or flag == "extend",
            )
    match = _REGISTER.match(text)
    if match:
        letter = match[1] or match[3]
        first = int(match[2] or match[4])
        count = 1 if match[2] else int(match[5]) - first + 1
        if letter == "s":
            return Operand("scalar", first, count)
        return Operand("vector", first + (256 if letter == "a" else 0), count)
    if text in _NAMED:
        return Operand("scalar", *_NAMED[text])
    if text in ("off", "null"):
        return Operand("off", count=0)
    return _parse_constant(text)


def _parse_constant(text: str) -> Operand:
    if re.match(r"^-?(0x[0-9a-fA-F]+|\d+)$", text):
        return Operand("integer", value=int(text, 0))
    if re.match(r"^-?\d*\.\d*(e[+-]?\d+)?$", text):
        return Operand("float", value=float(text))
    if re.match(r"^[.\w$]+(@rel32@(lo|hi)\+\d+)?$", text) and not text.startswith("src_"):
        return Operand("symbol", text=text)
    raise EmulationFault("malformed assembly", f"cannot read the operand {text!r}")


def match_symbol(text: str) -> tuple[str, str] | None:
    """``name@rel32@lo+4`` to (name, "lo")."""
    match = _SYMBOL.match(text)
    return (match[1], match[2]) if match else None


def find_constant(operand: Operand, width: Literal[16, 32, 64] = 32, *, floating: bool = True) -> int:
    """Bits of a constant for an operand of ``width`` bits; integers are sign-extended."""
    if operand.kind == "float":
        code = {16: "<e", 32: "<f", 64: "<d"}[width if floating else 32]
        raw = struct.pack(code, operand.value)
        return int.from_bytes(raw, "little")
    if operand.kind != "integer":
        raise EmulationFault("malformed assembly", f"operand {operand.text!r} is not a number")
    return int(operand.value) & ((1 << width) - 1)


def read_bits(operand: Operand, part: int = 0, width: Literal[16, 32, 64] = 32) -> Reader:
    """Reader of one dword for every lane: uint32 [waves, 64], or [waves, 1] or [1, 1] where it is uniform."""
    if operand.kind == "vector":
        index = operand.index + part
        return lambda w: w.vector[index, w.rows]
    if operand.kind == "scalar":
        first = operand.index + part
        return lambda w: w.scalar[w.rows, first : first + 1]
    bits = find_constant(operand, width)
    if operand.kind == "integer" and part:
        bits = find_constant(operand, 64) >> 32
    constant = np.full((1, 1), bits & 0xFFFFFFFF, np.uint32)
    return lambda w: constant


def modify(operand: Operand, reader: Reader) -> Reader:
    """Apply |x| and -x of a 32-bit float."""
    if operand.absolute and operand.negate:
        return lambda w: reader(w) | _SIGN
    if operand.absolute:
        return lambda w: reader(w) & _REST
    if operand.negate:
        return lambda w: reader(w) ^ _SIGN
    return reader


def read_float(operand: Operand, part: int = 0) -> Reader:
    """Reader as float32, with source modifiers."""
    reader = modify(operand, read_bits(operand, part))
    return lambda w: reader(w).view(np.float32)


def read_wide(operand: Operand) -> Reader:
    """Reader of 64 bits for every lane: uint64 [waves, 64], or [waves, 1] or [1, 1]."""
    if operand.kind in ("integer", "float"):
        constant = np.full((1, 1), find_constant(operand, 64), np.uint64)
        return lambda w: constant
    low, high = read_bits(operand), read_bits(operand, 1)
    if operand.count == 1:
        return lambda w: low(w).astype(np.uint64)
    return lambda w: np.stack((low(w), high(w)), axis=-1).view(np.uint64)[..., 0]


def read_mask(operand: Operand) -> Reader:
    """Reader of a lane mask in a scalar register pair: bool [waves, 64]."""
    if operand.kind == "scalar":
        index = operand.index
        return lambda w: w.read_lanes(index)
    lanes = np.full((1, 64), bool(operand.value), np.bool_)
    return lambda w: lanes


def read_scalar(operand: Operand, width: Literal[32, 64] = 32) -> Reader:
    """Reader of a scalar operand for every wave: uint32 or uint64 [waves] or [1]."""
    if operand.kind == "scalar":
        first = operand.index
        if width == 64:
            return lambda w: w.read_pair(first)
        return lambda w: w.scalar[w.rows, first]
    if operand.kind == "vector":
        raise EmulationFault("malformed assembly", "a scalar operand is needed")
    dtype = np.uint64 if width == 64 else np.uint32
    constant = np.full(1, find_constant(operand, width, floating=width == 32), dtype)
    return lambda w: constant
