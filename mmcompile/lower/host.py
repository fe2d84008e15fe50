"""Prepare a graph for a target without kernels: NVFP4 weights are decoded once, when the artifact is loaded."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.graph import full_arguments, infer_meta, source_of

_MM = torch.ops.mm
_DENSE = {
    _MM.linear_nvfp4.default: _MM.linear.default,
    _MM.qkv_norm_rope_insert_nvfp4.default: _MM.qkv_norm_rope_insert.default,
}


def decode_weights_at_load(graph_module: fx.GraphModule) -> None:
    """linear_nvfp4(x, packed, ...) -> linear(x, nvfp4_dequantize(packed, ...)), in place.

    The decoded weight depends on weights alone, so lowering puts it into the phase "load". It is rounded to the
    activation dtype, where the reference multiplies by the global scale after the accumulation.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        dense = _DENSE.get(node.target)
        if dense is None:
            continue
        arguments = full_arguments(node)
        dtype = arguments["x"].meta["val"].dtype
        with graph.inserting_before(node):
            parts = [arguments.pop(k) for k in ("packed", "scale", "global_scale")]
            weight = graph.call_function(_MM.nvfp4_dequantize.default, (*parts, dtype))
            weight.name = f"{parts[0].name}_decoded"
            x = arguments.pop("x")
            call = graph.call_function(dense, (x, weight, *arguments.values()))
        infer_meta(graph_module, [weight, call])
        call.meta["source"] = source_of(node)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    graph_module.recompile()
