"""PTX data types: their width, and the numpy expressions that read and write them in unsigned storage.

A register is stored as an array of unsigned integers, one per lane; predicates are bools. Values of f16 and bf16 are
computed as float32; packed types (f16x2, bf16x2, f32x2) as arrays of twice as many elements.
"""

from __future__ import annotations

import re

WIDTH = {
    "pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4,
    "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "u16x2": 4,
    "s16x2": 4, "e4m3x2": 2, "e5m2x2": 2, "e2m1x2": 1, "e2m3x2": 2, "e3m2x2": 2, "ue8m0x2": 2, "tf32": 4, "e4m3x4": 4,
    "e2m1x4": 2, "e2m1p4x4": 4, "e5m2x4": 4, "ue4m3x4": 4, "b128": 16,
}  # fmt: skip
"""Bytes of a value of a type (PTX ISA, Fundamental Types; packed types); 0 for predicates."""

_VIEWS = {
    "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64", "f32": "float32", "f64": "float64",
    "f32x2": "float32", "u16x2": "uint16", "s16x2": "int16", "f16": "float16", "f16x2": "float16",
}  # fmt: skip
_NUMBER = re.compile(r"[sbu]\d+$")
PACKED_FLOATS = ("f16x2", "bf16x2", "f32x2")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def is_integer(data_type: str) -> bool:
    """Whether the type is an integer or a bit type: u32, s16, b64 ..."""
    return bool(_NUMBER.match(data_type))


def storage(data_type: str) -> str:
    """Name of the numpy type in which a value of the PTX type is stored: ``uint32`` for f32."""
    return f"uint{8 * WIDTH[data_type]}"


def element(data_type: str) -> str:
    """Name of the numpy type that a value of the PTX type is computed in, as far as it is a view of the storage."""
    return _VIEWS.get(data_type, storage(data_type))


def unpack(expression: str, data_type: str) -> str:
    """Expression of the value of a stored array (see the module)."""
    if data_type in ("f16", "f16x2"):
        return f"{expression}.view(float16).astype(float32)"
    if data_type == "bf16":
        return f"decode_bf16({expression})"
    if data_type == "bf16x2":
        return f"decode_bf16({expression}.view(uint16))"
    if data_type in _VIEWS:
        return f"{expression}.view({_VIEWS[data_type]})"
    return expression


def pack(expression: str, data_type: str) -> str:
    """Expression of the storage of a computed value: the inverse of ``unpack``, rounding f16 and bf16 to nearest."""
    if data_type == "f16":
        return f"encode_f16({expression})"
    if data_type == "bf16":
        return f"encode_bf16({expression})"
    if data_type == "f16x2":
        return f"encode_f16({expression}).view(uint32)"
    if data_type == "bf16x2":
        return f"encode_bf16({expression}).view(uint32)"
    if data_type in _VIEWS:
        return f"({expression}).view({storage(data_type)})"
    return expression
