"""RMSNorm over rows, alone or after a residual addition."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    FLOATS,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    refuse_rows,
    row_stride,
    short_dtype,
    stage_warps,
)

_MAX_WIDTH = 65536


@triton.jit
def scale_normed(normed, weight, DTYPE: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
                 ROUND_BEFORE_SCALE: tl.constexpr):
    """Multiply fp32 normalised values by the weight (+ offset) with the rounding points of mm::rms_norm."""
    if ROUND_BEFORE_SCALE:
        normed = normed.to(DTYPE).to(tl.float32)
        scale = (weight.to(tl.float32) + WEIGHT_OFFSET).to(weight.dtype).to(tl.float32)
    else:
        scale = weight.to(tl.float32) + WEIGHT_OFFSET
    return (normed * scale).to(DTYPE)


@triton.jit
def tile_rms_norm(tile, x, weight, result, N: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
                  ROUND_BEFORE_SCALE: tl.constexpr, X_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr,
                  BLOCK: tl.constexpr):
    """Normalise row ``tile`` of x [rows, N] into result."""
    row = tile.to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    value = tl.load(x + row * X_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / N + EPS)
    out = scale_normed(normed, scale, result.dtype.element_ty, WEIGHT_OFFSET, ROUND_BEFORE_SCALE)
    tl.store(result + row * RESULT_STRIDE + column, out, mask=mask)


@triton.jit
def tile_add_rms_norm(tile, x, residual, weight, result, result1, N: tl.constexpr, EPS: tl.constexpr,
                      WEIGHT_OFFSET: tl.constexpr, ROUND_BEFORE_SCALE: tl.constexpr, X_STRIDE: tl.constexpr,
                      RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr, RESULT1_STRIDE: tl.constexpr,
                      BLOCK: tl.constexpr):
    """Row ``tile``: result1 = x + residual rounded to x's dtype, result = its RMSNorm."""
    row = tile.to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    value = tl.load(x + row * X_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(residual + row * RESIDUAL_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    total = (value + other).to(result1.dtype.element_ty)
    tl.store(result1 + row * RESULT1_STRIDE + column, total, mask=mask)
    value = total.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / N + EPS)
    out = scale_normed(normed, scale, result.dtype.element_ty, WEIGHT_OFFSET, ROUND_BEFORE_SCALE)
    tl.store(result + row * RESULT_STRIDE + column, out, mask=mask)


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = refuse_rows(call, "x", "residual")
    if reason is not None:
        return reason
    if need(call, "weight").dtype not in FLOATS:
        return f"weight is {need(call, 'weight').dtype}, not one of {', '.join(FLOATS)}"
    width = need(call, "x").shape[1]
    return f"rows of {width} elements do not fit one program" if int(width) > _MAX_WIDTH else None


def _warps(width: int, spec: TargetSpec) -> int:
    """Warps so that a thread holds about 8 elements, between 1 and 16."""
    return max(1, min(16, next_power_of_two(width) // (8 * spec.warp_size)))


def _emit(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    inputs = ["x", "residual", "weight"] if call.op == "add_rms_norm" else ["x", "weight"]
    outputs = ["result", "result1"][: len(call.results)]
    operands: dict[str, Operand] = {name: need(call, name) for name in inputs}
    operands.update(zip(outputs, call.results, strict=True))
    x = operands["x"]
    width = int(x.shape[1])
    strides = {f"{name.upper()}_STRIDE": row_stride(o) for name, o in operands.items() if name != "weight"}
    constants: dict[str, int | float | bool | str] = {
        "N": width,
        "EPS": float(call.attributes["eps"]),
        "WEIGHT_OFFSET": float(call.attributes.get("weight_offset", 0.0)),
        "ROUND_BEFORE_SCALE": bool(call.attributes.get("round_before_scale", True)),
        **strides,
        "BLOCK": next_power_of_two(width),
    }
    arguments = ", ".join(["tl.program_id(0)", *operands, *constants])
    tile = tile_add_rms_norm if call.op == "add_rms_norm" else tile_rms_norm
    return (
        emit_kernel(
            name=kernel_name(call.op, short_dtype(x.dtype), width),
            title=f"{call.op}: rows of {width} {x.dtype}, one program a row.",
            tiles=[tile],
            constants=constants,
            parameters=[pointer(name, operand) for name, operand in operands.items()],
            body=f"tile_{call.op}({arguments})",
            grid=(str(x.shape[0]), "1", "1"),
            num_warps=stage_warps(call, _warps(width, spec)),
            num_stages=1,
            replicable=True,
        ),
    )


TEMPLATES: tuple[KernelTemplate, ...] = (
    KernelTemplate("rms_norm", "rms_norm", _refuse, _emit),
    KernelTemplate("add_rms_norm", "add_rms_norm", _refuse, _emit),
)
