"""Evaluate small tensors that depend on nothing but literals and small buffers."""

from __future__ import annotations

import torch
from torch import fx, nn

from mmcompile.core.graph import get_parameter, infer_meta, is_pure, set_parameter, source_of
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import evaluate, finish, replace

DESCRIPTION = "evaluate small constant tensors"
EFFECT = "bitwise"
LARGEST = 64
"""Elements of the largest tensor that is folded."""


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Replace maximal constant calls by buffers ``literals.value_<name>``; parameters of the model are not touched."""
    result = PassResult()
    constant: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        if _is_small_buffer(graph_module, node) or _is_foldable(node, constant):
            constant.add(node)
    for node in [n for n in graph_module.graph.nodes if n in constant and n.op == "call_function"]:
        if isinstance(node.meta["val"], torch.Tensor) and any(u not in constant for u in node.users):
            _fold(graph_module, node, result)
    return finish(graph_module, result)


def _is_small_buffer(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "get_attr":
        return False
    tensor = get_parameter(graph_module, str(node.target))
    return not isinstance(tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() <= LARGEST


def _is_foldable(node: fx.Node, constant: set[fx.Node]) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not is_pure(node) or not all(n in constant for n in node.all_input_nodes):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return not isinstance(value, torch.Tensor) or (
        all(isinstance(d, int) for d in value.shape) and value.numel() <= LARGEST
    )


def _fold(graph_module: fx.GraphModule, node: fx.Node, result: PassResult) -> None:
    name = f"literals.value_{node.name}"
    set_parameter(graph_module, name, evaluate(graph_module, node, {}).clone())
    with graph_module.graph.inserting_before(node):
        folded = graph_module.graph.get_attr(name)
    infer_meta(graph_module, [folded])
    folded.meta["source"] = source_of(node)
    folded.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    replace(graph_module, "fold_literals", node, folded, result)
