"""Embedding and linear layers, dense or with NVFP4 weights, with optional bias, SwiGLU and residual epilogues."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.core.formats import nvfp4
from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.norm import swiglu

ACTIVATIONS = ("none", "swiglu")


def _fake_embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@define_op(fake=_fake_embedding, row_wise=True)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``weight`` [vocabulary, hidden] at ``ids`` [...] (int32 or int64). Returns [..., hidden]."""
    return F.embedding(ids, weight)


def apply_epilogue(y: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """Bias, then activation, then residual, each rounded to y's dtype. ``swiglu`` reads y as [gate | up]."""
    if bias is not None:
        y = y + bias
    if activation == "swiglu":
        half = y.shape[-1] // 2
        y = swiglu(y[..., :half], y[..., half:])
    return y if residual is None else y + residual


def count_columns(rows: int, activation: str) -> int:
    """Columns of the result of a linear layer with ``rows`` weight rows; ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    return rows // 2 if activation == "swiglu" else rows


def _fake_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], count_columns(weight.shape[0], activation)))


@define_op(fake=_fake_linear, row_wise=True)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """``x @ weight.T`` with epilogue.

    Args:
        x: [..., k]. weight: [n, k], same dtype. bias: [n]. residual: [..., n] added last.
        activation: "none", or "swiglu": the n rows are [gate | up] and the result is ``silu(gate) * up``, [..., n/2].

    Returns: [..., n] or [..., n/2] in x's dtype; accumulation in fp32.
    """
    y = F.linear(x, weight, bias)
    return apply_epilogue(y, None, residual, activation)


def _fake_linear_nvfp4(x: Tensor, packed: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], count_columns(packed.shape[0], activation)))


@define_op(fake=_fake_linear_nvfp4, row_wise=True)
def linear_nvfp4(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Linear layer with NVFP4 weights and unquantized activations (W4A16).

    Args:
        x: [..., k], k a multiple of 16. packed: uint8 [n, k/2], even element in the low nibble.
        scale: float8_e4m3fn [n, k/16]. global_scale: fp32 [n], one multiplier a row (equal rows of one tensor share
            it; merged layers keep their own, so that merging never requantizes).
        bias, residual, activation: as in ``linear``.

    ``y[m, j] = global_scale[j] * sum_i x[m, i] * e2m1[j, i] * scale[j, i/16]``, accumulated in fp32, rounded to x's
    dtype before the epilogue.
    """
    weight = nvfp4.decode_blocks(packed, scale)
    y = (F.linear(x.float(), weight) * global_scale).to(x.dtype)
    return apply_epilogue(y, bias, residual, activation)


def empty_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, block scales and a global scale a row for ``weight`` [..., k]."""
    *rows, k = weight.shape
    return (
        weight.new_empty((*rows, k // 2), dtype=torch.uint8),
        weight.new_empty((*rows, k // nvfp4.BLOCK), dtype=torch.float8_e4m3fn),
        weight.new_empty(rows, dtype=torch.float32),
    )


def empty_decoded(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor for the values of the codes ``packed`` [..., k/2]."""
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=dtype)


@define_op(fake=empty_nvfp4)
def nvfp4_quantize(weight: Tensor, method: str = "max6") -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``weight`` [n, k] to NVFP4: (packed uint8 [n, k/2], scale e4m3 [n, k/16], global_scale fp32 [n]).

    ``method``: see :func:`mmcompile.core.formats.nvfp4.encode`. The global scale is the multiplier convention
    (ModelOpt's ``weight_scale_2``), repeated for every row.
    """
    packed, scale, global_scale = nvfp4.encode(weight, method=method)
    return packed, scale, global_scale.reshape(1).expand(weight.shape[0]).contiguous()


@define_op(fake=empty_decoded)
def nvfp4_dequantize(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of nvfp4_quantize, in fp32 and rounded once to ``dtype``. Returns [n, k]."""
    return (nvfp4.decode_blocks(packed, scale) * global_scale[:, None]).to(dtype)
