"""Build time by target with a cold and a warm kernel cache, and how it grows with the number of layers.

python benchmarks/build_time.py [--model smollm2-135m]
python benchmarks/build_time.py --together minimax-m3.1-flash --target sm100 sm107 gfx950   # one build, cold cache
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from _common import print_table

from mmcompile.driver import BuildOptions, build
from mmcompile.driver.doors import list_models

TARGETS = ("cpu", "sm90", "sm100", "sm107", "gfx950")


def measure(model: str, options: BuildOptions, folder: Path) -> dict[str, float]:
    """Seconds by step of one build."""
    spent: dict[str, float] = defaultdict(float)
    state = {"step": "start", "since": time.perf_counter()}

    def progress(step: str, detail: str, done: int, total: int) -> None:
        now = time.perf_counter()
        spent[str(state["step"])] += now - float(state["since"])
        state.update(step=step, since=now)

    started = time.perf_counter()
    build(model, folder, options, force=True, progress=progress)
    progress("end", "", 0, 0)
    return {**spent, "total": time.perf_counter() - started}


def count_seconds() -> tuple[float, float]:
    """Processor seconds of this process, and of its children that have ended."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, others = (usage.ru_utime + usage.ru_stime for usage in spent)
    return own, others


def measure_together(model: str, targets: list[str]) -> None:
    """One build of a model without weights for all targets, NVFP4 caches: processor and wall seconds by step.

    The steps follow each other in one process, but for "compile", whose compilers work beside it.
    """
    options = BuildOptions(tuple(targets), "nvfp4_mxfp8", cache_dtype="nvfp4", weights="none")
    rows: dict[str, list[float]] = {}
    last = ["import", 0.0, time.perf_counter()]

    def progress(step: str, detail: str, done: int, total: int) -> None:
        own, now = count_seconds()[0], time.perf_counter()
        row = rows.setdefault(str(last[0]), [0.0, 0.0])
        row[0], row[1] = row[0] + own - float(last[1]), row[1] + now - float(last[2])
        last[:] = [step, own, now]

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMCOMPILE_CACHE"] = f"{folder}/cache"
        started = time.perf_counter()
        build(model, Path(folder) / "a", options, progress=progress)
        progress("end", "", 0, 0)
        wall = time.perf_counter() - started
    own, others = count_seconds()
    peak = max(resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
    print_table(f"Build of {model} for {', '.join(targets)}, cold kernel cache", ["step", "own cpu s", "wall s"],
                [[step, f"{a:.1f}", f"{b:.1f}"] for step, (a, b) in rows.items()])  # fmt: skip
    print(f"processor: {own + others:.1f} s, of them {others:.1f} s of compilers; wall {wall:.1f} s; "
          f"largest process {peak:.2f} GiB; load {os.getloadavg()[0]:.1f}")  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--target", nargs="*", default=TARGETS)
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 8, 30])
    parser.add_argument("--together", metavar="MODEL", help="one build for all targets instead, with processor times")
    arguments = parser.parse_args()
    if arguments.together:
        measure_together(arguments.together, list(arguments.target))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMCOMPILE_CACHE"] = f"{folder}/cache"
        for target in arguments.target:
            options = BuildOptions((target,), "nvfp4")
            cold = measure(arguments.model, options, Path(folder) / "a")
            warm = measure(arguments.model, options, Path(folder) / "a")
            rows.append([target, *(f"{t[k]:.1f}" for t in (cold, warm) for k in ("compile", "total"))])
        print_table(f"Build of {arguments.model}, nvfp4, seconds",
                    ["target", "compile cold", "total cold", "compile warm", "total warm"], rows)  # fmt: skip
        rows = []
        module = list_models()[arguments.model]
        for layers in arguments.layers:
            module.MODELS["grown"] = replace(module.MODELS[arguments.model], num_layers=layers)
            os.environ["MMCOMPILE_CACHE"] = f"{folder}/cache-{layers}"
            spent = measure("grown", BuildOptions(("sm90",), "nvfp4", weights="random"), Path(folder) / "b")
            keys = ("capture", "rewrite", "lower", "compile", "pack", "total")
            rows.append([layers, *(f"{spent.get(k, 0.0):.1f}" for k in keys)])
        print_table("Growth with layers, sm90, cold cache, random weights, seconds",
                    ["layers", "capture", "rewrite", "lower", "compile", "pack", "total"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
