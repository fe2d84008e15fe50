"""cvt: between integers, floats, and the packed 8-, 6- and 4-bit floats (PTX ISA, Data Movement and Conversion)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.data_types import WIDTH, element, is_integer
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction

Array = npt.NDArray[Any]
_SMALL = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")
_TO_INTEGER = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_DIRECTED = ("rz", "rm", "rp")


@translates("cvt")
def translate_cvt(emitter: Emitter, instruction: Instruction) -> None:
    """cvt of every form; the last two modifiers are the types of the result and of the source."""
    result, source = instruction.modifiers[-2:]
    if "rs" in instruction.modifiers or any("scaled" in m for m in instruction.modifiers):
        emitter.refuse("stochastic rounding or scaling")
    if result in _SMALL:
        _convert_to_small(emitter, instruction)
    elif source in _SMALL or source == "ue8m0x2":
        _convert_from_small(emitter, instruction)
    elif result == "ue8m0x2":
        _convert_to_scale(emitter, instruction)
    elif len(instruction.operands) == 3 and source == "f32" and result in ("f16x2", "bf16x2"):
        _convert_pair(emitter, instruction)
    elif len(instruction.operands) != 2:
        emitter.refuse("number of operands")
    elif result == "tf32":
        _convert_to_tf32(emitter, instruction)
    elif is_integer(result):
        _convert_to_integer(emitter, instruction)
    else:
        _convert_to_float(emitter, instruction)


def _clamp(instruction: Instruction, expression: str) -> str:
    if "relu" in instruction.modifiers:
        expression = f"clamp_below({expression})"
    if "sat" in instruction.modifiers:
        expression = f"saturate({expression})"
    return expression


def _to_half(instruction: Instruction, expression: str, half: str, source: str) -> str:
    """Expression of f16 or bf16 bits of an f32 expression, with the instruction's rounding."""
    expression = _clamp(instruction, expression)
    mode = next((m for m in _DIRECTED if m in instruction.modifiers), "")
    if "satfinite" in instruction.modifiers:
        expression = f"clamp_finite({expression}, {half!r})"
    if mode:
        return f"round_half({expression}, {half!r}, {mode!r})"
    if source == "f64":
        expression = f"narrow_odd({expression})"
    return f"encode_{half}({expression})"


def _convert_pair(emitter: Emitter, instruction: Instruction) -> None:
    """Two f32 to f16x2 or bf16x2, the first to the upper half."""
    half = instruction.modifiers[-2][:-2]
    high, low = (_to_half(instruction, emitter.full_source(x, "f32"), half, "f32") for x in instruction.operands[1:3])
    emitter.put(instruction.operands[0], f"join_halves({low}, {high})", "b32", packed=True)


def _convert_to_small(emitter: Emitter, instruction: Instruction) -> None:
    """Two floats to two codes; the first operand goes to the upper bits. Saturates (.satfinite is mandatory)."""
    result, source = instruction.modifiers[-2:]
    name = result[:-2]
    if set(_DIRECTED) & set(instruction.modifiers):
        emitter.refuse("rounding mode")
    if source == "f32":
        high, low = (_clamp(instruction, emitter.full_source(x, "f32")) for x in instruction.operands[1:3])
    elif source in ("f16x2", "bf16x2"):
        both = emitter.new_name()
        emitter.append(f"{both} = {_clamp(instruction, emitter.full_source(instruction.operands[1], source))}")
        high, low = f"{both}[1::2]", f"{both}[0::2]"
    else:
        emitter.refuse("source type")
    upper, lower = (f"encode({name!r}, {x})" for x in (high, low))
    if name == "e2m1":
        emitter.put(instruction.operands[0], f"({upper} << uint8(4)) | {lower}", "b8", packed=True)
    else:
        expression = f"({upper}.astype(uint16) << uint16(8)) | {lower}.astype(uint16)"
        emitter.put(instruction.operands[0], expression, "b16", packed=True)


def _convert_from_small(emitter: Emitter, instruction: Instruction) -> None:
    """Two codes to f16x2 or bf16x2."""
    result, source = instruction.modifiers[-2:]
    if result not in ("f16x2", "bf16x2") or len(instruction.operands) != 2:
        emitter.refuse("types")
    name, codes = source[:-2], emitter.new_name()
    kind, number, shift = ("b8", "uint8", 4) if name == "e2m1" else ("b16", "uint16", 8)
    emitter.append(f"{codes} = {emitter.full_source(instruction.operands[1], kind)}")
    parts = (f"{codes} & {number}({(1 << shift) - 1})", f"{codes} >> {number}({shift})")
    low, high = (_to_half(instruction, f"decode({name!r}, {part})", result[:-2], "f32") for part in parts)
    emitter.put(instruction.operands[0], f"join_halves({low}, {high})", "b32", packed=True)


def _convert_to_scale(emitter: Emitter, instruction: Instruction) -> None:
    """Two floats to two ue8m0 codes, rounding towards zero or up (.rp)."""
    source = instruction.modifiers[-1]
    up = "rp" in instruction.modifiers
    if source == "f32":
        high, low = (emitter.full_source(x, "f32") for x in instruction.operands[1:3])
    else:
        both = emitter.full_source(instruction.operands[1], source)
        high, low = f"{both}[1::2]", f"{both}[0::2]"
    codes = [f"encode_scale({x}, {up}, {'satfinite' in instruction.modifiers})" for x in (high, low)]
    emitter.put(instruction.operands[0], f"({codes[0]} << uint16(8)) | {codes[1]}", "b16", packed=True)


def _convert_to_tf32(emitter: Emitter, instruction: Instruction) -> None:
    """f32 with 10 mantissa bits: .rna (ties away from zero), .rn or .rz."""
    if "satfinite" in instruction.modifiers or "relu" in instruction.modifiers:
        emitter.refuse("satfinite or relu")
    x = emitter.full_source(instruction.operands[1], "b32")
    rounded = x
    if "rna" in instruction.modifiers:
        rounded = f"({x} + uint32(0x1000))"
    elif "rn" in instruction.modifiers:
        rounded = f"({x} + uint32(0xFFF) + (({x} >> uint32(13)) & uint32(1)))"
    special = f"({x} & uint32(0x7F800000)) == uint32(0x7F800000)"
    expression = f"where({special}, {x}, {rounded} & uint32(0xFFFFE000))"
    emitter.put(instruction.operands[0], expression, "b32")


def _convert_to_integer(emitter: Emitter, instruction: Instruction) -> None:
    """To an integer: from integers modulo 2**n or saturating, from floats always saturating, NaN to 0."""
    result, source = instruction.modifiers[-2:]
    x = emitter.source(instruction.operands[1], source)
    if is_integer(source):
        if "sat" in instruction.modifiers:
            x = f"saturate_integer({x}, {element(result)!r})"
        emitter.put(instruction.operands[0], f"{x}.astype({element(result)})", result)
        return
    if "ftz" in instruction.modifiers and source == "f32":
        x = f"flush({x})"
    rounding = next((_TO_INTEGER[m] for m in instruction.modifiers if m in _TO_INTEGER), None)
    if rounding is None:
        emitter.refuse("a float to an integer without rounding mode")
    emitter.put(instruction.operands[0], f"float_to_integer({rounding}({x}), {element(result)!r})", result)


def _convert_to_float(emitter: Emitter, instruction: Instruction) -> None:
    """To f16, bf16, f32 or f64, from an integer or a float."""
    result, source = instruction.modifiers[-2:]
    target, operand = instruction.operands
    x = emitter.source(operand, source)
    if "ftz" in instruction.modifiers and source == "f32":
        x = f"flush({x})"
    mode = next((m for m in _DIRECTED if m in instruction.modifiers), "")
    rounding = next((_TO_INTEGER[m] for m in instruction.modifiers if m in _TO_INTEGER), None)
    if rounding:
        x = f"{rounding}({x})"
    if is_integer(source) and WIDTH[source] == 8 and (mode or result != "f64"):
        x = f"integer_to_odd({x})"
    elif is_integer(source):
        x = f"{x}.astype(float64)"
    if result in ("f16", "bf16"):
        wide = "f64" if is_integer(source) else source
        emitter.put(target, _to_half(instruction, x, result, wide), "b16", packed=True)
        return
    if result == "f64":
        emitter.put(target, _clamp(instruction, f"{x}.astype(float64)"), result)
        return
    if mode:
        x = f"round_directed({x}.astype(float64), {mode!r})"
    x = _clamp(instruction, f"{x}.astype(float32)")
    emitter.put(target, f"flush({x})" if "ftz" in instruction.modifiers else x, result)


# ---------------------------------------------------------------------- runtime


@runtime
def join_halves(low: Array, high: Array) -> Array:
    """Two arrays of 16-bit values as one of 32-bit values."""
    joined = np.empty((len(low), 2), np.uint16)
    joined[:, 0], joined[:, 1] = low, high
    return joined.view(np.uint32).ravel()


@runtime
def float_to_integer(values: Array, name: str) -> Array:
    """Rounded floats to integers, saturating; NaN becomes 0."""
    kind = np.dtype(name)
    limits = np.iinfo(kind)
    wide = np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=2e30, neginf=-2e30)
    above, below = wide >= float(limits.max) + 1, wide < float(limits.min)
    inside = np.where(above | below, 0, wide).astype(kind)
    return np.where(above, limits.max, np.where(below, limits.min, inside)).astype(kind)


@runtime
def saturate_integer(values: Array, name: str) -> Array:
    """Integers clamped to the range of another integer type."""
    limits, own = np.iinfo(np.dtype(name)), np.iinfo(values.dtype)
    return np.clip(values, max(limits.min, own.min), min(limits.max, own.max))


@runtime
def integer_to_odd(values: Array) -> Array:
    """64-bit integers to f64 rounded to odd, so that rounding to f32 afterwards is correct."""
    nearest = values.astype(np.float64)
    limit = float(np.iinfo(values.dtype).max)
    safe = np.where(nearest >= limit, 0, nearest)
    back = safe.astype(values.dtype)
    error = np.where(nearest >= limit, 1, (back > values).astype(np.int64) - (back < values))
    bits = nearest.view(np.int64)
    step = np.where(error * np.sign(nearest) > 0, -1, 1)
    return np.where((error != 0) & (bits & 1 == 0), (bits + step).view(np.float64), nearest)


@runtime
def round_half(values: Array, half: str, mode: str) -> Array:
    """f32 or f64 to f16 or bf16 bits towards zero ("rz"), minus infinity ("rm") or plus infinity ("rp")."""
    magnitude = np.abs(values).astype(np.float64)
    encode = _encode_magnitude_f16 if half == "f16" else _encode_magnitude_bf16
    code = encode(magnitude)
    negative = np.signbit(values)
    exact = _decode_magnitude(code, half) == magnitude
    away = (mode == "rp") != negative
    if mode != "rz":
        code = np.where(away & ~exact, code + 1, code)
    code = np.where(negative, code | 0x8000, code).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), code)


def _encode_magnitude_f16(magnitude: Array) -> Array:
    """The largest f16 that is not above a magnitude."""
    with np.errstate(over="ignore"):
        nearest = magnitude.astype(np.float16)
    code = nearest.view(np.uint16)
    return np.where(nearest.astype(np.float64) > magnitude, code - np.uint16(1), code)


def _encode_magnitude_bf16(magnitude: Array) -> Array:
    """The largest bf16 that is not above a magnitude."""
    with np.errstate(over="ignore"):
        nearest = magnitude.astype(np.float32)
    bits = nearest.view(np.uint32)
    bits = np.where(nearest.astype(np.float64) > magnitude, bits - np.uint32(1), bits)
    return (bits >> np.uint32(16)).astype(np.uint16)


def _decode_magnitude(code: Array, half: str) -> Array:
    if half == "f16":
        return code.astype(np.uint16).view(np.float16).astype(np.float64)
    return (code.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


@runtime
def clamp_finite(values: Array, half: str) -> Array:
    """.satfinite: values beyond the largest finite f16 or bf16 become it."""
    largest = 65504.0 if half == "f16" else float(np.uint32(0x7F7F0000).view(np.float32))
    return np.clip(values, -values.dtype.type(largest), values.dtype.type(largest))


@runtime
def encode_scale(values: Array, up: bool, saturates: bool) -> Array:
    """Magnitudes to ue8m0 codes as uint16: powers of two, rounded towards zero or up; NaN is 255."""
    mantissa, exponent = np.frexp(np.abs(values).astype(np.float64))
    code = exponent - 1 + 127
    if up:
        code = code + (mantissa > 0.5)
    code = np.where(values == 0, 0, np.clip(code, 0, 254 if saturates else 255))
    return np.where(np.isnan(values), 255, np.where(np.isinf(values), 254, code)).astype(np.uint16)
