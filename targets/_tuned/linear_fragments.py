"""Tuned decode linears for mma.m16n8k16: NVFP4 weights in fragment order, and unquantized row-major weights."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

from mmcompile.core.formats.nvfp4_fragments import LAYOUTS, refuse_shape
from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import ceil_div, kernel_name, need, row_stride, short_dtype, stage_warps
from mmcompile.targets._kernels.linear import (
    Blocks,
    epilogue_label,
    has_many_rows,
    linear_constants,
    mma_ledger,
    operand_parameters,
    prefetch_rows,
    refuse_dense,
    refuse_linear,
    tile_call,
)
from mmcompile.targets._kernels.linear_nvfp4 import WEIGHTS
from mmcompile.targets._kernels.two_step import INSERTS, make_two_step
from mmcompile.targets._tuned.fragments_gemm import emit_fragments_gemm
from mmcompile.targets._tuned.linear_configs import Config, choose_fragments, choose_rows, must_hold
from mmcompile.targets._tuned.linear_lanes import tile_fragments, tile_rows
from mmcompile.targets._tuned.linear_ptx import hold_loads, multiply_fragments, multiply_rows

GROUPS = (1, 2)
"""Groups of 8 tokens, the columns of an mma, that a decode linear can take."""
_SHORT = {"bfloat16": "bf16", "float16": "f16"}
_VECTOR = 8  # elements of the 16 bytes that a lane loads at a time


def emit_fragments(
    call: OpCall, groups: int, config: Config, *, parts: bool = False, pairs: bool = False
) -> tuple[KernelSource, ...]:
    """The kernel of an NVFP4 weight in fragment order for at most 8 * groups tokens; with ``parts`` as many a program.

    The programs of a tile for several parts of the tokens run side by side and share the weights in the caches.
    ``pairs``: the weight has the flavour of that name, which a conversion decodes, instead of that of x's dtype.
    """
    chunks = [multiply_fragments(need(call, "x").dtype, chunk, groups, pairs=pairs) for chunk in range(4)]
    constants = {"CHUNKS": (*(text for text, _ in chunks), chunks[0][1])}
    (source,) = _emit(call, tile_fragments, WEIGHTS, constants, groups, config, parts)
    return (replace(source, ledger=source.ledger | {"E2M1": True}) if pairs else source,)


def emit_rows(call: OpCall, groups: int, config: Config) -> tuple[KernelSource, ...]:
    """The kernel of an unquantized weight for at most 8 * groups tokens."""
    constants = {
        "WEIGHT_STRIDE": row_stride(need(call, "weight")),
        "SLICES": config.slices,
        "CHUNK": multiply_rows(need(call, "x").dtype, groups),
    }
    return _emit(call, tile_rows, ("weight",), constants, groups, config)


def _emit(
    call: OpCall, tile: Any, weights: tuple[str, ...], own: dict[str, Any], groups: int, config: Config,
    parts: bool = False,
) -> tuple[KernelSource, ...]:  # fmt: skip
    x, dtype = need(call, "x"), need(call, "x").dtype
    config = replace(config, warps=stage_warps(call, config.warps))
    constants: dict[str, Any] = linear_constants(call, 0, 0)
    del constants["WEIGHT_STRIDE"], constants["SCALE_STRIDE"]
    rows, k = int(need(call, weights[0]).shape[0]), int(constants["K"])
    paired = config.paired or constants["SWIGLU"]
    constants |= own | {
        "PAIRED": paired,
        "GROUPS": groups,
        "WARPS": config.warps,
        "HOLD": config.hold,
        "BARRIER": repr(hold_loads()),
    }
    names = [name for name in inspect.signature(tile.fn).parameters if name in constants]
    label, tiles = epilogue_label(call), str(ceil_div(rows, 32 if paired else 16))
    body = tile_call(f"{tile.__name__}(gate, ", call, "x", (*weights, "None", "None")[:3],
                     {n: constants[n] for n in names})  # fmt: skip
    if parts:
        body, tiles = take_part(body, x.shape[0], 8 * groups), f"{tiles} * cdiv({x.shape[0]}, {8 * groups})"
    source = emit_kernel(
        name=kernel_name(f"{call.op}_lanes{8 * groups}{'_parts' * parts}", short_dtype(dtype), f"{rows}x{k}", label),
        title=f"{call.op}: [{x.shape[0]}, {k}] {dtype} by a weight [{rows}, {k}], epilogue: {label or 'none'}.",
        tiles=[tile],
        constants=constants,
        parameters=operand_parameters(call, ("x", *weights)),
        body=body,
        grid=(tiles, "1", "1"),
        num_warps=config.warps,
        num_stages=1,
        ledger={"HMMA.16816": True},
        gated=True,
        prefetch=prefetch_rows(need(call, weights[0]), weights[0], 32 if paired else 16, bool(constants["SWIGLU"])),
    )
    return (replace(source, lanes=True, max_registers=config.max_registers),)


def take_part(body: str, rows: int | str, tokens: int) -> str:
    """The call of a tile for one of the parts of ``tokens`` tokens, the parts of a tile next to each other."""
    for old, new in (
        ("tl.program_id(0), x,", "tl.program_id(0) // parts, x + first * X_STRIDE,"),
        (" residual,", " residual + first * RESIDUAL_STRIDE,"),
        (f" result, {rows},", f" result + first * RESULT_STRIDE, {rows} - first,"),
    ):
        body = body.replace(old, new)
    return f"parts = tl.cdiv({rows}, {tokens})\nfirst = tl.program_id(0) % parts * {tokens}\n{body}"


def refuse_lanes(call: OpCall, arch: Architecture) -> str | None:
    """The reason why x cannot be loaded as fragments, or None."""
    x = need(call, "x")
    missing = sorted({"mma_m16n8k16", "mul_bf16x2"} - arch.features)
    if missing:
        return f"{arch.name} lacks {missing[0]}"
    if x.dtype not in _SHORT:
        return f"x is {x.dtype}, not {' or '.join(_SHORT)}"
    if row_stride(x) % _VECTOR or int(x.shape[1]) % _VECTOR:
        return f"rows of x are no multiple of {_VECTOR} elements"
    return None


def _refuse_shape(call: OpCall) -> str | None:
    """The reason why the weight has no fragments that these kernels take, or None."""
    rows, k = int(need(call, "packed").shape[0]), int(need(call, "x").shape[1])
    reason = refuse_shape(rows, k)
    if reason is None and call.attributes.get("activation") == "swiglu" and rows % 32:
        return f"the {rows // 2} gate rows are not made of tiles of 16"
    return reason


def choose_flavour(dtype: str, arch: Architecture) -> str:
    """The flavour of fragments for activations of ``dtype``: pairs where one instruction converts two codes."""
    short = _SHORT[dtype]
    return "pairs" if {f"cvt_e2m1_{short}x2", f"cvt_e4m3_{short}x2"} <= arch.features else dtype


def want_fragments(call: OpCall, spec: TargetSpec, arch: Architecture) -> dict[str, str]:
    """Codes and scales in fragment order, where the call allows it."""
    reason = refuse_linear(call, spec, arch) or refuse_lanes(call, arch) or _refuse_shape(call)
    if reason is not None:
        return {}
    return dict.fromkeys(("packed", "scale"), LAYOUTS[choose_flavour(need(call, "x").dtype, arch)])


def _refuse_fragments(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    packed, scale = need(call, "packed"), need(call, "scale")
    if packed.layout == "linear" or scale.layout == "linear":
        return "the weight is row-major"
    reason = refuse_linear(call, spec, arch) or refuse_lanes(call, arch) or _refuse_shape(call)
    if reason is not None:
        return reason
    wanted = LAYOUTS[choose_flavour(need(call, "x").dtype, arch)]
    if (packed.layout, scale.layout) != (wanted, wanted):
        return f"the weight has the layout {packed.layout}, not {wanted}"
    return None


def _emit_fragments(
    groups: int, call: OpCall, spec: TargetSpec, arch: Architecture, *, parts: bool = False
) -> tuple[KernelSource, ...]:
    rows, k = int(need(call, "packed").shape[0]), int(need(call, "x").shape[1])
    swiglu = call.attributes.get("activation") == "swiglu"
    config = choose_fragments(rows, k, groups, swiglu, spec.units, must_hold(spec))
    return emit_fragments(call, groups, config, parts=parts, pairs=_has_pairs(call, arch))


def _has_pairs(call: OpCall, arch: Architecture) -> bool:
    return choose_flavour(need(call, "x").dtype, arch) == "pairs"


def _emit_gemm(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    rows, dtype = int(need(call, "packed").shape[0]), need(call, "x").dtype
    blocks = Blocks(128, 128, 64, 8, 3) if rows >= 4096 else Blocks(64, 64, 64, 4, 3)
    return emit_fragments_gemm(call, blocks, mma_ledger(dtype, blocks, spec, arch), pairs=_has_pairs(call, arch))


def _find_rows_config(groups: int, call: OpCall, spec: TargetSpec) -> Config | None:
    rows, k = need(call, "weight").shape
    swiglu = call.attributes.get("activation") == "swiglu"
    if "warps" in call.attributes and not has_many_rows(int(rows), spec):
        # As a stage it has its weights on the way before its inputs are there.
        return Config(int(call.attributes["warps"]), hold=True, paired=swiglu)
    return choose_rows(int(rows), int(k), groups, swiglu, spec.units)


def _refuse_rows(groups: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    reason = refuse_dense(call, spec, arch) or refuse_lanes(call, arch)
    if reason is None and row_stride(need(call, "weight")) % _VECTOR:
        return f"rows of the weight are no multiple of {_VECTOR} elements apart"
    if reason is None and _find_rows_config(groups, call, spec) is None:
        return "the portable kernel is faster"
    return reason


def _emit_rows(groups: int, call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    config = _find_rows_config(groups, call, spec)
    assert config is not None
    return emit_rows(call, groups, config)


FRAGMENTS: tuple[KernelTemplate, ...] = tuple(
    KernelTemplate(f"linear_nvfp4_fragments{tokens or ''}", "linear_nvfp4", _refuse_fragments, emit, max_tokens=tokens,
                   grade="tuned", layouts=want_fragments)
    for tokens, emit in (
        *((8 * groups, partial(_emit_fragments, groups)) for groups in GROUPS),
        (32, partial(_emit_fragments, GROUPS[-1], parts=True)),
        (None, _emit_gemm),
    )
)  # fmt: skip
ROWS: tuple[KernelTemplate, ...] = tuple(
    KernelTemplate(f"linear_rows{8 * groups}", "linear", partial(_refuse_rows, groups), partial(_emit_rows, groups),
                   max_tokens=8 * groups, grade="tuned")
    for groups in GROUPS
)  # fmt: skip
TEMPLATES: tuple[KernelTemplate, ...] = (*FRAGMENTS, *ROWS)
QKV: tuple[KernelTemplate, ...] = tuple(
    make_two_step(f"{name}_nvfp4", projection, insert) for name, insert in INSERTS.items() for projection in FRAGMENTS
)
"""The fused QKV operations: their weight is that of prefill's projection, so that they read the same layout."""
