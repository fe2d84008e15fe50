"""Row gathers: embedding lookup and the last new token of every sequence."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    FLOATS,
    ceil_div,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    row_stride,
    short_dtype,
    stage_warps,
)

MAX_BLOCK = 2048


@triton.jit
def copy_row(source, target, block, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy columns ``block * BLOCK ...`` of one row."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + column, tl.load(source + column, mask=column < WIDTH), mask=column < WIDTH)


@triton.jit
def tile_embedding(row, block, ids, weight, result, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
                   BLOCK: tl.constexpr):
    """``result[row] = weight[ids[row]]``, one block of columns."""
    token = tl.load(ids + row).to(tl.int64)
    copy_row(weight + token * STRIDE, result + row.to(tl.int64) * WIDTH, block, WIDTH, BLOCK)


@triton.jit
def tile_gather_last(sequence, block, x, query_start, result, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
                     BLOCK: tl.constexpr):
    """``result[sequence] = x[query_start[sequence + 1] - 1]``, one block of columns."""
    row = tl.load(query_start + sequence + 1).to(tl.int64) - 1
    copy_row(x + row * STRIDE, result + sequence.to(tl.int64) * WIDTH, block, WIDTH, BLOCK)


def _emit_rows(call: OpCall, tile: object, table: str, index: str, width: int, rows: str,
               title: str) -> tuple[KernelSource, ...]:
    source, (result,) = need(call, table), call.results
    block = min(next_power_of_two(width), MAX_BLOCK)
    order = [pointer(table, source), pointer(index, need(call, index))]
    if call.op == "embedding":
        order.reverse()
    parameters = [*order, pointer("result", result)]
    arguments = ", ".join(p.name for p in parameters)
    return (emit_kernel(
        name=kernel_name(call.op, short_dtype(source.dtype), width), title=title, tiles=[tile],
        constants={"STRIDE": row_stride(source), "WIDTH": width, "BLOCK": block}, parameters=parameters,
        body=f"tile_{call.op}(tl.program_id(0), tl.program_id(1), {arguments}, STRIDE, WIDTH, BLOCK)",
        grid=(rows, str(ceil_div(width, block)), "1"), 
        num_warps=stage_warps(call, max(1, min(8, block // 256))), replicable=True,
    ),)


def _product(operand: Operand) -> str:
    """Grid expression for the number of elements of an operand."""
    return " * ".join(f"({n})" for n in operand.shape) or "1"


def _is_packed(operand: Operand, first: int) -> bool:
    """True if the dimensions from ``first`` on are contiguous with numbers for sizes."""
    shape, expected = operand.shape[first:], 1
    for size, stride in zip(reversed(shape), reversed(operand.strides[first:]), strict=True):
        if not isinstance(size, int) or (size != 1 and stride != expected):
            return False
        expected *= size
    return True


def _refuse_embedding(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    ids, weight = need(call, "ids"), need(call, "weight")
    if ids.dtype not in ("int32", "int64"):
        return f"ids is {ids.dtype}, not int32 or int64"
    if weight.dtype not in FLOATS or weight.strides[1] != 1:
        return f"weight must be rows of one of {', '.join(FLOATS)}"
    if not _is_packed(ids, 1) or ids.strides[0] != math.prod(int(n) for n in ids.shape[1:]):
        return "ids must be contiguous"
    return None


def _emit_embedding(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    return _emit_rows(call, tile_embedding, "weight", "ids", int(need(call, "weight").shape[1]),
                      _product(need(call, "ids")), "Embedding: copy one row of the table for each id.")


def _refuse_gather(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    x, starts = need(call, "x"), need(call, "query_start")
    if x.dtype not in FLOATS:
        return f"x is {x.dtype}, not one of {', '.join(FLOATS)}"
    if not _is_packed(x, 1) or not isinstance(x.strides[0], int):
        return "the rows of x must be contiguous with a static width"
    if starts.dtype not in ("int32", "int64"):
        return f"query_start is {starts.dtype}, not int32 or int64"
    return None


def _emit_gather(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    width = math.prod(int(n) for n in need(call, "x").shape[1:])
    return _emit_rows(call, tile_gather_last, "x", "query_start", width, str(call.results[0].shape[0]),
                      "Gather the row of the last new token of every sequence.")


TEMPLATES = (
    KernelTemplate("embedding", "embedding", _refuse_embedding, _emit_embedding),
    KernelTemplate("gather_last", "gather_last", _refuse_gather, _emit_gather),
)
