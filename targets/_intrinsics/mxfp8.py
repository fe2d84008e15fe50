"""Decoding of MXFP8 weights inside a kernel: the portable version.

Every version, here and in the files beside this one, is a function ``decode_mxfp8(words, scale, dtype)`` with one
contract:

    words int32 [n, w]: four E4M3 codes each, the first in the low byte; never NaN (7F, FF), which loading refuses.
    scale uint8 [n, w/8]: exponents with bias 127, one for 32 codes; 255 gives NaN.
    Returns dtype [n, 4 w] = e4m3 * 2^(scale - 127), rounded once, to bfloat16 or float32.

A product has four significant bits, so the rounding is exact but for bfloat16's subnormals below 2^-133 (possible from
scale code 2 down), and overflows to infinity exactly where fp32 does. float16 has too few exponents for a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_portable(words, scale, dtype: tl.constexpr):
    """E4M3 codes by the compiler's own conversion, the scale by its bits in fp32."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    codes = (words[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 255
    values = tl.reshape(codes, (ROWS, WORDS * 4)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    exponent = scale.to(tl.int32)
    # The code is fp32's exponent field, but for 0 (2^-127, a subnormal) and 255 (NaN).
    bits = (exponent << 23) | tl.where((exponent == 0) | (exponent == 255), 0x400000, 0)
    factor = tl.broadcast_to(bits.to(tl.float32, bitcast=True)[:, :, None], (ROWS, WORDS // 8, 32))
    return (values * tl.reshape(factor, (ROWS, WORDS * 4))).to(dtype)


@triton.jit
def spread_scale(words, scale):
    """The scale of every word of ``words`` [n, w] as a pair of equal bf16 numbers, int32 [n, w]."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    exponent = scale.to(tl.int32)
    # The code is bf16's exponent field, but for 0 (2^-127, a subnormal) and 255 (NaN).
    factor = ((exponent << 7) | tl.where((exponent == 0) | (exponent == 255), 0x40, 0)) * 0x10001
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, WORDS // 8, 8)), (ROWS, WORDS))


@triton.jit
def decode_mxfp8(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and uint8 [n, w/8] -> dtype [n, 4 w] = e4m3 * 2^(scale - 127), for any target."""
    return decode_portable(words, scale, dtype)
