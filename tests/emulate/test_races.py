"""The race detector: ordered accesses are silent, the same ones without their edge are found."""

from __future__ import annotations

import numpy as np
import pytest

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.races import RaceDetector, Shadow


def at(*places: int) -> np.ndarray:
    return np.array(places, np.int64)


@pytest.fixture
def detector() -> RaceDetector:
    return RaceDetector(4)


@pytest.fixture
def shadow() -> Shadow:
    return Shadow(16, 4, "shared memory")


def test_one_agent_is_ordered_with_itself(detector: RaceDetector, shadow: Shadow) -> None:
    detector.write(shadow, at(0), at(3), 1)
    detector.read(shadow, at(0), at(3), 2)
    detector.write(shadow, at(0), at(3), 3)


def test_read_after_write_needs_a_barrier(detector: RaceDetector, shadow: Shadow) -> None:
    detector.write(shadow, at(0), at(3), 7)
    with pytest.raises(EmulationFault, match=r"read of byte 3 of shared memory by warp 1 .* write by warp 0 at line 7"):
        detector.read(shadow, at(1), at(3), 9)
    detector.barrier([0, 1])
    detector.read(shadow, at(1), at(3), 9)


def test_write_after_read_needs_a_barrier(detector: RaceDetector, shadow: Shadow) -> None:
    detector.read(shadow, at(0, 1, 2), at(5, 5, 5), 1)
    detector.barrier([0, 1])
    with pytest.raises(EmulationFault, match="read by warp 2"):
        detector.write(shadow, at(1), at(5), 2)
    detector.barrier([1, 2])
    detector.write(shadow, at(1), at(5), 2)


def test_two_agents_write_one_byte_at_once(detector: RaceDetector, shadow: Shadow) -> None:
    with pytest.raises(EmulationFault, match="race"):
        detector.write(shadow, at(0, 1), at(4, 4), 1)
    detector.write(shadow, at(0, 1), at(8, 9), 1)


def test_accesses_after_a_barrier_are_new(detector: RaceDetector, shadow: Shadow) -> None:
    detector.barrier([0, 1])
    detector.write(shadow, at(0), at(0), 1)
    with pytest.raises(EmulationFault, match="race"):
        detector.read(shadow, at(1), at(0), 2)


def test_release_and_acquire_order_and_are_transitive(detector: RaceDetector, shadow: Shadow) -> None:
    detector.write(shadow, at(0), at(0), 1)
    detector.release(0, "flag")
    detector.acquire(1, "flag")
    detector.read(shadow, at(1), at(0), 2)
    detector.release(1, "next")
    detector.acquire(2, "next")
    detector.read(shadow, at(2), at(0), 3)
    with pytest.raises(EmulationFault, match="race"):
        detector.read(shadow, at(3), at(0), 3)


def test_a_release_covers_nothing_after_it(detector: RaceDetector, shadow: Shadow) -> None:
    detector.release(0, "flag")
    detector.write(shadow, at(0), at(0), 1)
    detector.acquire(1, "flag")
    with pytest.raises(EmulationFault, match="race"):
        detector.read(shadow, at(1), at(0), 2)


def test_relaxed_accesses_order_only_with_fences(detector: RaceDetector, shadow: Shadow) -> None:
    detector.write(shadow, at(0), at(0), 1)
    detector.publish_relaxed(0, "flag")
    detector.observe_relaxed(1, "flag")
    detector.fence(1)
    with pytest.raises(EmulationFault, match="race"):
        detector.read(shadow, at(1), at(0), 2)
    detector.fence(0)
    detector.publish_relaxed(0, "flag")
    detector.observe_relaxed(2, "flag")
    with pytest.raises(EmulationFault, match="race"):
        detector.read(shadow, at(2), at(0), 3)
    detector.fence(2)
    detector.read(shadow, at(2), at(0), 3)


def test_fences_of_one_direction(detector: RaceDetector, shadow: Shadow) -> None:
    """gfx950: buffer_wbl2 releases, buffer_inv acquires; neither does the other's work."""
    detector.write(shadow, at(0), at(0), 1)
    for first, second in ((detector.fence_acquire, detector.fence_acquire), (detector.fence_release, lambda agent: 0),
                          (detector.fence_release, detector.fence_release)):  # fmt: skip
        first(0)
        detector.publish_relaxed(0, "flag")
        detector.observe_relaxed(1, "flag")
        second(1)
        with pytest.raises(EmulationFault, match="race"):
            detector.read(shadow, at(1), at(0), 2)
    detector.fence_acquire(1)
    detector.read(shadow, at(1), at(0), 2)


def test_atomics_are_ordered_among_themselves_only(detector: RaceDetector, shadow: Shadow) -> None:
    detector.atomic(shadow, at(0, 1), at(0, 0), 1)
    detector.atomic(shadow, at(2), at(0), 1)
    with pytest.raises(EmulationFault, match="atomic"):
        detector.write(shadow, at(3), at(0), 2)


def test_agents_can_be_added(detector: RaceDetector, shadow: Shadow) -> None:
    """What was published, fenced and seen before counts for them and through them; they start unordered."""
    detector.write(shadow, at(0), at(0), 1)
    detector.fence(0)
    detector.release(0, "flag")
    detector.publish_relaxed(0, "relaxed")
    detector.observe_relaxed(1, "relaxed")
    before = len(detector.vectors)
    new = detector.add_agents(2)
    assert new == before and len(detector.vectors) == before + 2
    with pytest.raises(EmulationFault, match="race"):
        detector.read(shadow, at(new), at(0), 2)
    detector.acquire(new, "flag")
    detector.read(shadow, at(new), at(0), 2)
    detector.write(shadow, at(new), at(1), 3)
    detector.fence(1)
    detector.read(shadow, at(1), at(0), 4)
    with pytest.raises(EmulationFault, match=f"write by warp {new} at line 3"):
        detector.read(shadow, at(new + 1), at(1), 4)


def test_fewer_slots_than_agents_still_find_the_latest_reader() -> None:
    detector, shadow = RaceDetector(4), Shadow(4, 2, "global memory")
    detector.read(shadow, at(0), at(0), 1)
    detector.read(shadow, at(2), at(0), 1)
    detector.barrier([0, 1])
    with pytest.raises(EmulationFault, match="read by warp 2"):
        detector.write(shadow, at(1), at(0), 2)
