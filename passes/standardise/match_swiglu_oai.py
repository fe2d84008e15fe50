"""``(clamp(up) + 1) * g * sigmoid(alpha g)`` with ``g = min(gate, limit)`` becomes ``mm.swiglu_oai``."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.graph import full_arguments
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import Refusal, describe, emit, expect_call, finish, is_call, only_user, replace, shape_of

DESCRIPTION = "the clamped SwiGLU of gpt-oss becomes mm.swiglu_oai"
EFFECT = "bitwise"

aten = torch.ops.aten


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Every ``x * sigmoid(alpha * x)`` of a clamped x is replaced or reported."""
    result = PassResult()
    for node in list(graph_module.graph.find_nodes(op="call_function", target=aten.sigmoid.default)):
        scaled = node.args[0]
        if is_call(scaled, aten.mul.Tensor) and is_call(scaled.args[0], aten.clamp.default):
            try:
                _rewrite(graph_module, node, scaled, result)
            except Refusal as refusal:
                result.near_misses.append(refusal.as_near_miss("swiglu_oai"))
    return finish(graph_module, result)


def _rewrite(graph_module: fx.GraphModule, sigmoid: fx.Node, scaled: fx.Node, result: PassResult) -> None:
    clamped, alpha = scaled.args
    if not isinstance(alpha, int | float):
        raise Refusal(scaled, f"the gate is scaled by {describe(alpha)}, mm.swiglu_oai needs a number")
    gate, low, limit = _read_clamp(clamped)
    if low is not None or limit is None:
        raise Refusal(clamped, f"the gate is clamped to {low} .. {limit}, mm.swiglu_oai clamps it from above only")
    gated = _other_factor(only_user(sigmoid), sigmoid, clamped)
    root = expect_call(only_user(gated), gated, aten.mul.Tensor)
    shifted = root.args[1] if root.args[0] is gated else root.args[0]
    shifted = expect_call(shifted, root, aten.add.Tensor)
    if shifted.args[1] != 1 or shifted.kwargs.get("alpha", 1) != 1:
        raise Refusal(shifted, f"{describe(shifted.args[1])} is added to up, mm.swiglu_oai adds 1")
    clamped_up = expect_call(shifted.args[0], shifted, aten.clamp.default)
    up, *bounds = _read_clamp(clamped_up)
    if bounds != [-limit, limit]:
        raise Refusal(clamped_up, f"up is clamped to {bounds[0]} .. {bounds[1]}, the gate to at most {limit}")
    if [str(d) for d in shape_of(up)] != [str(d) for d in shape_of(gate)]:
        raise Refusal(root, f"gate has shape {list(shape_of(gate))}, up {list(shape_of(up))}")
    with graph_module.graph.inserting_before(root):
        fused = emit(graph_module, root, torch.ops.mm.swiglu_oai.default, gate, up, float(alpha), float(limit))
    replace(graph_module, "swiglu_oai", root, fused, result)


def _read_clamp(node: fx.Node) -> tuple[fx.Node, float | None, float | None]:
    given = full_arguments(node)
    return given["self"], given["min"], given["max"]


def _other_factor(product: fx.Node, sigmoid: fx.Node, clamped: fx.Node) -> fx.Node:
    """``product`` if it is ``clamped * sigmoid``."""
    product = expect_call(product, sigmoid, aten.mul.Tensor)
    if {product.args[0], product.args[1]} != {sigmoid, clamped}:
        raise Refusal(product, "the sigmoid does not multiply the clamped gate that it is of")
    return product
