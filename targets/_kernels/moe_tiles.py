"""Tile functions of the mixture of experts: finding and sorting the pairs of an expert, projections, weighted sum.

A pair is a place of a token's choice: token * TOP_K + place. ``hidden`` is [pairs, n], ``outputs`` [pairs, k], both
contiguous scratch. A program belongs to one expert and one tile of its weight rows; no program adds to memory, so equal
inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._kernels.linear import project_skinny, project_tile, silu_times, weight_rows
from mmcompile.targets._kernels.router import swiglu_oai


@triton.jit
def tile_sort_pairs(expert, experts, pairs, offsets, tokens, STRIDE: tl.constexpr, TOP_K: tl.constexpr,
                    EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Counting sort: the pairs of ``expert``, ascending, behind those of all lower experts.

    offsets [EXPERTS + 1] gets where each expert's pairs begin, and their number at the end. Empty places (-1) are left
    out. Every expert's program counts for itself, so none waits for another.
    """
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens * TOP_K, BLOCK):
        pair = start + lane
        address = experts + (pair // TOP_K).to(tl.int64) * STRIDE + pair % TOP_K
        chosen = tl.load(address, mask=pair < tokens * TOP_K, other=-1).to(tl.int32)
        lower += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(offsets + expert, place)
    for start in range(0, tokens * TOP_K, BLOCK):
        pair = start + lane
        address = experts + (pair // TOP_K).to(tl.int64) * STRIDE + pair % TOP_K
        chosen = tl.load(address, mask=pair < tokens * TOP_K, other=-1).to(tl.int32)
        matches = (chosen == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(matches, 0) - 1, pair, mask=chosen == expert)
        place += tl.sum(matches, 0)
    if expert == EXPERTS - 1:
        tl.store(offsets + EXPERTS, place)


@triton.jit
def find_slot(slot, experts, tokens, STRIDE: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
              BLOCK_M: tl.constexpr):
    """The expert of pair ``slot`` and whether no earlier pair has it; of each token the place that has it, or PLACES.

    The programs of an expert's later pairs have nothing to do: its weights are read once for all its tokens.
    """
    token, place = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, PLACES)[None, :]
    inside = (token < tokens) & (place < TOP_K)
    chosen = tl.load(experts + token * STRIDE + place, mask=inside, other=-1).to(tl.int32)
    expert = tl.load(experts + (slot // TOP_K) * STRIDE + slot % TOP_K).to(tl.int32)
    matches = chosen == expert
    earlier = tl.sum(tl.sum((matches & (token * TOP_K + place < slot)).to(tl.int32), 1), 0)
    return expert, (expert >= 0) & (earlier == 0), tl.min(tl.where(matches, place, PLACES), 1)


@triton.jit
def find_group(tile, offsets, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first sorted position, end of the expert) of tile ``tile`` of BLOCK_M pairs; EXPERTS or more if none.

    An expert's pairs fill whole tiles but for its last; experts without pairs have no tile.
    """
    expert = tl.arange(0, BLOCK_E)
    begin = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(offsets + expert + 1, mask=expert < EXPERTS, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    through = tl.cumsum(tiles, 0)
    found = tl.sum((through <= tile).to(tl.int32), 0)
    own = expert == found
    skipped = tile - tl.sum(tl.where(own, through - tiles, 0), 0)
    return found, tl.sum(tl.where(own, begin, 0), 0) + skipped * BLOCK_M, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def store_gated(value, hidden, row, present, tile, N: tl.constexpr, OAI: tl.constexpr, ALPHA: tl.constexpr,
                LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N], gate and up in turn -> BLOCK_N / 2 columns of the ``present`` rows of hidden."""
    pairs = tl.reshape(value.to(hidden.dtype.element_ty), (BLOCK_M, BLOCK_N // 2, 2))
    gate, up = tl.split(pairs)
    gated = swiglu_oai(gate, up, ALPHA, LIMIT) if OAI else silu_times(gate, up)
    column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    address = hidden + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(address, gated, mask=present[:, None] & (column < N)[None, :])


@triton.jit
def tile_slot_gate_up(tile, x, experts, weight, scale, global_scale, hidden, tokens, N: tl.constexpr,
                      K: tl.constexpr, X_STRIDE: tl.constexpr, CHOICE_STRIDE: tl.constexpr, TOP_K: tl.constexpr,
                      PLACES: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
                      WEIGHT_EXPERT: tl.constexpr, SCALE_EXPERT: tl.constexpr, GLOBAL_EXPERT: tl.constexpr,
                      OAI: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SPLIT: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES_N: tl.constexpr):
    """Gate, up and activation for BLOCK_N weight rows of the expert of one pair, if it is the expert's first."""
    slot, tile_n = tile // TILES_N, tile % TILES_N
    expert, first, place = find_slot(slot, experts, tokens, CHOICE_STRIDE, TOP_K, PLACES, BLOCK_M)
    if first:
        present = place < TOP_K
        row, valid = weight_rows(tile_n, N, True, BLOCK_N)
        chosen = expert.to(tl.int64)
        if scale is not None:
            scale += chosen * SCALE_EXPERT
            global_scale += chosen * GLOBAL_EXPERT
        bound = tl.where(present, BLOCK_M, 0)[None, :, None]
        value = project_skinny(x, weight + chosen * WEIGHT_EXPERT, scale, global_scale, bound, row, valid, K,
                               X_STRIDE, WEIGHT_STRIDE, SCALE_STRIDE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K)
        pair = tl.arange(0, BLOCK_M) * TOP_K + place
        store_gated(value, hidden, pair, present, tile_n, N, OAI, ALPHA, LIMIT, BLOCK_M, BLOCK_N)


@triton.jit
def tile_slot_down(tile, hidden, experts, weight, scale, global_scale, outputs, tokens, N: tl.constexpr,
                   K: tl.constexpr, CHOICE_STRIDE: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
                   WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, WEIGHT_EXPERT: tl.constexpr,
                   SCALE_EXPERT: tl.constexpr, GLOBAL_EXPERT: tl.constexpr, SPLIT: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES_N: tl.constexpr):
    """The down projection for BLOCK_N weight rows of the expert of one pair, if it is the expert's first."""
    slot, tile_n = tile // TILES_N, tile % TILES_N
    expert, first, place = find_slot(slot, experts, tokens, CHOICE_STRIDE, TOP_K, PLACES, BLOCK_M)
    if first:
        present = place < TOP_K
        row, valid = weight_rows(tile_n, N, False, BLOCK_N)
        chosen = expert.to(tl.int64)
        if scale is not None:
            scale += chosen * SCALE_EXPERT
            global_scale += chosen * GLOBAL_EXPERT
        bound = tl.where(present, BLOCK_M, 0)[None, :, None]
        source = hidden + (tl.where(present, place, 0) * K)[None, :, None]
        value = project_skinny(source, weight + chosen * WEIGHT_EXPERT, scale, global_scale, bound, row, valid, K,
                               TOP_K * K, WEIGHT_STRIDE, SCALE_STRIDE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K)
        token = tl.arange(0, BLOCK_M)
        for p in tl.static_range(TOP_K):
            other = tl.load(experts + token * CHOICE_STRIDE + p, mask=token < tokens, other=-1).to(tl.int32)
            address = outputs + (token * TOP_K + p).to(tl.int64)[:, None] * N + row[None, :]
            tl.store(address, value.to(outputs.dtype.element_ty), mask=(other == expert)[:, None] & valid[None, :])


@triton.jit
def tile_group_gate_up(tile, x, pairs, offsets, weight, scale, global_scale, hidden, tokens, N: tl.constexpr,
                       K: tl.constexpr, X_STRIDE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
                       BLOCK_E: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
                       WEIGHT_EXPERT: tl.constexpr, SCALE_EXPERT: tl.constexpr, GLOBAL_EXPERT: tl.constexpr,
                       OAI: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES_N: tl.constexpr):
    """Gate, up and activation for BLOCK_M sorted pairs of one expert and BLOCK_N weight rows; hidden is sorted."""
    tile_m, tile_n = tile // TILES_N, tile % TILES_N
    expert, begin, end = find_group(tile_m, offsets, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        position = begin + tl.arange(0, BLOCK_M)
        present = position < end
        pair = tl.load(pairs + position, mask=present, other=0)
        row, valid = weight_rows(tile_n, N, True, BLOCK_N)
        chosen = expert.to(tl.int64)
        if scale is not None:
            scale += chosen * SCALE_EXPERT
            global_scale += chosen * GLOBAL_EXPERT
        token = tl.where(present, pair // TOP_K, tokens)
        value = project_tile(x, weight + chosen * WEIGHT_EXPERT, scale, global_scale, tokens, token, row, valid, K,
                             X_STRIDE, WEIGHT_STRIDE, SCALE_STRIDE, BLOCK_M, BLOCK_N, BLOCK_K)
        store_gated(value, hidden, position, present, tile_n, N, OAI, ALPHA, LIMIT, BLOCK_M, BLOCK_N)


@triton.jit
def tile_group_down(tile, hidden, pairs, offsets, weight, scale, global_scale, outputs, tokens, N: tl.constexpr,
                    K: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
                    WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, WEIGHT_EXPERT: tl.constexpr,
                    SCALE_EXPERT: tl.constexpr, GLOBAL_EXPERT: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES_N: tl.constexpr):
    """The down projection for BLOCK_M sorted pairs of one expert and BLOCK_N weight rows; outputs are by pair."""
    tile_m, tile_n = tile // TILES_N, tile % TILES_N
    expert, begin, end = find_group(tile_m, offsets, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        position = begin + tl.arange(0, BLOCK_M)
        present = position < end
        pair = tl.load(pairs + position, mask=present, other=0)
        row, valid = weight_rows(tile_n, N, False, BLOCK_N)
        chosen = expert.to(tl.int64)
        if scale is not None:
            scale += chosen * SCALE_EXPERT
            global_scale += chosen * GLOBAL_EXPERT
        source = tl.where(present, position, tokens * TOP_K)
        value = project_tile(hidden, weight + chosen * WEIGHT_EXPERT, scale, global_scale, tokens * TOP_K, source, row,
                             valid, K, K, WEIGHT_STRIDE, SCALE_STRIDE, BLOCK_M, BLOCK_N, BLOCK_K)
        address = outputs + pair.to(tl.int64)[:, None] * N + row[None, :]
        tl.store(address, value.to(outputs.dtype.element_ty), mask=present[:, None] & valid[None, :])


@triton.jit
def tile_combine(token, block, outputs, experts, weights, residual, result, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
                 CHOICE_STRIDE: tl.constexpr, FACTOR_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
                 RESULT_STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The weighted sum over the places of one token, in their order, for a block of columns; then the residual."""
    token = token.to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for p in tl.static_range(TOP_K):
        chosen = tl.load(experts + token * CHOICE_STRIDE + p)
        factor = tl.where(chosen >= 0, tl.load(weights + token * FACTOR_STRIDE + p), 0.0)
        mask = column < tl.where(chosen >= 0, WIDTH, 0)
        value = tl.load(outputs + (token * TOP_K + p) * WIDTH + column, mask=mask, other=0.0)
        total += value.to(tl.float32) * factor
    value = total.to(result.dtype.element_ty)
    if residual is not None:
        other = tl.load(residual + token * RESIDUAL_STRIDE + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    tl.store(result + token * RESULT_STRIDE + column, value, mask=inside)
