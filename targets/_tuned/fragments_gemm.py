"""GEMM over NVFP4 weights in fragment order: prefill reads the same copy of the weights as decode."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mmcompile.core.formats.nvfp4_fragments import DISTANCES, FLAVOURS
from mmcompile.core.kernel import KernelSource, OpCall
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import ceil_div, kernel_name, need, short_dtype
from mmcompile.targets._kernels.linear import (
    Blocks,
    epilogue_label,
    linear_constants,
    operand_parameters,
    store_linear,
    tile_call,
    weight_rows,
)
from mmcompile.targets._kernels.linear_nvfp4 import WEIGHTS
from mmcompile.targets._tuned.linear_ptx import decode_word

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def decode_pair_portable(words, scale, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr, DISTANCE: tl.constexpr,
                         dtype: tl.constexpr):
    """Both codes of a pair times its e4m3 scale (int32) / 256, as int32 pairs of ``dtype``, by integer arithmetic."""
    factor = scale.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 0.001953125
    pair = tl.zeros_like(words)
    for half in tl.static_range(2):
        magnitude = (words >> (MAGNITUDE + DISTANCE * half)) & 7
        normal = (magnitude > 1).to(tl.int32)
        doubled = ((magnitude & 1) + 2 * normal) << ((magnitude >> 1) - normal)
        doubled = tl.where((words >> (SIGN + DISTANCE * half)) & 1 != 0, -doubled, doubled)
        value = (doubled.to(tl.float32) * factor).to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        pair = pair | (value << (16 * half))
    return pair


@triton.jit
def decode_fragment_words(words, scales, dtype: tl.constexpr, BITS: tl.constexpr, DECODE: tl.constexpr):
    """int32 words and the two e4m3 scales of each (low bytes) -> int32 pairs 0 to 3 of ``dtype``, times 2^-8.

    BITS: sign and magnitude bit of the pairs, then the distance of the codes in one. DECODE: assembly of the same.
    """
    if INTERPRET:
        p0 = decode_pair_portable(words, scales & 255, BITS[0], BITS[1], BITS[8], dtype)
        p1 = decode_pair_portable(words, (scales >> 8) & 255, BITS[2], BITS[3], BITS[8], dtype)
        p2 = decode_pair_portable(words, scales & 255, BITS[4], BITS[5], BITS[8], dtype)
        p3 = decode_pair_portable(words, (scales >> 8) & 255, BITS[6], BITS[7], BITS[8], dtype)
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            DECODE, "=&r,=&r,=&r,=&r,r,r", [words, scales], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    return p0, p1, p2, p3


@triton.jit
def load_fragment_rows(words, scales, start, dtype: tl.constexpr, SWIGLU: tl.constexpr, TILES: tl.constexpr,
                       BITS: tl.constexpr, DECODE: tl.constexpr):
    """Rows [16 * TILES, 64] of the weight from k = ``start`` on, times 2^-8.

    words [TILES, 8, 16] and scales [TILES, 8, 4] (int32, two chunks) point to the start of K. With SWIGLU the first
    half of the tiles are gate rows, the second up rows, and the result interleaves them.
    """
    codes = tl.load(words + start // 64 * 128)
    pair = tl.load(scales + (start // 256 * 64 + start // 128 % 2)) >> (start // 64 % 2 * 16)
    factors = tl.reshape(tl.broadcast_to(pair[:, :, :, None], (TILES, 8, 4, 4)), (TILES, 8, 16))
    p0, p1, p2, p3 = decode_fragment_words(codes, factors, dtype, BITS, DECODE)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # tile g tj i h
    low = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    values = tl.join(low, high)
    if SWIGLU:
        values = tl.permute(tl.reshape(values, (2, TILES // 2, 8, 16, 2, 2, 2)), (1, 5, 2, 0, 3, 4, 6))
    else:
        values = tl.permute(values, (0, 4, 1, 2, 3, 5))
    return tl.reshape(values, (16 * TILES, 64))


@triton.jit
def find_tiles(tile, N: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_N: tl.constexpr):
    """Numbers [BLOCK_N / 16] of the tiles of 16 weight rows that make tile ``tile`` of a result with N columns.

    With SWIGLU the first half are gate tiles, the second up tiles. Beyond the last there is the last again.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    part = tl.arange(0, TILES)
    if SWIGLU:
        found = tl.minimum(tile * (TILES // 2) + part % (TILES // 2), N // 16 - 1) + part // (TILES // 2) * (N // 16)
    else:
        found = tl.minimum(tile * TILES + part, N // 16 - 1)
    return found


@triton.jit
def multiply_tiles(x_rows, present, weight, scale, tiles, K: tl.constexpr, SWIGLU: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, DECODE: tl.constexpr):
    """The ``present`` ones of BLOCK_M rows times the weight rows of ``tiles`` (int64): fp32 [BLOCK_M, BLOCK_N] / 256.

    x_rows: pointers [BLOCK_M] to the rows' starts. The columns are as in ``load_fragment_rows``.
    """
    place = tiles[:, None, None]
    g, word, t = tl.arange(0, 8)[None, :, None], tl.arange(0, 16)[None, None, :], tl.arange(0, 4)[None, None, :]
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + place * (K * 2) + g * 16 + word
    scales = scale.to(tl.pointer_type(tl.int32), bitcast=True) + place * (K // 4) + g * 8 + t * 2
    x_tile = x_rows[:, None] + tl.arange(0, 64)[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, 64):
        left = tl.load(x_tile + start, mask=present[:, None], other=0.0)
        right = load_fragment_rows(words, scales, start, left.dtype, SWIGLU, BLOCK_N // 16, BITS, DECODE)
        accumulator = tl.dot(left, tl.trans(right), accumulator)
    return accumulator


@triton.jit
def tile_fragments_gemm(tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
                        K: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
                        RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr, TILES_N: tl.constexpr, GROUP_M: tl.constexpr, BITS: tl.constexpr,
                        DECODE: tl.constexpr):
    """The result columns of BLOCK_N weight rows for BLOCK_M tokens; tiles run down GROUP_M token blocks at a time."""
    group = tile // (GROUP_M * TILES_N)
    group_rows = tl.minimum(tl.cdiv(tokens, BLOCK_M) - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * TILES_N)
    token = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_n = within // group_rows
    tiles = find_tiles(tile_n, N, SWIGLU, BLOCK_N).to(tl.int64)
    accumulator = multiply_tiles(x + token.to(tl.int64) * X_STRIDE, token < tokens, weight, scale, tiles, K, SWIGLU,
                                 BLOCK_M, BLOCK_N, BITS, DECODE)
    row, valid = weight_rows(tile_n, N, SWIGLU, BLOCK_N)
    factor = tl.load(global_scale + row, mask=valid, other=0.0) * 256.0
    value = (accumulator * factor[None, :]).to(x.dtype.element_ty).to(tl.float32)
    store_linear(value, bias, residual, result, tokens, tile_n, token, row, valid, N, RESIDUAL_STRIDE, RESULT_STRIDE,
                 SWIGLU, BLOCK_M, BLOCK_N)


def decode_constants(dtype: str, *, pairs: bool) -> dict[str, Any]:
    """Constants of ``decode_fragment_words`` for activations of ``dtype`` and weights of its flavour or of pairs."""
    flavour = "pairs" if pairs else dtype
    bits = (*(bit for pair in FLAVOURS[flavour] for bit in pair), DISTANCES[flavour])
    return {"BITS": bits, "DECODE": repr(decode_word(dtype, pairs=pairs))}


def emit_fragments_gemm(
    call: OpCall, blocks: Blocks, ledger: dict[str, bool], *, pairs: bool = False
) -> tuple[KernelSource, ...]:
    """The GEMM of an NVFP4 weight in fragment order, with ``pairs`` of that flavour; ``blocks.k`` is 64."""
    decoding = decode_constants(need(call, "x").dtype, pairs=pairs)
    return emit_ordered_gemm(call, blocks, ledger, "fragments", tile_fragments_gemm, decoding)


def emit_ordered_gemm(
    call: OpCall, blocks: Blocks, ledger: dict[str, bool], order: str, tile: Any, more: dict[str, Any]
) -> tuple[KernelSource, ...]:
    """The GEMM of an NVFP4 weight in an ``order`` that ``tile`` reads, a tile function tile_{order}_gemm.

    more: its constants beside those of every linear layer and the blocks.
    """
    x, dtype = need(call, "x"), need(call, "x").dtype
    constants: dict[str, Any] = linear_constants(call, 0, 0)
    del constants["WEIGHT_STRIDE"], constants["SCALE_STRIDE"]
    rows, k = int(need(call, "packed").shape[0]), int(constants["K"])
    tiles_n = ceil_div(rows, blocks.n)
    constants |= {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "TILES_N": tiles_n, "GROUP_M": 8, **more}
    label = epilogue_label(call)
    return (
        emit_kernel(
            name=kernel_name(f"{call.op}_{order}_gemm{blocks.m}", short_dtype(dtype), f"{rows}x{k}", label),
            title=f"{call.op}: [{x.shape[0]}, {k}] {dtype} by {order} of a weight [{rows}, {k}], epilogue: "
            f"{label or 'none'}.",
            tiles=[tile],
            constants=constants,
            parameters=operand_parameters(call, ("x", *WEIGHTS)),
            body=tile_call(f"tile_{order}_gemm", call, "x", WEIGHTS, constants),
            grid=(f"cdiv({x.shape[0]}, {blocks.m}) * {tiles_n}", "1", "1"),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            ledger=ledger,
        ),
    )
