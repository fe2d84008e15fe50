"""Decode's QKV projection fused with bias, per-head norms, RoPE and insertion into the paged cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.attention import CACHE_DTYPES
from mmcompile.targets._kernels.cache_insert import insertion_functions, refuse_pages, refuse_rotation
from mmcompile.targets._kernels.cache_nvfp4 import cache_label, is_nvfp4
from mmcompile.targets._kernels.common import (
    FLOATS,
    ceil_div,
    is_present,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    refuse_rows,
    row_stride,
    short_dtype,
    symbol_parameters,
)
from mmcompile.targets._kernels.linear import (
    SKINNY_TOKENS,
    SPLIT,
    Blocks,
    mma_ledger,
    prefetch_rows,
    project_skinny,
    skinny_blocks,
)
from mmcompile.targets._kernels.norm import scale_normed
from mmcompile.targets._kernels.qkv_project import FORMATS, count_rows, element_size, find_format, take_projection
from mmcompile.targets._kernels.rope import rotate_halves, to_cache

_MAX_HEAD_DIM = 256
_LARGEST_TILE = 2048  # tokens times columns: with twice as many an sm_90a program spills 720 bytes a thread
PART_ROWS = 16


@triton.jit
def norm_heads(value, q_weight, k_weight, is_q, is_k, column, valid, HEAD_DIM: tl.constexpr, EPS: tl.constexpr,
               WEIGHT_OFFSET: tl.constexpr, ROUND_BEFORE_SCALE: tl.constexpr):
    """RMSNorm of each row of value [m, n] over HEAD_DIM, by the weight of q or k; None leaves those heads alone."""
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + EPS)[:, None]
    if q_weight is not None:
        scale = tl.load(q_weight + column, mask=valid, other=0.0)[None, :]
        scaled = scale_normed(normed, scale, value.dtype, WEIGHT_OFFSET, ROUND_BEFORE_SCALE)
        value = tl.where(is_q, scaled, value)
    if k_weight is not None:
        scale = tl.load(k_weight + column, mask=valid, other=0.0)[None, :]
        scaled = scale_normed(normed, scale, value.dtype, WEIGHT_OFFSET, ROUND_BEFORE_SCALE)
        value = tl.where(is_k, scaled, value)
    return value


@triton.jit
def order_columns(part, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """The columns of part ``part`` of a head [BLOCK_N], and which of them exist.

    The order is 0, HALF, 1, HALF + 1, ... so that both members of a rotated pair lie in one thread; the dimensions
    that pass through keep their order.
    """
    place = part * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.where(place < 2 * HALF, place // 2 + (place % 2) * HALF, place), place < HEAD_DIM


@triton.jit
def round_projection(value, bias, delta, token, active, row, valid, DELTA_STRIDE: tl.constexpr,
                     dtype: tl.constexpr):
    """fp32 value [m, n] plus bias, rounded to ``dtype``, plus delta, rounded again."""
    if bias is not None:
        value += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)[None, :]
    value = value.to(dtype)
    if delta is not None:
        place = delta + token[:, None] * DELTA_STRIDE + row[None, :]
        other = tl.load(place, mask=active[:, None] & valid[None, :], other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
    return value


@triton.jit
def turn_pairs(value, turns, part, token, active, positions, cos_sin, HALF: tl.constexpr, COS_STRIDE: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rotate the first HALF pairs of value [BLOCK_M, BLOCK_N], its columns in the order of ``order_columns``.

    Returns the firsts and the seconds of all pairs [BLOCK_M, BLOCK_N / 2] and their columns [1, BLOCK_N / 2]. A head
    that does not turn (a value) is split likewise.
    """
    first, second = tl.split(tl.reshape(value, (BLOCK_M, BLOCK_N // 2, 2)))
    pair = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    rotated = (pair < tl.where(turns, HALF, 0))[None, :]
    table = cos_sin + tl.load(positions + token, mask=active, other=0).to(tl.int64)[:, None] * COS_STRIDE + pair
    mask = active[:, None] & rotated
    cos = tl.load(table, mask=mask, other=0.0).to(value.dtype)
    sin = tl.load(table + HALF, mask=mask, other=0.0).to(value.dtype)
    turned_first, turned_second = rotate_halves(first.to(tl.float32), second.to(tl.float32), cos, sin)
    first, second = tl.where(rotated, turned_first, first), tl.where(rotated, turned_second, second)
    first_column = tl.where(pair < HALF, pair, 2 * pair)[None, :]
    second_column = tl.where(pair < HALF, pair + HALF, 2 * pair + 1)[None, :]
    return first, second, first_column, second_column


@triton.jit
def insert_kv_head(first, second, first_column, second_column, place, slot, kv_cache, HALF: tl.constexpr,
                   KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
                   PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr, CACHE_ROW_STRIDE: tl.constexpr):
    """Write the pairs of head ``place`` of [k | v] to the slots [m] of their tokens; negative slots are skipped."""
    rows = kv_cache + (slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * CACHE_ROW_STRIDE)[:, None]
    rows += place % KV_HEADS * CACHE_HEAD_STRIDE + place // KV_HEADS * HEAD_DIM
    mask = (slot >= 0)[:, None] & (second_column < HEAD_DIM)
    tl.store(rows + first_column, to_cache(first, kv_cache.dtype.element_ty), mask=mask)
    tl.store(rows + second_column, to_cache(second, kv_cache.dtype.element_ty), mask=mask)


@triton.jit
def store_qkv(first, second, first_column, second_column, tile, token, active, kv_cache, slot_mapping, result,
              HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
              PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr,
              CACHE_ROW_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr):
    """Write the pairs of head ``tile`` of [q | k | v]: queries to result, keys and values to the tokens' slots."""
    if tile < HEADS:
        q_rows = result + (token * RESULT_STRIDE + tile * HEAD_DIM)[:, None]
        q_mask = active[:, None] & (second_column < HEAD_DIM)
        tl.store(q_rows + first_column, first, mask=q_mask)
        tl.store(q_rows + second_column, second, mask=q_mask)
    else:
        slot = tl.load(slot_mapping + token, mask=active, other=-1).to(tl.int64)
        insert_kv_head(first, second, first_column, second_column, tile - HEADS, slot, kv_cache, HALF, KV_HEADS,
                       HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, CACHE_HEAD_STRIDE, CACHE_ROW_STRIDE)


@triton.jit
def tile_qkv(tile, x, weight, scale, global_scale, bias, delta, q_weight, k_weight, positions, cos_sin, kv_cache,
             slot_mapping, result, tokens, K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
             SCALE_STRIDE: tl.constexpr, DELTA_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
             HEAD_DIM: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
             ROUND_BEFORE_SCALE: tl.constexpr, COS_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
             PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr, CACHE_ROW_STRIDE: tl.constexpr,
             RESULT_STRIDE: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One of PARTS parts of a head of [q | k | v], for at most BLOCK_M tokens: project, normalise, rotate, store.

    2 HALF dimensions are rotated. A norm needs PARTS == 1.
    """
    part = tile % PARTS
    tile = tile // PARTS
    column, valid = order_columns(part, HALF, HEAD_DIM, BLOCK_N)
    row = tile * HEAD_DIM + column
    value = project_skinny(x, weight, scale, global_scale, tokens, row, valid, K, X_STRIDE, WEIGHT_STRIDE,
                           SCALE_STRIDE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K)
    token = tl.arange(0, BLOCK_M).to(tl.int64)
    active = token < tokens
    value = round_projection(value, bias, delta, token, active, row, valid, DELTA_STRIDE, x.dtype.element_ty)
    if q_weight is not None or k_weight is not None:
        is_q, is_k = tile < HEADS, (tile >= HEADS) & (tile < HEADS + KV_HEADS)
        value = norm_heads(value, q_weight, k_weight, is_q, is_k, column, valid, HEAD_DIM, EPS, WEIGHT_OFFSET,
                           ROUND_BEFORE_SCALE)
    turns = tile < HEADS + KV_HEADS
    first, second, first_column, second_column = turn_pairs(value, turns, part, token, active, positions, cos_sin,
                                                            HALF, COS_STRIDE, BLOCK_M, BLOCK_N)
    store_qkv(first, second, first_column, second_column, tile, token, active, kv_cache, slot_mapping, result, HALF,
              HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, CACHE_HEAD_STRIDE, CACHE_ROW_STRIDE, RESULT_STRIDE)


def has_norm(call: OpCall) -> bool:
    """True if q or k is normalised per head."""
    return is_present(call, "q_weight") or is_present(call, "k_weight")


def count_columns(call: OpCall) -> int:
    """Columns of a head a program: all of them where a norm or the blocks of an NVFP4 cache need them."""
    whole = has_norm(call) or is_nvfp4(call, "kv_cache")
    return max(16, next_power_of_two(int(call.attributes["head_dim"]))) if whole else PART_ROWS


def refuse_tile(tokens: int, call: OpCall) -> str | None:
    """The reason why one program cannot hold ``tokens`` tokens of a head, or None."""
    columns = count_columns(call)
    if tokens * columns > _LARGEST_TILE:
        return f"{tokens} tokens by {columns} columns do not fit the registers"
    return None


def count_parts(call: OpCall, block_n: int) -> int:
    """Programs a head: one where a norm needs all of it."""
    return ceil_div(int(call.attributes["head_dim"]), block_n)


def refuse_heads(call: OpCall) -> str | None:
    """The reason why the head size or the rotary width cannot be served, or None."""
    head_dim, rotary = int(call.attributes["head_dim"]), need(call, "cos_sin").shape[1]
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        return f"head_dim {head_dim} is odd or above {_MAX_HEAD_DIM}"
    if not isinstance(rotary, int) or rotary % 2 or rotary > head_dim:
        return f"rotary width {rotary} is odd or above head_dim {head_dim}"
    return None


def refuse_cache(call: OpCall, name: str) -> str | None:
    """The reason why the cache called ``name`` or where its rows go cannot be served, or None."""
    cache, positions, slots = (need(call, operand) for operand in (name, "positions", "slot_mapping"))
    if cache.dtype not in CACHE_DTYPES and not is_nvfp4(call, name):
        return f"{name} is {cache.dtype}, not one of {', '.join(CACHE_DTYPES)}, or uint8 for NVFP4"
    if not all(isinstance(n, int) for n in (*cache.shape[1:], *cache.strides)) or cache.strides[-1] != 1:
        return f"{name} must have a static page layout with a last stride of 1"
    if positions.strides[0] != 1 or slots.strides[0] != 1:
        return "positions and slot_mapping must be contiguous"
    return refuse_pages(call, name) or refuse_rotation(call, name)


def refuse_norms(call: OpCall, *names: str) -> str | None:
    """The reason why a present norm's weight among ``names`` cannot be served, or None."""
    for name in names:
        operand = call.operands.get(name)
        if operand is not None and (operand.dtype not in FLOATS or operand.strides[0] != 1):
            return f"{name} must be contiguous floats"
    return None


def refuse_projection(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    """The reason why x, the weight, bias or delta cannot be served, or None."""
    reason = refuse_rows(call, "x", "cos_sin")
    return reason or find_format(call).templates[0].refuse(take_projection(call), spec, arch)


def _refuse(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    return (
        refuse_heads(call)
        or refuse_tile(tokens, call)
        or refuse_cache(call, "kv_cache")
        or refuse_norms(call, "q_weight", "k_weight")
        or refuse_projection(call, spec, arch)
    )


def qkv_constants(call: OpCall) -> dict[str, int | float | bool | str]:
    """The constants that tile_qkv has but for its blocks, by name."""
    attributes, cache, delta = call.attributes, need(call, "kv_cache"), call.operands.get("delta")
    weight, *scales = (need(call, name) for name in find_format(call).weights)
    return {
        "K": int(need(call, "x").shape[1]),
        "X_STRIDE": row_stride(need(call, "x")),
        "WEIGHT_STRIDE": row_stride(weight),
        "SCALE_STRIDE": row_stride(scales[0]) if scales else 0,
        "DELTA_STRIDE": 0 if delta is None else row_stride(delta),
        "HEADS": int(attributes["num_heads"]),
        "KV_HEADS": int(attributes["num_kv_heads"]),
        "HEAD_DIM": int(attributes["head_dim"]),
        "HALF": int(need(call, "cos_sin").shape[1]) // 2,
        "EPS": float(attributes["eps"]),
        "WEIGHT_OFFSET": float(attributes.get("weight_offset", 0.0)),
        "ROUND_BEFORE_SCALE": bool(attributes.get("round_before_scale", True)),
        "COS_STRIDE": row_stride(need(call, "cos_sin")),
        "PAGE_SIZE": int(cache.shape[2]),
        "PAGE_STRIDE": int(cache.strides[0]),
        "CACHE_HEAD_STRIDE": int(cache.strides[1]),
        "CACHE_ROW_STRIDE": int(cache.strides[2]),
        "RESULT_STRIDE": row_stride(call.results[0]),
    }


def qkv_arguments(call: OpCall, norms: tuple[str, ...], rest: tuple[str, ...]) -> list[str]:
    """The operands of a fused tile in order, "None" for absent ones: x, weight, bias, delta, ``norms``, ``rest``."""
    weights = [*find_format(call).weights, "None", "None"][:3]
    optional = [name if is_present(call, name) else "None" for name in ("bias", "delta", *norms)]
    return ["x", *weights, *optional, *rest]


def emit_qkv(
    call: OpCall,
    tile: Any,
    arguments: list[str],
    constants: dict[str, int | float | bool | str],
    blocks: Blocks,
    spec: TargetSpec,
    arch: Architecture,
) -> tuple[KernelSource, ...]:
    """Emit a fused kernel: ``tile`` of ``arguments``, the results, the token count and ``constants``.

    One program computes a part of a head for all of at most ``blocks.m`` tokens.
    """
    x, head_dim, form = need(call, "x"), int(call.attributes["head_dim"]), find_format(call)
    name = form.weights[0]
    heads = count_rows(call) // head_dim
    intrinsics, ledger = form.intrinsics(arch, x.dtype)
    caches = [name for name in ("kv_cache", "index_cache") if is_present(call, name)]
    intrinsics = intrinsics | insertion_functions(call, *caches)
    results = {"result": call.results[0]} | ({"result1": call.results[1]} if len(call.results) > 1 else {})
    spelled = ", ".join(["tl.program_id(0)", *arguments, *results, str(x.shape[0]), *constants])
    pointers = [pointer(name, need(call, name)) for name in arguments if name != "None"]
    pointers += [pointer(name, operand) for name, operand in results.items()]
    delta = "delta" if is_present(call, "delta") else ""
    return (
        emit_kernel(
            name=kernel_name(f"{call.op}_skinny{blocks.m}", short_dtype(x.dtype), f"{heads}x{head_dim}x{x.shape[1]}",
                             cache_label(call, "kv_cache"), delta),
            title=f"{call.op}: [{x.shape[0]} <= {blocks.m}, {x.shape[1]}] {x.dtype} to {heads} heads of {head_dim}.",
            tiles=[tile],
            constants=constants,
            parameters=[*pointers, *symbol_parameters(x.shape[0])],
            body=f"{tile.__name__}({spelled})",
            grid=(str(heads * count_parts(call, blocks.n)), "1", "1"),
            intrinsics=intrinsics,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            ledger=mma_ledger(form.multiplied_dtype(x.dtype), blocks, spec, arch) | ledger,
            prefetch=prefetch_rows(need(call, name), name, head_dim // count_parts(call, blocks.n)),
        ),
    )


def head_blocks(tokens: int, call: OpCall, spec: TargetSpec) -> Blocks:
    """Tile of a fused kernel for at most ``tokens`` tokens."""
    blocks = skinny_blocks(tokens, count_columns(call), int(need(call, "x").shape[1]), element_size(call), spec)
    return find_format(call).fit_blocks(blocks)


def block_constants(blocks: Blocks) -> dict[str, int]:
    """The sizes of a skinny tile, by name."""
    return {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k}


def _emit(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    blocks = head_blocks(tokens, call, spec)
    arguments = qkv_arguments(call, ("q_weight", "k_weight"), ("positions", "cos_sin", "kv_cache", "slot_mapping"))
    parts = {"SPLIT": SPLIT, "PARTS": count_parts(call, blocks.n)}
    constants = qkv_constants(call) | parts | block_constants(blocks)
    return emit_qkv(call, tile_qkv, arguments, constants, blocks, spec, arch)


TEMPLATES: tuple[KernelTemplate, ...] = tuple(
    KernelTemplate(f"{op}_skinny{m}", op, partial(_refuse, m), partial(_emit, m), max_tokens=m)
    for op in (f"qkv_norm_rope_insert{suffix}" for suffix in FORMATS)
    for m in SKINNY_TOKENS
)
