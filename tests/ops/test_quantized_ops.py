"""linear_mxfp8 and moe_nvfp4 against the dense operations on decoded weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.formats import mxfp8, nvfp4
from mmcompile.core.ops import linear_mxfp8, moe_nvfp4  # noqa: F401

MM = torch.ops.mm


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 4), n=st.sampled_from([2, 6]), blocks=st.integers(1, 3), bias=st.booleans(),
    residual=st.booleans(), activation=st.sampled_from(["none", "swiglu"]),
)  # fmt: skip
def test_linear_mxfp8(tokens, n, blocks, bias, residual, activation):
    k, out = 32 * blocks, n // 2 if activation == "swiglu" else n
    values, scale = MM.mxfp8_quantize(noise(n, k))
    x = noise(tokens, k, seed=1)
    extra = (noise(n, seed=2) if bias else None, noise(tokens, out, seed=3) if residual else None, activation)
    have = MM.linear_mxfp8(x, values, scale, *extra)
    want = MM.linear(x, MM.mxfp8_dequantize(values, scale, torch.float32), *extra)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
    assert have.shape == (tokens, out)


def test_linear_mxfp8_multiplies_in_fp32_and_rounds_once():
    values, scale = MM.mxfp8_quantize(noise(8, 64))
    x = noise(3, 64, seed=1, dtype=torch.bfloat16)
    exact = x.double() @ mxfp8.decode(values, scale).double().T
    have = MM.linear_mxfp8(x, values, scale)
    assert have.dtype == torch.bfloat16
    torch.testing.assert_close(have.double(), exact, rtol=2.0**-8, atol=1e-6)


def quantize_apart(weight):
    """Gate and up halves quantized on their own, so that rows of one expert differ in their global scale."""
    parts = []
    for matrix in weight:
        halves = [nvfp4.encode(half) for half in matrix.chunk(2)]
        rows = [g.expand(len(p)) for p, _, g in halves]
        parts.append((*(torch.cat([h[i] for h in halves]) for i in (0, 1)), torch.cat(rows)))
    return [torch.stack([p[i].view(torch.uint8) if i == 1 else p[i] for p in parts]) for i in range(3)]


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_moe_nvfp4_is_moe_on_decoded_weights(activation, apart, residual):
    count, k, n = 5, 32, 16
    gate_up, down = noise(count, 2 * n, k) * 0.3, noise(count, k, n, seed=1) * 0.3
    gate_up[:, n:] *= 8
    first = quantize_apart(gate_up) if apart else MM.nvfp4_quantize_experts(gate_up)
    first = (first[0], first[1].view(torch.float8_e4m3fn), first[2])
    second = MM.nvfp4_quantize_experts(down)
    x = noise(4, k, seed=2)
    experts = torch.tensor([[0, 3], [4, -1], [-1, -1], [1, 1]], dtype=torch.int32)
    weights = noise(4, 2, seed=3).abs()
    extra = (noise(4, k, seed=4) if residual else None, activation, 1.702, 7.0)
    have = MM.moe_nvfp4(x, experts, weights, *first, *second, *extra)
    decoded = [MM.nvfp4_dequantize_experts(*parts, torch.float32) for parts in (first, second)]
    want = MM.moe(x, experts, weights, *decoded, *extra)
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_experts_are_quantized_one_by_one():
    weight = noise(3, 8, 32) * torch.tensor([1.0, 0.01, 10.0])[:, None, None]
    packed, scale, global_scale = MM.nvfp4_quantize_experts(weight, "search")
    for i in range(3):
        want = nvfp4.encode(weight[i], method="search")
        assert torch.equal(packed[i], want[0]) and torch.equal(scale[i].float(), want[1].float())
        assert torch.equal(global_scale[i], want[2].expand(8))


def shapes(results):
    tensors = results if isinstance(results, tuple) else (results,)
    return [(tuple(t.shape), t.dtype) for t in tensors]


def test_fakes_agree():
    """What an operation gives on meta tensors is what it gives on real ones."""
    stack, quantized = noise(2, 64, 32), MM.mxfp8_quantize(noise(4, 64))
    first, second = MM.nvfp4_quantize_experts(stack), MM.nvfp4_quantize_experts(noise(2, 32, 32))
    experts = torch.tensor([[0, 1]], dtype=torch.int32)
    for target, arguments in [
        (MM.mxfp8_quantize, (noise(4, 64),)),
        (MM.mxfp8_dequantize, (*quantized, torch.bfloat16)),
        (MM.linear_mxfp8, (noise(3, 2, 64, dtype=torch.bfloat16), *quantized)),
        (MM.linear_mxfp8, (noise(3, 64), *quantized, None, None, "swiglu")),
        (MM.nvfp4_quantize_experts, (stack,)),
        (MM.nvfp4_dequantize_experts, (*first, torch.bfloat16)),
        (MM.moe_nvfp4, (noise(1, 32, dtype=torch.bfloat16), experts, noise(1, 2), *first, *second)),
    ]:
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        assert shapes(target(*meta)) == shapes(target(*arguments)), target


def test_wrong_arguments():
    first, second = MM.nvfp4_quantize_experts(noise(2, 64, 32)), MM.nvfp4_quantize_experts(noise(2, 32, 48))
    experts = torch.tensor([[0, 1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="do not belong together"):
        MM.moe_nvfp4(noise(1, 32), experts, noise(1, 2), *first, *second)
    second = MM.nvfp4_quantize_experts(noise(2, 32, 32))
    with pytest.raises(ValueError, match="activation must be one of"):
        MM.moe_nvfp4(noise(1, 32), experts, noise(1, 2), *first, *second, None, "relu")
