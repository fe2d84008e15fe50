"""Reductions of ONNX: sums, norms, extremes, arg-extremes, running sums, top-k, softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmcompile.capture.onnx.values import Call

Reduce = Callable[[Tensor, list[int], bool], Tensor]


def read_axes(call: Call) -> list[int] | None:
    """Axes from the attribute or from input 1; None if neither is given or it is empty."""
    axes = call.attr("axes")
    if axes is None and call.has(1):
        axes = [int(a) for a in call.ints(1)]
    return axes or None


def _reduction(function: Reduce) -> Callable[[Call], Tensor]:
    def handler(call: Call) -> Tensor:
        x, axes = call.tensor(0), read_axes(call)
        if axes is None:
            if call.attr("noop_with_empty_axes", 0):
                return function(x, [], True)
            axes = list(range(x.dim()))
        if not axes:
            return function(x, [], True)
        return function(x, sorted(a % x.dim() for a in axes), bool(call.attr("keepdims", 1)))

    return handler


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype) if axes else x


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return x
    return x.mean(axes, keepdim=keep) if x.is_floating_point() else x.double().mean(axes, keepdim=keep).to(x.dtype)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in reversed(axes):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _extreme(function: Callable[..., Tensor], empty: float) -> Reduce:
    def reduce(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if not axes:
            return x
        if any(isinstance(x.shape[a], int) and x.shape[a] == 0 for a in axes):
            shape = [1 if i in axes else s for i, s in enumerate(x.shape) if keep or i not in axes]
            return x.new_full(shape, _limit(x.dtype, empty))
        return function(x, axes, keepdim=keep)

    return reduce


def _limit(dtype: torch.dtype, sign: float) -> Any:
    if dtype == torch.bool:
        return sign > 0
    if dtype.is_floating_point:
        return sign * math.inf
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return torch.log(torch.exp(x))
    return torch.logsumexp(x if x.is_floating_point() else x.float(), axes, keepdim=keep).to(x.dtype)


def _norm_2(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    wide = x if x.is_floating_point() else x.double()
    return torch.sqrt(_sum(wide * wide, axes, keep)).to(x.dtype)


def _log_sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.log(_sum(x if x.is_floating_point() else x.double(), axes, keep)).to(x.dtype)


def _arg_extreme(function: Callable[..., Tensor]) -> Callable[[Call], Tensor]:
    def handler(call: Call) -> Tensor:
        x, axis, keep = call.tensor(0), call.attr("axis", 0), bool(call.attr("keepdims", 1))
        if not call.attr("select_last_index", 0):
            return function(x, axis, keepdim=keep)
        return x.shape[axis] - 1 - function(torch.flip(x, [axis]), axis, keepdim=keep)

    return handler


def _running(function: Callable[..., Tensor], start: int) -> Callable[[Call], Tensor]:
    def handler(call: Call) -> Tensor:
        x, axis = call.tensor(0), int(call.ints(1)[0])
        if call.attr("reverse", 0):
            x = torch.flip(x, [axis])
        if call.attr("exclusive", 0):
            first = torch.full_like(x.narrow(axis, 0, 1), start)
            x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
        x = function(x, axis, dtype=x.dtype)
        return torch.flip(x, [axis]) if call.attr("reverse", 0) else x

    return handler


def _top_k(call: Call) -> tuple[Tensor, Tensor]:
    """Equal values keep the order of their indices, which torch.topk does not promise."""
    x, k, axis = call.tensor(0), call.ints(1)[0], call.attr("axis", -1)
    ordered = torch.sort(x, dim=axis, descending=bool(call.attr("largest", 1)), stable=True)
    return ordered.values.narrow(axis, 0, k), ordered.indices.narrow(axis, 0, k)


def _hardmax(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attr("axis", -1)
    best = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, best, 1.0)


def _lp_norm(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attr("axis", -1)
    norm = _norm_2(x, [axis], True) if call.attr("p", 2) == 2 else x.abs().sum(axis, keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


TABLE: dict[str, Callable[[Call], Any]] = {
    "ReduceSum": _reduction(_sum),
    "ReduceMean": _reduction(_mean),
    "ReduceProd": _reduction(_product),
    "ReduceMax": _reduction(_extreme(torch.amax, -1.0)),
    "ReduceMin": _reduction(_extreme(torch.amin, 1.0)),
    "ReduceL1": _reduction(lambda x, axes, keep: _sum(x.abs(), axes, keep)),
    "ReduceL2": _reduction(_norm_2),
    "ReduceLogSum": _reduction(_log_sum),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: _sum(x * x, axes, keep)),
    "ArgMax": _arg_extreme(torch.argmax),
    "ArgMin": _arg_extreme(torch.argmin),
    "CumSum": _running(torch.cumsum, 0),
    "CumProd": _running(torch.cumprod, 1),
    "TopK": _top_k,
    "Softmax": lambda call: torch.softmax(call.tensor(0), call.attr("axis", -1)),
    "LogSoftmax": lambda call: torch.log_softmax(call.tensor(0), call.attr("axis", -1)),
    "Hardmax": _hardmax,
    "LpNormalization": _lp_norm,
}
