"""Linear layers with MXFP8 weights and unquantized activations: the linear tiles with decoding projections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._intrinsics import mxfp8, mxfp8_cvt, mxfp8_packed, mxfp8_scalef32
from mmcompile.targets._intrinsics.mxfp8 import decode_mxfp8
from mmcompile.targets._kernels.common import need, row_stride
from mmcompile.targets._kernels.linear import (
    SKINNY_TOKENS,
    Blocks,
    emit_linear,
    gemm_blocks,
    mma_ledger,
    refuse_linear,
    skinny_blocks,
    skinny_rows,
)

WEIGHTS = ("values", "scale")
BLOCK = 32


@triton.jit
def project_skinny(x, weight, scale, global_scale, tokens, row, valid, K: tl.constexpr, X_STRIDE: tl.constexpr,
                   WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, SPLIT: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``valid`` ones of the MXFP8 weight rows ``row`` [BLOCK_N] times all tokens: fp32 [BLOCK_M, BLOCK_N].

    Every step takes SPLIT * BLOCK_K of K, a slice of BLOCK_K for each warp; the slices are added at the end. The
    result is rounded to x's dtype, as mm::linear_mxfp8 does before its epilogue. float16 is multiplied in fp32.
    """
    DTYPE: tl.constexpr = tl.float32 if x.dtype.element_ty == tl.float16 else x.dtype.element_ty
    WORDS: tl.constexpr = BLOCK_K // 4
    token = tl.arange(0, BLOCK_M)[None, :, None]
    part = tl.arange(0, SPLIT)[:, None, None]
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    word = part * WORDS + tl.arange(0, WORDS)[None, None, :]
    block = part * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)[None, None, :]
    place = row.to(tl.int64)[None, :, None]
    x_tile = x + token * X_STRIDE + k
    word_tile = weight.to(tl.pointer_type(tl.int32), bitcast=True) + place * (WEIGHT_STRIDE // 4) + word
    scale_tile = scale + place * SCALE_STRIDE + block
    accumulator = tl.zeros((SPLIT, BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, SPLIT * BLOCK_K):
        x_mask, word_mask, scale_mask = token < tokens, valid[None, :, None], valid[None, :, None]
        if K % (SPLIT * BLOCK_K) != 0:
            x_mask = x_mask & (k < K - start)
            word_mask = word_mask & (word < (K - start) // 4)
            scale_mask = scale_mask & (block < (K - start) // 32)
        left = tl.load(x_tile + start, mask=x_mask, other=0.0).to(DTYPE)
        words = tl.load(word_tile + start // 4, mask=word_mask, other=0)
        factors = tl.load(scale_tile + start // 32, mask=scale_mask, other=0)
        words = tl.reshape(words, (SPLIT * BLOCK_N, WORDS))
        factors = tl.reshape(factors, (SPLIT * BLOCK_N, BLOCK_K // 32))
        right = tl.reshape(decode_mxfp8(words, factors, DTYPE), (SPLIT, BLOCK_N, BLOCK_K))
        accumulator = tl.dot(left, tl.permute(right, (0, 2, 1)), accumulator, input_precision="ieee")
    return tl.sum(accumulator, 0).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def project_tile(x, weight, scale, global_scale, tokens, token, row, valid, K: tl.constexpr, X_STRIDE: tl.constexpr,
                 WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``valid`` ones of the MXFP8 weight rows ``row`` [BLOCK_N] times x[token]: fp32 [BLOCK_M, BLOCK_N]."""
    DTYPE: tl.constexpr = tl.float32 if x.dtype.element_ty == tl.float16 else x.dtype.element_ty
    k, word, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 4), tl.arange(0, BLOCK_K // 32)
    place = row.to(tl.int64)[:, None]
    x_tile = x + token.to(tl.int64)[:, None] * X_STRIDE + k[None, :]
    word_tile = weight.to(tl.pointer_type(tl.int32), bitcast=True) + place * (WEIGHT_STRIDE // 4) + word[None, :]
    scale_tile = scale + place * SCALE_STRIDE + block[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x_mask, word_mask, scale_mask = (token < tokens)[:, None], valid[:, None], valid[:, None]
        if K % BLOCK_K != 0:
            x_mask = x_mask & (k < K - start)[None, :]
            word_mask = word_mask & (word < (K - start) // 4)[None, :]
            scale_mask = scale_mask & (block < (K - start) // 32)[None, :]
        left = tl.load(x_tile + start, mask=x_mask, other=0.0).to(DTYPE)
        words = tl.load(word_tile + start // 4, mask=word_mask, other=0)
        factors = tl.load(scale_tile + start // 32, mask=scale_mask, other=0)
        right = decode_mxfp8(words, factors, DTYPE)
        accumulator = tl.dot(left, tl.trans(right), accumulator, input_precision="ieee")
    return accumulator.to(x.dtype.element_ty).to(tl.float32)


def mxfp8_intrinsics(arch: Architecture, dtype: str) -> tuple[dict[str, Any], dict[str, bool]]:
    """What makes a linear tile read MXFP8 weights, by function name, and what the disassembly must hold."""
    decoder: Any = mxfp8.decode_mxfp8
    ledger: dict[str, bool] = {}
    if dtype == "bfloat16" and "cvt_e4m3_bf16x2" in arch.features:
        decoder = mxfp8_cvt.decode_mxfp8
        ledger = {"E4M3": True}
    elif dtype == "bfloat16" and "cvt_scalef32_fp8" in arch.features:
        decoder = mxfp8_scalef32.decode_mxfp8
        ledger = {"v_cvt_scalef32_pk_bf16_fp8": True}
    elif dtype == "bfloat16" and "mul_bf16x2" in arch.features:
        decoder = mxfp8_packed.decode_mxfp8
    return {"project_skinny": project_skinny, "project_tile": project_tile, "decode_mxfp8": decoder}, ledger


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = refuse_linear(call, spec, arch)
    if reason is not None:
        return reason
    values, scale = (need(call, name) for name in WEIGHTS)
    k = need(call, "x").shape[1]
    if not isinstance(k, int) or k % BLOCK:
        return f"k = {k} is not a multiple of {BLOCK}"
    if (values.dtype, scale.dtype) != ("float8_e4m3fn", "uint8"):
        return f"the weight is stored as {values.dtype}, {scale.dtype}"
    if values.strides[1] != 1 or scale.strides[1] != 1:
        return "the last strides of values and scale must be 1"
    return "rows of values must start at multiples of 4 bytes" if row_stride(values) % 4 else None


def _emit(call: OpCall, spec: TargetSpec, arch: Architecture, blocks: Blocks) -> tuple[KernelSource, ...]:
    dtype = need(call, "x").dtype
    intrinsics, ledger = mxfp8_intrinsics(arch, dtype)
    multiplied = "float32" if dtype == "float16" else dtype
    return emit_linear(
        call, blocks, weights=WEIGHTS,
        strides=(row_stride(need(call, "values")), row_stride(need(call, "scale"))),
        intrinsics=intrinsics,
        ledger=mma_ledger(multiplied, blocks, spec, arch) | ledger,
    )


def _sizes(call: OpCall) -> tuple[int, int, int]:
    """Weight rows, k, and the bytes of an element that the tiles multiply."""
    x = need(call, "x")
    return int(need(call, "values").shape[0]), int(x.shape[1]), 2 if x.dtype == "bfloat16" else 4


def _whole_scales(blocks: Blocks) -> Blocks:
    """At least one scale's elements of K in a slice."""
    return replace(blocks, k=max(blocks.k, BLOCK))


def _emit_skinny(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    rows, k, size = _sizes(call)
    blocks = skinny_blocks(tokens, skinny_rows(rows, spec), k, size, spec)
    return _emit(call, spec, arch, _whole_scales(blocks))


def _emit_gemm(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    return _emit(call, spec, arch, _whole_scales(gemm_blocks(*_sizes(call), spec)))


TEMPLATES: tuple[KernelTemplate, ...] = (
    *(
        KernelTemplate(f"linear_mxfp8_skinny{m}", "linear_mxfp8", _refuse, partial(_emit_skinny, m), max_tokens=m)
        for m in SKINNY_TOKENS
    ),
    KernelTemplate("linear_mxfp8_gemm", "linear_mxfp8", _refuse, _emit_gemm),
)
