"""Packed arithmetic of four 8- or 4-bit floats: mul, add, sub and fma of e4m3x4, e5m2x4, e2m1x4 (sm_107)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate import formats
from mmcompile.emulate.ptx.data_types import WIDTH
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.instructions.table import runtime
from mmcompile.emulate.ptx.parser import Instruction

Array = npt.NDArray[Any]
_FOUR = re.compile(r"u?e\dm\d(p4)?x4$")


def translate_four(emitter: Emitter, instruction: Instruction) -> bool:
    """Translate ``mul.e4m3x4.e2m1x4.e4m3x4.satfinite d, a, b`` and its like; False if the types are others."""
    types = [m for m in instruction.modifiers if _FOUR.match(m)]
    if not types:
        return False
    if len(types) != len(instruction.operands) or types[0] not in ("e4m3x4", "e5m2x4"):
        emitter.refuse("types of packed operands")
    if {"rz", "rm", "rp"} & set(instruction.modifiers):
        emitter.refuse("rounding mode")
    sources = [
        emitter.full_source(operand, f"b{8 * WIDTH[kind]}")
        for operand, kind in zip(instruction.operands[1:], types[1:], strict=True)
    ]
    saturates = "satfinite" in instruction.modifiers
    call = f"compute_four({instruction.op!r}, {types}, [{', '.join(sources)}], {saturates})"
    emitter.put(instruction.operands[0], call, "b32", packed=True)
    return True


@runtime
def compute_four(op: str, types: list[str], sources: list[Array], saturates: bool) -> Array:
    """Four operations per lane, each exact and then rounded once."""
    values = [_unpack(kind, source) for kind, source in zip(types[1:], sources, strict=True)]
    if op == "mul":
        result = values[0] * values[1]
    elif op == "fma":
        result = values[0] * values[1] + values[2]
    else:
        result = values[0] + values[1] if op == "add" else values[0] - values[1]
    codes = formats.encode(types[0][:4], result, saturate=saturates)
    return np.ascontiguousarray(codes).view(np.uint32).ravel()


def _unpack(kind: str, source: Array) -> Array:
    """Lanes to float64 values [lanes, 4]."""
    name = kind.removesuffix("x4").removesuffix("p4").removeprefix("u")
    if kind == "e2m1x4":
        codes = np.stack([(source >> np.uint16(4 * k)).astype(np.uint8) & np.uint8(15) for k in range(4)], 1)
    else:
        codes = source.view(np.uint8).reshape(-1, 4)
    return formats.decode(name, codes).astype(np.float64)
