"""linear(x, a), linear(x, b), ...  ->  split(linear(x, [a; b; ...]))     QKV and gate/up become one GEMM."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import depends_only_on_weights, full_arguments, infer_meta, source_of, users_in_order
from mmcompile.core.passes import Match, NearMiss, PassContext, PassResult

DESCRIPTION = "merge linear layers that read the same input: QKV, gate/up"
EFFECT = "bounded"
_MM = torch.ops.mm
_ATEN = torch.ops.aten
# (operation, argument) where a projection ends -> its place in the rows that the fused QKV operations take.
_ROLES = {
    (_MM.insert_kv.default, 0): 1,
    (_MM.insert_kv.default, 1): 2,
    (_MM.paged_index_score.default, 0): 3,
    (_MM.insert_index.default, 0): 4,
}
_ON_THE_WAY = {
    _ATEN.reshape.default, _ATEN.select.int, _ATEN.squeeze.dim, _ATEN.unsqueeze.default, _ATEN.transpose.int,
    _ATEN.contiguous.default, _MM.rms_norm.default, _MM.rope.default,
}  # fmt: skip
# Weight operands of each mergeable operation: concatenated along the rows.
_ROWS = {
    _MM.linear.default: ("weight", "bias"),
    _MM.linear_nvfp4.default: ("packed", "scale", "global_scale", "bias"),
    _MM.linear_mxfp8.default: ("values", "scale", "bias"),
}


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Merge per input and operation; layers with an epilogue, a computed weight or another bias pattern stay apart."""
    result = PassResult()
    constant = depends_only_on_weights(graph_module)
    for source in list(graph_module.graph.nodes):
        for target in _ROWS:
            group = [u for u in users_in_order(source) if u.target == target and u.args[0] is source]
            if len(group) < 2:
                continue
            reason = _refuse(group, constant)
            if reason is None:
                result.matches.append(_merge(graph_module, group))
            else:
                result.near_misses.append(NearMiss("merge_linears", group[0].name, reason, source_of(group[0])))
    return result


def _refuse(group: list[fx.Node], constant: set[fx.Node]) -> str | None:
    arguments = [full_arguments(n) for n in group]
    if any(a["residual"] is not None or a["activation"] != "none" for a in arguments):
        return "one of the layers has an epilogue already"
    if len({a["bias"] is None for a in arguments}) > 1:
        return "some of the layers have a bias and some do not"
    if any(a[name] not in constant for a in arguments for name in _ROWS[group[0].target] if a[name] is not None):
        return "a weight is not a parameter"
    return None


def _merge(graph_module: fx.GraphModule, group: list[fx.Node]) -> Match:
    graph, first = graph_module.graph, group[0]
    group = sorted(group, key=_find_role)
    arguments = [full_arguments(n) for n in group]
    made: list[fx.Node] = []

    def call(target: Any, *args: Any) -> fx.Node:
        made.append(graph.call_function(target, args))
        return made[-1]

    rule = _rule_name(group)
    _hoist_weights(arguments, first)
    with graph.inserting_before(first):
        merged = {}
        for name in _ROWS[first.target]:
            parts = [a[name] for a in arguments]
            merged[name] = None if parts[0] is None else call(_ATEN.cat.default, parts, 0)
        wide = call(first.target, arguments[0]["x"], *merged.values())
        sizes = [int(n.meta["val"].shape[-1]) for n in group]
        split = call(_ATEN.split_with_sizes.default, wide, sizes, -1)
        pieces = [call(operator.getitem, split, i) for i in range(len(group))]
    infer_meta(graph_module, made)
    for node in made:
        node.meta["source"] = source_of(first)
    for old, new in zip(group, pieces, strict=True):
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    return Match(rule, tuple(n.name for n in group), (wide.name,), source_of(first))


def _find_role(node: fx.Node) -> int:
    """0 for queries and all other layers, 1 keys, 2 values, 3 queries and 4 keys of an indexer."""
    while len(node.users) == 1:
        (user,) = node.users
        place = next((i for i, a in enumerate(user.args) if a is node), 0)
        if (user.target, place) in _ROLES:
            return _ROLES[user.target, place]
        if user.target not in _ON_THE_WAY or place != 0:
            return 0
        node = user
    return 0


def _hoist_weights(arguments: list[dict[str, Any]], first: fx.Node) -> None:
    """Move the constant nodes that feed the later layers in front of the first one."""
    needed: set[fx.Node] = set()
    frontier = [v for a in arguments for k, v in a.items() if k != "x" and isinstance(v, fx.Node)]
    while frontier:
        node = frontier.pop()
        if node not in needed and node > first:
            needed.add(node)
            frontier.extend(node.all_input_nodes)
    for node in sorted(needed):
        first.prepend(node)


def _rule_name(group: list[fx.Node]) -> str:
    """What is merged: three layers are q, k, v, five with an indexer; two that meet in a SwiGLU are gate and up."""
    if len(group) == 2 and any(u.target == _MM.swiglu.default for u in group[0].users):
        return "merge_gate_up"
    if [_find_role(n) for n in group] == [0, 1, 2, 3, 4]:
        return "merge_qkv_index"
    return "merge_qkv" if len(group) == 3 else "merge_linears"
