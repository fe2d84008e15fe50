"""Data races by vector clocks (FastTrack, Flanagan and Freund 2009) over barriers, fences, atomics and mbarriers.

The agents are warps (waves): lanes of one warp are taken as ordered. An agent's own clock counts its release
operations. An access is ordered before the present one if the present agent's vector holds at least its clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault

Clock = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]


class Shadow:
    """The latest accesses of each byte of a memory.

    For every byte the last plain write, the last atomic, and the last read of each of ``slots`` groups of agents.
    With as many slots as agents that can touch the memory (shared memory: warps of the block) the check is exact;
    with fewer, a read may hide an older one of an agent of the same group.
    """

    def __init__(self, size: int, slots: int, name: str) -> None:
        self.name, self.slots = name, slots
        self.write_agent, self.write_clock, self.write_line = (np.zeros(size, np.int32) for _ in range(3))
        self.atomic_agent, self.atomic_clock, self.atomic_line = (np.zeros(size, np.int32) for _ in range(3))
        self.read_agent, self.read_clock, self.read_line = (np.zeros((slots, size), np.int32) for _ in range(3))


class RaceDetector:
    """Vector clocks of the agents of one launch and the checks of their accesses.

    Typical use: ``barrier`` when a block's barrier completes, ``release``/``acquire`` with a key (the address of the
    flag, or of the mbarrier) for synchronising accesses, ``read``/``write``/``atomic`` for the data.
    """

    def __init__(self, agents: int) -> None:
        self.vectors: Clock = np.zeros((agents, agents), np.int32)
        np.fill_diagonal(self.vectors, 1)
        self._published: dict[Hashable, Clock] = {}
        self._fenced: dict[int, Clock] = {}
        self._seen: dict[int, Clock] = {}

    def add_agents(self, count: int) -> int:
        """Add ``count`` agents that have seen nothing (asynchronous units); returns the number of the first."""
        first = len(self.vectors)
        self.vectors = np.pad(self.vectors, (0, count))
        own = np.arange(first, first + count)
        self.vectors[own, own] = 1
        self._published = {key: np.pad(clock, (0, count)) for key, clock in self._published.items()}
        self._fenced = {agent: np.pad(clock, (0, count)) for agent, clock in self._fenced.items()}
        self._seen = {agent: np.pad(clock, (0, count)) for agent, clock in self._seen.items()}
        return first

    # ------------------------------------------------------------------ synchronisation

    def barrier(self, agents: Sequence[int] | Index) -> None:
        """All ``agents`` arrived and go on: each has seen what the others did."""
        rows = np.asarray(agents, np.int64)
        self.vectors[rows] = self.vectors[rows].max(axis=0)
        self.tick(rows)

    def tick(self, agents: Sequence[int] | Index) -> None:
        """Start a new epoch of the agents: what they do from here on is not covered by what they published."""
        rows = np.asarray(agents, np.int64)
        self.vectors[rows, rows] += 1

    def release(self, agent: int, key: Hashable) -> None:
        """Publish everything that ``agent`` did and has seen under ``key`` (store-release, mbarrier arrive)."""
        self._publish(key, self.vectors[agent].copy())
        self.tick([agent])

    def acquire(self, agent: int, key: Hashable) -> None:
        """See everything that was published under ``key`` (load-acquire, a successful mbarrier wait)."""
        if key in self._published:
            np.maximum(self.vectors[agent], self._published[key], out=self.vectors[agent])

    def fence(self, agent: int) -> None:
        """A fence in both directions."""
        self.fence_acquire(agent)
        self.fence_release(agent)

    def fence_release(self, agent: int) -> None:
        """What the agent did so far is published by its later relaxed accesses (``publish_relaxed``)."""
        self._fenced[agent] = self.vectors[agent].copy()
        self.tick([agent])

    def fence_acquire(self, agent: int) -> None:
        """What the agent's earlier relaxed accesses saw (``observe_relaxed``) is ordered before its later accesses."""
        if agent in self._seen:
            np.maximum(self.vectors[agent], self._seen.pop(agent), out=self.vectors[agent])

    def publish_relaxed(self, agent: int, key: Hashable) -> None:
        """A relaxed (or volatile) store or atomic: publishes what the agent's last fence covers."""
        if agent in self._fenced:
            self._publish(key, self._fenced[agent])

    def observe_relaxed(self, agent: int, key: Hashable) -> None:
        """A relaxed (or volatile) load or atomic: what it read counts from the agent's next fence on."""
        if key in self._published:
            seen = self._published[key]
            self._seen[agent] = np.maximum(self._seen[agent], seen) if agent in self._seen else seen.copy()

    def _publish(self, key: Hashable, snapshot: Clock) -> None:
        before = self._published.get(key)
        self._published[key] = snapshot if before is None else np.maximum(before, snapshot)

    # ------------------------------------------------------------------ accesses

    def read(self, shadow: Shadow, agents: Index, places: Index, line: int) -> None:
        """Plain reads: ``agents[i]`` (agent) reads byte ``places[i]``. Raises EmulationFault("race")."""
        self._check(shadow, agents, places, line, "read", (shadow.write_agent, shadow.write_clock, shadow.write_line))
        self._check(
            shadow, agents, places, line, "read", (shadow.atomic_agent, shadow.atomic_clock, shadow.atomic_line)
        )
        slot = agents % shadow.slots
        shadow.read_agent[slot, places] = agents
        shadow.read_clock[slot, places] = self.vectors[agents, agents]
        shadow.read_line[slot, places] = line

    def read_atomic(self, shadow: Shadow, agents: Index, places: Index, line: int) -> None:
        """Atomic, relaxed or volatile reads: they must be ordered after plain writes, and need no order otherwise.

        They are not recorded: a plain write that is not ordered after them is not found.
        """
        before = shadow.write_agent, shadow.write_clock, shadow.write_line
        self._check(shadow, agents, places, line, "atomic read", before)

    def write(self, shadow: Shadow, agents: Index, places: Index, line: int) -> None:
        """Plain writes. Raises EmulationFault("race"), also for two agents within this call on one byte."""
        self._check_all(shadow, agents, places, line, "write", atomics=True)
        shadow.write_agent[places] = agents
        if (shadow.write_agent[places] != agents).any():
            other = int(np.flatnonzero(shadow.write_agent[places] != agents)[0])
            self._report(shadow, int(places[other]), int(agents[other]), line, "write", "write", -1, line)
        shadow.write_clock[places] = self.vectors[agents, agents]
        shadow.write_line[places] = line

    def atomic(self, shadow: Shadow, agents: Index, places: Index, line: int) -> None:
        """Atomic accesses: ordered among themselves, but not with plain ones."""
        self._check_all(shadow, agents, places, line, "atomic", atomics=False)
        shadow.atomic_agent[places] = agents
        shadow.atomic_clock[places] = self.vectors[agents, agents]
        shadow.atomic_line[places] = line

    def _check_all(
        self, shadow: Shadow, agents: Index, places: Index, line: int, what: str, *, atomics: bool
    ) -> None:
        self._check(shadow, agents, places, line, what, (shadow.write_agent, shadow.write_clock, shadow.write_line))
        if atomics:
            before = shadow.atomic_agent, shadow.atomic_clock, shadow.atomic_line
            self._check(shadow, agents, places, line, what, before, "atomic")
        for slot in range(shadow.slots):
            reads = shadow.read_agent[slot], shadow.read_clock[slot], shadow.read_line[slot]
            self._check(shadow, agents, places, line, what, reads, "read")

    def _check(
        self,
        shadow: Shadow,
        agents: Index,
        places: Index,
        line: int,
        what: str,
        before: tuple[Clock, Clock, Clock],
        kind: str = "write",
    ) -> None:
        other, clock = before[0][places], before[1][places]
        unordered = clock > self.vectors[agents, other]
        if unordered.any():
            i = int(np.flatnonzero(unordered)[0])
            place = int(places[i])
            self._report(shadow, place, int(agents[i]), line, what, kind, int(other[i]), int(before[2][place]))

    def _report(
        self, shadow: Shadow, place: int, agent: int, line: int, what: str, kind: str, other: int, other_line: int
    ) -> None:
        who = f"warp {other}" if other >= 0 else "another warp"
        raise EmulationFault(
            "race",
            f"{what} of byte {place} of {shadow.name} by warp {agent} is not ordered after the {kind} by {who} "
            f"at line {other_line}",
            line,
        )
