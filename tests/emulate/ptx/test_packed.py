"""Packed 8- and 4-bit arithmetic: every pair of codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from snippets import evaluate

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).to(torch.float64).numpy()


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """Saturating, by torch; NaN is 0x7f."""
    clipped = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float32).to(torch.float8_e4m3fn)
    return np.where(np.isnan(values), 0x7F, clipped.view(torch.uint8).numpy())


def pack(codes: np.ndarray, width: int) -> np.ndarray:
    """Groups of four codes as one number each."""
    shifts = width * np.arange(4, dtype=np.uint32)
    return (codes.reshape(-1, 4).astype(np.uint32) << shifts).sum(axis=1).astype(np.uint32)


def test_every_product_of_fp4_and_e4m3() -> None:
    fp4, e4m3 = (x.ravel() for x in np.meshgrid(np.arange(16), np.arange(256)))
    body = "cvt.u16.u32 %h, %a; mul.e4m3x4.e2m1x4.e4m3x4.satfinite %r, %h, %b;"
    got = evaluate(body, pack(fp4, 4), pack(e4m3, 8)).view(np.uint8)
    expected = encode_e4m3(E2M1[fp4] * decode_e4m3(e4m3))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_pairs_of_e4m3(op: str) -> None:
    codes = np.random.default_rng(0).integers(0, 256, (2, 4096))
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op](*decode_e4m3(codes).reshape(2, -1))
    got = evaluate(f"{op}.e4m3x4.e4m3x4.e4m3x4.satfinite %r, %a, %b;", pack(codes[0], 8), pack(codes[1], 8))
    np.testing.assert_array_equal(got.view(np.uint8), encode_e4m3(exact))


def test_fma_is_rounded_once() -> None:
    codes = np.random.default_rng(1).integers(0, 256, (3, 4096))
    a, b, c = decode_e4m3(codes).reshape(3, -1)
    got = evaluate("fma.e4m3x4.e4m3x4.e4m3x4.e4m3x4.satfinite %r, %a, %b, %c;", *(pack(x, 8) for x in codes))
    np.testing.assert_array_equal(got.view(np.uint8), encode_e4m3(a * b + c))
