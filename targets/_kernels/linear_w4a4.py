"""NVFP4 activations by NVFP4 weights: block-scaled tensor-core MMA where a target has it, exact decoding elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._intrinsics import multiply_blocks_tcgen05
from mmcompile.targets._intrinsics.multiply_blocks import multiply_blocks
from mmcompile.targets._kernels.common import (
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    refuse_rows,
    row_stride,
    short_dtype,
)
from mmcompile.targets._kernels.linear import Blocks, emit_linear, mma_ledger
from mmcompile.targets._kernels.linear_nvfp4 import BLOCK, WEIGHTS, nvfp4_intrinsics

ACTIVATIONS = ("x_packed", "x_scale", "x_global_scale")
_ORDER = (*ACTIVATIONS, *WEIGHTS)
_DTYPES = ("uint8", "float8_e4m3fn", "float32") * 2
_MAX_WIDTH = 65536


@triton.jit
def encode_e2m1(x):
    """fp32 -> int32 codes 0..15, to nearest, ties to the even code, saturating; the sign is that of x < 0."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((x < 0).to(tl.int32) << 3)


@triton.jit
def tile_quantize_activations(tile, x, result, result1, result2, K: tl.constexpr, X_STRIDE: tl.constexpr,
                              BLOCKS: tl.constexpr):
    """Row ``tile`` of x [rows, K]: packed codes, e4m3 block scales, and the row's global scale amax / 2688."""
    row = tile.to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    value = tl.load(x + row * X_STRIDE + column, mask=column < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 1)
    multiplier = tl.div_rn(tl.max(largest, 0), 2688.0)
    multiplier = tl.where(multiplier == 0.0, 1.0, multiplier)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + 6.0 * multiplier)
    scale = tl.minimum(tl.maximum(tl.where(scale == 0.0, 1.0, scale), 0.001953125), 448.0).to(tl.float8e4nv)
    step = tl.broadcast_to((scale.to(tl.float32) * multiplier)[:, None], (BLOCKS, 16))
    low, high = tl.split(tl.reshape(encode_e2m1(tl.div_rn(value, step)), (BLOCKS, 8, 2)))
    packed = (low | (high << 4)).to(tl.uint8)
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(result + row * (K // 2) + byte, packed, mask=byte < K // 2)
    tl.store(result1 + row * (K // 16) + block, scale, mask=block < K // 16)
    tl.store(result2 + row, multiplier)


@triton.jit
def project_tile(x, weight, scale, global_scale, tokens, token, row, valid, K: tl.constexpr, X_STRIDE: tl.constexpr,
                 WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``valid`` ones of the weight rows ``row`` [BLOCK_N] times the activations of ``token``: fp32.

    ``x`` is the tuple (codes, block scales, global scales), rows of K / 2 and K / 16 bytes.
    """
    byte, block = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 16)
    place, line = row.to(tl.int64)[:, None], token.to(tl.int64)[:, None]
    x_tile, x_scale_tile = x[0] + line * X_STRIDE + byte[None, :], x[1] + line * (K // 16) + block[None, :]
    weight_tile = weight + place * WEIGHT_STRIDE + byte[None, :]
    scale_tile = scale + place * SCALE_STRIDE + block[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x_mask, x_scale_mask = (token < tokens)[:, None], (token < tokens)[:, None]
        weight_mask, scale_mask = valid[:, None], valid[:, None]
        if K % BLOCK_K != 0:
            inside, inside_scale = (byte < (K - start) // 2)[None, :], (block < (K - start) // 16)[None, :]
            x_mask, weight_mask = x_mask & inside, weight_mask & inside
            x_scale_mask, scale_mask = x_scale_mask & inside_scale, scale_mask & inside_scale
        left = tl.load(x_tile + start // 2, mask=x_mask, other=0)
        left_scale = tl.load(x_scale_tile + start // 16, mask=x_scale_mask, other=0.0)
        right = tl.load(weight_tile + start // 2, mask=weight_mask, other=0)
        right_scale = tl.load(scale_tile + start // 16, mask=scale_mask, other=0.0)
        accumulator = multiply_blocks(left, left_scale, right, right_scale, accumulator)
    by_token = tl.load(x[2] + token, mask=token < tokens, other=0.0)
    by_row = tl.load(global_scale + row, mask=valid, other=0.0)
    return accumulator * (by_token[:, None] * by_row[None, :])


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    operands = [(need(call, name), dtype) for name, dtype in zip(_ORDER, _DTYPES, strict=True)]
    for name, (operand, dtype) in zip(_ORDER, operands, strict=True):
        if operand.dtype != dtype:
            return f"{name} is {operand.dtype}, not {dtype}"
        if operand.strides[-1] != 1:
            return f"the last stride of {name} must be 1"
    k = 2 * int(need(call, "x_packed").shape[1])
    if row_stride(need(call, "x_packed")) != k // 2 or row_stride(need(call, "x_scale")) != k // BLOCK:
        return "the quantized activations are not contiguous"
    reason = refuse_rows(call, "residual")
    result = call.results[0].dtype
    for name in ("bias", "residual"):
        operand = call.operands.get(name)
        if reason is None and operand is not None and operand.dtype != result:
            return f"{name} is {operand.dtype} and the result {result}"
    return reason


def multiply_intrinsics(arch: Architecture) -> tuple[dict[str, Any], dict[str, bool]]:
    """The multiplication of an architecture by function name, and what the disassembly must (not) hold."""
    if "tcgen05_block_scale" in arch.features:
        return {"multiply_blocks": multiply_blocks_tcgen05.multiply_blocks}, {"UTCOMMA": True}
    decoders, ledger = nvfp4_intrinsics(arch, "bfloat16")
    return {"decode_nvfp4": decoders["decode_nvfp4"]}, ledger


def _emit_gemm(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    packed = need(call, "packed")
    tokens, k, dtype = need(call, "x_packed").shape[0], 2 * int(packed.shape[1]), call.results[0].dtype
    scaled, intrinsics, ledger = "tcgen05_block_scale" in arch.features, *multiply_intrinsics(arch)
    wide = 128 if int(packed.shape[0]) > 2048 else 64
    blocks = Blocks(128, wide, 128, 4, 3) if scaled else Blocks(64, 64, 64, 4, 2)
    values = Operand((tokens, k), (k // 2, 1), dtype)  # what the tile's x stands for; a row is k / 2 bytes
    return emit_linear(
        replace(call, operands={"x": values, **call.operands}), blocks, inputs=ACTIVATIONS, weights=WEIGHTS,
        strides=(row_stride(packed), row_stride(need(call, "scale"))),
        intrinsics={"project_tile": project_tile, **intrinsics},
        ledger=ledger if scaled else ledger | mma_ledger("bfloat16", blocks, spec, arch),
    )


def _refuse_quantize(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    width = int(need(call, "x").shape[1])
    reason = refuse_rows(call, "x")
    return reason or (f"rows of {width} elements do not fit one program" if width > _MAX_WIDTH else None)


def _emit_quantize(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    x = need(call, "x")
    k = int(x.shape[1])
    constants = {"K": k, "X_STRIDE": row_stride(x), "BLOCKS": next_power_of_two(k // BLOCK)}
    results = ("result", "result1", "result2")
    parameters = [pointer("x", x), *(pointer(name, r) for name, r in zip(results, call.results, strict=True))]
    return (
        emit_kernel(
            name=kernel_name("nvfp4_quantize_activations", short_dtype(x.dtype), k),
            title=f"nvfp4_quantize_activations: rows of {k} {x.dtype}.",
            tiles=[tile_quantize_activations],
            constants=constants,
            parameters=parameters,
            body=f"tile_quantize_activations(tl.program_id(0), x, {', '.join(results)}, {', '.join(constants)})",
            grid=(str(x.shape[0]), "1", "1"),
            num_warps=4,
        ),
    )


TEMPLATES: tuple[KernelTemplate, ...] = (
    KernelTemplate(
        "nvfp4_quantize_activations", "nvfp4_quantize_activations", _refuse_quantize, _emit_quantize
    ),
    KernelTemplate("linear_w4a4_gemm", "linear_w4a4", _refuse, _emit_gemm),
)
