"""NVFP4 caches in the verification of kernels: pages of random rows, and comparison row by row instead of by byte."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmcompile.core.formats import cache_pages, nvfp4_cache
from mmcompile.core.plan import Buffer, Launch

INSERTIONS = ("mm.insert_kv", "mm.insert_index")
"""Operations that store values as they come: their bytes are exactly the quantizer's."""
BOUND = 2.0**-3
"""Largest relative error of rows that were computed before they were quantized.

What differs in the last bits before rounding may fall on the other side of a code or a scale. A value does with a
chance of about 2^-8 times its ratio to the step, by a step of up to a third of the largest: about 2^-5 in all.
"""


def find_layout(launch: Launch, name: str) -> str:
    """The layout that a launch gives its input ``name``: the tag of an NVFP4 cache, "linear" for anything else."""
    attribute = cache_pages.list_layouts(launch.inputs, launch.attributes).get(name)
    return cache_pages.PLAIN if attribute is None else str(launch.attributes[attribute])


def holds_pages(buffer: Buffer) -> bool:
    """True for a buffer of NVFP4 pages, whose bytes are numbers though its dtype is an integer."""
    return buffer.role == "state" and buffer.layout != cache_pages.PLAIN


def fill_pages(cache: Tensor, layout: str, slots: Tensor, generator: torch.Generator) -> None:
    """Quantize random rows into ``slots`` of a KV cache [pages, 2 * kv_heads, ...] or an index cache [pages, ...]."""
    d = nvfp4_cache.head_dim_of(cache)
    if cache.dim() == 3:
        cache_pages.insert_index(cache, layout, torch.randn((len(slots), d), generator=generator), slots)
    else:
        rows = torch.randn((2, len(slots), cache.shape[1] // 2, d), generator=generator)
        cache_pages.insert_kv(cache, layout, rows[0], rows[1], slots)


def find_written(like: Tensor, layout: str, slots: Tensor) -> Tensor:
    """The bytes of a cache that hold the rows of ``slots``, as a mask of its shape: those that insertion determines."""
    backgrounds = torch.zeros_like(like), torch.full_like(like, 0xFF)
    for pages in backgrounds:
        fill_pages(pages, layout, slots, torch.Generator().manual_seed(0))
    return backgrounds[0] == backgrounds[1]


def read_rows(cache: Tensor, layout: str, slots: Tensor) -> Tensor:
    """The decoded rows of ``slots``, fp32: [slots, kv_heads, 2 d] of a KV cache, [slots, d] of an index cache."""
    pages = torch.arange(len(cache))
    if cache.dim() == 3:
        return cache_pages.read_index(cache, layout, pages)[slots]
    return torch.cat(cache_pages.read_kv(cache, layout, pages), dim=-1)[slots]


def kept_slots(inputs: Mapping[str, Tensor]) -> Tensor:
    """The slots that an insertion writes."""
    slots = inputs["slot_mapping"]
    return slots[slots >= 0].long()
