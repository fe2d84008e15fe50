"""Mixture of experts: the operations against plain loops in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcompile.core.ops  # noqa: F401

MM = torch.ops.mm


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gate_plainly(g, u, alpha, limit):
    g, u = min(g, limit), max(-limit, min(u, limit))
    return (u + 1.0) * g / (1.0 + math.exp(-alpha * g))


def test_swiglu_oai_clamps_the_gate_from_above_only():
    values = [-30.0, -7.5, -1.0, 0.0, 0.5, 6.9, 7.0, 7.1, 30.0]
    gate = torch.tensor([g for g in values for _ in values])
    up = torch.tensor(values * len(values))
    have = MM.swiglu_oai(gate, up, 1.702, 7.0)
    want = [gate_plainly(g, u, 1.702, 7.0) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    torch.testing.assert_close(have.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    other = MM.swiglu_oai(gate, up, 1.0, 5.0)
    want = [gate_plainly(g, u, 1.0, 5.0) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    torch.testing.assert_close(other.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 5), experts=st.integers(1, 9), data=st.data(), has_bias=st.booleans(),
    scale=st.sampled_from([1.0, 2.0, 2.5]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_route_top_k(tokens, experts, data, has_bias, scale, dtype):
    top_k = data.draw(st.integers(1, experts))
    logits = noise(tokens, experts, dtype=dtype)
    bias = noise(experts, seed=1) if has_bias else None
    weights, chosen = MM.route_top_k(logits, bias, top_k, scale)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int32
    assert weights.shape == chosen.shape == (tokens, top_k)
    for t in range(tokens):
        scores = torch.sigmoid(logits[t].float())
        ranking = scores if bias is None else scores + bias
        want = sorted(range(experts), key=lambda e: (-float(ranking[e]), e))[:top_k]
        assert chosen[t].tolist() == want
        total = sum(float(scores[e]) for e in want)
        expected = torch.tensor([scale * float(scores[e]) / total for e in want])
        torch.testing.assert_close(weights[t], expected, rtol=1e-5, atol=1e-6)


def test_the_bias_chooses_but_does_not_weigh_and_ties_go_to_the_lower_expert():
    weights, chosen = MM.route_top_k(torch.tensor([[0.0, 2.0, 0.0, 0.0]]), torch.tensor([1.0, -1.0, 1.0, 0.0]), 3, 2.0)
    assert chosen.tolist() == [[0, 2, 3]]
    torch.testing.assert_close(weights, torch.full((1, 3), 2.0 / 3.0))


def compute_plainly(x, experts, weights, gate_up, down, activation, alpha, limit):
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    half = down.shape[2]
    for t in range(x.shape[0]):
        for place, e in enumerate(experts[t].tolist()):
            if e < 0:
                continue
            both = gate_up[e].double() @ x[t].double()
            if activation == "swiglu":
                gates = [g / (1.0 + math.exp(-g)) * u for g, u in zip(both[:half], both[half:], strict=True)]
            else:
                pairs = zip(both[:half].tolist(), both[half:].tolist(), strict=True)
                gates = [gate_plainly(g, u, alpha, limit) for g, u in pairs]
            out[t] += float(weights[t, place]) * (down[e].double() @ torch.tensor(gates, dtype=torch.float64))
    return out


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_moe(data):
    tokens, experts, width = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, experts))
    ids = [data.draw(st.permutations([*range(experts), -1, -1]))[:top_k] for _ in range(tokens)]
    chosen = torch.tensor(ids, dtype=torch.int32).reshape(tokens, top_k)
    activation = data.draw(st.sampled_from(["swiglu", "swiglu_oai"]))
    x, weights = noise(tokens, 8), noise(tokens, top_k, seed=1)
    gate_up, down = noise(experts, 2 * width, 8, seed=2), noise(experts, 8, width, seed=3)
    residual = noise(tokens, 8, seed=4) if data.draw(st.booleans()) else None
    have = MM.moe(x, chosen, weights, gate_up, down, residual, activation, 1.3, 2.0)
    want = compute_plainly(x, chosen, weights, gate_up, down, activation, 1.3, 2.0)
    want = want if residual is None else want + residual.double()
    assert have.shape == (tokens, 8)
    torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-4)


def test_moe_rounds_once_after_the_weighted_sum():
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    gate_up = torch.ones(2, 2, 2, dtype=torch.bfloat16) * 8
    down = torch.ones(2, 2, 1, dtype=torch.bfloat16) * torch.tensor([1.0, 1.0 / 256])[:, None, None].bfloat16()
    routed = MM.moe(x, torch.tensor([[0, 1]]), torch.tensor([[1.0, 1.0]]), gate_up, down)
    shared = torch.ones_like(routed)
    assert torch.equal(routed, torch.full((1, 2), 257.0).bfloat16())
    whole = MM.moe(x, torch.tensor([[0, 1]]), torch.tensor([[1.0, 1.0]]), gate_up, down, shared)
    assert torch.equal(whole, routed + shared)


@pytest.mark.parametrize(
    ("gate_up", "activation", "message"),
    [((2, 6, 4), "swiglu", "do not belong together"), ((3, 8, 4), "swiglu", "do not belong together"),
     ((2, 8, 4), "gelu", "activation must be one of")],
)  # fmt: skip
def test_moe_refuses(gate_up, activation, message):
    with pytest.raises(ValueError, match=message):
        MM.moe(noise(1, 4), torch.tensor([[0]]), noise(1, 1), noise(*gate_up), noise(2, 4, 4), None, activation)
