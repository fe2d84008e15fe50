"""Norms, RoPE and cache insertion of [q | k | v | index_q | index_k], alone or with the projection in front."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels import rope
from mmcompile.targets._kernels.cache_insert import insertion_functions, refuse_layouts
from mmcompile.targets._kernels.cache_nvfp4 import cache_label, is_nvfp4
from mmcompile.targets._kernels.common import ceil_div, kernel_name, need, pointer, short_dtype
from mmcompile.targets._kernels.linear import SKINNY_TOKENS, SPLIT, project_skinny
from mmcompile.targets._kernels.qkv import (
    block_constants,
    emit_qkv,
    head_blocks,
    norm_heads,
    order_columns,
    qkv_arguments,
    qkv_constants,
    refuse_cache,
    refuse_heads,
    refuse_norms,
    refuse_projection,
    refuse_tile,
    round_projection,
    store_qkv,
    turn_pairs,
)
from mmcompile.targets._kernels.qkv_project import FORMATS
from mmcompile.targets._kernels.rope import rotate_heads, tile_qk_norm_rope_insert, to_cache

NORMS = ("q_weight", "k_weight", "index_q_weight", "index_k_weight")
PLACES = ("positions", "cos_sin", "kv_cache", "index_cache", "slot_mapping")


@triton.jit
def insert_index_key(row, slot, index_cache, cos_row, weight, PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                     PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
                     REST_BLOCK: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr):
    """The index key at ``row``, normed and rotated, into its slot; a negative slot is skipped."""
    one = tl.arange(0, 1)
    target = index_cache + slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * ROW_STRIDE
    rotate_heads(row, target, one, one < tl.where(slot >= 0, 1, 0), cos_row, weight, HEAD_DIM, HEAD_DIM, HEAD_DIM,
                 HALF, HALF_BLOCK, REST_BLOCK, EPS, OFFSET, ROUND, True)


@triton.jit
def tile_qk_norm_rope_insert_index(token, block, qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions,
                                   cos_sin, kv_cache, index_cache, slot_mapping, result, result1,
                                   INDEX_HEADS: tl.constexpr, INDEX_BLOCKS: tl.constexpr,
                                   INDEX_PAGE_SIZE: tl.constexpr, INDEX_PAGE_STRIDE: tl.constexpr,
                                   INDEX_ROW_STRIDE: tl.constexpr, QKV_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
                                   KV_HEADS: tl.constexpr, QKV_STRIDE: tl.constexpr, COS_STRIDE: tl.constexpr,
                                   PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr,
                                   ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
                                   D_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
                                   REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, Q_BLOCKS: tl.constexpr,
                                   EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr):
    """One token: the heads of q, k and v for ``block`` < QKV_BLOCKS, then INDEX_BLOCKS of index_q, last index_k."""
    token = token.to(tl.int64)
    if block < QKV_BLOCKS:
        tile_qk_norm_rope_insert(token, block, qkv, q_weight, k_weight, positions, cos_sin, kv_cache, slot_mapping,
                                 result, HEADS, KV_HEADS, QKV_STRIDE, COS_STRIDE, PAGE_STRIDE, CACHE_HEAD_STRIDE,
                                 ROW_STRIDE, PAGE_SIZE, HEAD_DIM, D_BLOCK, HALF, HALF_BLOCK, REST_BLOCK, HEAD_BLOCK,
                                 Q_BLOCKS, EPS, OFFSET, ROUND, True, True)
    else:
        row = qkv + token * QKV_STRIDE + (HEADS + 2 * KV_HEADS) * HEAD_DIM
        cos_row = cos_sin + tl.load(positions + token).to(tl.int64) * COS_STRIDE
        if block < QKV_BLOCKS + INDEX_BLOCKS:
            head = (block - QKV_BLOCKS) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
            rotate_heads(row, result1 + token * INDEX_HEADS * HEAD_DIM, head, head < INDEX_HEADS, cos_row,
                         index_q_weight, HEAD_DIM, HEAD_DIM, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, EPS, OFFSET,
                         ROUND, True)
        else:
            slot = tl.load(slot_mapping + token).to(tl.int64)
            insert_index_key(row + INDEX_HEADS * HEAD_DIM, slot, index_cache, cos_row, index_k_weight,
                             INDEX_PAGE_STRIDE, INDEX_ROW_STRIDE, INDEX_PAGE_SIZE, HEAD_DIM, HALF, HALF_BLOCK,
                             REST_BLOCK, EPS, OFFSET, ROUND)


@triton.jit
def insert_index_head(first, second, first_column, second_column, slot, index_cache, HALF: tl.constexpr,
                      HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                      ROW_STRIDE: tl.constexpr):
    """Write the pairs of the index keys to the slots [m] of their tokens; negative slots are skipped."""
    rows = index_cache + (slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * ROW_STRIDE)[:, None]
    mask = (slot >= 0)[:, None] & (second_column < HEAD_DIM)
    tl.store(rows + first_column, to_cache(first, index_cache.dtype.element_ty), mask=mask)
    tl.store(rows + second_column, to_cache(second, index_cache.dtype.element_ty), mask=mask)


@triton.jit
def store_index(first, second, first_column, second_column, head, token, active, index_cache, slot_mapping, result1,
                HALF: tl.constexpr, INDEX_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                INDEX_PAGE_SIZE: tl.constexpr, INDEX_PAGE_STRIDE: tl.constexpr, INDEX_ROW_STRIDE: tl.constexpr):
    """Write the pairs of head ``head`` of [index_q | index_k]: queries to result1, the key to the tokens' slots."""
    if head < INDEX_HEADS:
        q_rows = result1 + (token * INDEX_HEADS * HEAD_DIM + head * HEAD_DIM)[:, None]
        q_mask = active[:, None] & (second_column < HEAD_DIM)
        tl.store(q_rows + first_column, first, mask=q_mask)
        tl.store(q_rows + second_column, second, mask=q_mask)
    else:
        slot = tl.load(slot_mapping + token, mask=active, other=-1).to(tl.int64)
        insert_index_head(first, second, first_column, second_column, slot, index_cache, HALF, HEAD_DIM,
                          INDEX_PAGE_SIZE, INDEX_PAGE_STRIDE, INDEX_ROW_STRIDE)


@triton.jit
def tile_qkv_index(tile, x, weight, scale, global_scale, bias, delta, q_weight, k_weight, index_q_weight,
                   index_k_weight, positions, cos_sin, kv_cache, index_cache, slot_mapping, result, result1, tokens,
                   INDEX_HEADS: tl.constexpr, INDEX_PAGE_SIZE: tl.constexpr, INDEX_PAGE_STRIDE: tl.constexpr,
                   INDEX_ROW_STRIDE: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr,
                   WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, DELTA_STRIDE: tl.constexpr,
                   HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                   EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUND_BEFORE_SCALE: tl.constexpr,
                   COS_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                   CACHE_HEAD_STRIDE: tl.constexpr, CACHE_ROW_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr,
                   SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One head of [q | k | v | index_q | index_k] for at most BLOCK_M tokens: project, normalise, rotate, store."""
    column, valid = order_columns(0, HALF, HEAD_DIM, BLOCK_N)
    row = tile * HEAD_DIM + column
    value = project_skinny(x, weight, scale, global_scale, tokens, row, valid, K, X_STRIDE, WEIGHT_STRIDE,
                           SCALE_STRIDE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K)
    token = tl.arange(0, BLOCK_M).to(tl.int64)
    active = token < tokens
    value = round_projection(value, bias, delta, token, active, row, valid, DELTA_STRIDE, x.dtype.element_ty)
    is_q, is_k = tile < HEADS, (tile >= HEADS) & (tile < HEADS + KV_HEADS)
    index_head = tile - HEADS - 2 * KV_HEADS
    is_index_q, is_index_k = (index_head >= 0) & (index_head < INDEX_HEADS), index_head == INDEX_HEADS
    value = norm_heads(value, q_weight, k_weight, is_q, is_k, column, valid, HEAD_DIM, EPS, WEIGHT_OFFSET,
                       ROUND_BEFORE_SCALE)
    value = norm_heads(value, index_q_weight, index_k_weight, is_index_q, is_index_k, column, valid, HEAD_DIM, EPS,
                       WEIGHT_OFFSET, ROUND_BEFORE_SCALE)
    turns = is_q | is_k | (index_head >= 0)
    first, second, first_column, second_column = turn_pairs(value, turns, 0, token, active, positions, cos_sin, HALF,
                                                            COS_STRIDE, BLOCK_M, BLOCK_N)
    if index_head < 0:
        store_qkv(first, second, first_column, second_column, tile, token, active, kv_cache, slot_mapping, result,
                  HALF, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, CACHE_HEAD_STRIDE, CACHE_ROW_STRIDE,
                  RESULT_STRIDE)
    else:
        store_index(first, second, first_column, second_column, index_head, token, active, index_cache, slot_mapping,
                    result1, HALF, INDEX_HEADS, HEAD_DIM, INDEX_PAGE_SIZE, INDEX_PAGE_STRIDE, INDEX_ROW_STRIDE)


def _refuse_index(call: OpCall) -> str | None:
    cache, head_dim = need(call, "index_cache"), int(call.attributes["head_dim"])
    if len(cache.shape) != 3 or (cache.shape[2] != head_dim and not is_nvfp4(call, "index_cache")):
        return f"index_cache must be [pages, page_size, {head_dim}], it is {list(cache.shape)}"
    return refuse_norms(call, *NORMS)


def _index_constants(call: OpCall) -> dict[str, int | float | bool | str]:
    cache = need(call, "index_cache")
    return {
        "INDEX_HEADS": int(call.attributes["num_index_heads"]),
        "INDEX_PAGE_SIZE": int(cache.shape[1]),
        "INDEX_PAGE_STRIDE": int(cache.strides[0]),
        "INDEX_ROW_STRIDE": int(cache.strides[1]),
    }


def _label_caches(call: OpCall) -> str:
    """The formats of both caches in a kernel name, once if they are the same."""
    kinds = dict.fromkeys(cache_label(call, name) for name in ("kv_cache", "index_cache"))
    return "_".join(kinds)


def _refuse_insert(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = rope.refuse_fused(call, spec, arch) or _refuse_index(call)
    return reason or rope.refuse_cache(call, "index_cache") or refuse_layouts(call)


def _emit_insert(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    constants = rope.fused_constants(call)
    head_dim, block = int(call.attributes["head_dim"]), int(constants["HEAD_BLOCK"])
    qkv_blocks = int(constants["Q_BLOCKS"]) + ceil_div(int(constants["KV_HEADS"]), block)
    index = _index_constants(call)
    index_blocks = ceil_div(int(index["INDEX_HEADS"]), block)
    constants |= index | {"INDEX_BLOCKS": index_blocks, "QKV_BLOCKS": qkv_blocks}
    qkv, arguments = need(call, "qkv"), ["qkv", *NORMS, *PLACES]
    named = ", ".join(f"{key}={key}" for key in constants)
    heads = "x".join(str(constants[name]) for name in ("HEADS", "KV_HEADS", "INDEX_HEADS", "HEAD_DIM"))
    body = f"""
        tile_qk_norm_rope_insert_index(tl.program_id(0), tl.program_id(1), {", ".join(arguments)}, result, result1,
                                       {named})
    """
    results = [pointer(name, operand) for name, operand in zip(("result", "result1"), call.results, strict=True)]
    return (emit_kernel(
        name=kernel_name(call.op, short_dtype(qkv.dtype), f"kv{_label_caches(call)}", heads),
        title=f"Per-head norms, rotary embedding and insertion into both caches of one token, heads of {head_dim}.",
        tiles=[tile_qk_norm_rope_insert_index], constants=constants,
        parameters=[*(pointer(name, need(call, name)) for name in arguments), *results], body=body,
        grid=(str(qkv.shape[0]), str(qkv_blocks + index_blocks + 1), "1"), num_warps=4,
        intrinsics=insertion_functions(call, "kv_cache", "index_cache"), early=arch,
    ),)


def _refuse(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    return (refuse_heads(call) or refuse_tile(tokens, call) or _refuse_index(call) or refuse_cache(call, "kv_cache")
            or refuse_cache(call, "index_cache") or refuse_layouts(call) or refuse_projection(call, spec, arch))


def _emit(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    blocks = head_blocks(tokens, call, spec)
    constants = _index_constants(call) | qkv_constants(call) | {"SPLIT": SPLIT} | block_constants(blocks)
    return emit_qkv(call, tile_qkv_index, qkv_arguments(call, NORMS, PLACES), constants, blocks, spec, arch)


INSERT = KernelTemplate("qk_norm_rope_insert_index", "qk_norm_rope_insert_index", _refuse_insert, _emit_insert)
TEMPLATES: tuple[KernelTemplate, ...] = (
    INSERT,
    *(
        KernelTemplate(f"{op}_skinny{m}", op, partial(_refuse, m), partial(_emit, m), max_tokens=m)
        for op in (f"qkv_norm_rope_insert_index{suffix}" for suffix in FORMATS)
        for m in SKINNY_TOKENS
    ),
)
