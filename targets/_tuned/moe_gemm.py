"""Grouped GEMM over NVFP4 experts in fragment order: prefill reads the same copy of the weights as decode."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._kernels.linear import weight_rows
from mmcompile.targets._kernels.moe_tiles import find_group, store_gated
from mmcompile.targets._tuned.fragments_gemm import find_tiles, multiply_tiles


@triton.jit
def tile_group_fragments_gate_up(tile, x, pairs, offsets, weight, scale, global_scale, hidden, N: tl.constexpr,
                                 K: tl.constexpr, X_STRIDE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
                                 BLOCK_E: tl.constexpr, GLOBAL_EXPERT: tl.constexpr, OAI: tl.constexpr,
                                 ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr,
                                 BLOCK_N: tl.constexpr, BITS: tl.constexpr, DECODE: tl.constexpr,
                                 TILES_N: tl.constexpr):
    """Gate, up and activation for BLOCK_M sorted pairs of one expert and BLOCK_N weight rows; hidden is sorted."""
    tile_m, tile_n = tile // TILES_N, tile % TILES_N
    expert, begin, end = find_group(tile_m, offsets, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        position = begin + tl.arange(0, BLOCK_M)
        present = position < end
        token = tl.load(pairs + position, mask=present, other=0) // TOP_K
        tiles = expert.to(tl.int64) * (N // 8) + find_tiles(tile_n, N, True, BLOCK_N)
        value = multiply_tiles(x + token.to(tl.int64) * X_STRIDE, present, weight, scale, tiles, K, True, BLOCK_M,
                               BLOCK_N, BITS, DECODE)
        row, valid = weight_rows(tile_n, N, True, BLOCK_N)
        factors = global_scale + expert.to(tl.int64) * GLOBAL_EXPERT
        value = value * (tl.load(factors + row, mask=valid, other=0.0) * 256.0)[None, :]
        store_gated(value, hidden, position, present, tile_n, N, OAI, ALPHA, LIMIT, BLOCK_M, BLOCK_N)


@triton.jit
def tile_group_fragments_down(tile, hidden, pairs, offsets, weight, scale, global_scale, outputs, N: tl.constexpr,
                              K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
                              GLOBAL_EXPERT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                              BITS: tl.constexpr, DECODE: tl.constexpr, TILES_N: tl.constexpr):
    """The down projection for BLOCK_M sorted pairs of one expert and BLOCK_N weight rows; outputs are by pair."""
    tile_m, tile_n = tile // TILES_N, tile % TILES_N
    expert, begin, end = find_group(tile_m, offsets, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        position = begin + tl.arange(0, BLOCK_M)
        present = position < end
        pair = tl.load(pairs + position, mask=present, other=0)
        tiles = expert.to(tl.int64) * (N // 16) + find_tiles(tile_n, N, False, BLOCK_N)
        value = multiply_tiles(hidden + position.to(tl.int64) * K, present, weight, scale, tiles, K, False, BLOCK_M,
                               BLOCK_N, BITS, DECODE)
        row, valid = weight_rows(tile_n, N, False, BLOCK_N)
        factors = global_scale + expert.to(tl.int64) * GLOBAL_EXPERT
        value = value * (tl.load(factors + row, mask=valid, other=0.0) * 256.0)[None, :]
        address = outputs + pair.to(tl.int64)[:, None] * N + row[None, :]
        tl.store(address, value.to(outputs.dtype.element_ty), mask=present[:, None] & valid[None, :])
