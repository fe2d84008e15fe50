"""Symbolic sizes of a graph: symbols under their own names, new symbolic tensors, sizes as expressions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc
from torch.utils._sympy.value_ranges import ValueRanges

from mmcompile.core.expression import Expression
from mmcompile.core.graph import find_fake_mode

LARGEST = 1 << 30


def make_fake_mode(symbols: Mapping[str, tuple[int, int]]) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """A fake mode whose symbols carry our names, and their SymInts; ``symbols``: name -> (smallest, largest)."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    made: dict[str, torch.SymInt] = {}
    for name, (low, high) in symbols.items():
        made[name] = make_symbol(mode, name, low, high, hint=min(max(low, 11 + 2 * len(made)), high))
    return mode, made


def make_symbol(mode: FakeTensorMode, name: str, low: int, high: int, hint: int) -> torch.SymInt:
    """A new size called ``name`` in the mode's shape environment."""
    env = mode.shape_env
    assert env is not None
    symbol = sympy.Symbol(name, positive=True, integer=True)
    env.backed_var_to_val[symbol] = sympy.Integer(hint)
    env.var_to_range[symbol] = ValueRanges(low, high)
    env.var_to_range_sloc[symbol] = ValueRangesSLoc(env._get_sloc(), env._get_sloc())
    env.var_to_sources[symbol] = [ConstantSource(name)]
    size = env.create_symintnode(symbol, hint=hint)
    assert isinstance(size, torch.SymInt)
    return size


def graph_symbols(graph_module: fx.GraphModule) -> dict[str, torch.SymInt]:
    """The named sizes of a graph; new ones are added to this dictionary."""
    names: dict[str, torch.SymInt] = graph_module.meta.setdefault("symbols", {})
    return names


def new_symbolic_tensor(graph_module: fx.GraphModule, shape: tuple[Expression, ...], dtype: torch.dtype) -> Any:
    """A fake tensor; string dimensions are symbols, made on first use, or sums such as "batch + 1"."""
    mode, names = find_fake_mode(graph_module), graph_symbols(graph_module)
    sizes: list[Any] = []
    for dimension in shape:
        name, plus, more = str(dimension).partition(" + ")
        if isinstance(dimension, str) and name not in names:
            names[name] = make_symbol(mode, name, 1, LARGEST, hint=17 + 2 * len(names))
        base = names[name] if isinstance(dimension, str) else dimension
        sizes.append(base + int(more) if plus else base)
    with mode:
        return torch.empty(sizes, dtype=dtype)


def to_expression(size: Any) -> Expression:
    """A dimension as an int or as text over the symbol names, e.g. "tokens" or "batch + 1"."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return _spell(size.node.expr)


@cache
def _spell(expression: sympy.Expr) -> Expression:
    return int(expression) if expression.is_Integer else str(expression)
