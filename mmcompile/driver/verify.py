"""Prove every kernel of an artifact on the CPU, from the artifact alone: binaries, ledgers, limits, and numerics."""

from __future__ import annotations

import fnmatch
import json
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmcompile.core.errors import UsageError, unknown_name
from mmcompile.core.expression import find_symbols
from mmcompile.core.kernel import KernelSource
from mmcompile.core.plan import Choice, Launch, Plan, View
from mmcompile.driver.progress import Progress, silent
from mmcompile.driver.targets import load_target
from mmcompile.driver.verify_device import DeviceRunner
from mmcompile.driver.verify_emulate import Emulation, list_jobs, run_jobs
from mmcompile.driver.verify_inputs import list_decoder_cases, list_module_cases
from mmcompile.driver.verify_interpret import InterpreterRunner
from mmcompile.driver.verify_run import Check, Outcome, Runner, run_check
from mmcompile.driver.verify_static import check_kernel, read_source
from mmcompile.runtime.artifact import Artifact, open_artifact
from mmcompile.runtime.device_cuda import CudaDriver

METHODS = ("interpreter", "emulator")
"""What verify does where there is no GPU."""

_SEQUENCE_INPUTS = {"query_start", "seq_lens", "block_table", "slot_mapping"}


@dataclass(frozen=True)
class EmulationRecord:
    """What the emulator found for one architecture.

    Attributes:
        instructions: executed, one for each active thread, over all cases. covered: share of the instructions of the
            kernels' texts that were executed at least once. unchecked: what the emulator could not check.
        verdict: "ok" or "failed", with the ``reason``.
    """

    architecture: str
    instructions: int
    covered: float
    max_error: float
    relative_error: float
    verdict: str
    seconds: float
    reason: str = ""
    unchecked: tuple[str, ...] = ()
    coverage: str = ""


@dataclass(frozen=True)
class KernelVerdict:
    """What was proven of the kernels of one choice of an operation.

    Attributes:
        kernel: names of its kernels in launch order, joined by " + ". cases: input sets that ran.
        max_error: largest absolute error. relative_error: largest norm of the error over the norm of the reference.
        bound: what ``relative_error`` may be (driver.verify_run.BOUNDS); single elements are held to a looser one.
        verdict: "ok", "failed" or "skipped", with the ``reason``.
        proofs: what it passed of "assembled" (binaries are the recorded ones and within the target's limits),
            "ledger" (they hold the promised instructions), "interpreter" (the source), "emulator" (the assembly of
            every architecture) and "hardware".
        coverage: "" if every program of every grid ran, else e.g. "programs 32 of 3072".
        emulations: one record for each architecture, if the emulator ran.
    """

    target: str
    kernel: str
    op: str
    template: str
    cases: int
    max_error: float
    relative_error: float
    bound: float
    verdict: str
    proofs: tuple[str, ...]
    seconds: float
    reason: str = ""
    coverage: str = ""
    emulations: tuple[EmulationRecord, ...] = ()


@dataclass
class _Unit:
    """Equal choices of one target: the check, its identity across targets, and what the static checks found."""

    target: str
    check: Check
    key: str
    proofs: tuple[str, ...] = ()
    reasons: list[str] = field(default_factory=list)

    @property
    def needs_lanes(self) -> bool:
        """True if Triton's interpreter cannot run one of its kernels: only an emulator or a GPU proves it."""
        return any(source.lanes for source in self.check.sources.values())


def verify_artifact(
    path: str | Path,
    *,
    targets: Sequence[str] | None = None,
    kernel_pattern: str | None = None,
    quick: bool = False,
    progress: Progress = silent,
    workers: int = 2,
    methods: Collection[str] = METHODS,
) -> list[KernelVerdict]:
    """Verify the kernels of an artifact.

    Equal choices (the layers of a model) count as one, and equal sources and texts run once for all targets. Every
    choice runs on seeded inputs, with the plan's own grids, arguments and strides, in poisoned memory, and is compared
    with the operation's reference. Weights are random, so an artifact without weights will do.

    Args:
        targets: names of the artifact's targets, by default all. kernel_pattern: shell pattern; only choices with a
            kernel whose name matches. quick: one case for each choice. workers: processes.
        methods: "interpreter" runs the emitted sources in Triton's interpreter, "emulator" the emitted assembly in
            mmcompile's emulators, ("hardware",) the binaries on this machine's GPU: by default those of the targets
            that it can run. Together with the emulator, which runs all cases, the interpreter runs one of each choice.
            It runs no kernel with ``KernelSource.lanes``.

    Returns: verdicts in the order of targets, phases and launches. Raises ArtifactError for a damaged artifact and
    UsageError for an unknown target or a pattern that matches nothing.
    """
    artifact = open_artifact(path)
    for name in targets or ():
        if name not in artifact.manifest.targets:
            raise unknown_name("target", name, artifact.manifest.targets, where=str(path))
    chosen = list(targets or sorted(artifact.manifest.targets))
    if "hardware" in methods:
        chosen = _list_runnable(chosen)
        if len(chosen) != 1:
            raise UsageError(f"{len(chosen)} targets of the artifact run on this machine's GPU", fix="name one target")
    units = [u for name in chosen for u in list_units(artifact, name, quick, kernel_pattern or "*")]
    if kernel_pattern is not None and not units:
        raise UsageError(f"no kernel of the artifact matches {kernel_pattern!r}", where=str(path))
    outcomes, emulations = {}, {}
    if "emulator" in methods:
        jobs = list_jobs(artifact, [(unit.target, unit.key, unit.check) for unit in units])
        emulations = run_jobs(jobs, workers, progress)
    if set(methods) - {"emulator"}:
        with ExitStack() as stack:
            if "hardware" in methods:
                plan, target = artifact.plan(chosen[0]), load_target(chosen[0])
                runners: list[Runner] = [stack.enter_context(DeviceRunner(artifact, plan, target))]
            else:
                runners = [stack.enter_context(InterpreterRunner()) for _ in range(max(1, workers))]
            runnable = units if "hardware" in methods else [u for u in units if not u.needs_lanes]
            outcomes = _run_units(_shorten(runnable) if "emulator" in methods else runnable, runners, progress)
    proof = "hardware" if "hardware" in methods else "interpreter"
    return [_judge(unit, outcomes.get(unit.key), proof, emulations.get((unit.target, unit.key), {})) for unit in units]


def _list_runnable(names: Sequence[str]) -> list[str]:
    """The targets with a binary that this machine's GPU loads."""
    driver = CudaDriver()
    architecture = driver.architecture
    driver.close()
    specs = {name: load_target(name).spec for name in names}
    return [n for n, spec in specs.items() if any(architecture in a.runs_on for a in spec.architectures)]


def list_units(artifact: Artifact, target_name: str, quick: bool, pattern: str) -> list[_Unit]:
    """Every different choice of a target's plan with a kernel that matches, statically checked."""
    plan, target = artifact.plan(target_name), load_target(target_name)
    sources = {name: read_source(artifact, plan, name) for name in plan.kernels}
    units: dict[str, _Unit] = {}
    for phase in plan.phases.values():
        for launch in phase.launches:
            above = 0
            for choice in launch.choices:
                if any(fnmatch.fnmatch(k.kernel, pattern) for k in choice.kernels):
                    unit = _make_unit(artifact, plan, phase.name, launch, choice, above, sources, quick)
                    units.setdefault(unit.key, unit)
                above = choice.max_tokens or above
    used = {name for unit in units.values() for name in unit.check.sources}
    found = {name: check_kernel(artifact, plan, target, sources[name]) for name in sorted(used)}
    for unit in units.values():
        unit.reasons = [found[k] for k in unit.check.sources if found[k]]
        unit.proofs = () if unit.reasons else ("assembled", "ledger")
    return list(units.values())


def _make_unit(
    artifact: Artifact, plan: Plan, phase: str, launch: Launch, choice: Choice, above: int,
    sources: Mapping[str, KernelSource], quick: bool,
) -> _Unit:  # fmt: skip
    if artifact.manifest.kind == "decoder":
        kind = phase if _sees_sequences(launch) else "prefill" if phase == "decode" else phase
        cases = list_decoder_cases(plan, kind, launch.op, above, choice.max_tokens, quick)
    else:
        cases = list_module_cases(plan, above, choice.max_tokens, quick)
    used = {k.kernel: sources[k.kernel] for k in choice.kernels}
    check = Check(launch, choice, plan.buffers, used, tuple(cases))
    return _Unit(plan.target, check, _identify(check))


def _sees_sequences(launch: Launch) -> bool:
    """True if a launch reads how tokens are spread over sequences, or has a row for each sequence."""
    views = [*launch.inputs.values(), *launch.outputs]
    symbols = {s for v in views if v is not None for d in v.shape for s in find_symbols(d)}
    return "batch" in symbols or not _SEQUENCE_INPUTS.isdisjoint(launch.inputs)


def _identify(check: Check) -> str:
    """Text that is equal for choices that must behave alike: buffers numbered by first use, sources by their text."""
    numbers: dict[str, int] = {}

    def describe(view: Any) -> Any:
        if not isinstance(view, View):
            return view
        buffer = check.buffers[view.buffer]
        number = numbers.setdefault(view.buffer, len(numbers))
        return [number, buffer.dtype, buffer.shape, view.shape, view.strides, view.offset]

    launch = check.launch
    parts = [
        launch.op, launch.attributes, {k: describe(v) for k, v in sorted(launch.inputs.items())},
        [describe(v) for v in launch.outputs],
        [[check.sources[k.kernel].digest, k.grid, [describe(a) for a in k.arguments]] for k in check.choice.kernels],
        [[c.symbols, c.lengths, c.new] for c in check.cases],
    ]  # fmt: skip
    return json.dumps(parts, sort_keys=True)


def _run_units(units: list[_Unit], runners: Sequence[Runner], progress: Progress) -> dict[str, tuple[Outcome, float]]:
    """Outcome and seconds of every different unit."""
    todo = {unit.key: unit for unit in reversed(units)}
    done: dict[str, tuple[Outcome, float]] = {}
    free: queue.Queue[Runner] = queue.Queue()
    for runner in runners:
        free.put(runner)

    def run(unit: _Unit) -> tuple[Outcome, float]:
        runner, start = free.get(), time.perf_counter()
        try:
            return run_check(unit.check, runner), time.perf_counter() - start
        finally:
            free.put(runner)

    with ThreadPoolExecutor(len(runners)) as pool:
        futures = {pool.submit(run, todo[key]): key for key in dict.fromkeys(unit.key for unit in units)}
        for future in as_completed(futures):
            key = futures[future]
            done[key] = future.result()
            progress("verify", _name(todo[key].check), len(done), len(todo))
    return done


def _shorten(units: list[_Unit]) -> list[_Unit]:
    """The same units with the middle one of their cases."""
    middle = [len(u.check.cases) // 2 for u in units]
    return [
        replace(u, check=replace(u.check, cases=u.check.cases[m : m + 1])) for u, m in zip(units, middle, strict=True)
    ]


def _name(check: Check) -> str:
    return " + ".join(k.kernel for k in check.choice.kernels)


def _judge(
    unit: _Unit, run: tuple[Outcome, float] | None, proof: str, emulations: Mapping[str, tuple[Emulation, float]]
) -> KernelVerdict:
    """One verdict from the static checks, the run of the sources or binaries, and the runs of the assembly."""
    reasons, proofs, seconds = list(unit.reasons), unit.proofs, 0.0
    if run is not None:
        seconds = run[1]
        if run[0].failure:
            reasons.append(f"{_name(unit.check)}, {run[0].failure}")
        elif unit.check.cases:
            proofs = (*proofs, proof)
    records = tuple(_record(architecture, *result) for architecture, result in emulations.items())
    broken = [f"{r.architecture}: {r.reason}" for r in records if r.verdict == "failed"]
    reasons += broken
    if records and unit.check.cases and not broken:
        proofs = (*proofs, "emulator")
    verdict = "failed" if reasons else "ok"
    if not unit.check.cases:
        verdict = verdict if reasons else "skipped"
        reasons.append("no token count within the plan's limits reaches this choice")
    elif run is None and not records and not reasons:
        verdict = "skipped"
        reasons.append("its inline assembly counts on lanes, which Triton's interpreter has not; use the emulator")
    outcomes = [*([run[0]] if run else []), *(emulation.outcome for emulation, _ in emulations.values())]
    return KernelVerdict(
        unit.target, _name(unit.check), unit.check.launch.op, unit.check.choice.template,
        max((o.cases for o in outcomes), default=0), max((o.max_error for o in outcomes), default=0.0),
        max((o.relative_error for o in outcomes), default=0.0), max((o.bound for o in outcomes), default=0.0),
        verdict, proofs, seconds + sum(r.seconds for r in records), "; ".join(reasons),
        next((o.coverage for o in outcomes if o.coverage), ""), records,
    )  # fmt: skip


def _record(architecture: str, emulation: Emulation, seconds: float) -> EmulationRecord:
    outcome = emulation.outcome
    return EmulationRecord(
        architecture, emulation.instructions, emulation.coverage, outcome.max_error, outcome.relative_error,
        "failed" if outcome.failure else "ok", seconds, outcome.failure, emulation.unchecked, outcome.coverage,
    )  # fmt: skip
