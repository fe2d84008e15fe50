"""Pooling of ONNX: window maxima, means and norms, with dilation, ceil mode and automatic padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.ops.convolution import find_pads, pad_spatial
from mmcompile.capture.onnx.values import Call

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class _Window:
    """Kernel, strides, dilations, padding and the extra padding at the end that ceil mode needs."""

    def __init__(self, call: Call, x: Tensor) -> None:
        self.kernel: list[int] = call.attr("kernel_shape")
        self.rank = rank = len(self.kernel)
        if rank not in _MAX:
            raise call.refuse(f"it has {rank} spatial dimensions, 1 to 3 are supported")
        self.strides: list[int] = call.attr("strides", [1] * rank)
        self.dilations: list[int] = call.attr("dilations", [1] * rank)
        self.pads = find_pads(call, x.shape[2:], self.kernel, self.strides, self.dilations)
        self.extra = [0] * 2 * rank
        if call.attr("ceil_mode", 0) and call.attr("auto_pad", "NOTSET") in ("NOTSET", ""):
            for i in range(rank):
                self.extra[rank + i] = self._find_extra(i, x.shape[2 + i])

    def _find_extra(self, i: int, size: Any) -> Any:
        span = self.dilations[i] * (self.kernel[i] - 1) + 1
        padded = size + self.pads[i] + self.pads[i + self.rank]
        count = -((padded - span) // -self.strides[i]) + 1
        if (count - 1) * self.strides[i] >= size + self.pads[i]:
            count = count - 1  # a window that would start in the padding at the end is left out
        return max((count - 1) * self.strides[i] + span - padded, 0)

    @property
    def all_pads(self) -> list[Any]:
        return [a + b for a, b in zip(self.pads, self.extra, strict=True)]

    @property
    def is_plain(self) -> bool:
        """Whether torch's own pooling can pad and step like this."""
        half = [k // 2 for k in self.kernel]
        even = self.pads[: self.rank] == self.pads[self.rank :] and not any(self.extra)
        return even and all(isinstance(p, int) and p <= h for p, h in zip(self.pads, half, strict=False))


def _max_pool(call: Call) -> Any:
    x = call.tensor(0)
    window = _Window(call, x)
    rank = window.rank
    carrier = x.dtype
    if not x.is_floating_point():
        x = x.double() if carrier.itemsize > 2 else x.float()
    if call.wants(1):
        return _max_pool_with_indices(call, x, window, carrier)
    if window.is_plain:
        y = _MAX[rank](x, window.kernel, window.strides, window.pads[:rank], window.dilations)
    else:
        x = pad_spatial(x, window.all_pads, -math.inf)
        y = _MAX[rank](x, window.kernel, window.strides, 0, window.dilations)
    return y.to(carrier)


def _max_pool_with_indices(call: Call, x: Tensor, window: _Window, carrier: torch.dtype) -> tuple[Tensor, Tensor]:
    """Indices count elements of the whole tensor, without its padding; storage order 1 is column-major."""
    rank, sizes = window.rank, list(x.shape[2:])
    padded = pad_spatial(x, window.all_pads, -math.inf)
    y, index = _MAX[rank](padded, window.kernel, window.strides, 0, window.dilations, return_indices=True)
    wide = list(padded.shape[2:])
    places = []
    for i in reversed(range(rank)):
        places.insert(0, torch.remainder(index, wide[i]) - window.pads[i])
        index = torch.div(index, wide[i], rounding_mode="floor")
    if call.attr("storage_order", 0):
        places, sizes = places[::-1], sizes[::-1]
    flat = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        flat = flat * size + place
    volume = math.prod(sizes)
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], *[1] * rank)
    return y.to(carrier), flat + planes * volume


def _window_sums(x: Tensor, window: _Window) -> Tensor:
    """Sum over every window of x [n, c, ...] that is padded already, as a convolution with ones."""
    n, c = x.shape[:2]
    ones = torch.ones([1, 1, *window.kernel], dtype=x.dtype)
    flat = x.reshape(n * c, 1, *x.shape[2:])
    y = _CONV[window.rank](flat, ones, None, window.strides, 0, window.dilations)
    return y.reshape(n, c, *y.shape[2:])


def _average_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    window = _Window(call, x)
    rank, whole = window.rank, bool(call.attr("count_include_pad", 0))
    if window.is_plain and window.dilations == [1] * rank:
        return _AVERAGE[rank](x, window.kernel, window.strides, window.pads[:rank], False, whole)
    total = _window_sums(pad_spatial(x, window.all_pads), window)
    mask = torch.ones_like(x[:1, :1])
    mask = pad_spatial(mask, window.pads, 1.0 if whole else 0.0)
    mask = pad_spatial(mask, window.extra)
    return total / _window_sums(mask, window)


def _lp_pool(call: Call) -> Tensor:
    x, p = call.tensor(0), call.attr("p", 2)
    window = _Window(call, x)
    return _window_sums(pad_spatial(x.abs() ** p, window.all_pads), window) ** (1.0 / p)


def _global(function: Callable[[Tensor, list[int]], Tensor]) -> Callable[[Call], Tensor]:
    def handler(call: Call) -> Tensor:
        x = call.tensor(0)
        return function(x, list(range(2, x.dim())))

    return handler


def _global_lp(call: Call) -> Tensor:
    x, p = call.tensor(0), call.attr("p", 2)
    return (x.abs() ** p).sum(list(range(2, x.dim())), keepdim=True) ** (1.0 / p)


def _max_unpool(call: Call) -> Tensor:
    x, index = call.tensor(0), call.tensor(1)
    kernel: list[int] = call.attr("kernel_shape")
    rank = len(kernel)
    strides, pads = call.attr("strides", [1] * rank), call.attr("pads", [0] * 2 * rank)
    sizes = [(x.shape[2 + i] - 1) * strides[i] + kernel[i] - pads[i] - pads[i + rank] for i in range(rank)]
    shape = [x.shape[0], x.shape[1], *sizes]
    base = torch.zeros(math.prod(shape), dtype=x.dtype)
    y = base.scatter(0, index.reshape(-1), x.reshape(-1)).reshape(shape)
    if call.has(2):
        wanted = [int(s) for s in call.ints(2)]
        y = pad_spatial(y, [0] * rank + [w - s for w, s in zip(wanted[2:], sizes, strict=True)])
    return y


TABLE: dict[str, Callable[[Call], Any]] = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": _global(lambda x, axes: x.mean(axes, keepdim=True)),
    "GlobalMaxPool": _global(lambda x, axes: torch.amax(x, axes, keepdim=True)),
    "GlobalLpPool": _global_lp,
    "MaxUnpool": _max_unpool,
}
