"""Build time by target with a cold and a warm kernel cache, and how it grows with the number of layers.

python benchmarks/build_time.py [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import os
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--target", nargs="*", default=TARGETS)
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 8, 30])
    arguments = parser.parse_args()
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
