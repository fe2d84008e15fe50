"""Mono-decode: which kernels of a phase become one persistent launch, and its proven schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from mmcompile.core.errors import LoweringError
from mmcompile.core.ops.define import get_op
from mmcompile.core.plan import Buffer, Choice, KernelLaunch, Launch, Mode, Phase, Plan, Schedule, Stage, Stream, View
from mmcompile.core.schedule import (
    MOST_ARGUMENTS,
    Access,
    Placed,
    choose_waits,
    find_conflicts,
    list_targets,
    place_stages,
    prove_schedule,
    refuse_clobbered,
)
from mmcompile.core.spec import TargetSpec
from mmcompile.lower.memory import Lifetime, plan_memory, size_of
from mmcompile.lower.phase import Stages

REPLICATED_TOKENS = 2
"""Up to so many tokens a row operation costs less on every program than waiting for the one that did it."""
LAUNCH_SECONDS, WAIT_SECONDS, BANDWIDTH_SHARE = 2.7e-6, 0.75e-6, 0.9
TILE_SECONDS, GATED_TILE_SECONDS, REPLICATED_TILE_SECONDS = 2.2e-6, 1.15e-6, 0.6e-6
"""Cost model: a launch in a graph, a wait between stages, the share of the bandwidth that is reached; beside its bytes
a stage, one whose weights are on their way before its wait, one that every program runs for itself. Measured on an H200
with SmolLM2-135M at batch 1 (docs/mono_decode.md)."""
STREAM_UNITS = 0.96
"""Share of the units that a streamed step needs for its share of the bandwidth (128 of 132 are known to do); with fewer
it is taken to be in proportion."""


@dataclass(frozen=True)
class Merge:
    """Kernels of a phase that make one launch for token counts from ``low`` to ``high``.

    ``places``: (launch, kernel) of every stage.
    """

    low: int
    high: int
    places: tuple[tuple[int, KernelLaunch], ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The different kernels, in order of appearance."""
        return tuple(dict.fromkeys(record.kernel for _, record in self.places))

    @property
    def name(self) -> str:
        """Of the merged kernel: the same for the same kernels."""
        return f"mono_decode_{hashlib.sha256(repr(self.kernels).encode()).hexdigest()[:8]}"


def estimate_latency(stage: Stage) -> float:
    """Seconds of a stage beside its wait and its bytes."""
    if stage.gated:
        return GATED_TILE_SECONDS
    return REPLICATED_TILE_SECONDS if stage.replicated else TILE_SECONDS


def find_merge(schedule: Schedule) -> Merge:
    """What a schedule was made of."""
    return Merge(schedule.low, schedule.high, tuple((stage.launch, stage.record) for stage in schedule.stages))


def propose_merges(phase: Phase, stages: Stages, streamed: Iterable[int] = ()) -> tuple[list[Merge], str]:
    """For every range of token counts up to 16 the longest run of launches to merge, and why others cannot be.

    streamed: token counts at which a range shall end, as a streamed step does.
    """
    limits = {c.max_tokens for choices in stages.choices for c in choices if c.max_tokens}
    inner = {limit for limit in (REPLICATED_TOKENS, *limits, *streamed) if limit < stages.most}
    merges, reasons, low = [], {}, 1
    for high in sorted(inner | {stages.most}):
        run: list[tuple[int, KernelLaunch]] = []
        best: list[tuple[int, KernelLaunch]] = []
        for index, (launch, choices) in enumerate(zip(phase.launches, stages.choices, strict=True)):
            choice = next((c for c in choices if c.max_tokens is None or c.max_tokens >= high), None)
            reason = _refuse_choice(choice) or ("" if choice else stages.reasons[index] or "it has no kernel")
            if reason:
                reasons[f"{launch.op}: {reason}"] = None
            run = [*run, *((index, kernel) for kernel in choice.kernels)] if choice and not reason else []
            best = run if len(run) > len(best) else best
        if len(best) > 1:
            merges.append(Merge(low, high, tuple(best)))
        low = high + 1
    return merges, "; ".join(sorted(reasons))


def _refuse_choice(choice: Choice | None) -> str:
    counts = [sum(isinstance(a, View) for a in k.arguments) for k in choice.kernels] if choice else []
    return f"its kernel takes more than {MOST_ARGUMENTS} pointers" if max(counts, default=0) > MOST_ARGUMENTS else ""


@dataclass
class Scheduler:
    """Makes the schedules of one plan's phase.

    replicable: kernels of which every program may run all tiles. gated: those that ask for weights before they wait.
    layers: of every launch, None outside the layers.
    """

    plan: Plan
    phase: Phase
    replicable: Set[str]
    spec: TargetSpec
    layers: Sequence[int | None]
    gated: Set[str] = frozenset()
    _written: dict[int, frozenset[str]] = field(default_factory=dict)

    def make(
        self, merge: Merge, kernel: str, programs: int, resident: int, wanted: Mode, stream: Stream | str = ""
    ) -> Schedule:
        """Place, choose waits for all token counts of the range, and prove the result for each of them.

        wanted: "layer" or "step". stream: the same step by a tuned kernel, or why there is none. The fastest of these
        and "standalone" becomes the mode. Raises LoweringError where the proof fails.
        """
        private = self._find_private(merge)
        stages = [
            Stage(launch=launch, record=record, body=merge.kernels.index(record.kernel),
                  replicated=self._is_replicated(merge, i, private), gated=record.kernel in self.gated)
            for i, (launch, record) in enumerate(merge.places)
        ]  # fmt: skip
        symbols = self._largest_symbols(merge)
        offsets, private_bytes = self._place_private(merge, private, symbols)
        conflicts = find_conflicts(self._list_accesses(merge, private, symbols))
        placements = [self._place(merge, stages, tokens, programs) for tokens in range(merge.low, merge.high + 1)]
        waits: list[set[int]] = [set() for _ in stages]
        for placed in placements:
            for index, chosen in enumerate(choose_waits(placed, conflicts)):
                waits[index].update(chosen)
        ordered = [tuple(sorted(w, reverse=True)) for w in waits]
        stages = [s.model_copy(update={"waits": w}) for s, w in zip(stages, ordered, strict=True)]
        seconds = self._estimate(merge, stages)
        modes: tuple[Mode, ...] = ("standalone", wanted)
        streamed = stream if isinstance(stream, Stream) else None
        if streamed is not None:
            seconds["stream"] = self._estimate_stream(streamed)
            modes += ("stream",)
        mode = min(modes, key=seconds.__getitem__)
        schedule = Schedule(
            low=merge.low, high=merge.high, kernel=kernel, programs=programs, stages=tuple(stages),
            layers=self._split_layers(merge), private=offsets, private_bytes=private_bytes, mode=mode,
            seconds=seconds, basis="cost model", stream=streamed, unstreamed="" if streamed else str(stream),
        )  # fmt: skip
        self.prove(schedule, resident)
        return schedule

    def prove(self, schedule: Schedule, resident: int) -> None:
        """Prove a schedule as it is, for every token count of its range. Raises LoweringError where that fails."""
        merge, private = find_merge(schedule), set(schedule.private)
        symbols, names = self._largest_symbols(merge), [self.phase.launches[s.launch].name for s in schedule.stages]
        accesses = self._list_accesses(merge, private, symbols)
        refuse_clobbered(accesses, names)
        refuse_clobbered(self._list_private_accesses(schedule, symbols), names)
        conflicts, waits = find_conflicts(accesses), [stage.waits for stage in schedule.stages]
        for tokens in range(merge.low, merge.high + 1):
            placed = self._place(merge, schedule.stages, tokens, schedule.programs)
            prove_schedule(placed, waits, list_targets(placed, schedule.stages), conflicts, resident)

    def _largest_symbols(self, merge: Merge) -> dict[str, int]:
        return self.plan.symbols | {"tokens": merge.high, "batch": merge.high}

    def _place(self, merge: Merge, stages: Sequence[Stage], tokens: int, programs: int) -> list[Placed]:
        names = [self.phase.launches[s.launch].name for s in stages]
        symbols = self.plan.symbols | {"tokens": tokens, "batch": tokens}
        return place_stages(stages, names, [s.record.grid for s in stages], symbols, programs)

    def _is_replicated(self, merge: Merge, index: int, private: set[str]) -> bool:
        launch = self.phase.launches[merge.places[index][0]]
        return bool(launch.outputs) and all(view.buffer in private for view in launch.outputs)

    def _find_private(self, merge: Merge) -> set[str]:
        """Results of cheap row operations that only the run reads: every program may have its own."""
        if merge.high > REPLICATED_TOKENS:
            return set()
        run = {launch for launch, _ in merge.places}
        outside = {
            view.buffer
            for i, launch in enumerate(self.phase.launches) if i not in run
            for view in (*launch.inputs.values(), *launch.outputs) if view is not None
        }  # fmt: skip
        found: set[str] = set()
        for index in range(len(merge.places)):
            launch = self.phase.launches[merge.places[index][0]]
            names = {view.buffer for view in launch.outputs}
            temporary = all(self.plan.buffers[name].role == "temporary" for name in names)
            if merge.places[index][1].kernel in self.replicable and temporary and not names & outside:
                found |= names
        return found

    def _place_private(self, merge: Merge, private: set[str], symbols: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Offsets of the private buffers in a program's part; those never alive together share memory."""
        lifetimes: dict[str, Lifetime] = {}
        for index in range(len(merge.places)):
            for view in merge.places[index][1].arguments:
                if isinstance(view, View) and view.buffer in private:
                    first = lifetimes[view.buffer].first if view.buffer in lifetimes else index
                    lifetimes[view.buffer] = Lifetime(first, index)
        return plan_memory([self.plan.buffers[name] for name in sorted(lifetimes)], lifetimes, symbols)

    def _list_accesses(self, merge: Merge, private: set[str], symbols: Mapping[str, int]) -> list[list[Access]]:
        """Memory that each stage shares with others; weights and private copies are nobody else's concern."""
        found = []
        for launch, record in merge.places:
            names = dict.fromkeys(a.buffer for a in record.arguments if isinstance(a, View))
            buffers = [self.plan.buffers[name] for name in names]
            shared = [b for b in buffers if b.name not in private and b.role not in ("weight", "derived", "input")]
            found.append([_locate(b, symbols, self._writes(launch, b.name)) for b in shared])
        return found

    def _list_private_accesses(self, schedule: Schedule, symbols: Mapping[str, int]) -> list[list[Access]]:
        """What each stage touches of its program's own copies. LoweringError if they are not everybody's."""
        found = []
        for index, stage in enumerate(schedule.stages):
            touched = dict.fromkeys(a.buffer for a in stage.record.arguments if isinstance(a, View))
            names = [name for name in touched if name in schedule.private]
            own = [self._locate_private(schedule, name, self._writes(stage.launch, name), symbols) for name in names]
            if any(access.writes for access in own) and not stage.replicated:
                raise LoweringError(
                    f"stage {index} ({self.phase.launches[stage.launch].name}) is not run by every program, "
                    "but writes a buffer of which each has a copy",
                    fix="make the stage replicated or its result shared",
                )
            if max((access.end for access in own), default=0) > schedule.private_bytes:
                raise LoweringError(f"the programs' copies take more than {schedule.private_bytes} bytes")
            found.append(own)
        return found

    def _locate_private(self, schedule: Schedule, name: str, writes: bool, symbols: Mapping[str, int]) -> Access:
        start = schedule.private[name]
        return Access("private", start, start + size_of(self.plan.buffers[name], symbols), writes, name)

    def _writes(self, index: int, buffer: str) -> bool:
        """Whether a launch may write a buffer: a result, a mutated input, or a work space of its kernels."""
        inputs = {view.buffer for view in self.phase.launches[index].inputs.values() if view is not None}
        return buffer in self._list_written(index) or buffer not in inputs

    def _list_written(self, index: int) -> frozenset[str]:
        """Buffers that a launch writes: its results and the inputs that its operation mutates."""
        if index not in self._written:
            launch = self.phase.launches[index]
            names = {view.buffer for view in launch.outputs}
            if launch.op.startswith("mm."):
                mutated = get_op(launch.op.removeprefix("mm.")).mutates
                names |= {view.buffer for name in mutated if (view := launch.inputs.get(name)) is not None}
            self._written[index] = frozenset(names)
        return self._written[index]

    def _split_layers(self, merge: Merge) -> tuple[tuple[int, int], ...]:
        """Ranges of stages that make a launch each: a layer with what comes before it, and the rest."""
        starts, current = [0], self.layers[merge.places[0][0]]
        for index, (launch, _) in enumerate(merge.places):
            layer = self.layers[launch]
            if layer != current and current is not None:
                starts.append(index)
            current = layer
        return tuple(zip(starts, [*starts[1:], len(merge.places)], strict=True))

    def _estimate(self, merge: Merge, stages: Sequence[Stage]) -> dict[str, float]:
        """Seconds of the run by each mode for the fewest tokens of the range, weights read once."""
        weights = {
            view.buffer: count_read(self.phase.launches[launch], self.plan.buffers[view.buffer], merge.low)
            for launch, record in merge.places
            for view in record.arguments
            if isinstance(view, View) and self.plan.buffers[view.buffer].role == "weight"
        }
        read = sum(weights.values()) / (BANDWIDTH_SHARE * self.spec.memory_bandwidth)
        work = sum(estimate_latency(stage) + (WAIT_SECONDS if stage.waits else 0.0) for stage in stages)
        return {
            "standalone": read + LAUNCH_SECONDS * len(stages),
            "layer": read + work + LAUNCH_SECONDS * len(self._split_layers(merge)),
            "step": read + work + LAUNCH_SECONDS,
        }

    def _estimate_stream(self, stream: Stream) -> float:
        """Seconds of the step by the tuned kernel, caches left out as in the others."""
        share = min(1.0, stream.programs / (STREAM_UNITS * self.spec.units))
        return stream.bytes / (share * BANDWIDTH_SHARE * self.spec.memory_bandwidth) + stream.latency + LAUNCH_SECONDS


def count_read(launch: Launch, buffer: Buffer, tokens: int) -> float:
    """Bytes of a weight that a launch reads: of a table one row for each token, of experts those that tokens choose."""
    size = float(size_of(buffer, {}))
    tables = [v.buffer for n, v in launch.inputs.items() if v and (n == "cos_sin" or launch.op == "mm.embedding")]
    chosen = launch.inputs.get("experts")
    rows = tokens if buffer.name in tables else tokens * int(chosen.shape[1]) if chosen else int(buffer.shape[0])
    return size * min(rows / int(buffer.shape[0]), 1.0)


def _locate(buffer: Buffer, symbols: Mapping[str, int], writes: bool) -> Access:
    if buffer.offset is None:
        return Access(buffer.name, 0, 1, writes, buffer.name)
    return Access("arena", buffer.offset, buffer.offset + size_of(buffer, symbols), writes, buffer.name)
