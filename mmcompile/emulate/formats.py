"""Number formats of the emulated instructions: bf16, fp16, the 8, 6 and 4-bit floats, and a correctly rounded fma.

Formats: OCP 8-bit floating point (e4m3, e5m2) and OCP microscaling formats (e2m1, e2m3, e3m2, ue8m0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

_LAYOUTS = {"e4m3": (4, 3, 7, 127), "e5m2": (5, 2, 15, 124), "e2m1": (2, 1, 1, 8), "e2m3": (2, 3, 1, 32),
            "e3m2": (3, 2, 3, 32)}  # fmt: skip
"""Exponent bits, mantissa bits, bias, and number of finite non-negative codes."""
_NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7, "e2m3": 0x1F, "e3m2": 0x1F}
"""What a NaN becomes; formats without NaN give their largest value (PTX ISA, cvt)."""
_OVERFLOW = {"e4m3": (464.0, 0x7F), "e5m2": (61439.0, 0x7C)}
"""Without saturation: the largest magnitude that still rounds to a finite value, and the code of what lies above."""


def _list_values(name: str) -> npt.NDArray[np.float64]:
    """The finite non-negative values in the order of their codes."""
    _, mantissa_bits, bias, count = _LAYOUTS[name]
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + mantissa) * np.exp2(exponent.astype(np.float64) - bias)
    return np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)


def _make_table(name: str) -> Floats:
    """Value of each byte; formats of fewer than 8 bits ignore the upper ones."""
    exponent_bits, mantissa_bits, _, count = _LAYOUTS[name]
    sign, values = 1 << (exponent_bits + mantissa_bits), _list_values(name).astype(np.float32)
    table = np.full(2 * sign, np.nan, np.float32)
    table[:count], table[sign : sign + count] = values, -values
    if name == "e5m2":
        table[count], table[sign + count] = np.inf, -np.inf
    return np.tile(table, 256 // len(table))


_TABLES = {name: _make_table(name) for name in _LAYOUTS}
_MIDPOINTS = {name: (v[1:] + v[:-1]) / 2 for name in _LAYOUTS for v in (_list_values(name),)}


def decode_bf16(bits: Array) -> Floats:
    """bf16 bits to fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_bf16(values: Array) -> Halves:
    """fp32 to bf16 bits, to nearest even; every NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    codes, nan = rounded.astype(np.uint16), np.isnan(values)
    return np.where(nan, np.uint16(0x7FFF), codes) if nan.any() else codes


def decode_f16(bits: Array) -> Floats:
    """fp16 bits to fp32."""
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def encode_f16(values: Array) -> Halves:
    """fp32 or fp64 to fp16 bits, to nearest even; every NaN becomes 0x7fff."""
    with np.errstate(over="ignore"):
        bits = np.asarray(values).astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FFF), bits) if np.any(nan) else bits


def decode(name: str, codes: Array) -> Floats:
    """Codes (bytes, one value each) of "e4m3", "e5m2", "e2m1", "e2m3", "e3m2" or "ue8m0" to fp32."""
    if name == "ue8m0":
        value = np.exp2(np.minimum(codes, 254).astype(np.float32) - np.float32(127))
        return np.where(codes == 255, np.float32(np.nan), value)
    return _TABLES[name][codes.astype(np.uint8)]


def encode(name: str, values: Array, *, saturate: bool = True) -> Codes:
    """Floats to codes, to nearest even; ``saturate`` clamps to the largest finite value (PTX .satfinite)."""
    exponent_bits, mantissa_bits, _, _ = _LAYOUTS[name]
    middle, magnitude = _MIDPOINTS[name], np.abs(values).astype(np.float64)
    code = np.searchsorted(middle, magnitude)
    tie = middle[np.minimum(code, len(middle) - 1)] == magnitude
    code = code + (tie & ((code & 1) == 1))
    if not saturate and name in _OVERFLOW:
        limit, above = _OVERFLOW[name]
        code = np.where(magnitude > limit, above, code)
    sign = np.where(np.signbit(values), 1 << (exponent_bits + mantissa_bits), 0)
    return np.where(np.isnan(values), _NAN[name], code + sign).astype(np.uint8)


def unpack_nibbles(packed: Array) -> Codes:
    """Bytes [..., n] to e2m1 codes [..., 2n], the low nibble first."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], -1).astype(np.uint8)


def fma32(a: Array, b: Array, c: Array) -> Floats:
    """fp32 fused multiply-add, correctly rounded: the fp64 sum is rounded to odd before it is rounded to fp32.

    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".)
    """
    product, addend = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    with np.errstate(over="ignore"):
        result = total.astype(np.float32)
    # Two roundings only differ from one where the first result lies in the middle between two fp32 numbers.
    middle = (total.view(np.int64) & _LOWER_BITS) == _MIDDLE
    if middle.any() or (np.abs(result) <= _SMALLEST_NORMAL).any():
        return _round_once(product, addend, total)
    return np.asarray(result)


_LOWER_BITS, _MIDDLE = np.int64((1 << 29) - 1), np.int64(1 << 28)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def _round_once(product: Array, addend: Array, total: Array) -> Floats:
    """product + addend with its fp64 rounding ``total`` made odd, so that rounding to fp32 is correct."""
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    if inexact.any():
        step = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(inexact, (bits + step).view(np.float64), total)
    with np.errstate(over="ignore"):
        return np.asarray(total.astype(np.float32))
