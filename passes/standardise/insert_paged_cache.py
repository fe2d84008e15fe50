"""attention(q, k, v)  ->  insert_kv(k, v, cache); paged_attention(q, cache, ...)     one sequence becomes a batch."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import full_arguments, infer_meta, source_of
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.core.plan import DECODER_INPUTS
from mmcompile.core.symbols import new_symbolic_tensor
from mmcompile.passes.standardise._caches import add_kv_cache, check_cache_dtype

DESCRIPTION = "give every attention a paged KV cache and take batches of sequences"
EFFECT = "bitwise"
_MM = torch.ops.mm


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Rewrite every mm.attention; add the inputs of core.plan.DECODER_INPUTS and one kv_cache_<i> an attention.

    Valid because every other operation of a standardised decoder works token by token: positions come in as data, so
    the tokens of several sequences may lie one after the other. ``context.cache_dtype`` "auto" takes the model's;
    "nvfp4" makes uint8 pages in the layout "nvfp4.linear", which stands for that of the target.
    """
    graph = graph_module.graph
    check_cache_dtype(context.cache_dtype)
    attentions = list(graph.find_nodes(op="call_function", target=_MM.attention.default))
    if not attentions and not graph.find_nodes(op="call_function", target=_MM.block_sparse_attention.default):
        raise LoweringError(
            "the graph has no attention to cache", fix="see the near misses of match_attention, or build it as a module"
        )
    result = PassResult()
    inputs = _add_inputs(graph_module)
    for index, node in enumerate(attentions):
        q, k, v, scale, window = full_arguments(node).values()
        cache, layout = add_kv_cache(graph_module, index, node, k, context, result)
        with graph.inserting_before(node):
            insert = graph.call_function(_MM.insert_kv.default, (k, v, cache, inputs["slot_mapping"], layout))
            table, lengths, starts = (inputs[n] for n in ("block_table", "seq_lens", "query_start"))
            arguments = q, cache, table, lengths, starts, scale, window, layout
            paged = graph.call_function(_MM.paged_attention.default, arguments)
        infer_meta(graph_module, [insert, paged])
        for new in (insert, paged):
            new.meta["source"] = source_of(node)
        node.replace_all_uses_with(paged)
        graph.erase_node(node)
        result.matches.append(Match("insert_paged_cache", (node.name,), (insert.name, paged.name), source_of(node)))
    context.info["kv_layers"] = len(attentions)
    return result


def _add_inputs(graph_module: fx.GraphModule) -> dict[str, fx.Node]:
    """Placeholders of DECODER_INPUTS in their order; integer inputs become int32, readers outside mm:: get a cast."""
    graph = graph_module.graph
    old = {str(n.target): n for n in graph.nodes if n.op == "placeholder"}
    first = next(iter(graph.nodes))
    made: dict[str, fx.Node] = {}
    for name, (shape, dtype) in DECODER_INPUTS.items():
        with graph.inserting_before(first):
            made[name] = graph.placeholder(f"{name}_" if name in old else name)
        made[name].meta["val"] = new_symbolic_tensor(graph_module, shape, getattr(torch, dtype))
    for name, node in old.items():
        if name not in made:
            raise LoweringError(f"a decoder has the inputs input_ids and positions, this graph also has {name}")
        _replace_input(graph_module, node, made[name])
        graph.erase_node(node)
        made[name].target = made[name].name = name
    return made


def _replace_input(graph_module: fx.GraphModule, old: fx.Node, new: fx.Node) -> None:
    own = {_MM.embedding.default, _MM.rope.default}
    others = [u for u in old.users if u.target not in own]
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user.target in own)
    if others:
        with graph_module.graph.inserting_before(min(others)):
            cast = graph_module.graph.call_function(
                torch.ops.aten._to_copy.default, (new,), {"dtype": old.meta["val"].dtype}
            )
        infer_meta(graph_module, [cast])
        old.replace_all_uses_with(cast)
