"""What merging does to decode, by the schedules and the cost model: launches, waits, bytes, a timeline of programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.core.plan import Phase, Plan, Schedule, Stream, View
from mmcompile.core.schedule import MERGED_PHASE as PHASE
from mmcompile.core.schedule import Placed, place_stages
from mmcompile.core.spec import TargetSpec
from mmcompile.driver.summary import assign_layers
from mmcompile.lower.memory import size_of
from mmcompile.lower.merge import BANDWIDTH_SHARE, LAUNCH_SECONDS, WAIT_SECONDS, count_read, estimate_latency

_ROWS, _ROW_HEIGHT, _WIDTH, _LEFT = 16, 16, 800, 90
_KINDS = ("weights", "other", "compute", "wait")


@dataclass(frozen=True)
class Timeline:
    """Seconds by the cost model, from the start of the launch: float64 [stages, programs].

    A program that has tiles of a stage waits from ``arrived`` to ``started`` and works to ``ended``; all are NaN where
    it has none. Of its work it reads ``weights``, reads and writes ``other`` tensors, and needs ``compute`` beside its
    bytes: arithmetic, reductions and the latency of loads that need one another, as they were measured on an H200 for
    each kind of stage (see lower/merge.py). Reads of the caches, which grow with the context, are left out.
    """

    placed: tuple[Placed, ...]
    arrived: npt.NDArray[np.float64]
    started: npt.NDArray[np.float64]
    ended: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    other: npt.NDArray[np.float64]
    compute: npt.NDArray[np.float64]

    def split(self) -> dict[str, float]:
        """Seconds of an average program: weights, other tensors, compute, waiting, and idle."""
        programs, total = self.ended.shape[1], float(np.nanmax(self.ended))
        sides = {"weights": self.weights, "other": self.other, "compute": self.compute}
        parts = {name: float(side.sum()) / programs for name, side in sides.items()}
        parts["waits"] = float(np.nansum(self.started - self.arrived)) / programs
        return parts | {"idle": total - sum(parts.values())}


def list_schedules(plan: Plan, spec: TargetSpec) -> list[dict[str, Any]]:
    """One record for every schedule of a plan's decode phase."""
    phase = plan.phases.get(PHASE)
    return [_describe(plan, phase, spec, schedule) for schedule in phase.schedules] if phase else []


def list_unstreamed(plans: Mapping[str, Plan]) -> list[str]:
    """Sentences on why a target's decode steps are not streamed, with the ranges of token counts."""
    found: dict[tuple[str, str], list[str]] = {}
    for target, plan in sorted(plans.items()):
        for schedule in plan.phases[PHASE].schedules if PHASE in plan.phases else ():
            if schedule.unstreamed:
                found.setdefault((target, schedule.unstreamed), []).append(f"{schedule.low} to {schedule.high}")
    return [f"{t}: not streamed ({', '.join(ranges)} tokens): {reason}" for (t, reason), ranges in found.items()]


def _describe(plan: Plan, phase: Phase, spec: TargetSpec, schedule: Schedule) -> dict[str, Any]:
    timeline = estimate_timeline(plan, spec, schedule, schedule.low)
    stages, sizes = schedule.stages, _count_tile_bytes(plan, schedule, timeline.placed)
    read = sum(np.where(p.programs, _share_tiles(p) * w, 0.0) for p, (w, _) in zip(timeline.placed, sizes, strict=True))
    return {
        "low": schedule.low,
        "high": schedule.high,
        "kernel": schedule.kernel,
        "mode": schedule.mode,
        "basis": schedule.basis,
        "seconds": schedule.seconds,
        "stream": _describe_stream(schedule.stream) if schedule.stream else None,
        "unstreamed": schedule.unstreamed,
        "programs": schedule.programs,
        "launches": _count_launches(plan, phase, schedule),
        "stages": len(stages),
        "waits": {"none": sum(not s.waits for s in stages), "counter": sum(len(s.waits) for s in stages)},
        "replicated": sum(s.replicated for s in stages),
        "private_bytes": schedule.private_bytes,
        "weight_bytes": {"least": int(np.min(read)), "most": int(np.max(read))},
        "time": timeline.split(),
    }


def _describe_stream(stream: Stream) -> dict[str, Any]:
    kept = stream.model_dump(include={"programs", "tokens", "bytes", "workspace_bytes", "shape"})
    return kept | {"kernel": stream.record.kernel}


def _count_launches(plan: Plan, phase: Phase, schedule: Schedule) -> dict[str, dict[str, int]]:
    """Launches of a step, and of a usual layer, by mode; 0 where a layer has no launch of its own."""
    layers = assign_layers(plan, phase)
    merged = {stage.launch for stage in schedule.stages}
    alone, outside, rest = [], 0, 0
    for index, launch in enumerate(phase.launches):
        choice = launch.choose(schedule.high)
        count = len(choice.kernels) if choice else 1
        alone += [layers[index]] * count
        outside += 0 if index in merged else count
        rest += count if schedule.stream and index > schedule.stream.last else 0
    usual = Counter(Counter(layer for layer in alone if layer is not None).values()).most_common(1)
    launches = {
        "standalone": {"step": len(alone), "layer": usual[0][0] if usual else 0},
        "layer": {"step": outside + len(schedule.layers), "layer": 1},
        "step": {"step": outside + 1, "layer": 0},
    }
    return launches | ({"stream": {"step": rest + 1, "layer": 0}} if schedule.stream else {})


def _count_tile_bytes(plan: Plan, schedule: Schedule, placed: tuple[Placed, ...]) -> list[tuple[float, float]]:
    """Bytes of weights, and of other tensors, that a tile of each stage moves."""
    tokens = schedule.low
    symbols = plan.symbols | {"tokens": tokens, "batch": tokens}
    found = []
    for stage, place in zip(schedule.stages, placed, strict=True):
        names = {a.buffer for a in stage.record.arguments if isinstance(a, View)}
        buffers = [plan.buffers[name] for name in sorted(names)]
        launch = plan.phases[PHASE].launches[stage.launch]
        weights = sum(count_read(launch, b, tokens) for b in buffers if b.role in ("weight", "derived"))
        other = sum(size_of(b, symbols) for b in buffers if b.role in ("temporary", "output"))
        tiles = max(place.tiles, 1)
        found.append((weights / tiles, other / tiles))
    return found


def _share_tiles(place: Placed) -> npt.NDArray[np.float64]:
    """Tiles of a stage on each program."""
    programs = len(place.programs)
    if place.replicated:
        return np.full(programs, float(place.tiles))
    first = (np.arange(programs) - place.base) % programs
    return np.maximum(0.0, np.ceil((place.tiles - first) / programs))


def estimate_timeline(plan: Plan, spec: TargetSpec, schedule: Schedule, tokens: int) -> Timeline:
    """When each program works on each stage of a whole step, every program having its share of the bandwidth."""
    names = [plan.phases[PHASE].launches[s.launch].name for s in schedule.stages]
    symbols = plan.symbols | {"tokens": tokens, "batch": tokens}
    grids = [s.record.grid for s in schedule.stages]
    placed = tuple(place_stages(schedule.stages, names, grids, symbols, schedule.programs))
    rate = BANDWIDTH_SHARE * spec.memory_bandwidth / schedule.programs
    sizes = _count_tile_bytes(plan, schedule, placed)
    shape = (len(placed), schedule.programs)
    arrived, started, ended = (np.full(shape, np.nan) for _ in range(3))
    weights, other, compute = (np.zeros(shape) for _ in range(3))
    clock = np.full(schedule.programs, LAUNCH_SECONDS)
    for index, (stage, place) in enumerate(zip(schedule.stages, placed, strict=True)):
        done = [np.nanmax(ended[w]) + WAIT_SECONDS for w in stage.waits if placed[w].programs.any()]
        mine = place.programs
        arrived[index, mine] = clock[mine]
        started[index, mine] = np.maximum(clock[mine], max(done, default=0.0))
        weights[index], other[index] = (_share_tiles(place) * size / rate for size in sizes[index])
        compute[index, mine] = estimate_latency(stage)
        work = weights[index] + other[index] + compute[index]
        ended[index, mine] = started[index, mine] + work[mine]
        clock[mine] = ended[index, mine]
    return Timeline(placed, arrived, started, ended, weights, other, compute)


def _list_parts(timeline: Timeline, stage: int, program: int) -> list[tuple[str, float, float]]:
    """(kind, begin, end) of what a program does for a stage; its work is drawn part by part."""
    parts, end = [], float(timeline.started[stage, program])
    for kind, side in zip(_KINDS, (timeline.weights, timeline.other, timeline.compute), strict=False):
        begin, end = end, end + float(side[stage, program])
        parts.append((kind, begin, end))
    return [(_KINDS[-1], float(timeline.arrived[stage, program]), float(timeline.started[stage, program])), *parts]


def draw_timeline(plan: Plan, spec: TargetSpec) -> dict[str, Any] | None:
    """Geometry of the first two layers of the first schedule on some of its programs; None if there is none."""
    phase = plan.phases.get(PHASE)
    if phase is None or not phase.schedules:
        return None
    schedule = phase.schedules[0]
    timeline = estimate_timeline(plan, spec, schedule, schedule.low)
    shown = range(schedule.layers[min(1, len(schedule.layers) - 1)][1])
    rows = np.unique(np.linspace(0, schedule.programs - 1, _ROWS).round().astype(int))
    total = float(np.nanmax(timeline.ended[: len(shown)])) or 1.0
    scale = (_WIDTH - _LEFT) / total
    bars = []
    for line, program in enumerate(rows.tolist()):
        for stage in shown:
            if np.isnan(timeline.ended[stage, program]):
                continue
            for name, begin, end in _list_parts(timeline, stage, program):
                width = round((end - begin) * scale, 1)
                if width > 0:
                    bars.append({"kind": name, "x": round(_LEFT + begin * scale, 1), "y": line * _ROW_HEIGHT + 2,
                                 "width": width, "name": f"{stage}: {timeline.placed[stage].name}"})  # fmt: skip
    labels = [{"y": line * _ROW_HEIGHT + 12, "text": f"program {p}"} for line, p in enumerate(rows.tolist())]
    return {
        "bars": bars, "labels": labels, "width": _WIDTH, "height": len(rows) * _ROW_HEIGHT + 4,
        "row_height": _ROW_HEIGHT - 4, "seconds": total, "stages": len(shown),
        "schedule": _describe(plan, phase, spec, schedule),
    }  # fmt: skip
