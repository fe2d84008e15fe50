"""RMSNorm in every spelling becomes ``mm.rms_norm``: Llama's, Gemma's, fp32 throughout, and ``aten.rms_norm``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import (
    Refusal,
    describe,
    dtype_of,
    emit,
    expect_call,
    finish,
    is_call,
    only_user,
    replace,
    shape_of,
)

DESCRIPTION = "RMSNorm in every spelling becomes mm.rms_norm"
EFFECT = "bitwise"

aten = torch.ops.aten


class _Scale(NamedTuple):
    """What the normalised value is multiplied by: ``weight + offset``."""

    weight: fx.Node
    offset: float


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Every rsqrt of a mean of squares is replaced or reported."""
    result = PassResult()
    for node in list(graph_module.graph.nodes):
        rewrite = {aten.rsqrt.default: _rewrite_spelled_out, aten.rms_norm.default: _rewrite_builtin}.get(node.target)
        if rewrite is None:
            continue
        try:
            rewrite(graph_module, node, result)
        except Refusal as refusal:
            result.near_misses.append(refusal.as_near_miss("rms_norm"))
    return finish(graph_module, result)


def _rewrite_spelled_out(graph_module: fx.GraphModule, rsqrt: fx.Node, result: PassResult) -> None:
    wide, eps = _match_variance(rsqrt)
    x = wide.args[0] if is_call(wide, aten.to.dtype) and dtype_of(wide) == torch.float32 else wide
    if dtype_of(wide) != torch.float32:
        raise Refusal(wide, f"the statistics are computed in {dtype_of(wide)}, mm.rms_norm computes them in fp32")
    normed = only_user(rsqrt)
    if not is_call(normed, aten.mul.Tensor) or wide not in normed.args:
        raise Refusal(normed, "the reciprocal root does not multiply the value whose squares were averaged")
    root, scale, round_before_scale = _match_scale(normed, dtype_of(x))
    if shape_of(scale.weight) != (shape_of(x)[-1],):
        raise Refusal(scale.weight, f"the weight has shape {list(shape_of(scale.weight))}, not one element a column")
    _emit(graph_module, root, (x, scale.weight, eps, scale.offset, round_before_scale), result)


def _match_variance(rsqrt: fx.Node) -> tuple[fx.Node, float]:
    """``rsqrt(mean(x^2, -1, keepdim) + eps)``: x and eps."""
    total = expect_call(rsqrt.args[0], rsqrt, aten.add.Tensor)
    mean, eps = total.args[:2] if is_call(total.args[0], aten.mean.dim) else (total.args[1], total.args[0])
    mean = expect_call(mean, total, aten.mean.dim)
    if not isinstance(eps, float):
        raise Refusal(total, f"eps is {describe(eps)}, mm.rms_norm needs a literal number")
    square = mean.args[0]
    x = _match_square(square, mean)
    if [d % len(shape_of(x)) for d in mean.args[1]] != [len(shape_of(x)) - 1]:
        raise Refusal(mean, f"the mean runs over dimensions {list(mean.args[1])}, not over the last one")
    if len(mean.args) < 3 or not mean.args[2]:
        raise Refusal(mean, "the mean drops its dimension (keepdim is False)")
    return x, eps


def _match_square(square: Any, owner: fx.Node) -> fx.Node:
    if is_call(square, aten.mul.Tensor) and square.args[0] is square.args[1]:
        return square.args[0]
    square = expect_call(square, owner, aten.pow.Tensor_Scalar, aten.square.default)
    if square.target == aten.pow.Tensor_Scalar and square.args[1] != 2:
        raise Refusal(square, f"the mean is of powers {square.args[1]}, not of squares")
    return square.args[0]


def _match_scale(normed: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, _Scale, bool]:
    """From the normalised fp32 value on: the last node, the scale, and whether rounding to ``dtype`` precedes it."""
    if dtype == torch.float32:
        product = only_user(normed)
        return product, _read_scale(product, normed, dtype), True
    after = only_user(normed)
    if is_call(after, aten.to.dtype):
        _check_rounding(after, dtype)
        product = only_user(after)
        return product, _read_scale(product, after, dtype), True
    scale = _read_scale(after, normed, torch.float32)
    rounded = expect_call(only_user(after), after, aten.to.dtype)
    _check_rounding(rounded, dtype)
    return rounded, scale, False


def _check_rounding(cast: fx.Node, dtype: torch.dtype) -> None:
    if dtype_of(cast) != dtype:
        raise Refusal(cast, f"the result is rounded to {dtype_of(cast)}, the input is {dtype}")


def _read_scale(product: fx.Node, normed: fx.Node, dtype: torch.dtype) -> _Scale:
    product = expect_call(product, normed, aten.mul.Tensor)
    other = product.args[1] if product.args[0] is normed else product.args[0]
    offset = 0.0
    if is_call(other, aten.add.Tensor) and any(isinstance(a, int | float) for a in other.args[:2]):
        first, second = other.args[:2]
        other, offset = (first, float(second)) if isinstance(first, fx.Node) else (second, float(first))
    if is_call(other, aten.to.dtype) and dtype_of(other) == torch.float32 == dtype:
        other = other.args[0]
    if not isinstance(other, fx.Node) or other.op != "get_attr":
        raise Refusal(product, f"the normalised value is multiplied by {describe(other)}, not by a weight")
    if dtype_of(product) != dtype:
        raise Refusal(product, f"the product with the weight is {dtype_of(product)}, expected {dtype}")
    return _Scale(other, offset)


def _rewrite_builtin(graph_module: fx.GraphModule, node: fx.Node, result: PassResult) -> None:
    """``aten.rms_norm(x, [n], weight, eps)`` computes in fp32 and rounds once, after the scale."""
    x, sizes, weight, eps = (*node.args, None, None)[:4]
    if list(sizes) != [shape_of(x)[-1]]:
        raise Refusal(node, f"it normalises over {list(sizes)}, mm.rms_norm over the last dimension")
    if weight is None:
        raise Refusal(node, "it has no weight")
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    _emit(graph_module, node, (x, weight, float(eps), 0.0, False), result)


def _emit(graph_module: fx.GraphModule, root: fx.Node, arguments: tuple[Any, ...], result: PassResult) -> None:
    x, weight, *_ = arguments
    with graph_module.graph.inserting_before(root):
        fused = emit(graph_module, root, torch.ops.mm.rms_norm.default, *arguments)
    if dtype_of(fused) != dtype_of(root):
        graph_module.graph.erase_node(fused)
        raise Refusal(
            root, f"the result is {dtype_of(root)}, mm.rms_norm gives {dtype_of(x)} (weight {dtype_of(weight)})"
        )
    replace(graph_module, "rms_norm", root, fused, result)
