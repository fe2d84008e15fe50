"""RMSNorm and SwiGLU: row-wise operations between projections."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.core.ops.define import define_op


def _fake_rms_norm(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define_op(fake=_fake_rms_norm, row_wise=True)
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, round_before_scale: bool = True
) -> Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich 2019), in fp32.

    Args:
        x: [..., n], any float dtype.
        weight: [n].
        eps: added to the mean of squares.
        weight_offset: 0 for Llama, 1 for Gemma (``1 + w``).
        round_before_scale: True where the normalised value is rounded to ``x.dtype`` before the multiplication by the
            weight (transformers' Llama), False where the whole is computed in fp32 and rounded once (Gemma).

    Returns: [..., n] in x's dtype.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_before_scale:
        scale = weight if weight_offset == 0.0 else weight + weight_offset
        return (normed.to(x.dtype) * scale).to(x.dtype)
    return (normed * (weight.float() + weight_offset)).to(x.dtype)


def _fake_add_rms_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@define_op(fake=_fake_add_rms_norm, row_wise=True)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, round_before_scale: bool = True
) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` rounded to x's dtype; returns ``(rms_norm(s), s)``. Shapes as in rms_norm."""
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset, round_before_scale), total


def _fake_swiglu(gate: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@define_op(fake=_fake_swiglu, row_wise=True)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020), rounded after each step. [..., n] each; strided views allowed."""
    return F.silu(gate) * up
