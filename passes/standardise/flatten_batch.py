"""Remove the leading batch dimension of 1: afterwards every activation is token-major, [tokens, ...]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mmcompile.core.graph import find_fake_mode, find_op, full_arguments
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.passes._edit import SYM_SIZE, emit, finish, is_call, shape_of

DESCRIPTION = "remove the leading batch dimension of 1"
EFFECT = "drop_batch"

aten = torch.ops.aten
INPUTS = ("input_ids", "positions")

_ALONG_DIMENSION = {
    aten.transpose.int,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.cat.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.softmax.int,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.topk.default,
}


class _Flattening:
    """One run: ``rows`` maps a node [1, ...] to the node that holds its only row [...]."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.rows: dict[fx.Node, fx.Node] = {}
        self.plain: dict[fx.Node, fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.obsolete: list[fx.Node] = []

    def take_inputs(self) -> list[str]:
        """Make the placeholders [tokens]; return their names."""
        names = []
        for node in self.graph_module.graph.find_nodes(op="placeholder"):
            if node.target in INPUTS and len(shape_of(node)) == 2:
                with find_fake_mode(self.graph_module):
                    node.meta["val"] = torch.empty(shape_of(node)[1:], dtype=node.meta["val"].dtype)
                self.rows[node] = node
                names.append(node.name)
        return names

    def visit(self, node: fx.Node) -> None:
        """Rewrite one call over rows where a rule allows it; otherwise give it its inputs as they were."""
        batched = [n for n in node.all_input_nodes if n in self.rows]
        with self.graph_module.graph.inserting_before(node):
            done = (
                self._rewrite(node) if batched or is_call(node, aten.unsqueeze.default, aten.reshape.default) else False
            )
            if done:
                self.obsolete.append(node)
            else:
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._restore)

    def _restore(self, node: fx.Node) -> fx.Node:
        """The node in its original shape."""
        if node in self.plain:
            return self.plain[node]
        if node not in self.rows:
            return node
        if node not in self.whole:
            self.whole[node] = emit(self.graph_module, node, aten.unsqueeze.default, self.rows[node], 0)
        return self.whole[node]

    def _row_or_plain(self, node: fx.Node) -> fx.Node:
        return self.rows[node] if node in self.rows else self._restore(node)

    def _rewrite(self, node: fx.Node) -> bool:
        target = node.target
        op = find_op(target)
        if target == SYM_SIZE:
            return self._set_plain(node, target, self.rows[node.args[0]], node.args[1] - 1)
        if target == aten.reshape.default:
            return self._reshape(node)
        if target == aten.unsqueeze.default and node.args[0] not in self.rows:
            return self._unsqueeze_plain(node)
        if target in _ALONG_DIMENSION:
            return self._shift_dimension(node)
        if target == aten.expand.default and shape_of(node)[0] == 1 and len(shape_of(node)) == len(node.args[1]):
            return self._set_rows(node, target, self.rows[node.args[0]], list(node.args[1][1:]))
        is_getitem = getattr(target, "__name__", "") == "getitem"
        pointwise = target == aten.to.dtype or torch.Tag.pointwise in getattr(target, "tags", ())
        if is_getitem or (op is not None and op.row_wise) or (pointwise and self._broadcasts(node)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._row_or_plain)
            return self._set_rows(node, target, *args, **kwargs)
        return False

    def _broadcasts(self, node: fx.Node) -> bool:
        """True if only batched inputs of full rank reach the first dimension of a pointwise result."""
        rank = len(shape_of(node))
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
        return all(self._rank(n) == rank if n in self.rows else self._rank(n) < rank for n in inputs)

    def _rank(self, node: fx.Node) -> int:
        rank = len(shape_of(node))
        return rank + 1 if self.rows.get(node) is node else rank

    def _reshape(self, node: fx.Node) -> bool:
        x, sizes = self._row_or_plain(node.args[0]), node.args[1]
        if shape_of(node)[0] == 1 and len(shape_of(node)) > 1:
            return self._set_rows(node, node.target, x, list(sizes[1:]))
        return self._set_plain(node, node.target, x, sizes) if node.args[0] in self.rows else False

    def _unsqueeze_plain(self, node: fx.Node) -> bool:
        """A batch dimension that the graph itself adds."""
        if node.args[1] % len(shape_of(node)) != 0:
            return False
        self.rows[node] = self._restore(node.args[0])
        return True

    def _shift_dimension(self, node: fx.Node) -> bool:
        given = full_arguments(node)
        first = given["tensors"] if "tensors" in given else [given["self"]]
        if not all(n in self.rows for n in first):
            return False
        rank = self._rank(first[0]) + (node.target == aten.unsqueeze.default)
        moved: dict[str, Any] = {}
        for name in ("dim", "dim0", "dim1"):
            if name in given:
                dims = given[name] if isinstance(given[name], list) else [given[name]]
                if 0 in (d % rank for d in dims):
                    return self._drop_dimension(node)
                shifted = [d % rank - 1 for d in dims]
                moved[name] = shifted if isinstance(given[name], list) else shifted[0]
        names = list(given)
        args = [moved.get(name, value) for name, value in zip(names, node.args, strict=False)]
        kwargs = {k: v for k, v in (dict(node.kwargs) | moved).items() if names.index(k) >= len(args)}
        args, kwargs = fx.map_arg((args, kwargs), lambda n: self.rows[n])
        return self._set_rows(node, node.target, *args, **kwargs)

    def _drop_dimension(self, node: fx.Node) -> bool:
        """The graph itself takes the only row."""
        if not is_call(node, aten.select.int, aten.squeeze.dim):
            return False
        self.plain[node] = self.rows[node.args[0]]
        return True

    def _set_rows(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> bool:
        self.rows[node] = emit(self.graph_module, node, target, *args, **kwargs)
        return True

    def _set_plain(self, node: fx.Node, target: Any, *args: Any) -> bool:
        self.plain[node] = emit(self.graph_module, node, target, *args)
        return True

    def finish_output(self, output: fx.Node) -> None:
        """Results lose the batch dimension too."""
        output.args = fx.map_arg(output.args, self._row_or_plain)
        for node in reversed(self.obsolete):
            self.graph_module.graph.erase_node(node)


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Inputs become [tokens], results lose their leading 1. What no rule covers still sees its [1, ...] inputs."""
    flattening = _Flattening(graph_module)
    names = flattening.take_inputs()
    if not names:
        return PassResult()
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function":
            flattening.visit(node)
        elif node.op == "output":
            flattening.finish_output(node)
    changed = tuple(node.name for node in flattening.rows.values())
    return finish(graph_module, PassResult([Match("flatten_batch", tuple(names), changed)]))
