"""Compile the kernels of all targets and hold them against the targets' limits and their own promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmcompile.core.kernel import CompiledKernel, KernelSource
from mmcompile.driver.progress import Progress
from mmcompile.targets._target import Target
from mmcompile.targets._toolchain import CompileJob, JobReport, compile_many


@dataclass(frozen=True)
class Compiled:
    """Binaries by kernel name and architecture, and the warnings of the checks."""

    kernels: dict[str, dict[str, CompiledKernel]]
    warnings: tuple[str, ...]
    seconds: float
    cache_hits: int

    def describe(self) -> str:
        """One clause: how much was compiled, how much came from the cache, and how long the compilers worked."""
        binaries = sum(len(by_architecture) for by_architecture in self.kernels.values())
        if not binaries:
            return "nothing to compile"
        if self.cache_hits == binaries:
            return f"all {binaries} cached"
        return f"{binaries - self.cache_hits} compiled in {self.seconds:.1f} s of one core, {self.cache_hits} cached"


def compile_sources(
    sources: Mapping[str, Mapping[str, KernelSource]],
    targets: Mapping[str, Target],
    workers: int | None,
    progress: Progress,
) -> dict[str, Compiled]:
    """Compile every source (by target and name) for every architecture of its target, all together.

    Raises LoweringError if a kernel breaks a limit.
    """
    jobs = {
        (target, name, arch.name): CompileJob(kernels[name], arch, targets[target].spec)
        for target, kernels in sources.items()
        for name in sorted(kernels)
        for arch in targets[target].spec.architectures
    }
    reports: list[JobReport] = []

    def report(done: JobReport) -> None:
        reports.append(done)
        progress("compile", f"{done.name} for {done.architecture}", len(reports), len(jobs))

    binaries = dict(zip(jobs, compile_many(list(jobs.values()), workers, progress=report), strict=True))
    places = list(jobs)
    return {
        target: _collect(
            {(name, arch): binary for (owner, name, arch), binary in binaries.items() if owner == target},
            targets[target],
            [r for r in reports if places[r.index][0] == target],
        )
        for target in sources
    }


def _collect(
    binaries: Mapping[tuple[str, str], CompiledKernel], target: Target, reports: Sequence[JobReport]
) -> Compiled:
    """Check the binaries (by kernel and architecture) of one target."""
    kernels: dict[str, dict[str, CompiledKernel]] = {}
    warnings: list[str] = []
    for (name, arch), binary in binaries.items():
        warnings += target.check(binary)
        kernels.setdefault(name, {})[arch] = binary
    seconds = sum(r.seconds for r in reports)
    return Compiled(kernels, tuple(dict.fromkeys(warnings)), seconds, sum(r.cache_hit for r in reports))
