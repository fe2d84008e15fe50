"""Trace two of the equal layers of a model and repeat them for the others, if it is proved that they are equal."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from mmcompile.capture.layers import Layer, find_equal_layers, patched, watch
from mmcompile.capture.replay import Trace, replay

TRACED = 2
"""Equal calls that are traced; the second one is repeated, the first one must have given the same graph."""

_LIBRARY = torch.library.Library("mmcompile_capture", "DEF")
_LIBRARY.define("enter(Tensor[] inputs, int call) -> ()")
_LIBRARY.define("leave(Tensor[] outputs, int call) -> ()")
_LIBRARY.define("repeat(Tensor[] inputs, int call) -> Tensor[]")
_ENTER, _LEAVE, _REPEAT = (getattr(torch.ops.mmcompile_capture, n).default for n in ("enter", "leave", "repeat"))
_PROMISED: dict[int, list[torch.Tensor]] = {}  # call -> what the call that it repeats returned
_LITERALS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)


@torch.library.register_fake("mmcompile_capture::enter", lib=_LIBRARY)
def _enter(inputs: list[torch.Tensor], call: int) -> None:
    return None


@torch.library.register_fake("mmcompile_capture::leave", lib=_LIBRARY)
def _leave(outputs: list[torch.Tensor], call: int) -> None:
    return None


@torch.library.register_fake("mmcompile_capture::repeat", lib=_LIBRARY)
def _repeat(inputs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in _PROMISED[call]]


has_side_effect(_ENTER)
has_side_effect(_LEAVE)


class NotProvedError(Exception):
    """Layers may not be equal after all; the text says why."""


@dataclass
class Call:
    """One call of a layer during the export.

    Attributes:
        leaves, spec: the flattened (args, kwargs). inputs: its distinct tensors.
        outputs: the distinct tensors of the result that are no inputs. result: maps inputs and outputs to the result.
        repeats: the number of the traced call that stands for this one, None if it was traced itself.
    """

    layer: Layer
    leaves: list[Any]
    spec: pytree.TreeSpec
    inputs: list[torch.Tensor]
    key: Any
    outputs: list[torch.Tensor] = field(default_factory=list)
    result: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] | None = None
    repeats: int | None = None


class Repeater:
    """Intercepts the calls of equal layers while a model is exported, proves the repetition, and expands the graph."""

    def __init__(self, model: nn.Module) -> None:
        self.layers, self._indices = find_equal_layers(model)
        self.calls: list[Call] = []
        self._by_state = {id(layer.module.__dict__): layer for layer in self.layers}
        self._traced: dict[Any, list[int]] = {}
        self._read: set[str] = set()
        self._inside = False

    @contextmanager
    def intercept(self) -> Iterator[None]:
        """Calls of the layers are traced between markers, or replaced by one node, while this is active."""
        changes = []
        for owner in dict.fromkeys(type(layer.module) for layer in self.layers):
            changes.append((owner, "forward", self._wrap(owner.forward)))
        with ExitStack() as stack:
            stack.enter_context(patched(changes))
            stack.enter_context(watch(self._indices, self._note_read))
            yield

    def _note_read(self, attribute: str) -> None:
        if self._inside:
            self._read.add(attribute)

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            layer = self._by_state.get(id(module.__dict__))
            if layer is None or self._inside:
                return forward(module, *args, **kwargs)
            return self._call(layer, lambda: forward(module, *args, **kwargs), args, kwargs)

        return wrapped

    def _call(self, layer: Layer, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = list({id(t): t for t in leaves if isinstance(t, torch.Tensor)}.values())
        plain = _list_containers(spec) <= {tuple, list, dict, namedtuple, None}
        key = (layer.kind, str(spec) if plain else object(), _freeze_leaves(leaves, inputs))
        call = Call(layer, leaves, spec, inputs, key)
        number = len(self.calls)
        self.calls.append(call)
        equal = self._traced.setdefault(call.key, [])
        if len(equal) < TRACED or any(c.layer is layer for c in self.calls[:-1]):
            equal.append(number)
            return self._trace(call, number, run)
        pattern = self.calls[equal[TRACED - 1]]
        if pattern.result is None:
            raise NotProvedError(f"{layer.path} returns something else than tensors and literals")
        call.repeats = equal[TRACED - 1]
        _PROMISED[number] = pattern.outputs
        return pattern.result(inputs, _REPEAT(inputs, number))

    def _trace(self, call: Call, number: int, run: Callable[[], Any]) -> Any:
        before = _snapshot(call.layer.module)
        _ENTER(call.inputs, number)
        self._inside = True
        try:
            result = run()
        finally:
            self._inside = False
        if _snapshot(call.layer.module) != before:
            raise NotProvedError(f"{call.layer.path} changes its own attributes while it runs")
        flat, spec = pytree.tree_flatten(result)
        known = {id(t): ("input", i) for i, t in enumerate(call.inputs)}
        places: list[tuple[str, Any]] = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
                known[id(leaf)] = ("output", len(call.outputs))
                call.outputs.append(leaf)
            places.append(known[id(leaf)] if isinstance(leaf, torch.Tensor) else ("literal", leaf))
        _LEAVE(call.outputs, number)
        if all(kind != "literal" or isinstance(value, _LITERALS) for kind, value in places):
            call.result = lambda inputs, outputs: pytree.tree_unflatten(
                [{"input": inputs, "output": outputs}[k][v] if k != "literal" else v for k, v in places], spec
            )
        return result

    def prove(self) -> None:
        """Run every repeated layer, and the one it repeats, on meta tensors: they must do the very same.

        Raises NotProvedError, also if a layer reads its own index."""
        made: dict[int, Trace] = {}
        with watch(self._indices, self._note_read):
            for call in self.calls:
                if call.repeats is None:
                    continue
                if call.repeats not in made:
                    made[call.repeats] = self._replay(self.calls[call.repeats])
                    if made[call.repeats].shares:
                        raise NotProvedError(f"{call.layer.path} {made[call.repeats].shares}")
                if self._replay(call) != made[call.repeats]:
                    other = self.calls[call.repeats].layer.path
                    raise NotProvedError(f"{call.layer.path} does not run the operations of {other}")
        self._check_read()

    def _check_read(self) -> None:
        if self._read:
            raise NotProvedError(f"a layer reads its own index, {sorted(self._read)[0]}")

    def _replay(self, call: Call) -> Trace:
        self._inside = True
        try:
            trace = replay(call.layer.module, call.leaves, call.spec)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            raise NotProvedError(f"{call.layer.path} does not run on meta tensors: {reason}") from error
        finally:
            self._inside = False
        if trace.kept():
            raise NotProvedError(f"{call.layer.path} keeps a tensor somewhere else than in its result")
        return trace

    def export(self, run: Callable[[], torch.export.ExportedProgram]) -> nn.Module:
        """The exported module with every layer in place; ``run`` exports and makes writes pure. Raises NotProvedError.

        Functionalisation sees a repeated layer as one call with fresh results. That is right, since it is proved that
        such a layer writes into no tensor of others and returns none.
        """
        try:
            with self.intercept():
                program = run()
        finally:
            _PROMISED.clear()
        self._check_read()
        module = program.module(check_guards=False)
        expand(module.graph, self.calls)
        self.prove()
        return module

    def describe(self) -> str:
        """How many layers were repeated, for the report."""
        repeated = sum(call.repeats is not None for call in self.calls)
        return f"{repeated} of {len(self.calls)} equal layers repeated, the others traced" if repeated else ""


def _snapshot(layer: nn.Module) -> Any:
    """Names and identities of everything that a layer's modules hold."""
    return [
        (path, name, id(value), [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else None)
        for path, module in layer.named_modules()
        for name, value in module.__dict__.items()
        if name != "_parameters" and name != "_buffers"
    ]


def _freeze_leaves(leaves: list[Any], inputs: list[torch.Tensor]) -> Any:
    """Hashable form of the arguments: tensors by shape, strides, dtype and which of them are the same."""
    order = {id(t): i for i, t in enumerate(inputs)}
    return tuple((_freeze(leaf), order.get(id(leaf))) for leaf in leaves)


def _freeze(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(map(_freeze, leaf.shape)), tuple(map(_freeze, leaf.stride())), leaf.dtype, leaf.device
    if isinstance(leaf, torch.SymInt):
        return leaf.node.expr
    return (type(leaf), repr(leaf)) if isinstance(leaf, _LITERALS) else object()  # anything else equals nothing


def _list_containers(spec: pytree.TreeSpec) -> set[Any]:
    """Types of all containers of a flattened structure."""
    return {spec.type}.union(*(_list_containers(child) for child in spec.children()))


def expand(graph: fx.Graph, calls: list[Call]) -> None:
    """Replace every repeat by a copy of the nodes of the call that it repeats, on its own weights; drop the markers.

    Raises NotProvedError if the two traced calls of a kind gave different graphs, or if a layer reads or leaves
    values by another way than its arguments, results and weights.
    """
    enters, leaves, repeats = (
        {int(n.args[1]): n for n in graph.find_nodes(op="call_function", target=target)}
        for target in (_ENTER, _LEAVE, _REPEAT)
    )
    weights = {str(n.target): n for n in graph.find_nodes(op="get_attr")}
    bodies: dict[int, _Body] = {}
    for number, node in repeats.items():
        pattern = calls[number].repeats
        assert pattern is not None
        if pattern not in bodies:
            bodies[pattern] = _Body(enters[pattern], leaves[pattern], calls[pattern].layer.path)
            first = next(i for i, c in enumerate(calls) if c.key == calls[pattern].key)
            other = _Body(enters[first], leaves[first], calls[first].layer.path)
            if other.describe() != bodies[pattern].describe():
                raise NotProvedError(f"{other.path} and {bodies[pattern].path} give different graphs")
        bodies[pattern].copy_to(node, calls[number].layer.path, weights)
    for node in (*enters.values(), *leaves.values()):
        graph.erase_node(node)


class _Body:
    """The nodes of one traced call, between its markers."""

    def __init__(self, enter: fx.Node, leave: fx.Node, path: str) -> None:
        self.path, self.inputs, self.outputs = path, list(enter.args[0]), list(leave.args[0])  # type: ignore[arg-type]
        self.nodes: list[fx.Node] = []
        seen = set(self.inputs)
        stack = [n for n in self.outputs if n not in seen]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "get_attr":
                self._check_weight(node)
            elif _is_size(node) and (node < enter or not all(map(_is_size, node.all_input_nodes))):
                continue  # a size of the graph's inputs, the same for every layer
            elif node < enter:
                raise NotProvedError(f"{path} reads {node.name}, which is no argument of it")
            else:
                self.nodes.append(node)
                stack += node.all_input_nodes
        self.nodes.sort()
        self._check_uses(enter, leave)

    def _check_weight(self, node: fx.Node) -> None:
        if not str(node.target).startswith(f"{self.path}."):
            raise NotProvedError(f"{self.path} reads {node.target}, which is no weight of it")

    def _check_uses(self, enter: fx.Node, leave: fx.Node) -> None:
        """Nothing that the call computes, needed for its results or not, may be used outside but for its results."""
        results, node = set(self.outputs), enter
        while node is not leave:
            outside = [user.name for user in node.users if user > leave]
            if outside and node not in results and not _is_size(node):
                raise NotProvedError(f"{outside[0]} reads {node.name}, which {self.path} does not return")
            node = node.next

    def describe(self) -> Any:
        """The computation with inputs, weights and values by number; symbolic sizes as expressions."""
        label: dict[fx.Node, Any] = {n: ("input", i) for i, n in enumerate(self.inputs)}

        def name(node: fx.Node) -> Any:
            if node in label:
                return label[node]
            if node.op == "get_attr":
                return str(node.target).removeprefix(self.path)
            return str(node.meta["val"]) if _is_size(node) else node

        def freeze(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value).__name__, tuple(map(freeze, value))
            if isinstance(value, dict):
                return "dict", tuple((k, freeze(v)) for k, v in value.items())
            return name(value) if isinstance(value, fx.Node) else (type(value), repr(value))

        steps = []
        for node in self.nodes:
            if not _is_size(node):
                steps.append((node.op, node.target, freeze(node.args), freeze(dict(node.kwargs))))
                label[node] = ("value", len(steps))
        return steps, freeze(self.outputs)

    def copy_to(self, place: fx.Node, path: str, weights: dict[str, fx.Node]) -> None:
        """Put a copy before the repeat node ``place``, on the weights of the layer at ``path``, and replace it."""
        graph = place.graph
        copied: dict[fx.Node, fx.Node] = dict(zip(self.inputs, place.args[0], strict=True))  # type: ignore[arg-type]

        def find(node: fx.Node) -> fx.Node:
            if node in copied or node.op != "get_attr":
                return copied.get(node, node)
            return weights[path + str(node.target).removeprefix(self.path)]

        with graph.inserting_before(place):
            for node in self.nodes:
                copied[node] = graph.node_copy(node, find)
                copied[node].meta["nn_module_stack"] = {
                    key.replace(self.path, path) if _is_inside(name, self.path) else key: (
                        (path + name.removeprefix(self.path), kind) if _is_inside(name, self.path) else (name, kind)
                    )
                    for key, (name, kind) in node.meta.get("nn_module_stack", {}).items()
                }
        for item in list(place.users):
            item.replace_all_uses_with(find(self.outputs[item.args[1]]))  # type: ignore[index]
            graph.erase_node(item)
        graph.erase_node(place)


def _is_size(node: fx.Node) -> bool:
    """True for a node whose value is a number over the symbols, not a tensor."""
    return isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
