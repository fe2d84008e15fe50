"""The static proof of mono-decode schedules: what it accepts, and every planted fault that it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.core.errors import LoweringError
from mmcompile.core.plan import KernelLaunch, Stage
from mmcompile.core.schedule import (
    ARGUMENTS,
    WAITS,
    Access,
    Placed,
    build_table,
    choose_waits,
    find_conflicts,
    list_targets,
    place_stages,
    prove_schedule,
    refuse_clobbered,
)

RECORD = KernelLaunch(kernel="k", grid=(1, 1, 1), arguments=())


def place(tiles: list[int], programs: int, replicated: frozenset[int] = frozenset()) -> list[Placed]:
    stages = [Stage(launch=i, record=RECORD, body=0, replicated=i in replicated) for i in range(len(tiles))]
    return place_stages(stages, [f"s{i}" for i in range(len(tiles))], [(n, 1, 1) for n in tiles], {}, programs)


def chain(count: int) -> list[list[Access]]:
    """Stage i reads what stage i - 1 wrote, in two alternating places."""
    spots = [Access("arena", 64 * i, 64 * i + 64, False) for i in range(2)]
    return [
        [Access("arena", spots[i % 2].start, spots[i % 2].end, True), *([spots[(i + 1) % 2]] if i else [])]
        for i in range(count)
    ]


def stages_with(waits: list[list[int]]) -> list[Stage]:
    return [Stage(launch=i, record=RECORD, body=0, waits=tuple(w)) for i, w in enumerate(waits)]


def prove(placed: list[Placed], waits: list[list[int]], conflicts: list[list[int]], resident: int = 99) -> None:
    prove_schedule(placed, waits, list_targets(placed, stages_with(waits)), conflicts, resident)


def test_tiles_go_round_and_bases_follow_one_another() -> None:
    placed = place([3, 4, 9], programs=5)
    assert [p.base for p in placed] == [0, 3, 2]
    assert placed[0].programs.tolist() == [True, True, True, False, False]
    assert placed[1].programs.tolist() == [True, True, False, True, True]
    assert placed[2].arrivals == 5 and placed[2].tiles == 9


def test_a_chain_waits_for_the_stage_before_only() -> None:
    placed, conflicts = place([7, 7, 7, 7], 4), find_conflicts(chain(4))
    assert conflicts == [[], [0], [1, 0], [2, 1, 0]]
    waits = choose_waits(placed, conflicts)
    assert waits == [[], [0], [1], [2]]
    prove(placed, waits, conflicts)


def test_work_of_one_program_needs_no_wait() -> None:
    placed = place([1, 0, 1], programs=1)
    conflicts = find_conflicts([*chain(1), [], *chain(1)])
    assert choose_waits(placed, conflicts) == [[], [], []]


def test_a_replicated_reader_holds_back_whoever_reuses_its_input() -> None:
    """Stage 0 writes x on one program; all read it (replicated); stage 2 does not touch x, stage 3 rewrites it."""
    x = Access("arena", 0, 64, True)
    accesses = [[x], [Access("arena", 0, 64, False)], [Access("arena", 64, 128, True)], [x]]
    placed, conflicts = place([1, 1, 2, 1], 4, frozenset({1})), find_conflicts(accesses)
    waits = choose_waits(placed, conflicts)
    assert waits[1] == [0] and waits[3] == [1]
    prove(placed, waits, conflicts)
    with pytest.raises(LoweringError, match=r"stage 3 \(s3\) may start before stage 1 \(s1\)"):
        prove(placed, [w if i != 3 else [2] for i, w in enumerate(waits)], conflicts)


def test_knowledge_travels_through_other_stages() -> None:
    """Stage 2 waits for stage 1 alone, whose programs waited for stage 0."""
    shared = [Access("a", 0, 1, True)], [Access("a", 0, 1, False), Access("b", 0, 1, True)]
    accesses = [*shared, [Access("a", 0, 1, False), Access("b", 0, 1, False)]]
    placed, conflicts = place([2, 3, 4], 8), find_conflicts(accesses)
    assert choose_waits(placed, conflicts) == [[], [0], [1]]


@pytest.mark.parametrize("planted", ["dropped", "forward", "itself", "threshold", "resident", "many"])
def test_planted_faults_are_refused_and_name_the_stages(planted: str) -> None:
    placed, conflicts = place([6, 6, 6], 4), find_conflicts(chain(3))
    waits = [list(w) for w in choose_waits(placed, conflicts)]
    targets = list_targets(placed, stages_with(waits))
    resident = 4
    if planted == "dropped":
        waits[2], match = [], r"stage 2 \(s2\) may start before stage 1 \(s1\)"
    elif planted == "forward":
        waits[1], match = [2], r"stage 1 \(s1\) waits for stage 2 \(s2\)"
    elif planted == "itself":
        waits[1], match = [1], r"stage 1 \(s1\) waits for stage 1 \(s1\)"
    elif planted == "threshold":
        targets[1], match = targets[1] + 1, r"waits for 5 arrivals at stage 1 \(s1\), which gets 4"
    elif planted == "resident":
        resident, match = 3, "4 programs .* 3 are"
    else:
        waits[2], match = [1, 0, 1, 0, 1], "waits for 5 stages"
    with pytest.raises(LoweringError, match=match):
        prove_schedule(placed, waits, targets, conflicts, resident)


def named(name: str, start: int, size: int, writes: bool) -> list[Access]:
    return [Access("arena", start, start + size, writes, name)]


def test_a_buffer_is_reused_after_its_last_reader() -> None:
    """a is written, read, then b takes its place; the work space w is written twice, and read as if it were written."""
    right = [named("a", 0, 64, True), named("a", 0, 64, False), named("b", 32, 64, True), named("b", 32, 64, False),
             named("w", 0, 8, True), named("w", 0, 8, True)]  # fmt: skip
    names = [f"s{i}" for i in range(len(right))]
    refuse_clobbered(right, names)
    refuse_clobbered([[*named("in", 0, 8, False), *named("out", 8, 8, True)], named("out", 8, 8, False)], names)
    with pytest.raises(LoweringError, match=r"stage 0 \(s0\) writes .*: in and out overlap"):
        refuse_clobbered([[*named("in", 0, 8, False), *named("out", 7, 8, True)]], names)


@pytest.mark.parametrize("writes", [False, True])
def test_a_buffer_overwritten_before_its_last_reader_is_refused(writes: bool) -> None:
    wrong = [named("a", 0, 64, True), named("b", 63, 64, True), named("a", 0, 64, writes)]
    with pytest.raises(LoweringError, match=r"stage 2 \(z\) finds b, which stage 1 \(y\) wrote, where it expects a"):
        refuse_clobbered(wrong, ["x", "y", "z"])
    foreign = [named("b", 0, 64, True), named("input", 0, 4, False)]
    with pytest.raises(LoweringError, match="finds b, .* where it expects input"):
        refuse_clobbered(foreign, ["x", "y"])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Placed], list[list[int]]]:
    count, programs = draw(st.integers(2, 8)), draw(st.integers(1, 6))
    tiles = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    access = st.builds(
        lambda space, start, size, writes: Access(space, start, start + size, writes),
        st.sampled_from(["arena", "cache"]), st.integers(0, 6), st.integers(1, 3), st.booleans(),
    )  # fmt: skip
    accesses = draw(st.lists(st.lists(access, max_size=3), min_size=count, max_size=count))
    replicated = frozenset(draw(st.sets(st.integers(0, count - 1))))
    return place(tiles, programs, replicated), find_conflicts(accesses)


def run_late(placed: list[Placed], waits: list[list[int]], conflicts: list[list[int]], late: int) -> bool:
    """Whether some order keeps the rule when program ``late`` moves only if nobody else can: a direct simulation."""
    programs = len(placed[0].programs)
    at, done = [0] * programs, [set() for _ in placed]
    while any(a < len(placed) for a in at):
        order = [p for p in range(programs) if p != late] + [late]
        for p in order:
            if at[p] == len(placed):
                continue
            stage = placed[at[p]]
            if stage.programs[p]:
                if any(len(done[w]) < placed[w].arrivals for w in waits[at[p]]):
                    continue
                for earlier in conflicts[at[p]]:
                    if not set(np.flatnonzero(placed[earlier].programs)) - {p} <= done[earlier]:
                        return False
                done[at[p]].add(p)
            at[p] += 1
            break
        else:
            raise AssertionError("the schedule hangs")
    return True


@given(schedules())
def test_chosen_waits_pass_the_proof_and_hold_in_every_lopsided_order(
    drawn: tuple[list[Placed], list[list[int]]],
) -> None:
    placed, conflicts = drawn
    waits = choose_waits(placed, conflicts)
    if max(map(len, waits)) <= 4:
        prove(placed, waits, conflicts)
    for late in range(len(placed[0].programs)):
        assert run_late(placed, waits, conflicts, late)


@given(schedules(), st.data())
def test_what_the_proof_accepts_holds_without_a_wait_too(
    drawn: tuple[list[Placed], list[list[int]]], data: st.DataObject
) -> None:
    placed, conflicts = drawn
    waits = [list(w) for w in choose_waits(placed, conflicts)]
    places = [(i, w) for i, chosen in enumerate(waits) for w in chosen]
    if not places or max(map(len, waits)) > 4:
        return
    stage, dropped = data.draw(st.sampled_from(places))
    waits[stage].remove(dropped)
    try:
        prove(placed, waits, conflicts)
    except LoweringError:
        return
    for late in range(len(placed[0].programs)):
        assert run_late(placed, waits, conflicts, late)


def test_the_table_holds_what_the_kernel_reads() -> None:
    placed = place([6, 2], 4)
    stages = [Stage(launch=0, record=RECORD, body=3), Stage(launch=1, record=RECORD, body=1, waits=(0,))]
    table = build_table(placed, stages, [[(256, 0)], [(512, 64), (768, 0)]])
    assert table[0, :8].tolist() == [3, 6, 6, 1, 0, 0, 0, 1]
    assert table[1, :8].tolist() == [1, 2, 2, 1, 2, 0, 1, 0]
    assert table[1, WAITS : WAITS + 2].tolist() == [0, 4]
    assert table[1, ARGUMENTS : ARGUMENTS + 4].tolist() == [512, 64, 768, 0]
