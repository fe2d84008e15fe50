"""Layouts of caches and weights: refuse a plan that reads a buffer otherwise than it lies, and arrange weights."""

from __future__ import annotations

from torch import Tensor

from mmcompile.core.errors import ArtifactError
from mmcompile.core.formats import nvfp4_fragments
from mmcompile.core.formats.cache_pages import PLAIN, list_layouts
from mmcompile.core.formats.nvfp4_cache import QUANTIZER, check_layout
from mmcompile.core.plan import Buffer, CacheSpec, Launch, Part, Phase, Plan, Stream, View
from mmcompile.core.stream import FAULT_WORD, LINEAR, parse_tag
from mmcompile.runtime.executor import count_bytes

_REBUILD = "rebuild the artifact with this mmcompile"


def check_cache_layouts(plan: Plan, spec: CacheSpec | None, where: str) -> None:
    """Compare manifest, buffers and launches; raise ArtifactError where two of them name different layouts.

    The bytes of two layouts have the same size, so nothing else would notice. ``where``: the plan, for the message.
    """
    caches = {name: b for name, b in plan.buffers.items() if b.role == "state"}
    if spec is not None:
        _check_manifest(caches, spec, plan.target, where)
    for phase in plan.phases.values():
        for launch in phase.launches:
            _check_launch(launch, caches, where)


def _check_manifest(caches: dict[str, Buffer], spec: CacheSpec, target: str, where: str) -> None:
    if spec.quantizer not in ("", QUANTIZER):
        raise ArtifactError(
            f"the cache is written by the quantizer {spec.quantizer!r}, this mmcompile has {QUANTIZER!r}",
            where=where,
            fix=_REBUILD,
        )
    named = spec.layouts.get(target)
    for buffer in caches.values():
        if named is not None and buffer.layout not in named:
            raise ArtifactError(
                f"the manifest gives the caches of {target} the layouts {', '.join(named)}, "
                f"{buffer.name} has {buffer.layout!r}",
                where=where,
                fix=_REBUILD,
            )


def _check_launch(launch: Launch, caches: dict[str, Buffer], where: str) -> None:
    for name, attribute in list_layouts(launch.inputs, launch.attributes).items():
        view = launch.inputs[name]
        if view is None or view.buffer not in caches:
            continue
        have, wanted = caches[view.buffer].layout, str(launch.attributes[attribute])
        if have == wanted:
            continue
        if PLAIN in (have, wanted):
            raise ArtifactError(
                f"the cache {view.buffer} has the layout {have!r}, {launch.name} takes it as {wanted!r}",
                where=where,
                fix=_REBUILD,
            )
        check_layout(have, wanted, f"{where}, launch {launch.name}")


def check_weight_layouts(plan: Plan, where: str) -> None:
    """Raise ArtifactError for a weight in an unknown layout, or one that a reference would read in other than its own.

    References take weights row-major; kernels were chosen for the layouts.
    """
    arranged = {n: b.layout for n, b in plan.buffers.items() if b.role == "weight" and b.layout != "linear"}
    for name, layout in arranged.items():
        if layout not in nvfp4_fragments.LAYOUTS.values():
            raise ArtifactError(f"the weight {name} has the unknown layout {layout!r}", where=where, fix=_REBUILD)
    for phase in plan.phases.values():
        for launch in phase.launches:
            read = next((v.buffer for v in launch.inputs.values() if v is not None and v.buffer in arranged), None)
            if read is not None and not launch.choices:
                raise ArtifactError(
                    f"{launch.name} has no kernel and reads {read}, which has the layout {arranged[read]!r}",
                    where=where,
                    fix=_REBUILD,
                )


def check_streams(plan: Plan, where: str) -> None:
    """Raise ArtifactError for a streamed step that names what the plan does not define, or has damaged buffers."""
    for phase in plan.phases.values():
        for schedule in phase.schedules:
            if schedule.stream is not None:
                _check_stream(plan, phase, schedule.stream, where)
    for buffer in plan.buffers.values():
        _check_parts(plan, buffer, where)


def _check_stream(plan: Plan, phase: Phase, stream: Stream, where: str) -> None:
    kernel = plan.kernels.get(stream.record.kernel)
    known = all(a.buffer in plan.buffers for a in stream.record.arguments if isinstance(a, View))
    if not known or kernel is None or len(kernel.parameters) != len(stream.record.arguments):
        raise ArtifactError(
            f"the streamed step {stream.record.kernel} and its arguments are not what the plan defines",
            where=where,
            fix=_REBUILD,
        )
    if not 0 <= stream.last < len(phase.launches) or stream.workspace_bytes < 4 * (FAULT_WORD + 2):
        raise ArtifactError(
            f"the streamed step {stream.record.kernel} stands for launches that are not there",
            where=where,
            fix=_REBUILD,
        )


def _check_parts(plan: Plan, buffer: Buffer, where: str) -> None:
    """Parts lie one behind the other and fill the buffer.

    The tag of an order holds a digest of it, so that one that this mmcompile makes otherwise is refused.
    """
    end = 0
    for part in buffer.parts:
        weight, arrangement = plan.buffers.get(part.weight), parse_tag(part.layout)
        what = f"{buffer.name} holds {part.weight}"
        if weight is None or (weight.role, weight.dtype, weight.layout) != ("weight", "bfloat16", LINEAR):
            raise ArtifactError(f"{what}, which is no plain bfloat16 weight of the plan", where=where, fix=_REBUILD)
        if arrangement is None and part.layout != LINEAR:
            raise ArtifactError(f"{what} in the unknown layout {part.layout!r}", where=where, fix=_REBUILD)
        if part.offset != end:
            raise ArtifactError(f"{what} at byte {part.offset}, not {end}", where=where, fix=_REBUILD)
        end += arrangement.nbytes if arrangement else count_bytes(weight, {})
    if buffer.parts and end != count_bytes(buffer, {}):
        raise ArtifactError(
            f"{buffer.name} has {count_bytes(buffer, {})} bytes, its parts {end}", where=where, fix=_REBUILD
        )


def find_parts(plan: Plan) -> dict[str, list[tuple[str, Part]]]:
    """By weight, (derived buffer, part) of all that it is a part of."""
    found: dict[str, list[tuple[str, Part]]] = {}
    for buffer in plan.buffers.values():
        for part in buffer.parts:
            found.setdefault(part.weight, []).append((buffer.name, part))
    return found


def place_weight(buffer: Buffer, tensor: Tensor) -> Tensor:
    """A weight as the files hold it (row-major) in the layout of its buffer."""
    return tensor if buffer.layout == "linear" else nvfp4_fragments.arrange_as(tensor, buffer.layout)
