"""Insertion into NVFP4 caches: what replaces the plain writes of the insertion and fused QKV kernels."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mmcompile.core.formats.nvfp4_cache import LAYOUTS
from mmcompile.core.kernel import OpCall
from mmcompile.targets._kernels.cache_nvfp4 import is_nvfp4, layout_functions, layout_of, refuse_nvfp4, store_rows
from mmcompile.targets._kernels.common import need
from mmcompile.targets._kernels.norm import scale_normed


@triton.jit
def tile_insert_index_nvfp4(block, index_k, index_cache, slot_mapping, tokens, K_STRIDE: tl.constexpr,
                            PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr,
                            TOKENS: tl.constexpr):
    """Quantize the index keys of TOKENS tokens into their slots; negative slots are skipped."""
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    keys = tl.load(index_k + token[:, None] * K_STRIDE + tl.arange(0, DIM)[None, :], mask=kept[:, None], other=0.0)
    base = index_cache + (slot // PAGE_SIZE * PAGE_STRIDE)[:, None]
    store_rows(base, slot % PAGE_SIZE, kept, keys, 2, DIM, PAGE_SIZE)


@triton.jit
def tile_insert_kv_nvfp4(token, block, k, v, kv_cache, slot_mapping, KV_HEADS: tl.constexpr, K_STRIDE: tl.constexpr,
                         K_HEAD_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
                         PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                         HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Quantize HEAD_BLOCK key and value heads of one token into its slot; a negative slot is skipped."""
    token = token.to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    kept = head < tl.where(slot >= 0, KV_HEADS, 0)
    column = tl.arange(0, HEAD_DIM)[None, :]
    base = kv_cache + slot // PAGE_SIZE * PAGE_STRIDE + (2 * head * CACHE_HEAD_STRIDE)[:, None]
    key = slot % PAGE_SIZE + 0 * head
    keys = tl.load(k + token * K_STRIDE + head[:, None] * K_HEAD_STRIDE + column, mask=kept[:, None], other=0.0)
    store_rows(base, key, kept, keys, 0, HEAD_DIM, PAGE_SIZE)
    values = tl.load(v + token * V_STRIDE + head[:, None] * V_HEAD_STRIDE + column, mask=kept[:, None], other=0.0)
    store_rows(base, key, kept, values, 1, HEAD_DIM, PAGE_SIZE)


@triton.jit
def load_turned(row, head, kept, cos_row, weight, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr,
                OFFSET: tl.constexpr, ROUND: tl.constexpr, NORM: tl.constexpr):
    """Heads [n] of one row, normed (if NORM) and rotated, as [n, HEAD_DIM] in the order of their columns.

    Each column is rotated with its partner's value, which is loaded beside it; products and sums round as in
    ``rotate_halves``.
    """
    dtype: tl.constexpr = row.dtype.element_ty
    column = tl.arange(0, HEAD_DIM)
    turns = column < 2 * HALF
    partner = tl.where(turns, tl.where(column < HALF, column + HALF, column - HALF), column)
    place = row + head[:, None] * HEAD_DIM
    own = tl.load(place + column[None, :], mask=kept[:, None], other=0.0).to(tl.float32)
    other = tl.load(place + partner[None, :], mask=kept[:, None], other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + EPS)[:, None]
        own_weight, other_weight = tl.load(weight + column)[None, :], tl.load(weight + partner)[None, :]
        own = scale_normed(own * inverse, own_weight, dtype, OFFSET, ROUND).to(tl.float32)
        other = scale_normed(other * inverse, other_weight, dtype, OFFSET, ROUND).to(tl.float32)
    angle = cos_row + tl.where(turns, column % HALF, 0)
    cos = tl.load(angle, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    sign = tl.where(column < HALF, -1.0, 1.0)[None, :]
    turned = (own * cos).to(dtype).to(tl.float32) + sign * (other * sin).to(dtype).to(tl.float32)
    return tl.where(turns[None, :], turned.to(dtype), own.to(dtype))


@triton.jit
def insert_heads(row, slot, kv_cache, head, cos_row, k_weight, KV_HEADS: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                 CACHE_HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                 HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
                 REST_BLOCK: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
                 K_NORM: tl.constexpr):
    """Heads [n] of k (normed, rotated) and of v of the row [k | v] into its slot; as in rope."""
    kept = head < tl.where(slot >= 0, KV_HEADS, 0)
    base = kv_cache + slot // PAGE_SIZE * PAGE_STRIDE + (2 * head * CACHE_HEAD_STRIDE)[:, None]
    key = slot % PAGE_SIZE + 0 * head
    keys = load_turned(row, head, kept, cos_row, k_weight, HEAD_DIM, HALF, EPS, OFFSET, ROUND, K_NORM)
    store_rows(base, key, kept, keys, 0, HEAD_DIM, PAGE_SIZE)
    place = row + (KV_HEADS + head[:, None]) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    store_rows(base, key, kept, tl.load(place, mask=kept[:, None], other=0.0), 1, HEAD_DIM, PAGE_SIZE)


@triton.jit
def insert_index_key(row, slot, index_cache, cos_row, weight, PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                     PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
                     REST_BLOCK: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr):
    """The index key at ``row``, normed and rotated, into its slot; as in qkv_index."""
    one = tl.arange(0, 1)
    kept = one < tl.where(slot >= 0, 1, 0)
    keys = load_turned(row, one, kept, cos_row, weight, HEAD_DIM, HALF, EPS, OFFSET, ROUND, True)
    base = index_cache + slot // PAGE_SIZE * PAGE_STRIDE + (0 * one)[:, None]
    store_rows(base, slot % PAGE_SIZE + 0 * one, kept, keys, 2, HEAD_DIM, PAGE_SIZE)


@triton.jit
def restore_columns(first, second, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows [m, HEAD_DIM] in the order of their columns, of pairs of ``turn_pairs``; HALF is HEAD_DIM / 2 or / 4."""
    ROWS: tl.constexpr = first.shape[0]
    pairs = tl.join(first, second)
    if 2 * HALF < HEAD_DIM:
        turned, rest = tl.split(tl.permute(tl.reshape(pairs, (ROWS, 2, HALF, 2)), (0, 2, 3, 1)))
        turned = tl.reshape(tl.permute(turned, (0, 2, 1)), (ROWS, 2 * HALF))
        pairs = tl.join(turned, tl.reshape(rest, (ROWS, 2 * HALF)))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (ROWS, HEAD_DIM))


@triton.jit
def insert_kv_head(first, second, first_column, second_column, place, slot, kv_cache, HALF: tl.constexpr,
                   KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
                   PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr, CACHE_ROW_STRIDE: tl.constexpr):
    """Head ``place`` of [k | v] of several tokens into their slots [m]; as in qkv."""
    rows = restore_columns(first, second, HALF, HEAD_DIM)
    head = place % KV_HEADS
    base = kv_cache + (slot // PAGE_SIZE * PAGE_STRIDE + 2 * head * CACHE_HEAD_STRIDE)[:, None]
    if place < KV_HEADS:
        store_rows(base, slot % PAGE_SIZE, slot >= 0, rows, 0, HEAD_DIM, PAGE_SIZE)
    else:
        store_rows(base, slot % PAGE_SIZE, slot >= 0, rows, 1, HEAD_DIM, PAGE_SIZE)


@triton.jit
def insert_index_head(first, second, first_column, second_column, slot, index_cache, HALF: tl.constexpr,
                      HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                      ROW_STRIDE: tl.constexpr):
    """The index keys of several tokens into their slots [m]; as in qkv_index."""
    base = index_cache + (slot // PAGE_SIZE * PAGE_STRIDE)[:, None]
    rows = restore_columns(first, second, HALF, HEAD_DIM)
    store_rows(base, slot % PAGE_SIZE, slot >= 0, rows, 2, HEAD_DIM, PAGE_SIZE)


def insertion_functions(call: OpCall, *caches: str) -> dict[str, Any]:
    """What makes a tile write those of its ``caches`` that hold NVFP4 pages, by function name."""
    functions: dict[str, Any] = {}
    for cache in caches:
        if is_nvfp4(call, cache):
            own = (insert_index_key, insert_index_head) if cache == "index_cache" else (insert_heads, insert_kv_head)
            functions |= layout_functions(call, cache) | {f.fn.__name__: f for f in own}
    return functions


def refuse_layouts(call: OpCall) -> str | None:
    """A reason if the index keys do not go with the layout of K and V, so that one kernel cannot write both."""
    if not (is_nvfp4(call, "kv_cache") and is_nvfp4(call, "index_cache")):
        return None
    both, index = layout_of(call, "kv_cache"), layout_of(call, "index_cache")
    if LAYOUTS[both].exact != LAYOUTS[index].exact:
        return f"the layouts {both!r} and {index!r} do not go together"
    return None


def refuse_rotation(call: OpCall, cache: str) -> str | None:
    """A reason if the columns of a head cannot be put in order before it is quantized into an NVFP4 cache."""
    head_dim, rotary = int(call.attributes["head_dim"]), int(need(call, "cos_sin").shape[1])
    if is_nvfp4(call, cache) and rotary not in (head_dim, head_dim // 2):
        return f"{rotary} of {head_dim} dimensions are rotated, an NVFP4 cache needs all or half of them"
    return None


def refuse_pages(call: OpCall, cache: str) -> str | None:
    """A reason if a cache is uint8 but no NVFP4 pages of the layout that the call names."""
    if not is_nvfp4(call, cache):
        return None
    head_dim = call.attributes.get("head_dim") or need(call, "k" if cache == "kv_cache" else "index_k").shape[-1]
    return refuse_nvfp4(call, cache, int(head_dim))
