"""A decoder's graph over a paged cache as one over its sequence alone: attention reads keys and values again."""

from __future__ import annotations

import operator

import torch
from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import full_arguments, infer_meta, operation_name, source_of
from mmcompile.core.runner import eliminate_dead_code

# The passes that serve the paged cache of the runtime.
PAGED = ("insert_paged_cache", "insert_sparse_cache", "gather_last_token", "append_sampler")
_MM = torch.ops.mm
_ATEN = torch.ops.aten


def remove_paged_cache(graph_module: fx.GraphModule) -> None:
    """Undo PAGED in a finished graph, in place.

    The result maps input_ids and positions int64 [tokens] of one sequence to the logits of every token, by
    ``mm.attention``. A cache of another dtype stays a rounding of keys and values. Raises LoweringError for an
    operation that has no meaning without pages.
    """
    graph = graph_module.graph
    cached: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.op == "call_function" and full_arguments(node).get("layout", "linear") != "linear":
                raise _refuse(node, "packs its cache")
            if node.target == _MM.insert_kv.default:
                k, v, cache = node.args[:3]
                cached[cache] = tuple(_round(graph, cache, x, k.meta["val"].dtype) for x in (k, v))
                graph.erase_node(node)
            elif node.target == _MM.qk_norm_rope_insert.default:
                _take_apart(graph, node, cached)
            elif node.target == _MM.paged_attention.default:
                a = full_arguments(node)
                k, v = cached[a["kv_cache"]]
                call = graph.call_function(_MM.attention.default, (a["q"], k, v, a["scale"], a["window"]))
                _replace(node, call)
            elif node.target == _MM.gather_last.default:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    output.args = (output.args[0][0],)
    eliminate_dead_code(graph_module)
    _keep_inputs(graph_module)
    infer_meta(graph_module, [n for n in graph.nodes if n.op == "call_function"])
    graph_module.recompile()


def _take_apart(graph: fx.Graph, node: fx.Node, cached: dict[fx.Node, tuple[fx.Node, ...]]) -> None:
    """``mm.qk_norm_rope_insert`` as a split, norms and rotations."""
    a = full_arguments(node)
    heads, kv_heads, width = a["num_heads"], a["num_kv_heads"], a["head_dim"]
    counts = [heads, kv_heads, kv_heads]
    split = graph.call_function(_ATEN.split_with_sizes.default, (a["qkv"], [n * width for n in counts], -1))
    q, k, v = (
        graph.call_function(
            _ATEN.reshape.default, (graph.call_function(operator.getitem, (split, i)), [-1, count, width])
        )
        for i, count in enumerate(counts)
    )
    norm = a["eps"], a["weight_offset"], a["round_before_scale"]
    if a["q_weight"] is not None:
        q = graph.call_function(_MM.rms_norm.default, (q, a["q_weight"], *norm))
    if a["k_weight"] is not None:
        k = graph.call_function(_MM.rms_norm.default, (k, a["k_weight"], *norm))
    q, k = (graph.call_function(_MM.rope.default, (x, a["positions"], a["cos_sin"])) for x in (q, k))
    cached[a["kv_cache"]] = tuple(_round(graph, a["kv_cache"], x, a["qkv"].meta["val"].dtype) for x in (k, v))
    _replace(node, q)


def _round(graph: fx.Graph, cache: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What the cache gives back of ``x``, as ``dtype``; ``x`` itself for a cache of that dtype."""
    stored = cache.meta["val"].dtype
    if stored == dtype:
        return x
    if stored == torch.float8_e4m3fn:
        x = graph.call_function(_ATEN.clamp.default, (x, -448.0, 448.0))
    return graph.call_function(_ATEN.to.dtype, (graph.call_function(_ATEN.to.dtype, (x, stored)), dtype))


def _replace(node: fx.Node, new: fx.Node) -> None:
    new.meta["source"] = source_of(node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _keep_inputs(graph_module: fx.GraphModule) -> None:
    """Only input_ids and positions stay, as int64."""
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if node.target in ("input_ids", "positions"):
            with graph_module.meta["fake_mode"]:
                node.meta["val"] = node.meta["val"].to(torch.int64)
            continue
        if node.users:
            user = min(node.users)
            raise _refuse(user, f"reads {node.target}")
        graph_module.graph.erase_node(node)


def _refuse(node: fx.Node, what: str) -> LoweringError:
    return LoweringError(
        f"{operation_name(node.target)} {what}, which has no meaning without the runtime's pages",
        where=", ".join(filter(None, (f"node {node.name}", source_of(node)))),
        fix="export the model itself instead of the artifact",
    )
