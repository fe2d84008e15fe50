"""GEMM over NVFP4 weights in the order of waves: prefill reads the same copy of the weights as decode."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, OpCall
from mmcompile.targets._kernels.linear import Blocks
from mmcompile.targets._tuned.fragments_gemm import emit_ordered_gemm
from mmcompile.targets._tuned.linear_lanes import store_lanes
from mmcompile.targets._tuned.linear_waves import decode_lanes


@triton.jit
def load_wave_rows(words, scales, start, dtype: tl.constexpr, TILES: tl.constexpr):
    """Rows [16 * TILES, 128] of the weight from k = ``start`` on.

    words [64 * TILES, 4] and scales [64 * TILES, 1] point to the start of K of the tiles, a lane a row.
    """
    codes = tl.load(words + start // 128 * 256)
    both = tl.load(scales + start // 256 * 64) >> (start // 128 % 2 * 16)
    own = (both >> (8 * tl.arange(0, 2)[None, :])).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    values = tl.reshape(decode_lanes(codes, own, dtype), (TILES, 4, 16, 32))  # tile q r k
    return tl.reshape(tl.permute(values, (0, 2, 1, 3)), (16 * TILES, 128))


@triton.jit
def tile_waves_gemm(tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
                    K: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
                    RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The results of BLOCK_N weight rows for BLOCK_M tokens; tiles run down GROUP_M token blocks at a time.

    With SWIGLU the first half of the rows are gate rows, the second up rows.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    COLUMNS: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    group = tile // (GROUP_M * TILES_N)
    group_rows = tl.minimum(tl.cdiv(tokens, BLOCK_M) - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * TILES_N)
    token = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_n = within // group_rows
    thread = tl.arange(0, 64 * TILES)
    part, lane = thread // 64, thread % 64
    first = tl.minimum(tile_n * (COLUMNS // 16) + part % (COLUMNS // 16), N // 16 - 1)  # or the last one again
    first = (first + part // (COLUMNS // 16) * (N // 16)).to(tl.int64)
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + (first * (K * 2) + lane * 4)[:, None]
    words += tl.arange(0, 4)[None, :]
    scales = scale.to(tl.pointer_type(tl.int32), bitcast=True) + (first * (K // 4) + lane)[:, None]
    x_tile = x + token.to(tl.int64)[:, None] * X_STRIDE + tl.arange(0, 128)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, 128):
        left = tl.load(x_tile + start, mask=(token < tokens)[:, None], other=0.0)
        sums = tl.dot(left, tl.trans(load_wave_rows(words, scales, start, left.dtype, TILES)), sums)
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, BLOCK_N)
    row = tile_n * COLUMNS + column % COLUMNS
    factor = tl.load(global_scale + row + column // COLUMNS * N, row < N, 0.0)
    value = (sums * factor[None, :]).to(dtype).to(tl.float32)
    other = value
    if SWIGLU:
        value, other = tl.split(tl.permute(tl.reshape(value, (BLOCK_M, 2, COLUMNS)), (0, 2, 1)))
    row = (tile_n * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    store_lanes(value, other, bias, residual, result, tokens, row, token.to(tl.int64)[:, None], N, RESIDUAL_STRIDE,
                RESULT_STRIDE, SWIGLU)


def emit_waves_gemm(call: OpCall, blocks: Blocks, ledger: dict[str, bool]) -> tuple[KernelSource, ...]:
    """The GEMM of an NVFP4 weight in the order of waves; ``blocks.k`` is 128."""
    return emit_ordered_gemm(call, blocks, ledger, "waves", tile_waves_gemm, {})
