"""What quantization schemes share: options, which layers are heads or routers, weights replaced by their parts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, fx

from mmcompile.core.errors import UsageError, unknown_name
from mmcompile.core.graph import full_arguments, infer_meta, set_parameter, source_of
from mmcompile.core.passes import Match

Options = TypeVar("Options", bound=BaseModel)

_MM, _ATEN = torch.ops.mm, torch.ops.aten
_RANKINGS = (_MM.route_top_k.default, _ATEN.topk.default)
_ROW_STEPS = (_ATEN._to_copy.default, _ATEN.to.dtype, _ATEN._softmax.default, _ATEN.softmax.int)


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights: its name, the names of its parts, the operation (weight, option) -> parts, its block."""

    name: str
    parts: tuple[str, ...]
    quantize: Any
    block: int


NVFP4 = WeightFormat("nvfp4", ("packed", "scale", "global_scale"), _MM.nvfp4_quantize.default, 16)
NVFP4_EXPERTS = WeightFormat("nvfp4", NVFP4.parts, _MM.nvfp4_quantize_experts.default, 16)
MXFP8 = WeightFormat("mxfp8", ("values", "scale"), _MM.mxfp8_quantize.default, 32)


def read_options(options: type[Options], scheme: str, given: dict[str, Any]) -> Options:
    """Check the options of ``scheme``; UsageError for an unknown one or a wrong value."""
    try:
        return options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise unknown_name(f"option of {scheme}", name, options.model_fields) from None
        raise UsageError(f"the option {name} of {scheme} cannot be {first['input']!r}", fix=first["msg"]) from None


def check_exclusions(patterns: Sequence[str], layers: dict[str, str]) -> None:
    """UsageError for a pattern of excluded layers that fits none of ``layers``."""
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in layers):
            raise unknown_name("layer to exclude", pattern, layers)


def name_weight(weight: Any) -> str:
    """The parameter that a weight operand is, "" if it is computed."""
    return str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""


def name_module(parameter: str) -> str:
    """The module that owns a weight; a stack of experts is its own."""
    return parameter.removesuffix(".weight")


def find_heads(graph_module: fx.GraphModule) -> set[fx.Node]:
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


def find_routers(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Linear nodes that choose experts: what an ``mm::moe`` gets its experts and weights from, and what ``route_top_k``
    or a bare top-k takes through casts and pointwise steps, for experts that no pass has recognised.
    """
    routers: set[fx.Node] = set()
    chosen: list[fx.Node] = []
    scored: list[fx.Node] = []
    for node in graph_module.graph.nodes:
        if node.target == _MM.moe.default:
            arguments = full_arguments(node)
            chosen += [arguments["experts"], arguments["weights"]]
        elif node.target in _RANKINGS:
            scored.append(node.args[0])
    for frontier, follow in ((chosen, lambda node: True), (scored, _keeps_places)):
        seen: set[fx.Node] = set()
        while frontier:
            node = frontier.pop()
            if node.target == _MM.linear.default:
                routers.add(node)
            elif node not in seen and follow(node):
                seen.add(node)
                frontier += node.all_input_nodes
    return routers


def _keeps_places(node: fx.Node) -> bool:
    """Whether the elements of a row stay that row's, in their places: casts, pointwise steps, softmax."""
    return node.target in _ROW_STEPS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def make_parts(
    graph_module: fx.GraphModule, name: str, form: WeightFormat, option: str, stored: Sequence[Tensor] | None
) -> list[fx.Node]:
    """Nodes of the parts of weight ``name``, at the insertion point: stored in the checkpoint, or else computed."""
    graph = graph_module.graph
    if stored is not None:
        parts = []
        for suffix, tensor in zip(form.parts, stored, strict=True):
            set_parameter(graph_module, f"{name}_{suffix}", tensor)
            parts.append(graph.get_attr(f"{name}_{suffix}"))
        infer_meta(graph_module, parts)
        return parts
    quantized = graph.call_function(form.quantize, (graph.get_attr(name), option))
    parts = [graph.call_function(operator.getitem, (quantized, i)) for i in range(len(form.parts))]
    infer_meta(graph_module, [*quantized.all_input_nodes, quantized, *parts])
    return parts


def replace_call(graph_module: fx.GraphModule, rule: str, node: fx.Node, new: fx.Node, where: str) -> Match:
    """Put ``new`` in the place of ``node`` and record it; ``where``: the weight."""
    infer_meta(graph_module, [new])
    new.meta["source"] = source_of(node)
    node.replace_all_uses_with(new)
    graph_module.graph.erase_node(node)
    return Match(rule, (node.name,), (new.name,), where)


def quantize_linear(
    graph_module: fx.GraphModule, node: fx.Node, form: WeightFormat, option: str, stored: Sequence[Tensor] | None
) -> Match:
    """linear(x, w) -> linear_<format>(x, parts of w)."""
    arguments = full_arguments(node)
    name = name_weight(arguments["weight"])
    target = {"nvfp4": _MM.linear_nvfp4.default, "mxfp8": _MM.linear_mxfp8.default}[form.name]
    with graph_module.graph.inserting_before(node):
        parts = make_parts(graph_module, name, form, option, stored)
        epilogue = (arguments["bias"], arguments["residual"], arguments["activation"])
        linear = graph_module.graph.call_function(target, (arguments["x"], *parts, *epilogue))
    return replace_call(graph_module, f"quantize_{form.name}", node, linear, name)
