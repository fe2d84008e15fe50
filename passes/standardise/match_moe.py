"""Routers and experts become ``mm.route_top_k`` and ``mm.moe``; a scale and a shared expert go into them."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from mmcompile.core.graph import full_arguments, is_getitem, source_of
from mmcompile.core.passes import Match, PassContext, PassResult
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

DESCRIPTION = "routers and experts, a row a token and expert, become mm.route_top_k and mm.moe"
EFFECT = "bounded"

aten, mm = torch.ops.aten, torch.ops.mm
_CUTS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
_RESHAPES = (aten.reshape.default, aten.view.default)


@dataclass(frozen=True)
class _Experts:
    """Experts whose weighted sum is ``root``: x [tokens, k], experts and weights [tokens, places]."""

    root: fx.Node
    x: fx.Node
    experts: fx.Node
    weights: fx.Node
    gate_up: fx.Node
    down: fx.Node
    gate: fx.Node


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Every product with a matrix picked by an expert's number is replaced or reported, and so is its router."""
    result = PassResult()
    for node in list(graph_module.graph.find_nodes(op="call_function", target=aten.bmm.default)):
        if node._erased or not (is_call(node.args[0], aten.index.Tensor) and _is_weight(node.args[0].args[0])):
            continue
        if _is_gated(node):
            continue
        try:
            _rewrite_experts(graph_module, _read_experts(node), result)
        except Refusal as refusal:
            result.near_misses.append(refusal.as_near_miss("moe"))
    for node in list(graph_module.graph.find_nodes(op="call_function", target=mm.moe.default)):
        try:
            _rewrite_router(graph_module, node, result)
            _absorb(graph_module, node, result)
        except Refusal as refusal:
            result.near_misses.append(refusal.as_near_miss("route_top_k"))
    return finish(graph_module, result)


def _is_weight(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and len(shape_of(node)) == 3


def _is_gated(product: fx.Node) -> bool:
    """True for the first product of an expert: it ends in two halves that gate one another."""
    squeezed = next(iter(product.users), None)
    users = list(squeezed.users) if is_call(squeezed, aten.squeeze.dim) else []
    return bool(users) and all(is_call(user, *_CUTS) for user in users)


def _read_product(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """``bmm(weight[chosen], x[..., None]).squeeze(-1)``: weight [experts, n, k], chosen [rows], x [rows, k]."""
    picked = expect_call(product.args[0], product, aten.index.Tensor)
    weight, chosen = picked.args
    if not _is_weight(weight) or len(chosen) != 1:
        raise Refusal(picked, "the matrices are not picked from one weight by a list of experts")
    column = expect_call(product.args[1], product, aten.unsqueeze.default)
    if column.args[1] not in (-1, 2):
        raise Refusal(column, "the rows are not columns of the product")
    return weight, chosen[0], column.args[0]


def _read_experts(second: fx.Node) -> _Experts:
    """From the product with the down projection, up to the rows and down to the weighted sum."""
    down, chosen, hidden = _read_product(second)
    gate = expect_call(hidden, second, mm.swiglu.default, mm.swiglu_oai.default)
    first, gate_up = _read_halves(gate)
    gate_up_weight, chosen_too, rows = _read_product(first)
    if chosen_too is not chosen:
        raise Refusal(second, "the two projections pick different experts")
    rows = expect_call(rows, first, aten.repeat_interleave.self_int)
    flat = expect_call(chosen, second, *_RESHAPES)
    experts = flat.args[0]
    places = int(shape_of(experts)[-1])
    if (
        len(shape_of(experts)) != 2
        or rows.args[1] != places
        or (rows.args[2:] or rows.kwargs.get("dim")) not in ((0,), 0)
    ):
        raise Refusal(rows, f"the rows are not each token {places} times, one for each of its experts")
    weighted = expect_call(only_user(only_user(second)), second, aten.mul.Tensor)
    factor = weighted.args[1] if weighted.args[0] is only_user(second) else weighted.args[0]
    column = expect_call(factor, weighted, aten.unsqueeze.default)
    weights = expect_call(column.args[0], column, *_RESHAPES).args[0]
    if len(shape_of(weights)) != 2 or int(shape_of(weights)[-1]) != places:
        raise Refusal(column, f"the weights have shape {list(shape_of(weights))}, not one for each of {places} experts")
    root = _read_sum(weighted, places, dtype_of(rows))
    return _Experts(root, rows.args[0], experts, weights, gate_up_weight, down, gate)


def _read_halves(gate: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(product, value) whose first half is the gate and whose second half is up."""
    halves = gate.args[:2]
    for index, half in enumerate(halves):
        half = expect_call(half, gate, operator.getitem)
        cut = expect_call(half.args[0], half, *_CUTS)
        widths = [int(part.shape[-1]) for part in cut.meta["val"]]
        if half.args[1] != index or full_arguments(cut)["dim"] not in (-1, 1) or widths != widths[:1] * 2:
            raise Refusal(half, "gate and up are not the first and second half of the first projection")
        squeezed = expect_call(cut.args[0], cut, aten.squeeze.dim)
    if halves[0].args[0] is not halves[1].args[0]:
        raise Refusal(gate, "gate and up come from different projections")
    return expect_call(squeezed.args[0], squeezed, aten.bmm.default), squeezed


def _read_sum(weighted: fx.Node, places: int, dtype: torch.dtype) -> fx.Node:
    """The sum over the places of a token, rounded to the dtype of the tokens."""
    view = expect_call(only_user(weighted), weighted, *_RESHAPES)
    total = expect_call(only_user(view), view, aten.sum.dim_IntList)
    given = full_arguments(total)
    if len(shape_of(view)) != 3 or int(shape_of(view)[1]) != places or given["dim"] != [1] or given["keepdim"]:
        raise Refusal(total, f"the sum does not run over the {places} experts of a token")
    if dtype_of(total) == dtype:
        return total
    rounded = expect_call(only_user(total), total, aten.to.dtype)
    if dtype_of(rounded) != dtype:
        raise Refusal(rounded, f"the sum is rounded to {dtype_of(rounded)}, the tokens are {dtype}")
    return rounded


def _rewrite_experts(graph_module: fx.GraphModule, found: _Experts, result: PassResult) -> None:
    root = found.root
    with graph_module.graph.inserting_before(root):
        weights = found.weights
        if dtype_of(weights) != torch.float32:
            weights = emit(graph_module, root, aten.to.dtype, weights, torch.float32)
        oai = is_call(found.gate, mm.swiglu_oai.default)
        activation = ("swiglu_oai", *found.gate.args[2:]) if oai else ("swiglu",)
        arguments = (found.x, found.experts, weights, found.gate_up, found.down, None, *activation)
        fused = emit(graph_module, root, mm.moe.default, *arguments)
    replace(graph_module, "moe", root, fused, result)


def _rewrite_router(graph_module: fx.GraphModule, moe: fx.Node, result: PassResult) -> None:
    """Replace ``s / sum(s)`` of the chosen sigmoid scores, and routers by softmax."""
    experts, weights = moe.args[1:3]
    if not (is_getitem(experts, 1) and is_call(experts.args[0], aten.topk.default)):
        raise Refusal(moe, f"the experts come from {describe(experts)}, mm.route_top_k needs aten.topk.default")
    topk = full_arguments(experts.args[0])
    ranking = topk["self"]
    scores, bias = ranking, None
    if is_call(ranking, aten.add.Tensor):
        first, second = ranking.args
        scores, bias = (first, second) if is_call(first, aten.sigmoid.default) else (second, first)
    if is_call(ranking, aten.softmax.int):
        _rewrite_softmax(graph_module, moe, ranking, result)
        return
    if not is_call(scores, aten.sigmoid.default):
        return
    if not topk["largest"] or topk["dim"] not in (-1, 1) or dtype_of(scores) != torch.float32:
        raise Refusal(scores, "the experts are not those with the largest fp32 scores")
    if bias is not None and (dtype_of(bias) != torch.float32 or len(shape_of(bias)) != 1):
        raise Refusal(bias, f"the bias is {dtype_of(bias)} {list(shape_of(bias))}, fp32 and one for each expert needed")
    _check_weights(weights, scores, experts)
    logits = scores.args[0]
    logits = logits.args[0] if is_call(logits, aten.to.dtype) else logits
    with graph_module.graph.inserting_before(weights):
        route = emit(graph_module, weights, mm.route_top_k.default, logits, bias, topk["k"], 1.0)
        new_weights, new_experts = (emit(graph_module, weights, operator.getitem, route, i) for i in (0, 1))
    moe.replace_input_with(experts, new_experts)
    replace(graph_module, "route_top_k", weights, new_weights, result)


def _rewrite_softmax(graph_module: fx.GraphModule, moe: fx.Node, scores: fx.Node, result: PassResult) -> None:
    """Replace the choice by probability, and the division of the chosen ones by their sum where there is one."""
    experts = moe.args[1]
    given, topk = full_arguments(scores), full_arguments(experts.args[0])
    if not topk["largest"] or topk["dim"] not in (-1, 1) or given["dim"] not in (-1, 1):
        raise Refusal(scores, "the experts are not those of the largest probabilities over all experts")
    if dtype_of(scores) != torch.float32 or len(shape_of(scores)) != 2:
        raise Refusal(scores, f"the probabilities are {dtype_of(scores)} {list(shape_of(scores))}, fp32 rows needed")
    chosen = next((n for n in experts.args[0].users if is_getitem(n, 0)), None)
    if chosen is None:
        raise Refusal(moe, "the weights of the experts are not the chosen probabilities")
    root = next((n for n in chosen.users if _is_share(n, chosen)), chosen)
    logits = given["self"]
    logits = logits.args[0] if is_call(logits, aten.to.dtype) else logits
    with graph_module.graph.inserting_before(root):
        arguments = (logits, None, topk["k"], 1.0, "softmax", root is not chosen)
        route = emit(graph_module, root, mm.route_top_k.default, *arguments)
        new_weights, new_experts = (emit(graph_module, root, operator.getitem, route, i) for i in (0, 1))
    moe.replace_input_with(experts, new_experts)
    replace(graph_module, "route_top_k", root, new_weights, result)


def _is_share(node: fx.Node, chosen: fx.Node) -> bool:
    """Whether ``node`` divides the chosen weights by their own sum, and nothing else reads them."""
    if not is_call(node, aten.div.Tensor) or node.args[0] is not chosen or len(chosen.users) != 2:
        return False
    total = node.args[1]
    if not is_call(total, aten.sum.dim_IntList) or total.args[0] is not chosen:
        return False
    given = full_arguments(total)
    return given["dim"] in ([-1], [1]) and bool(given["keepdim"]) and node.kwargs == {}


def _check_weights(weights: fx.Node, scores: fx.Node, experts: fx.Node) -> None:
    quotient = expect_call(weights, weights, aten.div.Tensor)
    chosen = expect_call(quotient.args[0], quotient, aten.gather.default)
    total = expect_call(quotient.args[1], quotient, aten.sum.dim_IntList)
    given = full_arguments(total)
    if total.args[0] is not chosen or given["dim"] not in ([-1], [1]) or not given["keepdim"]:
        raise Refusal(total, "the weights are not divided by their own sum")
    if chosen.args[0] is not scores or chosen.args[1] not in (1, -1) or chosen.args[2] is not experts:
        raise Refusal(chosen, "the weights are not the scores of the chosen experts")


def _absorb(graph_module: fx.GraphModule, moe: fx.Node, result: PassResult) -> None:
    """``moe * scale + shared``: the scale goes to the router's weights, a shared expert is added by the operation."""
    user = next(iter(moe.users)) if len(moe.users) == 1 else None
    route = moe.args[2].args[0]
    has_scale = is_call(user, aten.mul.Tensor) and user.args[0] is moe and isinstance(user.args[1], int | float)
    if has_scale and is_call(route, mm.route_top_k.default):
        if len(moe.args[2].users) != 1:
            raise Refusal(moe.args[2], "the weights of the experts have other readers, so they cannot take the scale")
        route.args = (*route.args[:3], route.args[3] * float(user.args[1]))
        result.matches.append(Match("scale_of_experts", (user.name,), (route.name,), source_of(user)))
        user.replace_all_uses_with(moe)
        graph_module.graph.erase_node(user)
        user = next(iter(moe.users)) if len(moe.users) == 1 else None
    if is_call(user, aten.add.Tensor) and user.kwargs.get("alpha", 1) == 1:
        other = user.args[1] if user.args[0] is moe else user.args[0]
        if is_call(other, mm.linear.default):
            with graph_module.graph.inserting_before(user):
                fused = emit(graph_module, moe, mm.moe.default, *moe.args[:5], other, *moe.args[6:])
            replace(graph_module, "shared_expert", user, fused, result)
