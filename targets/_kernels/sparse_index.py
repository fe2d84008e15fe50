"""The index cache of block-sparse attention: insertion of keys, and the score of every block for every query."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.attention import find_sequence
from mmcompile.targets._kernels.cache_insert import insertion_functions, refuse_pages, tile_insert_index_nvfp4
from mmcompile.targets._kernels.cache_nvfp4 import cache_intrinsics, cache_label, decoded_factor, is_nvfp4
from mmcompile.targets._kernels.common import (
    ELEMENT_SIZES,
    FLOATS,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    row_stride,
    short_dtype,
    symbol_parameters,
)
from mmcompile.targets._kernels.rope import to_cache
from mmcompile.targets._kernels.sampling import order_key, order_value
from mmcompile.targets._kernels.sparse_common import (
    CACHE_DTYPES,
    count_stages,
    load_page_tile,
    load_span,
    refuse_paged,
    refuse_static,
)

INSERT_TOKENS = 8
DECODE_ROWS, PREFILL_ROWS = 16, 64
CHAIN = 2
"""Loads that wait for one another: page number, rows."""
PAGES_BY_TOKENS = ((4, 2), (16, 4), (None, 8))
"""(largest token count, pages a program) of the decode kernel: few sequences need many programs."""


@triton.jit
def tile_insert_index(block, index_k, index_cache, slot_mapping, tokens, K_STRIDE: tl.constexpr,
                      PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                      DIM: tl.constexpr, D_BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Write the index keys of TOKENS tokens to their slots; negative slots are skipped."""
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    width = tl.arange(0, D_BLOCK)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (width < DIM)[None, :]
    keys = tl.load(index_k + token[:, None] * K_STRIDE + width[None, :], mask=mask, other=0.0)
    row = index_cache + (slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * ROW_STRIDE)[:, None]
    tl.store(row + width[None, :], to_cache(keys, index_cache.dtype.element_ty), mask=mask)


@triton.jit
def score_queries(first, begin, queries, length, part, index_q, index_cache, table, result, blocks,
                  Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                  ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, N_BLOCK: tl.constexpr, HEADS: tl.constexpr,
                  HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                  PAGES: tl.constexpr, K_SCALE: tl.constexpr):
    """Scores of ROWS / HEAD_BLOCK new tokens from number ``first`` on, all heads, for PAGES blocks from ``part`` on.

    The maximum is taken over integers that order as fp32 does, with NaN on top, so that a NaN product is not lost.
    """
    row = tl.arange(0, ROWS)
    width, key = tl.arange(0, D_BLOCK), tl.arange(0, N_BLOCK)
    local, head = first + row // HEAD_BLOCK, row % HEAD_BLOCK
    active = (local < queries) & (head < HEADS)
    own = length - queries + local
    token = (begin + local).to(tl.int64)
    in_width = (width < DIM)[None, :]
    query = tl.load(index_q + token[:, None] * Q_STRIDE + head[:, None] * Q_HEAD_STRIDE + width[None, :],
                    mask=active[:, None] & in_width, other=0.0)
    newest = length - queries + tl.minimum(first + ROWS // HEAD_BLOCK, queries) - 1
    used = (tl.maximum(newest, -1) + PAGE_SIZE) // PAGE_SIZE
    start = part * PAGES
    stop = tl.minimum(start + PAGES, tl.minimum(used, blocks))
    out = result + (token * HEADS + head) * blocks
    for block in range(start, stop):
        page = tl.load(table + block)
        position = block * PAGE_SIZE + key
        valid = (key < PAGE_SIZE) & (position <= newest)
        keys = load_page_tile(index_cache, page, 0, 2, key, valid, DIM, D_BLOCK, PAGE_STRIDE, 0, ROW_STRIDE, PAGE_SIZE,
                              query.dtype)
        product = tl.dot(query, tl.trans(keys), input_precision="ieee") * K_SCALE
        seen = valid[None, :] & (position[None, :] <= own[:, None])
        best = tl.max(order_key(tl.where(seen, product, float("-inf"))), axis=1)
        tl.store(out + block, order_value(best), mask=active)
    column = start + tl.arange(0, PAGES)
    rest = (column >= stop) & (column < blocks)
    tl.store(out[:, None] + column[None, :], tl.full([ROWS, PAGES], float("-inf"), tl.float32),
             mask=active[:, None] & rest[None, :])


@triton.jit
def tile_score_decode(sequence, part, index_q, index_cache, block_table, table_stride, seq_lens, query_start, batch,
                      tokens, result, blocks, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                      PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                      N_BLOCK: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr,
                      DIM: tl.constexpr, D_BLOCK: tl.constexpr, PAGES: tl.constexpr, K_SCALE: tl.constexpr):
    """All new tokens of one sequence against PAGES of its blocks; sequence ``batch`` = the rows that nobody owns."""
    begin, queries, length = load_span(sequence, query_start, seq_lens, batch, tokens)
    table = block_table + sequence.to(tl.int64) * table_stride
    for first in range(0, queries, ROWS // HEAD_BLOCK):
        score_queries(first, begin, queries, length, part, index_q, index_cache, table, result, blocks, Q_STRIDE,
                      Q_HEAD_STRIDE, PAGE_STRIDE, ROW_STRIDE, PAGE_SIZE, N_BLOCK, HEADS, HEAD_BLOCK, ROWS, DIM,
                      D_BLOCK, PAGES, K_SCALE)


@triton.jit
def tile_score_prefill(index, part, index_q, index_cache, block_table, table_stride, seq_lens, query_start, batch,
                       tokens, result, blocks, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                       PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                       N_BLOCK: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr,
                       DIM: tl.constexpr, D_BLOCK: tl.constexpr, PAGES: tl.constexpr, K_SCALE: tl.constexpr):
    """One tile of consecutive new tokens of one sequence against PAGES blocks (slots as in ``find_sequence``)."""
    sequence = find_sequence(index, query_start, batch + 1, ROWS // HEAD_BLOCK)
    begin, queries, length = load_span(sequence, query_start, seq_lens, batch, tokens)
    first = (index - (begin // (ROWS // HEAD_BLOCK) + sequence)) * (ROWS // HEAD_BLOCK)
    if first < queries:
        table = block_table + sequence.to(tl.int64) * table_stride
        score_queries(first, begin, queries, length, part, index_q, index_cache, table, result, blocks, Q_STRIDE,
                      Q_HEAD_STRIDE, PAGE_STRIDE, ROW_STRIDE, PAGE_SIZE, N_BLOCK, HEADS, HEAD_BLOCK, ROWS, DIM,
                      D_BLOCK, PAGES, K_SCALE)


def _refuse_insert(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    keys, cache, slots = need(call, "index_k"), need(call, "index_cache"), need(call, "slot_mapping")
    if keys.dtype not in FLOATS:
        return f"index_k is {keys.dtype}, not one of {', '.join(FLOATS)}"
    if cache.dtype not in CACHE_DTYPES and not is_nvfp4(call, "index_cache"):
        return f"index_cache is {cache.dtype}, not one of {', '.join(CACHE_DTYPES)}, or uint8 for NVFP4"
    if slots.dtype not in ("int32", "int64") or slots.strides[0] != 1:
        return "slot_mapping must be contiguous int32 or int64 [tokens]"
    return refuse_static(call, "index_k", "index_cache") or refuse_pages(call, "index_cache")


def _emit_insert(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    keys, cache, tokens = need(call, "index_k"), need(call, "index_cache"), need(call, "index_k").shape[0]
    dim = int(keys.shape[1])
    constants = {"K_STRIDE": row_stride(keys), "PAGE_STRIDE": cache.strides[0], "ROW_STRIDE": cache.strides[1],
                 "PAGE_SIZE": cache.shape[1], "DIM": dim, "D_BLOCK": next_power_of_two(dim), "TOKENS": INSERT_TOKENS}
    tile = tile_insert_index
    if is_nvfp4(call, "index_cache"):
        tile = tile_insert_index_nvfp4
        constants = {name: value for name, value in constants.items() if name not in ("ROW_STRIDE", "D_BLOCK")}
    return (emit_kernel(
        name=kernel_name("insert_index", short_dtype(keys.dtype), f"cache{cache_label(call, 'index_cache')}", dim),
        title="Insertion of index keys into the paged index cache.", tiles=[tile], constants=constants,
        parameters=[pointer("index_k", keys), pointer("index_cache", cache),
                    pointer("slot_mapping", need(call, "slot_mapping")), *symbol_parameters(tokens)],
        body=f"""
            {tile.fn.__name__}(tl.program_id(0), index_k, index_cache, slot_mapping, {tokens}, {", ".join(constants)})
        """,
        grid=(f"cdiv({tokens}, {INSERT_TOKENS})", "1", "1"), num_warps=4,
        intrinsics=insertion_functions(call, "index_cache"),
    ),)


def _refuse_score(phase: str, call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    if call.attributes.get("phase", "decode") != phase:
        return f"for the {phase} phase"
    heads = int(need(call, "index_q").shape[1])
    if heads > DECODE_ROWS:
        return f"{heads} index heads, above {DECODE_ROWS}"
    reason = refuse_paged(call, "index_q", "index_cache", 1)
    if reason is None:
        constants, size = _constants(call, DECODE_ROWS, 1), ELEMENT_SIZES[need(call, "index_q").dtype]
        page = int(constants["N_BLOCK"]) * int(constants["D_BLOCK"]) * size
        if 3 * page > spec.shared_memory_per_block:
            reason = f"three pages of {page} bytes do not fit on chip"
    return reason


def _constants(call: OpCall, rows: int, pages: int) -> dict[str, int | float | bool | str]:
    q, cache = need(call, "index_q"), need(call, "index_cache")
    heads, dim, page_size = int(q.shape[1]), int(q.shape[2]), int(cache.shape[1])
    return {
        "Q_STRIDE": q.strides[0], "Q_HEAD_STRIDE": q.strides[1], "PAGE_STRIDE": cache.strides[0],
        "ROW_STRIDE": cache.strides[1], "PAGE_SIZE": page_size, "N_BLOCK": max(16, next_power_of_two(page_size)),
        "HEADS": heads, "HEAD_BLOCK": next_power_of_two(heads), "ROWS": rows, "DIM": dim,
        "D_BLOCK": max(16, next_power_of_two(dim)), "PAGES": pages,
        "K_SCALE": decoded_factor(call, "index_cache"),
    }


def _emit_score(
    rows: int, pages: int, call: OpCall, spec: TargetSpec, architecture: Architecture
) -> tuple[KernelSource, ...]:
    q, cache, table = need(call, "index_q"), need(call, "index_cache"), need(call, "block_table")
    (result,) = call.results
    decode, tokens, blocks = rows == DECODE_ROWS, q.shape[0], result.shape[2]
    constants = _constants(call, rows, pages)
    queries = rows // int(constants["HEAD_BLOCK"])
    tile = tile_score_decode if decode else tile_score_prefill
    parameters = [pointer("index_q", q), pointer("index_cache", cache), pointer("block_table", table),
                  pointer("seq_lens", need(call, "seq_lens")), pointer("query_start", need(call, "query_start")),
                  pointer("result", result), *symbol_parameters("batch", tokens, table.strides[0], blocks)]
    body = f"""
        {tile.fn.__name__}(tl.program_id(0), tl.program_id(1), index_q, index_cache, block_table, {table.strides[0]},
                           seq_lens, query_start, batch, {tokens}, result, {blocks}, {", ".join(constants)})
    """
    intrinsics, ledger = cache_intrinsics(call, "index_cache", q.dtype, architecture)
    programs = "batch + 1" if decode else f"cdiv({tokens}, {queries}) + batch + 1"
    return (emit_kernel(
        name=kernel_name(f"index_score_{'decode' if decode else 'prefill'}", short_dtype(q.dtype),
                         f"cache{cache_label(call, 'index_cache')}", f"{q.shape[1]}x{q.shape[2]}",
                         f"page{cache.shape[1]}x{pages}"),
        title=f"Index scores: new tokens of one sequence against {pages} of its blocks.", tiles=[tile],
        constants=constants, parameters=parameters, body=body, grid=(programs, f"cdiv({blocks}, {pages})", "1"),
        num_warps=4, num_stages=count_stages(spec, CHAIN) if decode else 2, intrinsics=intrinsics, ledger=ledger,
    ),)


TEMPLATES = (
    KernelTemplate("insert_index", "insert_index", _refuse_insert, _emit_insert),
    *(
        KernelTemplate(f"paged_index_score_decode{tokens or ''}", "paged_index_score", partial(_refuse_score, "decode"),
                       partial(_emit_score, DECODE_ROWS, pages), max_tokens=tokens)
        for tokens, pages in PAGES_BY_TOKENS
    ),
    KernelTemplate("paged_index_score_prefill", "paged_index_score", partial(_refuse_score, "prefill"),
                   partial(_emit_score, PREFILL_ROWS, 4)),
)
