"""Floating-point arithmetic of f32, f64, f16, bf16 and their packed pairs, and the approximations.

PTX ISA: Floating Point Instructions; Half Precision Floating-Point Instructions; Mixed Precision Floating Point
Instructions. Rounding to nearest even and the directed modes; .ftz for f32. The opcodes that integers have too
(add, mul, min ...) are told apart here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.data_types import PACKED_FLOATS, WIDTH, is_integer, storage
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.instructions import integer, packed
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction

Array = npt.NDArray[Any]
_DIRECTED = ("rz", "rm", "rp")


@translates("add", "sub")
def translate_add_or_subtract(emitter: Emitter, instruction: Instruction) -> None:
    """add and sub of every type."""
    if packed.translate_four(emitter, instruction):
        return
    if is_integer(instruction.type) or instruction.type in ("u16x2", "s16x2"):
        integer.translate_add(emitter, instruction)
        return
    sign = "+" if instruction.op == "add" else "-"
    a, b = _read(emitter, instruction)
    if mode := _find_directed(emitter, instruction):
        _put(emitter, instruction, f"round_directed(add_odd({a}, {'-' if sign == '-' else ''}{b}), {mode!r})")
        return
    _put(emitter, instruction, f"{a} {sign} {b}")


@translates("mul")
def translate_product(emitter: Emitter, instruction: Instruction) -> None:
    """mul of every type."""
    if packed.translate_four(emitter, instruction):
        return
    if is_integer(instruction.type):
        integer.translate_multiply(emitter, instruction)
        return
    a, b = _read(emitter, instruction)
    if mode := _find_directed(emitter, instruction):
        _put(emitter, instruction, f"round_directed({a}.astype(float64) * {b}, {mode!r})")
        return
    _put(emitter, instruction, f"{a} * {b}")


@translates("fma")
def translate_fma(emitter: Emitter, instruction: Instruction) -> None:
    """fma, rounded once."""
    if packed.translate_four(emitter, instruction):
        return
    a, b, c = _read(emitter, instruction)
    kind, mode = instruction.type, _find_directed(emitter, instruction)
    if kind == "f64":
        emitter.notes.add("fma.f64 is rounded twice")
        _put(emitter, instruction, f"{a} * {b} + {c}")
    elif mode:
        _put(emitter, instruction, f"round_directed(fma_odd({a}, {b}, {c}), {mode!r})")
    elif _result_type(instruction) in ("f32", "f32x2"):
        _put(emitter, instruction, f"fma32({a}, {b}, {c})")
    else:
        _put(emitter, instruction, f"narrow_odd(fma_odd({a}, {b}, {c}))")


@translates("div")
def translate_quotient(emitter: Emitter, instruction: Instruction) -> None:
    """div: exact rounding for .rn; .approx and .full (up to 2 units in the last place) are rounded correctly here."""
    if is_integer(instruction.type):
        integer.translate_divide(emitter, instruction)
        return
    if {"approx", "full"} & set(instruction.modifiers):
        emitter.notes.add(_NOTE_APPROXIMATE)
    a, b = _read(emitter, instruction)
    if mode := _find_directed(emitter, instruction):
        _put(emitter, instruction, f"round_directed({a}.astype(float64) / {b}, {mode!r})")
        return
    _put(emitter, instruction, f"{a} / {b}")


_NOTE_APPROXIMATE = (
    "approximations (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div with .approx or .full) are those of numpy in fp32,"
    " not of the hardware"
)
_FUNCTIONS = {
    "ex2": "np.exp2({0})", "lg2": "np.log2({0})", "rsqrt": "{1}(1) / np.sqrt({0})", "rcp": "{1}(1) / {0}",
    "sqrt": "np.sqrt({0})", "sin": "np.sin({0})", "cos": "np.cos({0})", "tanh": "np.tanh({0})",
}  # fmt: skip


@translates(*_FUNCTIONS)
def translate_function(emitter: Emitter, instruction: Instruction) -> None:
    """ex2, lg2, rsqrt, rcp, sqrt, sin, cos, tanh: numpy's results."""
    (x,) = _read(emitter, instruction)
    wide = "float64" if instruction.type == "f64" else "float32"
    if "rn" not in instruction.modifiers and not _find_directed(emitter, instruction):
        emitter.notes.add(_NOTE_APPROXIMATE)
    if mode := _find_directed(emitter, instruction):
        if instruction.op not in ("rcp", "sqrt"):
            emitter.refuse("rounding mode")
        value = _FUNCTIONS[instruction.op].format(f"{x}.astype(float64)", "float64")
        _put(emitter, instruction, f"round_directed({value}, {mode!r})")
        return
    _put(emitter, instruction, _FUNCTIONS[instruction.op].format(x, wide))


@translates("min", "max")
def translate_extreme(emitter: Emitter, instruction: Instruction) -> None:
    """min and max: the number if one is NaN, NaN with .NaN; .abs, .xorsign and three operands."""
    kind, modifiers, op = instruction.type, instruction.modifiers, instruction.op
    if is_integer(kind) or kind in ("u16x2", "s16x2"):
        a, b = (emitter.source(x, kind) for x in instruction.operands[1:3])
        result = f"np.{op}imum({a}, {b})"
        if "relu" in modifiers:
            result = f"np.maximum({result}, 0)"
        emitter.put(instruction.operands[0], result, kind)
        return
    values = _read(emitter, instruction)
    function = f"np.{op}imum" if "NaN" in modifiers else f"np.f{op}"
    sizes = [f"np.abs({x})" for x in values] if "abs" in modifiers else values
    result = f"order_zeros({function}, {sizes[0]}, {sizes[1]})"
    if len(values) == 3:
        result = f"order_zeros({function}, {result}, {sizes[2]})"
    if "xorsign" in modifiers:
        signs = " ^ ".join(f"np.signbit({x})" for x in values)
        result = f"np.copysign({result}, where({signs}, float32(-1), float32(1)))"
    _put(emitter, instruction, result)


@runtime
def order_zeros(function: Any, a: Array, b: Array) -> Array:
    """Minimum or maximum with -0 < +0, as PTX has it (numpy's result for equal operands is either of them)."""
    result = function(a, b)
    zero = result == 0
    if zero.any():
        both = np.signbit(a) | np.signbit(b) if function in (np.minimum, np.fmin) else np.signbit(a) & np.signbit(b)
        tied = zero & (np.asarray(a) == 0) & (np.asarray(b) == 0)
        result = np.where(tied, np.where(both, result.dtype.type(-0.0), result.dtype.type(0.0)), result)
    return np.asarray(result)


@translates("abs", "neg", "not", "cnot")
def translate_unary(emitter: Emitter, instruction: Instruction) -> None:
    """abs, neg (of floats: only the sign bit changes), not and cnot."""
    op, kind, (target, operand) = instruction.op, instruction.type, instruction.operands[:2]
    if op == "not":
        emitter.put(target, f"~{emitter.source(operand, kind)}", kind)
    elif op == "cnot":
        emitter.put(target, f"({emitter.source(operand, kind)} == 0).astype({storage(kind)})", kind)
    elif is_integer(kind):
        x = emitter.source(operand, kind if op == "abs" else f"u{kind[1:]}")
        emitter.put(target, f"np.abs({x})" if op == "abs" else f"(0 - {x})", kind if op == "abs" else f"u{kind[1:]}")
    else:
        bits = f"b{8 * WIDTH[kind]}"
        sign = {"f64": 1 << 63, "f32x2": 1 << 63 | 1 << 31, "f32": 1 << 31}.get(
            kind, 0x80008000 if kind in PACKED_FLOATS else 0x8000
        )
        value = emitter.source(operand, bits)
        if "ftz" in instruction.modifiers:
            value = f"flush({value}.view(float32)).view(uint32)"
        number = np.dtype(storage(kind)).type
        changed = f"{value} ^ {emitter.constant(number(sign))}"
        if op == "abs":
            changed = f"{value} & {emitter.constant(number(~sign & (1 << 8 * WIDTH[kind]) - 1))}"
        emitter.put(target, changed, bits, packed=True)


@translates("copysign")
def translate_copysign(emitter: Emitter, instruction: Instruction) -> None:
    """copysign: the sign of a, the magnitude of b."""
    kind = instruction.type
    a, b = (emitter.source(x, kind) for x in instruction.operands[1:3])
    emitter.put(instruction.operands[0], f"np.copysign({b}, {a})", kind)


@translates("testp")
def translate_test(emitter: Emitter, instruction: Instruction) -> None:
    """testp: the class of a float."""
    tests = {
        "finite": "np.isfinite({})", "infinite": "np.isinf({})", "number": "~np.isnan({})",
        "notanumber": "np.isnan({})",
    }  # fmt: skip
    x = emitter.full_source(instruction.operands[1], instruction.type)
    emitter.put(instruction.operands[0], tests[instruction.modifiers[0]].format(x), "pred")


# ---------------------------------------------------------------------- operands and results


def _result_type(instruction: Instruction) -> str:
    """The type of the result: in mixed precision (add.f32.bf16) the first of the two."""
    types = [m for m in instruction.modifiers if m in WIDTH]
    return types[0]


def _read(emitter: Emitter, instruction: Instruction) -> list[str]:
    """The source operands; in mixed precision the last one (of add and fma) has the type of the result."""
    types = [m for m in instruction.modifiers if m in WIDTH]
    known = instruction.op in ("add", "sub", "fma") and types[0] == "f32" and types[-1] in ("f16", "bf16")
    if len(types) not in (1, 2) or (len(types) == 2 and not known):
        emitter.refuse("types")
    sources = instruction.operands[1:]
    narrow = [types[-1]] * (len(sources) - 1) + [types[0]] if len(types) == 2 else types * len(sources)
    values = [emitter.source(operand, kind) for operand, kind in zip(sources, narrow, strict=True)]
    if "ftz" in instruction.modifiers and types[0] in ("f32", "f32x2"):
        values = [f"flush({value})" for value in values]
    return values


def _put(emitter: Emitter, instruction: Instruction, expression: str) -> None:
    """The result with .relu, .sat and .ftz."""
    kind = _result_type(instruction)
    if "relu" in instruction.modifiers:
        expression = f"clamp_below({expression})"
    if "sat" in instruction.modifiers:
        expression = f"saturate({expression})"
    if "ftz" in instruction.modifiers and kind in ("f32", "f32x2"):
        expression = f"flush({expression})"
    emitter.put(instruction.operands[0], expression, kind)


def _find_directed(emitter: Emitter, instruction: Instruction) -> str:
    """The directed rounding mode, or nothing. Modelled for results of f32."""
    mode = next((m for m in instruction.modifiers if m in _DIRECTED), "")
    if mode and _result_type(instruction) not in ("f32", "f32x2"):
        emitter.refuse("rounding mode")
    return mode


@runtime
def flush(values: Array) -> Array:
    """.ftz: subnormal f32 numbers become zeros of the same sign."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    subnormal = (bits & np.uint32(0x7F800000)) == 0
    if subnormal.any():
        return np.where(subnormal, bits & np.uint32(0x80000000), bits).view(np.float32)
    return values


@runtime
def saturate(values: Array) -> Array:
    """.sat: clamp to [0, 1]; NaN becomes +0."""
    return np.where(np.isnan(values), values.dtype.type(0), np.clip(values, 0, 1)).astype(values.dtype)


@runtime
def clamp_below(values: Array) -> Array:
    """.relu: negative numbers become +0, NaN stays."""
    return np.where(values <= 0, values.dtype.type(0), values)


@runtime
def fma_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of f32 values as f64, rounded to odd: further rounding to f32 or less is then correct in every mode.

    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".)
    """
    product, addend = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    if inexact.any():
        step = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(inexact, (bits + step).view(np.float64), total)
    return total


@runtime
def add_odd(a: Array, b: Array) -> Array:
    """a + b of f32 values as f64, rounded to odd."""
    return fma_odd(a, np.ones(1), b)


@runtime
def narrow_odd(values: Array) -> Array:
    """f64 to f32, rounded to odd: rounding to f16 or bf16 is then correct."""
    nearest = values.astype(np.float32)
    bits = nearest.view(np.int32)
    inexact = (nearest != values) & ((bits & 1) == 0) & np.isfinite(nearest)
    if inexact.any():
        step = np.where(np.abs(nearest) < np.abs(values), 1, -1)
        return np.where(inexact, (bits + step).astype(np.int32).view(np.float32), nearest)
    return np.asarray(nearest)


@runtime
def round_directed(values: Array, mode: str) -> Array:
    """f64 (exact, or rounded to odd) to f32 towards zero ("rz"), minus infinity ("rm") or plus infinity ("rp").

    Quotients and square roots of f32 in f64 are close enough: they are never between an f32 and its f64 neighbours.
    """
    nearest = values.astype(np.float32)
    wide = nearest.astype(np.float64)
    infinity = np.float32(np.inf)
    if mode == "rz":
        return np.where(np.abs(wide) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest)
    if mode == "rm":
        return np.where(wide > values, np.nextafter(nearest, -infinity), nearest)
    return np.where(wide < values, np.nextafter(nearest, infinity), nearest)
