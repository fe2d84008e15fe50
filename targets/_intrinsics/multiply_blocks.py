"""Multiplication of two NVFP4 tiles inside a kernel: the portable version.

Every version, here and in the file beside this one, is a function ``multiply_blocks(x, x_scale, weight, scale,
accumulator)`` with one contract:

    x uint8 [m, k/2], weight uint8 [n, k/2]: two E2M1 codes each, the first in the low nibble.
    x_scale float8e4nv [m, k/16], scale float8e4nv [n, k/16]: one for 16 codes.
    Returns fp32 [m, n] = accumulator + (e2m1 * x_scale) @ (e2m1 * scale).T; every product is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.nvfp4 import decode_nvfp4


@triton.jit
def decode_bytes(packed, scale):
    """uint8 [n, k/2] and e4m3 [n, k/16] -> bf16 [n, k] = e2m1 * scale / 256."""
    ROWS: tl.constexpr = packed.shape[0]
    WORDS: tl.constexpr = packed.shape[1] // 4
    quads = tl.reshape(packed.to(tl.int32), (ROWS, WORDS, 4))
    words = tl.sum(quads << (tl.arange(0, 4) * 8)[None, None, :], 2)
    return decode_nvfp4(words, scale, tl.bfloat16)


@triton.jit
def multiply_portable(x, x_scale, weight, scale, accumulator):
    """Decode both sides to bf16, each divided by 256, and multiply those."""
    product = tl.dot(decode_bytes(x, x_scale), tl.trans(decode_bytes(weight, scale)), input_precision="ieee")
    return accumulator + product * 65536.0


@triton.jit
def multiply_blocks(x, x_scale, weight, scale, accumulator):
    """accumulator + (e2m1 x * x_scale) @ (e2m1 weight * scale).T, for any target."""
    return multiply_portable(x, x_scale, weight, scale, accumulator)
