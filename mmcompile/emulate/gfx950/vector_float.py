"""Floating point vector instructions (AMD Instinct CDNA4 ISA, "Vector ALU Operations").

fp32 denormals are kept, rounding is to nearest even: the modes that Triton's kernels set. v_rcp, v_rsq, v_sqrt, v_exp,
v_log, v_sin and v_cos are rounded correctly here, while the hardware is allowed 1 ulp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.formats import decode_bf16, decode_f16, encode_bf16, encode_f16, fma32
from mmcompile.emulate.gfx950.decoded import Decoded, Unknowns, collapse, make_source, read_unknown
from mmcompile.emulate.gfx950.operands import Operand, Reader, find_constant, parse_operand, read_bits
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import Waves
from mmcompile.emulate.gfx950.vector_op import VectorOp, build_vector, strip_encoding

Array = npt.NDArray[Any]
F = np.float32
_LEAST = F(2.0**-126)


def _flush(x: Array) -> Array:
    """Denormals to zero of the same sign."""
    return np.where(np.abs(x) < _LEAST, np.copysign(F(0), x), x)


def _by_double(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda a: np.asarray(function(a.astype(np.float64)), np.float32)


def _exponent(x: Array) -> Array:
    return ((x.view(np.uint32) >> np.uint32(23)) & np.uint32(255)).astype(np.int32)


def _ldexp(x: Array, n: Any) -> Array:
    values = np.ldexp(x.astype(np.float64), np.clip(n, -2000, 2000))
    return np.asarray(values, np.float32)


def div_scale(first: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """v_div_scale_f32: numerator or denominator (``first``) scaled by 2^64 where the division needs it, and lanes
    whose quotient v_div_fmas_f32 must scale back.

    Where both the inverse and the quotient are denormal the denominator is scaled by 2^-64: the manual's pseudocode has
    2^64, which overflows for the large denominators that this is about, and would make 1 / 1e38 a NaN.
    """
    d, n = _exponent(denominator), _exponent(numerator)
    with np.errstate(all="ignore"):
        tiny_inverse = (np.abs(1.0 / denominator.astype(np.float64)) < 2.0**-126) & (denominator != 0)
        tiny_quotient = np.abs(numerator.astype(np.float64) / denominator) < 2.0**-126
    zero = (numerator == 0) | (denominator == 0)
    is_denominator = first.view(np.uint32) == denominator.view(np.uint32)
    is_numerator = first.view(np.uint32) == numerator.view(np.uint32)
    far, denormal = n - d >= 96, (d == 0) & (denominator != 0)
    conditions = [zero, far, denormal, tiny_inverse & tiny_quotient, tiny_inverse, tiny_quotient, n <= 23]
    scaled, shrunk = _ldexp(first, np.int32(64)), _ldexp(first, np.int32(-64))
    choices = [
        np.full_like(first, np.nan),
        np.where(is_denominator, scaled, first),
        scaled,
        np.where(is_denominator, shrunk, first),
        shrunk,
        np.where(is_numerator, scaled, first),
        scaled,
    ]
    shape = np.broadcast_shapes(first.shape, denominator.shape, numerator.shape)
    conditions = [np.broadcast_to(c, shape) for c in conditions]
    result = np.select(conditions, [np.broadcast_to(c, shape) for c in choices], np.broadcast_to(first, shape))
    flags = np.select(conditions, [np.broadcast_to(np.bool_(f), shape) for f in (0, 1, 0, 1, 0, 1, 0)], np.False_)
    return result.astype(np.float32), flags


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """v_div_fmas_f32: fma, scaled back by 2^64 or 2^-64 in the lanes of vcc."""
    value = fma32(a, b, c)
    power = np.where(_exponent(c) > 127, 64, -64)
    return np.where(scaled, _ldexp(value, power), value)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """v_div_fixup_f32: the special cases of a division, and the sign; a quotient that overflowed on the way is NaN."""
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    sign = np.where(negative, F(-1), F(1))
    difference = _exponent(numerator) - _exponent(denominator)
    bad = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    conditions = [
        np.isnan(numerator), np.isnan(denominator), bad, (denominator == 0) | np.isinf(numerator),
        np.isinf(denominator) | (numerator == 0), difference < -150, np.isnan(quotient),
    ]  # fmt: skip
    choices = [numerator, denominator, F(np.nan) * sign, np.inf * sign, F(0) * sign, F(0) * sign, np.inf * sign]
    shape = np.broadcast_shapes(quotient.shape, denominator.shape, numerator.shape)
    fixed = np.select(
        [np.broadcast_to(c, shape) for c in conditions],
        [np.broadcast_to(c, shape) for c in choices],
        np.broadcast_to(np.abs(quotient) * sign, shape),
    )
    return np.asarray(fixed, np.float32)


def _median(a: Array, b: Array, c: Array) -> Array:
    smallest = np.fmin(np.fmin(a, b), c)
    middle = np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), smallest, middle)


def _fraction(a: Array) -> Array:
    return np.asarray(np.minimum(a - np.floor(a), np.nextafter(F(1), F(0))), np.float32)


def _binary64(function: Callable[..., Any], count: int) -> VectorOp:
    return VectorOp(function, "d" * count, "q")


OPERATIONS: dict[str, VectorOp] = {
    "add_f32": VectorOp(lambda a, b: a + b, "ff"),
    "sub_f32": VectorOp(lambda a, b: a - b, "ff"),
    "subrev_f32": VectorOp(lambda a, b: b - a, "ff"),
    "mul_f32": VectorOp(lambda a, b: a * b, "ff"),
    "mul_legacy_f32": VectorOp(lambda a, b: np.where((a == 0) | (b == 0), F(0), a * b), "ff"),
    "max_f32": VectorOp(np.fmax, "ff"),
    "min_f32": VectorOp(np.fmin, "ff"),
    "max3_f32": VectorOp(lambda a, b, c: np.fmax(np.fmax(a, b), c), "fff"),
    "min3_f32": VectorOp(lambda a, b, c: np.fmin(np.fmin(a, b), c), "fff"),
    "maximum3_f32": VectorOp(lambda a, b, c: np.maximum(np.maximum(a, b), c), "fff"),
    "minimum3_f32": VectorOp(lambda a, b, c: np.minimum(np.minimum(a, b), c), "fff"),
    "med3_f32": VectorOp(_median, "fff"),
    "fma_f32": VectorOp(fma32, "fff"),
    "fmac_f32": VectorOp(fma32, "fff", accumulates=True),
    "fmamk_f32": VectorOp(lambda a, k, c: fma32(a, k, c), "fff"),
    "fmaak_f32": VectorOp(fma32, "fff"),
    "rcp_f32": VectorOp(_by_double(lambda a: 1.0 / a), "f"),
    "rcp_iflag_f32": VectorOp(_by_double(lambda a: 1.0 / a), "f"),
    "rsq_f32": VectorOp(_by_double(lambda a: 1.0 / np.sqrt(a)), "f"),
    "sqrt_f32": VectorOp(_by_double(np.sqrt), "f"),
    "exp_f32": VectorOp(lambda a: _flush(_by_double(np.exp2)(_flush(a))), "f"),
    "log_f32": VectorOp(lambda a: _by_double(np.log2)(_flush(a)), "f"),
    "sin_f32": VectorOp(_by_double(lambda a: np.sin(2 * np.pi * a)), "f"),
    "cos_f32": VectorOp(_by_double(lambda a: np.cos(2 * np.pi * a)), "f"),
    "floor_f32": VectorOp(np.floor, "f"),
    "ceil_f32": VectorOp(np.ceil, "f"),
    "trunc_f32": VectorOp(np.trunc, "f"),
    "rndne_f32": VectorOp(np.rint, "f"),
    "fract_f32": VectorOp(_fraction, "f"),
    "ldexp_f32": VectorOp(_ldexp, "fi"),
    "frexp_mant_f32": VectorOp(lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a), "f"),
    "frexp_exp_i32_f32": VectorOp(lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(np.int32), "f"),
    "div_fixup_f32": VectorOp(div_fixup, "fff"),
    "add_f64": _binary64(lambda a, b: a + b, 2),
    "mul_f64": _binary64(lambda a, b: a * b, 2),
    "max_f64": _binary64(np.fmax, 2),
    "min_f64": _binary64(np.fmin, 2),
}
"""v_NAME, lane by lane."""

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b), "ge": lambda a, b: a >= b, "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b), "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b), "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}  # fmt: skip

_HALF: dict[str, tuple[Callable[..., Any], int]] = {
    "add": (lambda a, b: a + b, 2), "sub": (lambda a, b: a - b, 2), "mul": (lambda a, b: a * b, 2),
    "max": (np.fmax, 2), "min": (np.fmin, 2), "fma": (lambda a, b, c: a * b + c, 3),
    "maximum3": (lambda a, b, c: np.maximum(np.maximum(a, b), c), 3),
    "minimum3": (lambda a, b, c: np.minimum(np.minimum(a, b), c), 3),
}  # fmt: skip
"""fp16 operations, computed in fp64 and rounded once."""

_CLASS_TESTS: list[Callable[[Array], Array]] = [
    lambda x: np.isnan(x) & ((x.view(np.uint32) & np.uint32(1 << 22)) == 0),
    lambda x: np.isnan(x) & ((x.view(np.uint32) & np.uint32(1 << 22)) != 0),
    lambda x: x == -np.inf,
    lambda x: np.isfinite(x) & (x <= -_LEAST),
    lambda x: (x < 0) & (x > -_LEAST),
    lambda x: (x == 0) & np.signbit(x),
    lambda x: (x == 0) & ~np.signbit(x),
    lambda x: (x > 0) & (x < _LEAST),
    lambda x: np.isfinite(x) & (x >= _LEAST),
    lambda x: x == np.inf,
]
"""v_cmp_class_f32, by bit of the mask."""


def _find_class(x: Array, mask: Array) -> Array:
    found = np.zeros(np.broadcast_shapes(x.shape, mask.shape), np.bool_)
    for bit, test in enumerate(_CLASS_TESTS):
        found |= test(x) & ((mask >> np.uint32(bit)) & np.uint32(1)).astype(np.bool_)
    return found


def _make_half(run: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*values: Array) -> Array:
        return encode_f16(run(*(decode_f16(v & np.uint32(0xFFFF)).astype(np.float64) for v in values))).astype(
            np.uint32
        )

    return compute


# ---------------------------------------------------------------------- packed


def read_packed(operand: Operand, high: int, negate: int) -> tuple[Reader, Reader, list[int]]:
    """One half of a source of v_pk_*_f32: values, undefined bits and registers."""
    part = high if operand.count > 1 else 0
    read, flip = read_bits(operand, part), np.uint32(0x80000000 if negate else 0)
    if operand.kind not in ("vector", "scalar"):
        constant = np.full((1, 1), find_constant(operand), np.uint32)
        read = lambda w: constant  # noqa: E731
    return (lambda w: (read(w) ^ flip).view(np.float32)), read_unknown(operand, part), operand.list_registers(part, 1)


def build_packed(i: Instruction, run: Callable[..., Any], count: int) -> Decoded | None:
    """v_pk_add_f32, v_pk_mul_f32, v_pk_fma_f32: op_sel and op_sel_hi take the low or high dword for each half."""
    if set(i.modifiers) - {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}:
        return None
    target, *given = (parse_operand(text) for text in i.operands)
    if len(given) != count:
        return None
    halves = []
    for select, negation, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        picks, signs = i.list_modifier(select, (default,) * count), i.list_modifier(negation, (0,) * count)
        halves.append([read_packed(o, p, n) for o, p, n in zip(given, picks, signs, strict=True)])
    index = target.index

    def step(w: Waves) -> None:
        low, high = (run(*[source[0](w) for source in half]) for half in halves)
        w.put(index, low)
        w.put(index + 1, high)

    def taint(w: Waves) -> Unknowns:
        return [(index + k, collapse([source[1](w) for source in half])) for k, half in enumerate(halves)]

    reads = [register for half in halves for source in half for register in source[2]]
    return Decoded(step, reads, target.list_registers(), taint)


def read_half(operand: Operand, high: int, negate: int, brain: bool) -> Reader:
    """One 16-bit float of a packed source as fp64."""
    decode = decode_bf16 if brain else decode_f16
    sign = -1.0 if negate else 1.0
    if operand.kind in ("vector", "scalar"):
        read, shift = read_bits(operand), np.uint32(16 * high)
        return lambda w: decode((read(w) >> shift) & np.uint32(0xFFFF)).astype(np.float64) * sign
    bits = find_constant(operand, 16) if not brain else find_constant(operand, 32) >> 16
    value = decode(np.full((1, 1), bits, np.uint32)).astype(np.float64) * sign
    return lambda w: value


def build_packed_half(i: Instruction, name: str, brain: bool) -> Decoded | None:
    """v_pk_add_f16 and the like: two 16-bit floats in a register."""
    if set(i.modifiers) - {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"} or name not in _HALF:
        return None
    run, count = _HALF[name]
    target, *given = (parse_operand(text) for text in i.operands)
    encode = encode_bf16 if brain else encode_f16
    halves = []
    for select, negation, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        picks, signs = i.list_modifier(select, (default,) * count), i.list_modifier(negation, (0,) * count)
        halves.append([read_half(o, p, n, brain) for o, p, n in zip(given, picks, signs, strict=True)])
    sources = [make_source(operand, "u") for operand in given]
    index = target.index

    def step(w: Waves) -> None:
        low, high = (encode(run(*[read(w) for read in half])).astype(np.uint32) for half in halves)
        w.put(index, low | (high << np.uint32(16)))

    reads = [register for source in sources for register in source.registers]
    return Decoded(step, reads, [index], lambda w: [(index, collapse([s.unknown(w) for s in sources]))])


def build_dot_two(i: Instruction, brain: bool, accumulates: bool) -> Decoded | None:
    """v_dot2_f32_f16, v_dot2_f32_bf16, v_dot2c_*: two products added to an fp32."""
    if set(i.modifiers):
        return None
    target, first, second, *rest = (parse_operand(text) for text in i.operands)
    addend = target if accumulates else rest[0]
    halves = [(read_half(first, k, 0, brain), read_half(second, k, 0, brain)) for k in (0, 1)]
    source, index = make_source(addend, "f"), target.index

    def step(w: Waves) -> None:
        total = sum((a(w) * b(w) for a, b in halves), source.read(w).astype(np.float64))
        w.put(index, total.astype(np.float32))

    others = [make_source(first, "u"), make_source(second, "u"), source]
    reads = [register for s in others for register in s.registers]
    return Decoded(step, reads, [index], lambda w: [(index, collapse([s.unknown(w) for s in others]))])


def build_division(i: Instruction, name: str) -> Decoded | None:
    """v_div_scale_f32 (also writes lanes) and v_div_fmas_f32 (reads vcc)."""
    if name == "div_scale_f32":
        return None if i.modifiers else build_vector(i, VectorOp(div_scale, "fff", "k"), "e64", False)
    extended = Instruction(i.op, (*i.operands, "vcc"), i.modifiers, i.line, i.text)
    return build_vector(extended, VectorOp(div_fmas, "fffm"), "e64", True)


def build_compare(i: Instruction, match: re.Match[str], encoding: str) -> Decoded | None:
    """v_cmp_*_f16, _f32, _f64."""
    compare, width = _COMPARE[match[1]], match[2]
    if width == "16":
        half = VectorOp(lambda a, b: compare(*(decode_f16(v & np.uint32(0xFFFF)) for v in (a, b))), "uu", "c")
        return build_vector(i, half, encoding, False)
    return build_vector(i, VectorOp(compare, "ff" if width == "32" else "dd", "c"), encoding, False)


_PACKED: dict[str, tuple[Callable[..., Any], int]] = {
    "pk_add_f32": (lambda a, b: a + b, 2), "pk_mul_f32": (lambda a, b: a * b, 2), "pk_fma_f32": (fma32, 3),
}  # fmt: skip


NOTE_APPROXIMATE = "rcp, rsq, sqrt, exp, log, sin and cos are rounded correctly; the hardware may be off by 1 ulp"


def build(i: Instruction) -> Decoded | None:
    """Floating point vector instructions; None for anything else."""
    if not i.op.startswith("v_"):
        return None
    name, encoding = strip_encoding(i.op)
    decoded = _build_named(i, name, encoding)
    if decoded is not None and re.match(r"(rcp|rsq|sqrt|exp|log|sin|cos)_", name):
        decoded.note = NOTE_APPROXIMATE
    return decoded


def _build_named(i: Instruction, name: str, encoding: str) -> Decoded | None:
    if name in OPERATIONS:
        return build_vector(i, OPERATIONS[name], encoding, True)
    if name in _PACKED:
        return build_packed(i, *_PACKED[name])
    if name in ("div_scale_f32", "div_fmas_f32"):
        return build_division(i, name)
    if name == "cmp_class_f32":
        return build_vector(i, VectorOp(_find_class, "fu", "c"), encoding, False)
    match = re.match(r"^cmp_(lt|eq|le|gt|lg|ge|o|u|nge|nlg|ngt|nle|neq|nlt)_f(16|32|64)$", name)
    if match:
        return build_compare(i, match, encoding)
    match = re.match(r"^pk_(\w+)_(f16|bf16)$", name)
    if match:
        return build_packed_half(i, match[1], match[2] == "bf16")
    match = re.match(r"^(\w+)_f16$", name)
    if match and match[1] in _HALF:
        run, count = _HALF[match[1]]
        return build_vector(i, VectorOp(_make_half(run), "u" * count), encoding, False)
    match = re.match(r"^dot2(c?)_f32_(f16|bf16)$", name)
    return build_dot_two(i, match[2] == "bf16", bool(match[1])) if match else None
