"""The command line in this process, and one small artifact for all tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mmcompile.cli import main


@dataclass
class Outcome:
    """What a call of the command line left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which must be one document."""
        return json.loads(self.out)


@pytest.fixture
def mmcompile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Call the command line with words; its signal handler is undone afterwards."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.delenv("COLUMNS", raising=False)  # set by test runners; a pipe has no width

    def call(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """smollm2-tiny, random weights in NVFP4, verified, for the CPU; do not change it."""
    from mmcompile.driver import BuildOptions, build

    options = BuildOptions(quantization="nvfp4", weights="random", verify=True, max_tokens=32, max_batch=4)
    return build("smollm2-tiny", tmp_path_factory.mktemp("built") / "tiny", options)
