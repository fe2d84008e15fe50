"""Drop calls that do nothing to values: aliases, copies, inactive dropout, identity casts, views and scalings."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import full_arguments
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import dtype_of, erase_dead, finish, is_dynamic, replace, shape_of

DESCRIPTION = "drop aliases, copies, inactive dropout and identity casts, views and scalings; views become reshapes"
EFFECT = "bitwise"

aten = torch.ops.aten
_COPIES = {
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.positive.default,
}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_SHAPED = _VIEWS | {aten.expand.default, aten.slice.Tensor}


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Every tensor keeps its value; only strides may differ, hence ``view`` becomes ``reshape``."""
    result = PassResult()
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _VIEWS:
            _normalise_reshape(graph_module, node)
        if _is_no_op(node):
            replace(graph_module, "drop_no_ops", node, node.args[0], result)
    return finish(graph_module, result)


def _normalise_reshape(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """One spelling of reshapes: literal sizes, -1 for the dimension that varies (if there is one only)."""
    node.target = aten.reshape.default
    dimensions = shape_of(node)
    if sum(map(is_dynamic, dimensions)) > 1:
        return
    sizes = [arg for arg in node.args[1] if isinstance(arg, fx.Node)]
    node.args = (node.args[0], [-1 if is_dynamic(d) else int(d) for d in dimensions])
    erase_dead(graph_module, sizes)


def _is_no_op(node: fx.Node) -> bool:
    target: Any = node.target
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), torch.Tensor):
        return False
    if target in _COPIES:
        return True
    if target == aten.dropout.default:
        _, probability, train = node.args
        return not train or probability == 0.0
    if target == aten.to.dtype:
        return dtype_of(node) == dtype_of(x)
    if target in _SHAPED:
        return _same_shape(node, x)
    return _is_neutral(node, x)


def _is_neutral(node: fx.Node, x: fx.Node) -> bool:
    """Multiplication or division by 1, addition or subtraction of an integer 0."""
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        neutral = not isinstance(node.args[1], fx.Node) and node.args[1] == 1
    elif node.target in (aten.add.Tensor, aten.sub.Tensor):
        neutral = not isinstance(node.args[1], fx.Node) and node.args[1] == 0 and not dtype_of(x).is_floating_point
    else:
        return False
    return neutral and full_arguments(node).get("alpha", 1) == 1 and dtype_of(node) == dtype_of(x)


def _same_shape(node: fx.Node, x: fx.Node) -> bool:
    """Equal for every size of the symbols; a slice that keeps the shape keeps everything."""
    before, after = shape_of(x), shape_of(node)
    return len(before) == len(after) and all(str(a) == str(b) for a, b in zip(before, after, strict=True))
