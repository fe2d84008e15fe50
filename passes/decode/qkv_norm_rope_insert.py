"""qk_norm_rope_insert(linear(x, w))  ->  qkv_norm_rope_insert(x, w)     projection to cache insertion in one launch.

Decode only: a program computes whole heads, which leaves too few programs and too little reuse for long prompts. What
the layer adds to its result (a LoRA adapter's share) becomes ``delta``. Layers with an indexer have rules of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from mmcompile.core.rewrite import Rewrite

_MM = torch.ops.mm
_INSERT = _MM.qk_norm_rope_insert.default
_INSERT_INDEX = _MM.qk_norm_rope_insert_index.default


def pattern(
    x: Any, weight: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, positions: Any, cos_sin: Any,
    kv_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, eps: Any, weight_offset: Any,
    round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    qkv = _MM.linear.default(x, weight, bias, delta, "none")
    return _INSERT(
        qkv, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, head_dim, eps,
        weight_offset, round_before_scale, layout,
    )  # fmt: skip


def replacement(
    x: Any, weight: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, positions: Any, cos_sin: Any,
    kv_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, eps: Any, weight_offset: Any,
    round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    return _MM.qkv_norm_rope_insert.default(
        x, weight, bias, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads,
        head_dim, eps, weight_offset, round_before_scale, delta, layout,
    )  # fmt: skip


def pattern_nvfp4(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any,
    positions: Any, cos_sin: Any, kv_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any,
    eps: Any, weight_offset: Any, round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    qkv = _MM.linear_nvfp4.default(x, packed, scale, global_scale, bias, delta, "none")
    return _INSERT(
        qkv, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, head_dim, eps,
        weight_offset, round_before_scale, layout,
    )  # fmt: skip


def replacement_nvfp4(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any,
    positions: Any, cos_sin: Any, kv_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any,
    eps: Any, weight_offset: Any, round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    return _MM.qkv_norm_rope_insert_nvfp4.default(
        x, packed, scale, global_scale, bias, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, num_heads,
        num_kv_heads, head_dim, eps, weight_offset, round_before_scale, delta, layout,
    )  # fmt: skip


def pattern_mxfp8(
    x: Any, values: Any, scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, positions: Any, cos_sin: Any,
    kv_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, eps: Any, weight_offset: Any,
    round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    qkv = _MM.linear_mxfp8.default(x, values, scale, bias, delta, "none")
    return _INSERT(
        qkv, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads, head_dim, eps,
        weight_offset, round_before_scale, layout,
    )  # fmt: skip


def replacement_mxfp8(
    x: Any, values: Any, scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, positions: Any, cos_sin: Any,
    kv_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, eps: Any, weight_offset: Any,
    round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    return _MM.qkv_norm_rope_insert_mxfp8.default(
        x, values, scale, bias, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, num_heads, num_kv_heads,
        head_dim, eps, weight_offset, round_before_scale, delta, layout,
    )  # fmt: skip


def pattern_index(
    x: Any, weight: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, index_q_weight: Any, index_k_weight: Any,
    positions: Any, cos_sin: Any, kv_cache: Any, index_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any,
    num_index_heads: Any, head_dim: Any, eps: Any, weight_offset: Any, round_before_scale: Any, layout: Any,
    index_layout: Any,
) -> Any:  # fmt: skip
    qkv = _MM.linear.default(x, weight, bias, delta, "none")
    return _INSERT_INDEX(
        qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin, kv_cache, index_cache,
        slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim, eps, weight_offset, round_before_scale,
        layout, index_layout,
    )  # fmt: skip


def replacement_index(
    x: Any, weight: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, index_q_weight: Any, index_k_weight: Any,
    positions: Any, cos_sin: Any, kv_cache: Any, index_cache: Any, slot_mapping: Any, num_heads: Any, num_kv_heads: Any,
    num_index_heads: Any, head_dim: Any, eps: Any, weight_offset: Any, round_before_scale: Any, layout: Any,
    index_layout: Any,
) -> Any:  # fmt: skip
    return _MM.qkv_norm_rope_insert_index.default(
        x, weight, bias, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin, kv_cache, index_cache,
        slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim, eps, weight_offset, round_before_scale,
        delta, layout, index_layout,
    )  # fmt: skip


def pattern_index_nvfp4(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any,
    index_q_weight: Any, index_k_weight: Any, positions: Any, cos_sin: Any, kv_cache: Any, index_cache: Any,
    slot_mapping: Any, num_heads: Any, num_kv_heads: Any, num_index_heads: Any, head_dim: Any, eps: Any,
    weight_offset: Any, round_before_scale: Any, layout: Any, index_layout: Any,
) -> Any:  # fmt: skip
    qkv = _MM.linear_nvfp4.default(x, packed, scale, global_scale, bias, delta, "none")
    return _INSERT_INDEX(
        qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin, kv_cache, index_cache,
        slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim, eps, weight_offset, round_before_scale,
        layout, index_layout,
    )  # fmt: skip


def replacement_index_nvfp4(
    x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any,
    index_q_weight: Any, index_k_weight: Any, positions: Any, cos_sin: Any, kv_cache: Any, index_cache: Any,
    slot_mapping: Any, num_heads: Any, num_kv_heads: Any, num_index_heads: Any, head_dim: Any, eps: Any,
    weight_offset: Any, round_before_scale: Any, layout: Any, index_layout: Any,
) -> Any:  # fmt: skip
    return _MM.qkv_norm_rope_insert_index_nvfp4.default(
        x, packed, scale, global_scale, bias, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin,
        kv_cache, index_cache, slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim, eps, weight_offset,
        round_before_scale, delta, layout, index_layout,
    )  # fmt: skip


def pattern_index_mxfp8(
    x: Any, values: Any, scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, index_q_weight: Any,
    index_k_weight: Any, positions: Any, cos_sin: Any, kv_cache: Any, index_cache: Any, slot_mapping: Any,
    num_heads: Any, num_kv_heads: Any, num_index_heads: Any, head_dim: Any, eps: Any, weight_offset: Any,
    round_before_scale: Any, layout: Any, index_layout: Any,
) -> Any:  # fmt: skip
    qkv = _MM.linear_mxfp8.default(x, values, scale, bias, delta, "none")
    return _INSERT_INDEX(
        qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin, kv_cache, index_cache,
        slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim, eps, weight_offset, round_before_scale,
        layout, index_layout,
    )  # fmt: skip


def replacement_index_mxfp8(
    x: Any, values: Any, scale: Any, bias: Any, delta: Any, q_weight: Any, k_weight: Any, index_q_weight: Any,
    index_k_weight: Any, positions: Any, cos_sin: Any, kv_cache: Any, index_cache: Any, slot_mapping: Any,
    num_heads: Any, num_kv_heads: Any, num_index_heads: Any, head_dim: Any, eps: Any, weight_offset: Any,
    round_before_scale: Any, layout: Any, index_layout: Any,
) -> Any:  # fmt: skip
    return _MM.qkv_norm_rope_insert_index_mxfp8.default(
        x, values, scale, bias, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin, kv_cache,
        index_cache, slot_mapping, num_heads, num_kv_heads, num_index_heads, head_dim, eps, weight_offset,
        round_before_scale, delta, layout, index_layout,
    )  # fmt: skip


RULES = [
    Rewrite("qkv_norm_rope_insert", pattern, replacement, enough=1),
    Rewrite("qkv_norm_rope_insert_nvfp4", pattern_nvfp4, replacement_nvfp4, enough=1),
    Rewrite("qkv_norm_rope_insert_mxfp8", pattern_mxfp8, replacement_mxfp8, enough=1),
    Rewrite("qkv_norm_rope_insert_index", pattern_index, replacement_index, enough=1),
    Rewrite("qkv_norm_rope_insert_index_nvfp4", pattern_index_nvfp4, replacement_index_nvfp4, enough=1),
    Rewrite("qkv_norm_rope_insert_index_mxfp8", pattern_index_mxfp8, replacement_index_mxfp8, enough=1),
]
