"""Number formats of the emulators against torch's own conversions, every code and random values."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.emulate import formats

FLOATS = st.floats(width=32, allow_nan=False)
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("name", sorted(TORCH))
def test_every_eight_bit_code_decodes_as_in_torch(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(TORCH[name]).float().numpy()
    np.testing.assert_array_equal(formats.decode(name, codes), want)


def test_every_e2m1_code() -> None:
    codes = np.arange(16, dtype=np.uint8)
    got = formats.decode("e2m1", codes)
    assert got.tolist() == E2M1 + [-v for v in E2M1]
    assert np.signbit(got[8])


@pytest.mark.parametrize(
    ("name", "largest", "smallest"), [("e2m3", 7.5, 0.125), ("e3m2", 28.0, 0.0625)]
)
def test_six_bit_formats(name: str, largest: float, smallest: float) -> None:
    values = formats.decode(name, np.arange(32, dtype=np.uint8))
    assert values[0] == 0 and values[1] == smallest and values[31] == largest
    assert (np.diff(values) > 0).all()


def test_ue8m0_is_a_power_of_two() -> None:
    values = formats.decode("ue8m0", np.arange(256, dtype=np.uint8))
    assert np.isnan(values[255])
    assert [np.log2(values[i]) for i in (0, 1, 127, 254)] == [-127, -126, 0, 127]


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e2m3", "e3m2"])
def test_encode_inverts_decode(name: str) -> None:
    bits = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 6, "e3m2": 6}[name]
    codes = np.arange(1 << bits, dtype=np.uint8)
    values = formats.decode(name, codes)
    finite = np.isfinite(values)
    assert (formats.encode(name, values[finite]) == codes[finite]).all()


@given(FLOATS)
def test_encode_e4m3_saturating_as_torch_of_clamped(value: float) -> None:
    got = formats.encode("e4m3", np.array([value], np.float32))
    want = torch.tensor([value]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert got[0] == want[0]


@given(st.sampled_from(["e2m1", "e2m3", "e3m2"]), st.floats(-40, 40, width=32))
def test_encode_small_formats_is_nearest_with_ties_to_even(name: str, value: float) -> None:
    code = int(formats.encode(name, np.array([value], np.float32))[0])
    count = {"e2m1": 8, "e2m3": 32, "e3m2": 32}[name]
    values = [Fraction(float(v)) for v in formats.decode(name, np.arange(count, dtype=np.uint8))]
    distances = [abs(abs(Fraction(value)) - v) for v in values]
    best = [i for i, d in enumerate(distances) if d == min(distances)]
    assert code % count == (best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0))
    assert (code >= count) == bool(np.signbit(np.float32(value)))


@given(FLOATS)
def test_bf16_and_f16_round_as_torch(value: float) -> None:
    x = np.array([value], np.float32)
    tensor = torch.from_numpy(x)
    assert formats.encode_bf16(x)[0] == tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)[0]
    assert formats.encode_f16(x)[0] == tensor.to(torch.float16).view(torch.int16).numpy().view(np.uint16)[0]
    assert formats.decode_bf16(formats.encode_bf16(x))[0] == tensor.to(torch.bfloat16).float()[0]


def test_nan_is_canonical() -> None:
    nan = np.array([np.nan], np.float32)
    assert formats.encode_bf16(nan)[0] == formats.encode_f16(nan)[0] == 0x7FFF
    assert formats.encode("e4m3", nan)[0] == 0x7F and formats.encode("e2m1", nan)[0] == 7


@given(*[st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)] * 3)
def test_fma_is_rounded_once(a: float, b: float, c: float) -> None:
    got = formats.fma32(*(np.array([v], np.float32) for v in (a, b, c)))[0]
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    below, above = np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))
    error = abs(Fraction(float(got)) - exact)
    assert all(error <= abs(Fraction(float(v)) - exact) for v in (below, above))


def test_fma_where_rounding_twice_is_wrong() -> None:
    a, b, c = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    got = formats.fma32(np.array([a]), np.array([b]), np.array([c]))[0]
    assert got == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert np.float32(np.float64(a) * b + np.float64(c)) == np.float32(1 + 2.0**-11)


def test_unpack_nibbles_gives_the_low_one_first() -> None:
    assert formats.unpack_nibbles(np.array([[0x21, 0x43]], np.uint8)).tolist() == [[1, 2, 3, 4]]
