"""MXFP8 decoding to bfloat16 where ``cvt.rn.bf16x2.e4m3x2`` exists (feature cvt_e4m3_bf16x2)."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.mxfp8 import decode_portable, spread_scale

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def decode_pairs(words, factors):
    """int32 words and bf16 pairs of equal factors -> two int32 of bf16 pairs: codes (0, 1) and (2, 3)."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 h0, h1; mov.b32 {h0, h1}, $2;
        cvt.rn.bf16x2.e4m3x2 $0, h0; cvt.rn.bf16x2.e4m3x2 $1, h1;
        mul.rn.bf16x2 $0, $0, $3; mul.rn.bf16x2 $1, $1, $3; }""",
        "=&r,=&r,r,r", [words, factors], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )


@triton.jit
def decode_mxfp8(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and uint8 [n, w/8] -> bf16 [n, 4 w] = e4m3 * 2^(scale - 127): one conversion for two codes."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if INTERPRET:
        return decode_portable(words, scale, dtype)
    first, second = decode_pairs(words, spread_scale(words, scale))
    pairs = tl.join(first, second)
    even = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(even, odd), (ROWS, WORDS * 4))
