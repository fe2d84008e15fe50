"""How a long build reports where it is: a function (step, detail, done, total)."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, str, int, int], None]


def silent(step: str, detail: str, done: int, total: int) -> None:
    """Report nothing."""
