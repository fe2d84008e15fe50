"""Multiplication of two NVFP4 tiles where tcgen05.mma takes E4M3 scales of 16 (feature tcgen05_block_scale)."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.targets._intrinsics.multiply_blocks import multiply_portable

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def multiply_blocks(x, x_scale, weight, scale, accumulator):
    """accumulator + (e2m1 x * x_scale) @ (e2m1 weight * scale).T in one block-scaled MMA.

    Triton's interpreter reads E4M3 scales as powers of two, so there both sides are decoded.
    """
    if INTERPRET:
        return multiply_portable(x, x_scale, weight, scale, accumulator)
    return tl.dot_scaled(x, x_scale, "e2m1", tl.trans(weight), scale, "e2m1", accumulator)
