"""Mixture of experts: the router, its choice of experts, the experts, and SwiGLU as gpt-oss clamps it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.norm import swiglu

ACTIVATIONS = ("swiglu", "swiglu_oai")
SCORES = ("sigmoid", "softmax")


def _fake_swiglu_oai(gate: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@define_op(fake=_fake_swiglu_oai, row_wise=True)
def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """``(u + 1) * (g * sigmoid(alpha * g))`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.

    The activation of gpt-oss, also MiniMax-M3's (alpha 1.702, limit 7). [..., n] each; strided views allowed; rounded
    to the dtype after each step.
    """
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1.0) * (gate * torch.sigmoid(gate * alpha))


def _fake_route_top_k(logits: Tensor, top_k: int, scores: str) -> tuple[Tensor, Tensor]:
    if scores not in SCORES:
        raise ValueError(f"scores must be one of {SCORES}, got {scores!r}")
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@define_op(fake=_fake_route_top_k)
def route_top_k(
    logits: Tensor, bias: Tensor | None, top_k: int, scale: float, scores: str = "sigmoid", normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """Choose experts by score (DeepSeek-V3's router without groups, arXiv 2412.19437; MiniMax-M3; Mixtral; Qwen3-MoE).

    Args:
        logits: [tokens, experts], any float dtype; everything after is fp32. bias: fp32 [experts], added to the scores
            for the choice only (``e_score_correction_bias``). top_k: experts a token.
        scale: multiplies the weights (``routed_scaling_factor``). scores: "sigmoid", or "softmax" over all experts.
        normalize: divide the weights by their sum (``norm_topk_prob``).

    Returns: weights fp32 [tokens, top_k], ``scale * s / sum of the chosen s`` of the scores s without bias, or
    ``scale * s``; experts int32 [tokens, top_k], by falling biased score, the lower id first among equal ones.
    """
    given = torch.sigmoid(logits.float()) if scores == "sigmoid" else torch.softmax(logits.float(), -1)
    ranking = given if bias is None else given + bias
    experts = torch.sort(ranking, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = given.gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    return weights * scale, experts.to(torch.int32)


def apply_gate(gate_up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """[..., 2 n] = [gate | up] -> [..., n] by one of ACTIVATIONS; alpha and limit are swiglu_oai's."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return swiglu_oai(gate, up, alpha, limit) if activation == "swiglu_oai" else swiglu(gate, up)


def check_experts(gate_up: Tensor, down: Tensor, activation: str, packing: int = 1) -> None:
    """Raise ValueError unless gate_up [experts, 2 n, k / packing] and down [experts, k, n / packing] fit together."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    experts, rows, columns = gate_up.shape
    if (experts, packing * columns, rows) != (down.shape[0], down.shape[1], 2 * packing * down.shape[2]):
        raise ValueError(f"gate_up {list(gate_up.shape)} and down {list(down.shape)} do not belong together")


def sum_experts(
    run: Callable[[int, Tensor], Tensor], x: Tensor, experts: Tensor, weights: Tensor, residual: Tensor | None
) -> Tensor:
    """The weighted sum of ``moe``: ``run`` gives an expert's result [rows, k] for the rows of x that chose it."""
    outputs = torch.zeros((*experts.shape, x.shape[1]), dtype=weights.dtype, device=x.device)
    for expert in torch.unique(experts[experts >= 0]).tolist():
        token, place = torch.where(experts == expert)
        outputs[token, place] = run(expert, x[token]).float() * weights[token, place, None]
    total = outputs.sum(1).to(x.dtype)
    return total if residual is None else total + residual


def _fake_moe(x: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    check_experts(gate_up, down, activation)
    return x.new_empty((x.shape[0], down.shape[1]))


@define_op(fake=_fake_moe)
def moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Weighted sum of the feed-forward layers that the router chose for every token.

    Args:
        x: [tokens, k]. experts: int [tokens, top_k], negative = an empty place. weights: fp32 [tokens, top_k], the
            routed scaling already in them (``route_top_k``).
        gate_up: [experts, 2 n, k], rows [gate | up]. down: [experts, k, n]. Both in x's dtype.
        residual: [tokens, k], added last: the output of a shared expert, which is an ordinary dense layer.
        activation: "swiglu", or "swiglu_oai" with ``alpha`` and ``limit`` (as in that operation).

    Every projection is rounded to x's dtype; the weighted sum over the places in their order is fp32, rounded once, and
    then the residual is added. Returns [tokens, k].
    """
    check_experts(gate_up, down, activation)

    def run(expert: int, rows: Tensor) -> Tensor:
        return apply_gate(rows @ gate_up[expert].T, activation, alpha, limit) @ down[expert].T

    return sum_experts(run, x, experts, weights, residual)
