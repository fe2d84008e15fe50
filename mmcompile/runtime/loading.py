"""Open an artifact on a device: check it, choose target and architecture, place weights and cache, make the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mmcompile.core.errors import ArtifactError, MMError, ToolchainError, UsageError, unknown_name
from mmcompile.core.plan import Manifest, Plan
from mmcompile.core.stream import count_copied, drop_streams
from mmcompile.runtime.artifact import Artifact, open_artifact
from mmcompile.runtime.device_cpu import CpuExecutor
from mmcompile.runtime.device_cuda import CudaDriver
from mmcompile.runtime.device_driver import Driver
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.device_hip import HipDriver
from mmcompile.runtime.engine import Engine, Limits, decoder_limits
from mmcompile.runtime.executor import Executor
from mmcompile.runtime.memory import choose_pages, cpu_budget, gpu_budget
from mmcompile.runtime.module import ModuleEngine
from mmcompile.runtime.selection import (
    DeviceKind,
    Selection,
    describe_targets,
    device_kind,
    require_target,
    select_target,
)

DeviceName = Literal["auto", "cpu", "cuda", "hip"]
DEVICES = ("auto", "cpu", "cuda", "hip")
MONO = ("auto", "off", "layer", "step", "stream")
_DRIVERS: dict[str, Callable[[], Driver]] = {"cuda": CudaDriver, "hip": HipDriver}


def load(
    path: str | Path,
    *,
    target: str | None = None,
    device: DeviceName = "auto",
    pages: int | None = None,
    max_batch: int | None = None,
    seed: int = 0,
    random_weights: int | None = None,
    mono: str = "auto",
) -> Engine | ModuleEngine:
    """Load an artifact and make it ready to run.

    Args:
        target: which of the artifact's targets; None = the one that fits the device best.
        device: "auto" takes a GPU if its driver is there and the artifact has a target for it, else the CPU.
        pages: size of the KV cache; None = max_batch sequences of 2048 tokens, as far as memory goes.
        max_batch: sequences at a time; None = what the artifact was built for.
        seed: of sequences whose SamplingParams have none.
        random_weights: for an artifact that was built with ``weights="none"``: the seed of random ones, the same on
            every device (see runtime.random_weights).
        mono: how a GPU decodes where the artifact has merged launches: "auto" as each schedule says, or "off", "layer",
            "step"; "stream" by the tuned kernel where there is one, else as the schedule says. The weights of a
            streamed step are a second copy, made for "stream", and for "auto" if a schedule says so.

    Returns: an Engine for a decoder, a ModuleEngine for a module. Raises ArtifactError if the artifact is damaged,
    holds no weights (and no seed of random ones is given) or nothing for the device; ToolchainError if the device named
    has no driver; UsageError on a wrong argument.
    """
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    if pages is not None and pages < 1:
        raise UsageError(f"pages = {pages}", fix="use 1 or more")
    if mono not in MONO:
        raise unknown_name("mono-decode option", mono, MONO)
    artifact = open_artifact(path)
    selection, driver = _select(artifact.manifest, device, target)
    plan = _choose_streams(artifact.plan(selection.target), mono)
    if artifact.manifest.kind == "module":
        executor = _make_executor(artifact, plan, selection, driver, pages or 1, random_weights, mono)
        return ModuleEngine(plan, selection, executor, random_weights)
    limits = decoder_limits(artifact.manifest, plan, max_batch)
    limits = replace(limits, pages=pages or _default_pages(plan, driver, limits))
    executor = _make_executor(artifact, plan, selection, driver, limits.pages, random_weights, mono)
    return Engine(artifact, plan, selection, executor, limits, seed, random_weights)


def _choose_streams(plan: Plan, mono: str) -> Plan:
    """The plan without streamed steps if none will run: their weights are a second copy."""
    return plan if mono == "stream" or (mono == "auto" and count_copied(plan)) else drop_streams(plan)


def _select(manifest: Manifest, device: DeviceName, target: str | None) -> tuple[Selection, Driver | None]:
    """Target and driver for a device; "auto" tries GPUs that the artifact has targets for, then the CPU."""
    require_target(manifest, target)
    if device != "auto":
        return _select_on(manifest, device, target)
    entries = list(manifest.targets.values()) if target is None else [manifest.targets[target]]
    reasons: list[str] = []
    kinds: tuple[DeviceKind, ...] = ("cuda", "hip", "cpu")
    for kind in kinds:
        if all(device_kind(entry) != kind for entry in entries):
            continue
        try:
            return _select_on(manifest, kind, target)
        except (ToolchainError, ArtifactError) as error:
            reasons.append(error.what)
    raise ArtifactError(
        f"the artifact cannot run here: it holds {describe_targets(manifest)}; {'; '.join(reasons)}",
        fix="build it again with the target of this machine, e.g. cpu",
    )


def _select_on(manifest: Manifest, kind: DeviceKind, target: str | None) -> tuple[Selection, Driver | None]:
    if kind == "cpu":
        return select_target(manifest, "cpu", "cpu", target), None
    driver = _DRIVERS[kind]()
    try:
        return select_target(manifest, kind, driver.architecture, target), driver
    except ArtifactError:
        driver.close()
        raise


def _default_pages(plan: Plan, driver: Driver | None, limits: Limits) -> int:
    budget = cpu_budget() if driver is None else gpu_budget(plan, driver.free_memory())
    return choose_pages(
        plan, budget, page_size=limits.page_size, max_batch=limits.max_batch, max_context=limits.max_context
    )


def _make_executor(
    artifact: Artifact,
    plan: Plan,
    selection: Selection,
    driver: Driver | None,
    pages: int,
    random_weights: int | None,
    mono: str,
) -> Executor:
    weights = artifact.read_weights(plan, random_weights)
    if driver is None:
        return CpuExecutor(plan, weights, pages)
    assert selection.architecture is not None
    try:
        return GpuExecutor(plan, weights, pages, driver, selection.architecture, artifact.read_binary, mono)
    except MMError:
        driver.close()
        raise
