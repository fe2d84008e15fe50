"""Happens-before edges of PTX for the race check: which accesses, barriers, fences and atomics order what.

PTX ISA, Memory Consistency Model; the vector clocks are those of ``mmcompile.emulate.races``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.races import RaceDetector, Shadow

if TYPE_CHECKING:
    from mmcompile.emulate.ptx.group import Group

Index = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
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

    def write_shared(
        self, group: Group, index: Index, size: int, lanes: Index | None, values: Bytes | None = None
    ) -> None:
        """Plain writes of shared memory; of those with ``values`` [lanes, size] the ones that change nothing are left
        out: several warps may write the same."""
        agents = group.agents if lanes is None else group.agents[lanes]
        places, writers = _spread(index, size), np.repeat(agents, size)
        if values is not None:
            kept = _find_changes(places, values.reshape(-1), group.shared, group.shared_known)
            places, writers = places[kept], writers[kept]
        self._run(self.detector.write, self.shared_shadows[id(group)], group, writers, places)

    def read_global(self, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        """Plain reads of global memory."""
        self._global(self.detector.read, group, index, size, lanes)

    def write_global(
        self, group: Group, index: Index, size: int, lanes: Index | None, values: Bytes | None = None
    ) -> None:
        """Plain writes of global memory, like those of shared memory."""
        agents = group.agents if lanes is None else group.agents[lanes]
        places, writers = _spread(index, size), np.repeat(agents, size)
        if values is not None:
            kept = _find_changes(places, values.reshape(-1), self.memory.data, self.memory.known)
            places, writers = places[kept], writers[kept]
        _, shadowed = self.memory.find_shadow(places)
        self._run(self.detector.write, self.global_shadow, group, writers, shadowed)

    def load_ordered(
        self, group: Group, space: str, index: Index, size: int, lanes: Index | None, ordering: str
    ) -> None:
        """A relaxed, volatile or acquire load: it may see what was published at its address."""
        self._access(self.detector.read_atomic, group, space, index, size, lanes)
        see = self.detector.acquire if ordering == "acquire" else self.detector.observe_relaxed
        for agent, key in self._list_keys(group, space, index, lanes):
            see(agent, key)

    def store_ordered(
        self, group: Group, space: str, index: Index, size: int, lanes: Index | None, ordering: str
    ) -> None:
        """A relaxed, volatile or release store: it publishes at its address."""
        self._access(self.detector.atomic, group, space, index, size, lanes)
        self._mark_known(group, space, index, size)
        publish = self.detector.release if ordering == "release" else self.detector.publish_relaxed
        for agent, key in self._list_keys(group, space, index, lanes):
            publish(agent, key)

    def modify(self, group: Group, space: str, index: Index, size: int, lanes: Index | None, ordering: str) -> None:
        """An atomic read-modify-write; lanes in order, each sees what those before it published."""
        self._access(self.detector.atomic, group, space, index, size, lanes)
        acquires, releases = ordering in ("acquire", "acq_rel"), ordering in ("release", "acq_rel")
        detector = self.detector
        for agent, key in self._list_keys(group, space, index, lanes):
            (detector.acquire if acquires else detector.observe_relaxed)(agent, key)
            (detector.release if releases else detector.publish_relaxed)(agent, key)

    def fence(self, group: Group, lanes: Index) -> None:
        """fence.acq_rel, fence.sc or membar of the lanes' warps."""
        for agent in np.unique(group.agents[lanes]):
            self.detector.fence(int(agent))

    # ------------------------------------------------------------------ barriers

    def arrive_at_barrier(self, group: Group, number: int, lanes: npt.NDArray[np.bool_]) -> None:
        """bar.arrive: publish to those who wait at the barrier."""
        for agent in np.unique(group.agents[lanes]):
            self.detector.release(int(agent), self._barrier_key(group, int(agent), number))

    def complete_barrier(self, group: Group, number: int, lanes: npt.NDArray[np.bool_]) -> None:
        """The warps of ``lanes`` waited at the barrier, which is complete now: each has seen what the others did."""
        for block in np.unique(np.flatnonzero(lanes) // group.threads):
            part = slice(block * group.threads, (block + 1) * group.threads)
            agents = np.unique(group.agents[part][lanes[part]])
            for agent in agents:
                self.detector.acquire(int(agent), self._barrier_key(group, int(agent), number))
            self.detector.barrier(agents)

    def _barrier_key(self, group: Group, agent: int, number: int) -> Hashable:
        return "barrier", agent // (group.threads // 32), number

    def _list_keys(self, group: Group, space: str, index: Index, lanes: Index | None) -> list[tuple[int, Hashable]]:
        """Warp and address of each access, without repetition."""
        agents = group.agents if lanes is None else group.agents[lanes]
        owner = id(group) if space == "shared" else 0
        pairs = dict.fromkeys(zip(agents.tolist(), index.tolist(), strict=True))
        return [(agent, (space, owner, place)) for agent, place in pairs]

    def _access(self, check: Any, group: Group, space: str, index: Index, size: int, lanes: Index | None) -> None:
        (self._shared if space == "shared" else self._global)(check, group, index, size, lanes)

    def _mark_known(self, group: Group, space: str, index: Index, size: int) -> None:
        known = group.shared_known if space == "shared" else group.memory.known
        known[index[:, None] + np.arange(size)] = True

    def _shared(self, check: Any, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        agents = group.agents if lanes is None else group.agents[lanes]
        self._check(check, self.shared_shadows[id(group)], group, agents, index, size)

    def _global(self, check: Any, group: Group, index: Index, size: int, lanes: Index | None) -> None:
        agents = group.agents if lanes is None else group.agents[lanes]
        writable, places = self.memory.find_shadow(index)
        if writable.any():
            self._check(check, self.global_shadow, group, agents[writable], places, size)

    def _check(self, check: Any, shadow: Shadow, group: Group, agents: Index, places: Index, size: int) -> None:
        self._run(check, shadow, group, np.repeat(agents, size), _spread(places, size))

    def _run(self, check: Any, shadow: Shadow, group: Group, agents: Index, places: Index) -> None:
        try:
            check(shadow, agents, places, group.line)
        except EmulationFault as fault:
            raise group.fault(fault.kind, fault.what) from None


def _spread(index: Index, size: int) -> Index:
    """Every byte of accesses of ``size`` bytes."""
    places: Index = (index[:, None] + np.arange(size)).ravel()
    return places


def _find_changes(places: Index, values: Bytes, memory: Bytes, known: npt.NDArray[np.bool_]) -> Index:
    """Positions of the writes to be checked: not those of a value that is there, or that an earlier one writes."""
    different = np.flatnonzero((memory[places] != values) | ~known[places])
    _, first, inverse = np.unique(places[different], return_index=True, return_inverse=True)
    kept = values[different] != values[different][first][inverse]
    kept[first] = True
    changed: Index = different[kept]
    return changed
