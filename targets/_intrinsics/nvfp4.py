"""Decoding of NVFP4 weights inside a kernel: the portable version.

Every version, here and in the files beside this one, is a function ``decode_nvfp4(words, scale, dtype)`` with one
contract:

    words int32 [n, w]: eight E2M1 codes each, the first in the low nibble.
    scale float8e4nv [n, w/2]: one for 16 codes.
    Returns dtype [n, 8 w] = e2m1 * scale / 256, exact in bfloat16, float16 and float32: a product has six
    significant bits, and the division keeps every factor inside float16's range. Callers multiply by 256.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_portable(words, scale, dtype: tl.constexpr):
    """E2M1 codes by integer arithmetic: int32 [n, w] and e4m3 [n, w/2] -> dtype [n, 8 w] = e2m1 * scale / 256."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    codes = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    magnitude = codes & 7
    normal = (magnitude > 1).to(tl.int32)
    doubled = ((magnitude & 1) + 2 * normal) << ((magnitude >> 1) - normal)
    doubled = tl.where(codes > 7, -doubled, doubled).to(tl.float32)
    factor = tl.broadcast_to((scale.to(tl.float32) * 0.001953125)[:, :, None], (ROWS, WORDS // 2, 16))
    return (tl.reshape(doubled, (ROWS, WORDS * 8)) * tl.reshape(factor, (ROWS, WORDS * 8))).to(dtype)


@triton.jit
def decode_nvfp4(words, scale, dtype: tl.constexpr):
    """int32 [n, w] and e4m3 [n, w/2] -> dtype [n, 8 w] = e2m1 * scale / 256, for any dtype and any target."""
    return decode_portable(words, scale, dtype)
