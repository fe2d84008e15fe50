"""Bring an exported graph into canonical form: plain calls, one spelling of casts, named symbols, sources on nodes."""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from mmcompile.core.graph import get_parameter, infer_meta, make_graph_module
from mmcompile.core.infer import InferenceMemo
from mmcompile.core.symbols import make_fake_mode

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).resolve().parents[1]
_ROOTS = (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")), _PACKAGE.parent)

_CASTS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.other,
    torch.ops.aten.type_as.default,
    torch.ops.aten._to_copy.default,
}
_CHECKS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch._check,
}


def shorten_path(file: str) -> str:
    """Path relative to the installation, the project or the working directory; unchanged if under none of them."""
    path = Path(file)
    for root in (*_ROOTS, Path.cwd()):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return file


def is_model_code(file: str) -> bool:
    """True for a file that belongs to the model, not to torch or to the capture itself."""
    return not file.startswith((_TORCH, "torch/", str(_PACKAGE / "capture"), "<"))


def find_source(stack_trace: str | None) -> str:
    """ "file:line" of the innermost frame outside torch in a formatted stack, "" if there is none."""
    frames = [(f, line) for f, line in _FRAME.findall(stack_trace or "") if is_model_code(f)]
    return f"{shorten_path(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def canonicalise(exported: nn.Module, symbols: dict[str, tuple[int, int]], shapes: dict[str, Any]) -> fx.GraphModule:
    """Canonical copy of an exported module; weights are shared with it.

    Args:
        symbols: name -> (smallest, largest) value.
        shapes: placeholder name -> shape with ints and symbol names.

    Afterwards there are no checks and no dead code, every cast is ``aten.to.dtype(x, dtype)`` and changes the dtype,
    tied weights have one name, a single result is returned bare, and every node has ``meta["val"]`` (fake, over the
    named symbols), ``meta["source"]`` and ``meta["nn_module_stack"]``.
    """
    graph = exported.graph
    graph.set_codegen(fx.graph.CodeGen())
    _drop_checks(graph)
    graph = _number_names(graph)
    graph_module = make_graph_module(exported, graph)
    graph = graph_module.graph
    _unify_casts(graph)
    _merge_tied_weights(graph_module)
    _trim_signature(graph, shapes)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    find = functools.cache(find_source)  # equal layers have equal stacks
    for node in graph.nodes:
        node.meta["source"] = find(node.meta.get("stack_trace"))
        node.meta.setdefault("nn_module_stack", {})
    _propagate(graph_module, symbols, shapes)
    graph.lint()
    graph_module.recompile()
    return graph_module


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        is_guard = node.op == "call_module" and str(node.target).startswith("_guards")
        if is_guard or (node.op == "call_function" and node.target in _CHECKS):
            graph.erase_node(node)


def _number_names(graph: fx.Graph) -> fx.Graph:
    """A copy whose calls are named by operation and order, however the graph came about."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: made[n])
        name = None if node.op == "call_function" else node.name
        made[node] = copy.create_node(node.op, node.target, args, kwargs, name, node.type)
        made[node].meta = dict(node.meta)
    return copy


def _unify_casts(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _CASTS:
            continue
        x, dtype = node.args[0], node.meta["val"].dtype
        if x.meta["val"].dtype == dtype:
            node.replace_all_uses_with(x)
        else:
            node.target, node.args, node.kwargs = torch.ops.aten.to.dtype, (x, dtype), {}


def _merge_tied_weights(graph_module: fx.GraphModule) -> None:
    first: dict[int, fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        tensor = getattr_or_none(graph_module, str(node.target))
        if tensor is not None and first.setdefault(id(tensor), node) is not node:
            node.replace_all_uses_with(first[id(tensor)])


def getattr_or_none(graph_module: fx.GraphModule, name: str) -> torch.Tensor | None:
    """The tensor behind a get_attr target, None if it is something else (a submodule of a higher-order operation)."""
    try:
        return get_parameter(graph_module, name)
    except TypeError:
        return None


def _trim_signature(graph: fx.Graph, shapes: dict[str, Any]) -> None:
    """Drop placeholders of non-tensor arguments and unwrap a single result."""
    for node in graph.find_nodes(op="placeholder"):
        if str(node.target) not in shapes:
            graph.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    if isinstance(results, tuple | list) and len(results) == 1:
        output.args = (results[0],)


def _propagate(graph_module: fx.GraphModule, symbols: dict[str, tuple[int, int]], shapes: dict[str, Any]) -> None:
    """Recompute every fake value over the named symbols."""
    mode, names = make_fake_mode(symbols)
    graph_module.meta["fake_mode"] = mode
    graph_module.meta["symbols"] = names
    graph_module.meta["symbolic_sizes"] = names
    memo = graph_module.meta["inferred"] = InferenceMemo()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            shape = [names.get(d, d) for d in shapes[str(node.target)]]
            with mode:
                node.meta["val"] = torch.empty(shape, dtype=node.meta["val"].dtype)
        elif node.op == "get_attr":
            tensor = get_parameter(graph_module, str(node.target))
            node.meta["val"] = memo.infer_call(mode, torch.empty, (tuple(tensor.shape),), {"dtype": tensor.dtype})
        else:
            infer_meta(graph_module, [node])
        node.meta.pop("tensor_meta", None)
