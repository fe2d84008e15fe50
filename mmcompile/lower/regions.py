"""Group leftover elementwise and row-reduction nodes into regions, each of which becomes one generated kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import full_arguments
from mmcompile.core.region import CONSTANT_OPS, NORMALISING_OPS, POINTWISE_OPS, REDUCING_OPS, Region, Step
from mmcompile.core.symbols import to_expression

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_DTYPES = _FLOATS | {torch.bool, torch.int32, torch.int64}
# Tensor and scalar parameters of the aten overloads, in the order that core.region gives a step's arguments.
_PARAMETERS = {
    "clamp": ("self", "min", "max"),
    "clamp_min": ("self", "min"),
    "clamp_max": ("self", "max"),
    "where": ("condition", "self", "other"),
    "masked_fill": ("self", "mask", "value"),
    "pow": ("self", "exponent"),
}


@dataclass
class Group:
    """Nodes of one region in graph order, with its inputs (outside nodes) and outputs (members read outside)."""

    nodes: list[fx.Node]
    shape: tuple[Any, ...]

    def inputs(self) -> list[fx.Node]:
        """Outside nodes that members read, in order of first use."""
        members = set(self.nodes)
        return list(dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in members))

    def outputs(self) -> list[fx.Node]:
        """Members that somebody outside reads."""
        members = set(self.nodes)
        return [n for n in self.nodes if any(u not in members for u in n.users)]


def packet_name(node: fx.Node) -> str:
    """aten overload-packet name of a call ("add"), "" for anything that is not aten; casts are "_to_copy"."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return "_to_copy" if target._opname == "to" and target._overloadname == "dtype" else target._opname


def find_regions(graph_module: fx.GraphModule) -> dict[fx.Node, Group]:
    """Assign every node that a generated kernel can compute to a group; groups are convex and grown greedily."""
    order = {n: i for i, n in enumerate(graph_module.graph.nodes)}
    groups: dict[fx.Node, Group] = {}
    for node in graph_module.graph.nodes:
        shape = _region_shape(node)
        if shape is None:
            continue
        home = next((g for g in _candidates(node, groups) if _may_join(node, shape, g, order)), None)
        if home is None:
            home = Group([], shape)
        home.nodes.append(node)
        groups[node] = home
    return groups


def _candidates(node: fx.Node, groups: dict[fx.Node, Group]) -> list[Group]:
    found = [groups[i] for i in node.all_input_nodes if i in groups]
    return list({id(g): g for g in found}.values())


def _may_join(node: fx.Node, shape: tuple[Any, ...], group: Group, order: dict[fx.Node, int]) -> bool:
    """A group is emitted at its last member, so nobody outside may have read a member before ``node``."""
    if shape != group.shape:
        return False
    members = set(group.nodes)
    return all(order[u] > order[node] or u in members or u is node for m in group.nodes for u in m.users)


def _region_shape(node: fx.Node) -> tuple[Any, ...] | None:
    """The iteration shape of a node that regions understand (the row shape for a reduction), else None."""
    name = packet_name(node)
    value = node.meta.get("val")
    if not name or not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES or name in CONSTANT_OPS:
        return None
    if name in POINTWISE_OPS:
        if _arguments(node, name) is None:
            return None
        return tuple(to_expression(d) for d in value.shape)
    if name in REDUCING_OPS | NORMALISING_OPS and _reduces_last(node, name):
        source = node.args[0].meta["val"]  # type: ignore[union-attr]
        return tuple(to_expression(d) for d in source.shape)
    return None


def _reduces_last(node: fx.Node, name: str) -> bool:
    arguments = full_arguments(node)
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    dims = arguments.get("dim")
    last = source.dim() - 1
    if source.dtype not in _FLOATS or not isinstance(source.shape[-1], int):
        return False
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or [d % source.dim() for d in dims] != [last]:
        return False
    keeps = name in NORMALISING_OPS or bool(arguments.get("keepdim"))
    return keeps and not arguments.get("half_to_float") and name != "argmax"


def _arguments(node: fx.Node, name: str) -> tuple[Any, ...] | None:
    """Arguments of a pointwise step (nodes and scalars), None if the overload says something a step cannot."""
    given = full_arguments(node)
    if name in _PARAMETERS:
        values = tuple(given.get(p) for p in _PARAMETERS[name])
    elif name == "_to_copy":
        return (node.args[0],)
    else:
        values = tuple(a for a in node.args)
        extra = {k for k, v in node.kwargs.items() if v is not None} - {"alpha", "approximate", "memory_format"}
        if extra:
            return None
    if any(isinstance(v, tuple | list) for v in values):
        return None
    if any(isinstance(v, fx.Node) and not isinstance(v.meta["val"], torch.Tensor) for v in values):
        return None
    if name == "pow" and isinstance(values[1], fx.Node):
        return None
    return values


def build_region(group: Group, outputs: tuple[fx.Node, ...]) -> Region:
    """Write a group as a core.region.Region; inputs are in0, in1, ... in the order of ``group.inputs()``."""
    names: dict[fx.Node, str] = {node: f"in{i}" for i, node in enumerate(group.inputs())}
    steps = []
    for i, node in enumerate(group.nodes):
        names[node] = f"v{i}"
        name = packet_name(node)
        reducing = name in REDUCING_OPS | NORMALISING_OPS
        values = (node.args[0],) if reducing else _arguments(node, name) or ()
        options: dict[str, Any] = {k: v for k, v in node.kwargs.items() if k in ("alpha", "approximate")}
        if name in REDUCING_OPS:
            options["keepdim"] = True
        if name == "var":
            options["correction"] = full_arguments(node).get("correction", 1)
        args = tuple(names[v] if isinstance(v, fx.Node) else v for v in values)
        dtype = str(node.meta["val"].dtype).removeprefix("torch.")
        steps.append(Step(names[node], name, args, dtype, options))
    return Region(tuple(names[n] for n in group.inputs()), tuple(steps), tuple(names[n] for n in outputs))
