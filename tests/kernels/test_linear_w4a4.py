"""NVFP4 activations by NVFP4 weights: quantization bit for bit, products against the reference, tails, epilogues."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.discover import load_module
from mmcompile.core.formats import nvfp4
from mmcompile.core.ops.linear import nvfp4_quantize
from mmcompile.core.ops.w4a4 import linear_w4a4, nvfp4_quantize_activations
from mmcompile.targets._kernels.linear_w4a4 import TEMPLATES

QUANTIZE, GEMM = TEMPLATES
ROWS = {"x": "tokens", "result": "tokens"}
SPEC = load_module("targets", "sm100").TARGET.spec


def make_tensors(normal, tokens, rows, k, activation, bias, residual):
    packed, scale, global_scale = nvfp4_quantize(normal(rows, k, dtype=torch.float32, scale=k**-0.5))
    x_packed, x_scale, x_global_scale = nvfp4_quantize_activations(normal(tokens, k, dtype=torch.bfloat16))
    width = rows // 2 if activation == "swiglu" else rows
    return {
        "x_packed": x_packed, "x_scale": x_scale, "x_global_scale": x_global_scale, "packed": packed, "scale": scale,
        "global_scale": global_scale * (1 + torch.arange(rows) % 3),
        "bias": normal(rows, dtype=torch.bfloat16) if bias else None,
        "residual": normal(tokens, width, dtype=torch.bfloat16) if residual else None,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "k"), [(1, 16), (3, 80), (2, 576)])
def test_quantization_is_bit_exact(runner, normal, tokens, k, dtype):
    x = normal(tokens, k, dtype=dtype)
    x[0, :16] = 0
    for outcome in runner.run_everywhere(QUANTIZE, {"x": x}, {}, rows=ROWS, symbols={"tokens": tokens}):
        for got, want in zip(outcome.results, outcome.references, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@settings(max_examples=8, deadline=None)
@given(exponent=st.integers(-100, 100), seed=st.integers(0, 99))
def test_quantization_at_any_magnitude(runner, exponent, seed):
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    outcome = runner.run_op(QUANTIZE, {"x": x}, {}, SPEC, SPEC.architectures[0], rows=ROWS, symbols={"tokens": 2})
    for got, want in zip(outcome.results, outcome.references, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("case", [
    (1, 20, 576, "none", False, True),
    (17, 44, 320, "none", True, False),
    (65, 48, 48, "swiglu", True, True),
    (130, 24, 16, "swiglu", False, False),
], ids=str)
def test_gemm_matches_reference(runner, normal, case):
    tensors = make_tensors(normal, *case)
    attributes = {"dtype": torch.bfloat16, "activation": case[3]}
    rows = {name: "tokens" for name in ("x_packed", "x_scale", "x_global_scale", "residual", "result")}
    for outcome in runner.run_everywhere(GEMM, tensors, attributes, rows=rows, symbols={"tokens": case[0]}):
        assert max(outcome.errors) <= 1e-3


def test_rows_are_quantized_on_their_own():
    x = torch.randn(5, 64) * torch.tensor([1e-4, 1.0, 3.0, 100.0, 0.0])[:, None]
    packed, scale, multiplier = nvfp4_quantize_activations(x)
    for i in range(4):
        alone = nvfp4.encode(x[i : i + 1])
        assert torch.equal(alone[0][0], packed[i]) and torch.equal(alone[1][0].float(), scale[i].float())
        assert alone[2] == multiplier[i]
    assert multiplier[4] == 1 and not packed[4].any()


def test_reference_is_the_product_of_the_decoded_sides():
    x, w = torch.randn(3, 64), torch.randn(8, 64)
    a, b = nvfp4_quantize_activations(x), nvfp4_quantize(w)
    left = nvfp4.decode_blocks(a[0], a[1]) * a[2][:, None]
    right = nvfp4.decode_blocks(b[0], b[1]) * b[2][:, None]
    torch.testing.assert_close(linear_w4a4(*a, *b, torch.float32), left @ right.T)
