"""Tuned index scores of block-sparse attention for Hopper, a page a warp: NVFP4 pages, and what others share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.formats.nvfp4_cache import SM90_INDEX
from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import ELEMENT_SIZES, kernel_name, need, pointer, symbol_parameters
from mmcompile.targets._kernels.sparse_common import load_span
from mmcompile.targets._tuned import sparse_ptx, sparse_wide_ptx
from mmcompile.targets._tuned.sparse_index_wide import score_blocks_wide

HEAD_DIM, PAGE_SIZE, PAGE_BYTES = 128, 128, 9216
WARPS = 4
WARPS_RESIDENT = 16
"""Warps of a streaming multiprocessor that the registers leave room for."""
WAVES = 16
"""Times that a launch may fill the device, with a page a warp; programs take turns beyond that."""
MOST_PAGES = 8
"""Pages a warp, at most; as few as one where that leaves warps idle (measured: 2 to 8 at least lose at 32K)."""


@triton.jit
def load_columns(index_q, token, queries, first, group, place, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                 HEADS: tl.constexpr, GROUPS: tl.constexpr, SCALE_QUERY: tl.constexpr):
    """B fragments of GROUPS groups of 8 columns: (query, head) pairs from query ``first`` on, four tensors a group."""
    words = ()
    for part in tl.static_range(4 * GROUPS):
        column = part // 4 * 8 + group
        local = first + column // HEADS
        row = (token + local).to(tl.int64) * (Q_STRIDE // 2) + column % HEADS * (Q_HEAD_STRIDE // 2)
        word = tl.load(index_q + row[:, None] + place + (32 * (part // 2 % 2) + 4 * (part % 2)),
                       mask=(local < queries)[:, None], other=0)
        words = words + (tl.inline_asm_elementwise(SCALE_QUERY[0], SCALE_QUERY[1], [word], tl.int32, True, 1),)
    return words


@triton.jit
def score_pair(first, second, scales, query, best, visible, GROUPS: tl.constexpr, PTX: tl.constexpr,
               CHOICE: tl.constexpr):
    """The largest scores after 16 more tokens."""
    if GROUPS == 1:
        best = tl.inline_asm_elementwise(
            PTX[2 * CHOICE], PTX[2 * CHOICE + 1],
            [first, second, scales, query[0], query[1], query[2], query[3], best, visible], tl.float32, True, 4)
    else:
        best = tl.inline_asm_elementwise(
            PTX[2 * CHOICE], PTX[2 * CHOICE + 1],
            [first, second, scales, query[0], query[1], query[2], query[3], query[4], query[5], query[6], query[7],
             best, visible], tl.float32, True, 4)
    return best


@triton.jit
def start_page(pages, page, lane, register, PAGE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr):
    """The lane's first words of its page: those of a tile of 8 tokens."""
    return pages + page.to(tl.int64)[:, None] * PAGE_WORDS + (lane[:, None] * 4 + register[None, :])


@triton.jit
def score_page(words, query, visible, ROW_WORDS: tl.constexpr, GROUPS: tl.constexpr, HOLD: tl.constexpr,
               SCORE: tl.constexpr):
    """The lane's largest score of each column in the page at ``words``, of its first ``visible`` tokens."""
    TILES: tl.constexpr = 8 // GROUPS  # at once: registers
    best = tl.full(words.shape, float("-inf"), tl.float32)
    for part in tl.static_range(16 // TILES):
        tiles = ()
        for i in tl.static_range(TILES):
            tiles = tiles + (tl.load(words + (part * TILES + i) * 128, eviction_policy="evict_first"),)
        scales = tl.load(words + 2048 + part * TILES // 8 * 128, eviction_policy="evict_first")
        tl.inline_asm_elementwise(HOLD[0], HOLD[1], [], tl.int32, False, 1)
        for pair in tl.static_range(TILES // 2):
            best = score_pair(tiles[2 * pair], tiles[2 * pair + 1], scales, query, best, visible, GROUPS, SCORE,
                              part * TILES // 2 + pair)
    return best


@triton.jit
def score_blocks(first, token, queries, length, start, turns, used, ids, index_q, pages, result, blocks,
                 Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, PAGE_WORDS: tl.constexpr,
                 ROW_WORDS: tl.constexpr, HEADS: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr,
                 SCALE_QUERY: tl.constexpr, SHUFFLE: tl.constexpr, HOLD: tl.constexpr, SCORE: tl.constexpr,
                 STORE: tl.constexpr):
    """Scores of 8 * GROUPS columns from query ``first`` on for ``turns`` blocks a warp; lane i holds the i-th page."""
    thread, register = tl.arange(0, 32 * WARPS), tl.arange(0, 4)
    lane, warp = thread % 32, thread // 32
    query = load_columns(index_q, token, queries, first, lane // 4, (lane % 4)[:, None] * 8 + register[None, :],
                         Q_STRIDE, Q_HEAD_STRIDE, HEADS, GROUPS, SCALE_QUERY)
    column = (register // 2 * 8 + register % 2)[None, :] + (lane % 4)[:, None] * 2
    seen = length - queries + first + 1 + column // HEADS
    out = result + (token + first).to(tl.int64) * HEADS * blocks
    equal = register[None, :] * 0
    for turn in range(turns):
        page = tl.inline_asm_elementwise(SHUFFLE[0], SHUFFLE[1], [ids, turn + thread * 0], tl.int32, True, 1)
        block = (start + turn * WARPS + warp)[:, None]
        words = start_page(pages, page, lane, register, PAGE_WORDS, ROW_WORDS)
        best = score_page(words, query, seen - block * 128, ROW_WORDS, GROUPS, HOLD, SCORE)
        place = (out + (block + equal)).to(tl.int64)
        wanted = tl.where(block + equal < used, (queries - first) * HEADS, 0)
        tl.inline_asm_elementwise(STORE[0], STORE[1], [best, place, blocks + equal + thread[:, None] * 0, wanted],
                                  tl.int32, False, 4)


@triton.jit
def tile_score_lanes(sequence, program, programs, index_q, index_cache, block_table, table_stride, seq_lens,
                     query_start, batch, tokens, result, blocks, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                     PAGE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, HEADS: tl.constexpr, WARPS: tl.constexpr,
                     MOST_PAGES: tl.constexpr, RESIDENT: tl.constexpr, SCALE_QUERY: tl.constexpr,
                     SHUFFLE: tl.constexpr, HOLD: tl.constexpr, SCORE_FEW: tl.constexpr, SCORE_MANY: tl.constexpr,
                     STORE_FEW: tl.constexpr, STORE_MANY: tl.constexpr, BASE: tl.constexpr,
                     STORE_COLUMNS: tl.constexpr, SCORE_WHOLE: tl.constexpr, SCORE_PART: tl.constexpr):
    """All new tokens of one sequence against its blocks; sequence ``batch`` = the rows that nobody owns.

    A warp takes as many pages at once as fill the device once, up to MOST_PAGES; the ``programs`` of a sequence take
    turns. Blocks behind the last one get minus infinity.
    """
    begin, queries, length = load_span(sequence, query_start, seq_lens, batch, tokens)
    used = tl.minimum((length + 127) // 128, blocks)
    share = tl.minimum(tl.maximum((used * batch + RESIDENT - 1) // RESIDENT, 1), MOST_PAGES)
    thread = tl.arange(0, 32 * WARPS)
    table = block_table + sequence.to(tl.int64) * table_stride
    words = index_q.to(tl.pointer_type(tl.int32), bitcast=True)
    pages = index_cache.to(tl.pointer_type(tl.int32), bitcast=True)
    for start in range(program * WARPS * share, tl.where(queries > 0, used, 0), programs * WARPS * share):
        mine = start + thread % 32 * WARPS + thread // 32
        ids = tl.load(table + mine, mask=(thread % 32 < share) & (mine < used), other=0)
        turns = tl.minimum(share, (used - start + WARPS - 1) // WARPS)
        if queries * HEADS <= 8:
            score_blocks(0, begin, queries, length, start, turns, used, ids, words, pages, result, blocks, Q_STRIDE,
                         Q_HEAD_STRIDE, PAGE_WORDS, ROW_WORDS, HEADS, WARPS, 1, SCALE_QUERY, SHUFFLE, HOLD, SCORE_FEW,
                         STORE_FEW)
        elif SCORE_MANY is None:
            for first in range(0, queries, 32 // HEADS):
                score_blocks_wide(first, begin, queries, length, start, turns, used, ids, words, pages, result, blocks,
                                  Q_STRIDE, Q_HEAD_STRIDE, PAGE_WORDS, HEADS, SCALE_QUERY, SHUFFLE, HOLD, STORE_MANY,
                                  BASE, STORE_COLUMNS, SCORE_WHOLE, SCORE_PART)
        else:
            for first in range(0, queries, 16 // HEADS):
                score_blocks(first, begin, queries, length, start, turns, used, ids, words, pages, result, blocks,
                             Q_STRIDE, Q_HEAD_STRIDE, PAGE_WORDS, ROW_WORDS, HEADS, WARPS, 2, SCALE_QUERY, SHUFFLE,
                             HOLD, SCORE_MANY, STORE_MANY)
    row = tl.arange(0, 8)
    for start in range(program * WARPS, blocks, programs * WARPS):
        column = start + tl.arange(0, WARPS)
        if start + WARPS > used:
            for first in range(0, queries * HEADS, 8):
                line = begin.to(tl.int64) * HEADS + first + row
                mask = (first + row < queries * HEADS)[:, None] & ((column >= used) & (column < blocks))[None, :]
                tl.store(result + line[:, None] * blocks + column[None, :],
                         tl.full((8, WARPS), float("-inf"), tl.float32), mask=mask)


@dataclass(frozen=True)
class Form:
    """What reads index keys of one kind.

    Attributes:
        name: in the names of kernels. title: of the pages. score: assembly of the pair of tiles, groups of columns and
            heads. factor: of the products. wide: whether many columns are multiplied by wgmma.
        functions: replace those here that have their names.
    """

    name: str
    title: str
    score: Callable[[int, int, int], sparse_ptx.Text]
    factor: float
    wide: bool
    functions: tuple[Any, ...] = ()


NVFP4 = Form("nvfp4", "NVFP4 pages in lane order", sparse_ptx.score_keys, 256.0, True)


def refuse_operands(call: OpCall, architecture: Architecture) -> str | None:
    """A reason that holds for keys of every kind: the architecture, the phase, tables, sizes, queries."""
    missing = sorted(sparse_ptx.FEATURES - architecture.features)
    if missing:
        return f"{architecture.name} lacks {missing[0]}"
    if call.attributes.get("phase", "decode") != "decode":
        return "for the decode phase"
    q, cache = need(call, "index_q"), need(call, "index_cache")
    if any(need(call, name).dtype != "int32" or need(call, name).strides[-1] != 1
           for name in ("block_table", "seq_lens", "query_start")):  # fmt: skip
        return "block_table, seq_lens and query_start must be int32 with a last stride of 1"
    if not all(isinstance(n, int) for n in (*q.shape[1:], *q.strides, *cache.shape[1:], *cache.strides)):
        return "the sizes and strides of index_q and index_cache must be numbers"
    if q.dtype != "bfloat16" or q.shape[2] != HEAD_DIM or q.shape[1] not in (1, 2, 4, 8):
        return f"index_q is {q.dtype} with {q.shape[1]} heads of {q.shape[2]}, not bfloat16 with 1, 2, 4 or 8 of 128"
    if int(q.strides[0]) % 8 or int(q.strides[1]) % 8 or q.strides[2] != 1:
        return "rows of index_q do not begin at multiples of 16 bytes"
    return None


def _refuse(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    cache = need(call, "index_cache")
    if call.attributes.get("layout") != SM90_INDEX or cache.dtype != "uint8":
        return f"the cache is not in the layout {SM90_INDEX!r}"
    reason = refuse_operands(call, architecture)
    if reason is None and (tuple(cache.shape[1:]), tuple(cache.strides[1:])) != ((PAGE_SIZE, 72), (72, 1)):
        reason = "pages of the cache are not 128 rows of 72 bytes"
    if reason is None and int(cache.strides[0]) % 16:
        reason = "pages of the cache do not begin at multiples of 16 bytes"
    return reason


def _wide_assembly(heads: int, wide: bool) -> dict[str, str]:
    """The inline assembly of wgmma, by the parameter of the tile that takes it."""
    names = ("BASE", "STORE_COLUMNS", "SCORE_WHOLE", "SCORE_PART")
    if not wide:
        return dict.fromkeys(names, "None")
    whole, part = ([sparse_wide_ptx.score_keys(pair, heads, kind) for pair in range(8)] for kind in (True, False))
    texts = ([sparse_wide_ptx.base_address()], [sparse_wide_ptx.store_columns()], whole, part)
    return {name: sparse_ptx.as_constant(*text) for name, text in zip(names, texts, strict=True)}


def emit_scores(
    form: Form, call: OpCall, spec: TargetSpec, architecture: Architecture
) -> tuple[KernelSource, ...]:
    """The kernel for keys of a kind."""
    q, cache, table = need(call, "index_q"), need(call, "index_cache"), need(call, "block_table")
    (result,) = call.results
    tokens, heads, blocks, resident = q.shape[0], int(q.shape[1]), result.shape[2], WARPS_RESIDENT * spec.units
    # A merged kernel has its own warps and shared memory.
    wide = form.wide and "warps" not in call.attributes and architecture.features >= sparse_wide_ptx.FEATURES
    page, row = (int(stride) * ELEMENT_SIZES[cache.dtype] // 4 for stride in cache.strides[:2])
    constants = {
        "Q_STRIDE": q.strides[0], "Q_HEAD_STRIDE": q.strides[1], "PAGE_WORDS": page, "ROW_WORDS": row,
        "HEADS": heads, "WARPS": WARPS, "MOST_PAGES": MOST_PAGES,
        "RESIDENT": resident,
        "SCALE_QUERY": sparse_ptx.as_constant(sparse_ptx.scale_query(1.0)),
        "SHUFFLE": sparse_ptx.as_constant(sparse_ptx.shuffle()),
        "HOLD": sparse_ptx.as_constant(sparse_ptx.hold_loads()),
        "SCORE_FEW": sparse_ptx.as_constant(*(form.score(pair, 1, heads) for pair in range(8))),
        "SCORE_MANY": "None" if wide else sparse_ptx.as_constant(
            *(form.score(pair, 2, heads) for pair in range(8))),
        "STORE_FEW": sparse_ptx.as_constant(sparse_ptx.store_largest(1, form.factor)),
        "STORE_MANY": sparse_ptx.as_constant(sparse_ptx.store_largest(2, form.factor)),
    } | _wide_assembly(heads, wide)  # fmt: skip
    # The second dimension of the grid, which a stage of a merged kernel cannot ask the hardware for.
    per_turn = f"{WARPS} * max(cdiv({blocks} * batch, {WAVES * resident}), 1)"
    programs = f"tl.cdiv({blocks}, {per_turn})".replace("max(cdiv", "tl.maximum(tl.cdiv")
    source = emit_kernel(
        name=kernel_name(f"index_score_lanes_{form.name}", f"{q.shape[1]}x{q.shape[2]}"),
        title=f"Index scores over {form.title}: new tokens of one sequence.",
        tiles=[tile_score_lanes], constants=constants,
        parameters=[pointer("index_q", q), pointer("index_cache", cache), pointer("block_table", table),
                    pointer("seq_lens", need(call, "seq_lens")), pointer("query_start", need(call, "query_start")),
                    pointer("result", result), *symbol_parameters("batch", tokens, table.strides[0], blocks)],
        body=f"""
            programs = {programs}
            tile_score_lanes(tl.program_id(0), tl.program_id(1), programs, index_q, index_cache, block_table,
                             {table.strides[0]}, seq_lens, query_start, batch, {tokens}, result, {blocks},
                             {", ".join(constants)})
        """,
        grid=("batch + 1", f"cdiv({blocks}, {per_turn})", "1"),
        num_warps=WARPS, num_stages=1, early=architecture, intrinsics={f.fn.__name__: f for f in form.functions},
        ledger={"HMMA.16816.F32": True} | ({"HGMMA.64x32x16": True} if wide else {}),
    )  # fmt: skip
    if not wide:
        return (replace(source, lanes=True),)
    end = sparse_wide_ptx.PLACE + sparse_wide_ptx.SHARED
    return (replace(source, lanes=True, private_shared=(sparse_wide_ptx.PLACE, end), parts=None),)


TEMPLATES = (
    KernelTemplate("paged_index_score_lanes", "paged_index_score", _refuse, partial(emit_scores, NVFP4), grade="tuned"),
)
