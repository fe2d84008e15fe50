"""Mono-decode in a build: merged kernels before compilation, schedules after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mmcompile.core.errors import LoweringError
from mmcompile.core.plan import Mode, Plan, Schedule, Stream
from mmcompile.core.schedule import MERGED_PHASE as PHASE
from mmcompile.core.spec import TargetSpec
from mmcompile.driver.compile import Compiled
from mmcompile.driver.summary import assign_layers
from mmcompile.lower.merge import Merge, Scheduler, find_merge, propose_merges
from mmcompile.lower.plan import Lowered
from mmcompile.lower.select import RefuseSource
from mmcompile.targets._target import Target

if TYPE_CHECKING:
    from mmcompile.targets._tuned.stream_offer import StreamOffer

MOST_PROGRAMS_A_UNIT = 4


def find_stage_rule(target: Target, mono: str) -> RefuseSource | None:
    """What may not become a stage of a merged launch of the target; None if none is wanted."""
    if mono == "off" or not target.spec.backend:
        return None
    from mmcompile.targets._merge import refuse_merge

    return refuse_merge


@dataclass(frozen=True)
class Proposed:
    """What the decode phase of a plan may be merged into: by general tiles, and by a tuned kernel of the target."""

    merges: tuple[Merge, ...]
    offer: StreamOffer


def propose_decode_merges(lowered: Lowered, target: Target, mono: str, portable: bool) -> Proposed | None:
    """Add the merged kernels of the decode phase to the sources to compile; None if none are wanted.

    portable: leave the tuned kernels out.
    """
    if lowered.stages is None:
        return None
    from mmcompile.targets._merge import merge_kernels

    phase, most = lowered.plan.phases[PHASE], lowered.stages.most
    offer = _offer_stream(lowered.plan, target, most, mono, portable)
    merges, reason = propose_merges(phase, lowered.stages, offer.streams)
    for merge in merges:
        if merge.name not in lowered.sources:
            sources = [lowered.stages.sources[name] for name in merge.kernels]
            lowered.sources[merge.name] = merge_kernels(merge.name, sources, target.spec)
    if merges and offer.streams:
        lowered.sources |= {s.record.kernel: offer.sources[tokens] for tokens, s in offer.streams.items()}
        lowered.plan = lowered.plan.model_copy(update={"buffers": lowered.plan.buffers | offer.buffers})
    _update(lowered, unmerged=reason)
    return Proposed(tuple(merges), offer)


def _offer_stream(plan: Plan, target: Target, most: int, mono: str, portable: bool) -> StreamOffer:
    from mmcompile.targets._tuned.stream_offer import StreamOffer, offer_stream

    if portable:
        return StreamOffer("tuned kernels are left out (--portable)")
    if mono != "step":
        return StreamOffer(f"it is a whole step, and --mono {mono} was asked for")
    return offer_stream(plan, plan.phases[PHASE], target.spec, most)


def schedule_decode(lowered: Lowered, proposed: Proposed | None, compiled: Compiled, target: Target, mono: str) -> None:
    """Give the decode phase its schedules; what the proof refuses stops the build."""
    if proposed is None or not proposed.merges or lowered.stages is None:
        return
    plan, spec = lowered.plan, target.spec
    phase = plan.phases[PHASE]
    replicable = {name for name, source in lowered.stages.sources.items() if source.replicable}
    gated = {name for name, source in lowered.stages.sources.items() if source.parts and source.parts.gated}
    scheduler = Scheduler(plan, phase, replicable, spec, assign_layers(plan, phase), gated)
    schedules = []
    for merge in proposed.merges:
        resident = _count_resident(compiled, merge.name, spec)
        programs = min(resident, MOST_PROGRAMS_A_UNIT) * spec.units
        stream = proposed.offer.find(merge.high)
        if isinstance(stream, Stream):
            refuse_resident(stream, _count_resident(compiled, stream.record.kernel, spec) * spec.units)
        schedules.append(scheduler.make(merge, merge.name, programs, resident * spec.units, cast(Mode, mono), stream))
    _update(lowered, schedules=tuple(schedules))


def _count_resident(compiled: Compiled, kernel: str, spec: TargetSpec) -> int:
    """Programs of a kernel that a unit holds at once, on every architecture."""
    from mmcompile.targets._merge import count_resident

    return min(count_resident(binary.metadata, spec) for binary in compiled.kernels[kernel].values())


def refuse_resident(stream: Stream, resident: int) -> None:
    """Raise LoweringError if the programs of a streamed step are not all resident at once."""
    if stream.programs > resident:
        raise LoweringError(
            f"{stream.programs} programs of the streamed step {stream.record.kernel} are not resident at once, "
            f"{resident} are",
            fix="build with --portable, and report the kernel",
        )


def reschedule(plan: Plan, spec: TargetSpec, schedule: Schedule, programs: int) -> Schedule:
    """The same stages for another number of programs, placed and proven anew; all of them are taken to be resident."""
    stream = schedule.stream or schedule.unstreamed
    scheduler = _open_scheduler(plan, spec, schedule)
    made = scheduler.make(find_merge(schedule), schedule.kernel, programs, programs, "step", stream)
    return made.model_copy(update={"mode": schedule.mode})


def prove_recorded(plan: Plan, spec: TargetSpec, schedule: Schedule) -> None:
    """Prove a schedule of an artifact as it is recorded. LoweringError names what is wrong."""
    from mmcompile.targets._merge import count_resident

    binaries = plan.kernels[schedule.kernel].binaries.values()
    resident = min(count_resident(binary.model_dump(), spec) for binary in binaries) * spec.units
    _open_scheduler(plan, spec, schedule).prove(schedule, resident)


def prove_stream(plan: Plan, spec: TargetSpec, stream: Stream) -> None:
    """Prove a recorded streamed step: it is the one that the plan's operations make, and its programs are resident.

    Raises LoweringError otherwise.
    """
    from mmcompile.targets._merge import count_resident
    from mmcompile.targets._tuned.stream_offer import offer_stream

    binaries = plan.kernels[stream.record.kernel].binaries.values()
    refuse_resident(stream, min(count_resident(binary.model_dump(), spec) for binary in binaries) * spec.units)
    offer = offer_stream(plan, plan.phases[PHASE], spec, stream.tokens)
    made = offer.find(stream.tokens)
    what = f"the streamed step {stream.record.kernel}"
    if isinstance(made, str):
        raise LoweringError(f"{what} cannot stand for the plan's operations: {made}")
    kernel = {"kernel": stream.record.kernel}  # its text may be that of another release
    if made.model_copy(update={"record": made.record.model_copy(update=kernel)}) != stream:
        raise LoweringError(f"{what} is not the one that the plan's operations make")
    if any(plan.buffers.get(name) != buffer for name, buffer in offer.buffers.items()):
        raise LoweringError(f"{what} reads weights in another order than it was written for")


def _open_scheduler(plan: Plan, spec: TargetSpec, schedule: Schedule) -> Scheduler:
    phase = plan.phases[PHASE]
    replicable = {stage.record.kernel for stage in schedule.stages if stage.replicated}
    gated = {stage.record.kernel for stage in schedule.stages if stage.gated}
    return Scheduler(plan, phase, replicable, spec, assign_layers(plan, phase), gated)


def _update(lowered: Lowered, **changes: object) -> None:
    plan = lowered.plan
    phase = plan.phases[PHASE].model_copy(update=changes)
    lowered.plan = plan.model_copy(update={"phases": plan.phases | {PHASE: phase}})
