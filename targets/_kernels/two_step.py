"""qkv_norm_rope_insert for any token count: the projection as a GEMM, then norm, RoPE and insertion."""

from __future__ import annotations

from dataclasses import replace

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._kernels import linear, linear_nvfp4, rope
from mmcompile.targets._kernels.common import need

_INSERT = next(t for t in rope.TEMPLATES if t.op == "qk_norm_rope_insert")
_PROJECTIONS = {
    "qkv_norm_rope_insert": next(t for t in linear.TEMPLATES if t.max_tokens is None),
    "qkv_norm_rope_insert_nvfp4": next(t for t in linear_nvfp4.TEMPLATES if t.max_tokens is None),
}
_PROJECTED = ("x", "weight", "packed", "scale", "global_scale", "bias")


def _split(call: OpCall) -> tuple[OpCall, OpCall]:
    """The two operations that the fused one stands for."""
    attributes = call.attributes
    heads = attributes["num_heads"] + 2 * attributes["num_kv_heads"]
    width, x = int(heads * attributes["head_dim"]), need(call, "x")
    qkv = Operand((x.shape[0], width), (width, 1), x.dtype)
    projected = {k: v for k, v in call.operands.items() if k in _PROJECTED}
    others = {k: v for k, v in call.operands.items() if k not in _PROJECTED}
    phase = {"phase": attributes.get("phase", "decode")}
    first = OpCall(_PROJECTIONS[call.op].op, projected | {"residual": None}, (qkv,), {"activation": "none"} | phase)
    return first, OpCall(_INSERT.op, {"qkv": qkv} | others, call.results, dict(attributes))


def _refuse(call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    first, second = _split(call)
    return _PROJECTIONS[call.op].refuse(first, spec, arch) or _INSERT.refuse(second, spec, arch)


def _route(source: KernelSource, name: str) -> KernelSource:
    """Send the value called ``name`` through the scratch buffer."""
    parameters = tuple(replace(p, value="scratch:qkv") if p.value == name else p for p in source.parameters)
    return replace(source, parameters=parameters)


def _emit(call: OpCall, spec: TargetSpec, arch: Architecture) -> tuple[KernelSource, ...]:
    first, second = _split(call)
    projection = _PROJECTIONS[call.op].emit(first, spec, arch)
    insertion = _INSERT.emit(second, spec, arch)
    return (*(_route(s, "result") for s in projection), *(_route(s, "qkv") for s in insertion))


def _scratch(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    qkv = _split(call)[0].results[0]
    return (Scratch("qkv", qkv.shape, qkv.dtype),)


TEMPLATES: tuple[KernelTemplate, ...] = tuple(
    KernelTemplate(f"{op}_two_step", op, _refuse, _emit, _scratch) for op in _PROJECTIONS
)
