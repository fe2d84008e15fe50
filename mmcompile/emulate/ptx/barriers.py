"""The numbered barriers of the blocks of a group (PTX ISA, Parallel Synchronization: bar, barrier)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.fragment import Fragment
from mmcompile.emulate.ptx.group import Array, Group

Lanes = npt.NDArray[np.bool_]
_BARRIERS = 16


class BlockBarriers:
    """Who has arrived at which barrier, and whom its completion releases."""

    def __init__(self, group: Group, fragments: list[Fragment]) -> None:
        self.group, self.fragments = group, fragments
        self.arrived: dict[int, Lanes] = {}
        self.counts: dict[int, int | None] = {}

    def arrive(self, fragment: Fragment, numbers: Array, counts: Array | None, only_arrive: bool) -> None:
        """The lanes of a fragment, which name one barrier, arrive; it waits, unless it only arrives or completes it."""
        group = self.group
        number = int(numbers[int(np.argmax(fragment.lanes))])
        if number >= _BARRIERS:
            raise group.fault("illegal", f"barrier {number}, a block has {_BARRIERS}")
        count = None if counts is None else int(counts[int(np.argmax(fragment.lanes))])
        waiting = self.arrived.setdefault(number, np.zeros(group.lanes, np.bool_))
        if (waiting & fragment.lanes).any():
            raise group.fault("divergent barrier", f"threads arrive twice at barrier {number}")
        waiting |= fragment.lanes
        self.counts[number] = count
        fragment.block += 1
        if only_arrive:
            if group.order:
                group.order.arrive_at_barrier(group, number, fragment.lanes)
        else:
            fragment.state, fragment.barrier, fragment.waiting_line = "barrier", number, group.line
            fragment.counted = count is not None
        present = self._count(waiting)
        mine = fragment.lanes.reshape(group.blocks, group.threads).any(axis=1)
        if count is not None and (mine & (present > count)).any():
            raise group.fault("illegal", f"{int(present[mine].max())} threads at barrier {number} of {count}")
        needed = self._count(group.live) if count is None else count
        self._release(number, mine & (present == needed))

    def recount(self) -> None:
        """Threads have exited: barriers of all threads may be complete now."""
        for number, waiting in self.arrived.items():
            if self.counts[number] is None:
                present = self._count(waiting)
                self._release(number, (present > 0) & (present == self._count(self.group.live)))

    def _count(self, lanes: Lanes) -> npt.NDArray[np.int64]:
        """Number of set lanes in each block."""
        return np.asarray(lanes.reshape(self.group.blocks, self.group.threads).sum(axis=1))

    def _release(self, number: int, blocks: Lanes) -> None:
        """The barrier is complete in some blocks."""
        if not blocks.any():
            return
        lanes = np.repeat(blocks, self.group.threads)
        self.arrived[number] &= ~lanes
        released = np.zeros(self.group.lanes, np.bool_)
        for fragment in list(self.fragments):
            going = fragment.lanes & lanes
            if fragment.state != "barrier" or fragment.barrier != number or not going.any():
                continue
            released |= going
            if not (going == fragment.lanes).all():
                rest = Fragment(fragment.block, fragment.lanes & ~going, fragment.warp)
                rest.state, rest.barrier, rest.waiting_line = "barrier", number, fragment.waiting_line
                rest.counted = fragment.counted
                self.fragments.append(rest)
                fragment.set_lanes(going)
            fragment.state, fragment.barrier, fragment.yielded = "run", -1, False
        if self.group.order:
            self.group.order.complete_barrier(self.group, number, released)
