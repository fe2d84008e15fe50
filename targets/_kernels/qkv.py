"""Decode's QKV projection fused with bias, per-head norms, RoPE and insertion into the paged cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Parameter
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.attention import CACHE_DTYPES
from mmcompile.targets._kernels.common import (
    ELEMENT_SIZES,
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
from mmcompile.targets._kernels.linear import SKINNY_TOKENS, SPLIT, Blocks, mma_ledger, project_skinny, skinny_blocks
from mmcompile.targets._kernels.linear_nvfp4 import WEIGHTS, nvfp4_intrinsics, refuse_weight
from mmcompile.targets._kernels.norm import scale_normed
from mmcompile.targets._kernels.rope import rotate_halves, to_cache

_MAX_HEAD_DIM = 256
PART_ROWS = 16
_OPTIONAL = ("bias", "q_weight", "k_weight")


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
def tile_qkv(tile, x, weight, scale, global_scale, bias, q_weight, k_weight, positions, cos_sin, kv_cache,
             slot_mapping, result, tokens, K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
             SCALE_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
             HALF: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUND_BEFORE_SCALE: tl.constexpr,
             COS_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
             CACHE_HEAD_STRIDE: tl.constexpr, CACHE_ROW_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr,
             SPLIT: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr):
    """One of PARTS parts of a head of [q | k | v], for at most BLOCK_M tokens: project, normalise, rotate, store.

    2 HALF dimensions are rotated. Columns are projected in the order 0, HALF, 1, HALF + 1, ... so that both members
    of a rotated pair lie in one thread; the dimensions that pass through keep their order. A norm needs PARTS == 1.
    """
    part = tile % PARTS
    tile = tile // PARTS
    place = part * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.where(place < 2 * HALF, place // 2 + (place % 2) * HALF, place)
    valid = place < HEAD_DIM
    row = tile * HEAD_DIM + column
    is_q, is_k = tile < HEADS, (tile >= HEADS) & (tile < HEADS + KV_HEADS)
    value = project_skinny(x, weight, scale, global_scale, tokens, row, valid, K, X_STRIDE, WEIGHT_STRIDE,
                           SCALE_STRIDE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias is not None:
        value += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)[None, :]
    value = value.to(x.dtype.element_ty)
    if q_weight is not None or k_weight is not None:
        value = norm_heads(value, q_weight, k_weight, is_q, is_k, column, valid, HEAD_DIM, EPS, WEIGHT_OFFSET,
                           ROUND_BEFORE_SCALE)
    first, second = tl.split(tl.reshape(value, (BLOCK_M, BLOCK_N // 2, 2)))
    pair = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    token = tl.arange(0, BLOCK_M).to(tl.int64)
    active = token < tokens
    rotated = (pair < tl.where(tile < HEADS + KV_HEADS, HALF, 0))[None, :]
    table = cos_sin + tl.load(positions + token, mask=active, other=0).to(tl.int64)[:, None] * COS_STRIDE + pair
    mask = active[:, None] & rotated
    cos = tl.load(table, mask=mask, other=0.0).to(value.dtype)
    sin = tl.load(table + HALF, mask=mask, other=0.0).to(value.dtype)
    turned_first, turned_second = rotate_halves(first.to(tl.float32), second.to(tl.float32), cos, sin)
    first, second = tl.where(rotated, turned_first, first), tl.where(rotated, turned_second, second)
    first_column = tl.where(pair < HALF, pair, 2 * pair)[None, :]
    second_column = tl.where(pair < HALF, pair + HALF, 2 * pair + 1)[None, :]
    in_head = (pair < HEAD_DIM // 2)[None, :]
    if is_q:
        q_rows = result + (token * RESULT_STRIDE + tile * HEAD_DIM)[:, None]
        q_mask = active[:, None] & in_head
        tl.store(q_rows + first_column, first, mask=q_mask)
        tl.store(q_rows + second_column, second, mask=q_mask)
    else:
        slot = tl.load(slot_mapping + token, mask=active, other=-1).to(tl.int64)
        rows = kv_cache + (slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * CACHE_ROW_STRIDE)[:, None]
        rows += (tile - HEADS) % KV_HEADS * CACHE_HEAD_STRIDE + (tile - HEADS) // KV_HEADS * HEAD_DIM
        kv_mask = (slot >= 0)[:, None] & in_head
        tl.store(rows + first_column, to_cache(first, kv_cache.dtype.element_ty), mask=kv_mask)
        tl.store(rows + second_column, to_cache(second, kv_cache.dtype.element_ty), mask=kv_mask)


def has_norm(call: OpCall) -> bool:
    """True if q or k is normalised per head."""
    return is_present(call, "q_weight") or is_present(call, "k_weight")


def count_parts(call: OpCall, block_n: int) -> int:
    """Programs a head: one where a norm needs all of it."""
    return ceil_div(int(call.attributes["head_dim"]), block_n)


def _is_nvfp4(call: OpCall) -> bool:
    return call.op.endswith("nvfp4")


def _refuse_heads(call: OpCall) -> str | None:
    head_dim, rotary = int(call.attributes["head_dim"]), need(call, "cos_sin").shape[1]
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        return f"head_dim {head_dim} is odd or above {_MAX_HEAD_DIM}"
    if not isinstance(rotary, int) or rotary % 2 or rotary > head_dim:
        return f"rotary width {rotary} is odd or above head_dim {head_dim}"
    return None


def _refuse_cache(call: OpCall) -> str | None:
    cache, positions, slots = (need(call, name) for name in ("kv_cache", "positions", "slot_mapping"))
    if cache.dtype not in CACHE_DTYPES:
        return f"kv_cache is {cache.dtype}, not one of {', '.join(CACHE_DTYPES)}"
    if not all(isinstance(n, int) for n in (*cache.shape[1:], *cache.strides)) or cache.strides[3] != 1:
        return "kv_cache must have a static page layout with a last stride of 1"
    if positions.strides[0] != 1 or slots.strides[0] != 1:
        return "positions and slot_mapping must be contiguous"
    return None


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = refuse_rows(call, "x", "cos_sin") or _refuse_heads(call) or _refuse_cache(call)
    if reason is not None:
        return reason
    for name in _OPTIONAL:
        operand = call.operands.get(name)
        if operand is not None and (operand.dtype not in FLOATS or operand.strides[0] != 1):
            return f"{name} must be contiguous floats"
    if _is_nvfp4(call):
        return refuse_weight(call)
    reason = refuse_rows(call, "weight")
    if reason is None and need(call, "weight").dtype != need(call, "x").dtype:
        return f"weight is {need(call, 'weight').dtype} and x {need(call, 'x').dtype}"
    return reason


def _constants(call: OpCall, blocks: Blocks) -> dict[str, int | float | bool | str]:
    """The constants of tile_qkv by name, in the order of its parameters."""
    attributes, cache = call.attributes, need(call, "kv_cache")
    weight = need(call, "packed" if _is_nvfp4(call) else "weight")
    return {
        "K": int(need(call, "x").shape[1]),
        "X_STRIDE": row_stride(need(call, "x")),
        "WEIGHT_STRIDE": row_stride(weight),
        "SCALE_STRIDE": row_stride(need(call, "scale")) if _is_nvfp4(call) else 0,
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
        "SPLIT": SPLIT,
        "PARTS": count_parts(call, blocks.n),
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_K": blocks.k,
    }


def _parameters(call: OpCall, names: list[str]) -> list[Parameter]:
    pointers = [pointer(name, need(call, name)) for name in names]
    return [*pointers, pointer("result", call.results[0]), *symbol_parameters(need(call, "x").shape[0])]


def _emit(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    x, attributes = need(call, "x"), call.attributes
    size, k, head_dim = ELEMENT_SIZES[x.dtype], int(x.shape[1]), int(attributes["head_dim"])
    block_n = max(16, next_power_of_two(head_dim)) if has_norm(call) else PART_ROWS
    blocks = skinny_blocks(tokens, block_n, k, size, spec)
    weights = WEIGHTS if _is_nvfp4(call) else ("weight", "None", "None")
    intrinsics: dict[str, Any] = {}
    ledger = mma_ledger(x.dtype, blocks, spec, arch)
    if _is_nvfp4(call):
        intrinsics, decoder_ledger = nvfp4_intrinsics(arch, x.dtype)
        ledger |= decoder_ledger
    optional = [name if is_present(call, name) else "None" for name in _OPTIONAL]
    arguments = ["x", *weights, *optional, "positions", "cos_sin", "kv_cache", "slot_mapping"]
    constants = _constants(call, blocks)
    heads = int(attributes["num_heads"]) + 2 * int(attributes["num_kv_heads"])
    spelled = ", ".join(["tl.program_id(0)", *arguments, "result", str(x.shape[0]), *constants])
    return (
        emit_kernel(
            name=kernel_name(f"{call.op}_skinny{tokens}", short_dtype(x.dtype), f"{heads}x{head_dim}x{k}",
                             short_dtype(need(call, "kv_cache").dtype)),
            title=f"{call.op}: [{x.shape[0]} <= {tokens}, {k}] {x.dtype} to {heads} heads of {head_dim}.",
            tiles=[tile_qkv],
            constants=constants,
            parameters=_parameters(call, [name for name in arguments if name != "None"]),
            body=f"tile_qkv({spelled})",
            grid=(str(heads * count_parts(call, blocks.n)), "1", "1"),
            intrinsics=intrinsics,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            ledger=ledger,
        ),
    )


TEMPLATES: tuple[KernelTemplate, ...] = tuple(
    KernelTemplate(f"{op}_skinny{m}", op, _refuse, partial(_emit, m), max_tokens=m)
    for op in ("qkv_norm_rope_insert", "qkv_norm_rope_insert_nvfp4")
    for m in SKINNY_TOKENS
)
