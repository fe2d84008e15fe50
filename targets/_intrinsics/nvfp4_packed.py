"""NVFP4 decoding by packed integer operations, for a GPU without an E2M1 conversion (feature mul_bf16x2).

A code's bits, moved to the top of the mantissa and the bottom of the exponent of a half-precision number, are its
value times a power of two (2^-126 in bfloat16, 2^-14 in float16), E2M1's subnormal included; the factor undoes it.
Each word gives four pairs (j, j + 4), one code in either half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.nvfp4 import decode_portable

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def decode_pairs_bf16(words, factors):
    """int32 words, bf16 pairs of scale * 2^118 -> four int32 of bf16 pairs, codes (j, j + 4), times 2^-8.

    code * (2^12 + 2^6) puts the sign at bit 15 and the magnitude at bits 8..6 in one multiplication.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 w; shr.u32 w, $4, 8;
        and.b32 $0, $4, 0x000F000F; mul.lo.u32 $0, $0, 4160; and.b32 $0, $0, 0x81C081C0;
        and.b32 $1, $4, 0x00F000F0; mul.lo.u32 $1, $1, 260; and.b32 $1, $1, 0x81C081C0;
        and.b32 $2, w, 0x000F000F; mul.lo.u32 $2, $2, 4160; and.b32 $2, $2, 0x81C081C0;
        and.b32 $3, w, 0x00F000F0; mul.lo.u32 $3, $3, 260; and.b32 $3, $3, 0x81C081C0;
        mul.rn.bf16x2 $0, $0, $5; mul.rn.bf16x2 $1, $1, $5;
        mul.rn.bf16x2 $2, $2, $5; mul.rn.bf16x2 $3, $3, $5; }""",
        "=&r,=&r,=&r,=&r,r,r", [words, factors], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True, pack=1,
    )


@triton.jit
def decode_pairs_f16(words, factors):
    """int32 words, f16 pairs of scale * 2^6 -> four int32 of f16 pairs, codes (j, j + 4), times 2^-8.

    Sign to bit 15, magnitude to bits 11..9, by two shifts.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 s0, s1, s2, s3;
        shl.b32 s0, $4, 12; shl.b32 s1, $4, 8; shl.b32 s2, $4, 4;
        and.b32 s0, s0, 0x80008000; and.b32 s1, s1, 0x80008000; and.b32 s2, s2, 0x80008000;
        and.b32 s3, $4, 0x80008000;
        shl.b32 $0, $4, 9; shl.b32 $1, $4, 5; shl.b32 $2, $4, 1; shr.u32 $3, $4, 3;
        lop3.b32 $0, $0, 0x0E000E00, s0, 0xEA; lop3.b32 $1, $1, 0x0E000E00, s1, 0xEA;
        lop3.b32 $2, $2, 0x0E000E00, s2, 0xEA; lop3.b32 $3, $3, 0x0E000E00, s3, 0xEA;
        mul.rn.f16x2 $0, $0, $5; mul.rn.f16x2 $1, $1, $5;
        mul.rn.f16x2 $2, $2, $5; mul.rn.f16x2 $3, $3, $5; }""",
        "=&r,=&r,=&r,=&r,r,r", [words, factors], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True, pack=1,
    )


@triton.jit
def decode_nvfp4(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and e4m3 [n, w/2] -> dtype [n, 8 w] = e2m1 * scale / 256, about two operations a code."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if INTERPRET:
        return decode_portable(words, scale, dtype)
    BF16: tl.constexpr = dtype == tl.bfloat16
    factor = (scale.to(tl.float32) * (3.32306998946229e35 if BF16 else 64.0)).to(dtype)
    factor = factor.to(tl.uint16, bitcast=True).to(tl.int32) * 0x10001
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, WORDS // 2, 2)), (ROWS, WORDS))
    if BF16:
        p0, p1, p2, p3 = decode_pairs_bf16(words, factor)
    else:
        p0, p1, p2, p3 = decode_pairs_f16(words, factor)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    low = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 4, 2, 3)), (ROWS, WORDS * 8))
