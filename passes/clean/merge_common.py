"""Compute equal pure calls once (common-subexpression elimination)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import is_pure, operation_name
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import finish, replace

DESCRIPTION = "compute equal pure calls once"
EFFECT = "bitwise"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Later equal calls reuse the first one. Calls with a random result and calls that write are left alone."""
    result = PassResult()
    first: dict[Any, fx.Node] = {}
    for node in list(graph_module.graph.nodes):
        if not _is_mergeable(node):
            continue
        key = (node.op, node.target, _freeze(node.args), _freeze(sorted(node.kwargs.items())))
        other = first.setdefault(key, node)
        if other is not node:
            replace(graph_module, "merge_common", node, other, result)
    return finish(graph_module, result)


def _is_mergeable(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not is_pure(node):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags and operation_name(node.target) != "aten.empty.memory_format"


def _freeze(value: Any) -> Any:
    """Hashable form that tells 1, 1.0 and True apart."""
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    return (type(value), value)
