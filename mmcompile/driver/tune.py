"""Measure on the GPU that is here which mode of mono-decode is fastest, and write that into the artifact."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import mmcompile
from mmcompile.core.errors import UsageError
from mmcompile.core.plan import MODES, Manifest, Mode, Plan, Record, Schedule, seal
from mmcompile.core.schedule import MERGED_PHASE as PHASE
from mmcompile.core.stream import count_copied
from mmcompile.driver.pack import hash_files, write_record
from mmcompile.driver.progress import Progress, silent
from mmcompile.runtime.artifact import Artifact, open_artifact
from mmcompile.runtime.batch import build_inputs
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.sequence import GREEDY, Sequence

_REPLAYS, _RUNS = 20, 5


@dataclass(frozen=True)
class Tuned:
    """Seconds of a decode step of ``tokens`` sequences of ``context`` tokens by mode; the fastest is ``mode``."""

    tokens: int
    context: int
    seconds: Mapping[str, float]
    mode: str
    basis: str


def tune_artifact(
    path: str | Path, *, context: int = 1024, random_weights: int | None = None, progress: Progress = silent
) -> list[Tuned]:
    """Time the decode graph of every schedule in every mode, for its largest token count, and record the fastest.

    The plan of the target that fits this GPU and the manifest are replaced. context: tokens of every sequence, the new
    one included. Raises UsageError if the artifact has no merged launches, ToolchainError without a GPU.
    """
    engine = mmcompile.load(path, device="cuda", random_weights=random_weights, mono="stream")
    try:
        if not isinstance(engine, Engine):
            raise UsageError("only decoders have merged launches", where=str(path))
        plan = _gpu(engine).plan
        schedules = plan.phases[PHASE].schedules
        if not schedules:
            raise UsageError("the artifact has no merged launches", where=str(path), fix="build it with --mono step")
        length = min(context, engine.limits.max_context)
        basis = f"{engine.executor.describe()['device']}, context {length}"
        chosen, tuned = [], []
        for number, schedule in enumerate(schedules, 1):
            modes = list_modes(schedule)
            seconds = {mode: time_mode(engine, mode, schedule.high, length) for mode in modes}
            mode = min(modes, key=seconds.__getitem__)
            chosen.append(schedule.model_copy(update={"seconds": seconds, "mode": mode, "basis": basis}))
            tuned.append(Tuned(schedule.high, length, seconds, mode, basis))
            progress("tune", f"{schedule.high} tokens: {mode}", number, len(schedules))
    finally:
        engine.close()
    _record(open_artifact(path), plan, chosen)
    return tuned


def _gpu(engine: Engine) -> GpuExecutor:
    executor = engine.executor
    assert isinstance(executor, GpuExecutor)
    return executor


def make_step(engine: Engine, batch: int, context: int, token: int = 5) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Inputs of one decode step of ``batch`` sequences of ``context`` tokens, the new one included."""
    page_size = engine.limits.page_size
    pages = -(-context // page_size)
    items = []
    for row in range(batch):
        own = [(row * pages + i) % engine.limits.pages for i in range(pages)]
        items.append((Sequence(row, [token + row] * context, context, GREEDY, 0, own, context - 1), 1))
    blocks = -(-engine.limits.max_context // page_size)
    inputs, symbols = build_inputs(items, page_size=page_size, max_blocks=blocks, rows=batch)
    return {name: inputs[name] for name in _gpu(engine).plan.phases[PHASE].inputs}, symbols


def time_mode(engine: Engine, mode: str, batch: int, context: int) -> float:
    """Seconds per replayed decode graph in a mode, the median of some runs."""
    executor = _gpu(engine)
    executor.mono = mode
    inputs, symbols = make_step(engine, batch, context)
    for _ in range(2):
        executor.run(PHASE, inputs, symbols, ())
    return statistics.median(executor.time_graph(_REPLAYS) for _ in range(_RUNS))


def list_modes(schedule: Schedule) -> list[Mode]:
    """The modes that a schedule can run in."""
    return [mode for mode in MODES if mode != "stream" or schedule.stream is not None]


def _record(artifact: Artifact, plan: Plan, schedules: list[Schedule]) -> None:
    """Replace the plan's file, then the manifest that holds its hash."""
    phase = plan.phases[PHASE].model_copy(update={"schedules": tuple(schedules)})
    entry = artifact.manifest.targets[plan.target]
    tuned = plan.model_copy(update={"phases": plan.phases | {PHASE: phase}})
    _replace(artifact.root / entry.plan, tuned)
    entries = artifact.manifest.targets | {plan.target: entry.model_copy(update={"copied_bytes": count_copied(tuned)})}
    manifest = artifact.manifest.model_copy(update={"targets": entries})
    record = seal(manifest.model_dump(mode="json") | {"files": hash_files(artifact.root)})
    _replace(artifact.root / "manifest.json", Manifest.model_validate(record))


def _replace(path: Path, record: Record) -> None:
    new = path.with_suffix(".new")
    write_record(new, record)
    os.replace(new, path)
