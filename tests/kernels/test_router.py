"""The router and the clamped SwiGLU against the references: ties, bias, NaN, odd sizes, rounding, strided views."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.targets._kernels import router
from tests.kernels.sparse_cases import ARCH, SPEC

ROUTE, SWIGLU = router.TEMPLATES
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def route(runner: Any, logits: Tensor, bias: Tensor | None, top_k: int, scale: float = 2.0) -> Any:
    """Run on every distinct source; weights agree to a few fp32 roundings of exp, sum and quotient; experts exactly."""
    outcomes = runner.run_everywhere(ROUTE, {"logits": logits, "bias": bias}, {"top_k": top_k, "scale": scale},
                                     rows={"logits": "tokens", "result": "tokens"},
                                     symbols={"tokens": logits.shape[0]})
    for outcome in outcomes:
        (weights, experts), (want_weights, want_experts) = outcome.results, outcome.references
        assert torch.equal(experts, want_experts)
        torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=0, equal_nan=True)
    return outcomes[0].results


def spaced_logits(tokens: int, experts: int) -> Tensor:
    """Logits in random order whose scores are far more than a rounding apart."""
    generator = torch.Generator().manual_seed(experts)
    steps = torch.linspace(-4, 4, experts)
    return torch.stack([steps[torch.randperm(experts, generator=generator)] for _ in range(tokens)])


@pytest.mark.parametrize(("tokens", "experts", "top_k", "dtype", "biased"), [
    (1, 128, 4, F32, True), (17, 128, 4, F32, False), (5, 100, 8, F32, True), (3, 16, 1, BF16, False),
    (2, 8, 8, F16, True), (2, 1, 1, F32, False), (2, 300, 6, F32, True),
])
def test_router_matches_reference(runner, normal, tokens, experts, top_k, dtype, biased):
    logits = spaced_logits(tokens, experts).to(dtype)
    bias = torch.linspace(0.5, -0.5, experts) ** 3 if biased else None
    weights, _ = route(runner, logits, bias, top_k)
    torch.testing.assert_close(weights.sum(-1), torch.full((tokens,), 2.0))


def test_equal_scores_go_to_the_lower_expert(runner):
    logits = torch.tensor([[0.0] * 8, [40.0, 1.0, 40.0, 41.0, -3.0, 40.0, 2.0, 2.0], [-0.0, 0.0] * 4])
    _, experts = route(runner, logits, None, 3)
    assert experts.tolist() == [[0, 1, 2], [0, 2, 3], [0, 1, 2]]


def test_the_bias_chooses_but_does_not_weigh(runner):
    logits, bias = torch.tensor([[3.0, 0.0, 2.0, -1.0]]), torch.tensor([-5.0, 0.0, 0.0, 5.0])
    weights, experts = route(runner, logits, bias, 2, 1.0)
    assert experts.tolist() == [[3, 2]]
    low, high = 1 / (1 + math.e), 1 / (1 + math.exp(-2.0))
    torch.testing.assert_close(weights, torch.tensor([[low, high]]) / (low + high))


def test_nan_logits_rank_first_as_in_torch(runner):
    route(runner, torch.tensor([[1.0, math.nan, 2.0, 0.0], [0.0, 1.0, math.nan, math.nan]]), None, 2)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "dtype"), [(3, 128, 8, F32), (2, 60, 4, BF16), (2, 1, 1, F32)])
def test_softmax_router_matches_reference(runner, tokens, experts, top_k, dtype, normalize):
    logits = spaced_logits(tokens, experts)
    logits[0, experts // 2] = 30.0
    attributes = {"top_k": top_k, "scale": 1.5, "scores": "softmax", "normalize": normalize}
    outcomes = runner.run_everywhere(ROUTE, {"logits": logits.to(dtype), "bias": None}, attributes,
                                     rows={"logits": "tokens", "result": "tokens"}, symbols={"tokens": tokens})
    for outcome in outcomes:
        (weights, chosen), (want_weights, want_chosen) = outcome.results, outcome.references
        probabilities = torch.softmax(logits.to(dtype).float(), -1).gather(1, chosen.long())
        torch.testing.assert_close(weights, want_weights, rtol=4e-6, atol=1e-37)
        assert torch.equal(probabilities, probabilities.sort(-1, descending=True).values)
        assert torch.equal(chosen, want_chosen)


def test_strided_logits(runner):
    route(runner, torch.cat([spaced_logits(3, 16), torch.full((3, 4), math.nan)], 1)[:, :16], None, 4)


@pytest.mark.parametrize(("logits", "bias", "top_k", "reason"), [
    (torch.zeros((2, 8)), None, 9, "top_k is 9"),
    (torch.zeros((2, 64)), None, 33, "top_k is 33"),
    (torch.zeros((2, 2048)), None, 4, "2048 experts"),
    (torch.zeros((2, 8)), torch.zeros(8, dtype=BF16), 4, "bias"),
    (torch.zeros((2, 8), dtype=torch.int32), None, 4, "logits is int32"),
])
def test_router_refusals_name_the_reason(call_of, logits, bias, top_k, reason):
    call = call_of("route_top_k", {"logits": logits, "bias": bias}, {"top_k": top_k, "scale": 1.0}, {}, [])
    assert reason in ROUTE.refuse(call, SPEC, ARCH)


@pytest.mark.parametrize(("tokens", "width", "dtype"), [(1, 96, BF16), (17, 40, BF16), (2, 1500, F16), (3, 64, F32)])
def test_swiglu_oai_matches_reference(runner, normal, tokens, width, dtype):
    both = normal(tokens, 2 * width, dtype=dtype, scale=5.0)
    both[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    both[0, width + 4 : width + 7] = torch.tensor([math.nan, math.inf, -math.inf])
    tensors = {"gate": both[:, :width], "up": both[:, width:]}
    outcomes = runner.run_everywhere(SWIGLU, tensors, {"alpha": 1.702, "limit": 7.0},
                                     rows={"gate": "tokens", "up": "tokens", "result": "tokens"},
                                     symbols={"tokens": tokens})
    for outcome in outcomes:
        (have,), (want,) = outcome.results, outcome.references
        # One rounding of the sigmoid may go the other way, and carries through two products.
        torch.testing.assert_close(have, want, rtol=4 * torch.finfo(dtype).eps, atol=1e-30, equal_nan=True)
        assert have.dtype == dtype and bool(have[0].isnan().any())


def test_swiglu_oai_refuses_two_dtypes(call_of):
    call = call_of("swiglu_oai", {"gate": torch.zeros((2, 4)), "up": torch.zeros((2, 4), dtype=BF16)},
                   {"alpha": 1.702, "limit": 7.0}, {}, [])
    assert "one dtype" in SWIGLU.refuse(call, SPEC, ARCH)


def test_router_refuses_unknown_scores(call_of):
    call = call_of("route_top_k", {"logits": torch.zeros((2, 8)), "bias": None},
                   {"top_k": 2, "scale": 1.0, "scores": "tanh"}, {}, [])
    assert ROUTE.refuse(call, SPEC, ARCH) == "scores by tanh, not sigmoid or softmax"
