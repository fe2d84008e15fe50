"""MXFP8 decoding to bfloat16 by packed integer operations (feature mul_bf16x2).

An E4M3 code, its sign at bit 15 and its magnitude at bits 10..4 of a bfloat16 number, is its value times 2^-120, E4M3's
subnormals included. Two packed multiplications, by 2^120 and by the scale, give the value: both factors and the product
between them are exact in bfloat16 for every scale code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.mxfp8 import decode_portable, spread_scale

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def decode_pairs(words, factors):
    """int32 words and bf16 pairs of equal factors -> two int32 of bf16 pairs: codes (0, 2) and (1, 3)."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 low, unit; mov.b32 unit, 0x7B807B80; shl.b32 low, $2, 8;
        shr.u32 $0, low, 4; and.b32 $0, $0, 0x07F007F0; lop3.b32 $0, $0, low, 0x80008000, 0xF8;
        shr.u32 $1, $2, 4; and.b32 $1, $1, 0x07F007F0; lop3.b32 $1, $1, $2, 0x80008000, 0xF8;
        mul.rn.bf16x2 $0, $0, unit; mul.rn.bf16x2 $1, $1, unit;
        mul.rn.bf16x2 $0, $0, $3; mul.rn.bf16x2 $1, $1, $3; }""",
        "=&r,=&r,r,r", [words, factors], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )


@triton.jit
def decode_mxfp8(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and uint8 [n, w/8] -> bf16 [n, 4 w] = e4m3 * 2^(scale - 127), about two operations a code."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if INTERPRET:
        return decode_portable(words, scale, dtype)
    even, odd = decode_pairs(words, spread_scale(words, scale))
    pairs = tl.join(even, odd)
    low = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (ROWS, WORDS * 4))
