"""Shared by the benchmarks: tables, medians, the text that perplexity is measured on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

TEXT = Path(__file__).parent / "data" / "alice.txt"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table, numbers right-aligned by width."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}\n")
    for index, row in enumerate(cells):
        print(
            "| "
            + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            + " |"
        )
        if index == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median wall time of ``repeats`` calls after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
