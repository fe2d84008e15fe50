"""Rewrite rules (two functions, before and after) and the one driver that applies them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import infer_meta, operation_name, source_of, written_inputs
from mmcompile.core.match import Bindings, Matcher
from mmcompile.core.passes import Match, NearMiss, PassResult

Guard = Callable[[dict[str, Any]], str | None]


@dataclass(frozen=True)
class Rewrite:
    """A fusion rule.

    Attributes:
        name: shown in reports and named by ``--require``.
        pattern: function over ``torch.ops`` calls; its parameters are free: tensors and, just as well, scalars.
            Returns the root node or a tuple of roots (first: the anchor); other values inside must not be used outside.
        replacement: function of (a subset of) the same parameters returning as many values (None for a root that
            nobody reads, such as a cache insertion).
        guard: given the matched values by parameter name (FX nodes or literals), None or the reason to refuse.
        irrelevant: parameters that the replacement may leave out, each with the reason.
        enough: matched pattern nodes from which a failure counts as a near miss worth reporting.
    """

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    guard: Guard | None = None
    irrelevant: tuple[tuple[str, str], ...] = ()
    enough: int = 2

    def __post_init__(self) -> None:
        check_coverage(self)

    @cached_property
    def traced(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Pattern and replacement as graphs."""
        return fx.symbolic_trace(self.pattern), fx.symbolic_trace(self.replacement)


def check_coverage(rule: Rewrite) -> None:
    """Prove that no attribute is lost: every pattern parameter is read by the replacement or declared irrelevant.

    Literals inside a pattern are compared exactly, defaults included, so a parameter is the only way for a value to
    vary; one that the replacement does not read would be dropped silently. Both sides must write the same tensors,
    and every call of the pattern must lead to a root, since matching starts there. Raises LoweringError.
    """
    pattern, replacement = rule.traced
    known = {n.target for n in pattern.graph.nodes if n.op == "placeholder" and n.users}
    read = {n.target for n in replacement.graph.nodes if n.op == "placeholder" and n.users}
    declared = {name for name, reason in rule.irrelevant if reason}
    where = f"{inspect.getsourcefile(rule.pattern)}: rule {rule.name}"
    if read - known:
        raise LoweringError(
            f"the replacement reads {sorted(map(str, read - known))}, unknown to the pattern", where=where
        )
    lost = known - read - declared
    if lost:
        raise LoweringError(
            f"the replacement drops the attribute {', '.join(sorted(map(str, lost)))}",
            where=where,
            fix="pass it on or list it under irrelevant with a reason",
        )
    idle = [n.name for n in pattern.graph.nodes if n.op == "call_function" and not n.users]
    if idle:
        raise LoweringError(
            f"the pattern computes {', '.join(idle)} for nobody", where=where, fix="return it as a root"
        )
    before, after = (", ".join(_written_names(side)) or "nothing" for side in rule.traced)
    if before != after:
        raise LoweringError(f"the pattern writes {before}, the replacement {after}", where=where)


def _written_names(traced: fx.GraphModule) -> list[str]:
    """Parameters of a pattern or replacement that its calls write."""
    return sorted({str(w.target) for n in traced.graph.nodes for w in written_inputs(n)})


def apply_rules(graph_module: fx.GraphModule, rules: Sequence[Rewrite]) -> PassResult:
    """Apply each rule in turn wherever it matches, last node first; report matches and near misses.

    The rules are variants of one fusion: a near miss is dropped where another of them matched after all, and of several
    at one anchor the one that came furthest is kept.
    """
    result = PassResult()
    misses: dict[fx.Node, tuple[int, NearMiss]] = {}
    for rule in rules:
        _apply_rule(graph_module, rule, result, misses)
    result.near_misses = [miss for anchor, (_, miss) in misses.items() if not getattr(anchor, "_erased", False)]
    graph_module.recompile()
    return result


def _apply_rule(
    graph_module: fx.GraphModule, rule: Rewrite, result: PassResult, misses: dict[fx.Node, tuple[int, NearMiss]]
) -> None:
    matcher = Matcher(rule.traced[0])
    target = matcher.roots[0].target
    for node in reversed(list(graph_module.graph.find_nodes(op="call_function", target=target))):
        if getattr(node, "_erased", False):
            continue
        bindings = matcher.match(node)
        failure, miss = matcher.failure, None
        if bindings is not None:
            refused = _guard(rule, bindings) or _replace(graph_module, rule, matcher, bindings, result)
            if refused:
                miss = matcher.size, NearMiss(rule.name, node.name, refused, source_of(node))
        elif failure is not None and failure.depth >= min(rule.enough, matcher.size - 1) > 0:
            miss = failure.depth, NearMiss(rule.name, failure.node, failure.reason, failure.source)
        if miss is not None:
            misses[node] = max(misses.get(node, miss), miss, key=lambda entry: entry[0])


def _by_name(bindings: Bindings) -> dict[str, Any]:
    return {str(k.target): v for k, v in bindings.values.items() if k.op == "placeholder"}


def _guard(rule: Rewrite, bindings: Bindings) -> str | None:
    return rule.guard(_by_name(bindings)) if rule.guard is not None else None


def _replace(
    graph_module: fx.GraphModule, rule: Rewrite, matcher: Matcher, bindings: Bindings, result: PassResult
) -> str | None:
    """Insert the replacement, move the uses of the roots, erase what is dead. Returns a reason if order forbids it."""
    graph = graph_module.graph
    values = _by_name(bindings)
    inputs = [v for v in values.values() if isinstance(v, fx.Node)]
    roots = [bindings.values[r] for r in matcher.roots]
    calls = bindings.calls()
    # FX orders nodes by their place in the graph.
    anchor = max([min(roots), *(n.next for n in inputs)])
    if any(anchor > user for r in roots for user in r.users if user not in calls):
        return "an input of the fused operation is computed after the first use of its result"
    conflict = _find_conflict(calls, anchor)
    if conflict is not None:
        return f"it would move a write past {conflict.name}, which uses the same tensor"
    made = _copy_replacement(graph, rule.traced[1], values, anchor)
    new = made[0] if isinstance(made[0], tuple) else (made[0],)
    infer_meta(graph_module, made[1])
    source = source_of(roots[0])
    for node in made[1]:
        node.meta.setdefault("source", source)
        node.meta.setdefault("nn_module_stack", roots[0].meta.get("nn_module_stack"))
    for old, value in zip(roots, new, strict=True):
        if value is not None:
            old.replace_all_uses_with(value, delete_user_cb=lambda user: user not in made[1])
    for node in sorted(calls, reverse=True):
        if not node.users:
            graph.erase_node(node)
    names = tuple(n.name for n in made[1] if n.op == "call_function")
    result.matches.append(Match(rule.name, tuple(n.name for n in calls), names, source))
    return None


def _find_conflict(matched: list[fx.Node], place: fx.Node) -> fx.Node | None:
    """A node outside the match, between a matched write and ``place``, that reads or writes the same tensor."""
    for writer in matched:
        written = written_inputs(writer)
        if written:
            other, end = sorted((writer, place))
            while other is not end:
                if other not in matched and not written.isdisjoint(other.all_input_nodes):
                    return other
                other = other.next
    return None


def _copy_replacement(
    graph: fx.Graph, replacement: fx.GraphModule, values: dict[str, Any], anchor: fx.Node
) -> tuple[Any, list[fx.Node]]:
    copied: dict[fx.Node, Any] = {}
    created: list[fx.Node] = []
    with graph.inserting_before(anchor):
        for node in replacement.graph.nodes:
            if node.op == "placeholder":
                copied[node] = values[str(node.target)]
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda n: copied[n]), created
            else:
                args = fx.map_arg(node.args, lambda n: copied[n])
                if node.target is operator.getitem and not isinstance(args[0], fx.Node):
                    copied[node] = args[0][args[1]]  # an element of a literal, such as a head count of a shape
                    continue
                kwargs = fx.map_arg(node.kwargs, lambda n: copied[n])
                copied[node] = graph.call_function(node.target, args, kwargs)
                created.append(copied[node])
    raise AssertionError(f"replacement {operation_name(replacement)} has no output")
