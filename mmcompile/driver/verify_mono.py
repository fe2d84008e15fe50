"""Prove merged decode launches: the emulator runs them beside the standalone launches, on the same steps."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from mmcompile.core.errors import LoweringError, MMError, VerificationError
from mmcompile.core.plan import Plan, Schedule
from mmcompile.core.quantities import format_bytes
from mmcompile.core.schedule import MERGED_PHASE as PHASE
from mmcompile.driver.emulated_device import EmulatedDriver
from mmcompile.driver.mono import prove_recorded, prove_stream, reschedule
from mmcompile.driver.progress import Progress, silent
from mmcompile.driver.shorten import keep_decode, shorten_decode, with_schedule
from mmcompile.driver.targets import load_target
from mmcompile.driver.verify_emulate import Assembly
from mmcompile.driver.verify_run import BOUNDS, ELEMENT_FACTOR
from mmcompile.driver.verify_static import check_kernel, read_source
from mmcompile.emulate.faults import EmulationFault
from mmcompile.runtime.artifact import Artifact, open_artifact
from mmcompile.runtime.batch import build_inputs
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.sequence import GREEDY
from mmcompile.runtime.sequence import Sequence as Conversation

PROGRAMS = 5
STEPS = 2
EMULATED_BYTES = 8 << 20
"""Largest stream of weights that the emulator runs, in minutes: a streamed step counts its layers and programs."""


@dataclass(frozen=True)
class MonoVerdict:
    """What was proven of one schedule on one architecture.

    Attributes:
        tokens, mode, programs: of the emulated launches, "step", "layer" or "stream"; 0 and "" if none ran.
        difference: largest difference of a logit or cache element between merged and standalone launches, over the
            root mean square of its buffer (``compare_steps``). equal: share of those bytes that are the same.
        verdict: "ok" or "failed", with the ``reason``.
        proofs: what it passed of "assembled" and "ledger" (of the merged kernel's binaries), "schedule" (the recorded
            one, for each of its token counts) and "emulator".
        coverage: "" if all launches of the phase ran, else which layers of a deep model did.
    """

    target: str
    architecture: str
    kernel: str
    tokens: int
    mode: str
    programs: int
    difference: float
    equal: float
    verdict: str
    seconds: float
    reason: str = ""
    proofs: tuple[str, ...] = ()
    coverage: str = ""


@dataclass(frozen=True)
class MonoCase:
    """One run of merged beside standalone launches: ``plan`` holds "decode" with the one schedule, placed for few
    programs. ``order``: seed of the programs' turns. ``answers``: (target, architecture) of all equal cases."""

    artifact: Artifact
    plan: Plan
    architecture: str
    tokens: int
    mode: str
    seed: int
    coverage: str
    proofs: tuple[str, ...]
    answers: list[tuple[str, str]] = field(default_factory=list)
    order: int = 0

    @property
    def schedule(self) -> Schedule:
        """The schedule that runs."""
        return self.plan.phases[PHASE].schedules[0]

    @property
    def launched(self) -> tuple[str, int]:
        """Kernel and programs of the merged launches."""
        stream = self.schedule.stream if self.mode == "stream" else None
        if stream is not None:
            return stream.record.kernel, stream.programs
        return self.schedule.kernel, self.schedule.programs


def verify_schedules(
    path: str | Path,
    *,
    targets: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    programs: int = PROGRAMS,
    progress: Progress = silent,
    workers: int = 2,
) -> list[MonoVerdict]:
    """Verify the merged decode launches of an artifact's targets, by default all.

    Static: the merged kernels' binaries, ledgers and limits, and the recorded schedules, as for the device. Then the
    emulator runs two decode steps of each for its smallest and largest token count, layer by layer and whole, placed
    and proven again for ``programs`` co-resident programs that take turns in a seeded order, with the race check on,
    and the results are compared with those of standalone launches. Weights are random where the artifact has none. Of a
    deep model the first two layers of each kind run, and what is around them. A streamed step runs as it is, with all
    its layers and programs, if its weights are small; else it has the static proofs only, as its coverage says.
    quick: only one case of the general merged launches for each target.

    Returns: what the static checks refuse, then verdicts in the order of targets, schedules and architectures.
    """
    artifact = open_artifact(path)
    verdicts: list[MonoVerdict] = []
    cases: dict[str, MonoCase] = {}
    for target in targets or sorted(artifact.manifest.targets):
        plan = artifact.plan(target)
        schedules = plan.phases[PHASE].schedules if PHASE in plan.phases else ()
        for schedule in schedules[:1] if quick else schedules:
            proofs, reason = _check_schedule(artifact, plan, schedule)
            if reason:
                verdicts.append(
                    MonoVerdict(target, "", schedule.kernel, 0, "", 0, 0.0, 0.0, "failed", 0.0, reason, proofs)
                )
                continue
            verdicts += _report_unrun(plan, schedule, proofs)
            for case in list_cases(artifact, target, schedule, quick, seed, programs):
                known = cases.setdefault(_identify(case), replace(case, proofs=proofs))
                known.answers.append((target, case.architecture))
    return verdicts + _run_cases(list(cases.values()), workers, progress)


def _check_schedule(artifact: Artifact, plan: Plan, schedule: Schedule) -> tuple[tuple[str, ...], str]:
    """The static proofs that a schedule passes, and the first objection or ""."""
    target = load_target(plan.target)
    reason = check_kernel(artifact, plan, target, read_source(artifact, plan, schedule.kernel))
    if not reason and schedule.stream is not None:
        reason = check_kernel(artifact, plan, target, read_source(artifact, plan, schedule.stream.record.kernel))
    if reason:
        return (), reason
    try:
        prove_recorded(plan, target.spec, schedule)
        if schedule.stream is not None:
            prove_stream(plan, target.spec, schedule.stream)
    except LoweringError as error:
        return ("assembled", "ledger"), error.what
    return ("assembled", "ledger", "schedule"), ""


def list_cases(
    artifact: Artifact, target: str, schedule: Schedule, quick: bool, seed: int, programs: int
) -> list[MonoCase]:
    """The runs of one schedule, for every architecture."""
    short = shorten_decode(with_schedule(artifact.plan(target), schedule))
    spec = load_target(target).spec
    plan = with_schedule(short.plan, reschedule(short.plan, spec, short.plan.phases[PHASE].schedules[0], programs))
    runs = [(schedule.high, "step", plan, short.coverage), (schedule.low, "layer", plan, short.coverage)]
    runs = runs[:1] if quick else runs
    if _is_emulated(schedule):
        whole = with_schedule(artifact.plan(target), schedule)
        runs.append((schedule.high, "stream", keep_decode(whole, whole.phases[PHASE]), ""))
    small = Artifact(artifact.root, artifact.manifest)
    return [
        MonoCase(small, held, architecture, tokens, mode, seed, coverage, ())
        for architecture in plan.kernels[schedule.kernel].binaries
        for tokens, mode, held, coverage in runs
    ]


def _is_emulated(schedule: Schedule) -> bool:
    return schedule.stream is not None and schedule.stream.bytes <= EMULATED_BYTES


def _report_unrun(plan: Plan, schedule: Schedule, proofs: tuple[str, ...]) -> list[MonoVerdict]:
    """Verdicts on a streamed step that is too large for the emulator."""
    stream = schedule.stream
    if stream is None or _is_emulated(schedule):
        return []
    coverage = f"no emulator: {stream.programs} programs and {format_bytes(stream.bytes)} of weights"
    return [
        MonoVerdict(plan.target, architecture, stream.record.kernel, schedule.high, "stream", 0, 0.0, 0.0, "ok", 0.0,
                    "", proofs, coverage)
        for architecture in plan.kernels[stream.record.kernel].binaries
    ]  # fmt: skip


def _identify(case: MonoCase) -> str:
    """Equal for cases that run the same texts by the same schedule."""
    texts = {name: _read_assembly(case, name) for name in sorted(case.plan.kernels)}
    parts = [
        [(name, a.program, a.binary.shared, a.binary.num_warps) for name, a in texts.items()],
        case.plan.phases[PHASE].model_dump_json(), case.tokens, case.mode,
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read_assembly(case: MonoCase, kernel: str) -> Assembly:
    binary = case.plan.kernels[kernel].binaries[case.architecture]
    return Assembly((case.artifact.root / binary.assembly).read_text(), binary)


def _run_cases(cases: Sequence[MonoCase], workers: int, progress: Progress) -> list[MonoVerdict]:
    """Verdicts of all cases; each runs in a worker process."""
    if not cases:
        return []
    results: dict[int, MonoVerdict] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, workers), mp_context=context) as pool:
        futures = {pool.submit(run_case, case): number for number, case in enumerate(cases)}
        for done, future in enumerate(as_completed(futures), 1):
            case = cases[futures[future]]
            results[futures[future]] = future.result()
            progress("mono", f"{case.launched[0]}, {case.tokens} tokens, {case.mode}", done, len(cases))
    return [
        replace(results[number], target=target, architecture=architecture)
        for number, case in enumerate(cases)
        for target, architecture in case.answers
    ]


def run_case(case: MonoCase) -> MonoVerdict:
    """Run the steps by standalone and by merged launches, and compare."""
    torch.set_num_threads(1)
    start, difference, equal, reason = time.perf_counter(), 0.0, 0.0, ""
    try:
        standalone = run_mode(case, "off")
        merged = run_mode(case, case.mode)
        difference, equal = compare_steps(standalone, merged, case.mode == "stream")
    except EmulationFault as fault:
        reason = fault.message
    except MMError as error:
        reason = error.what
    (kernel, programs), seconds = case.launched, time.perf_counter() - start
    return MonoVerdict(
        case.plan.target, case.architecture, kernel, case.tokens, case.mode, programs, difference,
        equal, "failed" if reason else "ok", seconds, reason, case.proofs if reason else (*case.proofs, "emulator"),
        case.coverage,
    )  # fmt: skip


def run_mode(case: MonoCase, mode: str) -> dict[str, Tensor]:
    """Outputs and caches after some decode steps from nothing, by an executor over the emulator."""
    kernels = {
        name: (assembly.text, assembly.binary, len(kernel.parameters))
        for name, kernel in case.plan.kernels.items()
        if (assembly := _read_assembly(case, name))
    }
    driver = EmulatedDriver(kernels, case.architecture, case.seed + case.order)
    seed = 0 if case.artifact.manifest.weights == "none" else None
    executor = GpuExecutor(
        case.plan, case.artifact.read_weights(case.plan, seed), 2 * case.tokens, driver, case.architecture,
        lambda name, _: name.encode(), mode,
    )  # fmt: skip
    results: dict[str, Tensor] = {}
    for step, (inputs, symbols) in enumerate(_make_steps(case)):
        outputs = executor.run(PHASE, inputs, symbols, case.plan.phases[PHASE].outputs)
        results |= {f"{name} of step {step}": value.clone() for name, value in outputs.items()}
    return results | executor.read_state()


def _make_steps(case: MonoCase) -> Iterator[tuple[dict[str, Tensor], dict[str, int]]]:
    """Inputs of decode steps of as many sequences as tokens; the last one has an empty row if there are several."""
    manifest, plan = case.artifact.manifest, case.plan
    assert manifest.cache is not None
    generator = torch.Generator().manual_seed(case.seed)
    count = max(case.tokens - 1, 1)
    ids = torch.randint(0, manifest.model.vocab_size, (count, STEPS), generator=generator).tolist()
    for step in range(STEPS):
        items = [(_make_sequence(i, row, step), 1) for i, row in enumerate(ids)]
        inputs, symbols = build_inputs(
            items, page_size=manifest.cache.page_size, max_blocks=plan.symbols["max_blocks"], rows=case.tokens
        )
        yield {name: inputs[name] for name in plan.phases[PHASE].inputs}, symbols


def _make_sequence(number: int, tokens: list[int], cached: int) -> Conversation:
    return Conversation(number, list(tokens), len(tokens), GREEDY, number, pages=[2 * number + 1], cached=cached)


def compare_steps(
    standalone: Mapping[str, Tensor], merged: Mapping[str, Tensor], streamed: bool = False
) -> tuple[float, float]:
    """(largest difference over the root mean square of its buffer, share of equal bits).

    streamed: the kernel is another, which rounds in other places, so the mean is that of the elements that are not zero
    (of a cache: the rows that were written). VerificationError where a difference is above the bound.
    """
    worst, same, total = 0.0, 0, 0
    for name, want in standalone.items():
        got = merged[name]
        bits = want.view(torch.uint8) == got.view(torch.uint8)
        same, total = same + int(bits.sum()), total + bits.numel()
        bound = ELEMENT_FACTOR * BOUNDS.get(str(want.dtype).removeprefix("torch."), 0.0)
        a, b = want.double().nan_to_num(7.0), got.double().nan_to_num(7.0)
        mean = a[a != 0].square().mean() if streamed and bool(a.any()) else a.square().mean()
        difference = float((a - b).abs().max()) / (float(mean.sqrt()) or 1.0)
        worst = max(worst, difference)
        if difference > bound:
            raise VerificationError(
                f"{name} differs from that of standalone launches by {difference:.2g} of its root mean square"
            )
    return worst, same / max(total, 1)
