"""Tools that clean and standardise passes share: inserting calls, refusing with a reason, evaluating subgraphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from mmcompile.core.graph import get_parameter, infer_meta, is_pure, operation_name, source_of
from mmcompile.core.passes import Match, NearMiss, PassResult

SYM_SIZE = torch.ops.aten.sym_size.int


class Refusal(Exception):
    """A candidate that does not fit: the node that differs and why."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason

    def as_near_miss(self, rule: str) -> NearMiss:
        """The record for the report."""
        return NearMiss(rule, self.node.name, self.reason, source_of(self.node))


def is_call(value: Any, *targets: Any) -> bool:
    """True if ``value`` is a node that calls one of ``targets``."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets


def describe(value: Any) -> str:
    """What a node computes, for messages."""
    if not isinstance(value, fx.Node):
        return repr(value)
    return operation_name(value.target) if value.op == "call_function" else f"{value.op} {value.target}"


def expect_call(value: Any, owner: fx.Node, *targets: Any) -> fx.Node:
    """``value`` if it calls one of ``targets``, else a Refusal at ``value`` (or at ``owner``, for a literal)."""
    if is_call(value, *targets):
        return value
    wanted = " or ".join(operation_name(t) for t in targets)
    raise Refusal(value if isinstance(value, fx.Node) else owner, f"found {describe(value)} where {wanted} is needed")


def only_user(node: fx.Node) -> fx.Node:
    """The single user of a node inside a pattern, else a Refusal."""
    if len(node.users) != 1:
        raise Refusal(node, f"its value has {len(node.users)} users, the pattern needs exactly one")
    return next(iter(node.users))


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of a tensor node."""
    return node.meta["val"].dtype


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Shape of a tensor node; dynamic dimensions are SymInts."""
    return tuple(node.meta["val"].shape)


def is_dynamic(dimension: Any) -> bool:
    """True for a symbolic dimension."""
    return isinstance(dimension, torch.SymInt)


def emit(graph_module: fx.GraphModule, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call at the insertion point, with value, source and module path of ``origin``."""
    node = graph_module.graph.call_function(target, args, kwargs)
    infer_meta(graph_module, [node])
    node.meta["source"] = source_of(origin)
    node.meta["nn_module_stack"] = origin.meta.get("nn_module_stack", {})
    return node


def replace(graph_module: fx.GraphModule, rule: str, old: fx.Node, new: fx.Node, result: PassResult) -> None:
    """Move the uses of ``old`` to ``new``, erase what has become dead below ``old``, and record the match."""
    source = source_of(old)
    old.replace_all_uses_with(new)
    erased = erase_dead(graph_module, [old])
    result.matches.append(Match(rule, tuple(erased), (new.name,), source))


def erase_dead(graph_module: fx.GraphModule, roots: Iterable[fx.Node]) -> list[str]:
    """Erase unused pure calls and weights among ``roots`` and what only they used; return the names."""
    erased: list[str] = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node._erased or node.users or node.op not in ("call_function", "get_attr") or not is_pure(node):
            continue
        inputs = node.all_input_nodes
        graph_module.graph.erase_node(node)
        erased.append(node.name)
        stack += inputs
    return erased


def finish(graph_module: fx.GraphModule, result: PassResult) -> PassResult:
    """Have the code made anew when the graph runs next; the runner lints it after every pass."""
    graph_module.recompile()
    return result


def find_ancestors(node: fx.Node) -> list[fx.Node]:
    """The node and everything it is computed from, in graph order."""
    seen = {node}
    stack = [node]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return sorted(seen)


def evaluate(graph_module: fx.GraphModule, node: fx.Node, inputs: Mapping[str, Tensor]) -> Any:
    """Concrete value of ``node`` for the given placeholders.

    Raises Refusal if it needs another placeholder, or a weight that is not at hand.
    """
    values: dict[fx.Node, Any] = {}
    for step in find_ancestors(node):
        if step.op == "placeholder":
            if str(step.target) not in inputs:
                raise Refusal(step, f"it depends on the input {step.target!r}")
            values[step] = inputs[str(step.target)]
        elif step.op == "get_attr":
            values[step] = get_parameter(graph_module, str(step.target))
            if values[step].is_meta:
                raise Refusal(step, f"it depends on the weight {step.target!r}, which is not loaded")
        else:
            args, kwargs = fx.map_arg((step.args, step.kwargs), lambda n: values[n])
            values[step] = step.target(*args, **kwargs)
    return values[node]


def depends_on_value(node: fx.Node, placeholder: str) -> bool:
    """True if ``node`` reads the elements, and not only the size, of a placeholder."""
    return any(
        parent.op == "placeholder" and parent.target == placeholder and not is_call(step, SYM_SIZE)
        for step in find_ancestors(node)
        for parent in step.all_input_nodes
    )


def find_input(graph_module: fx.GraphModule, name: str) -> fx.Node | None:
    """The placeholder of that name, None if the graph has none."""
    return next((n for n in graph_module.graph.find_nodes(op="placeholder") if n.target == name), None)
