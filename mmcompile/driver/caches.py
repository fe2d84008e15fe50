"""The manifest's record of the paged caches, read off the buffers of every target's plan."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mmcompile.core.formats import cache_pages, nvfp4_cache
from mmcompile.core.plan import Buffer, CacheSpec, Plan


def describe_cache(plans: Mapping[str, Plan]) -> CacheSpec:
    """What the caches hold and take; they differ between targets in nothing but their layouts."""
    caches = [b for b in next(iter(plans.values())).buffers.values() if b.role == "state"]
    main = [b for b in caches if len(b.shape) == 4]
    index = [b for b in caches if len(b.shape) == 3]
    quantized = main[0].layout != cache_pages.PLAIN
    return CacheSpec(
        page_size=int(main[0].shape[2]),
        dtype="nvfp4" if quantized else main[0].dtype,
        layers=len(main),
        bytes_per_token=sum(map(_count_token_bytes, caches)),
        kv_bytes=_count_token_bytes(main[0]),
        index_bytes=_count_token_bytes(index[0]) if index else 0,
        quantizer=nvfp4_cache.QUANTIZER if quantized else "",
        layouts={target: _list_layouts(plan) for target, plan in sorted(plans.items())},
    )


def _count_token_bytes(cache: Buffer) -> int:
    """Bytes of one token in one cache; a page holds as many of them as tokens, whatever their order."""
    page = math.prod(int(n) for n in cache.shape[1:]) * getattr(torch, cache.dtype).itemsize
    return int(page // int(cache.shape[-2]))


def _list_layouts(plan: Plan) -> tuple[str, ...]:
    """Tags of a target's caches, those of KV pages first."""
    states = sorted((b for b in plan.buffers.values() if b.role == "state"), key=lambda b: -len(b.shape))
    return tuple(dict.fromkeys(b.layout for b in states))
