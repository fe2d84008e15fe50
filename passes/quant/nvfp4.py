"""linear(x, w)  ->  linear_nvfp4(x, quantize(w))     NVFP4 weights."""

from __future__ import annotations

import operator
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import fx

from mmcompile.core.errors import UsageError, unknown_name
from mmcompile.core.graph import full_arguments, infer_meta, set_parameter, source_of
from mmcompile.core.passes import Match, PassContext, PassResult

DESCRIPTION = "quantize linear weights to NVFP4: e2m1 values, e4m3 scale per 16, fp32 global scale"
EFFECT = "quantizing"
_MM = torch.ops.mm
BLOCK = 16


class Options(BaseModel):
    """Options of the scheme.

    ``method``: how block scales are chosen (core.formats.nvfp4.encode). ``lm_head``: quantize the output projection
    too. ``exclude``: shell patterns over parameter names that stay as they are. ``activations``: "nvfp4" quantizes what
    the layers read as well, each token on its own (W4A4; passes/layout/quantize_activations.py).
    """

    model_config = ConfigDict(extra="forbid")
    method: Literal["max6", "search"] = "max6"
    lm_head: bool = False
    exclude: tuple[str, ...] = ()
    activations: Literal["bf16", "nvfp4"] = "bf16"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Quantize every linear layer whose weight is a parameter, or say why not, in ``context.info["layers"]``.

    With ``context.quantization`` "none" only the layers that the checkpoint stores in NVFP4 are taken over.
    """
    options = parse_options(context.quantization_options)
    result = PassResult()
    layers: dict[str, str] = context.info.setdefault("layers", {})
    heads = _feeding_output(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target not in (_MM.linear.default, _MM.embedding.default):
            continue
        weight = full_arguments(node)["weight"]
        name = str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        reason = _refuse(node, weight, name, options, heads, context)
        if name and layers.get(name) != "nvfp4":
            layers[name] = reason or "nvfp4"
        if reason is None:
            result.matches.append(_quantize(graph_module, node, name, options, context))
    for pattern in options.exclude:
        if not any(fnmatch(name, pattern) for name in layers):
            raise unknown_name("layer to exclude", pattern, layers)
    result.notes = [f"{name}: {outcome}" for name, outcome in layers.items() if outcome != "nvfp4"]
    return result


def parse_options(given: dict[str, Any]) -> Options:
    """Check the options of the scheme; UsageError for an unknown one or a wrong value."""
    try:
        return Options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise unknown_name("option of nvfp4", name, Options.model_fields) from None
        raise UsageError(f"the option {name} of nvfp4 cannot be {first['input']!r}", fix=first["msg"]) from None


def _refuse(
    node: fx.Node, weight: Any, name: str, options: Options, heads: set[fx.Node], context: PassContext
) -> str | None:
    if node.target == _MM.embedding.default:
        return "an embedding table is read one row a token; quantizing it saves no bandwidth"
    if not name:
        return "the weight is computed, not a parameter"
    if any(fnmatch(name, pattern) for pattern in options.exclude):
        return "excluded by option"
    if _module_path(name) in context.checkpoint_nvfp4:
        return None
    if context.quantization == "none":
        return "the checkpoint stores it unquantized, and no quantization was asked for"
    if node in heads and not options.lm_head:
        return "the output projection decides the token; quantize it with --quant-option lm_head=true"
    if weight.meta["val"].shape[1] % BLOCK:
        return f"its {weight.meta['val'].shape[1]} input features are no multiple of {BLOCK}"
    return None


def _module_path(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _feeding_output(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Linear nodes whose value is a result of the graph, but for pointwise steps: the lm_head of a decoder."""
    heads: set[fx.Node] = set()
    frontier = list(graph_module.graph.find_nodes(op="output"))
    while frontier:
        for node in frontier.pop().all_input_nodes:
            if node.target == _MM.linear.default:
                heads.add(node)
            elif torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(node.all_input_nodes) == 1:
                frontier.append(node)
    return heads


def _quantize(graph_module: fx.GraphModule, node: fx.Node, name: str, options: Options, context: PassContext) -> Match:
    """Replace the weight by its three parts: taken from the checkpoint where it holds them, else computed."""
    graph = graph_module.graph
    stored = context.checkpoint_nvfp4.get(_module_path(name))
    with graph.inserting_before(node):
        if stored is not None:
            made = []
            for suffix, tensor in zip(("packed", "scale", "global_scale"), stored, strict=True):
                set_parameter(graph_module, f"{name}_{suffix}", tensor)
                made.append(graph.get_attr(f"{name}_{suffix}"))
            parts = made
        else:
            weight = graph.get_attr(name)
            quantized = graph.call_function(_MM.nvfp4_quantize.default, (weight, options.method))
            parts = [graph.call_function(operator.getitem, (quantized, i)) for i in range(3)]
            made = [weight, quantized, *parts]
        arguments = full_arguments(node)
        epilogue = (arguments["bias"], arguments["residual"], arguments["activation"])
        linear = graph.call_function(_MM.linear_nvfp4.default, (arguments["x"], *parts, *epilogue))
    infer_meta(graph_module, [*made, linear])
    linear.meta["source"] = source_of(node)
    node.replace_all_uses_with(linear)
    graph.erase_node(node)
    return Match("quantize_nvfp4", (node.name,), (linear.name,), name)
