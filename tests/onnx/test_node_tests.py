"""The ONNX project's node tests: a sample of them always, all of them in the slow run, which prints the table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def node_cases() -> ModuleType:
    """node_cases.py beside this file, which needs onnx."""
    pytest.importorskip("onnx")
    name = "onnx_node_cases"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("node_cases.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.slow  # listing the cases makes the inputs of all of them
def test_a_sample(node_cases: ModuleType, tmp_path: Path):
    table = node_cases.sweep(tmp_path, step=157)
    table.print()
    assert not table.failures
    assert table.counts["passed"] >= 6


@pytest.mark.slow
def test_all(node_cases: ModuleType, tmp_path: Path):
    """docs/doors.md has the table of the newest run."""
    table = node_cases.sweep(tmp_path)
    table.print()
    assert not table.failures
    assert sum(count for outcome, count in table.counts.items() if outcome.startswith("passed")) >= 1700
