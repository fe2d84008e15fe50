"""Index scores of many columns: four warps multiply by wgmma, so that a key is decoded once for 32 (query, head) pairs.

The rows of a wgmma are 16 tokens of each warp, which may lie in different pages; its columns lie in shared memory as
core matrices of 8 columns times 16 bytes, without a swizzle.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_columns(index_q, token, queries, first, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                  HEADS: tl.constexpr, SCALE_QUERY: tl.constexpr, BASE: tl.constexpr, STORE_COLUMNS: tl.constexpr):
    """Lay 32 columns, (query, head) pairs from query ``first`` on, in shared memory as wgmma reads them; 4 warps."""
    thread, register = tl.arange(0, 128), tl.arange(0, 4)
    column = thread // 32 * 8 + thread % 32 // 4
    local = first + column // HEADS
    row = (token + local).to(tl.int64) * (Q_STRIDE // 2) + column % HEADS * (Q_HEAD_STRIDE // 2)
    source = index_q + (row + thread % 4 * 8)[:, None] + register[None, :]
    words = ()
    for part in tl.static_range(4):
        word = tl.load(source + (32 * (part // 2) + 4 * (part % 2)), mask=(local < queries)[:, None], other=0)
        words = words + (tl.inline_asm_elementwise(SCALE_QUERY[0], SCALE_QUERY[1], [word], tl.int32, True, 1),)
    base = tl.max(tl.inline_asm_elementwise(BASE[0], BASE[1], [thread], tl.int32, True, 1), axis=0)
    tl.debug_barrier()  # what was there has been read
    place = (base + 4 * thread)[:, None] + register[None, :] * 0
    tl.inline_asm_elementwise(STORE_COLUMNS[0], STORE_COLUMNS[1], [words[0], words[1], words[2], words[3], place],
                              tl.int32, False, 4)
    tl.debug_barrier()
    return base


@triton.jit
def score_page_wide(words, base, visible, HOLD: tl.constexpr, SCORE: tl.constexpr):
    """As ``score_page`` for the 32 columns at ``base`` in shared memory: the largest scores of 16 and of 16 more."""
    best = tl.full(words.shape, float("-inf"), tl.float32)
    best1 = best
    base += (visible * 0)
    for quarter in tl.static_range(4):
        tiles = ()
        for i in tl.static_range(4):
            tiles = tiles + (tl.load(words + (quarter * 4 + i) * 128, eviction_policy="evict_first"),)
        scales = tl.load(words + 2048 + quarter // 2 * 128, eviction_policy="evict_first")
        tl.inline_asm_elementwise(HOLD[0], HOLD[1], [], tl.int32, False, 1)
        for i in tl.static_range(2):
            best, best1 = tl.inline_asm_elementwise(
                SCORE[2 * (2 * quarter + i)], SCORE[2 * (2 * quarter + i) + 1],
                [tiles[2 * i], tiles[2 * i + 1], scales, base, best, best1, visible],
                (tl.float32, tl.float32), False, 4)
    return best, best1


@triton.jit
def score_blocks_wide(first, token, queries, length, start, turns, used, ids, index_q, pages, result, blocks,
                      Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, PAGE_WORDS: tl.constexpr,
                      HEADS: tl.constexpr, SCALE_QUERY: tl.constexpr, SHUFFLE: tl.constexpr, HOLD: tl.constexpr,
                      STORE: tl.constexpr, BASE: tl.constexpr, STORE_COLUMNS: tl.constexpr,
                      SCORE_WHOLE: tl.constexpr, SCORE_PART: tl.constexpr):
    """As ``score_blocks`` for 32 columns, which four warps multiply together: a key is decoded once for all of them."""
    base = store_columns(index_q, token, queries, first, Q_STRIDE, Q_HEAD_STRIDE, HEADS, SCALE_QUERY, BASE,
                         STORE_COLUMNS)
    thread, register = tl.arange(0, 128), tl.arange(0, 4)
    lane, warp = thread % 32, thread // 32
    own_words = lane[:, None] * 4 + register[None, :]
    column = (register // 2 * 8 + register % 2)[None, :] + (lane % 4)[:, None] * 2
    seen = length - queries + first + 1 + column // HEADS
    out = result + (token + first).to(tl.int64) * HEADS * blocks
    equal = register[None, :] * 0
    for turn in range(turns):
        page = tl.inline_asm_elementwise(SHUFFLE[0], SHUFFLE[1], [ids, turn + thread * 0], tl.int32, True, 1)
        block = (start + turn * 4 + warp)[:, None]
        words = pages + page.to(tl.int64)[:, None] * PAGE_WORDS + own_words
        visible = seen - block * 128
        if (start + turn * 4 + 4) * 128 <= length - queries + first + 1:
            best, best1 = score_page_wide(words, base, visible, HOLD, SCORE_WHOLE)
        else:
            best, best1 = score_page_wide(words, base, visible, HOLD, SCORE_PART)
        place = (out + (block + equal)).to(tl.int64)
        wanted = tl.where(block + equal < used, (queries - first) * HEADS, 0)
        row = blocks + equal + thread[:, None] * 0
        tl.inline_asm_elementwise(STORE[0], STORE[1], [best, place, row, wanted], tl.int32, False, 4)
        place += 64 * blocks.to(tl.int64)  # 16 rows of fp32
        tl.inline_asm_elementwise(STORE[0], STORE[1], [best1, place, row, wanted - 16], tl.int32, False, 4)
