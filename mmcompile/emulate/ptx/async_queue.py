"""Commit groups of asynchronous work: cp.async, bulk stores, wgmma, tcgen05.ld and tcgen05.st.

PTX ISA, "Asynchronous execution", "cp.async.commit_group", "wgmma.commit_group", "tcgen05.wait". Groups are counted by
thread. Early mode performs work when it is issued (the first legal moment), late mode only in the wait that covers it
(the last legal moment), so that a missing commit or wait changes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[np.bool_]
Perform = Callable[[Lanes], None]
"""Performs an operation for some of the lanes that issued it."""

_UNCOMMITTED = -1


@dataclass
class _Entry:
    lanes: Lanes
    group: npt.NDArray[np.int64]
    perform: Perform


class CommitGroups:
    """The asynchronous operations of one kind, of all threads.

    Args:
        lanes: number of threads. late: perform in the wait instead of at issue.
    """

    def __init__(self, lanes: int, late: bool) -> None:
        self._late = late
        self._committed = np.zeros(lanes, np.int64)
        self._entries: list[_Entry] = []

    def add(self, lanes: Lanes, perform: Perform) -> None:
        """Issue an operation of ``lanes``."""
        if not lanes.any():
            return
        if not self._late:
            perform(lanes)
            return
        self._entries.append(_Entry(lanes.copy(), np.full(len(lanes), _UNCOMMITTED), perform))

    def commit(self, lanes: Lanes) -> None:
        """Close the group of each of the ``lanes``: everything they issued since their last commit."""
        if not self._late:
            return
        self._committed[lanes] += 1
        for entry in self._entries:
            new = entry.lanes & lanes & (entry.group == _UNCOMMITTED)
            entry.group[new] = self._committed[new]

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Perform all but the newest ``pending`` committed groups of ``lanes``; uncommitted work stays."""
        self._perform(lanes, lambda entry: (entry.group >= 0) & (entry.group <= self._committed - pending))

    def wait_all(self, lanes: Lanes) -> None:
        """Perform everything that ``lanes`` issued, committed or not."""
        self._perform(lanes, lambda entry: entry.lanes)

    def take_all(self, lanes: Lanes) -> list[tuple[Lanes, Perform]]:
        """Remove everything that ``lanes`` issued and return it, unperformed, in the order of issue."""
        taken = []
        for entry in self._entries:
            mine = entry.lanes & lanes
            if mine.any():
                taken.append((mine, entry.perform))
                entry.lanes = entry.lanes & ~lanes
        self._entries = [entry for entry in self._entries if entry.lanes.any()]
        return taken

    def find_pending(self) -> Lanes:
        """Which threads have operations that were not performed."""
        pending = np.zeros(len(self._committed), np.bool_)
        for entry in self._entries:
            pending |= entry.lanes
        return pending

    def _perform(self, lanes: Lanes, due: Callable[[_Entry], Lanes]) -> None:
        for entry in list(self._entries):
            now = entry.lanes & lanes & due(entry)
            if now.any():
                entry.perform(now)
                entry.lanes = entry.lanes & ~now
        self._entries = [entry for entry in self._entries if entry.lanes.any()]
