"""qkv_norm_rope_insert for any token count: the projection as a GEMM, then norm, RoPE and insertion."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._kernels import linear, linear_nvfp4, rope
from mmcompile.targets._kernels.common import need
from mmcompile.targets._kernels.qkv import has_norm

_INSERT = next(t for t in rope.TEMPLATES if t.op == "qk_norm_rope_insert")
_PROJECTIONS = {"qkv_norm_rope_insert": linear.TEMPLATES, "qkv_norm_rope_insert_nvfp4": linear_nvfp4.TEMPLATES}
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
    first = OpCall(_PROJECTIONS[call.op][0].op, projected | {"residual": None}, (qkv,), {"activation": "none"} | phase)
    return first, OpCall(_INSERT.op, {"qkv": qkv} | others, call.results, dict(attributes))


def _refuse(projection: KernelTemplate, call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    first, second = _split(call)
    return projection.refuse(first, spec, arch) or _INSERT.refuse(second, spec, arch)


def _refuse_narrow(projection: KernelTemplate, call: OpCall, spec: TargetSpec, arch: Architecture) -> str | None:
    """Few tokens: one launch is faster, but for heads with norms, where it has only one program a head."""
    heads = call.attributes["num_heads"] + 2 * call.attributes["num_kv_heads"]
    if not has_norm(call):
        return "one launch is faster"
    if heads > spec.units // 2:
        return f"one launch is faster: {heads} heads occupy most of the {spec.units} units"
    return _refuse(projection, call, spec, arch)


def _route(source: KernelSource, name: str) -> KernelSource:
    """Send the value called ``name`` through the scratch buffer."""
    parameters = tuple(replace(p, value="scratch:qkv") if p.value == name else p for p in source.parameters)
    return replace(source, parameters=parameters)


def _emit(
    projection: KernelTemplate, call: OpCall, spec: TargetSpec, arch: Architecture
) -> tuple[KernelSource, ...]:
    first, second = _split(call)
    projected, inserted = projection.emit(first, spec, arch), _INSERT.emit(second, spec, arch)
    return (*(_route(s, "result") for s in projected), *(_route(s, "qkv") for s in inserted))


def _scratch(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    qkv = _split(call)[0].results[0]
    return (Scratch("qkv", qkv.shape, qkv.dtype),)


def _make(op: str, projection: KernelTemplate) -> KernelTemplate:
    refuse = _refuse if projection.max_tokens is None else _refuse_narrow
    name = f"{op}_two_step{projection.max_tokens or ''}"
    return KernelTemplate(
        name, op, partial(refuse, projection), partial(_emit, projection), _scratch, max_tokens=projection.max_tokens
    )


_ALL = tuple(_make(op, projection) for op, projections in _PROJECTIONS.items() for projection in projections)
NARROW: tuple[KernelTemplate, ...] = tuple(t for t in _ALL if t.max_tokens is not None)
TEMPLATES: tuple[KernelTemplate, ...] = tuple(t for t in _ALL if t.max_tokens is None)
