"""Every sm_90a kernel of an artifact in the PTX emulator and on the GPU, on the same inputs: how far apart they are.

    python benchmarks/h200_emulator.py ARTIFACT [--kernel PATTERN] [--workers N]

Needs an NVIDIA sm_90 GPU. One row for each choice of an operation; "equal" is the share of written elements that have
the same bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from _common import print_table
from torch import Tensor

from mmcompile.core.kernel import KernelSource
from mmcompile.driver.targets import load_target
from mmcompile.driver.verify import list_units
from mmcompile.driver.verify_device import DeviceRunner
from mmcompile.driver.verify_emulate import Assembly, EmulatorRunner, list_jobs
from mmcompile.driver.verify_run import Check, as_bits, run_check
from mmcompile.runtime.artifact import open_artifact
from mmcompile.targets._interpret import Argument


class PairRunner:
    """Runs every launch twice, first emulated, then on the GPU, and goes on with what the GPU wrote."""

    proof = "hardware"
    sampling = None
    guard = 0

    def __init__(self, emulator: EmulatorRunner, device: DeviceRunner) -> None:
        self._emulator, self._device = emulator, device
        self.elements = self.equal = 0
        self.difference = 0.0
        self.emulated_seconds = 0.0

    def run(
        self,
        source: KernelSource,
        arguments: Sequence[Argument],
        grid: tuple[int, int, int],
        programs: Sequence[tuple[int, int, int]] | None = None,
        *,
        written: Collection[int] = (),
    ) -> list[Argument]:
        """Launch on both and compare the arguments that the kernel may write."""
        start = time.perf_counter()
        emulated = self._emulator.run(source, arguments, grid, programs, written=written)
        self.emulated_seconds += time.perf_counter() - start
        real = self._device.run(source, arguments, grid, programs, written=written)
        for i in written:
            before, ours, theirs = arguments[i], emulated[i], real[i]
            assert isinstance(before, Tensor) and isinstance(ours, Tensor) and isinstance(theirs, Tensor)
            changed = (as_bits(ours) != as_bits(before)) | (as_bits(theirs) != as_bits(before))
            same = (as_bits(ours) == as_bits(theirs)) & changed
            self.elements += int(changed.sum())
            self.equal += int(same.sum())
            wrong = changed & ~same
            if bool(wrong.any()):
                a, b = ours[wrong].double(), theirs[wrong].double()
                scale = theirs[changed].double().square().mean().sqrt()
                self.difference = max(self.difference, float(((a - b).abs() / (b.abs() + scale)).max()))
        return real


def compare(path: str, name: str, check: Check, assemblies: dict[str, Assembly]) -> tuple[object, ...]:
    """One row, computed in a process of its own."""
    torch.set_num_threads(1)
    artifact = open_artifact(path)
    with DeviceRunner(artifact, artifact.plan("sm90"), load_target("sm90")) as device:
        runner = PairRunner(EmulatorRunner(assemblies), device)
        outcome = run_check(check, runner)
    share = f"{runner.equal / runner.elements:.4%}" if runner.elements else "-"
    return (
        name, outcome.cases, f"{runner.elements:,}", share, f"{runner.difference:.1e}", f"{outcome.relative_error:.1e}",
        f"{runner.emulated_seconds:.1f}", outcome.failure or "ok",
    )  # fmt: skip


def main() -> int:
    """Print the table; 1 if a kernel failed on either side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--kernel", default="*")
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    artifact = open_artifact(options.artifact)
    units = list_units(artifact, "sm90", False, options.kernel)
    jobs = list_jobs(artifact, [(u.target, u.key, u.check) for u in units])
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(compare, options.artifact, " + ".join(j.assemblies), j.check, dict(j.assemblies)) for j in jobs
        ]
        rows = [future.result() for future in futures]
    columns = (
        "kernel", "cases", "written", "equal bits", "largest difference", "error to reference", "emulated s", "verdict",
    )  # fmt: skip
    title = f"PTX emulator and {torch.cuda.get_device_name()}"
    print_table(title, columns, rows)
    return int(any(row[-1] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
