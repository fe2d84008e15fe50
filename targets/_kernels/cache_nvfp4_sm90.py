"""NVFP4 pages arranged for Hopper's mma.sync lanes, read and written row by row: replaces functions of cache_nvfp4.

The bytes are those of ``mmcompile.core.formats.nvfp4_cache_sm90``: pages of 128 tokens, heads of 128. Rows are not
negative, so shifts and masks divide them: a compiler that does not know it would add corrections.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_scales(key, group, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Bytes from ``base`` to the scales of rows ``key`` [n, 1] and groups ``group`` [1, 8]; K and V share a page."""
    tile, row = key >> 3, key & 7
    if SIDE == 2:
        place = 8192 + (tile >> 3) * 512 + (row * 4 + group % 4) * 16 + (tile & 7) * 2 + group // 4
    elif SIDE == 1:
        place = 16384 + (tile >> 2) * 512 + (group * 4 + (row >> 1)) * 16 + 8 + (tile & 3) * 2 + (row & 1)
    else:
        place = 16384 + (tile >> 2) * 512 + (row * 4 + group % 4) * 16 + (tile & 3) * 2 + group // 4
    return place


@triton.jit
def spread_codes(codes, q, shift):
    """Codes as bits of a half, ``q`` = their place among four: signs at 15, 12, 14, 13, magnitudes at 9, 6, 3, 0."""
    sign = tl.where(q == 0, 15, tl.where(q == 1, 12, tl.where(q == 2, 14, 13)))
    return ((codes >> 3) << (sign + shift)) | ((codes & 7) << (9 - 3 * q + shift))


@triton.jit
def gather_code(words, Q: tl.constexpr, SHIFT: tl.constexpr):
    """The code at place Q of the half that starts at bit SHIFT of ``words``, 0 to 15."""
    SIGN: tl.constexpr = 15 if Q == 0 else (12 if Q == 1 else (14 if Q == 2 else 13))
    return ((words >> (SIGN + SHIFT - 3)) & 8) | ((words >> (9 - 3 * Q + SHIFT)) & 7)


@triton.jit
def place_halves(key, half):
    """Bytes from ``base`` to the halves ``half`` [1, h] of the values of rows ``key`` [n, 1]; 4 codes a half."""
    tile, row = key >> 3, key & 7
    return 8192 + tile * 512 + ((half // 4 * 4 + (row >> 1)) * 8 + half % 4 * 2 + (row & 1)) * 2


@triton.jit
def place_words(key, word):
    """Bytes from ``base`` to the words ``word`` [1, w] of the keys of rows ``key`` [n, 1]; 8 codes a word."""
    return key * 64 + (word // 2 % 4 * 4 + word // 8 * 2 + word % 2) * 4


@triton.jit
def load_words(base, key, visible, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Codes of rows ``key`` [n], eight to an int32 [n, 16], the first in the low nibble; 0 if invisible."""
    word = tl.arange(0, 16)[None, :]
    mask = visible[:, None]
    if SIDE != 1:
        pointer = (base + place_words(key[:, None], word)).to(tl.pointer_type(tl.int32), bitcast=True)
        stored = tl.load(pointer, mask=mask, other=0)
    else:
        low = (base + place_halves(key[:, None], 2 * word)).to(tl.pointer_type(tl.uint16), bitcast=True)
        high = (base + place_halves(key[:, None], 2 * word + 1)).to(tl.pointer_type(tl.uint16), bitcast=True)
        stored = tl.load(low, mask=mask, other=0).to(tl.int32) | (tl.load(high, mask=mask, other=0).to(tl.int32) << 16)
    words = tl.zeros_like(stored)
    for q in tl.static_range(4):
        for h in tl.static_range(2):
            # Keys have their even elements in the low half, values the first four.
            words |= gather_code(stored, q, 16 * h) << (4 * (2 * q + h) if SIDE != 1 else 4 * (q + 4 * h))
    return words


@triton.jit
def store_codes(base, key, kept, codes, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Write int32 codes [n, 16, 8] of rows ``key`` [n] where ``kept``."""
    ROWS: tl.constexpr = codes.shape[0]
    if SIDE != 1:
        element = tl.arange(0, 8)[None, None, :]
        words = tl.sum(spread_codes(codes, element // 2, element % 2 * 16), axis=2)
        place = place_words(key[:, None], tl.arange(0, 16)[None, :])
        tl.store((base + place).to(tl.pointer_type(tl.int32), bitcast=True), words, mask=kept[:, None])
    else:
        four = tl.reshape(codes, (ROWS, 32, 4))
        halves = tl.sum(spread_codes(four, tl.arange(0, 4)[None, None, :], 0), axis=2)
        place = place_halves(key[:, None], tl.arange(0, 32)[None, :])
        pointer = (base + place).to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(pointer, halves.to(tl.uint16), mask=kept[:, None])
