"""Tiles of the tuned mixture of experts for few tokens: NVFP4 fragments of one expert times its pairs of tokens.

A pair is a place of a token's choice: token * TOP_K + place. The columns of an mma are pairs of one expert, or, for the
only token of a step, its places. ``hidden`` and ``outputs`` are as in ``_kernels/moe_tiles.py``; no program adds to
memory, so equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._kernels.linear import silu_times
from mmcompile.targets._kernels.moe_tiles import find_group
from mmcompile.targets._kernels.router import swiglu_oai
from mmcompile.targets._tuned.linear_lanes import (
    hold_loads,
    load_chunk,
    load_fragments,
    multiply,
    point_rows,
    scale_sums,
    sum_fragments,
)


@triton.jit
def count_bits(word):
    """How many bits of an int32 are set."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], tl.int32, True, 1)


@triton.jit
def match_pairs(expert, experts, tokens, STRIDE: tl.constexpr, TOP_K: tl.constexpr, WORDS: tl.constexpr):
    """A tuple of words: bit b of word w is set if pair 32 w + b chose ``expert``."""
    bit = tl.arange(0, 32)
    words = ()
    for word in tl.static_range(WORDS):
        pair = 32 * word + bit
        address = experts + pair // TOP_K * STRIDE + pair % TOP_K
        chosen = tl.load(address, mask=pair < tokens * TOP_K, other=-1).to(tl.int32)
        words = words + (tl.sum(tl.where(chosen == expert, 1 << bit, 0), 0),)
    return words


@triton.jit
def rank_pair(words, pair, WORDS: tl.constexpr):
    """How many pairs of an expert (``match_pairs``) come before ``pair``."""
    rank = 0
    for word in tl.static_range(WORDS):
        below = tl.minimum(tl.maximum(pair - 32 * word, 0), 32)
        rank += count_bits(words[word] & tl.where(below == 32, -1, (1 << (below & 31)) - 1))
    return rank


@triton.jit
def choose_pair(words, rank, WORDS: tl.constexpr, FIND: tl.constexpr):
    """The pair number ``rank`` [n] of an expert (``match_pairs``), and whether it has so many.

    FIND: assembly of the position of the bit number $2 of word $1.
    """
    word, base, left = words[0], 0, rank
    for number in tl.static_range(1, WORDS):
        count = count_bits(word)
        beyond = left >= count
        word, base = tl.where(beyond, words[number], word), tl.where(beyond, 32 * number, base)
        left = tl.where(beyond, left - count, left)
    found = tl.inline_asm_elementwise(FIND, "=r,r,r", [word, left], tl.int32, True, 1)
    return base + found, left < count_bits(word)


@triton.jit
def place_lanes(tile_n):
    """Weight rows and columns of the mma [32, 4] that the sums of tile ``tile_n`` of 16 rows belong to."""
    lane, column = tl.arange(0, 32)[:, None], tl.arange(0, 4)[None, :]
    return tile_n * 16 + lane // 4 + column // 2 * 8, lane % 4 * 2 + column % 2


@triton.jit
def activate(gate, up, row, global_scale, N: tl.constexpr, OAI: tl.constexpr, ALPHA: tl.constexpr,
             LIMIT: tl.constexpr, dtype: tl.constexpr, WARPS: tl.constexpr):
    """Sums of gate rows and of up rows -> the activation [32, 4] of hidden columns ``row``."""
    gate = scale_sums(gate, global_scale, row, dtype, WARPS).to(dtype)
    up = scale_sums(up, global_scale, row + N, dtype, WARPS).to(dtype)
    return swiglu_oai(gate, up, ALPHA, LIMIT) if OAI else silu_times(gate, up)


@triton.jit
def tile_slot_lanes_gate_up(tile, x, experts, weight, scale, global_scale, hidden, routes, tokens, N: tl.constexpr,
                            K: tl.constexpr, X_STRIDE: tl.constexpr, CHOICE_STRIDE: tl.constexpr,
                            TOP_K: tl.constexpr, WORDS: tl.constexpr, FIND: tl.constexpr,
                            GLOBAL_EXPERT: tl.constexpr, OAI: tl.constexpr, ALPHA: tl.constexpr,
                            LIMIT: tl.constexpr, WARPS: tl.constexpr, HOLD: tl.constexpr, BARRIER: tl.constexpr,
                            CHUNKS: tl.constexpr, TILES_N: tl.constexpr):
    """Gate, up and activation for 16 hidden columns of the expert of one pair, for eight of its pairs.

    The slots of an expert's pairs number 0, 8, ... have work, so that its weights are read once for eight pairs. routes
    int32 [pairs, 16] gets by slot those pairs (or -1), and behind them the expert, -1 for a slot without work.
    """
    slot, tile_n = tile // TILES_N, tile % TILES_N
    expert = tl.load(experts + slot // TOP_K * CHOICE_STRIDE + slot % TOP_K).to(tl.int32)
    words = match_pairs(expert, experts, tokens, CHOICE_STRIDE, TOP_K, WORDS)
    rank = rank_pair(words, slot, WORDS)
    begins = (expert >= 0) & (rank % 8 == 0)
    if tile_n == 0:
        place = tl.arange(0, 16)
        pair, there = choose_pair(words, rank + place, WORDS, FIND)
        pair = tl.where(there & (place < 8), pair, -1)
        tl.store(routes + slot * 16 + place, tl.where(place == 8, tl.where(begins, expert, -1), pair))
    if begins:
        pair, there = choose_pair(words, rank + tl.arange(0, 32 * WARPS) % 32 // 4, WORDS, FIND)
        first = expert.to(tl.int64) * (N // 8) + tile_n
        sums, paired = sum_fragments(first, first + N // 16, (point_rows(x, pair // TOP_K, X_STRIDE),),
                                     (there[:, None],), weight, scale, K, True, 1, WARPS, HOLD, BARRIER, CHUNKS, None)
        row, column = place_lanes(tile_n)
        gated = activate(sums[0], paired[0], row, global_scale + expert.to(tl.int64) * GLOBAL_EXPERT, N, OAI, ALPHA,
                         LIMIT, hidden.dtype.element_ty, WARPS)
        pair, there = choose_pair(words, rank + column, WORDS, FIND)
        tl.store(hidden + pair * N + row, gated, mask=there)


@triton.jit
def tile_slot_lanes_down(tile, hidden, routes, weight, scale, global_scale, outputs, N: tl.constexpr,
                         K: tl.constexpr, GLOBAL_EXPERT: tl.constexpr, PAIRED: tl.constexpr, WARPS: tl.constexpr,
                         HOLD: tl.constexpr, BARRIER: tl.constexpr, CHUNKS: tl.constexpr, TILES_N: tl.constexpr):
    """The down projection for 16 weight rows, with PAIRED for 32, of the expert and the pairs of one slot's route."""
    slot, tile_n = tile // TILES_N, tile % TILES_N
    if PAIRED:
        tile_n *= 2
    route = routes + slot * 16
    expert = tl.load(route + 8)
    if expert >= 0:
        pair = tl.load(route + tl.arange(0, 32 * WARPS) % 32 // 4)
        first = expert.to(tl.int64) * (N // 16) + tile_n
        sums, paired = sum_fragments(first, first + 1, (point_rows(hidden, pair, K),), ((pair >= 0)[:, None],), weight,
                                     scale, K, PAIRED, 1, WARPS, HOLD, BARRIER, CHUNKS, None)
        row, column = place_lanes(tile_n)
        dtype: tl.constexpr = outputs.dtype.element_ty
        factors = global_scale + expert.to(tl.int64) * GLOBAL_EXPERT
        pair = tl.load(route + column)
        tl.store(outputs + pair * N + row, scale_sums(sums[0], factors, row, dtype, WARPS).to(dtype), mask=pair >= 0)
        if PAIRED:
            tl.store(outputs + pair * N + row + 16, scale_sums(paired[0], factors, row + 16, dtype, WARPS).to(dtype),
                     mask=pair >= 0)


@triton.jit
def sum_places(tile, hidden, experts, weight, scale, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
               WARPS: tl.constexpr, HOLD: tl.constexpr, BARRIER: tl.constexpr, CHUNKS: tl.constexpr):
    """Partial sums [32 * WARPS, 4] of 16 weight rows: column p of the mma is hidden row p times the expert of place p.

    The steps of all places follow each other, and each has x in its own column only.
    """
    STEPS: tl.constexpr = K // 256
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, (thread // 32)[:, None]
    own = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + own
    scales = scale.to(tl.pointer_type(tl.int16), bitcast=True) + own
    x_words = (hidden.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, 4)[None, :],)
    sums = (tl.zeros((32 * WARPS, 4), tl.float32),)
    for start in tl.static_range(0, TOP_K * STEPS, WARPS):
        step = start + warp
        place = step // STEPS
        expert = tl.load(experts + place, mask=place < TOP_K, other=-1).to(tl.int32)
        chosen = expert >= 0
        from_tile = (expert.to(tl.int64) * (N // 16) + tile) * STEPS + step % STEPS
        codes, factors = load_fragments(words, scales, from_tile, chosen)
        if HOLD:
            hold_loads(start, BARRIER)
        active = (chosen & ((lane // 4)[:, None] == place),)
        for chunk in tl.static_range(4):
            parts = load_chunk(x_words, active, step * 128 + chunk * 32 + (lane % 4 * 8)[:, None], 1)
            sums = multiply(codes[chunk], factors, parts, sums, CHUNKS, chunk, 1)
    return sums[0]


@triton.jit
def tile_only_token_down(tile, hidden, experts, weights, weight, scale, global_scale, residual, result,
                         N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GLOBAL_EXPERT: tl.constexpr,
                         WARPS: tl.constexpr, HOLD: tl.constexpr, BARRIER: tl.constexpr, CHUNKS: tl.constexpr):
    """The down projections of the experts of the only token for 16 weight rows, their weighted sum, the residual.

    At most eight places; steps and rounding are those of ``tile_combine``.
    """
    sums = sum_places(tile, hidden, experts, weight, scale, N, K, TOP_K, WARPS, HOLD, BARRIER, CHUNKS)
    row, column = place_lanes(tile)
    dtype: tl.constexpr = result.dtype.element_ty
    expert = tl.load(experts + column, mask=column < TOP_K, other=-1).to(tl.int32)
    value = scale_sums(sums, global_scale, tl.maximum(expert, 0).to(tl.int64) * GLOBAL_EXPERT + row, dtype, WARPS)
    value *= tl.load(weights + column, mask=expert >= 0, other=0.0)
    value = tl.where(expert >= 0, value, 0.0)
    value = tl.reshape(tl.permute(tl.reshape(value, (8, 4, 2, 2)), (2, 0, 1, 3)), (16, 8))  # rows 8 h + g by places
    total = tl.zeros((16,), tl.float32)
    for p in tl.static_range(TOP_K):
        total += tl.sum(tl.where(tl.arange(0, 8)[None, :] == p, value, 0.0), 1)
    place = tile * 16 + tl.arange(0, 16)
    value = total.to(dtype)
    if residual is not None:
        value = (value.to(tl.float32) + tl.load(residual + place).to(tl.float32)).to(dtype)
    tl.store(result + place, value)


@triton.jit
def locate_pairs(begin, end, GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """Sorted positions of the pairs of each lane for the mma, a tuple of GROUPS, and which of them exist."""
    position = begin + tl.arange(0, 32 * WARPS) % 32 // 4
    present = ((position < end)[:, None], (position + 8 < end)[:, None])
    return (position, position + 8)[:GROUPS], present[:GROUPS]


@triton.jit
def tile_group_lanes_gate_up(tile, x, pairs, offsets, weight, scale, global_scale, hidden, N: tl.constexpr,
                             K: tl.constexpr, X_STRIDE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
                             BLOCK_E: tl.constexpr, GLOBAL_EXPERT: tl.constexpr, OAI: tl.constexpr,
                             ALPHA: tl.constexpr, LIMIT: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr,
                             HOLD: tl.constexpr, BARRIER: tl.constexpr, CHUNKS: tl.constexpr, TILES_N: tl.constexpr):
    """Gate, up and activation for 16 hidden columns and 8 * GROUPS sorted pairs of one expert; hidden is sorted."""
    tile_m, tile_n = tile // TILES_N, tile % TILES_N
    expert, begin, end = find_group(tile_m, offsets, EXPERTS, BLOCK_E, 8 * GROUPS)
    if expert < EXPERTS:
        position, present = locate_pairs(begin, end, GROUPS, WARPS)
        token = tl.load(pairs + position[0], mask=position[0] < end, other=0) // TOP_K
        token1 = token
        if GROUPS == 2:
            token1 = tl.load(pairs + position[1], mask=position[1] < end, other=0) // TOP_K
        x_words = (point_rows(x, token, X_STRIDE), point_rows(x, token1, X_STRIDE))[:GROUPS]
        first = expert.to(tl.int64) * (N // 8) + tile_n
        sums, paired = sum_fragments(first, first + N // 16, x_words, present, weight, scale, K, True, GROUPS, WARPS,
                                     HOLD, BARRIER, CHUNKS, None)
        row, column = place_lanes(tile_n)
        factors = global_scale + expert.to(tl.int64) * GLOBAL_EXPERT
        for group in tl.static_range(GROUPS):
            gated = activate(sums[group], paired[group], row, factors, N, OAI, ALPHA, LIMIT, hidden.dtype.element_ty,
                             WARPS)
            own = begin + 8 * group + column
            tl.store(hidden + own * N + row, gated, mask=own < end)


@triton.jit
def tile_group_lanes_down(tile, hidden, pairs, offsets, weight, scale, global_scale, outputs, N: tl.constexpr,
                          K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, GLOBAL_EXPERT: tl.constexpr,
                          PAIRED: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr, HOLD: tl.constexpr,
                          BARRIER: tl.constexpr, CHUNKS: tl.constexpr, TILES_N: tl.constexpr):
    """The down projection for 16 weight rows, with PAIRED for 32, and 8 * GROUPS sorted pairs of one expert."""
    tile_m, tile_n = tile // TILES_N, tile % TILES_N
    if PAIRED:
        tile_n *= 2
    expert, begin, end = find_group(tile_m, offsets, EXPERTS, BLOCK_E, 8 * GROUPS)
    if expert < EXPERTS:
        position, present = locate_pairs(begin, end, GROUPS, WARPS)
        x_words = (point_rows(hidden, position[0], K), point_rows(hidden, position[GROUPS - 1], K))[:GROUPS]
        first = expert.to(tl.int64) * (N // 16) + tile_n
        sums, paired = sum_fragments(first, first + 1, x_words, present, weight, scale, K, PAIRED, GROUPS, WARPS, HOLD,
                                     BARRIER, CHUNKS, None)
        row, column = place_lanes(tile_n)
        dtype: tl.constexpr = outputs.dtype.element_ty
        factors = global_scale + expert.to(tl.int64) * GLOBAL_EXPERT
        for group in tl.static_range(GROUPS):
            own = begin + 8 * group + column
            pair = tl.load(pairs + own, mask=own < end, other=0)
            tl.store(outputs + pair * N + row, scale_sums(sums[group], factors, row, dtype, WARPS).to(dtype),
                     mask=own < end)
            if PAIRED:
                tl.store(outputs + pair * N + row + 16,
                         scale_sums(paired[group], factors, row + 16, dtype, WARPS).to(dtype), mask=own < end)
