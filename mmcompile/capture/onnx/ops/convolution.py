"""Convolutions of ONNX, with automatic and uneven padding, and their integer forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.ops.quantization import dequantize, quantize
from mmcompile.capture.onnx.values import Call

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def find_pads(
    call: Call, sizes: Sequence[Any], kernel: list[int], strides: list[int], dilations: list[int]
) -> list[Any]:
    """Padding [begin of every axis, then end of every axis], from ``pads`` or ``auto_pad``."""
    mode = call.attr("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return list(call.attr("pads", [0] * 2 * len(kernel)))
    if mode == "VALID":
        return [0] * 2 * len(kernel)
    begin, end = [], []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        out = (size + s - 1) // s
        total = max((out - 1) * s + (k - 1) * d + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return begin + end


def pad_spatial(x: Tensor, pads: list[Any], value: float = 0.0) -> Tensor:
    """Pad the last axes of ``x`` by pads in ONNX's order."""
    half = len(pads) // 2
    flat = [p for i in reversed(range(half)) for p in (pads[i], pads[i + half])]
    return F.pad(x, flat, value=value) if any(not isinstance(p, int) or p for p in flat) else x


def convolve(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution that the attributes of ``call`` describe."""
    rank = weight.dim() - 2
    if rank not in _CONV:
        raise call.refuse(f"it has {rank} spatial dimensions, 1 to 3 are supported")
    kernel = [int(k) for k in weight.shape[2:]]
    strides, dilations = call.attr("strides", [1] * rank), call.attr("dilations", [1] * rank)
    pads = find_pads(call, x.shape[2:], kernel, strides, dilations)
    if pads[:rank] != pads[rank:]:
        x, pads = pad_spatial(x, pads), [0] * 2 * rank
    return _CONV[rank](x, weight, bias, strides, pads[:rank], dilations, call.attr("group", 1))


def _conv(call: Call) -> Tensor:
    return convolve(call, call.tensor(0), call.tensor(1), call.maybe(2))


def _conv_transpose(call: Call) -> Tensor:
    x, weight, bias = call.tensor(0), call.tensor(1), call.maybe(2)
    rank = weight.dim() - 2
    if rank not in _TRANSPOSED:
        raise call.refuse(f"it has {rank} spatial dimensions, 1 to 3 are supported")
    strides, dilations = call.attr("strides", [1] * rank), call.attr("dilations", [1] * rank)
    extra, shape = call.attr("output_padding", [0] * rank), call.attr("output_shape")
    mode = call.attr("auto_pad", "NOTSET")
    full = [(x.shape[2 + i] - 1) * strides[i] + (int(weight.shape[2 + i]) - 1) * dilations[i] + 1 for i in range(rank)]
    if shape is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        shape = [x.shape[2 + i] * strides[i] for i in range(rank)]
    pads = call.attr("pads", [0] * 2 * rank)
    if shape is not None:
        totals = [full[i] + extra[i] - shape[-rank + i] for i in range(rank)]
        low = [t // 2 if mode != "SAME_LOWER" else t - t // 2 for t in totals]
        pads = low + [t - p for t, p in zip(totals, low, strict=True)]
    y = _TRANSPOSED[rank](x, weight, None, strides, 0, 0, call.attr("group", 1), dilations)
    y = pad_spatial(y, [0] * rank + [max(e, 0) for e in extra])
    sizes = [full[i] + extra[i] - pads[i] - pads[i + rank] for i in range(rank)]
    for i in range(rank):
        before, after = max(pads[i], 0), max(pads[i + rank], 0)
        y = y.narrow(2 + i, before, y.shape[2 + i] - before - after)
    y = pad_spatial(y, [0] * rank + [max(s - have, 0) for s, have in zip(sizes, y.shape[2:], strict=True)])
    return y if bias is None else y + bias.reshape([1, -1] + [1] * rank)


def _integer_conv(call: Call) -> Tensor:
    x, weight = call.tensor(0).float(), call.tensor(1).float()
    if call.has(2):
        x = x - call.tensor(2).float()
    if call.has(3):
        zero = call.tensor(3).float()
        weight = weight - (zero.reshape([-1] + [1] * (weight.dim() - 1)) if zero.dim() else zero)
    return convolve(call, x.double(), weight.double(), None).to(torch.int32)


def _quantized_conv(call: Call) -> Tensor:
    x = dequantize(call.tensor(0), call.tensor(1), call.tensor(2), 1, 0)
    weight = dequantize(call.tensor(3), call.tensor(4), call.tensor(5), 0, 0)
    bias = None
    if call.has(8):
        bias = (call.tensor(8).double() * call.tensor(1).double() * call.tensor(4).double()).reshape(-1)
        bias = bias.expand(weight.shape[0])
    y = convolve(call, x.double(), weight.double(), bias)
    return quantize(y, call.tensor(6), call.tensor(7), 1, 0, call.in_type(7))


def _col2im(call: Call) -> Tensor:
    x = call.tensor(0)
    image, block = [int(s) for s in call.ints(1)], [int(b) for b in call.ints(2)]
    rank = len(block)
    strides, dilations = call.attr("strides", [1] * rank), call.attr("dilations", [1] * rank)
    pads = call.attr("pads", [0] * 2 * rank)
    padded = [image[i] + pads[i] + pads[i + rank] for i in range(rank)]
    outs = [(padded[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    n, taps = x.shape[0], _product(block)
    channels = x.shape[1] // taps
    index = torch.zeros([1] * 2 * rank, dtype=torch.int64)
    for i in range(rank):
        place = torch.arange(block[i])[:, None] * dilations[i] + torch.arange(outs[i])[None] * strides[i]
        shape = [1] * 2 * rank
        shape[i], shape[rank + i] = block[i], outs[i]
        index = index * padded[i] + place.reshape(shape)
    flat = x.reshape(n, channels, taps * _product(outs))
    base = torch.zeros(n, channels, _product(padded), dtype=x.dtype)
    y = base.scatter_add(2, index.reshape(1, 1, -1).expand(flat.shape), flat).reshape(n, channels, *padded)
    for i in range(rank):
        y = y.narrow(2 + i, pads[i], image[i])
    return y


def _product(values: list[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


TABLE: dict[str, Callable[[Call], Any]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "ConvInteger": _integer_conv,
    "QLinearConv": _quantized_conv,
    "Col2Im": _col2im,
}
