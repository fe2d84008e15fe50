"""Mono-decode in a build: merged kernels before compilation, schedules after it."""

from __future__ import annotations

from typing import cast

from mmcompile.core.plan import Mode, Plan, Schedule
from mmcompile.core.schedule import MERGED_PHASE as PHASE
from mmcompile.core.spec import TargetSpec
from mmcompile.driver.compile import Compiled
from mmcompile.driver.summary import assign_layers
from mmcompile.lower.merge import Merge, Scheduler, find_merge, propose_merges
from mmcompile.lower.plan import Lowered
from mmcompile.lower.select import RefuseSource
from mmcompile.targets._target import Target

MOST_PROGRAMS_A_UNIT = 4


def find_stage_rule(target: Target, mono: str) -> RefuseSource | None:
    """What may not become a stage of a merged launch of the target; None if none is wanted."""
    if mono == "off" or not target.spec.backend:
        return None
    from mmcompile.targets._merge import refuse_merge

    return refuse_merge


def propose_decode_merges(lowered: Lowered, target: Target) -> list[Merge]:
    """Add the merged kernels of the decode phase to the sources to compile."""
    if lowered.stages is None:
        return []
    from mmcompile.targets._merge import merge_kernels

    merges, reason = propose_merges(lowered.plan.phases[PHASE], lowered.stages)
    for merge in merges:
        if merge.name not in lowered.sources:
            sources = [lowered.stages.sources[name] for name in merge.kernels]
            lowered.sources[merge.name] = merge_kernels(merge.name, sources, target.spec)
    _update(lowered, unmerged=reason)
    return merges


def schedule_decode(lowered: Lowered, merges: list[Merge], compiled: Compiled, target: Target, mono: str) -> None:
    """Give the decode phase its schedules; what the proof refuses stops the build."""
    if not merges or lowered.stages is None:
        return
    from mmcompile.targets._merge import count_resident

    plan, spec = lowered.plan, target.spec
    phase = plan.phases[PHASE]
    replicable = {name for name, source in lowered.stages.sources.items() if source.replicable}
    gated = {name for name, source in lowered.stages.sources.items() if source.parts and source.parts.gated}
    scheduler = Scheduler(plan, phase, replicable, spec, assign_layers(plan, phase), gated)
    schedules = []
    for merge in merges:
        binaries = compiled.kernels[merge.name].values()
        resident = min(count_resident(binary.metadata, spec) for binary in binaries)
        programs = min(resident, MOST_PROGRAMS_A_UNIT) * spec.units
        schedules.append(scheduler.make(merge, merge.name, programs, resident * spec.units, cast(Mode, mono)))
    _update(lowered, schedules=tuple(schedules))


def reschedule(plan: Plan, spec: TargetSpec, schedule: Schedule, programs: int) -> Schedule:
    """The same stages for another number of programs, placed and proven anew; all of them are taken to be resident."""
    made = _open_scheduler(plan, spec, schedule).make(find_merge(schedule), schedule.kernel, programs, programs, "step")
    return made.model_copy(update={"mode": schedule.mode})


def prove_recorded(plan: Plan, spec: TargetSpec, schedule: Schedule) -> None:
    """Prove a schedule of an artifact as it is recorded. LoweringError names what is wrong."""
    from mmcompile.targets._merge import count_resident

    binaries = plan.kernels[schedule.kernel].binaries.values()
    resident = min(count_resident(binary.model_dump(), spec) for binary in binaries) * spec.units
    _open_scheduler(plan, spec, schedule).prove(schedule, resident)


def _open_scheduler(plan: Plan, spec: TargetSpec, schedule: Schedule) -> Scheduler:
    phase = plan.phases[PHASE]
    replicable = {stage.record.kernel for stage in schedule.stages if stage.replicated}
    gated = {stage.record.kernel for stage in schedule.stages if stage.gated}
    return Scheduler(plan, phase, replicable, spec, assign_layers(plan, phase), gated)


def _update(lowered: Lowered, **changes: object) -> None:
    plan = lowered.plan
    phase = plan.phases[PHASE].model_copy(update=changes)
    lowered.plan = plan.model_copy(update={"phases": plan.phases | {PHASE: phase}})
