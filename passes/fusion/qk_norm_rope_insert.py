"""split(qkv) -> [norm] -> rope -> insert_kv  ->  qk_norm_rope_insert(qkv)     all between projection and attention.

With an indexer, index_q and index_k are two more parts of the projection. Its rule takes in the score that reads the
index cache, so that index_k is proven to go into the cache that its own index_q is scored against.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from mmcompile.core.rewrite import Rewrite

_MM = torch.ops.mm
_SPLIT = torch.ops.aten.split_with_sizes.default
_RESHAPE = torch.ops.aten.reshape.default
_FUSED = _MM.qk_norm_rope_insert.default
_FUSED_INDEX = _MM.qk_norm_rope_insert_index.default


def pattern_index(
    qkv: Any, sizes: Any, q_shape: Any, k_shape: Any, v_shape: Any, index_q_shape: Any, index_k_shape: Any,
    q_weight: Any, k_weight: Any, index_q_weight: Any, index_k_weight: Any, positions: Any, cos_sin: Any,
    kv_cache: Any, index_cache: Any, slot_mapping: Any, block_table: Any, seq_lens: Any, query_start: Any, eps: Any,
    weight_offset: Any, round_before_scale: Any, layout: Any, index_layout: Any,
) -> Any:  # fmt: skip
    parts = _SPLIT(qkv, sizes, -1)
    q = _RESHAPE(operator.getitem(parts, 0), q_shape)
    k = _RESHAPE(operator.getitem(parts, 1), k_shape)
    v = _RESHAPE(operator.getitem(parts, 2), v_shape)
    index_q = _RESHAPE(operator.getitem(parts, 3), index_q_shape)
    index_k = _RESHAPE(operator.getitem(parts, 4), index_k_shape)
    q = _MM.rms_norm.default(q, q_weight, eps, weight_offset, round_before_scale)
    k = _MM.rms_norm.default(k, k_weight, eps, weight_offset, round_before_scale)
    index_q = _MM.rms_norm.default(index_q, index_q_weight, eps, weight_offset, round_before_scale)
    index_k = _MM.rms_norm.default(index_k, index_k_weight, eps, weight_offset, round_before_scale)
    insert = _MM.insert_kv.default(_MM.rope.default(k, positions, cos_sin), v, kv_cache, slot_mapping, layout)
    index_k = torch.ops.aten.select.int(_MM.rope.default(index_k, positions, cos_sin), 1, 0)
    insert_index = _MM.insert_index.default(index_k, index_cache, slot_mapping, index_layout)
    index_q = _MM.rope.default(index_q, positions, cos_sin)
    score = _MM.paged_index_score.default(index_q, index_cache, block_table, seq_lens, query_start, index_layout)
    return insert, _MM.rope.default(q, positions, cos_sin), insert_index, score


def replacement_index(
    qkv: Any, q_shape: Any, k_shape: Any, index_q_shape: Any, q_weight: Any, k_weight: Any, index_q_weight: Any,
    index_k_weight: Any, positions: Any, cos_sin: Any, kv_cache: Any, index_cache: Any, slot_mapping: Any,
    block_table: Any, seq_lens: Any, query_start: Any, eps: Any, weight_offset: Any, round_before_scale: Any,
    layout: Any, index_layout: Any,
) -> Any:  # fmt: skip
    heads, kv_heads, index_heads, head_dim = q_shape[1], k_shape[1], index_q_shape[1], q_shape[2]
    both = _FUSED_INDEX(
        qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin, kv_cache, index_cache,
        slot_mapping, heads, kv_heads, index_heads, head_dim, eps, weight_offset, round_before_scale, layout,
        index_layout,
    )  # fmt: skip
    score = _MM.paged_index_score.default(both[1], index_cache, block_table, seq_lens, query_start, index_layout)
    return None, both[0], None, score


def pattern_norm(
    qkv: Any, sizes: Any, q_shape: Any, k_shape: Any, v_shape: Any, q_weight: Any, k_weight: Any, positions: Any,
    cos_sin: Any, kv_cache: Any, slot_mapping: Any, eps: Any, weight_offset: Any, round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    parts = _SPLIT(qkv, sizes, -1)
    q = _RESHAPE(operator.getitem(parts, 0), q_shape)
    k = _RESHAPE(operator.getitem(parts, 1), k_shape)
    v = _RESHAPE(operator.getitem(parts, 2), v_shape)
    q = _MM.rms_norm.default(q, q_weight, eps, weight_offset, round_before_scale)
    k = _MM.rms_norm.default(k, k_weight, eps, weight_offset, round_before_scale)
    insert = _MM.insert_kv.default(_MM.rope.default(k, positions, cos_sin), v, kv_cache, slot_mapping, layout)
    return insert, _MM.rope.default(q, positions, cos_sin)


def replacement_norm(
    qkv: Any, q_shape: Any, k_shape: Any, q_weight: Any, k_weight: Any, positions: Any, cos_sin: Any, kv_cache: Any,
    slot_mapping: Any, eps: Any, weight_offset: Any, round_before_scale: Any, layout: Any,
) -> Any:  # fmt: skip
    heads, kv_heads, head_dim = q_shape[1], k_shape[1], q_shape[2]
    q = _FUSED(
        qkv, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, heads, kv_heads, head_dim, eps,
        weight_offset, round_before_scale, layout,
    )  # fmt: skip
    return None, q


def pattern(
    qkv: Any, sizes: Any, q_shape: Any, k_shape: Any, v_shape: Any, positions: Any, cos_sin: Any, kv_cache: Any,
    slot_mapping: Any, layout: Any,
) -> Any:  # fmt: skip
    parts = _SPLIT(qkv, sizes, -1)
    q = _RESHAPE(operator.getitem(parts, 0), q_shape)
    k = _RESHAPE(operator.getitem(parts, 1), k_shape)
    v = _RESHAPE(operator.getitem(parts, 2), v_shape)
    insert = _MM.insert_kv.default(_MM.rope.default(k, positions, cos_sin), v, kv_cache, slot_mapping, layout)
    return insert, _MM.rope.default(q, positions, cos_sin)


def replacement(
    qkv: Any, q_shape: Any, k_shape: Any, positions: Any, cos_sin: Any, kv_cache: Any, slot_mapping: Any, layout: Any
) -> Any:
    heads, kv_heads, head_dim = q_shape[1], k_shape[1], q_shape[2]
    where = positions, cos_sin, kv_cache, slot_mapping
    q = _FUSED(qkv, None, None, *where, heads, kv_heads, head_dim, 0.0, 0.0, True, layout)
    return None, q


def guard(values: dict[str, Any]) -> str | None:
    shapes = [values[n] for n in ("q_shape", "k_shape", "v_shape")]
    return _check_heads(shapes, values["sizes"])


def guard_index(values: dict[str, Any]) -> str | None:
    shapes = [values[n] for n in ("q_shape", "k_shape", "v_shape", "index_q_shape", "index_k_shape")]
    reason = _check_heads(shapes, values["sizes"])
    if reason is None and shapes[4][1] != 1:
        return f"the indexer has {shapes[4][1]} key heads, not one"
    return reason


def _check_heads(shapes: list[Any], sizes: Any) -> str | None:
    """A reason if the heads of [q, k, v, ...] are not alike or not what the projection is split into."""
    if any(len(s) != 3 or not all(isinstance(d, int) for d in s[1:]) for s in shapes):
        return f"the heads are not laid out [tokens, heads, head_dim]: {shapes}"
    if len({s[2] for s in shapes}) != 1 or shapes[1] != shapes[2]:
        return f"the heads differ in head_dim, or k and v in heads: {shapes}"
    if [s[1] * s[2] for s in shapes] != list(sizes):
        return f"the projection is split into {sizes}, the heads take {[s[1] * s[2] for s in shapes]}"
    return None


_IRRELEVANT = (
    ("sizes", "the guard demands that they follow from the head shapes"),
    ("v_shape", "the guard demands that it equals k_shape"),
)
_IRRELEVANT_INDEX = (*_IRRELEVANT, ("index_k_shape", "the guard demands one head as wide as the others"))
RULES = [
    Rewrite("qk_norm_rope_insert_index", pattern_index, replacement_index, guard_index, _IRRELEVANT_INDEX, enough=1),
    Rewrite("qk_norm_rope_insert", pattern_norm, replacement_norm, guard, _IRRELEVANT, enough=1),
    Rewrite("rope_insert", pattern, replacement, guard, _IRRELEVANT, enough=1),
]
