"""Decode steps of artifacts on an NVIDIA GPU: standalone launches in a CUDA graph against mono-decode.

The artifacts are built elsewhere without a GPU (`mmcompile build ... --weights none --mono step`); weights are random:

    python benchmarks/h200_plans.py ARTIFACT ... --batch 1 4 16 --context 1024

The limit is the time of the bytes of a step (weights read and cached keys and values) at the copy bandwidth of the run.
Before the timing, logits of three steps are compared between the modes, and each mode with itself for equal bits.
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
from mmcompile.driver.mono import reschedule
from mmcompile.driver.targets import load_target
from mmcompile.driver.tune import make_step, time_mode
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.engine import Engine

MODES = ("off", "layer", "step")


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


def check_modes(engine: Engine, batch: int) -> dict[str, str]:
    """Largest difference of each mode's logits from standalone ones over their RMS, and whether it repeats its bits."""
    want = run_steps(engine, "off", batch)
    answers = {}
    for mode in MODES:
        first, second = run_steps(engine, mode, batch), run_steps(engine, mode, batch)
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        worst = max(float((a - b).abs().max() / b.square().mean().sqrt()) for a, b in zip(first, want, strict=True))
        answers[mode] = f"{worst:.1e}{'' if same else ' NOT REPEATED'}"
    return answers


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--stages", action="store_true", help="print where the time of a merged step goes")
    parser.add_argument("--programs", type=int, help="place the schedules anew for so many programs")
    arguments = parser.parse_args()
    copy = measure_copy()
    print(torch.cuda.get_device_name(), f"copy {copy / 1e12:.2f} TB/s")
    rows = []
    for path in arguments.artifacts:
        start = time.perf_counter()
        engine = mmcompile.load(path, device="cuda", max_batch=max(arguments.batch), random_weights=0)
        if arguments.programs:
            replace_programs(engine, arguments.programs)
        print(f"{path.name}: loaded in {time.perf_counter() - start:.0f} s", flush=True)
        for batch in arguments.batch:
            checked = check_modes(engine, batch)
            for context in arguments.context:
                seconds = {mode: time_mode(engine, mode, batch, context) for mode in MODES}
                limit = count_bytes(engine, batch, context) / copy
                best = min(seconds.values())
                row = [path.name, str(batch), str(context), *(f"{seconds[m] * 1e6:.0f}" for m in MODES)]
                row += [f"{seconds['off'] / best:.2f}", f"{limit * 1e6:.0f}", f"{limit / best:.2f}"]
                rows.append([*row, checked["step"], checked["layer"]])
                print(" | ".join(rows[-1]), flush=True)
            if arguments.stages:
                print_stages(engine, batch, arguments.context[0])
        engine.close()
    header = ["artifact", "batch", "context", "standalone us", "layer us", "step us", "standalone / best", "limit us",
              "limit / best", "step differs", "layer differs"]  # fmt: skip
    print_table("Decode step, CUDA graph", header, rows)


if __name__ == "__main__":
    main()
