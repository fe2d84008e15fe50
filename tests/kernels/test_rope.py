"""Rotary embedding, cache insertion and their fusion with the per-head norms, against the references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.kernel import OpCall, Operand
from mmcompile.targets import sm90
from mmcompile.targets._kernels import rope

SPEC, ARCH = sm90.TARGET.spec, sm90.TARGET.spec.architectures[0]
ROPE, INSERT, FUSED = rope.TEMPLATES
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def make_table(width: int, positions: int = 64) -> Tensor:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(width // 2) * 2 / width)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def assert_same_cache(out: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    """Equal where both are NaN (rows that nothing wrote) and within ``tolerance``, relative, elsewhere."""
    torch.testing.assert_close(out.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("heads", "d", "r", "dtype"), [
    (9, 64, 64, BF16), (3, 80, 80, F16), (40, 128, 64, BF16), (1, 96, 24, F32), (5, 64, 64, F32),
])
def test_rope_is_exact_in_the_rounding_points(runner, normal, heads, d, r, dtype):
    x = normal(5, heads + 3, d, dtype=dtype)[:, 1 : heads + 1]
    positions = torch.tensor([0, 63, 7, 7, 31], dtype=torch.int64 if heads % 2 else torch.int32)
    tensors = {"x": x, "positions": positions, "cos_sin": make_table(r).to(BF16 if heads == 3 else F32)}
    outcome = runner.run_op(ROPE, tensors, {}, SPEC, ARCH, rows={"x": "tokens", "result": "tokens"},
                            symbols={"tokens": 5})
    torch.testing.assert_close(outcome.results[0], outcome.references[0], rtol=0, atol=1e-6 if dtype == F32 else 0)


@pytest.mark.parametrize(("heads", "d", "page", "dtype", "cache_dtype"), [
    (3, 64, 64, BF16, BF16), (3, 80, 16, BF16, F8), (2, 96, 128, F16, F32), (17, 128, 16, F32, F8),
    (1, 64, 24, F32, F16),
])
def test_insert_writes_only_its_slots(runner, normal, heads, d, page, dtype, cache_dtype):
    rows = normal(6, 2 * heads, d, dtype=dtype, scale=300.0)
    slots = torch.tensor([0, 3 * page - 1, -1, page, page + 5, -7])
    tensors = {"k": rows[:, :heads], "v": rows[:, heads:], "slot_mapping": slots,
               "kv_cache": torch.full((3, heads, page, 2 * d), math.nan).to(cache_dtype)}
    outcome = runner.run_op(INSERT, tensors, {}, SPEC, ARCH, rows={"k": "tokens", "v": "tokens"}, symbols={"tokens": 6})
    assert_same_cache(outcome.tensors["kv_cache"], outcome.reference_tensors["kv_cache"])
    assert int((~outcome.tensors["kv_cache"].float().isnan()).sum()) == 4 * heads * 2 * d


FUSED_CASES = [
    # heads, kv_heads, head_dim, rotary, q norm, k norm, offset, round, dtype, cache dtype
    (9, 3, 64, 64, False, False, 0.0, True, BF16, BF16),
    (8, 2, 128, 128, True, True, 0.0, True, BF16, F8),
    (4, 1, 80, 32, True, False, 1.0, False, F16, F16),
    (3, 1, 96, 96, False, True, 1.0, True, F32, F32),
]


@pytest.mark.parametrize("case", FUSED_CASES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_fused_matches_reference(runner, normal, case, tokens):
    heads, kv_heads, d, r, q_norm, k_norm, offset, rounded, dtype, cache_dtype = case
    width, page = (heads + 2 * kv_heads) * d, 16
    slots = torch.tensor([17, -1, 0, 31, 5])[:tokens]
    tensors: dict[str, Any] = {
        "qkv": normal(tokens, width + 64, dtype=dtype)[:, :width],
        "q_weight": normal(d, dtype=F32 if heads == 4 else dtype) if q_norm else None,
        "k_weight": normal(d, dtype=dtype) if k_norm else None,
        "positions": torch.tensor([9, 0, 63, 1, 2], dtype=torch.int32)[:tokens], "cos_sin": make_table(r),
        "kv_cache": torch.full((2, kv_heads, page, 2 * d), math.nan).to(cache_dtype), "slot_mapping": slots,
    }
    attributes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": d, "eps": 1e-5, "weight_offset": offset,
                  "round_before_scale": rounded}
    outcome = runner.run_op(FUSED, tensors, attributes, SPEC, ARCH, rows={"qkv": "tokens", "result": "tokens"},
                            symbols={"tokens": tokens})
    bound = 1e-6 if dtype == F32 else 1e-3 if q_norm or k_norm else 0.0
    assert outcome.errors[0] <= bound
    tolerance = 1e-6 if dtype == F32 else 2**-3 if cache_dtype == F8 else 2**-7
    assert_same_cache(outcome.tensors["kv_cache"], outcome.reference_tensors["kv_cache"],
                      tolerance if k_norm else 0.0)


def operand(*shape: int | str, dtype: str = "bfloat16") -> Operand:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size if isinstance(size, int) else step
    return Operand(shape, tuple(reversed(strides)), dtype)


@pytest.mark.parametrize(("change", "reason"), [
    ({"cos_sin": operand(64, 130, dtype="float32")}, "cos_sin"),
    ({"cos_sin": operand(64, 33, dtype="float32")}, "cos_sin"),
    ({"positions": operand("tokens", dtype="float32")}, "positions"),
    ({"x": operand("tokens", 3, 64, dtype="float64")}, "x must"),
    ({"x": Operand(("tokens", 3, 64), (192, 1, 3), "bfloat16")}, "last stride"),
])
def test_rope_refuses(change, reason):
    operands = {"x": operand("tokens", 3, 64), "positions": operand("tokens", dtype="int64"),
                "cos_sin": operand(64, 64, dtype="float32")} | change
    assert reason in rope._refuse_rope(OpCall("rope", operands, (operands["x"],), {}), SPEC, ARCH)
