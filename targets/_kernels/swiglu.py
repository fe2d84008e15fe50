"""SwiGLU of two row-strided views, such as the halves of one gate-and-up projection."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    ceil_div,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    refuse_rows,
    row_stride,
    short_dtype,
)

MAX_BLOCK = 1024


@triton.jit
def tile_swiglu(row, block, gate, up, result, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
                WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * up`` of one block of columns of one row; the SiLU is rounded to gate's dtype first."""
    row = row.to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    wide = tl.load(gate + row * GATE_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype.element_ty).to(tl.float32)
    factor = tl.load(up + row * UP_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + row * WIDTH + column, (silu * factor).to(result.dtype.element_ty), mask=mask)


def _refuse(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    if need(call, "gate").dtype != need(call, "up").dtype:
        return "gate and up must share one dtype"
    return refuse_rows(call, "gate", "up")


def _emit(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    gate, up, (result,) = need(call, "gate"), need(call, "up"), call.results
    width = int(gate.shape[1])
    block = min(next_power_of_two(width), MAX_BLOCK)
    constants = {"GATE_STRIDE": row_stride(gate), "UP_STRIDE": row_stride(up), "WIDTH": width, "BLOCK": block}
    return (emit_kernel(
        name=kernel_name("swiglu", short_dtype(gate.dtype), width),
        title="SwiGLU: silu(gate) * up.", tiles=[tile_swiglu], constants=constants,
        parameters=[pointer("gate", gate), pointer("up", up), pointer("result", result)],
        body=f"tile_swiglu(tl.program_id(0), tl.program_id(1), gate, up, result, {', '.join(constants)})",
        grid=(str(gate.shape[0]), str(ceil_div(width, block)), "1"), num_warps=4,
    ),)


TEMPLATES = (KernelTemplate("swiglu", "swiglu", _refuse, _emit),)
