"""Progress on stderr: bars on a terminal, one line per finished step in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mmcompile.cli.console import make_console


class Watch:
    """A progress function (see driver.progress) that keeps times and what was compiled.

    Attributes: seconds by step; compiled: the compiler's account by target.
    """

    def __init__(self, console: Console | None, bars: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self.compiled: dict[str, str] = {}
        self._console, self._bars = console, bars
        self._step, self._started = "", time.perf_counter()
        self._begun = self._started

    def __call__(self, step: str, detail: str, done: int, total: int) -> None:
        if step == "compiled":
            target, _, account = detail.partition(": ")
            self.compiled[target] = account
        label = {"lower": f"lower {detail}", "compiled": ""}.get(step, step)
        if label and label != self._step:
            self._begin(label, detail)
        if self._bars and label:
            self._bars.update(self._task, completed=done, total=max(total, 1), detail=detail)

    def _begin(self, label: str, detail: str) -> None:
        self.close_step()
        self._step = label
        if self._bars:
            self._task = self._bars.add_task(label, total=1, detail=detail)

    def close_step(self) -> None:
        """End the step at hand."""
        now = time.perf_counter()
        if self._step:
            self.seconds[self._step] = self.seconds.get(self._step, 0.0) + now - self._started
            if self._bars:
                self._bars.update(self._task, completed=self._bars.tasks[self._task].total, detail="")
            elif self._console:
                self._console.print(f"{self._step}: {now - self._started:.1f} s", markup=False)
        self._started = now

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun


@contextmanager
def show_progress(*, silent: bool) -> Iterator[Watch]:
    """Bars on a terminal, a line per step in a pipe, nothing if ``silent``; always on stderr."""
    console = make_console(stderr=True)
    if silent or not console.is_terminal:
        watch = Watch(None if silent else console, None)
        yield watch
        watch.close_step()
        return
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        watch = Watch(console, bars)
        yield watch
        watch.close_step()
