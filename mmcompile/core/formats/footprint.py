"""Bytes of weights in a checkpoint and of one token in a cache, counted from shapes and formats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from mmcompile.core.formats import mxfp8, nvfp4, nvfp4_cache

Format = Literal["fp32", "bf16", "mxfp8", "nvfp4"]
CacheFormat = Literal["bf16", "fp8", "nvfp4"]

_PLAIN_BYTES = {"fp32": 4, "bf16": 2}
# Global scale and input scale of an NVFP4 matrix, fp32 each.
_NVFP4_SCALARS = 8


class Weight(NamedTuple):
    """One weight: its name, its shape and the format that it is stored in."""

    name: str
    shape: tuple[int, ...]
    format: Format


def count_weight_bytes(shape: tuple[int, ...], form: Format | str) -> int:
    """Bytes of the tensors that hold a weight [..., n, k] in ``form``, scales included.

    "mxfp8": a byte an element and one every 32. "nvfp4": half a byte and one every 16, and for each matrix of a stack
    the global scale and the input scale. Raises ValueError for an unknown format or a k that its block does not divide.
    """
    if form not in get_args(Format):
        raise ValueError(f"format must be one of {get_args(Format)}, got {form!r}")
    elements = math.prod(shape)
    if form in _PLAIN_BYTES:
        return elements * _PLAIN_BYTES[form]
    block = mxfp8.BLOCK if form == "mxfp8" else nvfp4.BLOCK
    if len(shape) < 2 or shape[-1] % block:
        raise ValueError(f"{form} needs a matrix whose last dimension is a multiple of {block}, got {shape}")
    if form == "mxfp8":
        return elements + elements // block
    return elements // 2 + elements // block + _NVFP4_SCALARS * math.prod(shape[:-2])


def count_checkpoint_bytes(weights: Iterable[Weight]) -> dict[str, int]:
    """Bytes by format and their "total", for the weights of a model; file headers (about 0.01 %) are not counted."""
    counted: dict[str, int] = {}
    for weight in weights:
        counted[weight.format] = counted.get(weight.format, 0) + count_weight_bytes(weight.shape, weight.format)
    return {**counted, "total": sum(counted.values())}


def count_cache_bytes(kv_heads: int, head_dim: int, form: CacheFormat | str) -> int:
    """Bytes of K and V of one token in one layer: 4 heads of 128 take 2048 in bf16, 1024 in fp8, 576 in NVFP4."""
    return 2 * kv_heads * _count_row_bytes(head_dim, form)


def count_index_bytes(head_dim: int, form: CacheFormat | str) -> int:
    """Bytes of the index key of one token in one layer: 256, 128 and 72 for a head of 128."""
    return _count_row_bytes(head_dim, form)


def _count_row_bytes(head_dim: int, form: str) -> int:
    if form not in get_args(CacheFormat):
        raise ValueError(f"cache format must be one of {get_args(CacheFormat)}, got {form!r}")
    if form == "nvfp4":
        return nvfp4_cache.row_bytes(head_dim)
    return head_dim * (2 if form == "bf16" else 1)
