"""Tuned norms, RoPE and insertion into NVFP4 pages in lane order, for Hopper: half a warp a head, one launch.

A program has four warps and one token: sixteen heads of q, or eight of [k | v | index_q | index_k], each kind filled up
to whole warps. Nothing but the norm's sum, a head's rotation and a block's largest value goes from lane to lane.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.formats.nvfp4_cache import SM90, SM90_INDEX
from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels import qkv_index, two_step
from mmcompile.targets._kernels.cache_nvfp4_sm90 import locate_scales, place_halves, place_words
from mmcompile.targets._kernels.common import ceil_div, is_present, kernel_name, need, pointer, row_stride
from mmcompile.targets._kernels.norm import scale_normed
from mmcompile.targets._kernels.qkv_project import FORMATS
from mmcompile.targets._tuned import insert_ptx, linear_fragments, sparse_ptx

HEAD_DIM, WARPS = 128, 4
EACH = 2
"""Heads of q a half warp: what it knows of weights and angles serves all of them."""
_NORMS = ("q_weight", "k_weight", "index_q_weight", "index_k_weight")
_PLACES = ("positions", "cos_sin", "kv_cache", "index_cache", "slot_mapping")


@triton.jit
def split_words(words):
    """The two bf16 of words, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def join_words(low, high):
    """Words of two bf16 each."""
    return (low.to(tl.int16, bitcast=True).to(tl.int32) & 65535) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def norm_words(words, weight, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, SUM_LANES: tl.constexpr):
    """Heads, 16 lanes each, normed and times words of ``weight``."""
    low, high = split_words(words)
    own = tl.sum(low * low + high * high, axis=1)
    total = tl.inline_asm_elementwise(SUM_LANES[0], SUM_LANES[1], [own], tl.float32, True, 1)
    inverse = tl.rsqrt(total / 128 + EPS)[:, None]
    first, second = split_words(weight)
    low = scale_normed(low * inverse, first.to(tl.bfloat16), tl.bfloat16, OFFSET, ROUND)
    high = scale_normed(high * inverse, second.to(tl.bfloat16), tl.bfloat16, OFFSET, ROUND)
    return join_words(low, high)


@triton.jit
def load_turn(cos_row, lane, register, HALF: tl.constexpr):
    """Words of cosines and of sines with their signs for the lanes whose values turn; ``cos_row``: of the token."""
    place = cos_row + (lane % (HALF // 8) * 4)[:, None] + register[None, :]
    turns = (lane < HALF // 4)[:, None]
    sin = tl.load(place + HALF // 2, mask=turns, other=0)
    negative = tl.full(sin.shape, -2147450880, tl.int32)  # the signs of two bf16
    return tl.load(place, mask=turns, other=0), tl.where((lane < HALF // 8)[:, None], sin ^ negative, sin)


@triton.jit
def turn_words(words, cos, sin, lane, HALF: tl.constexpr, TURN_WORDS: tl.constexpr):
    """Heads, 16 lanes each, with the first 2 HALF values rotated."""
    turned = tl.inline_asm_elementwise(TURN_WORDS[0], TURN_WORDS[1], [words, cos, sin], tl.int32, True, 4)
    return tl.where((lane < HALF // 4)[:, None], turned, words)


@triton.jit
def tile_insert_lanes(token, block, qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, cos_sin,
                      kv_cache, index_cache, slot_mapping, result, result1, HEADS: tl.constexpr,
                      KV_HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr,
                      QKV_STRIDE: tl.constexpr, COS_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                      INDEX_PAGE_STRIDE: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
                      ROUND: tl.constexpr, EACH: tl.constexpr, WARPS: tl.constexpr, SUM_LANES: tl.constexpr,
                      TURN_WORDS: tl.constexpr, STORE_BLOCK: tl.constexpr):
    """One token: 8 * EACH heads of q for ``block`` < Q_BLOCKS, else 8 of the others; no index if its cache is None."""
    thread, register = tl.arange(0, 32 * WARPS), tl.arange(0, 4)
    lane, place = thread % 16, (thread % 16 * 4)[:, None] + register[None, :]
    token = token.to(tl.int64)
    row = qkv.to(tl.pointer_type(tl.int32), bitcast=True) + token * (QKV_STRIDE // 2)
    position = tl.load(positions + token).to(tl.int64)
    cos_row = cos_sin.to(tl.pointer_type(tl.int32), bitcast=True) + position * (COS_STRIDE // 2)
    cos, sin = load_turn(cos_row, lane, register, HALF)
    if block < Q_BLOCKS:
        weight = tl.load(q_weight.to(tl.pointer_type(tl.int32), bitcast=True) + place)
        rows = result.to(tl.pointer_type(tl.int32), bitcast=True) + token * (HEADS * 64)
        for i in tl.static_range(EACH):
            head = (block * EACH + i) * (2 * WARPS) + thread // 16
            mask = (head < HEADS)[:, None]
            words = tl.load(row + (head * 64)[:, None] + place, mask=mask, other=0)
            words = norm_words(words, weight, EPS, OFFSET, ROUND, SUM_LANES)
            words = turn_words(words, cos, sin, lane, HALF, TURN_WORDS)
            tl.store(rows + (head * 64)[:, None] + place, words, mask=mask)
    else:
        SIDE: tl.constexpr = (KV_HEADS + 1) // 2 * 2  # half warps that a side takes
        number = (block - Q_BLOCKS) * (2 * WARPS) + thread // 16
        is_key, is_value = number < KV_HEADS, (number >= SIDE) & (number < SIDE + KV_HEADS)
        index_head = number - 2 * SIDE
        INDEX_KEY: tl.constexpr = (INDEX_HEADS + 1) // 2 * 2
        is_index_q = (index_head >= 0) & (index_head < INDEX_HEADS)
        is_index_k = index_head == INDEX_KEY
        head = HEADS + tl.where(is_key, number, tl.where(is_value, number - SIDE + KV_HEADS, 0))
        weight = tl.load(k_weight.to(tl.pointer_type(tl.int32), bitcast=True) + place, mask=is_key[:, None], other=0)
        active = is_key | is_value
        if index_cache is not None:
            head += tl.where(is_index_q, 2 * KV_HEADS + index_head, tl.where(is_index_k, 2 * KV_HEADS + INDEX_HEADS, 0))
            weight |= tl.load(index_q_weight.to(tl.pointer_type(tl.int32), bitcast=True) + place,
                              mask=is_index_q[:, None], other=0)
            weight |= tl.load(index_k_weight.to(tl.pointer_type(tl.int32), bitcast=True) + place,
                              mask=is_index_k[:, None], other=0)
            active |= is_index_q | is_index_k
        raw = tl.load(row + (head * 64)[:, None] + place, mask=active[:, None], other=0)
        words = norm_words(raw, weight, EPS, OFFSET, ROUND, SUM_LANES)
        words = turn_words(words, cos, sin, lane, HALF, TURN_WORDS)
        words = tl.where(is_value[:, None], raw, words)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        page, key = slot >> 7, (slot & 127).to(tl.int32)
        base = kv_cache + page * PAGE_STRIDE + (tl.where(is_value, number - SIDE, number) * 18432).to(tl.int64)
        code = tl.where(is_value, place_halves(key, 2 * lane), place_words(key, lane))
        of_key, of_value = locate_scales(key, lane // 2, 0, 128, 128), locate_scales(key, lane // 2, 1, 128, 128)
        scale = tl.where(is_value, of_value, of_key)
        if index_cache is not None:
            base = tl.where(is_index_k, (index_cache + page * INDEX_PAGE_STRIDE).to(tl.int64), base.to(tl.int64))
            scale = tl.where(is_index_k, locate_scales(key, lane // 2, 2, 128, 128), scale)
            rows = result1.to(tl.pointer_type(tl.int32), bitcast=True) + token * (INDEX_HEADS * 64)
            tl.store(rows + (index_head * 64)[:, None] + place, words, mask=is_index_q[:, None])
        kind = tl.where(is_key | (is_index_k & (index_cache is not None)), 1, tl.where(is_value, 2, 0))
        kind = tl.where(slot >= 0, kind, 0)
        zero = register[None, :] * 0
        tl.inline_asm_elementwise(
            STORE_BLOCK[0], STORE_BLOCK[1],
            [words, kind[:, None] + zero, (base.to(tl.int64) + code)[:, None] + zero,
             (base.to(tl.int64) + scale)[:, None] + zero], tl.int32, False, 4)


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    index = is_present(call, "index_cache")
    missing = sorted(insert_ptx.FEATURES - arch.features)
    if missing:
        return f"{arch.name} lacks {missing[0]}"
    if need(call, "kv_cache").dtype != "uint8" or call.attributes.get("layout") != SM90:
        return f"the cache is not in the layout {SM90!r}"
    if index and (need(call, "index_cache").dtype != "uint8" or call.attributes.get("index_layout") != SM90_INDEX):
        return f"the index cache is not in the layout {SM90_INDEX!r}"
    portable = qkv_index.INSERT if index else two_step.INSERTS["qkv_norm_rope_insert"]
    return portable.refuse(call, spec, arch) or _refuse_rows(call, _NORMS if index else _NORMS[:2])


def _refuse_rows(call: OpCall, norms: tuple[str, ...]) -> str | None:
    qkv, table = need(call, "qkv"), need(call, "cos_sin")
    if not all(is_present(call, name) for name in norms):
        return "q and k must both have a norm"
    if any(need(call, name).dtype != "bfloat16" for name in ("qkv", "cos_sin", *norms)):
        return "qkv, cos_sin and the norms' weights must be bfloat16"
    if row_stride(qkv) % 8 or row_stride(table) % 8:
        return "rows of qkv and cos_sin do not begin at multiples of 16 bytes"
    if int(table.shape[1]) not in (16, 32, 64, 128):
        return f"{table.shape[1]} dimensions are rotated, not 16, 32, 64 or 128"
    return None


def _emit(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    qkv, table, index = need(call, "qkv"), need(call, "cos_sin"), is_present(call, "index_cache")
    heads, kv_heads = int(call.attributes["num_heads"]), int(call.attributes["num_kv_heads"])
    index_heads = int(call.attributes["num_index_heads"]) if index else 0
    half = int(table.shape[1]) // 2
    q_blocks = ceil_div(heads, 2 * WARPS * EACH)
    others = 4 * ceil_div(kv_heads, 2) + (2 * ceil_div(index_heads, 2) + 1 if index else 0)
    constants: dict[str, Any] = {
        "HEADS": heads, "KV_HEADS": kv_heads, "INDEX_HEADS": index_heads, "Q_BLOCKS": q_blocks,
        "QKV_STRIDE": row_stride(qkv), "COS_STRIDE": row_stride(table),
        "PAGE_STRIDE": int(need(call, "kv_cache").strides[0]),
        "INDEX_PAGE_STRIDE": int(need(call, "index_cache").strides[0]) if index else 0, "HALF": half,
        "EPS": float(call.attributes["eps"]), "OFFSET": float(call.attributes.get("weight_offset", 0.0)),
        "ROUND": bool(call.attributes.get("round_before_scale", True)), "EACH": EACH, "WARPS": WARPS,
        "SUM_LANES": sparse_ptx.as_constant(insert_ptx.sum_lanes()),
        "TURN_WORDS": sparse_ptx.as_constant(insert_ptx.turn_words(half // 8)),
        "STORE_BLOCK": sparse_ptx.as_constant(insert_ptx.store_block()),
    }  # fmt: skip
    names = ["qkv", *_NORMS, *_PLACES]
    given = [name if is_present(call, name) else "None" for name in names]
    results = [pointer(name, operand) for name, operand in zip(("result", "result1"), call.results, strict=False)]
    spelled = ", ".join(["tl.program_id(0)", "tl.program_id(1)", *given, "result", "result1" if index else "None",
                         *constants])  # fmt: skip
    source = emit_kernel(
        name=kernel_name(f"{call.op}_lanes_nvfp4", f"{heads}x{kv_heads}x{index_heads}x{HEAD_DIM}"),
        title="Per-head norms, rotary embedding and insertion into NVFP4 pages in lane order of one token.",
        tiles=[tile_insert_lanes], constants=constants,
        parameters=[*(pointer(name, need(call, name)) for name in given if name != "None"), *results],
        body=f"tile_insert_lanes({spelled})",
        grid=(str(qkv.shape[0]), str(q_blocks + ceil_div(others, 2 * WARPS)), "1"), num_warps=WARPS, num_stages=1,
        early=arch,
    )  # fmt: skip
    return (replace(source, lanes=True),)


INSERTS = {
    name: KernelTemplate(f"{insert.op}_lanes", insert.op, _refuse, _emit, grade="tuned")
    for name, insert in two_step.INSERTS.items()
}
"""By the fused operation's name without its weight format, as in two_step."""
TEMPLATES = tuple(INSERTS.values())


def _pair(name: str, suffix: str, projection: KernelTemplate) -> KernelTemplate:
    """The fused operation as a projection, then this insertion."""
    template = two_step.make_two_step(f"{name}{suffix}", projection, INSERTS[name])
    return replace(template, name=f"{template.name}_lanes", grade="tuned")


QKV = tuple(_pair(name, "_nvfp4", projection) for name in INSERTS for projection in linear_fragments.FRAGMENTS)
_ALL = tuple(
    _pair(name, suffix, projection)
    for name in INSERTS
    for suffix, form in FORMATS.items()
    for projection in form.templates
)
NARROW = tuple(t for t in _ALL if t.max_tokens is not None)
WIDE = tuple(t for t in _ALL if t.max_tokens is None)
"""QKV, NARROW and WIDE stand before those of linear_fragments and two_step that have the portable insertion."""
