"""Linear layers in every spelling become ``mm.linear``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from mmcompile.core.graph import depends_only_on_weights, full_arguments
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import Refusal, dtype_of, emit, finish, is_call, replace, shape_of

DESCRIPTION = "linear layers become mm.linear"
EFFECT = "bitwise"

aten = torch.ops.aten


class _Layer(NamedTuple):
    """``x @ factor + bias``, or ``x @ factor.T + bias`` if ``transposed``."""

    x: fx.Node
    factor: fx.Node
    bias: fx.Node | None
    transposed: bool


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Replace aten.linear, and aten.addmm, mm and matmul by something that depends on weights alone."""
    result = PassResult()
    constant = depends_only_on_weights(graph_module)
    for node in list(graph_module.graph.nodes):
        try:
            layer = _read(node)
            if layer is not None and layer.factor in constant:
                _rewrite(graph_module, node, layer, result)
        except Refusal as refusal:
            result.near_misses.append(refusal.as_near_miss("linear"))
    return finish(graph_module, result)


def _read(node: fx.Node) -> _Layer | None:
    if is_call(node, aten.linear.default):
        given = full_arguments(node)
        return _Layer(given["input"], given["weight"], given["bias"], True)
    if is_call(node, aten.mm.default, aten.matmul.default):
        return _Layer(node.args[0], node.args[1], None, False)
    if is_call(node, aten.addmm.default):
        given = full_arguments(node)
        if given["beta"] != 1 or given["alpha"] != 1:
            raise Refusal(node, f"addmm has beta={given['beta']} and alpha={given['alpha']}, mm.linear needs 1")
        return _Layer(given["mat1"], given["mat2"], given["self"], False)
    return None


def _rewrite(graph_module: fx.GraphModule, node: fx.Node, layer: _Layer, result: PassResult) -> None:
    x, factor, bias, transposed = layer
    if len(shape_of(factor)) != 2:
        raise Refusal(factor, f"the weight has {len(shape_of(factor))} dimensions, mm.linear needs 2")
    if dtype_of(x) != dtype_of(factor):
        raise Refusal(node, f"the input is {dtype_of(x)}, the weight {dtype_of(factor)}")
    if bias is not None and len(shape_of(bias)) != 1:
        raise Refusal(bias, f"the bias has {len(shape_of(bias))} dimensions, mm.linear needs 1")
    with graph_module.graph.inserting_before(node):
        if transposed:
            weight = factor
        elif is_call(factor, aten.t.default, aten.transpose.int):
            weight = factor.args[0]
        else:
            weight = emit(graph_module, node, aten.t.default, factor)
        arguments = (x, weight) if bias is None else (x, weight, bias)
        fused = emit(graph_module, node, torch.ops.mm.linear.default, *arguments)
    replace(graph_module, "linear", node, fused, result)
