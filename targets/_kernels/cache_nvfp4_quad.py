"""Token-quad order of the scales of V in an NVFP4 page: replaces ``locate_scales`` of cache_nvfp4."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_scales(key, group, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Bytes from ``base`` to the scales of rows ``key`` [n, 1] and groups ``group`` [1, g]: K by token, V in quads."""
    GROUPS: tl.constexpr = HEAD_DIM // 16
    CODES: tl.constexpr = PAGE_SIZE * (HEAD_DIM // 2)
    SHARE: tl.constexpr = GROUPS // 4
    RUN: tl.constexpr = CODES + PAGE_SIZE * GROUPS
    if SIDE == 1:
        place = ((key & -4) + group // SHARE) * GROUPS + group % SHARE * 4 + (key & 3) + (RUN + CODES)
    else:
        place = key * GROUPS + group + CODES
    return place
