"""Linear layers with MXFP8 weights, and the quantizer of their weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.core.formats import mxfp8
from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.linear import apply_epilogue, count_columns


def _fake_linear_mxfp8(x: Tensor, values: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], count_columns(values.shape[0], activation)))


@define_op(fake=_fake_linear_mxfp8, row_wise=True)
def linear_mxfp8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Linear layer with MXFP8 weights and unquantized activations (W8A16).

    Args:
        x: [..., k], k a multiple of 32. values: float8_e4m3fn [n, k]. scale: uint8 [n, k/32], exponents with bias 127.
        bias, residual, activation: as in ``linear``.

    ``y[m, j] = sum_i x[m, i] * values[j, i] * 2^(scale[j, i/32] - 127)``, accumulated in fp32, rounded to x's dtype
    before the epilogue.
    """
    y = F.linear(x.float(), mxfp8.decode(values, scale)).to(x.dtype)
    return apply_epilogue(y, bias, residual, activation)


def _fake_mxfp8_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    return (
        weight.new_empty((n, k), dtype=torch.float8_e4m3fn),
        weight.new_empty((n, k // mxfp8.BLOCK), dtype=torch.uint8),
    )


@define_op(fake=_fake_mxfp8_quantize)
def mxfp8_quantize(weight: Tensor, rule: str = "modelopt") -> tuple[Tensor, Tensor]:
    """Quantize ``weight`` [n, k] to MXFP8: (values e4m3 [n, k], scale uint8 [n, k/32]).

    ``rule``: see :func:`mmcompile.core.formats.mxfp8.encode`.
    """
    return mxfp8.encode(weight, rule=rule)


def _fake_mxfp8_dequantize(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)


@define_op(fake=_fake_mxfp8_dequantize)
def mxfp8_dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of mxfp8_quantize, exact in fp32 and rounded once to ``dtype``. Returns [n, k]."""
    return mxfp8.decode(values, scale).to(dtype)
