"""Linear layers with bias, SwiGLU and residual epilogues: a skinny kernel for decode and a tiled GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand, Parameter
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    ELEMENT_SIZES,
    ceil_div,
    is_present,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    refuse_rows,
    row_stride,
    short_dtype,
    symbol_parameters,
)

SKINNY_TOKENS = (16, 32)
SPLIT = 4


@triton.jit
def project_skinny(x, weight, scale, global_scale, tokens, row, valid, K: tl.constexpr, X_STRIDE: tl.constexpr,
                   WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, SPLIT: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``valid`` ones of the weight rows ``row`` [BLOCK_N] times all tokens: fp32 [BLOCK_M, BLOCK_N].

    Every step takes SPLIT * BLOCK_K of K, a slice of BLOCK_K for each warp; the slices are added at the end.
    """
    token = tl.arange(0, BLOCK_M)[None, :, None]
    k = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + token * X_STRIDE + k[:, None, :]
    weight_tile = weight + row.to(tl.int64)[None, None, :] * WEIGHT_STRIDE + k[:, :, None]
    accumulator = tl.zeros((SPLIT, BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, SPLIT * BLOCK_K):
        x_mask, weight_mask = token < tokens, valid[None, None, :]
        if K % (SPLIT * BLOCK_K) != 0:
            x_mask = x_mask & (k[:, None, :] < K - start)
            weight_mask = weight_mask & (k[:, :, None] < K - start)
        left = tl.load(x_tile + start, mask=x_mask, other=0.0)
        right = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
    return tl.sum(accumulator, 0)


@triton.jit
def project_tile(x, weight, scale, global_scale, tokens, token, row, valid, K: tl.constexpr, X_STRIDE: tl.constexpr,
                 WEIGHT_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The ``valid`` ones of the weight rows ``row`` [BLOCK_N] times x[token]: fp32 [BLOCK_M, BLOCK_N]."""
    k = tl.arange(0, BLOCK_K)
    x_tile = x + token.to(tl.int64)[:, None] * X_STRIDE + k[None, :]
    weight_tile = weight + row.to(tl.int64)[None, :] * WEIGHT_STRIDE + k[:, None]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x_mask, weight_mask = (token < tokens)[:, None], valid[None, :]
        if K % BLOCK_K != 0:
            x_mask = x_mask & (k[None, :] < K - start)
            weight_mask = weight_mask & (k[:, None] < K - start)
        left = tl.load(x_tile + start, mask=x_mask, other=0.0)
        right = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
    return accumulator


@triton.jit
def weight_rows(tile, N: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_N: tl.constexpr):
    """Weight rows of a tile and which of them exist. SWIGLU interleaves gate rows n and up rows N + n."""
    if SWIGLU:
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N) // 2
        row = column + (tl.arange(0, BLOCK_N) % 2) * N
    else:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        row = column
    return row, column < N


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up, each step rounded to the inputs' dtype as in mm::swiglu."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def store_linear(value, bias, residual, result, tokens, tile, token, row, valid, N: tl.constexpr,
                 RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr, SWIGLU: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Epilogue of a tile: fp32 value [BLOCK_M, BLOCK_N] -> bias, SwiGLU, residual, each rounded -> result."""
    if bias is not None:
        value += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)[None, :]
    value = value.to(result.dtype.element_ty)
    if SWIGLU:
        gate, up = tl.split(tl.reshape(value, (BLOCK_M, BLOCK_N // 2, 2)))
        value = silu_times(gate, up)
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    place = token.to(tl.int64)[:, None]
    mask = (token < tokens)[:, None] & (column < N)[None, :]
    if residual is not None:
        other = tl.load(residual + place * RESIDUAL_STRIDE + column[None, :], mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    tl.store(result + place * RESULT_STRIDE + column[None, :], value, mask=mask)


@triton.jit
def tile_linear_skinny(tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
                       K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
                       SCALE_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr,
                       SWIGLU: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr):
    """The result columns of BLOCK_N weight rows, for all of at most BLOCK_M tokens."""
    row, valid = weight_rows(tile, N, SWIGLU, BLOCK_N)
    value = project_skinny(x, weight, scale, global_scale, tokens, row, valid, K, X_STRIDE, WEIGHT_STRIDE,
                           SCALE_STRIDE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K)
    store_linear(value, bias, residual, result, tokens, tile, tl.arange(0, BLOCK_M), row, valid, N, RESIDUAL_STRIDE,
                 RESULT_STRIDE, SWIGLU, BLOCK_M, BLOCK_N)


@triton.jit
def tile_linear_gemm(tile, x, weight, scale, global_scale, bias, residual, result, tokens, N: tl.constexpr,
                     K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
                     SCALE_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, RESULT_STRIDE: tl.constexpr,
                     SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                     TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The result columns of BLOCK_N weight rows for BLOCK_M tokens; tiles run down GROUP_M token blocks at a time."""
    group = tile // (GROUP_M * TILES_N)
    group_rows = tl.minimum(tl.cdiv(tokens, BLOCK_M) - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * TILES_N)
    token = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_n = within // group_rows
    row, valid = weight_rows(tile_n, N, SWIGLU, BLOCK_N)
    value = project_tile(x, weight, scale, global_scale, tokens, token, row, valid, K, X_STRIDE, WEIGHT_STRIDE,
                         SCALE_STRIDE, BLOCK_M, BLOCK_N, BLOCK_K)
    store_linear(value, bias, residual, result, tokens, tile_n, token, row, valid, N, RESIDUAL_STRIDE,
                 RESULT_STRIDE, SWIGLU, BLOCK_M, BLOCK_N)


@dataclass(frozen=True)
class Blocks:
    """Tokens, weight rows and K of a tile, launch options, and whether the kernel takes all tokens in one tile."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    skinny: bool = False


def skinny_blocks(tokens: int, block_n: int, k: int, element_size: int, spec: TargetSpec) -> Blocks:
    """Tile of a skinny kernel for at most ``tokens`` tokens and ``block_n`` weight rows a program.

    A warp's slice of K is 256 bytes of x, less where K is short or where the stages would take more than 160 KB of
    shared memory (64 KB on AMD). Two stages where there are many programs a unit, else three (measured on an H200).
    """
    stages, budget = (2 if block_n > 16 else 3, 160 * 1024) if spec.backend == "cuda" else (2, 64 * 1024)
    block_k = max(16, min(256 // element_size, next_power_of_two(ceil_div(k, SPLIT))))
    stage_bytes = (tokens + block_n) * SPLIT * element_size
    while stages * stage_bytes * block_k > budget and (stages > 2 or block_k > 16):
        stages, block_k = (stages - 1, block_k) if stages > 2 else (stages, block_k // 2)
    return Blocks(tokens, block_n, block_k, SPLIT, stages, skinny=True)


def skinny_rows(rows: int, spec: TargetSpec) -> int:
    """Weight rows a program: so few that every unit gets one, 32 where each gets many.

    The matrix unit takes 8 at least on NVIDIA and 16 on AMD.
    """
    if has_many_rows(rows, spec):
        return 32
    return 8 if spec.backend == "cuda" and ceil_div(rows, 16) < spec.units else 16


def has_many_rows(rows: int, spec: TargetSpec) -> bool:
    """True for layers so wide (an lm_head) that 16 rows a program would give every unit more than eight programs."""
    return rows > 8 * 16 * spec.units


def gemm_blocks(rows: int, k: int, element_size: int, spec: TargetSpec) -> Blocks:
    """Tile of a GEMM over ``rows`` weight rows: 64 tokens by 64 rows, by 128 if there are many, 32 for fp32."""
    block_n = 32 if element_size == 4 else 128 if rows > 2048 else 64
    block_k = max(16, min(128 // element_size, next_power_of_two(k)))
    return Blocks(64, block_n, block_k, 4, 3 if spec.backend == "cuda" else 2)


def result_width(call: OpCall) -> int:
    """Columns of the result of a linear operation."""
    return int(call.results[0].shape[-1])


def refuse_linear(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    """The reason why the epilogue operands or x of a linear call cannot be served, or None."""
    reason = refuse_rows(call, "x", "residual")
    if reason is not None:
        return reason
    dtype = need(call, "x").dtype
    for name in ("bias", "residual"):
        operand = call.operands.get(name)
        if operand is not None and operand.dtype != dtype:
            return f"{name} is {operand.dtype} and x {dtype}"
    return None


def refuse_dense(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    """The reason why a linear layer of unquantized weights cannot be served, or None."""
    reason = refuse_linear(call, spec, arch) or refuse_rows(call, "weight")
    if reason is None and need(call, "weight").dtype != need(call, "x").dtype:
        return f"weight is {need(call, 'weight').dtype} and x {need(call, 'x').dtype}"
    return reason


def mma_ledger(dtype: str, blocks: Blocks, spec: TargetSpec, arch: Architecture) -> dict[str, bool]:
    """The matrix instruction that the disassembly must hold; NVIDIA has none for full-precision fp32."""
    if spec.backend == "hip":
        return {"v_mfma_f32": True}
    if dtype == "float32":
        return {}
    if blocks.m >= 64 and "tcgen05" in arch.features:
        return {"UTCHMMA": True}
    return {"HGMMA": True} if blocks.m >= 64 and "wgmma" in arch.features else {"HMMA.16816": True}


def operand_parameters(call: OpCall, factors: tuple[str, ...]) -> list[Parameter]:
    """The operands of the product, the present epilogue operands, the result, and the symbols of the token count."""
    names = [*factors, *(name for name in ("bias", "residual") if is_present(call, name))]
    return [
        *(pointer(name, need(call, name)) for name in names),
        pointer("result", call.results[0]),
        *symbol_parameters(need(call, "x").shape[0]),
    ]


def linear_constants(call: OpCall, weight_stride: int, scale_stride: int) -> dict[str, int | float | bool | str]:
    """Shape constants of the linear tiles, by name."""
    x, residual = need(call, "x"), call.operands.get("residual")
    return {
        "N": result_width(call),
        "K": int(x.shape[1]),
        "X_STRIDE": row_stride(x),
        "WEIGHT_STRIDE": weight_stride,
        "SCALE_STRIDE": scale_stride,
        "RESIDUAL_STRIDE": 0 if residual is None else row_stride(residual),
        "RESULT_STRIDE": row_stride(call.results[0]),
        "SWIGLU": call.attributes.get("activation", "none") == "swiglu",
    }


def tile_call(tile: str, call: OpCall, x: str, weights: tuple[str, ...], constants: dict[str, object]) -> str:
    """The entry point's call of a linear tile; ``x`` and ``weights`` (weight, scale, global scale) are spelled.

    ``tile``: its name, or the call up to its tile, "name(first, ".
    """
    epilogue = [name if is_present(call, name) else "None" for name in ("bias", "residual")]
    rows = str(need(call, "x").shape[0])
    arguments = ["tl.program_id(0)", x, *weights, *epilogue, "result", rows, *constants]
    return f"{tile if '(' in tile else tile + '('}{', '.join(arguments)})"


def epilogue_label(call: OpCall) -> str:
    """Readable name of the epilogue, for kernel names: "", "bias", "swiglu_residual" ..."""
    parts = ["bias"] if is_present(call, "bias") else []
    parts += ["swiglu"] if call.attributes.get("activation", "none") == "swiglu" else []
    return "_".join(parts + (["residual"] if is_present(call, "residual") else []))


def prefetch_rows(weight: Operand, name: str, rows: int, swiglu: bool = False) -> str:
    """Statements that ask for the ``rows`` weight rows of tile ``tl.program_id(0)``, half of each part with SwiGLU."""
    total, stride = int(weight.shape[0]), row_stride(weight)
    parts, rows = (2, rows // 2) if swiglu else (1, rows)
    size = rows * stride * ELEMENT_SIZES[weight.dtype]
    if total // parts % rows or size % 16:
        return ""
    starts = [f"tl.program_id(0) * {rows * stride} + {part * total // parts * stride}" for part in range(parts)]
    return "\n".join(f"prefetch_bytes({name} + {start}, {size})" for start in starts)


def emit_linear(
    call: OpCall,
    blocks: Blocks,
    *,
    weights: tuple[str, ...],
    strides: tuple[int, int],
    intrinsics: dict[str, object],
    ledger: dict[str, bool],
    inputs: tuple[str, ...] = ("x",),
) -> tuple[KernelSource, ...]:
    """Emit one linear kernel with the given tile; ``intrinsics`` bring the weight format.

    ``inputs``: the operands that the tile takes as x, a tuple if there are several; the operand "x" describes them.
    """
    dtype, rows = need(call, "x").dtype, need(call, "x").shape[0]
    constants = linear_constants(call, *strides)
    rows_per_column = 2 if constants["SWIGLU"] else 1
    tiles_n = ceil_div(result_width(call) * rows_per_column, blocks.n)
    sizes = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k}
    if blocks.skinny:
        tile, kind, grid = tile_linear_skinny, f"skinny{blocks.m}", str(tiles_n)
        constants |= {"SPLIT": SPLIT, **sizes}
    else:
        tile, kind, grid = tile_linear_gemm, f"gemm{blocks.m}", f"cdiv({rows}, {blocks.m}) * {tiles_n}"
        constants |= {**sizes, "TILES_N": tiles_n, "GROUP_M": 8}
    x, spelled = inputs[0] if len(inputs) == 1 else f"({', '.join(inputs)})", (*weights, "None", "None")[:3]
    label = epilogue_label(call)
    n, k = need(call, weights[0]).shape[0], constants["K"]
    return (
        emit_kernel(
            name=kernel_name(f"{call.op}_{kind}", short_dtype(dtype), f"{n}x{k}", label),
            title=f"{call.op}: [{rows}, {k}] {dtype} by a weight [{n}, {k}], epilogue: {label or 'none'}.",
            tiles=[tile],
            constants=constants,
            parameters=operand_parameters(call, (*inputs, *weights)),
            body=tile_call(tile.__name__, call, x, spelled, constants),
            grid=(grid, "1", "1"),
            intrinsics=intrinsics,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            ledger=ledger,
            prefetch=prefetch_rows(need(call, weights[0]), weights[0], blocks.n, bool(constants["SWIGLU"])),
        ),
    )


def _emit_dense(call: OpCall, spec: TargetSpec, arch: Architecture, blocks: Blocks) -> tuple[KernelSource, ...]:
    return emit_linear(
        call, blocks, weights=("weight",), strides=(row_stride(need(call, "weight")), 0), intrinsics={},
        ledger=mma_ledger(need(call, "x").dtype, blocks, spec, arch),
    )


def _sizes(call: OpCall) -> tuple[int, int, int]:
    rows, k = need(call, "weight").shape
    return int(rows), int(k), ELEMENT_SIZES[need(call, "x").dtype]


def _emit_skinny(tokens: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    """A wide bf16 layer runs at the memory's speed as a GEMM with few tokens; the others share K among warps."""
    rows, k, size = _sizes(call)
    if has_many_rows(rows, spec) and size == 2:
        return _emit_dense(call, spec, arch, Blocks(tokens, 64, 64, 4, 4 if spec.backend == "cuda" else 2))
    return _emit_dense(call, spec, arch, skinny_blocks(tokens, skinny_rows(rows, spec), k, size, spec))


def _emit_gemm(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    return _emit_dense(call, spec, arch, gemm_blocks(*_sizes(call), spec))


TEMPLATES: tuple[KernelTemplate, ...] = (
    *(
        KernelTemplate(f"linear_skinny{m}", "linear", refuse_dense, partial(_emit_skinny, m), max_tokens=m)
        for m in SKINNY_TOKENS
    ),
    KernelTemplate("linear_gemm", "linear", refuse_dense, _emit_gemm),
)
