"""Rotary position embedding from a table, and the fused steps between the QKV projection and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.core.formats.cache_pages import check_cache
from mmcompile.core.ops.attention import insert_kv
from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.linear import linear, linear_nvfp4
from mmcompile.core.ops.linear_mxfp8 import linear_mxfp8
from mmcompile.core.ops.norm import rms_norm


def _fake_rope(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@define_op(fake=_fake_rope, row_wise=False)
def rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the first ``r`` dimensions of every head, NeoX halves (Su et al. 2021, pair (i, i + r/2)).

    Args:
        x: [tokens, heads, d]. positions: int [tokens]. cos_sin: [max_positions, r], row = [cos(r/2) | sin(r/2)],
            r even, r <= d; dimensions r..d pass through (partial rotary).

    Returns: [tokens, heads, d]; every product and the sum rounded to x's dtype, as transformers does.
    """
    half = cos_sin.shape[1] // 2
    row = cos_sin[positions.long()].to(x.dtype)[:, None, :]
    cos, sin = row[..., :half], row[..., half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _fake_from_projection(qkv: Tensor, kv_cache: Tensor, num_heads: int, head_dim: int, layout: str) -> Tensor:
    check_cache(kv_cache, layout, head_dim, sides=2)
    return qkv.new_empty((qkv.shape[0], num_heads, head_dim))


def _fake_from_hidden(x: Tensor, kv_cache: Tensor, num_heads: int, head_dim: int, layout: str) -> Tensor:
    return _fake_from_projection(x, kv_cache, num_heads, head_dim, layout)


@define_op(fake=_fake_from_projection, mutates=("kv_cache",))
def qk_norm_rope_insert(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    layout: str = "linear",
) -> Tensor:
    """Per-head RMSNorm of q and k (skipped where the weight is None), RoPE, and insertion of k and v in the cache.

    Args:
        qkv: [tokens, (num_heads + 2 num_kv_heads) * head_dim], row = [q | k | v].
        q_weight, k_weight: [head_dim], shared by all heads. positions, cos_sin: as in ``rope``.
        kv_cache, layout: written; see ``insert_kv``. slot_mapping: int64 [tokens], negative = do not insert.

    Returns: q, [tokens, num_heads, head_dim], normalised and rotated.
    """
    tokens = qkv.shape[0]
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = (part.reshape(tokens, -1, head_dim) for part in torch.split(qkv, widths, dim=-1))
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps, weight_offset, round_before_scale)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps, weight_offset, round_before_scale)
    rotated = rope(torch.cat([q, k], dim=1), positions, cos_sin)
    insert_kv(rotated[:, num_heads:], v, kv_cache, slot_mapping, layout)
    return rotated[:, :num_heads].contiguous()


@define_op(fake=_fake_from_hidden, mutates=("kv_cache",))
def qkv_norm_rope_insert(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    delta: Tensor | None = None,
    layout: str = "linear",
) -> Tensor:
    """``qk_norm_rope_insert(linear(x, weight, bias, residual=delta), ...)``.

    x: [tokens, k]. weight: [(H + 2 Hkv) * head_dim, k]. delta: [tokens, (H + 2 Hkv) * head_dim] in x's dtype, added to
    the rounded projection before the norms (a LoRA adapter's).
    """
    return qk_norm_rope_insert(
        linear(x, weight, bias, delta),
        q_weight,
        k_weight,
        positions,
        cos_sin,
        kv_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
        eps,
        weight_offset,
        round_before_scale,
        layout,
    )


@define_op(fake=_fake_from_hidden, mutates=("kv_cache",))
def qkv_norm_rope_insert_nvfp4(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    delta: Tensor | None = None,
    layout: str = "linear",
) -> Tensor:
    """``qk_norm_rope_insert(linear_nvfp4(x, packed, scale, global_scale, bias, residual=delta), ...)``."""
    return qk_norm_rope_insert(
        linear_nvfp4(x, packed, scale, global_scale, bias, delta),
        q_weight,
        k_weight,
        positions,
        cos_sin,
        kv_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
        eps,
        weight_offset,
        round_before_scale,
        layout,
    )


@define_op(fake=_fake_from_hidden, mutates=("kv_cache",))
def qkv_norm_rope_insert_mxfp8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    delta: Tensor | None = None,
    layout: str = "linear",
) -> Tensor:
    """``qk_norm_rope_insert(linear_mxfp8(x, values, scale, bias, residual=delta), ...)``."""
    return qk_norm_rope_insert(
        linear_mxfp8(x, values, scale, bias, delta),
        q_weight,
        k_weight,
        positions,
        cos_sin,
        kv_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
        eps,
        weight_offset,
        round_before_scale,
        layout,
    )
