"""linear(x, w)  ->  linear_nvfp4(x, quantize(w))     NVFP4 weights."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import fx

from mmcompile.core.graph import full_arguments
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes.quant._weights import (
    NVFP4,
    check_exclusions,
    find_heads,
    name_module,
    name_weight,
    quantize_linear,
    read_options,
)

DESCRIPTION = "quantize linear weights to NVFP4: e2m1 values, e4m3 scale per 16, fp32 global scale"
EFFECT = "quantizing"
_MM = torch.ops.mm


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
    heads = find_heads(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target not in (_MM.linear.default, _MM.embedding.default):
            continue
        weight = full_arguments(node)["weight"]
        name = name_weight(weight)
        reason = _refuse(node, weight, name, options, heads, context)
        if name and layers.get(name) != "nvfp4":
            layers[name] = reason or "nvfp4"
        if reason is None:
            stored = context.checkpoint_nvfp4.get(name_module(name))
            result.matches.append(quantize_linear(graph_module, node, NVFP4, options.method, stored))
    check_exclusions(options.exclude, layers)
    result.notes = [f"{name}: {outcome}" for name, outcome in layers.items() if outcome != "nvfp4"]
    return result


def parse_options(given: dict[str, Any]) -> Options:
    """Check the options of the scheme; UsageError for an unknown one or a wrong value."""
    return read_options(Options, "nvfp4", given)


def _refuse(
    node: fx.Node, weight: Any, name: str, options: Options, heads: set[fx.Node], context: PassContext
) -> str | None:
    if node.target == _MM.embedding.default:
        return "an embedding table is read one row a token; quantizing it saves no bandwidth"
    if not name:
        return "the weight is computed, not a parameter"
    if any(fnmatch(name, pattern) for pattern in options.exclude):
        return "excluded by option"
    if name_module(name) in context.checkpoint_nvfp4:
        return None
    if context.quantization == "none":
        return "the checkpoint stores it unquantized, and no quantization was asked for"
    if node in heads and not options.lm_head:
        return "the output projection decides the token; quantize it with --quant-option lm_head=true"
    if weight.meta["val"].shape[1] % NVFP4.block:
        return f"its {weight.meta['val'].shape[1]} input features are no multiple of {NVFP4.block}"
    return None
