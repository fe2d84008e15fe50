"""``silu(gate) * up`` becomes ``mm.swiglu``."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import Refusal, describe, dtype_of, emit, finish, is_call, only_user, replace, shape_of

DESCRIPTION = "silu(gate) * up becomes mm.swiglu"
EFFECT = "bitwise"

aten = torch.ops.aten
_OTHER_GATES = (aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default)


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Every silu is replaced or reported; so is any other activation that gates a product."""
    result = PassResult()
    for node in list(graph_module.graph.nodes):
        if is_call(node, aten.silu.default, *_OTHER_GATES):
            try:
                _rewrite(graph_module, node, result)
            except Refusal as refusal:
                result.near_misses.append(refusal.as_near_miss("swiglu"))
    return finish(graph_module, result)


def _rewrite(graph_module: fx.GraphModule, activation: fx.Node, result: PassResult) -> None:
    is_silu = activation.target == aten.silu.default
    if not is_silu and not any(_is_product(user) for user in activation.users):
        return
    product = only_user(activation)
    if not _is_product(product):
        raise Refusal(product, f"found {describe(product)} after silu where aten.mul.Tensor is needed")
    gate = activation.args[0]
    up = product.args[1] if product.args[0] is activation else product.args[0]
    if not is_silu:
        raise Refusal(activation, f"the gate passes {describe(activation)}, mm.swiglu needs aten.silu.default")
    if not isinstance(up, fx.Node) or up is activation:
        raise Refusal(product, f"silu is multiplied by {describe(up)}, mm.swiglu needs a second tensor")
    if shape_of(up) != shape_of(gate) or dtype_of(up) != dtype_of(gate):
        raise Refusal(product, "gate and up differ in shape or dtype")
    with graph_module.graph.inserting_before(product):
        fused = emit(graph_module, product, torch.ops.mm.swiglu.default, gate, up)
    replace(graph_module, "swiglu", product, fused, result)


def _is_product(node: fx.Node) -> bool:
    return is_call(node, aten.mul.Tensor)
