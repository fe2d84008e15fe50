"""Match a pattern graph against a model graph, from its roots up, remembering where and why it failed."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import full_arguments, is_pure, operation_name, source_of, users_in_order

COMMUTATIVE = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.maximum.default,
    torch.ops.aten.minimum.default,
}


@dataclass
class Failure:
    """The deepest mismatch met: ``depth`` pattern nodes had matched when ``node`` did not."""

    depth: int
    node: str
    reason: str
    source: str


@dataclass
class Bindings:
    """A (partial) match: pattern node -> model node or literal, in the order they were bound."""

    values: dict[fx.Node, Any] = field(default_factory=dict)

    def copy(self) -> Bindings:
        return Bindings(dict(self.values))

    def calls(self) -> list[fx.Node]:
        """The matched model nodes that are calls (what a replacement removes), each once."""
        return list(dict.fromkeys(v for k, v in self.values.items() if k.op == "call_function"))


class Matcher:
    """Matches one pattern (a GraphModule whose placeholders are free) anywhere in a model graph."""

    def __init__(self, pattern: fx.GraphModule) -> None:
        self.pattern = pattern
        (output,) = (n for n in pattern.graph.nodes if n.op == "output")
        roots = output.args[0]
        self.roots: list[fx.Node] = list(roots) if isinstance(roots, tuple | list) else [roots]
        self.size = sum(n.op == "call_function" for n in pattern.graph.nodes)
        self.failure: Failure | None = None

    def match(self, anchor: fx.Node) -> Bindings | None:
        """Match the first root at ``anchor`` and the other roots wherever the bindings lead; None if it fails."""
        self.failure = None
        bindings = self._match_node(self.roots[0], anchor, Bindings())
        for root in self.roots[1:]:
            if bindings is None:
                return None
            if root not in bindings.values:
                bindings = self._match_elsewhere(root, bindings)
        return bindings if bindings is not None and self._check_interior(bindings) else None

    def _match_elsewhere(self, root: fx.Node, bindings: Bindings) -> Bindings | None:
        """Find another root among the nodes reachable from what is bound already."""
        taken = {v for v in bindings.values.values() if isinstance(v, fx.Node)}
        seen: set[fx.Node] = set()
        frontier = [v for k, v in bindings.values.items() if isinstance(v, fx.Node) and v.op != "get_attr"]
        for _ in range(self.size):
            users = [u for n in frontier for u in users_in_order(n) if u not in seen]
            seen.update(users)
            for user in users:
                if user not in taken and user.target == root.target:
                    found = self._match_node(root, user, bindings.copy())
                    if found is not None:
                        return found
            frontier = users
        anchor = bindings.calls()[0]
        self._fail(bindings, anchor, f"no second result {operation_name(root.target)} beside it")
        return None

    def _fail(self, bindings: Bindings, node: fx.Node, reason: str) -> None:
        depth = len(bindings.calls())
        if self.failure is None or depth > self.failure.depth:
            self.failure = Failure(depth, node.name, reason, source_of(node))

    def _match_value(self, wanted: Any, given: Any, owner: fx.Node, bindings: Bindings) -> Bindings | None:
        if isinstance(wanted, fx.Node):
            return self._match_node(wanted, given, bindings, owner)
        if isinstance(wanted, tuple | list):
            if not isinstance(given, tuple | list) or len(given) != len(wanted):
                self._fail(bindings, owner, f"{operation_name(owner.target)} has {given}, the pattern wants {wanted}")
                return None
            found: Bindings | None = bindings
            for w, g in zip(wanted, given, strict=True):
                found = self._match_value(w, g, owner, found) if found is not None else None
            return found
        if type(wanted) is not type(given) or wanted != given:
            self._fail(bindings, owner, f"{operation_name(owner.target)} has {given}, the pattern wants {wanted}")
            return None
        return bindings

    def _match_node(
        self, wanted: fx.Node, given: Any, bindings: Bindings, owner: fx.Node | None = None
    ) -> Bindings | None:
        if wanted in bindings.values:
            bound = bindings.values[wanted]
            same = bound is given if isinstance(bound, fx.Node) else type(bound) is type(given) and bound == given
            if not same and owner is not None:
                self._fail(bindings, owner, f"{wanted.name} is {bound} in one place and {given} in another")
            return bindings if same else None
        if wanted.op == "placeholder":
            bindings.values[wanted] = given
            return bindings
        if not isinstance(given, fx.Node) or given.op != "call_function" or given.target != wanted.target:
            place = given if isinstance(given, fx.Node) else owner
            if place is not None:
                found = operation_name(given.target) if isinstance(given, fx.Node) else repr(given)
                self._fail(bindings, place, f"found {found} where the pattern has {operation_name(wanted.target)}")
            return None
        bindings.values[wanted] = given
        return self._match_arguments(wanted, given, bindings)

    def _match_arguments(self, wanted: fx.Node, given: fx.Node, bindings: Bindings) -> Bindings | None:
        want, have = full_arguments(wanted), full_arguments(given)
        orders = [list(want)]
        if wanted.target in COMMUTATIVE and want.get("alpha", 1) == 1:
            first, second, *rest = want
            orders.append([second, first, *rest])
        for order in orders:
            found: Bindings | None = bindings.copy()
            for name, other in zip(want, order, strict=True):
                if found is None:
                    break
                if wanted.target is operator.getitem and name == "1" and want[name] != have[other]:
                    self._fail(found, given, f"takes element {have[other]}, the pattern takes {want[name]}")
                    found = None
                else:
                    found = self._match_value(want[name], have[other], given, found)
            if found is not None:
                return found
        return None

    def _check_interior(self, bindings: Bindings) -> bool:
        """A matched node that is no root must be used by matched nodes only, else removing it is impossible."""
        roots = {bindings.values[r] for r in self.roots}
        matched = set(bindings.calls())
        for node in matched - roots:
            outside = [u for u in users_in_order(node) if u not in matched]
            if outside and not _is_shared_input(node, roots):
                self._fail(bindings, node, f"its value is also used by {outside[0].name}, outside the pattern")
                return False
        return True


def _is_shared_input(node: fx.Node, roots: set[Any]) -> bool:
    """Splits and their items may stay behind for other readers; they cost nothing."""
    return is_pure(node) and (node.target is operator.getitem or "split" in operation_name(node.target))
