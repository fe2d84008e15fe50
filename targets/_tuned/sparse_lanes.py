"""Tiles of the tuned block-sparse attention: one token, the 16 heads of one KV head, NVFP4 pages in lane order.

Every warp walks over steps of tokens of its own, with its own softmax, and writes its own partial result; tensors
[32 * WARPS, 4] give every lane four registers. For plain pages sparse_plain replaces what reads a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._kernels.sparse_common import find_owner


@triton.jit
def find_place(token, tokens, query_start, seq_lens, batch, OWNERS: tl.constexpr):
    """(sequence, own position) of a token; position -1 if nobody owns it or its sequence is empty.

    All sequences mostly have equally many new tokens: what that gives is loaded and checked before a search.
    """
    sequence = token * batch // tokens
    begin = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    length = tl.load(seq_lens + sequence)
    if (token < begin) | (token >= end):
        sequence = find_owner(token, query_start, batch, OWNERS)
        length = tl.load(seq_lens + sequence, mask=sequence < batch, other=0)
        end = tl.load(query_start + sequence + 1, mask=sequence < batch, other=0)
    return sequence, tl.where(length > 0, length - end + token, -1)


@triton.jit
def list_entries(block, lane, own, table, COUNT: tl.constexpr):
    """Page << 8 | visible tokens of the chosen blocks [n], and one more than the last lane with a block (or COUNT)."""
    used = (block >= 0) & (block * 128 <= own)
    page = tl.load(table + block, mask=used, other=0)
    count = COUNT
    if own < COUNT * 128:
        count = tl.max(tl.where(used, lane + 1, 0), axis=0)
    return (page << 8) | tl.where(used, tl.minimum(own - block * 128 + 1, 128), 0), count


@triton.jit
def take_step(entries, index, STEPS: tl.constexpr, SHUFFLE: tl.constexpr):
    """The entry that step ``index`` [n] of all lies in, STEPS steps an entry, and its number there."""
    entry = tl.inline_asm_elementwise(SHUFFLE[0], SHUFFLE[1], [entries, index // STEPS], tl.int32, True, 1)
    return entry, index % STEPS


@triton.jit
def load_step(pages, entry, step, lane, column, PAGE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr,
              LOADS: tl.constexpr):
    """Words of 32 tokens: four tiles of K, four of V, scales; ``entry`` [n] holds page << 8 | visible tokens."""
    start = pages + (entry >> 8).to(tl.int64)[:, None] * PAGE_WORDS + (lane[:, None] * 4 + column[None, :])
    codes = start + step[:, None] * 512
    keys = (tl.load(codes, eviction_policy="evict_first"), tl.load(codes + 128, eviction_policy="evict_first"),
            tl.load(codes + 256, eviction_policy="evict_first"), tl.load(codes + 384, eviction_policy="evict_first"))
    codes += 2048
    values = (tl.load(codes, eviction_policy="evict_first"), tl.load(codes + 128, eviction_policy="evict_first"),
              tl.load(codes + 256, eviction_policy="evict_first"), tl.load(codes + 384, eviction_policy="evict_first"))
    scales = tl.load(start + 4096 + step[:, None] * 128, eviction_policy="evict_first")
    return keys, values, scales


@triton.jit
def score_tiles(first, second, scales, query, start, PTX: tl.constexpr, CHOICE: tl.constexpr):
    """Scores of two tiles of 8 tokens."""
    return tl.inline_asm_elementwise(
        PTX[2 * CHOICE], PTX[2 * CHOICE + 1],
        [first, second, scales, query[0], query[1], query[2], query[3], query[4], query[5], query[6],
         query[7], start], (tl.float32, tl.float32), True, 4)


@triton.jit
def add_values(first, second, scales, weights, even, odd, PTX: tl.constexpr, CHOICE: tl.constexpr):
    """Two sums plus weights times the values of two tiles of 8 tokens."""
    return tl.inline_asm_elementwise(
        PTX[2 * CHOICE], PTX[2 * CHOICE + 1], [first, second, scales, weights, even, odd], (tl.int32, tl.int32),
        True, 4)


@triton.jit
def attend_step(query, keys, values, scales, visible, start, state, sums, LOADS: tl.constexpr,
                SPLIT_SCALES: tl.constexpr, SCORE_TILES: tl.constexpr, UPDATE_SOFTMAX: tl.constexpr,
                DECAY_SUMS: tl.constexpr, ADD_VALUES: tl.constexpr):
    """One step of 32 tokens of which ``visible`` (in every register) are: the softmax state and the sums after it."""
    of_keys, of_values = tl.inline_asm_elementwise(
        SPLIT_SCALES[0], SPLIT_SCALES[1], [scales, visible], (tl.int32, tl.int32), True, 4)
    s0, s1 = score_tiles(keys[0], keys[1], of_keys, query, start, SCORE_TILES, 0)
    s2, s3 = score_tiles(keys[2], keys[3], of_keys, query, start, SCORE_TILES, 1)
    w0, w1, state, decay = tl.inline_asm_elementwise(
        UPDATE_SOFTMAX[0], UPDATE_SOFTMAX[1], [s0, s1, s2, s3, state, visible],
        (tl.int32, tl.int32, tl.float32, tl.float32), True, 4)
    decayed = ()
    for i in tl.static_range(8):
        decayed = decayed + (tl.inline_asm_elementwise(
            DECAY_SUMS[0], DECAY_SUMS[1], [sums[i], decay], tl.int32, True, 4),)
    added = ()
    for i in tl.static_range(4):
        even, odd = add_values(values[0], values[1], of_values, w0, decayed[2 * i], decayed[2 * i + 1], ADD_VALUES, i)
        added = added + add_values(values[2], values[3], of_values, w1, even, odd, ADD_VALUES, 4 + i)
    return state, added


@triton.jit
def load_query(row, kv_head, group, quad, column, Q_HEAD_STRIDE: tl.constexpr, SCALE_QUERY: tl.constexpr):
    """The A fragments of the 16 heads: words (u, j, head half), as f16; ``row``: the token's words."""
    words, place = (), quad[:, None] * 8 + column[None, :]
    for part in tl.static_range(8):
        head = kv_head * 16 + group + 8 * (part % 2)
        word = tl.load(row + head[:, None] * (Q_HEAD_STRIDE // 2) + place + (32 * (part // 4) + 4 * (part // 2 % 2)))
        words = words + (tl.inline_asm_elementwise(SCALE_QUERY[0], SCALE_QUERY[1], [word], tl.int32, True, 1),)
    return words


@triton.jit
def store_rows(a, b, c, d, state, place, PTX: tl.constexpr, CHOICE: tl.constexpr):
    """Store half of the sums over their weights."""
    tl.inline_asm_elementwise(
        PTX[2 * CHOICE], PTX[2 * CHOICE + 1], [a, b, c, d, state, place], tl.int32, False, 4)


@triton.jit
def start_sums(zero):
    """Sums of nothing; ``zero`` int32 in all registers."""
    return (zero, zero, zero, zero, zero, zero, zero, zero)


@triton.jit
def store_sums(sums, state, rows, quad, column, LOADS: tl.constexpr, STORE_ROWS: tl.constexpr):
    """Store the sums over their weights; ``rows`` [n, 4]: where the rows of heads g, g, g + 8, g + 8 begin."""
    place = (rows + quad[:, None] * 32 + 16 * (column % 2)[None, :]).to(tl.int64)
    store_rows(sums[0], sums[1], sums[2], sums[3], state, place, STORE_ROWS, 0)
    store_rows(sums[4], sums[5], sums[6], sums[7], state, place, STORE_ROWS, 1)


@triton.jit
def merge_parts(row, partial, weights, result, PARTS: tl.constexpr):
    """Store the 16 heads of one token and KV head from PARTS partial results, summed in their order."""
    head, width = tl.arange(0, 16), tl.arange(0, 128)
    maximum = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    sums = tl.zeros((16, 128), tl.float32)
    for part in tl.static_range(PARTS):
        line = (row * PARTS + part) * 16 + head
        weight = tl.load(weights + line, cache_modifier=".cg")
        values = tl.load(partial + line[:, None] * 128 + width[None, :], cache_modifier=".cg").to(tl.float32)
        larger = tl.maximum(maximum, weight)
        anchor = tl.where(larger == float("-inf"), 0.0, larger)
        before, now = tl.exp2(maximum - anchor), tl.exp2(weight - anchor)
        sums = sums * before[:, None] + values * now[:, None]
        total, maximum = total * before + now, larger
    sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(result + (row * 16 + head)[:, None] * 128 + width[None, :], sums.to(result.dtype.element_ty))


@triton.jit
def tile_attend_lanes(token, kv_head, split, q, kv_cache, blocks, block_table, table_stride, seq_lens, query_start,
                      batch, tokens, result, partial, weights, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                      PAGE_WORDS: tl.constexpr, HEAD_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr,
                      STEPS: tl.constexpr, LOADS: tl.constexpr, CHOSEN_STRIDE: tl.constexpr,
                      SELECTION_STRIDE: tl.constexpr,
                      COUNT: tl.constexpr, SHARING: tl.constexpr, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr,
                      WARPS: tl.constexpr, AHEAD: tl.constexpr, OWNERS: tl.constexpr, SCALE_QUERY: tl.constexpr,
                      SHUFFLE: tl.constexpr, HOLD: tl.constexpr, SPLIT_SCALES: tl.constexpr,
                      SCORE_TILES: tl.constexpr, UPDATE_SOFTMAX: tl.constexpr, DECAY_SUMS: tl.constexpr,
                      ADD_VALUES: tl.constexpr, SUM_QUADS: tl.constexpr, STORE_ROWS: tl.constexpr,
                      STORE_WEIGHT: tl.constexpr):
    """Attention of one token, the 16 heads of one KV head, over one of SPLITS parts of its chosen blocks.

    Rows go to ``partial`` bf16 [tokens, kv_heads, SPLITS * WARPS, 16, 128], log2 of their weights to ``weights``
    [.., 16]; with one split they are merged here, in the order of the warps. |q| must be at most 65504, as it becomes
    f16 where keys do: exactly, above 2^-14. AHEAD: load a step while the one before is computed.
    """
    thread, column = tl.arange(0, 32 * WARPS), tl.arange(0, 4)
    lane, warp = thread % 32, thread // 32
    group, quad = lane // 4, lane % 4
    # what needs no sequence is loaded in front of the branch that finds it
    chosen = blocks + token.to(tl.int64) * CHOSEN_STRIDE + kv_head // SHARING * SELECTION_STRIDE
    block = tl.load(chosen + lane, mask=lane < COUNT, other=-1)
    row = q.to(tl.pointer_type(tl.int32), bitcast=True) + token.to(tl.int64) * (Q_STRIDE // 2)
    query = load_query(row, kv_head, group, quad, column, Q_HEAD_STRIDE, SCALE_QUERY)
    sequence, own = find_place(token, tokens, query_start, seq_lens, batch, OWNERS)
    entries, count = list_entries(block, lane, own, block_table + sequence.to(tl.int64) * table_stride, COUNT)
    pages = kv_cache.to(tl.pointer_type(tl.int32), bitcast=True) + kv_head * HEAD_WORDS
    rounds = (count * STEPS + WARPS - 1) // WARPS
    first, last = split * rounds // SPLITS, (split + 1) * rounds // SPLITS
    zero = tl.zeros((32 * WARPS, 4), tl.int32)
    state = tl.where(column[None, :] < 2, float("-inf"), 0.0) + tl.zeros((32 * WARPS, 4), tl.float32)
    start = tl.zeros((32 * WARPS, 4), tl.float32)
    sums = start_sums(zero)
    if AHEAD:
        entry1, step1 = take_step(entries, first * WARPS + warp, STEPS, SHUFFLE)
        keys1, values1, scales1 = load_step(pages, entry1, step1, lane, column, PAGE_WORDS, ROW_WORDS, LOADS)
        never = batch >> 31
    for turn in range(first, last):
        if AHEAD:
            keys, values, scales, entry, step = keys1, values1, scales1, entry1, step1
            entry1, step1 = take_step(entries, tl.minimum(turn + 1, last - 1) * WARPS + warp, STEPS, SHUFFLE)
            keys1, values1, scales1 = load_step(pages, entry1, step1, lane, column, PAGE_WORDS, ROW_WORDS, LOADS)
            # ptxas sinks the loads below the computation unless that begins with memory read behind a barrier
            tl.inline_asm_elementwise(HOLD[0], HOLD[1], [], tl.int32, False, 1)
            words = tl.load(row + (kv_head * 16 + group)[:, None] * (Q_HEAD_STRIDE // 2) + quad[:, None] * 8
                            + column[None, :])
            start = (words & never).to(tl.float32, bitcast=True)
        else:
            entry, step = take_step(entries, turn * WARPS + warp, STEPS, SHUFFLE)
            keys, values, scales = load_step(pages, entry, step, lane, column, PAGE_WORDS, ROW_WORDS, LOADS)
        visible = ((entry & 255) - step * (128 // STEPS))[:, None] + zero
        state, sums = attend_step(query, keys, values, scales, visible, start, state, sums, LOADS, SPLIT_SCALES,
                                  SCORE_TILES, UPDATE_SOFTMAX, DECAY_SUMS, ADD_VALUES)
    state = tl.inline_asm_elementwise(SUM_QUADS[0], SUM_QUADS[1], [state], tl.float32, True, 4)
    number = token.to(tl.int64) * KV_HEADS + kv_head
    line = ((number * SPLITS + split) * WARPS + warp)[:, None] * 16 + group[:, None] + 8 * (column // 2)[None, :]
    store_sums(sums, state, partial + line * 128, quad, column, LOADS, STORE_ROWS)
    tl.inline_asm_elementwise(
        STORE_WEIGHT[0], STORE_WEIGHT[1], [state, (weights + line).to(tl.int64)], tl.int32, False, 4)
    if SPLITS == 1:
        tl.debug_barrier()
        merge_parts(number, partial, weights, result, WARPS)


@triton.jit
def tile_merge_lanes(row, head, partial, weights, result, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """Store one head of a token and KV head, number ``row`` of all, from PARTS partial results."""
    part, width = tl.arange(0, PARTS_BLOCK), tl.arange(0, 128)
    line = (row.to(tl.int64) * PARTS + part) * 16 + head
    weight = tl.load(weights + line, mask=part < PARTS, other=float("-inf"))
    values = tl.load(partial + line[:, None] * 128 + width[None, :], mask=(part < PARTS)[:, None], other=0.0)
    maximum = tl.max(weight, axis=0)
    share = tl.exp2(weight - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(share, axis=0)
    share = share / tl.where(total > 0.0, total, 1.0)
    sums = tl.sum(values.to(tl.float32) * share[:, None], axis=0)
    tl.store(result + (row.to(tl.int64) * 16 + head) * 128 + width, sums.to(result.dtype.element_ty))
