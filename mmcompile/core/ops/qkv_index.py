"""The fused steps between the projection [q | k | v | index_q | index_k] of a block-sparse layer and its attention."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.core.formats.cache_pages import check_cache
from mmcompile.core.ops.define import define_op
from mmcompile.core.ops.linear import linear, linear_nvfp4
from mmcompile.core.ops.linear_mxfp8 import linear_mxfp8
from mmcompile.core.ops.norm import rms_norm
from mmcompile.core.ops.rope import qk_norm_rope_insert, rope
from mmcompile.core.ops.sparse import insert_index


def _fake_from_projection(
    qkv: Tensor,
    kv_cache: Tensor,
    index_cache: Tensor,
    num_heads: int,
    num_index_heads: int,
    head_dim: int,
    layout: str,
    index_layout: str,
) -> tuple[Tensor, Tensor]:
    check_cache(kv_cache, layout, head_dim, sides=2)
    check_cache(index_cache, index_layout, head_dim, sides=1)
    shape = (qkv.shape[0], num_heads, head_dim), (qkv.shape[0], num_index_heads, head_dim)
    return qkv.new_empty(shape[0]), qkv.new_empty(shape[1])


def _fake_from_hidden(
    x: Tensor,
    kv_cache: Tensor,
    index_cache: Tensor,
    num_heads: int,
    num_index_heads: int,
    head_dim: int,
    layout: str,
    index_layout: str,
) -> tuple[Tensor, Tensor]:
    return _fake_from_projection(x, kv_cache, index_cache, num_heads, num_index_heads, head_dim, layout, index_layout)


@define_op(fake=_fake_from_projection, mutates=("kv_cache", "index_cache"))
def qk_norm_rope_insert_index(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    index_q_weight: Tensor,
    index_k_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    num_index_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    layout: str = "linear",
    index_layout: str = "linear",
) -> tuple[Tensor, Tensor]:
    """``qk_norm_rope_insert`` of a layer with an indexer, whose queries and keys it treats likewise.

    Args:
        qkv: [tokens, (num_heads + 2 num_kv_heads + num_index_heads + 1) * head_dim], row = [q | k | v | index_q |
            index_k]; index heads are as wide as the others.
        q_weight, k_weight, index_q_weight, index_k_weight: [head_dim], each shared by its heads.
        positions, cos_sin: as in ``rope``, for the index heads too. kv_cache, layout: written; see ``insert_kv``.
        index_cache, index_layout: written; see ``insert_index``. slot_mapping: int64 [tokens], of both caches, negative
            = skipped.
        eps, weight_offset, round_before_scale: of all four norms; see ``rms_norm``.

    Returns: q [tokens, num_heads, head_dim] and index_q [tokens, num_index_heads, head_dim], normalised and rotated.
    """
    tokens, width = qkv.shape[0], (num_heads + 2 * num_kv_heads) * head_dim
    norm = eps, weight_offset, round_before_scale
    q = qk_norm_rope_insert(
        qkv[:, :width], q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads,
        head_dim, *norm, layout,
    )  # fmt: skip
    index = qkv[:, width:].reshape(tokens, num_index_heads + 1, head_dim)
    index_q = rms_norm(index[:, :num_index_heads], index_q_weight, *norm)
    index_k = rms_norm(index[:, num_index_heads:], index_k_weight, *norm)
    rotated = rope(torch.cat([index_q, index_k], dim=1), positions, cos_sin)
    insert_index(rotated[:, num_index_heads], index_cache, slot_mapping, index_layout)
    return q, rotated[:, :num_index_heads].contiguous()


@define_op(fake=_fake_from_hidden, mutates=("kv_cache", "index_cache"))
def qkv_norm_rope_insert_index(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    index_q_weight: Tensor,
    index_k_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    num_index_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    delta: Tensor | None = None,
    layout: str = "linear",
    index_layout: str = "linear",
) -> tuple[Tensor, Tensor]:
    """``qk_norm_rope_insert_index(linear(x, weight, bias, residual=delta), ...)``.

    x: [tokens, k]. weight: [(H + 2 Hkv + Hi + 1) * head_dim, k]. delta: [tokens, as many columns] in x's dtype, added
    to the rounded projection before the norms (a LoRA adapter's).
    """
    return qk_norm_rope_insert_index(
        linear(x, weight, bias, delta), q_weight, k_weight, index_q_weight, index_k_weight,
        positions, cos_sin, kv_cache, index_cache, slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim,
        eps, weight_offset, round_before_scale, layout, index_layout,
    )  # fmt: skip


@define_op(fake=_fake_from_hidden, mutates=("kv_cache", "index_cache"))
def qkv_norm_rope_insert_index_nvfp4(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    index_q_weight: Tensor,
    index_k_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    num_index_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    delta: Tensor | None = None,
    layout: str = "linear",
    index_layout: str = "linear",
) -> tuple[Tensor, Tensor]:
    """``qk_norm_rope_insert_index(linear_nvfp4(x, packed, scale, global_scale, bias, residual=delta), ...)``."""
    return qk_norm_rope_insert_index(
        linear_nvfp4(x, packed, scale, global_scale, bias, delta), q_weight, k_weight, index_q_weight, index_k_weight,
        positions, cos_sin, kv_cache, index_cache, slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim,
        eps, weight_offset, round_before_scale, layout, index_layout,
    )  # fmt: skip


@define_op(fake=_fake_from_hidden, mutates=("kv_cache", "index_cache"))
def qkv_norm_rope_insert_index_mxfp8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    index_q_weight: Tensor,
    index_k_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    num_index_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    delta: Tensor | None = None,
    layout: str = "linear",
    index_layout: str = "linear",
) -> tuple[Tensor, Tensor]:
    """``qk_norm_rope_insert_index(linear_mxfp8(x, values, scale, bias, residual=delta), ...)``."""
    return qk_norm_rope_insert_index(
        linear_mxfp8(x, values, scale, bias, delta), q_weight, k_weight, index_q_weight, index_k_weight,
        positions, cos_sin, kv_cache, index_cache, slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim,
        eps, weight_offset, round_before_scale, layout, index_layout,
    )  # fmt: skip
