"""Causal self-attention in every spelling becomes ``mm.attention``, after proving that its mask is causal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from mmcompile.core.graph import full_arguments
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import (
    Refusal,
    describe,
    dtype_of,
    emit,
    expect_call,
    finish,
    is_call,
    is_dynamic,
    only_user,
    replace,
    shape_of,
)
from mmcompile.passes.standardise._mask import prove_causal

DESCRIPTION = "causal attention, built in or spelled out, becomes mm.attention"
EFFECT = "bounded"

aten = torch.ops.aten
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_BETWEEN = (
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.add.Tensor,
    aten.to.dtype,
    aten.tanh.default,
    aten.where.self,
    aten.masked_fill.Scalar,
    aten.cat.default,
)


@dataclass(frozen=True)
class _Attention:
    """Attention at ``root``: q, k, v in [(1,) heads, tokens, d]; ``mask`` None means causal."""

    root: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    scale: float


@dataclass
class _Masks:
    """Windows proved so far, by mask node."""

    graph_module: fx.GraphModule
    max_context: int
    windows: dict[fx.Node, int] = field(default_factory=dict)

    def find_window(self, mask: fx.Node | None) -> int:
        if mask is None:
            return 0
        if mask not in self.windows:
            self.windows[mask] = prove_causal(self.graph_module, mask, self.max_context)
        return self.windows[mask]


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Every scaled_dot_product_attention and every softmax between two products is replaced or reported."""
    result = PassResult()
    masks = _Masks(graph_module, context.max_context)
    for node in list(graph_module.graph.nodes):
        try:
            if is_call(node, aten.scaled_dot_product_attention.default):
                _rewrite(_read_builtin(node), masks, result)
            elif is_call(node, aten.softmax.int, aten._softmax.default) and _holds_product(node):
                _rewrite(_read_spelled_out(node), masks, result)
        except Refusal as refusal:
            result.near_misses.append(refusal.as_near_miss("attention"))
    return finish(graph_module, result)


def _read_builtin(node: fx.Node) -> _Attention:
    given = full_arguments(node)
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if given["dropout_p"] != 0.0:
        raise Refusal(node, f"it drops out with probability {given['dropout_p']}")
    if mask is None and not given["is_causal"]:
        raise Refusal(node, "it has no mask and is_causal is False: every token sees the later ones too")
    if mask is not None and given["is_causal"]:
        raise Refusal(node, "it has both a mask and is_causal")
    scale = given["scale"] if given["scale"] is not None else 1.0 / math.sqrt(int(shape_of(q)[-1]))
    return _Attention(node, q, k, v, mask, float(scale))


def _holds_product(softmax: fx.Node) -> bool:
    """True if a product of two activations lies under the softmax with only elementwise steps between."""
    stack = list(softmax.all_input_nodes)
    while stack:
        node = stack.pop()
        if is_call(node, *_PRODUCTS) and all(map(is_dynamic, shape_of(node)[-2:])):
            return True
        if is_call(node, *_BETWEEN):
            stack += node.all_input_nodes
    return False


def _read_spelled_out(softmax: fx.Node) -> _Attention:
    """``softmax(q k^T * scale + mask) v`` with the softmax in fp32."""
    if softmax.args[1] % len(shape_of(softmax)) != len(shape_of(softmax)) - 1:
        raise Refusal(softmax, f"the softmax runs over dimension {softmax.args[1]}, not over the keys")
    if dtype_of(softmax) != torch.float32:
        raise Refusal(softmax, f"the softmax is computed in {dtype_of(softmax)}, mm.attention computes it in fp32")
    scores, mask = _split_mask(softmax)
    scores, scale = _strip_scale(scores)
    if not isinstance(scale, int | float):
        raise Refusal(softmax, f"the scores are scaled by {describe(scale)}, mm.attention needs a number")
    scores = expect_call(scores, softmax, aten.matmul.default)
    q, keys = scores.args
    keys = expect_call(keys, scores, aten.transpose.int)
    rank = len(shape_of(keys))
    if {d % rank for d in keys.args[1:]} != {rank - 1, rank - 2}:
        raise Refusal(keys, "the keys are not transposed in their last two dimensions")
    after = only_user(softmax)
    if is_call(after, aten.to.dtype):
        if dtype_of(after) != dtype_of(q):
            raise Refusal(after, f"the probabilities are rounded to {dtype_of(after)}, the queries are {dtype_of(q)}")
        softmax, after = after, only_user(after)
    after = expect_call(after, softmax, aten.matmul.default)
    if after.args[0] is not softmax:
        raise Refusal(after, "the probabilities are not the left factor of the product with the values")
    return _Attention(after, q, keys.args[0], after.args[1], mask, float(scale))


def _split_mask(softmax: fx.Node) -> tuple[fx.Node, fx.Node]:
    total = softmax.args[0]
    if is_call(total, aten.to.dtype):
        total = total.args[0]
    if not is_call(total, aten.add.Tensor):
        raise Refusal(softmax, f"found {describe(total)} under the softmax where scores + mask is needed")
    first, second = total.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        raise Refusal(total, "a number is added to the scores instead of a mask")
    return (second, first) if is_call(_strip_scale(second)[0], *_PRODUCTS) else (first, second)


def _strip_scale(scores: fx.Node) -> tuple[fx.Node, object]:
    """(value, factor) of a multiplication or division by anything; factor 1.0 for another node."""
    if is_call(scores, aten.mul.Tensor):
        return scores.args[0], scores.args[1]
    if is_call(scores, aten.div.Tensor):
        divisor = scores.args[1]
        return scores.args[0], 1.0 / divisor if isinstance(divisor, int | float) else divisor
    return scores, 1.0


def _rewrite(found: _Attention, masks: _Masks, result: PassResult) -> None:
    graph_module, root = masks.graph_module, found.root
    rank = len(shape_of(found.q))
    if rank not in (3, 4) or (rank == 4 and shape_of(found.q)[0] != 1):
        raise Refusal(root, f"the queries have shape {list(shape_of(found.q))}, not [1, heads, tokens, d]")
    heads = int(shape_of(found.q)[-3])
    k, v = _undo_repeat(found.k, heads), _undo_repeat(found.v, heads)
    if str(shape_of(found.q)[-2]) != str(shape_of(k)[-2]):
        raise Refusal(root, "queries and keys differ in number (cross-attention)")
    if shape_of(k)[-3] != shape_of(v)[-3] or heads % int(shape_of(k)[-3]):
        raise Refusal(root, f"{heads} query heads, {shape_of(k)[-3]} key heads and {shape_of(v)[-3]} value heads")
    window = masks.find_window(found.mask)
    with graph_module.graph.inserting_before(root):
        q, k, v = (_to_token_major(graph_module, root, node) for node in (found.q, k, v))
        value = emit(graph_module, root, torch.ops.mm.attention.default, q, k, v, found.scale, window)
        value = emit(graph_module, root, aten.transpose.int, value, 0, 1)
        if rank == 4:
            value = emit(graph_module, root, aten.unsqueeze.default, value, 0)
    replace(graph_module, "attention", root, value, result)


def _to_token_major(graph_module: fx.GraphModule, root: fx.Node, node: fx.Node) -> fx.Node:
    if len(shape_of(node)) == 4:
        node = emit(graph_module, root, aten.select.int, node, 0, 0)
    return emit(graph_module, root, aten.transpose.int, node, 0, 1)


def _undo_repeat(node: fx.Node, heads: int) -> fx.Node:
    """The tensor before its heads were repeated for GQA: reshape(expand(unsqueeze(x))) or repeat_interleave."""
    if is_call(node, aten.repeat_interleave.self_int):
        repeats, dimension = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if dimension is not None and dimension % len(shape_of(node)) == len(shape_of(node)) - 3:
            return node.args[0] if int(shape_of(node.args[0])[-3]) * repeats == heads else node
    if not (is_call(node, aten.reshape.default) and is_call(node.args[0], aten.expand.default)):
        return node
    expanded = node.args[0]
    inserted = expanded.args[0]
    rank = len(shape_of(node))
    if not is_call(inserted, aten.unsqueeze.default) or inserted.args[1] % (rank + 1) != rank - 2:
        return node
    base = inserted.args[0]
    repeats = shape_of(expanded)[-3]
    same = [str(d) for d in shape_of(base)[-2:]] == [str(d) for d in shape_of(node)[-2:]]
    return base if same and int(shape_of(base)[-3]) * int(repeats) == heads else node
