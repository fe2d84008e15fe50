"""Tuned block-sparse decode attention over plain pages of bf16 or float8_e4m3fn, for Hopper.

The tile is that of sparse_lanes with these functions in place of its own: a step is 16 tokens of bf16 or 32 of fp8,
sums are fp32. A row is read by the lanes that need it, straight to registers, 16 bytes at once.
"""

from __future__ import annotations

import math
from functools import partial

import triton
import triton.language as tl

from mmcompile.core.formats.cache_pages import PLAIN
from mmcompile.core.kernel import OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._kernels.common import ELEMENT_SIZES, need
from mmcompile.targets._tuned import sparse_plain_ptx as ptx
from mmcompile.targets._tuned import sparse_ptx
from mmcompile.targets._tuned.sparse_attention import (
    HEAD_DIM,
    PAGE_SIZE,
    Config,
    Form,
    make_templates,
    refuse_heads,
    refuse_operands,
)

FEATURES = {"bfloat16": frozenset({"mma_m16n8k16"}), "float8_e4m3fn": sparse_ptx.FEATURES}
BYTES_CONFIGS = (
    (1, Config(4, 16, True)),
    (8, Config(1, 16, True)),
    (16, Config(4, 4, True)),
    (32, Config(8, 1, True)),
    (None, Config(4, 1, True)),
)
"""(largest token count, cut of the work) for fp8; from a prototype's times, these kernels were not timed."""
HALVES_CONFIGS = (
    (1, Config(4, 16, False)),
    (16, Config(4, 4, False)),
    (32, Config(8, 1, False)),
    (None, Config(4, 1, False, 192)),
)
"""The same for bf16."""


@triton.jit
def load_step(pages, entry, step, lane, column, PAGE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr,
              LOADS: tl.constexpr):
    """Words of 16 tokens: K by (tile, part of the row), V by (part of the row, tile, row), and no scales.

    Rows that are not visible are 0 and not read: whatever they hold, a weight of 0 may not meet NaN.
    """
    visible = (entry & 255) - step * 16
    start = pages + (entry >> 8).to(tl.int64)[:, None] * PAGE_WORDS + step[:, None] * (16 * ROW_WORDS)
    row = start + ((lane // 4 * ROW_WORDS + lane % 4 * 4)[:, None] + column[None, :])
    keys = ()
    for i in tl.static_range(2 * LOADS):
        seen = lane // 4 + i // LOADS * 8 < visible
        place = i // LOADS * 8 * ROW_WORDS + i % LOADS * 16
        keys = keys + (tl.load(row + place, mask=seen[:, None], other=0, eviction_policy="evict_first"),)
    row = start + ((lane % 4 * 2 * ROW_WORDS + lane // 4 * 4 + 16 * LOADS)[:, None] + column[None, :])
    values = ()
    for i in tl.static_range(2 * LOADS):
        token = i // 2 % 2 * 8 + i % 2
        seen = lane % 4 * 2 + token < visible
        place = token * ROW_WORDS + i // 4 * 32
        values = values + (tl.load(row + place, mask=seen[:, None], other=0, eviction_policy="evict_first"),)
    return keys, values, keys[0]


@triton.jit
def load_query(row, kv_head, group, quad, column, Q_HEAD_STRIDE: tl.constexpr, SCALE_QUERY: tl.constexpr):
    """The A fragments of the 16 heads for bf16 pages: words (part of the row, head half) as they are."""
    words, place = (), quad[:, None] * 4 + column[None, :]
    for part in tl.static_range(8):
        head = kv_head * 16 + group + 8 * (part % 2)
        words = words + (tl.load(row + head[:, None] * (Q_HEAD_STRIDE // 2) + place + 16 * (part // 2)),)
    return words


@triton.jit
def start_sums(zero):
    """Sums of nothing, fp32; ``zero`` int32 in all registers."""
    none = zero.to(tl.float32)
    return (none, none, none, none, none, none, none, none, none, none, none, none, none, none, none, none)


@triton.jit
def add_values(rows, FIRST: tl.constexpr, weights, sums, PTX: tl.constexpr, CHOICE: tl.constexpr):
    """Four sums plus weights times the values of 16 tokens, whose loads are number FIRST and the next three."""
    return tl.inline_asm_elementwise(
        PTX[2 * CHOICE], PTX[2 * CHOICE + 1],
        [rows[FIRST], rows[FIRST + 1], rows[FIRST + 2], rows[FIRST + 3], weights, sums[0], sums[1], sums[2], sums[3]],
        (tl.float32, tl.float32, tl.float32, tl.float32), True, 4)


@triton.jit
def attend_step(query, keys, values, scales, visible, start, state, sums, LOADS: tl.constexpr,
                SPLIT_SCALES: tl.constexpr, SCORE_TILES: tl.constexpr, UPDATE_SOFTMAX: tl.constexpr,
                DECAY_SUMS: tl.constexpr, ADD_VALUES: tl.constexpr):
    """One step of 16 tokens of which ``visible`` (in every register) are: the softmax state and the sums after it."""
    if LOADS == 2:
        s0, s1 = tl.inline_asm_elementwise(
            SCORE_TILES[0], SCORE_TILES[1],
            [keys[0], keys[1], keys[2], keys[3], query[0], query[1], query[2], query[3], query[4], query[5], query[6],
             query[7], start], (tl.float32, tl.float32), True, 4)
    else:
        s0, s1 = tl.inline_asm_elementwise(
            SCORE_TILES[0], SCORE_TILES[1],
            [keys[0], keys[1], keys[2], keys[3], keys[4], keys[5], keys[6], keys[7], query[0], query[1], query[2],
             query[3], query[4], query[5], query[6], query[7], start], (tl.float32, tl.float32), True, 4)
    weights, state, decay = tl.inline_asm_elementwise(
        UPDATE_SOFTMAX[0], UPDATE_SOFTMAX[1], [s0, s1, state, visible], (tl.int32, tl.float32, tl.float32), True, 4)
    added = ()
    for i in tl.static_range(4):
        four = (sums[4 * i] * decay, sums[4 * i + 1] * decay, sums[4 * i + 2] * decay, sums[4 * i + 3] * decay)
        # fp8: four columns of a lane's 16; bf16: two words of a part of the row
        four = add_values(values, 0 if LOADS == 2 else i // 2 * 4, weights, four, ADD_VALUES,
                          i if LOADS == 2 else i % 2)
        added = added + (four[0], four[1], four[2], four[3])
    return state, added


@triton.jit
def store_sums(sums, state, rows, quad, column, LOADS: tl.constexpr, STORE_ROWS: tl.constexpr):
    """Store the sums over their weights; ``rows`` [n, 4]: where the rows of heads g, g, g + 8, g + 8 begin."""
    WIDTH: tl.constexpr = 32 // LOADS  # successive values of a row that a lane g holds: 16 of fp8, 8 of bf16
    place = (rows + quad[:, None] * (2 * WIDTH) + WIDTH * (column % 2)[None, :]).to(tl.int64)
    for half in tl.static_range(2):
        tl.inline_asm_elementwise(
            STORE_ROWS[2 * half], STORE_ROWS[2 * half + 1],
            [sums[8 * half], sums[8 * half + 1], sums[8 * half + 2], sums[8 * half + 3], sums[8 * half + 4],
             sums[8 * half + 5], sums[8 * half + 6], sums[8 * half + 7], state, place], tl.int32, False, 4)


def _refuse(dtype: str, call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    cache = need(call, "kv_cache")
    if call.attributes.get("layout", PLAIN) != PLAIN or cache.dtype != dtype:
        return f"the cache is not in the layout {PLAIN!r} with elements of {dtype}"
    reason = refuse_operands(call, architecture, FEATURES[dtype])
    if reason is None and tuple(cache.shape[2:]) != (PAGE_SIZE, 2 * HEAD_DIM):
        reason = f"pages of the cache are not {PAGE_SIZE} rows of {2 * HEAD_DIM}"
    if reason is None and (cache.strides[3] != 1 or any(int(s) * ELEMENT_SIZES[dtype] % 16 for s in cache.strides[:3])):
        reason = "rows of the cache do not begin at multiples of 16 bytes"
    return reason or refuse_heads(call, int(cache.shape[1]))


def _assemble(dtype: str, call: OpCall, config: Config) -> dict[str, list[sparse_ptx.Text]]:
    """fp8: queries become f16, which |q| up to 65504 fits; bf16: queries stay as they are."""
    kind, factor = ptx.KINDS[dtype], float(call.attributes["scale"]) * math.log2(math.e)
    halves = dtype == "bfloat16"
    return {
        "SCALE_QUERY": [] if halves else [sparse_ptx.scale_query(1.0)],
        "SPLIT_SCALES": [],
        "SCORE_TILES": [ptx.score_tiles(kind)],
        "UPDATE_SOFTMAX": [sparse_ptx.update_softmax(0 if halves else 8, factor, 2, kind)],
        "DECAY_SUMS": [],
        "ADD_VALUES": [ptx.add_values(kind, quarter) for quarter in range(2 if halves else 4)],
        "STORE_ROWS": [ptx.store_rows(0), ptx.store_rows(128 if halves else 16)],
    }  # fmt: skip


_FUNCTIONS = (load_step, start_sums, attend_step, store_sums)
FORMS = {
    "float8_e4m3fn": Form("fp8", "plain pages of fp8", 8, 2, 1, partial(_assemble, "float8_e4m3fn"),
                          {"HMMA.16816.F32": True}, _FUNCTIONS),
    "bfloat16": Form("bf16", "plain pages of bf16", 8, 4, 1, partial(_assemble, "bfloat16"),
                     {"HMMA.16816.F32.BF16": True}, (*_FUNCTIONS, load_query)),
}  # fmt: skip
TEMPLATES = (
    *make_templates(FORMS["float8_e4m3fn"], BYTES_CONFIGS, partial(_refuse, "float8_e4m3fn")),
    *make_templates(FORMS["bfloat16"], HALVES_CONFIGS, partial(_refuse, "bfloat16")),
)
