"""MXFP8 decoding to bfloat16 where ``v_cvt_scalef32_pk_bf16_fp8`` exists (feature cvt_scalef32_fp8).

The instruction applies the exponent of its fp32 scale, which is all that an E8M0 scale has: its code is moved to the
exponent field. The field 0 stands for 2^-127 and 255 for NaN there as in E8M0 (CDNA4 ISA, pseudocode).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.mxfp8 import decode_portable

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def convert_pairs(words, factors):
    """int32 words and the bits of fp32 scales -> two int32 of bf16 pairs: codes (0, 1) and (2, 3)."""
    return tl.inline_asm_elementwise(
        """v_cvt_scalef32_pk_bf16_fp8 $0, $2, $3
        v_cvt_scalef32_pk_bf16_fp8 $1, $2, $3 op_sel:[1,0,0]""",
        "=&v,=&v,v,v", [words, factors], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )


@triton.jit
def decode_mxfp8(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and uint8 [n, w/8] -> bf16 [n, 4 w] = e4m3 * 2^(scale - 127): one instruction for two codes."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if INTERPRET:
        return decode_portable(words, scale, dtype)
    factor = tl.broadcast_to((scale.to(tl.int32) << 23)[:, :, None], (ROWS, WORDS // 8, 8))
    first, second = convert_pairs(words, tl.reshape(factor, (ROWS, WORDS)))
    pairs = tl.join(first, second)
    even = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(even, odd), (ROWS, WORDS * 4))
