"""NVFP4 decoding where ``cvt.rn.{bf16,f16}x2.e2m1x2`` exists (features cvt_e2m1_bf16x2, cvt_e2m1_f16x2)."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.nvfp4 import decode_portable

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def decode_pairs(words, factors, dtype: tl.constexpr):
    """int32 words and pairs of equal factors -> four int32 of dtype pairs: codes (0,1), (2,3), (4,5), (6,7)."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b8 c0, c1, c2, c3; mov.b32 {c0, c1, c2, c3}, $4;
            cvt.rn.bf16x2.e2m1x2 $0, c0; cvt.rn.bf16x2.e2m1x2 $1, c1;
            cvt.rn.bf16x2.e2m1x2 $2, c2; cvt.rn.bf16x2.e2m1x2 $3, c3;
            mul.rn.bf16x2 $0, $0, $5; mul.rn.bf16x2 $1, $1, $5;
            mul.rn.bf16x2 $2, $2, $5; mul.rn.bf16x2 $3, $3, $5; }""",
            "=&r,=&r,=&r,=&r,r,r", [words, factors], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )
    return tl.inline_asm_elementwise(
        """{ .reg .b8 c0, c1, c2, c3; mov.b32 {c0, c1, c2, c3}, $4;
        cvt.rn.f16x2.e2m1x2 $0, c0; cvt.rn.f16x2.e2m1x2 $1, c1;
        cvt.rn.f16x2.e2m1x2 $2, c2; cvt.rn.f16x2.e2m1x2 $3, c3;
        mul.rn.f16x2 $0, $0, $5; mul.rn.f16x2 $1, $1, $5;
        mul.rn.f16x2 $2, $2, $5; mul.rn.f16x2 $3, $3, $5; }""",
        "=&r,=&r,=&r,=&r,r,r", [words, factors], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True, pack=1,
    )


@triton.jit
def decode_nvfp4(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and e4m3 [n, w/2] -> dtype [n, 8 w] = e2m1 * scale / 256: one conversion for two codes."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if INTERPRET:
        return decode_portable(words, scale, dtype)
    factor = (scale.to(tl.float32) * 0.00390625).to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
    factor = tl.broadcast_to((factor * 0x10001)[:, :, None], (ROWS, WORDS // 2, 2))
    p0, p1, p2, p3 = decode_pairs(words, tl.reshape(factor, (ROWS, WORDS)), dtype)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    even = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(even, odd), (ROWS, WORDS * 8))
