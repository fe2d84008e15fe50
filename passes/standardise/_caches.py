"""Placeholders of paged caches in the format that the build asks for: a dtype, or NVFP4 pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from mmcompile.core.errors import LoweringError, unknown_name
from mmcompile.core.formats import cache_pages, nvfp4, nvfp4_cache
from mmcompile.core.graph import source_of
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.core.symbols import new_symbolic_tensor

NVFP4 = "nvfp4"
_DTYPES = {d: getattr(torch, d) for d in ("bfloat16", "float16", "float32", "float8_e4m3fn")}
CACHE_DTYPES = ("auto", *_DTYPES, NVFP4)


class Cache(NamedTuple):
    """The placeholder of a cache, and the layout that operations on it name."""

    node: fx.Node
    layout: str


def check_cache_dtype(name: str) -> None:
    """Raise UsageError unless ``name`` is one of CACHE_DTYPES."""
    if name not in CACHE_DTYPES:
        raise unknown_name("cache dtype", name, CACHE_DTYPES)


def add_kv_cache(
    graph_module: fx.GraphModule, index: int, attention: fx.Node, k: fx.Node, context: PassContext, result: PassResult
) -> Cache:
    """Add ``kv_cache_<index>`` for an attention over ``k`` [tokens, kv_heads, d]; note a cache that quantizes.

    Raises LoweringError if NVFP4 pages cannot hold such heads.
    """
    kv_heads, d = (int(n) for n in k.meta["val"].shape[1:])
    name = f"kv_cache_{index}"
    if context.cache_dtype == NVFP4:
        _check_nvfp4(attention, d, context.page_size)
        shape = (2 * kv_heads, context.page_size, nvfp4_cache.row_bytes(d))
        return _add_nvfp4(graph_module, name, shape, nvfp4_cache.LINEAR, result)
    return _add_plain(graph_module, name, (kv_heads, context.page_size, 2 * d), k, context, result)


def add_index_cache(
    graph_module: fx.GraphModule, index: int, score: fx.Node, index_k: fx.Node, context: PassContext, result: PassResult
) -> Cache:
    """Add ``kv_cache_<index>_index`` for an indexer with keys ``index_k`` [tokens, d]; as :func:`add_kv_cache`."""
    d, name = int(index_k.meta["val"].shape[1]), f"kv_cache_{index}_index"
    if context.cache_dtype == NVFP4:
        _check_nvfp4(score, d, context.page_size)
        shape = (context.page_size, nvfp4_cache.row_bytes(d))
        return _add_nvfp4(graph_module, name, shape, nvfp4_cache.INDEX, result)
    return _add_plain(graph_module, name, (context.page_size, d), index_k, context, result)


def add_placeholder(graph_module: fx.GraphModule, name: str, value: torch.Tensor) -> fx.Node:
    """A placeholder after the last one."""
    graph = graph_module.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _check_nvfp4(node: fx.Node, head_dim: int, page_size: int) -> None:
    if head_dim % nvfp4.BLOCK:
        raise LoweringError(
            f"an NVFP4 cache needs a head_dim that is a multiple of {nvfp4.BLOCK}, here it is {head_dim}",
            where=source_of(node),
            fix="choose another cache dtype, e.g. float8_e4m3fn",
        )
    if page_size % nvfp4_cache.QUAD:
        raise LoweringError(
            f"an NVFP4 cache needs pages of a multiple of {nvfp4_cache.QUAD} tokens, here they hold {page_size}",
            where=source_of(node),
            fix="set another page size",
        )


def _add_nvfp4(
    graph_module: fx.GraphModule, name: str, shape: tuple[int, ...], layout: str, result: PassResult
) -> Cache:
    result.effect = "quantizing"
    value = new_symbolic_tensor(graph_module, ("pages", *shape), torch.uint8)
    return Cache(add_placeholder(graph_module, name, value), layout)


def _add_plain(
    graph_module: fx.GraphModule,
    name: str,
    shape: tuple[int, ...],
    like: fx.Node,
    context: PassContext,
    result: PassResult,
) -> Cache:
    model = like.meta["val"].dtype
    dtype = model if context.cache_dtype == "auto" else _DTYPES[context.cache_dtype]
    if dtype != model:
        result.effect = "quantizing"
    value = new_symbolic_tensor(graph_module, ("pages", *shape), dtype)
    return Cache(add_placeholder(graph_module, name, value), cache_pages.PLAIN)
