"""What ONNX exporters take apart is put together again: silu, rsqrt, gelu and scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import emit, finish, is_call, replace, shape_of

DESCRIPTION = "ONNX exporters' spelling of silu, rsqrt, gelu and attention becomes PyTorch's"
EFFECT = "bounded"

aten = torch.ops.aten


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Rewrite every place; what only resembles one is left as it is."""
    result = PassResult()
    for node in list(graph_module.graph.nodes):
        for rule, find in (("silu", _find_silu), ("rsqrt", _find_rsqrt), ("gelu", _find_gelu), ("sdpa", _find_sdpa)):
            found = find(node)
            if found is not None:
                target, arguments, options = found
                with graph_module.graph.inserting_before(node):
                    new = emit(graph_module, node, target, *arguments, **options)
                replace(graph_module, f"exporter_{rule}", node, new, result)
                break
    return finish(graph_module, result)


Found = tuple[Any, tuple[Any, ...], dict[str, Any]] | None


def _find_silu(node: fx.Node) -> Found:
    """``x * sigmoid(x)``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for x, gate in (node.args[:2], node.args[1::-1]):
        if is_call(gate, aten.sigmoid.default) and gate.args[0] is x:
            return aten.silu.default, (x,), {}
    return None


def _find_rsqrt(node: fx.Node) -> Found:
    """``reciprocal(sqrt(x))``."""
    if is_call(node, aten.reciprocal.default) and is_call(node.args[0], aten.sqrt.default):
        return aten.rsqrt.default, (node.args[0].args[0],), {}
    return None


def _number(value: Any, wanted: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, wanted, rel_tol=1e-6)


def _factor(node: Any, wanted: float) -> Any:
    """The other factor of a product with the number ``wanted``, None if the node is no such product."""
    if is_call(node, aten.div.Tensor) and _number(node.args[1], 1.0 / wanted):
        return node.args[0]
    if is_call(node, aten.mul.Tensor):
        for number, other in (node.args[:2], node.args[1::-1]):
            if _number(number, wanted):
                return other
    return None


def _find_gelu(node: fx.Node) -> Found:
    """``0.5 * x * (1 + erf(x / sqrt(2)))``, its factors in any order."""
    if not is_call(node, aten.mul.Tensor):
        return None
    factors: list[Any] = []
    stack: list[Any] = list(node.args[:2])
    while stack and len(factors) < 4:
        value = stack.pop()
        if is_call(value, aten.mul.Tensor) and len(value.users) == 1:
            stack += value.args[:2]
        else:
            factors.append(value)
    if len(factors) != 3 or not any(_number(f, 0.5) for f in factors):
        return None
    rest = [f for f in factors if not _number(f, 0.5)]
    for x, bell in (rest, rest[::-1]):
        if is_call(bell, aten.add.Tensor) and any(_number(a, 1.0) for a in bell.args[:2]):
            erf = next((a for a in bell.args[:2] if is_call(a, aten.erf.default)), None)
            if erf is not None and _factor(erf.args[0], math.sqrt(0.5)) is x:
                return aten.gelu.default, (x,), {}
    return None


def _find_sdpa(node: fx.Node) -> Found:
    """``softmax((q s)(k s)^T + mask) v``, with or without a guard that turns the NaN of masked rows into zeros.

    torch's attention gives zeros for such rows itself.
    """
    if not is_call(node, aten.matmul.default) or len(shape_of(node)) != 4:
        return None
    weights, v = node.args
    if is_call(weights, aten.where.ScalarSelf) and weights.args[1] == 0.0:
        guarded = weights.args[2]
        if not is_call(weights.args[0], aten.isnan.default) or weights.args[0].args[0] is not guarded:
            return None
        weights = guarded
    if not is_call(weights, aten.softmax.int) or weights.args[1] % 4 != 3:
        return None
    scores, mask = weights.args[0], None
    if is_call(scores, aten.add.Tensor):
        scores, mask = scores.args
        if is_call(mask, aten.matmul.default):
            scores, mask = mask, scores
    if not is_call(scores, aten.matmul.default) or (mask is not None and not isinstance(mask, fx.Node)):
        return None
    (q, scale_q), (turned, scale_k) = (_strip(x) for x in scores.args)
    k = _undo_transpose(turned)
    if k is None or scale_q == scale_k == 1.0:
        return None
    return aten.scaled_dot_product_attention.default, (q, k, v, mask), {"scale": scale_q * scale_k}


def _strip(value: Any) -> tuple[Any, float]:
    """(value, factor) of a product with a number."""
    if is_call(value, aten.mul.Tensor) and isinstance(value.args[1], int | float):
        return value.args[0], float(value.args[1])
    return value, 1.0


def _undo_transpose(turned: Any) -> fx.Node | None:
    """k [b, h, s, d] of its transpose [b, h, d, s], also where that goes through three dimensions."""
    if is_call(turned, aten.transpose.int) and {d % 4 for d in turned.args[1:3]} == {2, 3}:
        return turned.args[0]
    if is_call(turned, aten.permute.default) and list(turned.args[1]) == [0, 1, 3, 2]:
        return turned.args[0]
    views = (aten.reshape.default, aten.view.default)
    if not is_call(turned, *views) or not is_call(turned.args[0], aten.transpose.int):
        return None
    inner = turned.args[0]
    if len(shape_of(inner)) != 3 or {d % 3 for d in inner.args[1:3]} != {1, 2} or not is_call(inner.args[0], *views):
        return None
    k = inner.args[0].args[0]
    wanted = [*shape_of(turned)[:2], shape_of(turned)[3], shape_of(turned)[2]]
    same = len(shape_of(k)) == 4 and [str(d) for d in shape_of(k)] == [str(d) for d in wanted]
    return k if same else None
