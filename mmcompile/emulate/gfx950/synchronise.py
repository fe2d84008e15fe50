"""Data races of a launch: barriers, fences and synchronising accesses of gfx950, on ``races.RaceDetector``.

A write spans from its issue to the wait that guarantees it. It is recorded at the wait, so that a barrier publishes
only drained writes, and checked against the order that held when it was issued. Accesses past the cache of a compute
die (sc1) and atomics are synchronising; ``buffer_wbl2 sc1`` with ``s_waitcnt vmcnt(0)`` is the release fence,
``buffer_inv sc1`` the acquire fence (LLVM, "Memory model gfx942").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.gfx950.state import Counter, Waves
from mmcompile.emulate.gfx950.waits import defer
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.races import RaceDetector, Shadow

Array = npt.NDArray[Any]

MOST_AGENTS = 8192
"""Waves of a launch for which races on device memory are checked: the clocks take 4 bytes for each pair."""


@dataclass
class WriteTarget:
    """Where plain writes are recorded, with the values that they left.

    Waves of a program that hold copies of a value all write it: the same byte by the same instruction is no race.
    """

    detector: RaceDetector
    shadow: Shadow
    values: npt.NDArray[np.uint8]

    def write(self, agents: Array, places: Array, values: Array, line: int, per_program: int) -> None:
        """Check and record bytes. Raises EmulationFault("race")."""
        shadow = self.shadow
        same_program = shadow.write_agent[places] // per_program == agents // per_program
        repeated = same_program & (shadow.write_line[places] == line) & (self.values[places] == values)
        self.values[places] = values
        equal = self.values[places] == values
        _, first = np.unique(places, return_index=True)
        if equal.all() and len(first) < len(places):
            owners = dict(zip(places[first].tolist(), (agents[first] // per_program).tolist(), strict=True))
            others = np.array([owners[place] for place in places.tolist()]) == agents // per_program
            is_first = np.zeros(len(places), np.bool_)
            is_first[first] = True
            repeated |= others & ~is_first
        kept = ~repeated
        self.detector.write(shadow, agents[kept], places[kept], line)


class GlobalRaces:
    """The race check of device memory over all programs of a launch."""

    def __init__(self, agents: int, memory: DeviceMemory) -> None:
        self.detector = RaceDetector(agents)
        self.shadow = Shadow(memory.shadow_size, 8, "the writable buffers")
        self.values: npt.NDArray[np.uint8] = np.zeros(memory.shadow_size, np.uint8)


class Races:
    """The race check of the resident waves: their local memory, and device memory if it is checked.

    ``agents`` [waves]: the waves' numbers in the launch.
    """

    def __init__(self, w: Waves, shared: GlobalRaces | None, agents: Array) -> None:
        self.local = RaceDetector(w.count)
        self.local_shadow = Shadow(len(w.lds), w.per_program, "local memory")
        self.local_values: npt.NDArray[np.uint8] = np.zeros(len(w.lds), np.uint8)
        self.per_program = w.per_program
        self.shared, self.agents = shared, agents
        self.releasing = np.zeros(w.count, np.bool_)

    # ------------------------------------------------------------------ synchronisation

    def barrier(self, waves: Sequence[int] | Array) -> None:
        """The waves of one program leave a barrier."""
        self.local.barrier(waves)
        if self.shared is not None:
            self.shared.detector.barrier(self.agents[np.asarray(waves)])

    def request_release(self, w: Waves) -> None:
        """buffer_wbl2 sc1: a release fence once the wave has waited for it."""
        self.releasing[w.waves] = True

    def drain(self, w: Waves) -> None:
        """The selected waves have no vector memory operation outstanding."""
        if self.shared is None:
            return
        for wave in w.waves[self.releasing[w.waves]]:
            self.shared.detector.fence_release(int(self.agents[wave]))
        self.releasing[w.waves] = False

    def acquire(self, w: Waves) -> None:
        """buffer_inv sc1."""
        if self.shared is not None:
            for wave in w.waves:
                self.shared.detector.fence_acquire(int(self.agents[wave]))

    # ------------------------------------------------------------------ accesses

    def read_local(self, w: Waves, waves: Array, places: Array, size: int) -> None:
        """Plain reads of local memory by flat lanes of ``waves`` at byte ``places``."""
        self._run(w, lambda: self.local.read(self.local_shadow, *spread(waves, places, size), w.line))

    def write_local(self, w: Waves, counter: Counter, waves: Array, places: Array, values: Array, size: int) -> None:
        """Plain writes of local memory, by the operation of ``counter`` that was issued last."""
        target = WriteTarget(self.local, self.local_shadow, self.local_values)
        self._write(w, counter, target, waves, waves, (places, values, size))

    def atomic_local(self, w: Waves, waves: Array, places: Array, size: int) -> None:
        """Atomics on local memory."""
        self._run(w, lambda: self.local.atomic(self.local_shadow, *spread(waves, places, size), w.line))

    def read_global(self, w: Waves, waves: Array, index: Array, size: int, synchronising: bool) -> None:
        """Reads of device memory by flat lanes of ``waves`` at arena indices."""
        if self.shared is None:
            return
        detector, shadow = self.shared.detector, self.shared.shadow
        writable, places = w.memory.find_shadow(index)
        who = spread(self.agents[waves[writable]], places, size)
        if not synchronising:
            self._run(w, lambda: detector.read(shadow, *who, w.line))
            return
        self._run(w, lambda: detector.read_atomic(shadow, *who, w.line))
        for agent, key in list_keys(self.agents[waves], index, size):
            detector.observe_relaxed(agent, key)

    def write_global(self, w: Waves, waves: Array, index: Array, values: Array, size: int, synchronising: bool) -> None:
        """Writes of device memory, by the vector memory operation that was issued last."""
        if self.shared is None:
            return
        places = w.memory.find_shadow(index)[1]
        if not synchronising:
            target = WriteTarget(self.shared.detector, self.shared.shadow, self.shared.values)
            self._write(w, w.vm, target, waves, self.agents[waves], (places, values, size))
            return
        self._atomic(w, waves, places, size)
        for agent, key in list_keys(self.agents[waves], index, size):
            self.shared.detector.publish_relaxed(agent, key)

    def atomic_global(self, w: Waves, waves: Array, index: Array, size: int) -> None:
        """Atomics on device memory: relaxed, they both observe and publish."""
        if self.shared is None:
            return
        self._atomic(w, waves, w.memory.find_shadow(index)[1], size)
        for agent, key in list_keys(self.agents[waves], index, size):
            self.shared.detector.observe_relaxed(agent, key)
            self.shared.detector.publish_relaxed(agent, key)

    def _atomic(self, w: Waves, waves: Array, places: Array, size: int) -> None:
        assert self.shared is not None
        detector, shadow = self.shared.detector, self.shared.shadow
        self._run(w, lambda: detector.atomic(shadow, *spread(self.agents[waves], places, size), w.line))

    def _write(
        self,
        w: Waves,
        counter: Counter,
        target: WriteTarget,
        waves: Array,
        agents: Array,
        what: tuple[Array, Array, int],
    ) -> None:
        """Record a write when it is performed, checked with the clocks of its issue. ``what``: places, values, size."""
        issuers = np.unique(agents)
        vectors, line = target.detector.vectors, w.line
        before = vectors[issuers].copy()
        places, values, size = what
        raw = np.ascontiguousarray(values).view(np.uint8)[:, :size]

        def record(chosen: Array | None) -> None:
            pick = slice(None) if chosen is None else chosen
            now, then = vectors[issuers].copy(), before.copy()
            own = np.arange(len(issuers)), issuers
            then[own] = now[own]
            vectors[issuers] = then
            try:
                target.write(*spread(agents[pick], places[pick], size), raw[pick].reshape(-1), line, self.per_program)
            finally:
                vectors[issuers] = now

        defer(w, counter, waves, record)

    @staticmethod
    def _run(w: Waves, check: Callable[[], None]) -> None:
        try:
            check()
        except EmulationFault as fault:
            raise w.fault(fault.kind, fault.what) from fault


def spread(agents: Array, places: Array, size: int) -> tuple[Array, Array]:
    """Accesses of ``size`` bytes as bytes: agents and places, flat."""
    return np.repeat(agents, size), (places[:, None] + np.arange(size)).reshape(-1)


def list_keys(agents: Array, index: Array, size: int) -> list[tuple[int, int]]:
    """Distinct pairs of agent and address of a dword."""
    keys = (index[:, None] + np.arange(0, max(size, 4), 4)).reshape(-1) >> 2
    pairs = np.unique(np.stack([np.repeat(agents, len(keys) // max(len(agents), 1)), keys], axis=1), axis=0)
    return [(int(agent), int(key)) for agent, key in pairs]
