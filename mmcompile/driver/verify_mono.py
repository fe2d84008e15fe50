"""Prove merged decode launches: the emulator runs them beside the standalone launches, on the same steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.core.errors import MMError, VerificationError
from mmcompile.core.plan import Plan, Schedule
from mmcompile.driver.emulated_device import EmulatedDriver
from mmcompile.driver.mono import PHASE, reschedule
from mmcompile.driver.targets import load_target
from mmcompile.driver.verify_run import BOUNDS, ELEMENT_FACTOR
from mmcompile.emulate.faults import EmulationFault
from mmcompile.runtime.artifact import Artifact
from mmcompile.runtime.batch import build_inputs
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.sequence import GREEDY, Sequence

PROGRAMS = 5
STEPS = 2


@dataclass(frozen=True)
class MonoVerdict:
    """What was proven of one schedule on one architecture.

    ``difference``: largest difference of a logit or cache element between merged and standalone launches, over the
    root mean square of its buffer; ``equal``: share of those elements with the same bits. ``programs``: of the
    emulated launch. ``verdict``: "ok" or "failed", with the ``reason``.
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


def verify_schedules(artifact: Artifact, target: str, *, seed: int = 0, programs: int = PROGRAMS) -> list[MonoVerdict]:
    """Run every schedule of a target for its smallest and largest token count, whole steps and layer by layer.

    Each is placed and proven again for ``programs`` co-resident programs, which the emulator interleaves in a seeded
    order under its race check. Weights are random where the artifact has none.
    """
    plan, spec = artifact.plan(target), load_target(target).spec
    verdicts = []
    for schedule in plan.phases[PHASE].schedules if PHASE in plan.phases else ():
        small = reschedule(plan, spec, schedule, programs)
        for architecture in plan.kernels[schedule.kernel].binaries:
            for tokens, mode in ((schedule.high, "step"), (schedule.low, "layer")):
                verdicts.append(_verify(artifact, plan, small, architecture, tokens, mode, seed))
    return verdicts


def _verify(
    artifact: Artifact, plan: Plan, schedule: Schedule, architecture: str, tokens: int, mode: str, seed: int
) -> MonoVerdict:
    start, difference, equal, reason = time.perf_counter(), 0.0, 1.0, ""
    phase = plan.phases[PHASE].model_copy(update={"schedules": (schedule,)})
    plan = plan.model_copy(update={"phases": plan.phases | {PHASE: phase}})
    try:
        standalone = _run(artifact, plan, architecture, tokens, "off", seed)
        merged = _run(artifact, plan, architecture, tokens, mode, seed)
        difference, equal = _compare(standalone, merged, plan)
    except EmulationFault as fault:
        reason = fault.message
    except MMError as error:
        reason = error.what
    verdict = "failed" if reason else "ok"
    seconds = time.perf_counter() - start
    return MonoVerdict(plan.target, architecture, schedule.kernel, tokens, mode, schedule.programs, difference, equal,
                       verdict, seconds, reason)  # fmt: skip


def _run(
    artifact: Artifact, plan: Plan, architecture: str, tokens: int, mode: str, seed: int
) -> dict[str, Tensor]:
    """Outputs and caches after some decode steps from nothing, by an executor over the emulator."""
    kernels = {
        name: ((artifact.root / k.binaries[architecture].assembly).read_text(), k.binaries[architecture],
               len(k.parameters))
        for name, k in plan.kernels.items()
    }  # fmt: skip
    driver = EmulatedDriver(kernels, architecture, seed)
    phase = plan.phases[PHASE]
    executor = GpuExecutor(
        plan, _read_weights(artifact, plan), 2 * tokens, driver, architecture, lambda name, _: name.encode(), mode
    )
    results: dict[str, Tensor] = {}
    for step, (inputs, symbols) in enumerate(_make_steps(artifact, plan, tokens, seed)):
        outputs = executor.run(PHASE, inputs, symbols, phase.outputs)
        results |= {f"{name} of step {step}": value.clone() for name, value in outputs.items()}
    return results | executor.read_state()


def _read_weights(artifact: Artifact, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    return artifact.read_weights(plan, 0 if artifact.manifest.weights == "none" else None)


def _make_steps(
    artifact: Artifact, plan: Plan, tokens: int, seed: int
) -> Iterator[tuple[dict[str, Tensor], dict[str, int]]]:
    """Inputs of decode steps of ``tokens`` sequences; the last one has an empty row if there are several."""
    assert artifact.manifest.cache is not None
    page_size, vocabulary = artifact.manifest.cache.page_size, artifact.manifest.model.vocab_size
    generator = torch.Generator().manual_seed(seed)
    count = max(tokens - 1, 1)
    ids = torch.randint(0, vocabulary, (count, STEPS), generator=generator).tolist()
    for step in range(STEPS):
        items = [(_make_sequence(i, row, step), 1) for i, row in enumerate(ids)]
        inputs, symbols = build_inputs(items, page_size=page_size, max_blocks=plan.symbols["max_blocks"], rows=tokens)
        yield {name: inputs[name] for name in plan.phases[PHASE].inputs}, symbols


def _make_sequence(number: int, tokens: list[int], cached: int) -> Sequence:
    return Sequence(number, list(tokens), len(tokens), GREEDY, number, pages=[2 * number + 1], cached=cached)


def _compare(standalone: Mapping[str, Tensor], merged: Mapping[str, Tensor], plan: Plan) -> tuple[float, float]:
    """(largest difference over the root mean square of its buffer, share of equal bits); VerificationError if above."""
    worst, same, total = 0.0, 0, 0
    for name, want in standalone.items():
        got = merged[name]
        bits = want.view(torch.uint8) == got.view(torch.uint8)
        same, total = same + int(bits.sum()), total + bits.numel()
        bound = ELEMENT_FACTOR * BOUNDS.get(str(want.dtype).removeprefix("torch."), 0.0)
        a, b = want.double().nan_to_num(7.0), got.double().nan_to_num(7.0)
        difference = float((a - b).abs().max()) / (float(a.square().mean().sqrt()) or 1.0)
        worst = max(worst, difference)
        if difference > bound:
            raise VerificationError(
                f"{name} differs from that of standalone launches by {difference:.2g} of its root mean square"
            )
    return worst, same / max(total, 1)
