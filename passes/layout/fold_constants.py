"""f(weights)  ->  parameter     what depends on weights alone (quantized, merged) is computed once and stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from mmcompile.core.graph import depends_only_on_weights, full_arguments, get_parameter, infer_meta, set_parameter
from mmcompile.core.passes import Match, PassContext, PassResult

DESCRIPTION = "compute everything that depends on weights alone"
EFFECT = "bitwise"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Replace every constant node that a non-constant one reads by a parameter with a telling name."""
    graph, result = graph_module.graph, PassResult()
    constant = depends_only_on_weights(graph_module)
    values: dict[fx.Node, object] = {}
    left = {n: sum(u in constant for u in n.users) for n in constant}
    taken = {str(n.target) for n in graph.find_nodes(op="get_attr")}
    for node in [n for n in graph.nodes if n in constant]:
        readers = [u for u in node.users if u not in constant]
        if node.op != "get_attr":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _value(graph_module, n, values))
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for source in node.all_input_nodes:
                left[source] -= 1
                if left[source] == 0:
                    values.pop(source, None)
        if node.op != "get_attr" and readers:
            name = _name(node, readers[0], taken)
            set_parameter(graph_module, name, values[node].contiguous())  # type: ignore[attr-defined]
            with graph.inserting_before(node):
                folded = graph.get_attr(name)
            infer_meta(graph_module, [folded])
            node.replace_all_uses_with(folded, delete_user_cb=lambda u: u not in constant)
            result.matches.append(Match("fold_constants", (node.name,), (folded.name,), name))
    return result


def _value(graph_module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, object]) -> object:
    return get_parameter(graph_module, str(node.target)) if node.op == "get_attr" else values[node]


def _name(node: fx.Node, reader: fx.Node, taken: set[str]) -> str:
    """Merged module path and the operand it serves, such as layers.0.self_attn.q_proj_k_proj_v_proj.packed.

    Parameters of the same module are merged by their own names: layers.0.gate_up_packed.
    """
    sources: list[str] = []
    frontier = [node]
    while frontier:
        item = frontier.pop(0)
        if item.op == "get_attr" and str(item.target) not in sources:
            sources.append(str(item.target))
        frontier.extend(item.all_input_nodes)
    operand = next((k for k, v in full_arguments(reader).items() if v is node), "value")
    modules = list(dict.fromkeys(s.rpartition(".")[0] for s in sources))
    if "" in modules or (len(modules) == 1 and len(sources) > 1):
        folder, leaves, separator = _common_folder(sources), sources, "_"
    else:
        folder, leaves, separator = _common_folder(modules), modules, "."
    merged = "_".join(dict.fromkeys(leaf.rpartition(".")[2] for leaf in leaves))
    base = f"{folder}{merged}{separator}{operand}"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def _common_folder(paths: Sequence[str]) -> str:
    """The modules that contain all of ``paths``, with a final dot unless there is none."""
    folders = [path.split(".")[:-1] for path in paths]
    shared: list[str] = []
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared)
