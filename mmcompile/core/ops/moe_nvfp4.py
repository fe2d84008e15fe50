"""Mixture of experts with NVFP4 weights, and the quantizer of stacked expert weights."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.core.formats import nvfp4
from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.linear import empty_decoded, empty_nvfp4, linear_nvfp4
from mmcompile.core.ops.moe import apply_gate, check_experts, sum_experts


def _fake_moe_nvfp4(x: Tensor, gate_up_packed: Tensor, down_packed: Tensor, activation: str) -> Tensor:
    check_experts(gate_up_packed, down_packed, activation, packing=2)
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
    check_experts(gate_up_packed, down_packed, activation, packing=2)

    def run(expert: int, rows: Tensor) -> Tensor:
        gate_up = linear_nvfp4(rows, gate_up_packed[expert], gate_up_scale[expert], gate_up_global_scale[expert])
        hidden = apply_gate(gate_up, activation, alpha, limit)
        return linear_nvfp4(hidden, down_packed[expert], down_scale[expert], down_global_scale[expert])

    return sum_experts(run, x, experts, weights, residual)


@define_op(fake=empty_nvfp4)
def nvfp4_quantize_experts(weight: Tensor, method: str = "max6") -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the stacked weights [experts, n, k], every expert as ``nvfp4_quantize`` would.

    Returns: packed uint8 [experts, n, k/2], scale e4m3 [experts, n, k/16], global_scale fp32 [experts, n]: one value an
    expert, repeated for its rows, so that the gate and up rows of one expert share it as ModelOpt's export requires.
    """
    packed, scale, global_scale = empty_nvfp4(weight)
    for expert, matrix in enumerate(weight):
        packed[expert], scale[expert], global_scale[expert] = nvfp4.encode(matrix, method=method)
    return packed, scale, global_scale


@define_op(fake=empty_decoded)
def nvfp4_dequantize_experts(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of nvfp4_quantize_experts, in fp32 and rounded once to ``dtype``. Returns [experts, n, k]."""
    weight = empty_decoded(packed, dtype)
    for expert in range(packed.shape[0]):
        weight[expert] = nvfp4.decode_blocks(packed[expert], scale[expert]) * global_scale[expert][:, None]
    return weight
