"""Compile the kernels of a target and hold them against its limits and their promises."""

from __future__ import annotations

from collections.abc import Mapping
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
    sources: Mapping[str, KernelSource], target: Target, workers: int | None, progress: Progress
) -> Compiled:
    """Compile every source for every architecture of the target; raise LoweringError if one breaks a limit."""
    names = [(name, arch) for name in sorted(sources) for arch in target.spec.architectures]
    jobs = [CompileJob(sources[name], arch, target.spec) for name, arch in names]
    reports: list[JobReport] = []

    def report(done: JobReport) -> None:
        reports.append(done)
        progress("compile", f"{done.name} for {done.architecture}", len(reports), len(jobs))

    kernels: dict[str, dict[str, CompiledKernel]] = {name: {} for name in sources}
    warnings: list[str] = []
    for (name, arch), compiled in zip(names, compile_many(jobs, workers, progress=report), strict=True):
        warnings += target.check(compiled)
        kernels[name][arch.name] = compiled
    seconds = sum(r.seconds for r in reports)
    return Compiled(kernels, tuple(dict.fromkeys(warnings)), seconds, sum(r.cache_hit for r in reports))
