"""Where every value of a graph lives: buffers, and views on them for the operations that move no data."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import get_parameter
from mmcompile.core.infer import InferenceMemo
from mmcompile.core.kernel import Operand
from mmcompile.core.plan import Buffer, Role, View
from mmcompile.core.symbols import to_expression

_VIEWS = {
    "alias", "detach", "expand", "narrow", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view", "view_as", "expand_as", "chunk",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """torch's short name, "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Operands:
    """The buffers of one phase, the views of its nodes, the layouts of its caches, what was inferred on its graph."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    views: dict[fx.Node, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    memo: InferenceMemo = field(default_factory=InferenceMemo)

    def add_buffer(self, name: str, value: torch.Tensor, role: Role) -> View:
        """Make a contiguous buffer for a value and return the view on all of it."""
        shape = tuple(to_expression(d) for d in value.shape)
        self.buffers[name] = Buffer(name=name, shape=shape, dtype=dtype_name(value.dtype), role=role)
        strides = tuple(to_expression(s) for s in _contiguous_strides(value.shape))
        return View(buffer=name, shape=shape, strides=strides)

    def dtype(self, view: View) -> str:
        """dtype of the buffer under a view."""
        return self.buffers[view.buffer].dtype

    def operand(self, view: View | None) -> Operand | None:
        """What a kernel template sees of a view."""
        if view is None:
            return None
        buffer = self.buffers[view.buffer]
        return Operand(view.shape, view.strides, buffer.dtype, buffer.layout)


def _contiguous_strides(shape: torch.Size) -> list[Any]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return strides


def is_view(node: fx.Node) -> bool:
    """True if the node is an operation that may just look at its input's memory in another way."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == "aten" and target._opname in _VIEWS


def place_input(operands: Operands, graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Give a placeholder or a parameter its buffer."""
    if node.op == "get_attr":
        name = str(node.target)
        tensor = get_parameter(graph_module, name)
        operands.weights[name] = tensor
        operands.views[node] = operands.add_buffer(name, tensor, "weight")
    else:
        role: Role = "state" if str(node.target).startswith("kv_cache_") else "input"
        operands.views[node] = operands.add_buffer(str(node.target), node.meta["val"], role)


def resolve_view(operands: Operands, node: fx.Node) -> bool:
    """Express a view-like node as a View on its input's buffer; False if it would have to copy."""
    if node.target is operator.getitem:
        operands.views[node] = operands.views[node.args[0]][node.args[1]]  # type: ignore[index]
        return True
    base = operands.views[node.args[0]]  # type: ignore[index]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    inputs = base.strides, base.offset, args, tuple(kwargs.items())
    meta = operands.memo.remember((_probe, node.target), inputs, lambda: _probe(node.target, base, args, kwargs))
    if meta is None:
        return False
    operands.views[node] = [_as_view(base, m) for m in meta] if isinstance(meta, list) else _as_view(base, meta)
    return True


def _as_view(base: View, value: torch.Tensor) -> View:
    return View(
        buffer=base.buffer,
        shape=tuple(to_expression(d) for d in value.shape),
        strides=tuple(to_expression(s) for s in value.stride()),
        offset=to_expression(value.storage_offset()),
    )


def _probe(target: Any, base: View, given: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the operation on a fake tensor laid out like ``base``; the result, None if it is not a view of it."""
    source, *args = given
    mode = source.fake_mode
    names = {str(s): s for s in _sizes(source)}
    with mode:
        whole = torch.empty_strided(source.shape, [_size(s, names) for s in base.strides], dtype=source.dtype)
        if base.offset != 0:
            offset = _size(base.offset, names)
            room = torch.empty(
                (offset + sum((n - 1) * s for n, s in zip(whole.shape, whole.stride(), strict=True)) + 1,),
                dtype=source.dtype,
            )
            whole = room.as_strided(whole.shape, whole.stride(), offset)
        result = target(whole, *args, **kwargs)
    flat = list(result) if isinstance(result, tuple | list) else [result]
    key = whole.untyped_storage()._cdata
    if any(r.untyped_storage()._cdata != key for r in flat):
        return None
    return flat if isinstance(result, tuple | list) else result


def _sizes(value: torch.Tensor) -> list[Any]:
    env = value.fake_mode.shape_env  # type: ignore[attr-defined]
    return [env.create_symintnode(s, hint=int(v)) for s, v in env.backed_var_to_val.items()]


def _size(expression: Any, names: dict[str, Any]) -> Any:
    """An expression over symbols as a SymInt; view strides are ints or ints times one symbol."""
    if isinstance(expression, int):
        return expression
    return eval(expression, {"__builtins__": {}}, names)
