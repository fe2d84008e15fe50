"""index_score, block_sparse_attention  ->  insert_index, insert_kv and their paged forms     a page is a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import full_arguments, infer_meta, source_of
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.core.plan import DECODER_INPUTS
from mmcompile.passes._edit import find_input
from mmcompile.passes.standardise import insert_paged_cache
from mmcompile.passes.standardise._caches import add_index_cache, add_kv_cache, check_cache_dtype

DESCRIPTION = "give block-sparse attention a paged KV cache, and its indexer a paged cache of index keys"
EFFECT = "bitwise"
_MM = torch.ops.mm


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Rewrite every mm.block_sparse_attention and mm.index_score, after insert_paged_cache has treated mm.attention.

    The caches of the i-th attention are ``kv_cache_<i>`` and, where it scores blocks itself, ``kv_cache_<i>_index``, of
    the shapes that insert_kv and insert_index take. Raises LoweringError if a page does not hold one block.
    """
    graph = graph_module.graph
    attentions = list(graph.find_nodes(op="call_function", target=_MM.block_sparse_attention.default))
    if not attentions:
        return PassResult()
    check_cache_dtype(context.cache_dtype)
    result = PassResult()
    if find_input(graph_module, "slot_mapping") is None:
        insert_paged_cache._add_inputs(graph_module)
    batch = {name: find_input(graph_module, name) for name in DECODER_INPUTS}
    first = context.info.get("kv_layers", 0)
    for index, node in enumerate(attentions, first):
        _check_page(node, context.page_size)
        blocks = full_arguments(node)["blocks"]
        score = full_arguments(blocks)["scores"]
        _insert_kv(graph_module, node, index, batch, context, result)
        if score.target == _MM.index_score.default:
            _insert_index(graph_module, score, index, batch, context, result)
            blocks.update_arg(1, batch["positions"])
    context.info["kv_layers"] = first + len(attentions)
    return result


def _check_page(node: fx.Node, page_size: int) -> None:
    size = full_arguments(node)["block_size"]
    if size != page_size:
        raise LoweringError(
            f"a page holds {page_size} tokens, block-sparse attention with blocks of {size} needs pages of {size}",
            where=source_of(node),
            fix=f"set the page size to {size}",
        )


def _insert_kv(
    graph_module: fx.GraphModule,
    node: fx.Node,
    index: int,
    batch: dict[str, Any],
    context: PassContext,
    result: PassResult,
) -> None:
    q, k, v, blocks, scale, _ = full_arguments(node).values()
    cache, layout = add_kv_cache(graph_module, index, node, k, context, result)
    where = batch["block_table"], batch["seq_lens"], batch["query_start"]
    calls = [
        (_MM.insert_kv.default, (k, v, cache, batch["slot_mapping"], layout)),
        (_MM.paged_block_sparse_attention.default, (q, cache, blocks, *where, scale, layout)),
    ]
    _put(graph_module, node, calls, result)


def _insert_index(
    graph_module: fx.GraphModule,
    node: fx.Node,
    index: int,
    batch: dict[str, Any],
    context: PassContext,
    result: PassResult,
) -> None:
    index_q, index_k, _ = full_arguments(node).values()
    cache, layout = add_index_cache(graph_module, index, node, index_k, context, result)
    where = batch["block_table"], batch["seq_lens"], batch["query_start"]
    calls = [
        (_MM.insert_index.default, (index_k, cache, batch["slot_mapping"], layout)),
        (_MM.paged_index_score.default, (index_q, cache, *where, layout)),
    ]
    _put(graph_module, node, calls, result)


def _put(
    graph_module: fx.GraphModule, node: fx.Node, calls: list[tuple[Any, tuple[Any, ...]]], result: PassResult
) -> None:
    """Put the calls where ``node`` stands; the last gives its value."""
    with graph_module.graph.inserting_before(node):
        made = [graph_module.graph.call_function(target, arguments) for target, arguments in calls]
    infer_meta(graph_module, made)
    for new in made:
        new.meta |= {"source": source_of(node), "nn_module_stack": node.meta.get("nn_module_stack", {})}
    node.replace_all_uses_with(made[-1])
    graph_module.graph.erase_node(node)
    names = tuple(n.name for n in made)
    result.matches.append(Match("insert_sparse_cache", (node.name,), names, source_of(node)))
