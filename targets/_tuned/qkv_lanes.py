"""Projection, RoPE and insertion of [q | k | v] as a stage of a merged launch: its weights are there before its inputs.

Sixteen rows of a head are 8 dimensions and their partners in the rotation, which an mma brings to the same lane.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    is_present,
    kernel_name,
    need,
    pointer,
    row_stride,
    short_dtype,
    symbol_parameters,
)
from mmcompile.targets._kernels.linear import prefetch_rows, refuse_dense
from mmcompile.targets._kernels.qkv import has_norm, qkv_constants, refuse_cache, refuse_heads
from mmcompile.targets._kernels.qkv_project import take_projection
from mmcompile.targets._kernels.rope import rotate_halves, to_cache
from mmcompile.targets._tuned.linear_fragments import GROUPS, refuse_lanes
from mmcompile.targets._tuned.linear_lanes import add_warps, sum_rows
from mmcompile.targets._tuned.linear_ptx import hold_loads, multiply_rows

_OPERANDS = ("x", "weight", "positions", "cos_sin", "kv_cache", "slot_mapping")


@triton.jit
def load_turn(token, dim, tokens, positions, cos_sin, slot_mapping, HALF: tl.constexpr, COS_STRIDE: tl.constexpr,
              dtype: tl.constexpr):
    """Cosine and sine [32, 2] in ``dtype`` of each lane's dimension for two tokens, and the tokens' slots (or -1)."""
    active = token < tokens
    table = cos_sin + tl.load(positions + token, mask=active, other=0).to(tl.int64) * COS_STRIDE + dim
    slot = tl.load(slot_mapping + token, mask=active, other=-1).to(tl.int64)
    cos = tl.load(table, mask=active, other=0.0).to(dtype)
    return cos, tl.load(table + HALF, mask=active, other=0.0).to(dtype), slot


@triton.jit
def tile_qkv_rows(gate, tile, x, weight, positions, cos_sin, kv_cache, slot_mapping, result, tokens, K: tl.constexpr,
                  X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                  HEAD_DIM: tl.constexpr, HALF: tl.constexpr, COS_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                  PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr, CACHE_ROW_STRIDE: tl.constexpr,
                  RESULT_STRIDE: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr, BARRIER: tl.constexpr,
                  CHUNK: tl.constexpr):
    """16 rows of a head of [q | k | v] for at most 8 * GROUPS tokens: project, rotate, store or insert."""
    head, part = tile // (HEAD_DIM // 16), tile % (HEAD_DIM // 16)
    dtype: tl.constexpr = x.dtype.element_ty
    lane = tl.arange(0, 32)[:, None]
    dim, own = part * 8 + lane // 4, lane % 4 * 2 + tl.arange(0, 2)[None, :]
    turn = load_turn(own, dim, tokens, positions, cos_sin, slot_mapping, HALF, COS_STRIDE, dtype)
    turn1 = turn
    if GROUPS == 2:
        turn1 = load_turn(own + 8, dim, tokens, positions, cos_sin, slot_mapping, HALF, COS_STRIDE, dtype)
    sums, _ = sum_rows(tile, head * HEAD_DIM + part * 8, x, weight, tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, K,
                       X_STRIDE, WEIGHT_STRIDE, False, False, GROUPS, WARPS, 2, True, BARRIER, CHUNK, HALF, gate)
    turns, place = head < HEADS + KV_HEADS, head - HEADS
    for group in tl.static_range(GROUPS):
        cos, sin, slot = turn
        if group == 1:
            cos, sin, slot = turn1
        value = add_warps(sums[group], WARPS).to(dtype)
        first, second = tl.split(tl.permute(tl.reshape(value, (32, 2, 2)), (0, 2, 1)))
        turned, turned1 = rotate_halves(first.to(tl.float32), second.to(tl.float32), cos, sin)
        first, second = tl.where(turns, turned, first), tl.where(turns, turned1, second)
        if head < HEADS:
            rows = result + (own + 8 * group) * RESULT_STRIDE + head * HEAD_DIM + dim
            tl.store(rows, first, mask=own + 8 * group < tokens)
            tl.store(rows + HALF, second, mask=own + 8 * group < tokens)
        else:
            rows = kv_cache + slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * CACHE_ROW_STRIDE
            rows += place % KV_HEADS * CACHE_HEAD_STRIDE + place // KV_HEADS * HEAD_DIM + dim
            tl.store(rows, to_cache(first, kv_cache.dtype.element_ty), mask=slot >= 0)
            tl.store(rows + HALF, to_cache(second, kv_cache.dtype.element_ty), mask=slot >= 0)


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    if "warps" not in call.attributes:
        return "it is for stages of a merged launch"
    head_dim, rotary = int(call.attributes["head_dim"]), need(call, "cos_sin").shape[1]
    reason = refuse_heads(call) or refuse_cache(call, "kv_cache") or refuse_lanes(call, arch)
    reason = reason or refuse_dense(take_projection(call), spec, arch)
    if reason is None and (has_norm(call) or is_present(call, "bias") or is_present(call, "delta")):
        return "it has no norm, bias or delta"
    if reason is None and (rotary != head_dim or head_dim % 16):
        return f"head_dim is {head_dim} and {rotary} of it turn: it takes multiples of 16 that turn as a whole"
    if reason is None and row_stride(need(call, "weight")) % 8:
        return "rows of the weight are no multiple of 8 elements apart"
    return reason if reason or need(call, "kv_cache").dtype != "uint8" else "the cache is NVFP4"


def _emit(groups: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    x, head_dim, warps = need(call, "x"), int(call.attributes["head_dim"]), int(call.attributes["warps"])
    constants: dict[str, Any] = dict(qkv_constants(call))
    for name in ("SCALE_STRIDE", "DELTA_STRIDE", "EPS", "WEIGHT_OFFSET", "ROUND_BEFORE_SCALE"):
        del constants[name]
    constants |= {"GROUPS": groups, "WARPS": warps, "BARRIER": repr(hold_loads()),
                  "CHUNK": multiply_rows(x.dtype, groups)}  # fmt: skip
    spelled = ", ".join(["gate", "tl.program_id(0)", *_OPERANDS, "result", str(x.shape[0]), *constants])
    heads = int(need(call, "weight").shape[0]) // head_dim
    source = emit_kernel(
        name=kernel_name(f"{call.op}_lanes{8 * groups}", short_dtype(x.dtype), f"{heads}x{head_dim}x{x.shape[1]}"),
        title=f"{call.op}: [{x.shape[0]}, {x.shape[1]}] {x.dtype} to {heads} heads of {head_dim}.",
        tiles=[tile_qkv_rows],
        constants=constants,
        parameters=[*(pointer(name, need(call, name)) for name in _OPERANDS), pointer("result", call.results[0]),
                    *symbol_parameters(x.shape[0])],
        body=f"tile_qkv_rows({spelled})",
        grid=(str(heads * (head_dim // 16)), "1", "1"),
        num_warps=warps,
        num_stages=1,
        ledger={"HMMA.16816": True},
        gated=True,
        prefetch=prefetch_rows(need(call, "weight"), "weight", 16),
    )
    return (replace(source, lanes=True),)


TEMPLATES: tuple[KernelTemplate, ...] = tuple(
    KernelTemplate(f"qkv_norm_rope_insert_rows{8 * groups}", "qkv_norm_rope_insert", _refuse, partial(_emit, groups),
                   max_tokens=8 * groups, grade="tuned")
    for groups in GROUPS
)  # fmt: skip
