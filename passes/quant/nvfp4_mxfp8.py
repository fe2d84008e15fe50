"""moe(x, experts)  ->  moe_nvfp4(...), linear(x, w)  ->  linear_mxfp8(...)     MiniMax-M3.1's mix of formats."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import fx

from mmcompile.core.formats import WEIGHT_FORMATS
from mmcompile.core.graph import full_arguments
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.passes.quant._weights import (
    MXFP8,
    NVFP4,
    NVFP4_EXPERTS,
    WeightFormat,
    check_exclusions,
    find_heads,
    find_routers,
    make_parts,
    name_module,
    name_weight,
    quantize_linear,
    read_options,
    replace_call,
)

DESCRIPTION = "quantize experts to NVFP4 and projections to MXFP8; embedding, output projection and router stay"
EFFECT = "quantizing"
_MM = torch.ops.mm


class Options(BaseModel):
    """Options of the scheme.

    ``method``: how block scales of NVFP4 are chosen (core.formats.nvfp4.encode). ``rule``: how those of MXFP8 are
    (core.formats.mxfp8.encode). ``lm_head``: quantize the output projection too. ``exclude``: shell patterns over
    parameter names that stay as they are.
    """

    model_config = ConfigDict(extra="forbid")
    method: Literal["max6", "search"] = "max6"
    rule: Literal["ocp", "modelopt", "compressed-tensors"] = "modelopt"
    lm_head: bool = False
    exclude: tuple[str, ...] = ()


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Quantize every linear layer and every stack of experts whose weights are parameters, or say why not.

    What the checkpoint stores in NVFP4 or MXFP8 is taken over as it is, whatever the layer; with
    ``context.quantization`` "none" only that. Outcomes are in ``context.info["layers"]``: "nvfp4", "mxfp8" or a reason.
    """
    options = read_options(Options, "nvfp4_mxfp8", context.quantization_options)
    result = PassResult()
    layers: dict[str, str] = context.info.setdefault("layers", {})
    kept = dict.fromkeys(find_routers(graph_module), "the router chooses the experts, which rounding would change")
    if not options.lm_head:
        heads = dict.fromkeys(
            find_heads(graph_module),
            "the output projection decides the token; quantize it with --quant-option lm_head=true",
        )
        kept = heads | kept
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target == _MM.moe.default:
            result.matches += _quantize_experts(graph_module, node, options, layers, context)
        elif node.target == _MM.linear.default:
            result.matches += _quantize_linear(graph_module, node, options, layers, kept.get(node), context)
        elif node.target == _MM.embedding.default and (name := name_weight(full_arguments(node)["weight"])):
            reason = "an embedding table is read one row a token; quantizing it saves no bandwidth"
            layers.setdefault(name, reason)
    check_exclusions(options.exclude, layers)
    result.notes = [f"{name}: {outcome}" for name, outcome in layers.items() if outcome not in WEIGHT_FORMATS]
    return result


def _quantize_linear(
    graph_module: fx.GraphModule,
    node: fx.Node,
    options: Options,
    layers: dict[str, str],
    kept: str | None,
    context: PassContext,
) -> list[Match]:
    weight = full_arguments(node)["weight"]
    module = name_module(name_weight(weight))
    stored: Any = context.checkpoint_nvfp4.get(module)
    form = MXFP8 if stored is None else NVFP4
    stored = context.checkpoint_mxfp8.get(module) if stored is None else stored
    reason = _refuse(weight, form, options, context, taken=stored is not None)
    reason = kept if reason is None and stored is None else reason
    _record(layers, weight, reason or form.name)
    if reason is not None:
        return []
    return [quantize_linear(graph_module, node, form, options.rule, stored)]


def _quantize_experts(
    graph_module: fx.GraphModule, node: fx.Node, options: Options, layers: dict[str, str], context: PassContext
) -> list[Match]:
    """Both stacks or neither: the operation takes one format."""
    arguments = full_arguments(node)
    weights = [arguments.pop("gate_up"), arguments.pop("down")]
    stored = [context.checkpoint_nvfp4.get(name_module(name_weight(w))) for w in weights]
    reasons = [
        _refuse(w, NVFP4_EXPERTS, options, context, taken=s is not None) for w, s in zip(weights, stored, strict=True)
    ]
    reason = next((r for r in reasons if r is not None), None)
    for weight in weights:
        _record(layers, weight, reason or NVFP4_EXPERTS.name)
    if reason is not None:
        return []
    names = [name_weight(w) for w in weights]
    with graph_module.graph.inserting_before(node):
        parts = []
        for name, given in zip(names, stored, strict=True):
            parts += make_parts(graph_module, name, NVFP4_EXPERTS, options.method, given)
        routed = [arguments.pop(k) for k in ("x", "experts", "weights")]
        call = graph_module.graph.call_function(_MM.moe_nvfp4.default, (*routed, *parts, *arguments.values()))
    return [replace_call(graph_module, "quantize_nvfp4_experts", node, call, names[0])]


def _refuse(weight: Any, form: WeightFormat, options: Options, context: PassContext, *, taken: bool) -> str | None:
    name = name_weight(weight)
    if not name:
        return "the weight is computed, not a parameter"
    if any(fnmatch(name, pattern) for pattern in options.exclude):
        return "excluded by option"
    if taken:
        return None
    if context.quantization == "none":
        return "the checkpoint stores it unquantized, and no quantization was asked for"
    if weight.meta["val"].shape[-1] % form.block:
        return f"its {weight.meta['val'].shape[-1]} input features are no multiple of {form.block}"
    return None


def _record(layers: dict[str, str], weight: Any, outcome: str) -> None:
    """Note the outcome of a weight; one that was quantized in another place stays noted as such."""
    name = name_weight(weight)
    if name and layers.get(name) not in WEIGHT_FORMATS:
        layers[name] = outcome
