"""NVFP4 weights in the order in which the lanes of a warp or a wave multiply them: a permutation of their bits.

Both tensors keep shape and size; experts in front of the rows follow each other, each arranged by itself. For
mma.m16n8k16, with row = 16 T + 8 h + g, k = 256 S + 64 u + 16 t + 4 j + 2 i + l and lane = 4 g + t:

* ``packed`` uint8 [n, k/2] holds 32-bit words in the order (T, S, u, lane, j), each with the 8 codes (h, i, l): the
  sign and magnitude of pair h + 2 i at the bits that FLAVOURS gives, with l = 1 DISTANCES bits above l = 0,
* ``scale`` float8_e4m3fn [n, k/16] holds its bytes in the order (T, S, lane, u, h), block = 16 S + 4 u + t.

So a lane's 16 k of a chunk u are one block in each of its two rows, and a load of 16 bytes brings it a chunk. The bits
of the flavours "bfloat16" and "float16" are where shifts, masks and multiplications by constants make a number of that
format of them (a tiny power of two times the value). Those of "pairs" are bytes of two codes, for an instruction that
converts a byte.

For v_mfma 16x16x32 and waves of 64 there is one flavour, "wave64", with row = 16 T + r, k = 256 S + 128 u + 32 q + 8 j
+ c and lane = 16 q + r: words, of the 8 codes c with the first in the low nibble, in the order (T, S, u, lane, j);
scales in the order (T, S, lane, u, b), block = 16 S + 8 u + 2 q + b. 16 bytes bring a lane two blocks of its row, and a
word is its share of an MFMA. Which k a place of an MMA stands for is free as long as both operands agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mmcompile.core.formats import nvfp4

ROWS, K = 16, 256
FLAVOURS = {
    "bfloat16": ((15, 6), (12, 3), (14, 0), (13, 9)),
    "float16": ((15, 9), (12, 6), (14, 3), (13, 0)),
    "pairs": ((3, 0), (11, 8), (19, 16), (27, 24)),
}
"""The bit of the sign and the lowest bit of the magnitude of pairs 0 to 3."""
DISTANCES = {"bfloat16": 16, "float16": 16, "pairs": 4}
"""By flavour: bits between the two codes of a pair."""
WAVE = "wave64"
LAYOUTS = {flavour: f"nvfp4_fragments_{flavour}" for flavour in (*FLAVOURS, WAVE)}
"""Tags of the layout in a plan (Buffer.layout), by flavour."""
_TILES_AT_A_TIME = 64


def arrange_as(tensor: Tensor, layout: str) -> Tensor:
    """A row-major weight in the layout of that tag; raises ValueError for an unknown tag or a weight without it."""
    for flavour, tag in LAYOUTS.items():
        if layout == tag:
            return arrange(tensor, flavour)
    raise ValueError(f"no weight has the layout {layout!r}")


def refuse_shape(rows: int, k: int) -> str | None:
    """The reason why a weight [rows, k] has no fragments, or None."""
    if rows % ROWS or k % K:
        return f"[{rows}, {k}] is not made of tiles of {ROWS} rows by {K}"
    return None


def arrange(tensor: Tensor, flavour: str) -> Tensor:
    """``packed`` or ``scale`` of [..., n, k], row-major -> fragment order; raises ValueError for other shapes."""
    result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    turn: Callable[[Tensor, str], Tensor] = _arrange_wave
    if flavour != WAVE:
        turn = _arrange_codes if tensor.dtype == torch.uint8 else _arrange_scales
    return _in_parts(tensor, result, flavour, turn)


def restore(tensor: Tensor, flavour: str) -> Tensor:
    """Inverse of :func:`arrange`."""
    result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    turn: Callable[[Tensor, str], Tensor] = _restore_wave
    if flavour != WAVE:
        turn = _restore_codes if tensor.dtype == torch.uint8 else _restore_scales
    return _in_parts(tensor, result, flavour, turn)


def _in_parts(tensor: Tensor, result: Tensor, flavour: str, turn: Callable[[Tensor, str], Tensor]) -> Tensor:
    k = tensor.shape[-1] * (2 if tensor.dtype == torch.uint8 else nvfp4.BLOCK)
    reason = refuse_shape(tensor.shape[-2], k)
    if reason is not None:
        raise ValueError(reason)
    step = ROWS * _TILES_AT_A_TIME
    rows, moved = tensor.flatten(0, -2), result.flatten(0, -2)
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        moved[start : start + step] = turn(part.contiguous(), flavour).reshape(part.shape)
    return result


@cache
def _tables(flavour: str) -> Tensor:
    """int32 [2, 65536]: the bits in a word of four codes of row 8 h + g, by h and their 16 bits in row-major order."""
    bits = torch.arange(1 << 16)
    tables = torch.zeros(2, 1 << 16, dtype=torch.int64)
    for h in range(2):
        for place in range(4):
            i, half = divmod(place, 2)
            sign, magnitude = FLAVOURS[flavour][h + 2 * i]
            code = (bits >> (4 * place)) & 15
            tables[h] |= (((code >> 3) << sign) | ((code & 7) << magnitude)) << (DISTANCES[flavour] * half)
    return tables.where(tables < 1 << 31, tables - (1 << 32)).to(torch.int32)


def _arrange_codes(packed: Tensor, flavour: str) -> Tensor:
    rows, tables = packed.shape[0], _tables(flavour).to(packed.device)
    quads = packed.view(torch.int64).view(rows // ROWS, 2, 8, -1, 4, 4)  # T h g S u t, each of four j
    halves = quads.permute(1, 0, 3, 4, 2, 5).contiguous().view(2, -1).view(torch.int16)
    upper, lower = (t.index_select(0, half.to(torch.int32) & 0xFFFF) for t, half in zip(tables, halves, strict=True))
    words: Tensor = upper | lower
    return words.view(torch.uint8)


def _restore_codes(words: Tensor, flavour: str) -> Tensor:
    rows = words.shape[0]
    words = words.view(torch.int32).view(rows // ROWS, -1, 4, 8, 4, 4)  # T S u g t j
    sides = []
    for h in range(2):
        half = torch.zeros_like(words)
        for place in range(4):
            i, side = divmod(place, 2)
            sign, magnitude = FLAVOURS[flavour][h + 2 * i]
            value = words >> (DISTANCES[flavour] * side)
            half |= ((((value >> sign) & 1) << 3) | ((value >> magnitude) & 7)) << (4 * place)
        sides.append(half.to(torch.int16))
    return torch.stack(sides).permute(1, 0, 4, 2, 3, 5, 6).contiguous().view(torch.uint8)  # T h g S u t j


def _arrange_scales(scale: Tensor, flavour: str) -> Tensor:
    split = scale.view(torch.uint8).view(scale.shape[0] // ROWS, 2, 8, -1, 4, 4)  # T h g S u t
    return split.permute(0, 3, 2, 5, 4, 1).contiguous().view(scale.dtype)


def _restore_scales(scale: Tensor, flavour: str) -> Tensor:
    split = scale.view(torch.uint8).view(scale.shape[0] // ROWS, -1, 8, 4, 4, 2)  # T S g t u h
    return split.permute(0, 5, 2, 1, 4, 3).contiguous().view(scale.dtype)


def _arrange_wave(tensor: Tensor, flavour: str) -> Tensor:
    tiles = tensor.shape[0] // ROWS
    if tensor.dtype == torch.uint8:
        words = tensor.view(torch.int32).view(tiles, 16, -1, 2, 4, 4)  # T r S u q j
        return words.permute(0, 2, 3, 4, 1, 5).contiguous().view(torch.uint8)
    scales = tensor.view(torch.uint8).view(tiles, 16, -1, 2, 4, 2)  # T r S u q b
    return scales.permute(0, 2, 4, 1, 3, 5).contiguous().view(tensor.dtype)


def _restore_wave(tensor: Tensor, flavour: str) -> Tensor:
    tiles = tensor.shape[0] // ROWS
    if tensor.dtype == torch.uint8:
        words = tensor.view(torch.int32).view(tiles, -1, 2, 4, 16, 4)  # T S u q r j
        return words.permute(0, 4, 1, 2, 3, 5).contiguous().view(torch.uint8)
    scales = tensor.view(torch.uint8).view(tiles, -1, 4, 16, 2, 2)  # T S q r u b
    return scales.permute(0, 3, 1, 4, 2, 5).contiguous().view(tensor.dtype)
