"""Gather and scatter operators of ONNX, and those that are only possible on constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.values import Call

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _wrap_index(index: Tensor, size: Any) -> Tensor:
    return torch.where(index < 0, index + size, index)


def _gather(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attr("axis", 0) % max(call.tensor(0).dim(), 1)
    number = call.literal(1)
    if number is not None:
        index_rank = call.tensor(1).dim()
        picked = x.select(axis, int(number))
        for _ in range(index_rank):
            picked = picked.unsqueeze(axis)
        return picked
    index = call.tensor(1)
    if axis == 0 and x.dim() == 2 and x.is_floating_point() and not call.folding:
        # Token ids, a graph input that indexes a table, are never negative: leave their lookup bare.
        return F.embedding(index if call.attr("ids") else _wrap_index(index, x.shape[0]), x)
    index = _wrap_index(index, x.shape[axis])
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return torch.index_select(x, axis, index.reshape(-1)).reshape(shape)


def _gather_elements(call: Call) -> Tensor:
    x, index, axis = call.tensor(0), call.tensor(1).long(), call.attr("axis", 0)
    return torch.gather(x, axis, _wrap_index(index, x.shape[axis]))


def _gather_nd(call: Call) -> Tensor:
    x, index, batch = call.tensor(0), call.tensor(1).long(), call.attr("batch_dims", 0)
    depth = int(index.shape[-1])
    columns = [_wrap_index(index[..., i], x.shape[batch + i]) for i in range(depth)]
    for axis in range(batch):
        lane = torch.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(index.dim() - 1)])
        columns.insert(axis, lane)
    return x[tuple(columns)]


def _scatter_elements(call: Call) -> Tensor:
    x, index, updates = call.tensors()
    axis, reduction = call.attr("axis", 0), call.attr("reduction", "none")
    index = _wrap_index(index.long(), x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, _REDUCTIONS[reduction])


def _scatter_nd(call: Call) -> Tensor:
    x, index, updates = call.tensors()
    index, reduction = index.long(), call.attr("reduction", "none")
    depth = int(index.shape[-1])
    columns = tuple(_wrap_index(index[..., i], x.shape[i]) for i in range(depth))
    if reduction in ("none", "add"):
        return x.index_put(columns, updates, accumulate=reduction == "add")
    rest = x.shape[depth:]
    flat = x.reshape(-1, *rest)
    row = torch.zeros_like(columns[0])
    for column, size in zip(columns, x.shape[:depth], strict=True):
        row = row * size + column
    row, updates = row.reshape(-1), updates.reshape(-1, *rest)
    spread = row.reshape(-1, *[1] * len(rest)).expand(updates.shape)
    return flat.scatter_reduce(0, spread, updates, _REDUCTIONS[reduction]).reshape(x.shape)


def _tensor_scatter(call: Call) -> Tensor:
    """New keys or values written into a cache at each sequence's own place, around its end if "circular"."""
    past, update, axis = call.tensor(0), call.tensor(1), call.attr("axis", -2)
    axis = axis % past.dim()
    batch, length = update.shape[0], update.shape[axis]
    start = call.tensor(2).long() if call.has(2) else torch.zeros(batch, dtype=torch.int64)
    place = start[:, None] + torch.arange(length)[None]
    if call.attr("mode", "linear") == "circular":
        place = torch.remainder(place, past.shape[axis])
    shape = [1] * past.dim()
    shape[0], shape[axis] = batch, length
    return past.scatter(axis, place.reshape(shape).expand(update.shape), update)


def _only_constant(function: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """An operator whose result's size depends on values: possible when those are constants."""

    def handler(call: Call) -> Any:
        if not call.folding:
            raise call.refuse(
                "the size of its result depends on values",
                fix="fix the inputs that it depends on, e.g. --fix NAME=VALUE",
            )
        return function(call)

    return handler


def _compress(call: Call) -> Tensor:
    x, condition, axis = call.tensor(0), call.tensor(1), call.attr("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    kept = torch.nonzero(condition).flatten()
    return torch.index_select(x, axis, kept[kept < x.shape[axis]])


def _unique(call: Call) -> tuple[Tensor, ...]:
    x, axis = call.tensor(0), call.attr("axis")
    rows = x.reshape(-1, 1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1)
    values, inverse, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    first = torch.stack([torch.nonzero(inverse == i)[0, 0] for i in range(len(values))])
    if not call.attr("sorted", 1):
        order = torch.argsort(first)
        rank = torch.argsort(order)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    unique = x.reshape(-1)[first] if axis is None else torch.index_select(x, axis, first)
    return unique, first, inverse, counts


TABLE: dict[str, Callable[[Call], Any]] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "NonZero": _only_constant(lambda call: torch.nonzero(call.tensor(0)).T.contiguous()),
    "Compress": _only_constant(_compress),
    "Unique": _only_constant(_unique),
}
