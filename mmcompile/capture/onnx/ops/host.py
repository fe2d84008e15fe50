"""The arithmetic of sizes: operators on numpy arrays of ints and torch.SymInt, which leave no call in the graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from mmcompile.capture.onnx.values import Call, Host

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _elementwise(function: Callable[..., Any]) -> Callable[[Call], Host]:
    """Apply a Python function to every combination of elements, broadcast as numpy does."""

    def handler(call: Call) -> Host:
        arrays = np.broadcast_arrays(*[call.host(i) for i in range(len(call.values))])
        items = [function(*row) for row in zip(*[a.reshape(-1).tolist() for a in arrays], strict=True)]
        return tidy(items, arrays[0].shape)

    return handler


def tidy(items: list[Any], shape: tuple[int, ...]) -> Host:
    """An array of the items; of plain numbers if none of them is symbolic."""
    symbolic = any(isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool) for item in items)
    array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array.reshape(shape) if symbolic else np.array(items).reshape(shape)


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    if isinstance(a, int) and isinstance(b, int) and (a < 0) != (b < 0):
        return -(abs(a) // abs(b))
    return a // b


def _cast(call: Call) -> Host | None:
    array = call.host(0)
    to = call.attr("to")
    if to in _FLOATS:
        return None if array.dtype == object else array.astype(np.float64)
    if to in (TensorProto.INT64, TensorProto.INT32):
        return array if array.dtype == object else array.astype(np.int64)
    if to == TensorProto.BOOL:
        return np.array([bool(item) for item in array.reshape(-1).tolist()]).reshape(array.shape)
    return None


def _take(call: Call) -> Host | None:
    axis = call.attr("axis", 0)
    indices = call.host(1)
    return None if indices.dtype == object else np.take(call.host(0), indices.astype(np.int64), axis=axis)


def _slice(call: Call) -> Host | None:
    array = call.host(0)
    starts, ends = call.ints(1), call.ints(2)
    axes = call.ints(3) if call.has(3) else list(range(len(starts)))
    steps = call.ints(4) if call.has(4) else [1] * len(starts)
    if any(isinstance(v, torch.SymInt) for v in (*starts, *ends)):
        return None
    where = [slice(None)] * array.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        limit = None if step < 0 and end < -array.shape[axis] else end
        where[axis] = slice(start, limit, step)
    return array[tuple(where)]


def _concat(call: Call) -> Host:
    arrays = [call.host(i) for i in range(len(call.values))]
    return np.concatenate(arrays, axis=call.attr("axis", 0))


def _axes(call: Call) -> tuple[int, ...] | None:
    axes = call.attr("axes")
    if axes is None and call.has(1):
        axes = call.ints(1)
    return None if axes is None else tuple(int(a) for a in axes)


def _squeeze(call: Call) -> Host:
    return np.squeeze(call.host(0), axis=_axes(call))


def _unsqueeze(call: Call) -> Host:
    return np.expand_dims(call.host(0), axis=_axes(call) or ())


def _range(call: Call) -> Host | None:
    values = [call.host(i).reshape(-1)[0] for i in range(3)]
    return None if any(isinstance(v, torch.SymInt) for v in values) else np.arange(*values)


def _fold(function: Callable[[Any, Any], Any], start: Any) -> Callable[[Call], Host | None]:
    def handler(call: Call) -> Host | None:
        array, axes = call.host(0), _axes(call)
        if array.ndim > 1 or (axes is not None and len(axes) != 1):
            return None
        total = reduce(function, array.reshape(-1).tolist(), start)
        return tidy([total], (1,) if call.attr("keepdims", 1) and array.ndim else ())

    return handler


def _reshape(call: Call) -> Host | None:
    shape = call.host(1)
    return None if shape.dtype == object else call.host(0).reshape([int(s) for s in shape.tolist()])


def _expand(call: Call) -> Host | None:
    shape = call.host(1)
    if shape.dtype == object:
        return None
    array = call.host(0)
    return np.broadcast_to(array, np.broadcast_shapes(array.shape, tuple(int(s) for s in shape.tolist())))


def _constant_of_shape(call: Call) -> Host | None:
    shape = call.host(0)
    value = call.attr("value")
    if shape.dtype == object or shape.size != 1 or int(shape.reshape(-1)[0]) > 64:
        return None
    filler = value.array.reshape(-1)[0].item() if value is not None else 0.0
    return np.full([int(s) for s in shape.tolist()], filler)


def _where(condition: Any, x: Any, y: Any) -> Any:
    return x if condition else y


def _split(call: Call) -> tuple[Host, ...]:
    array, axis = call.host(0), call.attr("axis", 0)
    if call.has(1):
        return tuple(np.split(array, np.cumsum(call.ints(1))[:-1].tolist(), axis=axis))
    return tuple(np.array_split(array, len(call.step.outputs), axis=axis))


TABLE: dict[str, Callable[[Call], Any]] = {
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(_divide),
    "Mod": _elementwise(operator.mod),
    "Pow": _elementwise(operator.pow),
    "Neg": _elementwise(operator.neg),
    "Abs": _elementwise(abs),
    "Max": _elementwise(max),
    "Min": _elementwise(min),
    "Equal": _elementwise(operator.eq),
    "Greater": _elementwise(operator.gt),
    "GreaterOrEqual": _elementwise(operator.ge),
    "Less": _elementwise(operator.lt),
    "LessOrEqual": _elementwise(operator.le),
    "And": _elementwise(lambda a, b: bool(a) and bool(b)),
    "Or": _elementwise(lambda a, b: bool(a) or bool(b)),
    "Not": _elementwise(operator.not_),
    "Where": _elementwise(_where),
    "Sqrt": _elementwise(math.sqrt),
    "Ceil": _elementwise(lambda a: float(math.ceil(a))),
    "Floor": _elementwise(lambda a: float(math.floor(a))),
    "Reciprocal": _elementwise(lambda a: 1.0 / a),
    "Cast": _cast,
    "Gather": _take,
    "Slice": _slice,
    "Concat": _concat,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Range": _range,
    "ReduceProd": _fold(operator.mul, 1),
    "ReduceSum": _fold(operator.add, 0),
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Identity": lambda call: call.host(0),
    "Split": _split,
}
