"""Symbolic sizes of a graph: their names, new ones, and expressions over the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mmcompile.core.errors import CaptureError
from mmcompile.core.expression import Expression
from mmcompile.core.graph import find_fake_mode

_KEY = "symbols"


def symbol_names(graph_module: fx.GraphModule) -> dict[str, str]:
    """sympy name -> our name, e.g. {"s27": "tokens"}."""
    names: dict[str, str] = graph_module.meta.setdefault(_KEY, {})
    return names


def name_symbols(graph_module: fx.GraphModule, shapes: Mapping[str, tuple[str | None, ...]]) -> None:
    """Name the symbolic dimensions of placeholders: {"input_ids": ("tokens",)}."""
    names = symbol_names(graph_module)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and str(node.target) in shapes:
            for size, name in zip(node.meta["val"].shape, shapes[str(node.target)], strict=True):
                if name is not None and isinstance(size, torch.SymInt):
                    names[str(size.node.expr)] = name


def new_symbolic_tensor(graph_module: fx.GraphModule, shape: tuple[int | str, ...], dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor whose string dimensions are symbols of that name, made once and shared after."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    mode = find_fake_mode(graph_module)
    known: dict[str, torch.SymInt] = graph_module.meta.setdefault("symbolic_sizes", {})
    names = symbol_names(graph_module)
    for name in (d for d in shape if isinstance(d, str)):
        if name not in known:
            existing = _find_size(graph_module, name)
            if existing is None:
                hint = 5 + 2 * len(known)
                probe = mode.from_tensor(
                    torch.empty(hint),
                    source=ConstantSource(name),
                    symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
                )
                existing = probe.shape[0]
                names[str(existing.node.expr)] = name
            known[name] = existing
    sizes = [known[d] if isinstance(d, str) else d for d in shape]
    with mode:
        return torch.empty(sizes, dtype=dtype)


def _find_size(graph_module: fx.GraphModule, name: str) -> torch.SymInt | None:
    names = symbol_names(graph_module)
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and names.get(str(size.node.expr)) == name:
                return size
    return None


def to_expression(size: Any, names: Mapping[str, str]) -> Expression:
    """A dimension as an int or an expression over our symbol names; CaptureError on an unnamed symbol."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    renamed: dict[Any, Any] = {}
    for symbol in expression.free_symbols:
        if str(symbol) not in names:
            raise CaptureError(f"the size {expression} has no name", fix="declare it as a dynamic dimension")
        renamed[symbol] = type(symbol)(names[str(symbol)], integer=True, positive=True)
    return str(expression.xreplace(renamed))
