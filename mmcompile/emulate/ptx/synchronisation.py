"""Happens-before edges of PTX for the race check: which accesses, barriers, fences and atomics order what.

PTX ISA, Memory Consistency Model; the vector clocks are those of ``mmcompile.emulate.races``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.races import RaceDetector, Shadow

if TYPE_CHECKING:
    from mmcompile.emulate.ptx.group import Group

Index = npt.NDArray[np.int64]
_GLOBAL_SLOTS = 8


class Order:
    """The detector and the shadows of one launch; agents are warps, numbered over all programs."""

    def __init__(self, agents: int, memory: DeviceMemory) -> None:
        self.detector = RaceDetector(agents)
        self.memory = memory
        self.global_shadow = Shadow(memory.shadow_size, _GLOBAL_SLOTS, "global memory")
        self.shared_shadows: dict[int, Shadow] = {}

    def create_shared(self, group: Group) -> None:
        """The shadow of the group's shared memory; each warp of a block has a slot."""
        slots = group.threads // 32
        self.shared_shadows[id(group)] = Shadow(len(group.shared), slots, "shared memory")

    def drop_shared(self, group: Group) -> None:
        """The group has ended."""
        del self.shared_shadows[id(group)]

    # ------------------------------------------------------------------ accesses

    def read_shared(self, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        """Plain reads of shared memory."""
        self._shared(self.detector.read, group, index, size, lanes)

    def write_shared(self, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        """Plain writes of shared memory."""
        self._shared(self.detector.write, group, index, size, lanes)

    def atomic_shared(self, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        """Atomic or relaxed accesses that write shared memory."""
        self._shared(self.detector.atomic, group, index, size, lanes)

    def read_global(self, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        """Plain reads of global memory."""
        self._global(self.detector.read, group, index, size, lanes)

    def write_global(self, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        """Plain writes of global memory."""
        self._global(self.detector.write, group, index, size, lanes)

    def atomic_global(self, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        """Atomic or relaxed accesses that write global memory."""
        self._global(self.detector.atomic, group, index, size, lanes)

    def _shared(self, check: Any, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        agents = group.agents if lanes is None else group.agents[lanes]
        self._check(check, self.shared_shadows[id(group)], group, agents, index, size)

    def _global(self, check: Any, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        agents = group.agents if lanes is None else group.agents[lanes]
        writable, places = self.memory.find_shadow(index)
        if writable.any():
            self._check(check, self.global_shadow, group, agents[writable], places, size)

    def _check(self, check: Any, shadow: Shadow, group: Group, agents: Index, places: Index, size: int) -> None:
        every = (places[:, None] + np.arange(size)).ravel()
        try:
            check(shadow, np.repeat(agents, size), every, group.line)
        except EmulationFault as fault:
            raise group.fault(fault.kind, fault.what) from None
