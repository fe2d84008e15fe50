"""Decode steps of artifacts on an NVIDIA GPU: every mode in a CUDA graph, the one that the build chose, torch.compile.

The artifacts are built elsewhere without a GPU (plans_kit.py); weights are random:

    python benchmarks/h200_plans.py ARTIFACT ... --batch 1 4 16 --context 1024 --peers

The limit is the time of the bytes of a step (weights read and cached keys and values) at the copy bandwidth of the run.
Before the timing, logits of three steps are compared between the modes, and each mode with itself for equal bits. Steps
whose cache does not fit are left out. --peers: transformers under torch.compile max-autotune with a static cache, the
step in a CUDA graph, for every batch and context that is asked for by --peer-batch and --peer-context (by default the
first of each), as it compiles for a minute or more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from _common import print_table
from _gpu import measure_copy

import mmcompile
from mmcompile.core.plan import MODES, Plan, Schedule
from mmcompile.driver.mono import reschedule
from mmcompile.driver.targets import load_target
from mmcompile.driver.tune import list_modes, make_step, time_mode
from mmcompile.runtime.artifact import open_artifact
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.memory import bytes_per_page, gpu_budget
from mmcompile.targets._tuned.stream_recognise import DecoderStep, recognise_step


def executor_of(engine: Engine) -> GpuExecutor:
    """The executor, to change its mode and to run a phase on inputs of our own."""
    executor = engine.executor
    assert isinstance(executor, GpuExecutor)
    return executor


def run_steps(engine: Engine, mode: str, batch: int) -> list[torch.Tensor]:
    """Logits of three steps."""
    executor_of(engine).mono = mode
    found = []
    for step in range(3):
        inputs, symbols = make_step(engine, batch, step + 1, 11 * step + 5)
        found.append(executor_of(engine).run("decode", inputs, symbols, ("logits",))["logits"].float().clone())
    return found


def find_schedule(engine: Engine, batch: int) -> Schedule:
    """The schedule of a batch."""
    schedules = executor_of(engine).plan.phases["decode"].schedules
    return next(schedule for schedule in schedules if schedule.low <= batch <= schedule.high)


def check_modes(engine: Engine, batch: int) -> dict[str, str]:
    """Largest difference of each mode's logits from standalone ones over their RMS, and whether it repeats its bits."""
    want = run_steps(engine, "standalone", batch)
    answers = {}
    for mode in list_modes(find_schedule(engine, batch)):
        first, second = run_steps(engine, mode, batch), run_steps(engine, mode, batch)
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        worst = max(float((a - b).abs().max() / b.square().mean().sqrt()) for a, b in zip(first, want, strict=True))
        answers[mode] = f"{worst:.1e}{'' if same else ' NOT REPEATED'}"
    return answers


def choose_pages(plan: Plan, cases: list[tuple[int, int]], page_size: int, free: int) -> int:
    """Pages of the cache: what the largest of the steps that fit ``free`` bytes needs."""
    most = gpu_budget(plan, free) // bytes_per_page(plan)
    needed = [batch * -(-context // page_size) for batch, context in cases]
    return max([n for n in needed if n <= most], default=1)


def time_peer(plan: Plan, batch: int, context: int) -> float | None:
    """Seconds of torch.compile's step of a model of the same dimensions; None if it is no dense decoder."""
    from h200_mono import time_torch

    step = recognise_step(plan, plan.phases["decode"])
    if not isinstance(step, DecoderStep):
        print(f"no peer: {step}", flush=True)
        return None
    seconds = next(iter(time_torch(step.shape, context, batch).values()))
    torch.cuda.empty_cache()
    return seconds


def count_bytes(engine: Engine, batch: int, context: int) -> int:
    """Weights of the decode phase but for the embedding's table, and the cache rows of the batch."""
    plan = executor_of(engine).plan
    phase = plan.phases["decode"]
    read = {v.buffer for la in phase.launches if la.op != "mm.embedding" for v in la.inputs.values() if v is not None}
    sizes = [plan.buffers[n] for n in read if plan.buffers[n].role == "weight"]
    total = 0
    for buffer in sizes:
        count = 1
        for dimension in buffer.shape:
            count *= int(dimension)
        total += count * getattr(torch, buffer.dtype).itemsize
    return total + batch * context * engine.manifest.cache.bytes_per_token


def replace_programs(engine: Engine, programs: int) -> None:
    """Schedules for another number of programs."""
    executor = executor_of(engine)
    plan = executor.plan
    phase = plan.phases["decode"]
    spec = load_target(plan.target).spec
    schedules = tuple(reschedule(plan, spec, schedule, programs) for schedule in phase.schedules)
    phases = plan.phases | {"decode": phase.model_copy(update={"schedules": schedules})}
    executor.plan = executor._merged_memory.plan = plan.model_copy(update={"phases": phases})


def print_stages(engine: Engine, batch: int, context: int) -> None:
    """Mean microseconds of waiting and of work in a stage, by kernel, from one step's clocks."""
    executor = executor_of(engine)
    executor.record_stages(True)
    executor.mono = "step"
    inputs, symbols = make_step(engine, batch, context, 5)
    for _ in range(3):
        executor.run("decode", inputs, symbols, ("logits",))
    schedule, times = executor.read_stages()
    executor.record_stages(False)
    found: dict[str, list[tuple[float, float, float, int]]] = {}
    for stage, events in zip(schedule.stages, times, strict=True):
        ran = events[events[:, 2] > 0].double() / 1e3
        if len(ran):
            wait, work = (ran[:, 1] - ran[:, 0]).mean(), (ran[:, 2] - ran[:, 1]).mean()
            span = ran[:, 2].max() - ran[:, 1].min()
            found.setdefault(stage.record.kernel, []).append((float(wait), float(work), float(span), len(ran)))
    rows = [
        [name, str(len(v)), str(v[0][3]), *(f"{statistics.mean(x[i] for x in v):.2f}" for i in range(3))]
        for name, v in found.items()
    ]
    header = ["stage", "times", "programs", "wait us", "work us", "first ready to last done us"]
    print_table(f"Stages at batch {batch}, context {context}", header, rows)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--peers", action="store_true", help="also torch.compile; needs transformers")
    parser.add_argument("--peer-batch", type=int, nargs="+")
    parser.add_argument("--peer-context", type=int, nargs="+")
    parser.add_argument("--stages", action="store_true", help="print where the time of a merged step goes")
    parser.add_argument("--programs", type=int, help="place the schedules anew for so many programs")
    arguments = parser.parse_args(words)
    arguments.peer_batch = arguments.peer_batch or arguments.batch[:1]
    arguments.peer_context = arguments.peer_context or arguments.context[:1]
    return arguments


def measure_artifact(path: Path, arguments: argparse.Namespace, copy: float) -> list[list[str]]:
    """Rows of the table, without the peers'."""
    start = time.perf_counter()
    artifact = open_artifact(path)
    page_size, plan = artifact.manifest.cache.page_size, artifact.plan("sm90")
    cases = [(b, c) for b in arguments.batch for c in arguments.context]
    pages = choose_pages(plan, cases, page_size, torch.cuda.mem_get_info()[0])
    engine = mmcompile.load(
        path, device="cuda", max_batch=max(arguments.batch), pages=pages, random_weights=0, mono="stream"
    )
    if arguments.programs:
        replace_programs(engine, arguments.programs)
    print(f"{path.name}: loaded in {time.perf_counter() - start:.0f} s, {pages} pages", flush=True)
    rows = []
    for batch in arguments.batch:
        schedule, checked = find_schedule(engine, batch), check_modes(engine, batch)
        for context in arguments.context:
            if batch * -(-context // page_size) > pages:
                print(f"{path.name}, batch {batch}, context {context}: the cache does not fit", flush=True)
                continue
            seconds = {mode: time_mode(engine, mode, batch, context) for mode in list_modes(schedule)}
            limit, chosen = count_bytes(engine, batch, context) / copy, seconds[schedule.mode]
            times = [f"{seconds[m] * 1e6:.0f}" if m in seconds else "-" for m in MODES]
            row = [path.name, str(batch), str(context), *times, schedule.mode, f"{chosen * 1e6:.0f}"]
            row += [f"{seconds['standalone'] / chosen:.2f}", f"{limit * 1e6:.0f}", f"{limit / chosen:.3f}"]
            rows.append([*row, min(seconds, key=lambda m: seconds[m]), checked[schedule.mode]])
            print(" | ".join(rows[-1]), flush=True)
        if arguments.stages:
            print_stages(engine, batch, arguments.context[0])
    engine.close()
    torch.cuda.empty_cache()
    return rows


def add_peers(path: Path, arguments: argparse.Namespace, rows: list[list[str]]) -> None:
    """Two more columns: torch.compile's microseconds and how many times as fast the chosen mode is."""
    plan = open_artifact(path).plan("sm90")
    for row in rows:
        batch, context, chosen = int(row[1]), int(row[2]), float(row[3 + len(MODES) + 1])
        wanted = arguments.peers and batch in arguments.peer_batch and context in arguments.peer_context
        seconds = time_peer(plan, batch, context) if wanted else None
        row += ["-", "-"] if seconds is None else [f"{seconds * 1e6:.0f}", f"{seconds * 1e6 / chosen:.2f}"]


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    copy = measure_copy()
    print(torch.cuda.get_device_name(), f"copy {copy / 1e12:.2f} TB/s")
    rows = []
    for path in arguments.artifacts:
        own = measure_artifact(path, arguments, copy)
        add_peers(path, arguments, own)
        rows += own
    header = ["artifact", "batch", "context", *(f"{m} us" for m in MODES), "chosen", "chosen us", "standalone / chosen",
              "limit us", "limit / chosen", "fastest", "differs", "torch.compile us", "torch / chosen"]  # fmt: skip
    print_table("Decode step, CUDA graph", header, rows)


if __name__ == "__main__":
    main()
