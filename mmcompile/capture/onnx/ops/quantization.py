"""Casts and linear quantization of ONNX, with the narrow floats and integers that torch has no dtype for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor

from mmcompile.capture.onnx.values import CARRIERS, Call, name_type
from mmcompile.core.formats.nvfp4 import decode_e2m1, encode_e2m1

_RANGES = {
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT8: (0, 255),
    TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT2: (-2, 1),
    TensorProto.UINT2: (0, 3),
}
_BITS = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2}
_WIDE = {TensorProto.UINT16: 0xFFFF, TensorProto.UINT32: 0xFFFFFFFF}
_SATURATING = {
    TensorProto.FLOAT8E4M3FN: 448.0,
    TensorProto.FLOAT8E4M3FNUZ: 240.0,
    TensorProto.FLOAT8E5M2: 57344.0,
    TensorProto.FLOAT8E5M2FNUZ: 57344.0,
}
_UNSIGNED_ZERO = (TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ)
FLOAT8 = (*_SATURATING, TensorProto.FLOAT8E8M0)


def cast(x: Tensor, to: int, saturate: bool = True, round_mode: str = "up") -> Tensor:
    """``x`` (a carrier) as the carrier of the ONNX element type ``to``. ``saturate``: of narrow floats."""
    carrier = CARRIERS[to]
    if x.dtype in {CARRIERS[t] for t in FLOAT8}:
        x = x.float()
    if to == TensorProto.FLOAT4E2M1:
        return _to_e2m1(x)
    if to == TensorProto.FLOAT8E8M0:
        return _to_e8m0(x.float(), saturate, round_mode)
    if to in _SATURATING:
        return _to_float8(x.float(), to, saturate)
    if to in _BITS:
        return _to_few_bits(x, to)
    if to in _WIDE:
        return torch.bitwise_and(x.to(torch.int64), _WIDE[to]).to(carrier)
    return x if x.dtype == carrier else x.to(carrier)


def _to_e2m1(x: Tensor) -> Tensor:
    """Numbers saturate, NaN becomes zero (as ml_dtypes has it), minus zero keeps its sign."""
    x = torch.nan_to_num(x.float(), nan=0.0, posinf=6.0, neginf=-6.0)
    return torch.copysign(decode_e2m1(encode_e2m1(x)), x)


def _to_float8(x: Tensor, to: int, saturate: bool) -> Tensor:
    largest, dtype = _SATURATING[to], CARRIERS[to]
    if saturate:
        x = torch.where(x.isnan(), x, x.clamp(-largest, largest))
        return x.to(dtype)
    if to in _UNSIGNED_ZERO or to == TensorProto.FLOAT8E4M3FN:
        half_step = largest * (1 + (1 / 30 if to != TensorProto.FLOAT8E5M2FNUZ else 1 / 14))
        limit = {TensorProto.FLOAT8E4M3FN: 464.0, TensorProto.FLOAT8E4M3FNUZ: 248.0}.get(to, half_step)
        x = torch.where(x.abs() > limit, torch.full_like(x, math.nan), x.clamp(-largest, largest))
        return x.to(dtype)
    return x.to(dtype)


def _to_e8m0(x: Tensor, saturate: bool, round_mode: str) -> Tensor:
    """A power of two: the exponent of ``x``, rounded up, down or to the nearest; code 255 is NaN."""
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if round_mode == "up":
        exponent = torch.where((mantissa > 0) & (exponent < 255), exponent + 1, exponent)
    elif round_mode == "nearest":
        more = (mantissa > 0x400000) | ((mantissa == 0x400000) & (exponent > 0))
        exponent = torch.where(more & (exponent < 255), exponent + 1, exponent)
    infinite = ~x.isnan() & (exponent == 255)
    exponent = torch.where(infinite & torch.tensor(saturate), torch.full_like(exponent, 254), exponent)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def _to_few_bits(x: Tensor, to: int) -> Tensor:
    """The lowest bits, signed or not."""
    bits = _BITS[to]
    low = torch.bitwise_and(x.to(torch.int32), (1 << bits) - 1)
    if CARRIERS[to] == torch.int8:
        low = torch.where(low >= 1 << (bits - 1), low - (1 << bits), low)
    return low.to(CARRIERS[to])


def _cast(call: Call) -> Tensor:
    to = call.attr("to")
    return cast(call.tensor(0), to, bool(call.attr("saturate", 1)), call.attr("round_mode", "up"))


def _cast_like(call: Call) -> Tensor:
    to = call.in_type(1) or call.out_type()
    return cast(call.tensor(0), to, bool(call.attr("saturate", 1)), call.attr("round_mode", "up"))


def _bit_cast(call: Call) -> Tensor:
    x, to = call.tensor(0), call.attr("to")
    if call.in_type(0) in (TensorProto.UINT16, TensorProto.UINT32):
        x = x.to({TensorProto.UINT16: torch.int16, TensorProto.UINT32: torch.int32}[call.in_type(0)])
    if to in _WIDE:
        narrow = {TensorProto.UINT16: torch.int16, TensorProto.UINT32: torch.int32}[to]
        return torch.bitwise_and(x.contiguous().view(narrow).to(CARRIERS[to]), _WIDE[to])
    if to in _BITS or call.in_type(0) in _BITS or TensorProto.FLOAT4E2M1 in (to, call.in_type(0)):
        raise call.refuse(f"it reinterprets {name_type(call.in_type(0))} as {name_type(to)}")
    return x.contiguous().view(CARRIERS[to])


def spread(scale: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """``scale`` over the elements of ``x``: one for all, one an index of ``axis``, or one a block of it."""
    if scale.numel() == 1 and (scale.dim() == 0 or not block):
        return scale.reshape(())
    axis = axis % x.dim()
    if not block:
        return scale.reshape([-1 if i == axis else 1 for i in range(x.dim())])
    return scale.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])


def dequantize(x: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int) -> Tensor:
    """``(x - zero) * scale`` in the scale's type (fp32 for an E8M0 scale)."""
    wide = torch.float32 if scale.dtype.itemsize == 1 else scale.dtype
    value = x.float() if x.is_floating_point() else x.to(torch.int32)
    if zero is not None and not x.is_floating_point():
        value = value - spread(zero.to(torch.int32), x, axis, block)
    return (value.float() * spread(scale.float(), x, axis, block)).to(wide)


def quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int, to: int, saturate: bool = True
) -> Tensor:
    """``x / scale + zero``, rounded half to even and saturated, as the carrier of the element type ``to``."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) / spread(scale.to(wide), x, axis, block)
    if to not in _RANGES:
        return cast(y, to, saturate)
    low, high = _RANGES[to]
    y = torch.round(y)
    if zero is not None:
        y = y + spread(zero.to(wide), x, axis, block)
    return y.clamp(low, high).to(CARRIERS[to])


def _quantize_linear(call: Call) -> Tensor:
    to = call.in_type(2) if call.has(2) else call.attr("output_dtype", 0) or TensorProto.UINT8
    x, scale = call.tensor(0), call.tensor(1)
    axis, block = call.attr("axis", 1), call.attr("block_size", 0)
    if call.attr("precision", 0):
        x = cast(x, call.attr("precision"))
    return quantize(x, scale, call.maybe(2), axis, block, to, bool(call.attr("saturate", 1)))


def _dequantize_linear(call: Call) -> Tensor:
    value = dequantize(call.tensor(0), call.tensor(1), call.maybe(2), call.attr("axis", 1), call.attr("block_size", 0))
    return cast(value, call.attr("output_dtype")) if call.attr("output_dtype", 0) else value


def _dynamic_quantize(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x = call.tensor(0)
    low, high = torch.clamp(x.amin(), max=0.0), torch.clamp(x.amax(), min=0.0)
    scale = (high - low) / 255.0
    zero = torch.round(-low / scale).clamp(0, 255)
    y = (torch.round(x / scale) + zero).clamp(0, 255)
    return y.to(torch.uint8), scale, zero.to(torch.uint8)


TABLE: dict[str, Callable[[Call], Any]] = {
    "Cast": _cast,
    "CastLike": _cast_like,
    "BitCast": _bit_cast,
    "QuantizeLinear": _quantize_linear,
    "DequantizeLinear": _dequantize_linear,
    "DynamicQuantizeLinear": _dynamic_quantize,
}
