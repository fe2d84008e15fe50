"""What `mmcompile tune` writes into an artifact, and what it refuses; the timing itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mmcompile
from mmcompile.core.errors import ToolchainError, UsageError
from mmcompile.core.plan import KernelLaunch, Schedule, Stage
from mmcompile.driver import tune
from mmcompile.runtime.artifact import open_artifact
from mmcompile.runtime.mono import find_schedule

SCHEDULE = Schedule(
    low=1, high=2, kernel="k", programs=1, layers=((0, 1),), private={}, private_bytes=0, mode="standalone",
    stages=(Stage(launch=0, record=KernelLaunch(kernel="k", grid=(1, 1, 1), arguments=()), body=0),),
    seconds={"standalone": 3e-4, "step": 2e-4}, basis="cost model",
)  # fmt: skip


def test_the_measured_mode_is_in_the_artifact_and_the_runtime_goes_by_it(
    make_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "a"))
    (target,) = artifact.manifest.targets
    plan = artifact.plan(target)
    measured = SCHEDULE.model_copy(update={"mode": "step", "seconds": {"step": 1e-4}, "basis": "a GPU, context 64"})
    tune._record(artifact, plan, [measured])
    opened = open_artifact(tmp_path / "a")  # checks every hash
    phase = opened.plan(target).phases["decode"]
    assert phase.schedules == (measured,) and phase.launches == plan.phases["decode"].launches
    assert opened.manifest.digest != artifact.manifest.digest
    assert not list((tmp_path / "a").rglob("*.new"))
    assert find_schedule(phase, {"tokens": 2}, "auto") == measured
    assert find_schedule(phase, {"tokens": 3}, "auto") is None
    assert find_schedule(phase, {"tokens": 2}, "off") is None
    layered = find_schedule(phase, {"tokens": 1}, "layer")
    assert layered is not None and layered.mode == "layer"


def test_a_schedule_that_says_standalone_is_not_merged(make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "a"))
    (target,) = artifact.manifest.targets
    phase = artifact.plan(target).phases["decode"].model_copy(update={"schedules": (SCHEDULE,)})
    assert find_schedule(phase, {"tokens": 1}, "auto") is None
    assert find_schedule(phase, {"tokens": 1}, "step") is not None


def test_tuning_needs_a_gpu(
    make_artifact: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise ToolchainError("no CUDA driver on this machine", fix="install it")

    monkeypatch.setitem(mmcompile.runtime.loading._DRIVERS, "cuda", no_driver)
    with pytest.raises(ToolchainError, match="no CUDA driver"):
        tune.tune_artifact(make_artifact(tmp_path / "a"))


def test_an_unknown_mode_is_refused(make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mono-decode option 'stp'"):
        mmcompile.load(make_artifact(tmp_path / "a"), device="cpu", mono="stp")
