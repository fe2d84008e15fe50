"""The ONNX project's node tests: a sample of them always, all of them in the slow run, which prints the table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("onnx")
_spec = importlib.util.spec_from_file_location("onnx_node_cases", Path(__file__).with_name("node_cases.py"))
assert _spec is not None and _spec.loader is not None
node_cases = importlib.util.module_from_spec(_spec)
_sys_name = _spec.name
import sys  # noqa: E402

sys.modules[_sys_name] = node_cases
_spec.loader.exec_module(node_cases)


@pytest.mark.slow  # listing the cases makes the inputs of all of them
def test_a_sample(tmp_path: Path):
    table = node_cases.sweep(tmp_path, step=157)
    table.print()
    assert not table.failures
    assert table.counts["passed"] >= 6


@pytest.mark.slow
def test_all(tmp_path: Path):
    """docs/doors.md has the table of the newest run."""
    table = node_cases.sweep(tmp_path)
    table.print()
    assert not table.failures
    assert sum(count for outcome, count in table.counts.items() if outcome.startswith("passed")) >= 1700
