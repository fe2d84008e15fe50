"""Tiles of the tuned decode linears: 16 weight rows for all tokens, K spread over the warps, fragments in registers.

Their tensors [32 * WARPS, 4] give every lane four registers. K goes round the warps in steps; a program adds the
partial sums of its warps at the end. A program has one tile of 16 rows or two: the second is the next one, or with
SWIGLU the same rows of the up projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.synchronise import enter_gate
from mmcompile.targets._kernels.linear import silu_times


@triton.jit
def load_once(place, mask):
    """Words that no other program reads; mask None: all of them exist."""
    if mask is None:
        words = tl.load(place, eviction_policy="evict_first")
    else:
        words = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
    return words


@triton.jit
def hold_loads(tile, PTX: tl.constexpr):
    """Keep the loads before this point in flight together."""
    tl.inline_asm_elementwise(PTX, "=r,r", [tile], tl.int32, False, 1)


@triton.jit
def point_rows(x, row, X_STRIDE: tl.constexpr):
    """Where each lane reads its ``row`` [n] of x as 32-bit words, four at a time."""
    words = x.to(tl.pointer_type(tl.int32), bitcast=True)
    return words + row[:, None] * (X_STRIDE // 2) + tl.arange(0, 4)[None, :]


@triton.jit
def load_tokens(x, X_STRIDE: tl.constexpr, lane, tokens, GROUPS: tl.constexpr):
    """Where lane 4 g + t reads x: rows of tokens g, g + 8, ... as 32-bit words, and which of them exist."""
    token = lane // 4
    first = point_rows(x, token, X_STRIDE)
    token = token[:, None]
    return (first, first + 4 * X_STRIDE)[:GROUPS], (token < tokens, token + 8 < tokens)[:GROUPS]


@triton.jit
def mask_all(masks, other, GROUPS: tl.constexpr):
    """Every mask of a tuple of GROUPS and the other one."""
    return (masks[0] & other, masks[GROUPS - 1] & other)[:GROUPS]


@triton.jit
def multiply(a, b, x, sums, PTX: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr):
    """sums + a step of the product, for 8 tokens a group; x: two tensors a group or one, as the assembly takes them."""
    if GROUPS == 1:
        if len(x) == 1:
            added = (tl.inline_asm_elementwise(PTX[CHUNK], PTX[-1], [a, b, x[0], sums[0]], tl.float32, False, 4),)
        else:
            added = (tl.inline_asm_elementwise(PTX[CHUNK], PTX[-1], [a, b, x[0], x[1], sums[0]], tl.float32, False, 4),)
    else:
        if len(x) == 2:
            added = tl.inline_asm_elementwise(PTX[CHUNK], PTX[-1], [a, b, x[0], x[1], sums[0], sums[1]],
                                              (tl.float32, tl.float32), False, 4)
        else:
            added = tl.inline_asm_elementwise(PTX[CHUNK], PTX[-1], [a, b, x[0], x[1], x[2], x[3], sums[0], sums[1]],
                                              (tl.float32, tl.float32), False, 4)
    return added


@triton.jit
def load_fragments(words, scales, step, loaded):
    """The four chunks of codes and the scales of a step of 256 k."""
    codes = (load_once(words + step * 512, loaded), load_once(words + step * 512 + 128, loaded),
             load_once(words + step * 512 + 256, loaded), load_once(words + step * 512 + 384, loaded))
    return codes, load_once(scales + step * 128, loaded)


@triton.jit
def load_chunk(x_words, active, place, GROUPS: tl.constexpr):
    """The words of x for a chunk of 64 k from word ``place`` on: two tensors a group."""
    parts = (tl.load(x_words[0] + place, active[0], 0), tl.load(x_words[0] + place + 4, active[0], 0))
    if GROUPS == 2:
        parts = parts + (tl.load(x_words[1] + place, active[1], 0), tl.load(x_words[1] + place + 4, active[1], 0))
    return parts


@triton.jit
def sum_fragments(first, second, x_words, tokens_active, weight, scale, K: tl.constexpr, PAIRED: tl.constexpr,
                  GROUPS: tl.constexpr, WARPS: tl.constexpr, HOLD: tl.constexpr, BARRIER: tl.constexpr,
                  CHUNKS: tl.constexpr, gate):
    """Partial sums [32 * WARPS, 4] of NVFP4 fragments, a tuple of GROUPS for the first 16 rows and for the second.

    first, second: numbers (int64) of tiles of 16 rows; the second counts with PAIRED only. x_words, tokens_active:
    as of ``load_tokens``. gate: None, or that of ``enter_gate``.
    """
    STEPS: tl.constexpr = K // 256
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, (thread // 32)[:, None]
    own = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    run = (lane % 4 * 8)[:, None]
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + own
    scales = scale.to(tl.pointer_type(tl.int16), bitcast=True) + own
    zero = tl.zeros((32 * WARPS, 4), tl.float32)
    sums = (zero, zero)[:GROUPS]
    paired = (zero, zero)[:GROUPS]
    for start in tl.static_range(0, STEPS, WARPS):
        step = start + warp
        loaded, active = None, tokens_active
        if STEPS % WARPS != 0:
            loaded = step < STEPS
            active = mask_all(tokens_active, loaded, GROUPS)
        codes, factors = load_fragments(words + first * (STEPS * 512), scales + first * (STEPS * 128), step, loaded)
        if PAIRED:
            codes1, factors1 = load_fragments(words + second * (STEPS * 512), scales + second * (STEPS * 128), step,
                                              loaded)
        if start == 0 and gate is not None:
            enter_gate(gate)
        if HOLD:
            hold_loads(start, BARRIER)
        for chunk in tl.static_range(4):
            parts = load_chunk(x_words, active, step * 128 + chunk * 32 + run, GROUPS)
            sums = multiply(codes[chunk], factors, parts, sums, CHUNKS, chunk, GROUPS)
            if PAIRED:
                paired = multiply(codes1[chunk], factors1, parts, paired, CHUNKS, chunk, GROUPS)
    return sums, paired


@triton.jit
def load_row(words, place, loaded, K: tl.constexpr, SLICES: tl.constexpr):
    """Chunks of 32 k of a row of each lane; ``place`` is where the lane's 8 of the first chunk start."""
    if loaded is None:
        chunks = (load_once(words, None), load_once(words + 16, None), load_once(words + 32, None),
                  load_once(words + 48, None))
    else:
        chunks = (load_once(words, loaded & (place < K)), load_once(words + 16, loaded & (place < K - 32)),
                  load_once(words + 32, loaded & (place < K - 64)), load_once(words + 48, loaded & (place < K - 96)))
    return chunks[:2 * SLICES]


@triton.jit
def sum_rows(tile, first_row, x, weight, tokens, N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr,
             WEIGHT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr, PAIRED: tl.constexpr, GROUPS: tl.constexpr,
             WARPS: tl.constexpr, SLICES: tl.constexpr, HOLD: tl.constexpr, BARRIER: tl.constexpr,
             CHUNK: tl.constexpr, LOWER: tl.constexpr, gate):
    """Partial sums [32 * WARPS, 4] of unquantized row-major weights, as in ``sum_fragments``.

    The 16 rows are 8 from ``first_row`` on and 8 that lie LOWER rows behind them. A warp takes SLICES * 64 k a step.
    CHUNK: assembly and constraints for 32 k.
    """
    STEP: tl.constexpr = 64 * SLICES
    WHOLE: tl.constexpr = K % (STEP * WARPS) == 0 and N % (32 if PAIRED and not SWIGLU else 16) == 0
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, (thread // 32)[:, None]
    x_words, tokens_active = load_tokens(x, X_STRIDE, lane, tokens, GROUPS)
    run = (lane % 4 * 4)[:, None]
    row = first_row + (lane // 4)[:, None]
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, 4)[None, :]
    upper = words + row.to(tl.int64) * (WEIGHT_STRIDE // 2)
    lower = upper + LOWER * (WEIGHT_STRIDE // 2)
    apart: tl.constexpr = N * (WEIGHT_STRIDE // 2) if SWIGLU else 8 * WEIGHT_STRIDE
    zero = tl.zeros((32 * WARPS, 4), tl.float32)
    sums = (zero, zero)[:GROUPS]
    paired = (zero, zero)[:GROUPS]
    for start in tl.static_range(0, K, STEP * WARPS):
        place = start // 2 + warp * (STEP // 2) + run
        if WHOLE:
            there, there1, other, other1 = None, None, None, None
        else:
            there, there1 = row < N, row + LOWER < N
            other, other1 = (there, there1) if SWIGLU else (row + 16 < N, row + 24 < N)
        first = load_row(upper + place, 2 * place, there, K, SLICES)
        second = load_row(lower + place, 2 * place, there1, K, SLICES)
        if PAIRED:
            third = load_row(upper + apart + place, 2 * place, other, K, SLICES)
            fourth = load_row(lower + apart + place, 2 * place, other1, K, SLICES)
        if start == 0:
            enter_gate(gate)
        if HOLD:
            hold_loads(tile, BARRIER)
        for chunk in tl.static_range(2 * SLICES):
            active = tokens_active
            if not WHOLE:
                active = mask_all(tokens_active, 2 * place < K - 32 * chunk, GROUPS)
            parts = (tl.load(x_words[0] + place + 16 * chunk, active[0], 0),)
            if GROUPS == 2:
                parts = parts + (tl.load(x_words[1] + place + 16 * chunk, active[1], 0),)
            sums = multiply(first[chunk], second[chunk], parts, sums, CHUNK, 0, GROUPS)
            if PAIRED:
                paired = multiply(third[chunk], fourth[chunk], parts, paired, CHUNK, 0, GROUPS)
    return sums, paired


@triton.jit
def store_lanes(value, paired, bias, residual, result, tokens, row, token, N: tl.constexpr,
                RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr):
    """Epilogue of fp32 values of weight rows ``row`` and tokens ``token``; ``paired`` are those of rows N + row.

    Steps and rounding are those of ``store_linear``.
    """
    valid = row < N
    mask = valid & (token < tokens)
    if bias is not None:
        value += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)
    value = value.to(result.dtype.element_ty)
    if SWIGLU:
        if bias is not None:
            paired += tl.load(bias + N + row, mask=valid, other=0.0).to(tl.float32)
        value = silu_times(value, paired.to(value.dtype))
    if residual is not None:
        other = tl.load(residual + token * RESIDUAL_STRIDE + row, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    tl.store(result + token * RESULT_STRIDE + row, value, mask=mask)


@triton.jit
def add_warps(sums, WARPS: tl.constexpr):
    """Partial sums [32 * WARPS, 4] -> [32, 4]."""
    return tl.sum(tl.reshape(sums, (WARPS, 32, 4)), 0)


@triton.jit
def scale_sums(sums, global_scale, row, dtype: tl.constexpr, WARPS: tl.constexpr):
    """Sums of all warps in fp32 [32, 4]; with a global scale a row, which undoes the 2^-8 of fragments, rounded."""
    value = add_warps(sums, WARPS)
    if global_scale is not None:
        value = (value * (tl.load(global_scale + row) * 256.0)).to(dtype).to(tl.float32)
    return value


@triton.jit
def store_sums(sums, paired, tile, global_scale, bias, residual, result, tokens, N: tl.constexpr,
               RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr,
               PAIRED: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """Add the sums of the warps and apply scale (with a rounding, as in mm::linear_nvfp4) and epilogue."""
    lane, column = tl.arange(0, 32)[:, None], tl.arange(0, 4)[None, :]
    first = 2 * tile if PAIRED and not SWIGLU else tile
    row = first * 16 + lane // 4 + column // 2 * 8
    row1 = row + (N if SWIGLU else 16)
    dtype = result.dtype.element_ty
    for group in tl.static_range(GROUPS):
        token = 8 * group + lane % 4 * 2 + column % 2
        value = scale_sums(sums[group], global_scale, row, dtype, WARPS)
        other = value
        if PAIRED:
            other = scale_sums(paired[group], global_scale, row1, dtype, WARPS)
        store_lanes(value, other, bias, residual, result, tokens, row, token, N, RESIDUAL_STRIDE, RESULT_STRIDE, SWIGLU)
        if PAIRED and not SWIGLU:
            store_lanes(other, other, bias, residual, result, tokens, row1, token, N, RESIDUAL_STRIDE, RESULT_STRIDE,
                        SWIGLU)


@triton.jit
def tile_fragments(gate, tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
                   K: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
                   RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr, PAIRED: tl.constexpr, GROUPS: tl.constexpr,
                   WARPS: tl.constexpr, HOLD: tl.constexpr, BARRIER: tl.constexpr, CHUNKS: tl.constexpr):
    """NVFP4 fragments: the results of 16 weight rows, with PAIRED of 32, for at most 8 * GROUPS tokens.

    CHUNKS: assembly for the four chunks of 64 in a step of 256, then its constraints. BARRIER: that of ``hold_loads``.
    """
    x_words, active = load_tokens(x, X_STRIDE, tl.arange(0, 32 * WARPS) % 32, tokens, GROUPS)
    first = (2 * tile if PAIRED and not SWIGLU else tile).to(tl.int64)
    second = first + (N // 16 if SWIGLU else 1)
    sums, paired = sum_fragments(first, second, x_words, active, weight, scale, K, PAIRED, GROUPS, WARPS, HOLD,
                                 BARRIER, CHUNKS, gate)
    store_sums(sums, paired, tile, global_scale, bias, residual, result, tokens, N, RESIDUAL_STRIDE, RESULT_STRIDE,
               SWIGLU, PAIRED, GROUPS, WARPS)


@triton.jit
def tile_rows(gate, tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
              K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
              RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr, PAIRED: tl.constexpr, GROUPS: tl.constexpr,
              WARPS: tl.constexpr, SLICES: tl.constexpr, HOLD: tl.constexpr, BARRIER: tl.constexpr,
              CHUNK: tl.constexpr):
    """Row-major weights in x's dtype: the results of 16 rows, with PAIRED of 32, for at most 8 * GROUPS tokens."""
    first_row = (2 * tile if PAIRED and not SWIGLU else tile) * 16
    sums, paired = sum_rows(tile, first_row, x, weight, tokens, N, K, X_STRIDE, WEIGHT_STRIDE, SWIGLU, PAIRED, GROUPS,
                            WARPS, SLICES, HOLD, BARRIER, CHUNK, 8, gate)
    store_sums(sums, paired, tile, None, bias, residual, result, tokens, N, RESIDUAL_STRIDE, RESULT_STRIDE, SWIGLU,
               PAIRED, GROUPS, WARPS)
