"""NVFP4 decoding where ``v_cvt_scalef32_pk_{bf16,f16}_fp4`` exists (feature cvt_scalef32_fp4).

The instruction applies only the exponent of its scale, so it decodes with scale 1.0 and the E4M3 scale is multiplied
in afterwards. Its source is a whole 32-bit register: words, never bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.nvfp4 import decode_portable

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def convert_pairs(words, dtype: tl.constexpr):
    """int32 words -> four int32 of dtype pairs: codes (0, 1), (2, 3), (4, 5), (6, 7)."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """v_cvt_scalef32_pk_bf16_fp4 $0, $4, 1.0
            v_cvt_scalef32_pk_bf16_fp4 $1, $4, 1.0 op_sel:[1,0,0]
            v_cvt_scalef32_pk_bf16_fp4 $2, $4, 1.0 op_sel:[0,1,0]
            v_cvt_scalef32_pk_bf16_fp4 $3, $4, 1.0 op_sel:[1,1,0]""",
            "=&v,=&v,=&v,=&v,v", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )
    return tl.inline_asm_elementwise(
        """v_cvt_scalef32_pk_f16_fp4 $0, $4, 1.0
        v_cvt_scalef32_pk_f16_fp4 $1, $4, 1.0 op_sel:[1,0,0]
        v_cvt_scalef32_pk_f16_fp4 $2, $4, 1.0 op_sel:[0,1,0]
        v_cvt_scalef32_pk_f16_fp4 $3, $4, 1.0 op_sel:[1,1,0]""",
        "=&v,=&v,=&v,=&v,v", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )


@triton.jit
def decode_nvfp4(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and e4m3 [n, w/2] -> dtype [n, 8 w] = e2m1 * scale / 256: one conversion for two codes."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if INTERPRET:
        return decode_portable(words, scale, dtype)
    p0, p1, p2, p3 = convert_pairs(words, dtype)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    even = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    value = tl.reshape(tl.join(even, odd), (ROWS, WORDS * 8)).to(tl.float32)
    factor = tl.broadcast_to((scale.to(tl.float32) * 0.00390625)[:, :, None], (ROWS, WORDS // 2, 16))
    return (value * tl.reshape(factor, (ROWS, WORDS * 8))).to(dtype)
