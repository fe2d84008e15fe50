"""The decode phase of a deep model with the layers left out that only repeat others: enough to prove its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmcompile.core.plan import Choice, KernelLaunch, Launch, Phase, Plan, Schedule, View
from mmcompile.core.schedule import MERGED_PHASE as PHASE
from mmcompile.core.stream import drop_streams
from mmcompile.driver.summary import assign_layers

LAYERS_KEPT = 2
"""Of every kind, so that each border between layers is there and each kernel is run twice."""


@dataclass(frozen=True)
class Shortened:
    """``plan`` with the phases "load" and "decode" only. ``coverage``: "" if decode is whole, else what it holds."""

    plan: Plan
    coverage: str


def shorten_decode(plan: Plan) -> Shortened:
    """Keep the first two layers of each kind, and what is around the layers.

    Layers are of one kind if their launches are the same operations by the same kernels. What reads the results of a
    layer that is left out reads those of the layer before it. Nothing is left out if results do not correspond. A
    streamed step, whose kernel counts its layers, is dropped.
    """
    plan = drop_streams(plan)
    phase = plan.phases[PHASE]
    layers = assign_layers(plan, phase)
    members = {layer: [i for i, at in enumerate(layers) if at == layer] for layer in layers if layer is not None}
    kept = _choose_layers(phase, members)
    renames = _connect(plan, phase, members, kept) if len(kept) < len(members) else {}
    if renames is None or len(kept) == len(members):
        return Shortened(keep_decode(plan, phase), "")
    indices = [i for i, layer in enumerate(layers) if layer is None or layer in kept]
    shorter = _select(phase, indices, renames)
    if not _is_complete(plan, shorter):
        return Shortened(keep_decode(plan, phase), "")
    names = f"{', '.join(map(str, kept[:-1]))} and {kept[-1]}" if len(kept) > 1 else str(kept[0])
    return Shortened(keep_decode(plan, shorter), f"layers {names} of {len(members)}, and what is around them")


def _choose_layers(phase: Phase, members: Mapping[int, list[int]]) -> list[int]:
    counts: dict[object, int] = {}
    kept = []
    for layer, indices in members.items():
        launches = [phase.launches[i] for i in indices]
        stages = [s.record.kernel for schedule in phase.schedules for s in schedule.stages if s.launch in indices]
        kind = (tuple((la.op, tuple(k.kernel for c in la.choices for k in c.kernels)) for la in launches), *stages)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= LAYERS_KEPT:
            kept.append(layer)
    return kept


def _connect(plan: Plan, phase: Phase, members: Mapping[int, list[int]], kept: Sequence[int]) -> dict[str, str] | None:
    """For each result that leaves a dropped layer that of the layer before; None if they do not correspond."""
    renames: dict[str, str] = {}
    before: list[str] = []
    for layer, indices in members.items():
        inside = set(indices)
        readers = [la for i, la in enumerate(phase.launches) if i not in inside]
        read = {view.buffer for la in readers for view in la.inputs.values() if view is not None}
        results = [view.buffer for i in indices for view in phase.launches[i].outputs if view.buffer in read]
        if layer in kept:
            before = results
            continue
        shapes = [[(plan.buffers[name].shape, plan.buffers[name].dtype) for name in side] for side in (results, before)]
        if shapes[0] != shapes[1]:
            return None
        renames.update(zip(results, before, strict=True))
    return renames


def _select(phase: Phase, indices: Sequence[int], renames: Mapping[str, str]) -> Phase:
    """The launches ``indices`` of a phase and of its schedules, with buffers renamed."""
    place = {index: number for number, index in enumerate(indices)}

    def rename(view: View | None) -> View | None:
        return view and view.model_copy(update={"buffer": renames.get(view.buffer, view.buffer)})

    def rename_kernel(kernel: KernelLaunch) -> KernelLaunch:
        arguments = tuple(rename(a) if isinstance(a, View) else a for a in kernel.arguments)
        return kernel.model_copy(update={"arguments": arguments})

    launches = tuple(_rewrite(phase.launches[i], rename, rename_kernel) for i in indices)
    schedules = []
    for schedule in phase.schedules:
        stages = tuple(
            s.model_copy(update={"launch": place[s.launch], "record": rename_kernel(s.record), "waits": ()})
            for s in schedule.stages if s.launch in place
        )  # fmt: skip
        schedules.append(schedule.model_copy(update={"stages": stages, "layers": ()}))
    after = tuple(() for _ in launches)
    return phase.model_copy(update={"launches": launches, "after": after, "schedules": tuple(schedules)})


def _rewrite(
    launch: Launch, rename: Callable[[View | None], View | None], rename_kernel: Callable[[KernelLaunch], KernelLaunch]
) -> Launch:
    choices = tuple(
        Choice(**(dict(c) | {"kernels": tuple(rename_kernel(k) for k in c.kernels)})) for c in launch.choices
    )
    inputs = {name: rename(view) for name, view in launch.inputs.items()}
    return launch.model_copy(update={"choices": choices, "inputs": inputs})


def _is_complete(plan: Plan, phase: Phase) -> bool:
    """True if every temporary is written before it is read."""
    written: set[str] = set()
    for launch in phase.launches:
        views = [view for view in launch.inputs.values() if view is not None]
        if any(plan.buffers[v.buffer].offset is not None and v.buffer not in written for v in views):
            return False
        written.update(view.buffer for view in launch.outputs)
    return True


def keep_decode(plan: Plan, decode: Phase) -> Plan:
    """The plan with what its phases "load" and ``decode`` use."""
    phases = {name: phase for name, phase in plan.phases.items() if name == "load"} | {PHASE: decode}
    views: list[View] = []
    kernels: set[str] = set()
    for phase in phases.values():
        records = [k for launch in phase.launches for choice in launch.choices for k in choice.kernels]
        kernels |= {record.kernel for record in records} | {s.kernel for s in phase.schedules}
        records += [stage.record for schedule in phase.schedules for stage in schedule.stages]
        streams = [schedule.stream.record for schedule in phase.schedules if schedule.stream is not None]
        records, kernels = records + streams, kernels | {record.kernel for record in streams}
        views += [a for record in records for a in record.arguments if isinstance(a, View)]
        views += [v for la in phase.launches for v in (*la.inputs.values(), *la.outputs) if v is not None]
    used = {view.buffer for view in views} | {n for phase in phases.values() for n in (*phase.inputs, *phase.outputs)}
    return plan.model_copy(
        update={
            "phases": phases,
            "buffers": {name: buffer for name, buffer in plan.buffers.items() if name in used},
            "kernels": {name: kernel for name, kernel in plan.kernels.items() if name in kernels},
        }
    )


def with_schedule(plan: Plan, schedule: Schedule) -> Plan:
    """The plan with this one as decode's only schedule."""
    phase = plan.phases[PHASE].model_copy(update={"schedules": (schedule,)})
    return plan.model_copy(update={"phases": plan.phases | {PHASE: phase}})
