"""Token-quad order of the scales of V in an NVFP4 page: replaces ``locate_scales`` of sparse_nvfp4."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_scales(key, group, SIDE: tl.constexpr, GROUPS: tl.constexpr):
    """Offsets of the scales of rows ``key`` [n, 1] and groups ``group`` [1, g] of a run: K by token, V in quads."""
    if SIDE == 0:
        return key * GROUPS + group
    SHARE: tl.constexpr = GROUPS // 4
    return (key // 4 * 4 + group // SHARE) * GROUPS + group % SHARE * 4 + key % 4
