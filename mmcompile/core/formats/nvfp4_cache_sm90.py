"""NVFP4 cache pages for Hopper: the bytes of the other layouts arranged for mma.sync lanes, of the same total size.

Hopper has no E2M1 conversion, so its kernels decode with masks and shifts. A page holds 128 tokens of heads of 128.
Four codes share a 16-bit half: signs at bits 15, 12, 14, 13, magnitudes at bits 11:9, 8:6, 5:3, 2:0, for codes 0 to 3.

* KV cache uint8 [pages, 2 * kv_heads, 128, 72]; the two runs of a head are one page of 18432 bytes: K codes 8192,
  V codes 8192, scales 2048 (four groups of 32 tokens, 32 lanes of 16 bytes each).
* Index cache uint8 [pages, 128, 72]: codes 8192 as K, scales 1024 (two groups of 64 tokens).

With lane = 4 g + t,

* K: token row of 64 bytes at ``64 * token``, halves (t, u, j, h) with d = 64 u + 16 t + 8 j + 2 q + h,
* V: tile of 8 tokens, lane (g = d // 16, t = token % 8 // 2), halves (iq, token & 1) with d = 16 g + 4 iq + q,
* scales of K: lane (g = token % 8, t = block % 4), byte 2 * tile + block // 4,
* scales of V: lane (g = block, t = token % 8 // 2), byte 8 + 2 * tile + (token & 1); tiles count within their group.

Any token may be written alone. The quantizer is that of :mod:`mmcompile.core.formats.nvfp4_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.core.formats import nvfp4
from mmcompile.core.formats.nvfp4_cache import dequantize_rows, quantize_rows, row_bytes

PAGE_SIZE, HEAD_DIM = 128, 128
_CODES = PAGE_SIZE * HEAD_DIM // 2
_SIGN_BITS = (15, 12, 14, 13)
_MAGNITUDE_BITS = (9, 6, 3, 0)


def pack_halves(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., 4] to little-endian halves, uint8 [..., 2]."""
    half = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for q, (sign, magnitude) in enumerate(zip(_SIGN_BITS, _MAGNITUDE_BITS, strict=True)):
        code = codes[..., q].int()
        half |= ((code >> 3) << sign) | ((code & 7) << magnitude)
    return torch.stack([half & 0xFF, half >> 8], dim=-1).to(torch.uint8)


def unpack_halves(halves: Tensor) -> Tensor:
    """Inverse of :func:`pack_halves`: uint8 [..., 2] to codes uint8 [..., 4]."""
    half = halves[..., 0].int() | (halves[..., 1].int() << 8)
    codes = [
        ((half >> sign & 1) << 3) | (half >> magnitude & 7)
        for sign, magnitude in zip(_SIGN_BITS, _MAGNITUDE_BITS, strict=True)
    ]
    return torch.stack(codes, dim=-1).to(torch.uint8)


def insert_kv(cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Quantize new tokens k, v [tokens, kv_heads, 128] into the cache in place; negative slots are skipped.

    Raises ValueError for another shape. Global scales are 1.
    """
    _check(cache, 4)
    if k.shape != v.shape or k.shape[1:] != (cache.shape[1] // 2, HEAD_DIM):
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} do not fit the cache {list(cache.shape)}")
    kept = slot_mapping >= 0
    pages = cache.view(cache.shape[0], k.shape[1], -1)
    for side, rows in enumerate((k, v)):
        _write(pages, rows[kept], slot_mapping[kept], side, index=False)


def read_kv(cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Decode whole pages int64 [n]: k, v fp32 [n * 128, kv_heads, 128]."""
    _check(cache, 4)
    taken = cache[pages].view(len(pages), cache.shape[1] // 2, -1)
    return _read(taken, 0, index=False), _read(taken, 1, index=False)


def insert_index(cache: Tensor, index_k: Tensor, slot_mapping: Tensor) -> None:
    """Quantize new index keys [tokens, 128] into the cache; as :func:`insert_kv`."""
    _check(cache, 3)
    kept = slot_mapping >= 0
    _write(cache.view(cache.shape[0], 1, -1), index_k[kept, None], slot_mapping[kept], 0, index=True)


def read_index(cache: Tensor, pages: Tensor) -> Tensor:
    """Decode whole pages of the index cache: fp32 [n * 128, 128]."""
    _check(cache, 3)
    return _read(cache[pages].view(len(pages), 1, -1), 0, index=True)[:, 0]


def _check(cache: Tensor, dimensions: int) -> None:
    shape = (PAGE_SIZE, row_bytes(HEAD_DIM))
    if cache.dtype != torch.uint8 or cache.ndim != dimensions or cache.shape[-2:] != shape or not cache.is_contiguous():
        raise ValueError(
            f"an sm90 cache must be contiguous uint8 [..., 128, 72], got {cache.dtype} {list(cache.shape)}"
        )
    if dimensions == 4 and cache.shape[1] % 2:
        raise ValueError(f"a KV cache needs two runs a head, got {cache.shape[1]}")


def _locate_codes(tokens: Tensor, side: int) -> Tensor:
    """Byte offsets in the page, int64 [tokens, 64], of a row's halves in the order of :func:`_arrange`."""
    tile, place = tokens[:, None] // 8, tokens[:, None] % 8
    half = torch.arange(HEAD_DIM // 4, device=tokens.device)
    if side == 0:
        start = tokens[:, None] * 64 + half * 2
    else:
        start = _CODES + tile * 512 + ((half // 4 * 4 + place // 2) * 8 + half % 4 * 2 + place % 2) * 2
    return torch.stack([start, start + 1], dim=-1).flatten(1)


def _locate_scales(tokens: Tensor, side: int, index: bool) -> Tensor:
    """Byte offsets in the page, int64 [tokens, 8], of a row's scales in the order of their blocks."""
    block = torch.arange(HEAD_DIM // nvfp4.BLOCK, device=tokens.device)
    tiles = 8 if index else 4
    tile, place = tokens[:, None] // 8, tokens[:, None] % 8
    group = (_CODES if index else 2 * _CODES) + tile // tiles * 512
    if side == 0:
        return group + (place * 4 + block % 4) * 16 + tile % tiles * 2 + block // 4
    return group + (block * 4 + place // 2) * 16 + 8 + tile % tiles * 2 + place % 2


def _arrange(codes: Tensor, side: int) -> Tensor:
    """Codes [..., 128] as [..., 32, 4]: the halves of a row in their order."""
    if side == 1:
        return codes.reshape(*codes.shape[:-1], 32, 4)
    split = codes.reshape(*codes.shape[:-1], 2, 4, 2, 4, 2)  # u t j q h
    last = split.ndim
    return split.permute(*range(last - 5), last - 4, last - 5, last - 3, last - 1, last - 2).flatten(-5, -2)


def _restore(halves: Tensor, side: int) -> Tensor:
    """Inverse of :func:`_arrange`."""
    if side == 1:
        return halves.flatten(-2)
    split = halves.reshape(*halves.shape[:-2], 4, 2, 2, 2, 4)  # t u j h q
    last = split.ndim
    return split.permute(*range(last - 5), last - 4, last - 5, last - 3, last - 1, last - 2).flatten(-5)


def _write(pages: Tensor, rows: Tensor, slots: Tensor, side: int, *, index: bool) -> None:
    """Write rows [tokens, heads, 128] into pages uint8 [pages, heads, bytes], a view of the cache."""
    packed, scale = quantize_rows(rows)
    halves = pack_halves(_arrange(nvfp4.unpack_codes(packed), side)).flatten(-2)
    page, place = slots // PAGE_SIZE, slots % PAGE_SIZE
    heads = torch.arange(pages.shape[1], device=pages.device)
    where = (page[:, None, None], heads[None, :, None])
    pages[(*where, _locate_codes(place, side)[:, None])] = halves
    pages[(*where, _locate_scales(place, side, index)[:, None])] = scale.view(torch.uint8)


def _read(pages: Tensor, side: int, *, index: bool) -> Tensor:
    """Decode pages uint8 [n, heads, bytes] to fp32 [n * 128, heads, 128]."""
    tokens = torch.arange(PAGE_SIZE, device=pages.device)
    halves = pages[..., _locate_codes(tokens, side).view(PAGE_SIZE, -1, 2)]
    packed = nvfp4.pack_codes(_restore(unpack_halves(halves), side))
    scale = pages[..., _locate_scales(tokens, side, index)].contiguous().view(torch.float8_e4m3fn)
    return dequantize_rows(packed, scale).transpose(1, 2).flatten(0, 1)
