"""Tiles of the tuned decode linears for waves of 64: 16 weight rows by 16 tokens, operands of v_mfma 16x16x32.

Their loads give every lane what it multiplies: row r of the weight and token r in lane 16 q + r, at the same run of k,
16 bytes at a time. No operand goes through local memory. K goes round the waves in steps of 256; a program adds the
partial sums of its waves at the end. A wave asks for its next step, weights and x, before it multiplies the one at
hand: loads come back in order, so x asked for later would wait for the weights before it. A program has one tile of 16
rows or two: the second is the next one, or with SWIGLU the same rows of the up projection.

Nothing here is wrong if Triton chooses other layouts than hoped for, only slow; the ledger of tests counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.nvfp4 import decode_portable
from mmcompile.targets._intrinsics.synchronise import enter_gate
from mmcompile.targets._tuned.linear_lanes import store_lanes

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def hold_ahead(tile):
    """Keep the loads before this point before it."""
    if not INTERPRET:
        tl.inline_asm_elementwise("; $0 $1", "=v,0,~{memory}", [tile], tl.int32, False, 1)


@triton.jit
def multiply_words_bf16(words, factors):
    """int32 words and fp32 pairs of equal factors (int64) -> four int64 of fp32 pairs, codes (0, 1) to (6, 7)."""
    return tl.inline_asm_elementwise(
        """v_cvt_scalef32_pk_f32_fp4 $0, $4, 1.0
        v_cvt_scalef32_pk_f32_fp4 $1, $4, 1.0 op_sel:[1,0,0]
        v_cvt_scalef32_pk_f32_fp4 $2, $4, 1.0 op_sel:[0,1,0]
        v_cvt_scalef32_pk_f32_fp4 $3, $4, 1.0 op_sel:[1,1,0]
        v_pk_mul_f32 $0, $0, $5
        v_pk_mul_f32 $1, $1, $5
        v_pk_mul_f32 $2, $2, $5
        v_pk_mul_f32 $3, $3, $5""",
        "=&v,=&v,=&v,=&v,v,v", [words, factors], dtype=(tl.int64, tl.int64, tl.int64, tl.int64), is_pure=True, pack=1,
    )


@triton.jit
def multiply_words_f16(words, factors):
    """int32 words and f16 pairs of equal factors -> four int32 of f16 pairs, codes (0, 1) to (6, 7).

    An MFMA may follow, which must not read them in the next two cycles; the compiler does not look into assembly.
    """
    return tl.inline_asm_elementwise(
        """v_cvt_scalef32_pk_f16_fp4 $0, $4, 1.0
        v_cvt_scalef32_pk_f16_fp4 $1, $4, 1.0 op_sel:[1,0,0]
        v_cvt_scalef32_pk_f16_fp4 $2, $4, 1.0 op_sel:[0,1,0]
        v_cvt_scalef32_pk_f16_fp4 $3, $4, 1.0 op_sel:[1,1,0]
        v_pk_mul_f16 $0, $0, $5
        v_pk_mul_f16 $1, $1, $5
        v_pk_mul_f16 $2, $2, $5
        v_pk_mul_f16 $3, $3, $5
        s_nop 1""",
        "=&v,=&v,=&v,=&v,v,v", [words, factors], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )


@triton.jit
def decode_lanes(words, scales, dtype: tl.constexpr):
    """int32 words [n, 4] and the e4m3 scales [n, 2] of their halves -> their 32 values [n, 32], exact in ``dtype``."""
    LANES: tl.constexpr = words.shape[0]
    if INTERPRET:
        return (decode_portable(words, scales, dtype).to(tl.float32) * 256.0).to(dtype)
    if dtype == tl.bfloat16:
        factors = scales.to(tl.float32).to(tl.uint32, bitcast=True).to(tl.int64)
        factors = factors | (factors << 32)
    else:
        factors = scales.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32) * 0x10001
    factors = tl.reshape(tl.broadcast_to(factors[:, :, None], (LANES, 2, 2)), (LANES, 4))
    if dtype == tl.bfloat16:
        p0, p1, p2, p3 = multiply_words_bf16(words, factors)
    else:
        p0, p1, p2, p3 = multiply_words_f16(words, factors)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    if dtype == tl.bfloat16:
        first = pairs.to(tl.int32).to(tl.float32, bitcast=True)
        second = (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        first = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        second = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(first, second), (LANES, 32)).to(dtype)


@triton.jit
def load_codes(words, scales, step, loaded):
    """Codes of the two chunks of 128 k of a step, and its scales."""
    if loaded is None:
        codes = (tl.load(words + step * 512), tl.load(words + step * 512 + 256), tl.load(scales + step * 64))
    else:
        codes = (tl.load(words + step * 512, loaded, 0), tl.load(words + step * 512 + 256, loaded, 0),
                 tl.load(scales + step * 64, loaded, 0))
    return codes


@triton.jit
def load_x_chunk(x_lanes, place, loaded):
    """x of each lane for a chunk of 128 k: the 32 from ``place`` on, [n, 8, 2, 2] with the last dimensions j."""
    if loaded is None:
        x0, x1 = tl.load(x_lanes + place), tl.load(x_lanes + place + 8)
        x2, x3 = tl.load(x_lanes + place + 16), tl.load(x_lanes + place + 24)
    else:
        x0, x1 = tl.load(x_lanes + place, loaded, 0.0), tl.load(x_lanes + place + 8, loaded, 0.0)
        x2, x3 = tl.load(x_lanes + place + 16, loaded, 0.0), tl.load(x_lanes + place + 24, loaded, 0.0)
    return tl.join(tl.join(x0, x2), tl.join(x1, x3))


@triton.jit
def load_step(words, scales, first, second, x_lanes, START: tl.constexpr, STEPS: tl.constexpr, PAIRED: tl.constexpr,
              WAVES: tl.constexpr, gate):
    """Codes of ``load_codes`` of both tiles and two chunks of x for the steps from START on, a wave each.

    gate: entered before the first of all loads of x.
    """
    step = START + (tl.arange(0, 64 * WAVES) // 64)[:, None]
    loaded = None
    if START + WAVES > STEPS:
        loaded = step < STEPS
    codes = load_codes(words + first * (STEPS * 512), scales + first * (STEPS * 64), step, loaded)
    codes1 = codes
    if PAIRED:
        codes1 = load_codes(words + second * (STEPS * 512), scales + second * (STEPS * 64), step, loaded)
    if START == 0:
        enter_gate(gate)
    x = (load_x_chunk(x_lanes, step * 256, loaded), load_x_chunk(x_lanes, step * 256 + 128, loaded))
    hold_ahead(first)
    return codes, codes1, x


@triton.jit
def multiply_chunk(x, codes, scales, sums, CHUNK: tl.constexpr, WAVES: tl.constexpr):
    """sums [WAVES, 16 tokens, 16 rows] + a chunk; x as of ``load_x_chunk``, codes [n, 4], scales [n, 1] of a step."""
    dtype: tl.constexpr = x.dtype
    own = (scales >> (16 * CHUNK + 8 * tl.arange(0, 2)[None, :])).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    weight = tl.permute(tl.reshape(decode_lanes(codes, own, dtype), (WAVES, 4, 16, 4, 8)), (0, 3, 1, 4, 2))
    left = tl.permute(tl.reshape(x, (WAVES, 4, 16, 8, 4)), (0, 2, 4, 1, 3))  # q t c j -> t j q c
    return tl.dot(tl.reshape(left, (WAVES, 16, 128)), tl.reshape(weight, (WAVES, 128, 16)), sums)


@triton.jit
def sum_waves(first, second, x, tokens, weight, scale, K: tl.constexpr, X_STRIDE: tl.constexpr, PAIRED: tl.constexpr,
              WAVES: tl.constexpr, gate):
    """Partial sums [WAVES, 16 tokens, 16 rows] for the tile of 16 rows ``first`` and, with PAIRED, for ``second``.

    Tokens that do not exist are the last one again: their sums mean nothing.
    """
    STEPS: tl.constexpr = K // 256
    lane = tl.arange(0, 64 * WAVES) % 64
    token = tl.minimum(lane % 16, tokens - 1)
    x_lanes = x + (token * X_STRIDE + lane // 16 * 32)[:, None] + tl.arange(0, 8)[None, :]
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    scales = scale.to(tl.pointer_type(tl.int32), bitcast=True) + lane[:, None]
    sums = tl.zeros((WAVES, 16, 16), tl.float32)
    paired = sums
    codes, codes1, parts = load_step(words, scales, first, second, x_lanes, 0, STEPS, PAIRED, WAVES, gate)
    for start in tl.static_range(0, STEPS, WAVES):
        now, now1, x_now = codes, codes1, parts
        if start + WAVES < STEPS:
            codes, codes1, parts = load_step(words, scales, first, second, x_lanes, start + WAVES, STEPS, PAIRED,
                                             WAVES, gate)
        for chunk in tl.static_range(2):
            sums = multiply_chunk(x_now[chunk], now[chunk], now[2], sums, chunk, WAVES)
            if PAIRED:
                paired = multiply_chunk(x_now[chunk], now1[chunk], now1[2], paired, chunk, WAVES)
    return sums, paired


@triton.jit
def scale_waves(sums, global_scale, row, dtype: tl.constexpr):
    """The sums of all waves [16, 16] in fp32, if there are scales times them and rounded to ``dtype`` as in the op."""
    value = tl.sum(sums, 0)
    if global_scale is not None:
        value = (value * tl.load(global_scale + row)).to(dtype).to(tl.float32)
    return value


@triton.jit
def store_waves(sums, paired, first, global_scale, bias, residual, result, tokens, N: tl.constexpr,
                RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr,
                PAIRED: tl.constexpr):
    """Add the sums of the waves and apply the scale (None: there is none) and the epilogue."""
    dtype: tl.constexpr = result.dtype.element_ty
    row, token = (first * 16 + tl.arange(0, 16))[None, :], tl.arange(0, 16)[:, None]
    row1 = row + (N if SWIGLU else 16)
    value = scale_waves(sums, global_scale, row, dtype)
    other = value
    if PAIRED:
        other = scale_waves(paired, global_scale, row1, dtype)
    store_lanes(value, other, bias, residual, result, tokens, row, token, N, RESIDUAL_STRIDE, RESULT_STRIDE, SWIGLU)
    if PAIRED and not SWIGLU:
        store_lanes(other, other, bias, residual, result, tokens, row1, token, N, RESIDUAL_STRIDE, RESULT_STRIDE,
                    SWIGLU)


@triton.jit
def tile_waves(gate, tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
               K: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr,
               SWIGLU: tl.constexpr, PAIRED: tl.constexpr, WAVES: tl.constexpr):
    """NVFP4 fragments of waves: the results of 16 weight rows, with PAIRED of 32, for at most 16 tokens."""
    first = (2 * tile if PAIRED and not SWIGLU else tile).to(tl.int64)
    second = first + (N // 16 if SWIGLU else 1)
    sums, paired = sum_waves(first, second, x, tokens, weight, scale, K, X_STRIDE, PAIRED, WAVES, gate)
    store_waves(sums, paired, first, global_scale, bias, residual, result, tokens, N, RESIDUAL_STRIDE, RESULT_STRIDE,
                SWIGLU, PAIRED)


@triton.jit
def load_run(pointers, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """Four tensors [n, 8] of rows for 128 k, 32 apart, from k [n, 1] on; WHOLE: all of it is there."""
    if WHOLE:
        parts = (tl.load(pointers + k), tl.load(pointers + k + 32), tl.load(pointers + k + 64),
                 tl.load(pointers + k + 96))
    else:
        parts = (tl.load(pointers + k, k < K, 0.0), tl.load(pointers + k + 32, k < K - 32, 0.0),
                 tl.load(pointers + k + 64, k < K - 64, 0.0), tl.load(pointers + k + 96, k < K - 96, 0.0))
    return parts


@triton.jit
def load_row_step(x_lanes, upper, lower, START: tl.constexpr, K: tl.constexpr, PAIRED: tl.constexpr,
                  WAVES: tl.constexpr, gate):
    """128 k of both tiles' rows and of x for each wave, from START on; gate: entered before the first loads of x."""
    thread = tl.arange(0, 64 * WAVES)
    k = (START + thread // 64 * 128 + thread % 64 // 16 * 8)[:, None]
    WHOLE: tl.constexpr = START + 128 * WAVES <= K
    rows = load_run(upper, k, K, WHOLE)
    rows1 = rows
    if PAIRED:
        rows1 = load_run(lower, k, K, WHOLE)
    if START == 0:
        enter_gate(gate)
    x = load_run(x_lanes, k, K, WHOLE)
    hold_ahead(START)
    return rows, rows1, x


@triton.jit
def join_run(parts, WAVES: tl.constexpr):
    """Tensors of ``load_run`` as [WAVES, 16 rows, 128]."""
    joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))  # q r c j
    joined = tl.permute(tl.reshape(joined, (WAVES, 4, 16, 8, 4)), (0, 2, 4, 1, 3))
    return tl.reshape(joined, (WAVES, 16, 128))


@triton.jit
def tile_wave_rows(gate, tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
                   K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
                   RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr,
                   PAIRED: tl.constexpr, WAVES: tl.constexpr):
    """Row-major weights in x's dtype: the results of 16 rows, with PAIRED of 32, for at most 16 tokens.

    Rows and tokens that do not exist are the last one again: their sums are not stored.
    """
    first = (2 * tile if PAIRED and not SWIGLU else tile).to(tl.int64)
    lane = tl.arange(0, 64 * WAVES) % 64
    piece = tl.arange(0, 8)[None, :]
    x_lanes = x + (tl.minimum(lane % 16, tokens - 1) * X_STRIDE)[:, None] + piece
    row = first * 16 + lane % 16
    row1 = tl.minimum(row, N - 1) + N if SWIGLU else tl.minimum(row + 16, N - 1)
    row = tl.minimum(row, N - 1)
    upper, lower = weight + (row * WEIGHT_STRIDE)[:, None] + piece, weight + (row1 * WEIGHT_STRIDE)[:, None] + piece
    sums = tl.zeros((WAVES, 16, 16), tl.float32)
    paired = sums
    rows, rows1, parts = load_row_step(x_lanes, upper, lower, 0, K, PAIRED, WAVES, gate)
    for start in tl.static_range(0, K, 128 * WAVES):
        now, now1, left = rows, rows1, join_run(parts, WAVES)
        if start + 128 * WAVES < K:
            rows, rows1, parts = load_row_step(x_lanes, upper, lower, start + 128 * WAVES, K, PAIRED, WAVES, gate)
        sums = tl.dot(left, tl.permute(join_run(now, WAVES), (0, 2, 1)), sums)
        if PAIRED:
            paired = tl.dot(left, tl.permute(join_run(now1, WAVES), (0, 2, 1)), paired)
    store_waves(sums, paired, first, None, bias, residual, result, tokens, N, RESIDUAL_STRIDE, RESULT_STRIDE, SWIGLU,
                PAIRED)
