"""Products of ONNX: MatMul, Gemm, Einsum, their integer forms, determinants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.ops.quantization import dequantize, quantize
from mmcompile.capture.onnx.values import Call, Constant


def _matmul(call: Call) -> Tensor:
    """A product with a weight becomes a linear layer, whose weight is [n, k] (see graph.turn_weights)."""
    if call.attr("turned"):
        return F.linear(call.tensor(0), call.tensor(1), call.maybe(2))
    return torch.matmul(call.tensor(0), call.tensor(1))


def _gemm(call: Call) -> Tensor:
    a, b, c = call.tensor(0), call.tensor(1), call.maybe(2)
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    a = a.t() if call.attr("transA", 0) else a
    layer = isinstance(call.values[1], Constant) and alpha == beta == 1.0 and a.is_floating_point()
    if layer and (c is None or c.dim() == 1) and (call.attr("transB", 0) or call.attr("turned")):
        return F.linear(a, b, c)
    y = torch.matmul(a, b.t() if call.attr("transB", 0) or call.attr("turned") else b)
    y = y if alpha == 1.0 else (y * alpha).to(y.dtype)
    if c is None:
        return y
    return y + (c if beta == 1.0 else (c * beta).to(c.dtype))


def _minus_zero_point(call: Call, index: int, point: int, axis: int) -> Tensor:
    """An integer operand minus its zero point (one, or one a row or column), in int32."""
    x = call.tensor(index).to(torch.int32)
    if not call.has(point):
        return x
    zero = call.tensor(point).to(torch.int32)
    if zero.dim() == 1 and zero.shape[0] != 1:
        zero = zero.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])
    return x - zero


def _integer_matmul(call: Call) -> Tensor:
    a, b = _minus_zero_point(call, 0, 2, -2), _minus_zero_point(call, 1, 3, -1)
    return torch.matmul(a.long(), b.long()).to(torch.int32)


def _quantized_matmul(call: Call) -> Tensor:
    a = dequantize(call.tensor(0), call.tensor(1), call.tensor(2), _axis_of(call.tensor(1), -2), 0)
    b = dequantize(call.tensor(3), call.tensor(4), call.tensor(5), _axis_of(call.tensor(4), -1), 0)
    return quantize(torch.matmul(a.double(), b.double()), call.tensor(6), call.tensor(7), -1, 0, call.in_type(7))


def _axis_of(scale: Tensor, axis: int) -> int:
    return axis if scale.dim() == 1 and scale.shape[0] != 1 else 0


def _einsum(call: Call) -> Tensor:
    return torch.einsum(call.attr("equation").replace(" ", ""), *call.tensors())


TABLE: dict[str, Callable[[Call], Any]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "MatMulInteger": _integer_matmul,
    "QLinearMatMul": _quantized_matmul,
    "Einsum": _einsum,
    "Det": lambda call: torch.linalg.det(call.tensor(0)),
}
