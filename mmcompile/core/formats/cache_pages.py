"""Rows of the paged caches in every layout: plain ones of a dtype ("linear"), and NVFP4 by the tag of its bytes.

A cache's layout is an attribute of each operation that touches it (see :func:`list_layouts`) and the tag of its buffer.
"linear" is a row of elements: KV cache [pages, kv_heads, page_size, 2 d], K then V; index keys [pages, page_size, d].
Every other tag is one of :mod:`mmcompile.core.formats.nvfp4_cache`, and the cache is uint8 as described there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.formats import nvfp4_cache, nvfp4_cache_sm90

PLAIN = "linear"
_E4M3_MAX = 448.0
# Operands that are caches, with the attributes that may hold their layout, the more special one first.
CACHES = {"kv_cache": ("layout",), "index_cache": ("index_layout", "layout")}


def list_layouts(inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, str]:
    """The attribute that holds the layout of each cache among the inputs of an operation, by input name."""
    found: dict[str, str] = {}
    for name, spellings in CACHES.items():
        known = [attribute for attribute in spellings if attribute in attributes]
        if known and inputs.get(name) is not None:
            found[name] = known[0]
    return found


def check_cache(cache: Tensor, layout: str, head_dim: int, sides: int) -> None:
    """Raise ValueError unless dtype and shape are those of pages of ``layout`` with heads of ``head_dim``.

    sides: 2 for K and V, 1 for index keys. UsageError for a layout that is none. Looks at no values.
    """
    if layout == PLAIN:
        if cache.dtype == torch.uint8 or cache.shape[-1] != sides * head_dim:
            raise ValueError(
                f"a cache in the layout {PLAIN!r} has rows of {sides * head_dim} floats, "
                f"this one has {cache.shape[-1]} of {cache.dtype}"
            )
        return
    form = nvfp4_cache.get_layout(layout)
    width, page_size = nvfp4_cache.row_bytes(head_dim), int(cache.shape[-2])
    if form.sides != sides:
        raise ValueError(f"the layout {layout!r} is not one of {'a KV' if sides == 2 else 'an index-key'} cache")
    if cache.dtype != torch.uint8 or cache.shape[-1] != width or (sides == 2 and cache.shape[1] % 2):
        raise ValueError(
            f"a cache in the layout {layout!r} has rows of {width} bytes and two runs a head, "
            f"this one is {cache.dtype} {list(cache.shape)}"
        )
    if not form.fits(head_dim, page_size):
        raise ValueError(f"the layout {layout!r} has no pages of {page_size} tokens of heads of {head_dim}")


def count_kv_heads(cache: Tensor, layout: str) -> int:
    """KV heads of a KV cache: NVFP4 has two runs a head."""
    return int(cache.shape[1]) if layout == PLAIN else int(cache.shape[1]) // 2


def insert_kv(cache: Tensor, layout: str, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [tokens, kv_heads, d] into the KV cache, in place.

    slot_mapping: int64 [tokens], ``page * page_size + place``; negative slots are skipped. float8_e4m3fn saturates;
    NVFP4 is quantized by ``nvfp4_cache.quantize_rows`` with global scales of 1.
    """
    check_cache(cache, layout, k.shape[-1], sides=2)
    if layout == PLAIN:
        _write_plain(cache.transpose(1, 2), torch.cat([k, v], dim=-1), slot_mapping)
    elif layout == nvfp4_cache.SM90:
        nvfp4_cache_sm90.insert_kv(cache, k, v, slot_mapping)
    else:
        nvfp4_cache.insert_kv(cache, layout, k, v, slot_mapping)


def insert_index(cache: Tensor, layout: str, index_k: Tensor, slot_mapping: Tensor) -> None:
    """Write index keys [tokens, d] into the index cache, in place; as :func:`insert_kv`."""
    check_cache(cache, layout, index_k.shape[-1], sides=1)
    if layout == PLAIN:
        _write_plain(cache, index_k, slot_mapping)
    elif layout == nvfp4_cache.SM90_INDEX:
        nvfp4_cache_sm90.insert_index(cache, index_k, slot_mapping)
    else:
        nvfp4_cache.insert_index(cache, layout, index_k, slot_mapping)


def read_kv(cache: Tensor, layout: str, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [n * page_size, kv_heads, d] of the pages int64 [n]: of the cache's dtype, or decoded exactly to fp32."""
    if layout == PLAIN:
        d = cache.shape[-1] // 2
        rows = cache[pages].transpose(1, 2).reshape(-1, cache.shape[1], 2 * d)
        return rows[..., :d], rows[..., d:]
    check_cache(cache, layout, nvfp4_cache.head_dim_of(cache), sides=2)
    if layout == nvfp4_cache.SM90:
        return nvfp4_cache_sm90.read_kv(cache, pages)
    return nvfp4_cache.read_kv(cache, layout, pages)


def read_index(cache: Tensor, layout: str, pages: Tensor) -> Tensor:
    """Index keys [n * page_size, d] of the pages int64 [n]; as :func:`read_kv`."""
    if layout == PLAIN:
        return cache[pages].reshape(-1, cache.shape[-1])
    check_cache(cache, layout, nvfp4_cache.head_dim_of(cache), sides=1)
    if layout == nvfp4_cache.SM90_INDEX:
        return nvfp4_cache_sm90.read_index(cache, pages)
    return nvfp4_cache.read_index(cache, layout, pages)


def _write_plain(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Write rows [tokens, ...] into cache [pages, page_size, ...]."""
    page_size = cache.shape[1]
    keep = slot_mapping >= 0
    slots = slot_mapping
    if not bool(keep.all()):
        slots, rows = slot_mapping[keep], rows[keep]
    if cache.dtype == torch.float8_e4m3fn:
        rows = rows.float().clamp(-_E4M3_MAX, _E4M3_MAX)
    cache[slots // page_size, slots % page_size] = rows.to(cache.dtype)
