"""Conversions of fp8 and fp4: every code, every op_sel, against tables written down independently."""

from __future__ import annotations

import numpy as np
import pytest
from gfx950_support import E2M1, E4M3, E5M2, from_bf16, run_snippet, to_bf16

CODES = np.arange(256)
SCALE = np.float32(3.5).view(np.uint32)
"""Only its exponent counts: the factor is 2."""


@pytest.mark.parametrize("to", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("name", "table"), [("fp8", E4M3), ("bf8", E5M2)])
@pytest.mark.parametrize("word", [0, 1])
def test_eight_bit_codes(to, name, table, word):
    codes = np.stack([CODES, CODES[::-1]], axis=1)
    for part in range(4):
        chosen = codes[64 * part : 64 * part + 64]
        packed = (chosen[:, 0] | chosen[:, 1] << 8) << 16 * word
        body = f"v_cvt_scalef32_pk_{to}_{name} {'v[10:11]' if to == 'f32' else 'v10'}, v1, v2 op_sel:[{word},0,0]"
        outputs = run_snippet(body, [packed, np.full(64, SCALE)], ["v10", "v11"] if to == "f32" else ["v10"])
        for column, got in enumerate(_unpack(to, outputs)):
            expected = 2 * table[chosen[:, column]]
            with np.errstate(over="ignore"):
                expected = expected.astype(np.float16).astype(float) if to == "f16" else expected
            assert np.array_equal(got, expected, equal_nan=True)


def _unpack(to: str, outputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    if to == "f32":
        return outputs[0].view(np.float32).astype(float), outputs[1].view(np.float32).astype(float)
    halves = [outputs[0] & 0xFFFF, outputs[0] >> 16]
    if to == "bf16":
        return tuple(from_bf16(h).astype(float) for h in halves)
    return tuple(h.astype(np.uint16).view(np.float16).astype(float) for h in halves)


@pytest.mark.parametrize("to", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("byte", range(4))
def test_fp4_codes(to, byte):
    for part in range(4):
        codes = CODES[64 * part : 64 * part + 64]
        target = "v[10:11]" if to == "f32" else "v10"
        body = f"v_cvt_scalef32_pk_{to}_fp4 {target}, v1, v2 op_sel:[{byte & 1},{byte >> 1},0]"
        outputs = run_snippet(body, [codes << 8 * byte, np.full(64, SCALE)], ["v10", "v11"] if to == "f32" else ["v10"])
        low, high = _unpack(to, outputs)
        assert np.array_equal(low, 2 * E2M1[codes & 15]) and np.array_equal(high, 2 * E2M1[codes >> 4])


@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize(("name", "table", "largest"), [("fp8", E4M3, 448.0), ("fp4", E2M1, 6.0)])
def test_narrowing_takes_the_nearest(source, name, table, largest):
    rng = np.random.default_rng(1)
    finite = np.unique(table[np.isfinite(table)])
    values = from_bf16(to_bf16(rng.uniform(-1.2 * largest, 1.2 * largest, 64)))
    scale = np.full(64, np.float32(2).view(np.uint32))
    pair = (to_bf16(values).astype(np.uint32) * 0x10001) if source == "bf16" else values.view(np.uint32)
    registers = "v1, v1, v2" if source == "f32" else "v1, v2"
    (result,) = run_snippet(
        f"v_mov_b32_e32 v10, 0\nv_cvt_scalef32_pk_{name}_{source} v10, {registers}", [pair, scale], ["v10"]
    )
    width = 4 if name == "fp4" else 8
    got = table[result & ((1 << width) - 1)]
    assert np.array_equal(got, table[result >> width & ((1 << width) - 1)])
    clipped = np.clip(values / 2, -largest, largest).astype(float)
    nearest = np.abs(finite[None, :] - clipped[:, None]).min(axis=1)
    assert np.allclose(np.abs(got - clipped), nearest, atol=0)
