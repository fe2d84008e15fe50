"""mbarrier objects: arrivals, transaction counts, phases; and the asynchronous work that completes through them.

PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier", "Phase of the mbarrier object",
"Tracking asynchronous operations by the mbarrier object"; "tcgen05.commit" and "tcgen05 memory consistency model" for
the tensor core's pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmcompile.emulate.faults import EmulationFault

Key = tuple[int, int]
"""Block of the group, and shared address of the mbarrier."""
Work = Callable[[], None]

_MOST_ARRIVALS = (1 << 20) - 1
_MOST_BYTES = (1 << 20) - 1


@dataclass
class Mbarrier:
    """The state of one mbarrier object.

    Attributes: expected: arrivals of a phase. pending: arrivals still missing in this phase. transactions: bytes
        (tx-count) still missing in this phase. phase: number of completed phases.
    """

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0

    def settle(self) -> None:
        """Complete the phase if nothing is missing."""
        if self.pending == 0 and self.transactions == 0:
            self.pending = self.expected
            self.phase += 1


class Mbarriers:
    """All mbarriers of a group of blocks, and the work whose completion they signal.

    Bulk copies are tracked one by one (``track``); operations of the tensor core complete in the order of their
    issue (``enqueue``). In late mode work is performed at the second failing wait for its mbarrier.
    """

    def __init__(self, late: bool) -> None:
        self._late = late
        self._barriers: dict[Key, Mbarrier] = {}
        self._tracked: dict[Key, list[Work]] = {}
        self._pipelines: dict[int, list[tuple[Work, Key | None]]] = {}
        self._asked: set[Key] = set()

    # ------------------------------------------------------------------ the objects

    def initialise(self, key: Key, count: int) -> None:
        """mbarrier.init. Raises EmulationFault: count out of range, or work pending on the place."""
        if not 1 <= count <= _MOST_ARRIVALS:
            raise EmulationFault("illegal", f"mbarrier.init with a count of {count}")
        self._refuse_pending(key, "initialised")
        self._barriers[key] = Mbarrier(count, count)

    def invalidate(self, key: Key) -> None:
        """mbarrier.inval. Raises EmulationFault: not initialised, or work pending on it."""
        self.find(key)
        self._refuse_pending(key, "invalidated")
        del self._barriers[key]

    def find(self, key: Key) -> Mbarrier:
        """The object. Raises EmulationFault("uninitialised")."""
        barrier = self._barriers.get(key)
        if barrier is None:
            raise EmulationFault("uninitialised", f"there is no mbarrier at shared address {key[1]} (no mbarrier.init)")
        return barrier

    def arrive(self, key: Key, count: int = 1, *, expect_bytes: int = 0, drop: bool = False) -> int:
        """mbarrier.arrive{.expect_tx}, arrive_drop; returns the phase before (the state token).

        Raises EmulationFault("illegal"): more arrivals than the phase misses.
        """
        barrier = self.find(key)
        token = barrier.phase
        self._add_bytes(barrier, expect_bytes)
        if count < 1 or count > barrier.pending:
            raise EmulationFault(
                "illegal", f"{count} arrivals at the mbarrier at {key[1]}, which misses {barrier.pending} in this phase"
            )
        barrier.pending -= count
        barrier.expected -= count if drop else 0
        barrier.settle()
        return token

    def expect(self, key: Key, size: int) -> None:
        """mbarrier.expect_tx: ``size`` more bytes are missing in this phase."""
        barrier = self.find(key)
        self._add_bytes(barrier, size)
        barrier.settle()

    def complete(self, key: Key, size: int) -> None:
        """complete_tx: ``size`` bytes arrived."""
        self.expect(key, -size)

    def add_pending(self, key: Key) -> None:
        """One more arrival is missing in this phase (cp.async.mbarrier.arrive without .noinc)."""
        self.find(key).pending += 1

    def test(self, key: Key, phase: int) -> bool:
        """Whether the phase with the parity of ``phase`` completed (test_wait, try_wait).

        In late mode the second failing test performs the work that the phase waits for.
        """
        barrier = self.find(key)
        if self._late and (barrier.phase ^ phase) & 1 == 0:
            if key in self._asked:
                self._asked.discard(key)
                self._perform(key)
            else:
                self._asked.add(key)
        return (barrier.phase ^ phase) & 1 == 1

    @staticmethod
    def _add_bytes(barrier: Mbarrier, size: int) -> None:
        barrier.transactions += size
        if abs(barrier.transactions) > _MOST_BYTES:
            raise EmulationFault("illegal", f"mbarrier transaction count of {barrier.transactions} bytes")

    # ------------------------------------------------------------------ the work

    def track(self, key: Key, work: Work) -> None:
        """Work that signals the mbarrier ``key``: now, or in late mode when the mbarrier is waited for."""
        self.find(key)
        if self._late:
            self._tracked.setdefault(key, []).append(work)
        else:
            work()

    def enqueue(self, block: int, work: Work, key: Key | None = None) -> None:
        """Work of the tensor core of ``block``; with ``key`` a commit that arrives at that mbarrier."""
        if key is not None:
            self.find(key)
        if self._late:
            self._pipelines.setdefault(block, []).append((work, key))
        else:
            work()

    def has_pipeline_work(self, block: int) -> bool:
        """Whether tensor core operations of the block are pending."""
        return bool(self._pipelines.get(block))

    def list_pending(self) -> list[str]:
        """What was issued and never waited for, one phrase each."""
        found = [f"{len(work)} copies on the mbarrier at {key[1]}" for key, work in self._tracked.items() if work]
        found += [f"{len(queue)} tensor core operations" for queue in self._pipelines.values() if queue]
        return found

    def _perform(self, key: Key) -> None:
        for work in self._tracked.pop(key, []):
            work()
        queue = self._pipelines.get(key[0], [])
        if any(commit == key for _, commit in queue):
            commit = None
            while commit != key:
                work, commit = queue.pop(0)
                work()

    def _refuse_pending(self, key: Key, what: str) -> None:
        if self._tracked.get(key) or any(commit == key for _, commit in self._pipelines.get(key[0], [])):
            raise EmulationFault("in flight", f"the mbarrier at {key[1]} is {what} while operations are pending on it")
