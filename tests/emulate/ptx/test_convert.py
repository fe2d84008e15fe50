"""cvt: every code of the small formats, rounding in every mode, integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snippets import evaluate

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def to_half_bits(values: np.ndarray, half: str) -> np.ndarray:
    """f16 or bf16 bits by torch; NaN is 0x7fff."""
    dtype = torch.float16 if half == "f16" else torch.bfloat16
    codes = torch.from_numpy(np.asarray(values, np.float64)).to(dtype).view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(values), 0x7FFF, codes)


@pytest.mark.parametrize("name", FLOAT8)
def test_every_code_to_f16(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes.copy()).view(FLOAT8[name]).to(torch.float64).numpy()
    words = codes[0::2].astype(np.uint32) | codes[1::2].astype(np.uint32) << 8
    got = evaluate(f"cvt.u16.u32 %h, %a; cvt.rn.f16x2.{name}x2 %r, %h;", words).view(np.uint16)
    np.testing.assert_array_equal(got, to_half_bits(values, "f16"))


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_every_fp4_code_to_halves(half: str) -> None:
    body = f"mov.b32 {{%e, _, _, _}}, %a; cvt.rn.{half}x2.e2m1x2 %r, %e;"
    got = evaluate(body, np.arange(256, dtype=np.uint32)).view(np.uint16).reshape(-1, 2)
    codes = np.arange(256)
    np.testing.assert_array_equal(got[:, 0], to_half_bits(E2M1[codes & 15], half))
    np.testing.assert_array_equal(got[:, 1], to_half_bits(E2M1[codes >> 4], half))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an increasing table of magnitudes, ties to even indices."""
    distance = np.abs(np.abs(values)[:, None] - table)
    best = distance.min(axis=1, keepdims=True)
    even = np.where(distance == best, np.where(np.arange(len(table)) % 2 == 0, 0, 1), 2)
    return even.argmin(axis=1)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_floats_to_small_formats(name: str) -> None:
    count = {"e4m3": 127, "e5m2": 124, "e2m1": 8}[name]
    if name == "e2m1":
        table = E2M1[:8]
    else:
        codes = torch.arange(count, dtype=torch.uint8)
        table = codes.view(FLOAT8[name]).to(torch.float64).numpy()
    middles = (table[1:] + table[:-1]) / 2
    values = np.concatenate([table, middles, middles * 1.001, middles * 0.999, [1e30, np.inf], -table, -middles])
    values = values.astype(np.float32)
    sign = 8 if name == "e2m1" else 128
    expected = nearest(np.clip(values, -table[-1], table[-1]), table) + np.where(np.signbit(values), sign, 0)
    target = "%e" if name == "e2m1" else "%h"
    widen = "cvt.u32.u8 %r, %e;" if name == "e2m1" else "cvt.u32.u16 %r, %h;"
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f32 {target}, %a, %b; {widen}", values, values[::-1].copy())
    shift = 4 if name == "e2m1" else 8
    np.testing.assert_array_equal(got >> shift, expected)
    np.testing.assert_array_equal(got & ((1 << shift) - 1), expected[::-1])


def test_nan_to_small_formats() -> None:
    nan = np.array([np.nan], np.float32)
    assert evaluate("cvt.rn.satfinite.e4m3x2.f32 %h, %a, %a; cvt.u32.u16 %r, %h;", nan)[0] == 0x7F7F
    assert evaluate("cvt.rn.satfinite.e2m1x2.f32 %e, %a, %a; cvt.u32.u8 %r, %e;", nan)[0] == 0x77


def test_halves_to_e4m3_and_scales() -> None:
    pair = np.array([0x3C00 | 0x4000 << 16], np.uint32)  # 1.0 and 2.0 in f16
    assert evaluate("cvt.rn.satfinite.e4m3x2.f16x2 %h, %a; cvt.u32.u16 %r, %h;", pair)[0] == 0x38 | 0x40 << 8
    values = np.array([1.0, 1.5, 2.0, 0.75, 2.0**-126], np.float32)
    up = evaluate("cvt.rp.satfinite.ue8m0x2.f32 %h, %a, %a; cvt.u32.u16 %r, %h;", values) & 255
    down = evaluate("cvt.rz.satfinite.ue8m0x2.f32 %h, %a, %a; cvt.u32.u16 %r, %h;", values) & 255
    np.testing.assert_array_equal(up, [127, 128, 128, 127, 1])
    np.testing.assert_array_equal(down, [127, 127, 128, 126, 1])


def directed(value: float, half: str, mode: str) -> int:
    """f16 or bf16 bits of a finite value by search among the neighbours of the nearest."""
    dtype = torch.float16 if half == "f16" else torch.bfloat16
    code = int(torch.tensor(abs(value), dtype=torch.float64).to(dtype).view(torch.int16)) & 0x7FFF
    limit = 0x7C00 if half == "f16" else 0x7F80

    def decode(bits: int) -> float:
        return float(torch.tensor(bits, dtype=torch.int16).view(dtype).to(torch.float64)) if bits < limit else math.inf

    while decode(code) > abs(value):
        code -= 1
    away = (mode == "rp" and value > 0) or (mode == "rm" and value < 0)
    if away and decode(code) != abs(value):
        code += 1
    return code | (0x8000 if math.copysign(1, value) < 0 else 0)


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=20, max_size=20))
def test_directed_rounding_to_halves(half: str, mode: str, values: list[float]) -> None:
    a = np.array([*values, 1.0, 65504.0, 65505.0, -65520.0, 1e-8, -1e-8], np.float32)
    got = evaluate(f"cvt.{mode}.{half}.f32 %h, %a; cvt.u32.u16 %r, %h;", a)
    np.testing.assert_array_equal(got, [directed(float(x), half, mode) for x in a])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(width=32), min_size=20, max_size=20))
def test_nearest_rounding_to_halves(values: list[float]) -> None:
    a = np.array(values, np.float32)
    for half in ("f16", "bf16"):
        got = evaluate(f"cvt.rn.{half}x2.f32 %r, %a, %b;", a, a[::-1].copy()).view(np.uint16).reshape(-1, 2)
        np.testing.assert_array_equal(got[:, 1], to_half_bits(a, half))
        np.testing.assert_array_equal(got[:, 0], to_half_bits(a[::-1], half))


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)]
)
@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(width=32), min_size=20, max_size=20))
def test_floats_to_integers(mode: str, function: object, values: list[float]) -> None:
    a = np.array([*values, 0.5, 1.5, -2.5, 2.0**31, -(2.0**31), 4e9], np.float32)
    for kind, low, high in (("s32", -(2**31), 2**31 - 1), ("u32", 0, 2**32 - 1)):
        expected = []
        for x in a.tolist():
            if math.isnan(x):
                expected.append(0)
            elif math.isinf(x):
                expected.append(high if x > 0 else low)
            else:
                expected.append(min(max(function(x), low), high))  # type: ignore[operator]
        got = evaluate(f"cvt.{mode}.{kind}.f32 %r, %a;", a)
        np.testing.assert_array_equal(got, np.array([x & 0xFFFFFFFF for x in expected], np.uint32))
    whole = evaluate(f"cvt.{mode}.f32.f32 %r, %a;", a).view(np.float32)
    finite = np.isfinite(a)
    np.testing.assert_array_equal(whole[finite], [function(x) for x in a[finite].tolist()])  # type: ignore[operator]


def test_integers() -> None:
    a = np.array([0, 1, 0x7F, 0x80, 0xFF, 0x1234ABCD, 0x80000000, 0xFFFFFFFF], np.uint32)
    signed = a.view(np.int32)
    bytes_of_a = a.astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
    np.testing.assert_array_equal(evaluate("cvt.s32.s8 %r, %a;", a), bytes_of_a)
    np.testing.assert_array_equal(evaluate("cvt.u32.u16 %r, %a;", a), a & 0xFFFF)
    np.testing.assert_array_equal(evaluate("cvt.rn.f32.s32 %r, %a;", a).view(np.float32), signed.astype(np.float32))
    np.testing.assert_array_equal(evaluate("cvt.rn.f32.u32 %r, %a;", a).view(np.float32), a.astype(np.float32))
    clipped = np.clip(signed, 0, 255)
    np.testing.assert_array_equal(evaluate("cvt.sat.u8.s32 %h, %a; cvt.u32.u16 %r, %h;", a), clipped)
    wide = evaluate("cvt.s64.s32 %d0, %a; mov.b64 {%x, %r}, %d0;", a)
    np.testing.assert_array_equal(wide, np.where(signed < 0, 0xFFFFFFFF, 0))


def test_64_bit_integers_are_rounded_once() -> None:
    # 2**53 + 2**29 + 1 is just above the middle of two fp32 numbers, which fp64 cannot tell.
    value = (1 << 60) + (1 << 36) + 1
    body = "mov.b64 %d0, {%a, %b}; cvt.rn.f32.s64 %r, %d0;"
    got = evaluate(body, np.array([value & 0xFFFFFFFF], np.uint32), np.array([value >> 32], np.uint32))
    assert got.view(np.float32)[0] == np.float32(2.0**60 + 2.0**37)


def test_tf32_and_f64() -> None:
    a = np.array([0x3F801000, 0x3F800FFF, 0x3F803000, 0x7F800000], np.uint32)
    np.testing.assert_array_equal(
        evaluate("cvt.rna.tf32.f32 %r, %a;", a), np.array([0x3F802000, 0x3F800000, 0x3F804000, 0x7F800000], np.uint32)
    )
    np.testing.assert_array_equal(
        evaluate("cvt.rn.tf32.f32 %r, %a;", a), np.array([0x3F800000, 0x3F800000, 0x3F804000, 0x7F800000], np.uint32)
    )
    x = np.array([1.1, -3.7], np.float32)
    squares = evaluate("cvt.f64.f32 %d0, %a; mul.f64 %d0, %d0, %d0; cvt.rn.f32.f64 %r, %d0;", x).view(np.float32)
    np.testing.assert_array_equal(squares, (x.astype(np.float64) ** 2).astype(np.float32))


def test_ftz_and_relu() -> None:
    a = np.array([1e-40, -1.0, 2.0], np.float32)
    np.testing.assert_array_equal(evaluate("cvt.rpi.ftz.f32.f32 %r, %a;", a).view(np.float32), [0, -1, 2])
    np.testing.assert_array_equal(evaluate("cvt.rpi.f32.f32 %r, %a;", a).view(np.float32), [1, -1, 2])
    got = evaluate("cvt.rn.relu.f16x2.f32 %r, %a, %a;", a).view(np.float16)[1::2]
    np.testing.assert_array_equal(got, np.array([0, 0, 2], np.float16))
