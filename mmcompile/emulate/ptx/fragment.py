"""A set of lanes that are at the same basic block."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt


class Fragment:
    """Lanes with one position.

    Attributes:
        block: the basic block to run next. lanes: as a mask. mask: the same, None if all lanes of the group. warp: of
            the lanes if warps run on their own, else 0. state: "run", "gate" (waiting for the rest of its warps) or
            "barrier". yielded: polls, and lets others run first. ran: basic blocks since it last waited or polled.
            barrier: what it waits for, at ``waiting_line``; counted: whether that barrier names its number of threads.
    """

    __slots__ = ("barrier", "block", "counted", "lanes", "mask", "ran", "state", "waiting_line", "warp", "yielded")

    def __init__(self, block: int, lanes: npt.NDArray[np.bool_], warp: int) -> None:
        self.block, self.warp = block, warp
        self.state: Literal["run", "gate", "barrier"] = "run"
        self.yielded, self.counted = False, False
        self.barrier, self.waiting_line, self.ran = -1, 0, 0
        self.set_lanes(lanes)

    def set_lanes(self, lanes: npt.NDArray[np.bool_]) -> None:
        """Replace the lanes."""
        self.lanes = lanes
        self.mask = None if lanes.all() else lanes
