"""Elementwise operators of ONNX: arithmetic, comparison, bits, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.values import Call

_WRAPPED = {4: 0xFFFF, 12: 0xFFFFFFFF}  # TensorProto.UINT16, UINT32: carried by wider types


def wrap(call: Call, y: Tensor) -> Tensor:
    """Reduce a result of unsigned arithmetic to the width of its ONNX type."""
    mask = _WRAPPED.get(call.out_type())
    return y if mask is None or y.is_floating_point() else torch.bitwise_and(y, mask)


def _operands(call: Call) -> tuple[Any, Any]:
    """Two operands; a constant of one element beside a larger floating-point tensor as a Python number."""
    a, b = call.tensor(0), call.tensor(1)
    for index, this, other in ((1, b, a), (0, a, b)):
        number = call.literal(index)
        if number is not None and other.is_floating_point() and this.dim() <= other.dim() and math.isfinite(number):
            return (a, number) if index == 1 else (number, b)
    return a, b


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Call], Tensor]:
    def handler(call: Call) -> Tensor:
        a, b = _operands(call)
        return wrap(call, function(a, b))

    return handler


def _divide(call: Call) -> Tensor:
    a, b = _operands(call)
    floating = any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in (a, b))
    return a / b if floating else torch.div(a, b, rounding_mode="trunc")


def _modulo(call: Call) -> Tensor:
    function = torch.fmod if call.attr("fmod", 0) else torch.remainder
    return function(call.tensor(0), call.tensor(1))


def _power(call: Call) -> Tensor:
    x, number = call.tensor(0), call.literal(1)
    if number is not None and x.is_floating_point():
        return torch.pow(x, int(number) if float(number).is_integer() else number)
    y = call.tensor(1)
    if x.is_floating_point() or not y.is_floating_point():
        return wrap(call, torch.pow(x, y.to(x.dtype)))
    return torch.pow(x.to(y.dtype), y).to(x.dtype)


def _shift(call: Call) -> Tensor:
    x, y = call.tensor(0), call.tensor(1)
    if call.attr("direction") == "LEFT":
        return wrap(call, torch.bitwise_left_shift(x, y))
    if call.in_type(0) == 13:  # UINT64, carried by int64: shift the sign bit in as an ordinary one
        once = (x >> 1) & torch.iinfo(torch.int64).max
        return torch.where(y == 0, x, once >> (y - 1).clamp(min=0))
    return torch.bitwise_right_shift(x, y)


def _variadic(function: Callable[[Any, Any], Any]) -> Callable[[Call], Tensor]:
    return lambda call: reduce(function, call.tensors())


def _mean(call: Call) -> Tensor:
    values = call.tensors()
    return reduce(torch.add, values) / len(values)


def _clip(call: Call) -> Tensor:
    x = call.tensor(0)
    numbers = [call.literal(i) if call.has(i) else None for i in (1, 2)]
    if all(n is not None or not call.has(i) for i, n in ((1, numbers[0]), (2, numbers[1]))):
        return x if numbers == [None, None] else _clip_between(x, *numbers)
    for i, function in ((1, torch.maximum), (2, torch.minimum)):
        if call.has(i):
            x = function(x, call.tensor(i))
    return x


def _clip_between(x: Tensor, low: Any, high: Any) -> Tensor:
    return torch.clamp(x, min=low, max=high)


def _prelu(call: Call) -> Tensor:
    x, slope = call.tensor(0), call.tensor(1)
    return torch.where(x < 0, x * slope, x)


def _gelu(call: Call) -> Tensor:
    return F.gelu(call.tensor(0), approximate=call.attr("approximate", "none"))


def _swish(call: Call) -> Tensor:
    return _swish_of(call.tensor(0), call.attr("alpha", 1.0))


def _swish_of(x: Tensor, alpha: float) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def _swiglu(call: Call) -> Tensor:
    return _swish_of(call.tensor(0), call.attr("alpha", 1.0)) * call.tensor(1)


def _hard_sigmoid(call: Call) -> Tensor:
    return torch.clamp(call.tensor(0) * call.attr("alpha", 0.2) + call.attr("beta", 0.5), 0.0, 1.0)


def _selu(call: Call) -> Tensor:
    x = call.tensor(0)
    alpha, gamma = call.attr("alpha", 1.67326319217681884765625), call.attr("gamma", 1.05070102214813232421875)
    return gamma * torch.where(x > 0, x, alpha * (torch.exp(x) - 1.0))


def _celu(call: Call) -> Tensor:
    return F.celu(call.tensor(0), call.attr("alpha", 1.0))


def _shrink(call: Call) -> Tensor:
    x, bias, lambd = call.tensor(0), call.attr("bias", 0.0), call.attr("lambd", 0.5)
    shrunk = torch.where(x > lambd, x - bias, torch.zeros_like(x))
    return torch.where(x < -lambd, x + bias, shrunk).to(x.dtype)


def _thresholded_relu(call: Call) -> Tensor:
    x = call.tensor(0)
    return torch.where(x > call.attr("alpha", 1.0), x, torch.zeros_like(x))


def _is_inf(call: Call) -> Tensor:
    x = call.tensor(0).float()
    found = torch.zeros_like(x, dtype=torch.bool)
    if call.attr("detect_negative", 1):
        found = found | torch.isneginf(x)
    if call.attr("detect_positive", 1):
        found = found | torch.isposinf(x)
    return found


def _where(call: Call) -> Tensor:
    condition, x, y = call.tensors()
    for index, other in ((2, x), (1, y)):
        number = call.literal(index)
        if number is not None and other.is_floating_point() and math.isfinite(number):
            return torch.where(condition, *((x, number) if index == 2 else (number, y)))
    return torch.where(condition, x, y)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Tensor]:
    return lambda call: function(call.tensor(0))


def _narrow(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Tensor]:
    """An unary function of integers whose result wraps to its unsigned type."""
    return lambda call: wrap(call, function(call.tensor(0)))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Call], Tensor]:
    return lambda call: function(call.tensor(0), call.tensor(1))


TABLE: dict[str, Callable[[Call], Any]] = {
    "Add": _arithmetic(torch.add),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Div": _divide,
    "Mod": _modulo,
    "Pow": _power,
    "BitShift": _shift,
    "BitwiseAnd": _binary(torch.bitwise_and),
    "BitwiseOr": _binary(torch.bitwise_or),
    "BitwiseXor": _binary(torch.bitwise_xor),
    "BitwiseNot": _narrow(torch.bitwise_not),
    "And": _binary(torch.logical_and),
    "Or": _binary(torch.logical_or),
    "Xor": _binary(torch.logical_xor),
    "Not": _unary(torch.logical_not),
    "Equal": _binary(torch.eq),
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "Max": _variadic(torch.maximum),
    "Min": _variadic(torch.minimum),
    "Sum": _variadic(torch.add),
    "Mean": _mean,
    "Clip": _clip,
    "Where": _where,
    "Neg": _narrow(torch.neg),
    "Abs": _unary(torch.abs),
    "Sign": _unary(torch.sign),
    "Ceil": _unary(torch.ceil),
    "Floor": _unary(torch.floor),
    "Round": _unary(torch.round),
    "Exp": _unary(torch.exp),
    "Log": _unary(torch.log),
    "Sqrt": _unary(torch.sqrt),
    "Reciprocal": _unary(torch.reciprocal),
    "Erf": _unary(torch.erf),
    "Sin": _unary(torch.sin),
    "Cos": _unary(torch.cos),
    "Tan": _unary(torch.tan),
    "Asin": _unary(torch.asin),
    "Acos": _unary(torch.acos),
    "Atan": _unary(torch.atan),
    "Sinh": _unary(torch.sinh),
    "Cosh": _unary(torch.cosh),
    "Tanh": _unary(torch.tanh),
    "Asinh": _unary(torch.asinh),
    "Acosh": _unary(torch.acosh),
    "Atanh": _unary(torch.atanh),
    "IsNaN": _unary(torch.isnan),
    "IsInf": _is_inf,
    "Relu": _unary(F.relu),
    "LeakyRelu": lambda call: F.leaky_relu(call.tensor(0), call.attr("alpha", 0.01)),
    "PRelu": _prelu,
    "Elu": lambda call: F.elu(call.tensor(0), call.attr("alpha", 1.0)),
    "Celu": _celu,
    "Selu": _selu,
    "Gelu": _gelu,
    "Sigmoid": _unary(torch.sigmoid),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary(F.hardswish),
    "Mish": _unary(F.mish),
    "Softplus": lambda call: F.softplus(call.tensor(0), threshold=50.0),
    "Softsign": _unary(F.softsign),
    "Swish": _swish,
    "SwiGLU": _swiglu,
    "Shrink": _shrink,
    "ThresholdedRelu": _thresholded_relu,
}
