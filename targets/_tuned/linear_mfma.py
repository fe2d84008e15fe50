"""Tuned decode linears for v_mfma 16x16x32, waves of 64: NVFP4 weights in their order, unquantized row-major ones."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmcompile.core.formats.nvfp4_fragments import LAYOUTS, WAVE, refuse_shape
from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import ceil_div, kernel_name, need, row_stride, short_dtype, stage_warps
from mmcompile.targets._kernels.linear import (
    Blocks,
    epilogue_label,
    linear_constants,
    operand_parameters,
    prefetch_rows,
    refuse_dense,
    refuse_linear,
    tile_call,
)
from mmcompile.targets._kernels.linear_nvfp4 import WEIGHTS
from mmcompile.targets._kernels.two_step import INSERTS, make_two_step
from mmcompile.targets._tuned.linear_fragments import take_part
from mmcompile.targets._tuned.linear_waves import tile_wave_rows, tile_waves
from mmcompile.targets._tuned.waves_gemm import emit_waves_gemm

TOKENS = 16
"""Columns of the MFMA: tokens of a program."""
_VECTOR = 8  # elements of the 16 bytes that a lane loads at a time
_MOST_WAVES = 16
_DECODE = {"bfloat16": "v_cvt_scalef32_pk_f32_fp4", "float16": "v_cvt_scalef32_pk_f16_fp4"}


@dataclass(frozen=True)
class Waves:
    """How a decode linear is cut: waves a program, among which K is spread, and 32 rows a program instead of 16."""

    count: int
    paired: bool = False


def choose_waves(rows: int, k: int, swiglu: bool, units: int, step: int = 256) -> Waves:
    """For weights of which a wave takes ``step`` k at a time. A rule, not measured.

    Few programs a unit share K among many waves, so that all of it is asked for at once. Many programs hide latency by
    their number; they take 32 rows, which halves the reads of x. More than eight waves have 128 registers a lane, which
    are enough for one step of 16 rows.
    """
    programs, steps = rows / (16 * units), ceil_div(k, step)
    paired = swiglu or (programs >= 8 and rows % 32 == 0)
    most = 4 if programs >= 8 else 8 if programs >= 2 or paired or steps > _MOST_WAVES else _MOST_WAVES
    return Waves(min(most, 1 << (steps - 1).bit_length()), paired)


def emit_waves(call: OpCall, waves: Waves, *, parts: bool = False) -> tuple[KernelSource, ...]:
    """The kernel of an NVFP4 weight in the order of waves for at most TOKENS tokens; with ``parts`` as many a program.

    The programs of a tile for several parts of the tokens run side by side and share the weights in the caches.
    """
    return _emit_tile(call, tile_waves, WEIGHTS, waves, ledger_of(need(call, "x").dtype, "16x16x32"), parts)


def emit_wave_rows(call: OpCall, waves: Waves) -> tuple[KernelSource, ...]:
    """The kernel of an unquantized weight for at most TOKENS tokens."""
    return _emit_tile(call, tile_wave_rows, ("weight",), waves, {"v_mfma_f32_16x16x32": True})


def _emit_tile(
    call: OpCall, tile: Any, weights: tuple[str, ...], waves: Waves, ledger: dict[str, bool], parts: bool = False
) -> tuple[KernelSource, ...]:
    x, dtype, weight = need(call, "x"), need(call, "x").dtype, need(call, weights[0])
    rows, k, count = int(weight.shape[0]), int(x.shape[1]), stage_warps(call, waves.count)
    constants: dict[str, Any] = linear_constants(call, row_stride(weight), 0)
    paired = waves.paired or constants["SWIGLU"]
    constants |= {"PAIRED": paired, "WAVES": count}
    constants = {name: constants[name] for name in inspect.signature(tile.fn).parameters if name in constants}
    label, tiles = epilogue_label(call), str(ceil_div(rows, 32 if paired else 16))
    body = tile_call(f"{tile.__name__}(gate, ", call, "x", (*weights, "None", "None")[:3], constants)
    if parts:
        body, tiles = take_part(body, x.shape[0], TOKENS), f"{tiles} * cdiv({x.shape[0]}, {TOKENS})"
    return (
        emit_kernel(
            name=kernel_name(f"{call.op}_waves{'_parts' * parts}", short_dtype(dtype), f"{rows}x{k}", label),
            title=f"{call.op}: [{x.shape[0]}, {k}] {dtype} by a weight [{rows}, {k}], epilogue: {label or 'none'}.",
            tiles=[tile],
            constants=constants,
            parameters=operand_parameters(call, ("x", *weights)),
            body=body,
            grid=(tiles, "1", "1"),
            num_warps=count,
            num_stages=1,
            ledger=ledger,
            gated=True,
            prefetch=prefetch_rows(weight, weights[0], 32 if paired else 16, bool(constants["SWIGLU"])),
        ),
    )


def ledger_of(dtype: str, shape: str = "") -> dict[str, bool]:
    """What the disassembly must hold, an MFMA of ``shape``, and must not: one whose scales are powers of two."""
    return {_DECODE[dtype]: True, f"v_mfma_f32_{shape}": True, "v_mfma_scale": False}


def refuse_waves(call: OpCall, arch: Architecture) -> str | None:
    """The reason why x cannot be loaded as operands of the MFMA, or None."""
    x = need(call, "x")
    if "mfma_16x16x32_bf16" not in arch.features:
        return f"{arch.name} lacks mfma_16x16x32_bf16"
    if x.dtype not in _DECODE:
        return f"x is {x.dtype}, not {' or '.join(_DECODE)}"
    if row_stride(x) % _VECTOR:
        return f"rows of x are no multiple of {_VECTOR} elements apart"
    return None


def _refuse_call(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    """The reason why a weight of the right layout would not do, or None."""
    missing = sorted({"cvt_scalef32_fp4", "pk_mul_f32"} - arch.features)
    if missing:
        return f"{arch.name} lacks {missing[0]}"
    reason = refuse_linear(call, spec, arch) or refuse_waves(call, arch)
    rows = int(need(call, "packed").shape[0])
    reason = reason or refuse_shape(rows, int(need(call, "x").shape[1]))
    if reason is None and call.attributes.get("activation") == "swiglu" and rows % 32:
        return f"the {rows // 2} gate rows are not made of tiles of 16"
    return reason


def want_waves(call: OpCall, spec: TargetSpec, arch: Architecture) -> dict[str, str]:
    """Codes and scales in the order of waves, where the call allows it."""
    return {} if _refuse_call(call, spec, arch) else dict.fromkeys(("packed", "scale"), LAYOUTS[WAVE])


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    layouts = {need(call, name).layout for name in ("packed", "scale")}
    if "linear" in layouts:
        return "the weight is row-major"
    reason = _refuse_call(call, spec, arch)
    if reason is None and layouts != {LAYOUTS[WAVE]}:
        return f"the weight has the layout {need(call, 'packed').layout}, not {LAYOUTS[WAVE]}"
    return reason


def _emit(call: OpCall, spec: TargetSpec, arch: Architecture, *, parts: bool = False) -> tuple[KernelSource, ...]:
    swiglu = call.attributes.get("activation") == "swiglu"
    rows, k = int(need(call, "packed").shape[0]), int(need(call, "x").shape[1])
    return emit_waves(call, choose_waves(rows, k, swiglu, spec.units), parts=parts)


def _refuse_rows(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = refuse_dense(call, spec, arch) or refuse_waves(call, arch)
    if reason is None and (row_stride(need(call, "weight")) % _VECTOR or int(need(call, "x").shape[1]) % _VECTOR):
        return f"k or the rows of the weight are no multiple of {_VECTOR} elements"
    return reason


def _emit_rows(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    rows, k = (int(size) for size in need(call, "weight").shape)
    swiglu = call.attributes.get("activation") == "swiglu"
    return emit_wave_rows(call, choose_waves(rows, k, swiglu, spec.units, step=128))


def _emit_gemm(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    return emit_waves_gemm(call, Blocks(64, 128, 128, 4, 2), ledger_of(need(call, "x").dtype))


WAVES: tuple[KernelTemplate, ...] = tuple(
    KernelTemplate(f"linear_nvfp4_waves{tokens or ''}", "linear_nvfp4", _refuse, emit, max_tokens=tokens, grade="tuned",
                   layouts=want_waves)
    for tokens, emit in ((TOKENS, _emit), (2 * TOKENS, partial(_emit, parts=True)), (None, _emit_gemm))
)  # fmt: skip
ROWS: tuple[KernelTemplate, ...] = (
    KernelTemplate(f"linear_wave_rows{TOKENS}", "linear", _refuse_rows, _emit_rows, max_tokens=TOKENS, grade="tuned"),
)
TEMPLATES: tuple[KernelTemplate, ...] = (*WAVES, *ROWS)
QKV: tuple[KernelTemplate, ...] = tuple(
    make_two_step(f"{name}_nvfp4", projection, insert) for name, insert in INSERTS.items() for projection in WAVES
)
"""The fused QKV operations: their weight is that of prefill's projection, so that they read the same layout."""
