"""FX helpers: canonical arguments, stable names, shapes, where a node came from, readable text."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from mmcompile.core.infer import InferenceMemo
from mmcompile.core.ops.define import find_op


def operation_name(target: Any) -> str:
    """Readable operation of a call target: "mm.rms_norm", "aten.add.Tensor", "getitem"."""
    op = find_op(target)
    if op is not None:
        return f"mm.{op.name}"
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    return getattr(target, "__name__", str(target))


def source_of(node: fx.Node) -> str:
    """Where in the model's source the node came from, "" if unknown."""
    return str(node.meta.get("source", ""))


def full_arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by parameter name, defaults filled in; positional index names for plain functions."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    values: dict[str, Any] = {}
    for i, parameter in enumerate(target._schema.arguments):
        if i < len(node.args):
            values[parameter.name] = node.args[i]
        elif parameter.name in node.kwargs:
            values[parameter.name] = node.kwargs[parameter.name]
        else:
            values[parameter.name] = parameter.default_value
    return values


def value_of(node: fx.Node) -> Any:
    """The fake value (shape and dtype) of a node; None if the pass that made it did not set one."""
    return node.meta.get("val")


def get_parameter(graph_module: fx.GraphModule, name: str) -> torch.Tensor:
    """The tensor behind a get_attr target such as "model.layers.0.mlp.up_proj.weight"."""
    value: Any = graph_module
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is not a tensor")
    return value


def set_parameter(graph_module: fx.GraphModule, name: str, value: torch.Tensor) -> None:
    """Register a tensor under a dotted name as a buffer, making the modules on the way."""
    *path, leaf = name.split(".")
    module: torch.nn.Module = graph_module
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    if hasattr(module, leaf):
        delattr(module, leaf)
    module.register_buffer(leaf, value.detach())


def make_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule over ``root``'s tensors whose ``recompile`` waits until the graph runs: passes need no code."""
    return _LazyGraphModule(root, graph)


def users_in_order(node: fx.Node) -> list[fx.Node]:
    """Users sorted by their place in the graph (FX keeps insertion order of uses instead)."""
    return sorted(node.users, key=lambda user: user)


def infer_meta(graph_module: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
    """Compute meta["val"] of new nodes from the fake values of their inputs, in the given order.

    Equal calls of pure operations on equal shapes and dtypes share one value: equal layers are inferred once.
    """
    mode = find_fake_mode(graph_module)
    memo: InferenceMemo = graph_module.meta.setdefault("inferred", InferenceMemo())
    for node in nodes:
        if node.op == "get_attr":
            tensor = get_parameter(graph_module, str(node.target))
            node.meta["val"] = memo.infer_parameter(mode, tensor) if mode else tensor
        elif node.op == "call_function":
            if mode is None:
                raise RuntimeError("the graph carries no fake values")
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = memo.infer_call(mode, node.target, args, kwargs)


def find_fake_mode(graph_module: fx.GraphModule) -> Any:
    """The FakeTensorMode of the graph's values, found on the first fake tensor."""
    cached = graph_module.meta.get("fake_mode")
    if cached is not None:
        return cached
    for node in graph_module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            graph_module.meta["fake_mode"] = mode
            return mode
    return None


def is_getitem(node: fx.Node, index: int | None = None) -> bool:
    """True for ``getitem(x, index)``; any index if None."""
    return node.op == "call_function" and node.target is operator.getitem and index in (None, node.args[1])


def describe_value(value: Any) -> str:
    """Short shape and dtype, e.g. "bf16[tokens, 576]"."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
        return f"{dtype}[{', '.join(str(d) for d in value.shape)}]"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe_value(v) for v in value) + ")"
    return "" if value is None else str(value)


def print_graph(graph_module: fx.GraphModule) -> str:
    """Stable text of a graph, one node a line: name, operation, arguments, value, source (``graph_text`` reads it)."""
    lines = []
    described: dict[int, str] = {}
    for node in graph_module.graph.nodes:
        given = [_print_argument(a) for a in node.args]
        args = ", ".join(given + [f"{k}={_print_argument(v)}" for k, v in node.kwargs.items()])
        if node.op in ("placeholder", "get_attr"):
            text = f"{node.name} = {node.op} {node.target}"
        elif node.op == "output":
            text = f"return {args}"
        else:
            text = f"{node.name} = {operation_name(node.target)}({args})"
        value = value_of(node)
        if id(value) not in described:
            described[id(value)] = describe_value(value)
        comment = "  ".join(part for part in (described[id(value)], source_of(node)) if part)
        lines.append(f"{text}    # {comment}" if comment else text)
    return "\n".join(lines) + "\n"


def _print_argument(value: Any) -> str:
    """An argument as Python writes it; devices as the strings that torch takes for them."""
    return repr(str(value)) if isinstance(value, str | torch.device) else str(value)


def is_pure(node: fx.Node) -> bool:
    """True if the node neither writes an argument nor leaves the graph."""
    if node.op != "call_function":
        return node.op in ("get_attr", "placeholder")
    target = node.target
    return not (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)


def written_inputs(node: fx.Node) -> set[fx.Node]:
    """The input nodes whose tensors a call writes, by the mutation annotations of its schema."""
    if is_pure(node) or not isinstance(node.target, torch._ops.OpOverload):
        return set()
    arguments = full_arguments(node)
    written = {p.name for p in node.target._schema.arguments if p.alias_info is not None and p.alias_info.is_write}
    return {arguments[name] for name in written if isinstance(arguments[name], fx.Node)}


def depends_only_on_weights(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose value is fixed by get_attr constants alone (weights and what is computed from them)."""
    constant: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (
            node.op == "call_function" and is_pure(node) and inputs and all(n in constant for n in inputs)
        ):
            constant.add(node)
    return constant
