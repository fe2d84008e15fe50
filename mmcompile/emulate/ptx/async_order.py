"""Happens-before edges of asynchronous operations: work that completes through an mbarrier is an agent of its own.

PTX ISA, "Memory Consistency Model: asynchronous operations", "mbarrier" (arrive is a release, a successful wait an
acquire). A copy or a tensor core operation starts with what its issuer had seen, and only who waits for its mbarrier
sees what it did: neither its issuer nor who meets the issuer at a barrier does.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.races import Shadow

Index = npt.NDArray[np.int64]
Clock = npt.NDArray[np.int32]

WARP = 32
TENSOR_CORE = -1
"""In place of an mbarrier's address: the pipeline of tcgen05.mma and tcgen05.cp of a block."""


class AsyncOrder:
    """The asynchronous agents of a group; without a race check every method does nothing."""

    def __init__(self, g: Group, tensor_cells: int) -> None:
        self._g, self._agents = g, dict[int, int]()
        self._tensor_cells = tensor_cells
        self._tensor_shadow: Shadow | None = None

    @property
    def enabled(self) -> bool:
        """Whether the launch checks races."""
        return self._g.order is not None

    def issue(self, lane: int) -> Clock | None:
        """What the warp of ``lane`` has seen and done when it issues an operation; later accesses do not count."""
        if not self._g.order:
            return None
        detector, agent = self._g.order.detector, int(self._g.agents[lane])
        seen: Clock = detector.vectors[agent].copy()
        detector.tick([agent])
        return seen

    def start(self, block: int, address: int, seen: Clock | None) -> int:
        """The agent of the operations that complete on the mbarrier at ``address`` (or ``TENSOR_CORE``)."""
        if not self._g.order or seen is None:
            return -1
        detector = self._g.order.detector
        if address not in self._agents:
            self._agents[address] = detector.add_agents(self._g.blocks)
        agent = self._agents[address] + block
        row = detector.vectors[agent]
        np.maximum(row[: len(seen)], seen, out=row[: len(seen)])
        return agent

    def publish(self, agent: int, block: int, address: int) -> None:
        """The asynchronous ``agent`` arrives at an mbarrier."""
        if self._g.order:
            self._g.order.detector.release(agent, self._key(block, address))

    def arrive(self, lane: int, address: int) -> None:
        """The warp of ``lane`` arrives at an mbarrier: a release."""
        self.publish(int(self._g.agents[lane]), lane // self._g.threads, address)

    def wait(self, lane: int, address: int) -> None:
        """The warp of ``lane`` waited successfully: an acquire."""
        if self._g.order:
            self._g.order.detector.acquire(int(self._g.agents[lane]), self._key(lane // self._g.threads, address))

    def read_shared(self, agent: int, places: Index, size: int) -> None:
        """``agent`` reads bytes [place, place + size) of the group's shared memory."""
        if self._g.order:
            self._access("read", self._g.order.shared_shadows[id(self._g)], agent, _spread(places, size))

    def write_shared(self, agent: int, places: Index, size: int) -> None:
        """``agent`` writes bytes [place, place + size) of the group's shared memory."""
        if self._g.order:
            self._access("write", self._g.order.shared_shadows[id(self._g)], agent, _spread(places, size))

    def access_mbarriers(self, lanes: Index, places: Index) -> None:
        """The warps of ``lanes`` arrive at, or test, the mbarriers at bytes ``places`` of the group's shared memory."""
        if self._g.order:
            agents, shadow = self._g.agents[lanes].repeat(8), self._g.order.shared_shadows[id(self._g)]
            self._access("atomic", shadow, agents, _spread(places, 8))

    def read_global(self, agent: int, places: Index, size: int) -> None:
        """``agent`` reads bytes [place, place + size) of the arena."""
        if self._g.order:
            writable, shadowed = self._g.memory.find_shadow(places)
            if writable.any():
                self._access("read", self._g.order.global_shadow, agent, _spread(shadowed, size))

    def access_tensor_memory(self, agents: Index | int, cells: Index, *, write: bool) -> None:
        """``agents`` (one, or one for each cell) access cells of the group's tensor memory."""
        if not self._g.order:
            return
        if self._tensor_shadow is None:
            self._tensor_shadow = Shadow(self._tensor_cells, self._g.threads // WARP + 1, "tensor memory (cells)")
        self._access("write" if write else "read", self._tensor_shadow, agents, cells.reshape(-1))

    def _access(self, what: str, shadow: Shadow, agents: Index | int, places: Index) -> None:
        assert self._g.order
        check: Any = getattr(self._g.order.detector, what)
        try:
            check(shadow, np.broadcast_to(np.asarray(agents, np.int64), places.shape), places, self._g.line)
        except EmulationFault as fault:
            raise self._g.fault(fault.kind, fault.what) from None

    def _key(self, block: int, address: int) -> Hashable:
        return id(self._g), block, address


def _spread(places: Index, size: int) -> Index:
    return (places.reshape(-1, 1) + np.arange(size)).reshape(-1)
