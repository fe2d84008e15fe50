"""Floating-point arithmetic against exact rational arithmetic and numpy."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snippets import evaluate

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.formats import decode_bf16

FLOATS = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 2.0**-126, 2.0**-149, -(2.0**-130), 3.4028235e38])),
    min_size=48, max_size=48,
)  # fmt: skip


def bits(values: np.ndarray) -> np.ndarray:
    """Bits with one NaN."""
    values = np.asarray(values, np.float32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))


def evaluate_floats(body: str, *operands: np.ndarray) -> np.ndarray:
    return bits(evaluate(body, *operands).view(np.float32))


def round_to_f32(exact: Fraction, mode: str, zero: float) -> float:
    """``exact`` rounded: rn, rz, rm or rp (IEEE 754); ``zero``: the result if it is zero."""
    if exact == 0:
        return zero
    exponent = max(math.frexp(float(exact) if abs(exact) < 2**1000 else 1.0)[1] - 1, -126) if exact else 0
    magnitude = abs(exact)
    exponent = -126
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    scaled = exact / unit
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](scaled)
    result = whole * unit
    if abs(result) >= Fraction(2) ** 128:
        down = mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        largest = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]
        return math.copysign(largest if down else math.inf, exact)
    return float(result) if result else math.copysign(0.0, exact)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=6, deadline=None)
@given(values=FLOATS)
def test_fma_add_and_multiply_are_correctly_rounded(mode: str, values: list[float]) -> None:
    a, b, c = np.array(values, np.float32).reshape(3, 16)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = (np.where(finite, x, np.float32(1)) for x in (a, b, c))
    exact = [tuple(Fraction(float(x)) for x in row) for row in zip(a, b, c, strict=True)]
    cases = {
        f"fma.{mode}.f32 %r, %a, %b, %c;": [x * y + z for x, y, z in exact],
        f"add.{mode}.f32 %r, %a, %c;": [x + z for x, _, z in exact],
        f"sub.{mode}.f32 %r, %a, %c;": [x - z for x, _, z in exact],
        f"mul.{mode}.f32 %r, %a, %b;": [x * y for x, y, _ in exact],
    }
    for body, results in cases.items():
        nonzero = np.array([result != 0 for result in results])
        expected = np.array([round_to_f32(result, mode, 0.0) for result in results], np.float32)
        got = evaluate_floats(body, a, b, c)
        np.testing.assert_array_equal(got[nonzero], bits(expected)[nonzero], err_msg=body)
        assert not (got[~nonzero] & np.uint32(0x7FFFFFFF)).any(), body


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=6, deadline=None)
@given(values=FLOATS)
def test_quotients_and_reciprocals_are_correctly_rounded(mode: str, values: list[float]) -> None:
    a, b = np.array(values[:32], np.float32).reshape(2, 16)
    good = np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)
    a, b = np.where(good, a, np.float32(3)), np.where(good, b, np.float32(7))
    for body, numerator in (
        (f"div.{mode}.f32 %r, %a, %b;", a),
        (f"rcp.{mode}.f32 %r, %b;", np.ones_like(a)),
    ):
        exact = [Fraction(float(x)) / Fraction(float(y)) for x, y in zip(numerator, b, strict=True)]
        expected = np.array([round_to_f32(result, mode, 0.0) for result in exact], np.float32)
        np.testing.assert_array_equal(evaluate_floats(body, a, b), bits(expected), err_msg=body)


SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.5, 3e38, -3e38, 0.3, 100.0, 2.0**-126, -2.5],
    np.float32,
)
A, B = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ("min.f32 %r, %a, %b;", np.fmin), ("max.f32 %r, %a, %b;", np.fmax),
        ("min.NaN.f32 %r, %a, %b;", np.minimum), ("max.NaN.f32 %r, %a, %b;", np.maximum),
        ("add.f32 %r, %a, %b;", np.add), ("mul.f32 %r, %a, %b;", np.multiply), ("sub.f32 %r, %a, %b;", np.subtract),
        ("abs.f32 %r, %a;", lambda a, b: np.abs(a)), ("neg.f32 %r, %a;", lambda a, b: -a),
        ("copysign.f32 %r, %b, %a;", np.copysign), ("div.full.f32 %r, %a, %b;", np.divide),
        ("sqrt.rn.f32 %r, %a;", lambda a, b: np.sqrt(a)),
        ("add.sat.f32 %r, %a, %b;", lambda a, b: np.where(np.isnan(a + b), 0, np.clip(a + b, 0, 1))),
        ("max.f32 %r, %a, %b; min.f32 %r, %r, %b;", lambda a, b: np.fmin(np.fmax(a, b), b)),
        ("ex2.approx.f32 %r, %a;", lambda a, b: np.exp2(a)), ("lg2.approx.f32 %r, %a;", lambda a, b: np.log2(a)),
        ("mov.b64 %d0, {%a, %b}; mov.b64 %d1, {%b, %a}; add.rn.f32x2 %d0, %d0, %d1; mov.b64 {%x, %r}, %d0;", np.add),
        ("mov.b64 %d0, {%a, %b}; mov.b64 %d1, {%b, %a}; mul.rn.f32x2 %d0, %d0, %d1; mov.b64 {%r, %x}, %d0;",
         np.multiply),
        ("mov.b64 %d0, {%a, %b}; fma.rn.f32x2 %d0, %d0, %d0, %d0; mov.b64 {%r, %x}, %d0;",
         lambda a, b: (a.astype(np.float64) * a + a).astype(np.float32)),
    ],
)  # fmt: skip
def test_special_values(body: str, reference: object) -> None:
    with np.errstate(all="ignore"):
        expected = bits(reference(A, B))  # type: ignore[operator]
    got = evaluate_floats(body, A, B)
    equal = got == expected
    zeros = ((got | expected) & 0x7FFFFFFF) == 0
    assert (equal | zeros).all(), (A[~(equal | zeros)][:3], B[~(equal | zeros)][:3])


def test_minimum_orders_zeros() -> None:
    zeros = np.array([0.0, -0.0], np.float32)
    for first in zeros:
        for second in zeros:
            low = evaluate("min.f32 %r, %a, %b;", np.array([first]), np.array([second]))[0]
            high = evaluate("max.f32 %r, %a, %b;", np.array([first]), np.array([second]))[0]
            signs = [bool(np.signbit(x)) for x in (first, second)]
            assert bool(low >> 31) == any(signs)
            assert bool(high >> 31) == all(signs)


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ("add.ftz.f32 %r, %a, %b;", lambda a, b: flush(flush(a) + flush(b))),
        ("mul.ftz.f32 %r, %a, %b;", lambda a, b: flush(flush(a) * flush(b))),
        ("sub.ftz.f32 %r, %a, %b;", lambda a, b: flush(flush(a) - flush(b))),
        ("abs.ftz.f32 %r, %a;", lambda a, b: np.abs(flush(a))),
        ("ex2.approx.ftz.f32 %r, %a;", lambda a, b: flush(np.exp2(flush(a)))),
    ],
)
def test_ftz_flushes_operands_and_results(body: str, reference: object) -> None:
    a = np.array([1e-40, -1e-40, 2.0**-126, 1.0, 2.0**-63, -130.0, -126.5], np.float32)
    a, b = (x.ravel() for x in np.meshgrid(a, a))
    np.testing.assert_array_equal(evaluate_floats(body, a, b), bits(reference(a, b)))  # type: ignore[operator]


def test_ftz_decides_comparisons() -> None:
    tiny = np.array([1e-40], np.float32)
    zero = np.zeros(1, np.float32)
    assert evaluate("setp.gt.f32 %p, %a, %b; selp.b32 %r, 1, 0, %p;", tiny, zero)[0] == 1
    assert evaluate("setp.gt.ftz.f32 %p, %a, %b; selp.b32 %r, 1, 0, %p;", tiny, zero)[0] == 0


COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a < b) | (a > b), "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


@pytest.mark.parametrize("relation", [*COMPARISONS, "equ", "neu", "ltu", "leu", "gtu", "geu"])
def test_comparisons_with_nan(relation: str) -> None:
    expected = COMPARISONS[relation if relation in COMPARISONS else relation[:-1]](A, B)
    if relation not in COMPARISONS:
        expected = expected | np.isnan(A) | np.isnan(B)
    body = f"setp.{relation}.f32 %p, %a, %b; selp.b32 %r, 1, 0, %p;"
    np.testing.assert_array_equal(evaluate(body, A, B), expected.astype(np.uint32))


# ---------------------------------------------------------------------- halves


def halves(seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 2**32, 512, dtype=np.uint64).astype(np.uint32)
    values[:4] = [0, 0x80008000, 0x3C003F80, 0x7BFF7F7F]
    return values


def compute_halves(kind: str, operands: list[np.ndarray], exact: object) -> np.ndarray:
    """Element by element in fp64 (exact for one operation on halves), rounded once by torch."""
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    values = [torch.from_numpy(x.view(np.int16).copy()).view(dtype).to(torch.float64) for x in operands]
    result = exact(*values).to(dtype)  # type: ignore[operator]
    return result.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_packed_halves(kind: str, op: str) -> None:
    a, b = halves(1), halves(2)
    exact = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[op]
    expected = compute_halves(kind, [a, b], exact)
    got = evaluate(f"{op}.rn.{kind} %r, %a, %b;", a, b).view(np.uint16)
    limit = 0x7C00 if kind == "f16x2" else 0x7F80
    number = (expected & 0x7FFF) <= limit
    np.testing.assert_array_equal(got[number], expected[number])
    assert ((got[~number] & 0x7FFF) > limit).all()


def test_fma_of_bf16_is_rounded_once() -> None:
    # 1 + 2**-8 is the middle between two bf16 numbers; a tiny addend decides, although fp32 cannot hold the sum.
    one, step = 0x3F80, 0x3B80  # 1.0 and 2**-8
    tiny = 0x2000  # about 1e-19
    body = "mov.b32 {%h, %g}, %a; mov.b32 %y, %b; fma.rn.bf16x2 %r, %a, %b, %c;"
    a = np.array([one | one << 16], np.uint32)
    b = np.array([0x3F80 | 0x3F80 << 16], np.uint32)
    c = np.array([step | (step | tiny) << 16], np.uint32)
    result = evaluate(body, a, b, c)
    assert int(result[0]) & 0xFFFF == 0x3F80  # the tie goes to even
    up = evaluate("fma.rn.bf16x2 %r, %a, %b, %c;", np.array([0x3F810000 | 0x3F81], np.uint32), b * 0 + 0x3F803F80, c)
    exact = decode_bf16(np.array([0x3F81], np.uint16)).astype(np.float64)[0] + 2.0**-8
    assert decode_bf16(up.view(np.uint16))[0] == pytest.approx(exact, abs=2.0**-7)


def test_mixed_precision_add() -> None:
    a = np.array([0x3F803F80], np.uint32)
    c = np.array([2.0**-20], np.float32)
    body = "mov.b32 {%h, %g}, %a; add.rn.f32.bf16 %r, %h, %c;"
    assert evaluate(body, a, 0, c).view(np.float32)[0] == np.float32(1 + 2.0**-20)


@pytest.mark.parametrize("body", ["add.rz.f16x2 %r, %a, %b;", "add.rn.f32.f64 %r, %a, %d0;"])
def test_forms_that_are_not_modelled_are_refused(body: str) -> None:
    with pytest.raises(EmulationFault) as caught:
        evaluate(body, 1, 2)
    assert caught.value.kind == "unknown instruction"
    assert body.split()[0] in caught.value.text
