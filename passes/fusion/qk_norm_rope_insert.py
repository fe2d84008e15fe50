"""split(qkv) -> [norm] -> rope -> insert_kv  ->  qk_norm_rope_insert(qkv)     all between projection and attention."""

from __future__ import annotations

import operator
from typing import Any

import torch

from mmcompile.core.rewrite import Rewrite

_MM = torch.ops.mm
_SPLIT = torch.ops.aten.split_with_sizes.default
_RESHAPE = torch.ops.aten.reshape.default
_FUSED = _MM.qk_norm_rope_insert.default


def pattern_norm(
    qkv: Any, sizes: Any, q_shape: Any, k_shape: Any, v_shape: Any, q_weight: Any, k_weight: Any, positions: Any,
    cos_sin: Any, kv_cache: Any, slot_mapping: Any, eps: Any, weight_offset: Any, round_before_scale: Any,
) -> Any:  # fmt: skip
    parts = _SPLIT(qkv, sizes, -1)
    q = _RESHAPE(operator.getitem(parts, 0), q_shape)
    k = _RESHAPE(operator.getitem(parts, 1), k_shape)
    v = _RESHAPE(operator.getitem(parts, 2), v_shape)
    q = _MM.rms_norm.default(q, q_weight, eps, weight_offset, round_before_scale)
    k = _MM.rms_norm.default(k, k_weight, eps, weight_offset, round_before_scale)
    insert = _MM.insert_kv.default(_MM.rope.default(k, positions, cos_sin), v, kv_cache, slot_mapping)
    return insert, _MM.rope.default(q, positions, cos_sin)


def replacement_norm(
    qkv: Any, q_shape: Any, k_shape: Any, q_weight: Any, k_weight: Any, positions: Any, cos_sin: Any, kv_cache: Any,
    slot_mapping: Any, eps: Any, weight_offset: Any, round_before_scale: Any,
) -> Any:  # fmt: skip
    heads, kv_heads, head_dim = q_shape[1], k_shape[1], q_shape[2]
    q = _FUSED(
        qkv, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping, heads, kv_heads, head_dim, eps,
        weight_offset, round_before_scale,
    )  # fmt: skip
    return None, q


def pattern(
    qkv: Any, sizes: Any, q_shape: Any, k_shape: Any, v_shape: Any, positions: Any, cos_sin: Any, kv_cache: Any,
    slot_mapping: Any,
) -> Any:  # fmt: skip
    parts = _SPLIT(qkv, sizes, -1)
    q = _RESHAPE(operator.getitem(parts, 0), q_shape)
    k = _RESHAPE(operator.getitem(parts, 1), k_shape)
    v = _RESHAPE(operator.getitem(parts, 2), v_shape)
    insert = _MM.insert_kv.default(_MM.rope.default(k, positions, cos_sin), v, kv_cache, slot_mapping)
    return insert, _MM.rope.default(q, positions, cos_sin)


def replacement(
    qkv: Any, q_shape: Any, k_shape: Any, positions: Any, cos_sin: Any, kv_cache: Any, slot_mapping: Any
) -> Any:
    heads, kv_heads, head_dim = q_shape[1], k_shape[1], q_shape[2]
    q = _FUSED(qkv, None, None, positions, cos_sin, kv_cache, slot_mapping, heads, kv_heads, head_dim, 0.0)
    return None, q


def guard(values: dict[str, Any]) -> str | None:
    shapes = [values[n] for n in ("q_shape", "k_shape", "v_shape")]
    if any(len(s) != 3 or not all(isinstance(d, int) for d in s[1:]) for s in shapes):
        return f"the heads are not laid out [tokens, heads, head_dim]: {shapes}"
    if len({s[2] for s in shapes}) != 1 or shapes[1] != shapes[2]:
        return f"q, k and v differ in head_dim, or k and v in heads: {shapes}"
    if [s[1] * s[2] for s in shapes] != list(values["sizes"]):
        return f"the projection is split into {values['sizes']}, the heads take {[s[1] * s[2] for s in shapes]}"
    return None


_IRRELEVANT = (
    ("sizes", "the guard demands that they follow from the head shapes"),
    ("v_shape", "the guard demands that it equals k_shape"),
)
RULES = [
    Rewrite("qk_norm_rope_insert", pattern_norm, replacement_norm, guard, _IRRELEVANT, enough=1),
    Rewrite("rope_insert", pattern, replacement, guard, _IRRELEVANT, enough=1),
]
