"""Layouts of caches and weights: refuse a plan that reads a buffer otherwise than it lies, and arrange weights."""

from __future__ import annotations

from torch import Tensor

from mmcompile.core.errors import ArtifactError
from mmcompile.core.formats import nvfp4_fragments
from mmcompile.core.formats.cache_pages import PLAIN, list_layouts
from mmcompile.core.formats.nvfp4_cache import QUANTIZER, check_layout
from mmcompile.core.plan import Buffer, CacheSpec, Launch, Plan

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


def place_weight(buffer: Buffer, tensor: Tensor) -> Tensor:
    """A weight as the files hold it (row-major) in the layout of its buffer."""
    return tensor if buffer.layout == "linear" else nvfp4_fragments.arrange_as(tensor, buffer.layout)
