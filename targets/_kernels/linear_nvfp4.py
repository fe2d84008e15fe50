"""Linear layers with NVFP4 weights and unquantized activations: the linear tiles with decoding projections."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._intrinsics import nvfp4, nvfp4_cvt, nvfp4_packed, nvfp4_scalef32
from mmcompile.targets._intrinsics.nvfp4 import decode_nvfp4
from mmcompile.targets._kernels.common import ELEMENT_SIZES, need, row_stride
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

WEIGHTS = ("packed", "scale", "global_scale")
BLOCK = 16


@triton.jit
def project_skinny(x, weight, scale, global_scale, tokens, row, valid, K: tl.constexpr, X_STRIDE: tl.constexpr,
                   WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, SPLIT: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``valid`` ones of the NVFP4 weight rows ``row`` [BLOCK_N] times all tokens: fp32 [BLOCK_M, BLOCK_N].

    Every step takes SPLIT * BLOCK_K of K, a slice of BLOCK_K for each warp; the slices are added at the end. The
    result is rounded to x's dtype, as mm::linear_nvfp4 does before its epilogue.
    """
    WORDS: tl.constexpr = BLOCK_K // 8
    token = tl.arange(0, BLOCK_M)[None, :, None]
    part = tl.arange(0, SPLIT)[:, None, None]
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    word = part * WORDS + tl.arange(0, WORDS)[None, None, :]
    block = part * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)[None, None, :]
    place = row.to(tl.int64)[None, :, None]
    x_tile = x + token * X_STRIDE + k
    word_tile = weight.to(tl.pointer_type(tl.int32), bitcast=True) + place * (WEIGHT_STRIDE // 4) + word
    scale_tile = scale + place * SCALE_STRIDE + block
    accumulator = tl.zeros((SPLIT, BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, SPLIT * BLOCK_K):
        x_mask, word_mask, scale_mask = token < tokens, valid[None, :, None], valid[None, :, None]
        if K % (SPLIT * BLOCK_K) != 0:
            x_mask = x_mask & (k < K - start)
            word_mask = word_mask & (word < (K - start) // 8)
            scale_mask = scale_mask & (block < (K - start) // 16)
        left = tl.load(x_tile + start, mask=x_mask, other=0.0)
        words = tl.load(word_tile + start // 8, mask=word_mask, other=0)
        factors = tl.load(scale_tile + start // 16, mask=scale_mask, other=0.0)
        words = tl.reshape(words, (SPLIT * BLOCK_N, WORDS))
        factors = tl.reshape(factors, (SPLIT * BLOCK_N, BLOCK_K // 16))
        right = tl.reshape(decode_nvfp4(words, factors, left.dtype), (SPLIT, BLOCK_N, BLOCK_K))
        accumulator = tl.dot(left, tl.permute(right, (0, 2, 1)), accumulator, input_precision="ieee")
    multiplier = tl.load(global_scale + row, mask=valid, other=0.0) * 256.0
    return (tl.sum(accumulator, 0) * multiplier[None, :]).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def project_tile(x, weight, scale, global_scale, tokens, token, row, valid, K: tl.constexpr, X_STRIDE: tl.constexpr,
                 WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``valid`` ones of the NVFP4 weight rows ``row`` [BLOCK_N] times x[token]: fp32 [BLOCK_M, BLOCK_N]."""
    k, word, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 8), tl.arange(0, BLOCK_K // 16)
    place = row.to(tl.int64)[:, None]
    x_tile = x + token.to(tl.int64)[:, None] * X_STRIDE + k[None, :]
    word_tile = weight.to(tl.pointer_type(tl.int32), bitcast=True) + place * (WEIGHT_STRIDE // 4) + word[None, :]
    scale_tile = scale + place * SCALE_STRIDE + block[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x_mask, word_mask, scale_mask = (token < tokens)[:, None], valid[:, None], valid[:, None]
        if K % BLOCK_K != 0:
            x_mask = x_mask & (k < K - start)[None, :]
            word_mask = word_mask & (word < (K - start) // 8)[None, :]
            scale_mask = scale_mask & (block < (K - start) // 16)[None, :]
        left = tl.load(x_tile + start, mask=x_mask, other=0.0)
        words = tl.load(word_tile + start // 8, mask=word_mask, other=0)
        factors = tl.load(scale_tile + start // 16, mask=scale_mask, other=0.0)
        right = decode_nvfp4(words, factors, left.dtype)
        accumulator = tl.dot(left, tl.trans(right), accumulator, input_precision="ieee")
    multiplier = tl.load(global_scale + row, mask=valid, other=0.0) * 256.0
    return (accumulator * multiplier[None, :]).to(x.dtype.element_ty).to(tl.float32)


def _find_decoder(arch: Architecture, dtype: str) -> tuple[Any, dict[str, bool]]:
    """The fastest decode_nvfp4 of an architecture for x's dtype, and the ledger that it promises."""
    short = {"bfloat16": "bf16", "float16": "f16"}.get(dtype)
    if f"cvt_e2m1_{short}x2" in arch.features:
        return nvfp4_cvt.decode_nvfp4, {"E2M1": True}
    if short and "cvt_scalef32_fp4" in arch.features:
        return nvfp4_scalef32.decode_nvfp4, {f"v_cvt_scalef32_pk_{short}_fp4": True}
    if short and "mul_bf16x2" in arch.features:
        return nvfp4_packed.decode_nvfp4, {}
    return nvfp4.decode_nvfp4, {}


def nvfp4_intrinsics(arch: Architecture, dtype: str) -> tuple[dict[str, Any], dict[str, bool]]:
    """What makes a linear tile read NVFP4 weights, by function name, and what the disassembly must (not) hold.

    The scaled matrix instructions must not appear: their scales are powers of two, NVFP4's are not.
    """
    decoder, ledger = _find_decoder(arch, dtype)
    functions = {"project_skinny": project_skinny, "project_tile": project_tile, "decode_nvfp4": decoder}
    return functions, ledger | ({"v_mfma_scale": False} if "mfma_scale_f8f6f4" in arch.features else {})


def refuse_weight(call: OpCall) -> str | None:
    """The reason why the three weight operands cannot be served, or None."""
    packed, scale, global_scale = (need(call, name) for name in WEIGHTS)
    k = need(call, "x").shape[1]
    if not isinstance(k, int) or k % BLOCK:
        return f"k = {k} is not a multiple of {BLOCK}"
    if (packed.dtype, scale.dtype, global_scale.dtype) != ("uint8", "float8_e4m3fn", "float32"):
        return f"the weight is stored as {packed.dtype}, {scale.dtype}, {global_scale.dtype}"
    if packed.layout != "linear" or scale.layout != "linear":
        return f"the weight has the layout {packed.layout}"
    if packed.strides[1] != 1 or scale.strides[1] != 1 or global_scale.strides[0] != 1:
        return "the last strides of packed, scale and global_scale must be 1"
    return "rows of packed must start at multiples of 4 bytes" if row_stride(packed) % 4 else None


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    return refuse_linear(call, spec, arch) or refuse_weight(call)


def _emit(call: OpCall, spec: TargetSpec, arch: Architecture, blocks: Blocks) -> tuple[KernelSource, ...]:
    dtype = need(call, "x").dtype
    intrinsics, ledger = nvfp4_intrinsics(arch, dtype)
    return emit_linear(
        call, blocks, weights=WEIGHTS,
        strides=(row_stride(need(call, "packed")), row_stride(need(call, "scale"))),
        intrinsics=intrinsics,
        ledger=mma_ledger(dtype, blocks, spec, arch) | ledger,
    )


def _sizes(call: OpCall) -> tuple[int, int, int]:
    x = need(call, "x")
    return int(need(call, "packed").shape[0]), int(x.shape[1]), ELEMENT_SIZES[x.dtype]


def _emit_skinny(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    rows, k, size = _sizes(call)
    return _emit(call, spec, arch, skinny_blocks(tokens, skinny_rows(rows, spec), k, size, spec))


def _emit_gemm(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    return _emit(call, spec, arch, gemm_blocks(*_sizes(call), spec))


TEMPLATES: tuple[KernelTemplate, ...] = (
    *(
        KernelTemplate(f"linear_nvfp4_skinny{m}", "linear_nvfp4", _refuse, partial(_emit_skinny, m), max_tokens=m)
        for m in SKINNY_TOKENS
    ),
    KernelTemplate("linear_nvfp4_gemm", "linear_nvfp4", _refuse, _emit_gemm),
)
