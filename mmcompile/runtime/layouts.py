"""Refuse a plan whose operations read a cache in another layout than the one that its buffer has."""

from __future__ import annotations

from mmcompile.core.errors import ArtifactError
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
