"""Load a target by its name."""

from __future__ import annotations

from mmcompile.core.discover import load_module
from mmcompile.targets._target import Target


def load_target(name: str) -> Target:
    """The TARGET of targets/<name>.py; UsageError with the closest name if there is none."""
    target = load_module("targets", name).TARGET
    assert isinstance(target, Target)
    return target
