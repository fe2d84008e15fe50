"""NVFP4 activations by NVFP4 weights (W4A4): what Blackwell's and Rubin's tensor cores multiply in one instruction."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.core.formats import nvfp4
from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.linear import apply_epilogue, count_columns, empty_nvfp4


def _fake_quantize_activations(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_nvfp4(x)


@define_op(fake=_fake_quantize_activations)
def nvfp4_quantize_activations(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize activations x [tokens, k], k a multiple of 16, to NVFP4, every token with a global scale of its own.

    Returns: packed uint8 [tokens, k/2], scale float8_e4m3fn [tokens, k/16], global_scale fp32 [tokens] (multipliers).
    A token's result does not depend on the others. Formula: :func:`mmcompile.core.formats.nvfp4.encode_rows`.
    """
    return nvfp4.encode_rows(x)


def _fake_linear_w4a4(x_packed: Tensor, packed: Tensor, dtype: torch.dtype, activation: str) -> Tensor:
    return x_packed.new_empty((x_packed.shape[0], count_columns(packed.shape[0], activation)), dtype=dtype)


@define_op(fake=_fake_linear_w4a4)
def linear_w4a4(
    x_packed: Tensor,
    x_scale: Tensor,
    x_global_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Linear layer with NVFP4 activations and weights.

    Args:
        x_packed: uint8 [tokens, k/2]. x_scale: float8_e4m3fn [tokens, k/16]. x_global_scale: fp32 [tokens].
        packed, scale, global_scale: the weight, as in ``linear_nvfp4``. dtype: of the result.
        bias, residual, activation: as in ``linear``.

    ``y[m, j] = x_global_scale[m] * global_scale[j] * sum_i x[m, i] * w[j, i]`` with x and w the e2m1 values times their
    block scales: the products are exact in fp32, the sum is accumulated in fp32; y plus the bias is rounded to
    ``dtype`` before the rest of the epilogue.
    """
    x, weight = nvfp4.decode_blocks(x_packed, x_scale), nvfp4.decode_blocks(packed, scale)
    y = F.linear(x, weight) * (x_global_scale[:, None] * global_scale)
    y = y if bias is None else y + bias.float()
    return apply_epilogue(y.to(dtype), None, residual, activation)
