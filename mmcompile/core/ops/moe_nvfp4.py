"""Mixture of experts with NVFP4 weights, and the quantizer of stacked expert weights."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.core.formats import nvfp4
from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.linear import linear_nvfp4
from mmcompile.core.ops.moe import ACTIVATIONS, apply_gate


def _check(gate_up_packed: Tensor, down_packed: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    experts, rows, half = gate_up_packed.shape
    if (experts, 2 * half, rows) != (down_packed.shape[0], down_packed.shape[1], 4 * down_packed.shape[2]):
        raise ValueError(
            f"gate_up {list(gate_up_packed.shape)} and down {list(down_packed.shape)} do not belong together"
        )


def _fake_moe_nvfp4(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_global_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_global_scale: Tensor,
    residual: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    _check(gate_up_packed, down_packed, activation)
    return x.new_empty((x.shape[0], down_packed.shape[1]))


@define_op(fake=_fake_moe_nvfp4)
def moe_nvfp4(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    gate_up_global_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    down_global_scale: Tensor,
    residual: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """``moe`` with NVFP4 expert weights and unquantized activations (W4A16).

    Args:
        x, experts, weights, residual, activation, alpha, limit: as in ``moe``.
        gate_up_packed: uint8 [experts, 2 n, k/2], rows [gate | up]. gate_up_scale: float8_e4m3fn [experts, 2 n, k/16].
        gate_up_global_scale: fp32 [experts, 2 n], one multiplier a row: gate and up keep their own, so that bringing
            them together never requantizes.
        down_packed, down_scale, down_global_scale: likewise of [experts, k, n].

    Every projection is that of ``linear_nvfp4``; the sum is that of ``moe``. Returns [tokens, k].
    """
    _check(gate_up_packed, down_packed, activation)
    outputs = torch.zeros((*experts.shape, down_packed.shape[1]), dtype=weights.dtype, device=x.device)
    for expert in torch.unique(experts[experts >= 0]).tolist():
        token, place = torch.where(experts == expert)
        gate_up = linear_nvfp4(x[token], gate_up_packed[expert], gate_up_scale[expert], gate_up_global_scale[expert])
        hidden = apply_gate(gate_up, activation, alpha, limit)
        projected = linear_nvfp4(hidden, down_packed[expert], down_scale[expert], down_global_scale[expert])
        outputs[token, place] = projected.float() * weights[token, place, None]
    total = outputs.sum(1).to(x.dtype)
    return total if residual is None else total + residual


def _fake_nvfp4_quantize_experts(weight: Tensor, method: str = "max6") -> tuple[Tensor, Tensor, Tensor]:
    experts, n, k = weight.shape
    return (
        weight.new_empty((experts, n, k // 2), dtype=torch.uint8),
        weight.new_empty((experts, n, k // nvfp4.BLOCK), dtype=torch.float8_e4m3fn),
        weight.new_empty((experts, n), dtype=torch.float32),
    )


@define_op(fake=_fake_nvfp4_quantize_experts)
def nvfp4_quantize_experts(weight: Tensor, method: str = "max6") -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the stacked weights [experts, n, k], every expert as ``nvfp4_quantize`` would.

    Returns: packed uint8 [experts, n, k/2], scale e4m3 [experts, n, k/16], global_scale fp32 [experts, n]: one value an
    expert, repeated for its rows, so that the gate and up rows of one expert share it as ModelOpt's export requires.
    """
    packed, scale, global_scale = _fake_nvfp4_quantize_experts(weight, method)
    for expert, matrix in enumerate(weight):
        packed[expert], scale[expert], global_scale[expert] = nvfp4.encode(matrix, method=method)
    return packed, scale, global_scale


def _fake_nvfp4_dequantize_experts(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*packed.shape[:2], packed.shape[2] * 2), dtype=dtype)


@define_op(fake=_fake_nvfp4_dequantize_experts)
def nvfp4_dequantize_experts(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of nvfp4_quantize_experts, in fp32 and rounded once to ``dtype``. Returns [experts, n, k]."""
    weight = _fake_nvfp4_dequantize_experts(packed, scale, global_scale, dtype)
    for expert in range(packed.shape[0]):
        weight[expert] = nvfp4.decode_blocks(packed[expert], scale[expert]) * global_scale[expert][:, None]
    return weight
