"""The fused QKV operations for any token count: the projection as a GEMM, then norm, RoPE and insertion."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._kernels import qkv_index, rope
from mmcompile.targets._kernels.common import need
from mmcompile.targets._kernels.qkv import has_norm, refuse_tile
from mmcompile.targets._kernels.qkv_project import FORMATS, count_rows, take_insertion, take_projection

INSERTS = {
    "qkv_norm_rope_insert": next(t for t in rope.TEMPLATES if t.op == "qk_norm_rope_insert"),
    "qkv_norm_rope_insert_index": qkv_index.INSERT,
}
"""By the fused operation's name without its weight format."""
_WEIGHT_OF_ONE_LAUNCH = 1 << 16
"""Weight elements of a head above which one program a head reads them longer than a second launch takes.

Measured on an H200 with MiniMax-M3's 77 heads of 128 x 6144, 1 to 16 tokens: one launch 55 us in bf16 and 72 in MXFP8,
two 35 and 33, of which the insertion takes 1.9. The bound is where the difference, taken as linear, has vanished.
"""


def _refuse(
    projection: KernelTemplate, insert: KernelTemplate, call: OpCall, spec: TargetSpec, arch: Architecture
) -> str | None:
    reason = projection.refuse(take_projection(call), spec, arch)
    return reason or insert.refuse(take_insertion(call, insert.op), spec, arch)


def _refuse_narrow(
    projection: KernelTemplate, insert: KernelTemplate, call: OpCall, spec: TargetSpec, arch: Architecture
) -> str | None:
    """Few tokens: one launch is faster, but for heads with norms, where it has only one program a head."""
    head_dim = int(call.attributes["head_dim"])
    heads, weight = count_rows(call) // head_dim, head_dim * int(need(call, "x").shape[1])
    if not has_norm(call):
        return "one launch is faster"
    fits = weight <= _WEIGHT_OF_ONE_LAUNCH and refuse_tile(projection.max_tokens or 0, call) is None
    if heads > spec.units // 2 and fits:
        return f"one launch is faster: {heads} heads occupy most of the {spec.units} units"
    return _refuse(projection, insert, call, spec, arch)


def _route(source: KernelSource, **values: str) -> KernelSource:
    """Let the launch pass other values: the name of what the kernel asks for = what it gets."""
    parameters = tuple(replace(p, value=values.get(p.value, p.value)) for p in source.parameters)
    return replace(source, parameters=parameters)


def _emit(
    projection: KernelTemplate, insert: KernelTemplate, call: OpCall, spec: TargetSpec, arch: Architecture
) -> tuple[KernelSource, ...]:
    projected = projection.emit(take_projection(call), spec, arch)
    inserted = insert.emit(take_insertion(call, insert.op), spec, arch)
    return (
        *(_route(s, result="scratch:qkv", residual="delta") for s in projected),
        *(_route(s, qkv="scratch:qkv") for s in inserted),
    )


def _scratch(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    qkv = take_projection(call).results[0]
    return (Scratch("qkv", qkv.shape, qkv.dtype),)


def _layouts(
    projection: KernelTemplate, call: OpCall, spec: TargetSpec, arch: Architecture
) -> dict[str, str]:
    return projection.layouts(take_projection(call), spec, arch)


def make_two_step(op: str, projection: KernelTemplate, insert: KernelTemplate) -> KernelTemplate:
    """The fused operation ``op`` as a linear layer and an insertion; a tuned projection serves all that it can."""
    tuned = projection.grade == "tuned"
    refuse = _refuse if tuned or projection.max_tokens is None else _refuse_narrow
    label = projection.name.removeprefix(projection.op) if tuned else f"_two_step{projection.max_tokens or ''}"
    return KernelTemplate(
        f"{op}{label}",
        op,
        partial(refuse, projection, insert),
        partial(_emit, projection, insert),
        _scratch,
        max_tokens=projection.max_tokens,
        grade=projection.grade,
        layouts=partial(_layouts, projection),
    )


_ALL = tuple(
    make_two_step(f"{name}{suffix}", projection, insert)
    for name, insert in INSERTS.items()
    for suffix, form in FORMATS.items()
    for projection in form.templates
)
NARROW: tuple[KernelTemplate, ...] = tuple(t for t in _ALL if t.max_tokens is not None)
TEMPLATES: tuple[KernelTemplate, ...] = tuple(t for t in _ALL if t.max_tokens is None)
