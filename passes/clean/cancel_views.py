"""Cancel views that undo each other: transpose of transpose, select of unsqueeze, reshape of reshape."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import emit, erase_dead, finish, is_call, replace, shape_of

DESCRIPTION = "cancel views that undo each other, also around a norm"
EFFECT = "bitwise"

aten = torch.ops.aten


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Sweeps the graph once, from inputs to outputs, so that chains of pairs collapse."""
    result = PassResult()
    for node in list(graph_module.graph.nodes):
        if is_call(node, aten.reshape.default) and is_call(node.args[0], aten.reshape.default):
            inner = node.args[0]
            node.args = (inner.args[0], node.args[1])
            erase_dead(graph_module, [inner])
        if _is_norm_of_transpose(node):
            _sink_transpose(graph_module, node)
        source = _find_source(node)
        if source is not None:
            replace(graph_module, "cancel_views", node, source, result)
    return finish(graph_module, result)


def _is_norm_of_transpose(node: fx.Node) -> bool:
    """A normalisation over the last dimension of a transpose that leaves this dimension alone."""
    if not is_call(node, torch.ops.mm.rms_norm.default) or not is_call(node.args[0], aten.transpose.int):
        return False
    rank = len(shape_of(node))
    return rank - 1 not in _dimensions(node.args[0], rank)


def _sink_transpose(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """``norm(transpose(x))`` becomes ``transpose(norm(x))``, where the transpose may meet its inverse."""
    turned = node.args[0]
    with graph_module.graph.inserting_before(node):
        normed = emit(graph_module, node, node.target, turned.args[0], *node.args[1:])
    node.target, node.args = aten.transpose.int, (normed, *turned.args[1:])
    erase_dead(graph_module, [turned])


def _find_source(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` restores, None if it restores nothing."""
    if not is_call(node, aten.transpose.int, aten.select.int, aten.squeeze.dim):
        return None
    inner = node.args[0]
    rank = len(shape_of(inner))
    if is_call(node, aten.transpose.int):
        if is_call(inner, aten.transpose.int) and _dimensions(node, rank) == _dimensions(inner, rank):
            return inner.args[0]
        return None
    if is_call(inner, aten.unsqueeze.default) and node.args[1] % rank == inner.args[1] % rank:
        return inner.args[0]
    return None


def _dimensions(node: fx.Node, rank: int) -> set[int]:
    return {d % rank for d in node.args[1:]}
