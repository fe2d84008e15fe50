"""linear_nvfp4(x, w)  ->  linear_w4a4(quantize(x), w)     NVFP4 activations, for the tensor cores that take them."""

from __future__ import annotations

import operator

import torch
from torch import fx

from mmcompile.core.graph import full_arguments, infer_meta, source_of
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.passes.quant.nvfp4 import parse_options

DESCRIPTION = "quantize the inputs of NVFP4 linear layers to NVFP4, each token on its own (W4A4)"
EFFECT = "quantizing"
_MM = torch.ops.mm


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Quantize the activations of every ``linear_nvfp4``; layers that read the same ones share the result.

    Does nothing unless the option ``activations`` of the scheme is "nvfp4".
    """
    result = PassResult()
    if parse_options(context.quantization_options).activations != "nvfp4":
        return result
    graph = graph_module.graph
    quantized: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_MM.linear_nvfp4.default):
        arguments = full_arguments(node)
        x = arguments.pop("x")
        with graph.inserting_before(node):
            if x not in quantized:
                whole = graph.call_function(_MM.nvfp4_quantize_activations.default, (x,))
                parts = [graph.call_function(operator.getitem, (whole, i)) for i in range(3)]
                infer_meta(graph_module, [whole, *parts])
                for made in (whole, *parts):
                    made.meta["source"] = source_of(node)
                quantized[x] = parts
            weight = [arguments.pop(name) for name in ("packed", "scale", "global_scale")]
            linear = graph.call_function(
                _MM.linear_w4a4.default, (*quantized[x], *weight, node.meta["val"].dtype), arguments
            )
        infer_meta(graph_module, [linear])
        linear.meta["source"] = source_of(node)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
        result.matches.append(Match("quantize_activations", (node.name,), (linear.name,), source_of(node)))
    return result
