"""The streamed step as the tuned grade of a merged decode step: kernels, buffers and records for a plan, or why not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from mmcompile.core.kernel import KernelSource
from mmcompile.core.plan import Buffer, KernelLaunch, Part, Phase, Plan, Stream, View
from mmcompile.core.spec import TargetSpec
from mmcompile.core.stream import LINEAR, WARPS
from mmcompile.targets._tuned.stream_emit import emit_stream, list_parameters
from mmcompile.targets._tuned.stream_pack import arrange_role, list_roles
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_recognise import DecoderStep, recognise_step
from mmcompile.targets._tuned.stream_refuse import refuse_columns, refuse_stream
from mmcompile.targets._tuned.stream_shape import StepShape

LAYER_SECONDS = {1: 7.0e-6, 2: 8.4e-6, 4: 15e-6, 8: 19e-6}
"""By the rows of the kernel: seconds of a layer beside the bytes of weights and caches. From the steps of Llama-3.2-1B
and 3-8B shapes on an H200 (docs/measurements.md), which differ by up to 5 us a layer."""
_COLUMNS = (256, 128, 64, 32)
_STREAM, _NORMS = "decode.stream", "decode.stream_norms"


@dataclass
class StreamOffer:
    """Streamed steps of a plan by the rows that they compute, and the buffers that they share.

    ``reasons``: why there is none for other numbers of rows; for every number by ``reason``.
    """

    reason: str = ""
    sources: dict[int, KernelSource] = field(default_factory=dict)
    streams: dict[int, Stream] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def find(self, tokens: int) -> Stream | str:
        """The step for up to so many tokens, or why there is none."""
        rows = next((n for n in LAYER_SECONDS if n >= tokens), None)
        if self.reason or rows is None:
            return self.reason or f"it computes up to {max(LAYER_SECONDS)} tokens"
        return self.streams[rows] if rows in self.streams else self.reasons[rows]


def offer_stream(plan: Plan, phase: Phase, spec: TargetSpec, most: int) -> StreamOffer:
    """Streamed steps for up to ``most`` tokens, all of one order of the weights."""
    step = recognise_step(plan, phase)
    if isinstance(step, str):
        return StreamOffer(step)
    architecture = spec.architectures[0]
    shape, reason = _choose_programs(step.shape, spec)
    if reason:
        return StreamOffer(reason)
    offer = StreamOffer(buffers=_list_buffers(step, shape))
    for rows in LAYER_SECONDS:
        own = dataclasses.replace(shape, max_tokens=rows)
        refusal = refuse_stream(own, architecture)
        if refusal:
            offer.reasons[rows] = refusal
            continue
        offer.sources[rows] = emit_stream(own, architecture)
        offer.streams[rows] = _describe(step, own, offer)
        if rows >= most:
            break
    return offer


def _choose_programs(shape: StepShape, spec: TargetSpec) -> tuple[StepShape, str]:
    """The shape with the most programs, and the most columns in a stage; or the reason against the fewest programs."""
    if len(spec.architectures) > 1:
        return shape, f"it is made for one architecture, the target has {len(spec.architectures)}"
    widths = [w for w in _COLUMNS if not refuse_columns(dataclasses.replace(shape, warp_k=w))]
    if not widths:  # the reason that a model of this width could mend
        wide = shape.heads * shape.head_dim % (128 * WARPS) == 0
        return shape, refuse_columns(dataclasses.replace(shape, warp_k=128 if wide else 32)) or ""
    reason = f"{spec.units} units are fewer than its {shape.kv_heads} KV heads"
    for programs in range(spec.units // shape.kv_heads * shape.kv_heads, 0, -shape.kv_heads):
        for warp_k in widths:
            own = dataclasses.replace(shape, programs=programs, warp_k=warp_k)
            reason = refuse_stream(own, spec.architectures[0]) or ""
            if not reason:
                return own, ""
    return shape, reason


def _list_buffers(step: DecoderStep, shape: StepShape) -> dict[str, Buffer]:
    """The weights in the order of the stream, and the norms' as rows of one tensor."""
    parts, at = [], 0
    for role, layer in list_roles(shape):
        arrangement = arrange_role(shape, role)
        parts.append(Part(weight=step.weights[role, layer], offset=at, layout=arrangement.tag))
        at += arrangement.nbytes
    stream = Buffer(name=_STREAM, shape=(at,), dtype="uint8", role="derived", parts=tuple(parts))
    order = [(role, layer) for layer in range(shape.layers) for role in ("input", "after")] + [("final", shape.layers)]
    rows = [Part(weight=step.norms[name], offset=2 * shape.hidden * i, layout=LINEAR) for i, name in enumerate(order)]
    norms = Buffer(name=_NORMS, shape=(len(rows), shape.hidden), dtype="bfloat16", role="derived", parts=tuple(rows))
    return {_STREAM: stream, _NORMS: norms}


def _describe(step: DecoderStep, shape: StepShape, offer: StreamOffer) -> Stream:
    source = offer.sources[shape.max_tokens]
    views = step.views | {
        "stream": _view_whole(offer.buffers[_STREAM]), "norms": _view_whole(offer.buffers[_NORMS])
    }  # fmt: skip
    arguments = tuple(views.get(p.value, p.value) for p in list_parameters(shape))
    kernel = f"{source.name}_{source.digest[:8]}"
    return Stream(
        record=KernelLaunch(kernel=kernel, grid=(shape.programs, 1, 1), arguments=arguments),
        last=step.last,
        programs=shape.programs,
        tokens=shape.max_tokens,
        bytes=StepPlan(shape).stream_bytes,
        latency=LAYER_SECONDS[shape.max_tokens] * shape.layers,
        workspace_bytes=4 * StepPlan(shape).workspace["end"],
        period=StepPlan(shape).period,
        shape={name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(shape).items()},
    )


def _view_whole(buffer: Buffer) -> View:
    strides = (1,) if len(buffer.shape) == 1 else (buffer.shape[1], 1)
    return View(buffer=buffer.name, shape=buffer.shape, strides=strides)
