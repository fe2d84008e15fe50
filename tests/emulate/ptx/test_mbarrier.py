"""mbarriers: the state machine, producer and consumer warps, cp.async arrivals, planted faults, races."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.mbarriers import Mbarriers

KEY = (0, 64)


@given(count=st.integers(1, 6), steps=st.lists(st.integers(1, 3), max_size=40))
def test_phases_follow_a_counter(count, steps):
    """A phase completes with every ``count`` arrivals; parity waits see the phases in turn."""
    barriers, total = Mbarriers(False), 0
    barriers.initialise(KEY, count)
    for step in steps:
        step = min(step, count - total % count)
        token = barriers.arrive(KEY, step)
        assert token == total // count
        total += step
        phase = total // count
        assert barriers.find(KEY).phase == phase
        assert barriers.test(KEY, phase - 1) and not barriers.test(KEY, phase)


@given(st.permutations(["arrive", "arrive", "expect", "bytes 96", "bytes 32"]))
def test_phase_needs_arrivals_and_bytes(order):
    """Arrivals and bytes in any order: the phase completes with the last one (bytes may come before expect_tx)."""
    barriers = Mbarriers(False)
    barriers.initialise(KEY, 3)
    for number, action in enumerate(order):
        assert barriers.find(KEY).phase == 0
        if action == "arrive":
            barriers.arrive(KEY)
        elif action == "expect":
            barriers.arrive(KEY, expect_bytes=128)
        else:
            barriers.complete(KEY, int(action.split()[1]))
        assert number < 4 or barriers.find(KEY).phase == 1
    assert barriers.find(KEY).pending == 3


def test_drop_lowers_the_count():
    barriers = Mbarriers(False)
    barriers.initialise(KEY, 2)
    barriers.arrive(KEY, drop=True)
    barriers.arrive(KEY)
    assert (barriers.find(KEY).phase, barriers.find(KEY).pending) == (1, 1)


def test_late_work_is_done_at_the_second_failing_wait():
    barriers, done = Mbarriers(True), []

    def load():
        done.append("load")
        barriers.complete(KEY, 16)

    barriers.initialise(KEY, 1)
    barriers.arrive(KEY, expect_bytes=16)
    barriers.track(KEY, load)
    assert not done and not barriers.test(KEY, 0) and not done
    assert barriers.test(KEY, 0) and done == ["load"]


def test_pipeline_work_is_done_in_order_up_to_the_commit():
    barriers, done, other = Mbarriers(True), [], (0, 72)
    for key in (KEY, other):
        barriers.initialise(key, 1)

    def commit(key):
        return lambda: (done.append(key), barriers.arrive(key))

    barriers.enqueue(0, lambda: done.append("a"))
    barriers.enqueue(0, commit(KEY), KEY)
    barriers.enqueue(0, lambda: done.append("b"))
    barriers.enqueue(0, commit(other), other)
    barriers.test(KEY, 0)
    assert barriers.test(KEY, 0) and done == ["a", KEY]
    with pytest.raises(EmulationFault, match="invalidated") as fault:
        barriers.invalidate(other)
    assert fault.value.kind == "in flight" and barriers.list_pending() == ["2 tensor core operations"]


@pytest.mark.parametrize(
    "action,kind",
    [
        (lambda b: b.arrive((0, 8)), "uninitialised"),
        (lambda b: b.initialise(KEY, 0), "illegal"),
        (lambda b: b.arrive(KEY, 3), "illegal"),
        (lambda b: b.complete(KEY, 1 << 20), "illegal"),
    ],
)
def test_misuse(action, kind):
    barriers = Mbarriers(False)
    barriers.initialise(KEY, 2)
    with pytest.raises(EmulationFault) as fault:
        action(barriers)
    assert fault.value.kind == kind


INIT = """
setp.eq.u32 p1, r0, 0;
@p1 mbarrier.init.shared::cta.b64 [0], 32;
@p1 mbarrier.init.shared::cta.b64 [8], 32;
bar.sync 0;
shr.u32 r1, r0, 5; and.b32 r2, r0, 31; shl.b32 r3, r2, 2;
"""
"""Barrier 0: the slot is full; barrier 8: the slot is empty. Warp 0 produces, warp 1 consumes; r2 is the lane."""


def wait(address, phase, name):
    return f"""{name}: mbarrier.try_wait.parity.shared::cta.b64 p2, [{address}], {phase}; @!p2 bra {name};"""


def produce_and_consume(full_wait=True, empty_wait=True, full_arrive=True, empty_arrive=True):
    """Eight values through one slot of shared memory at 64; the consumer adds them up."""
    produce = f"""
    {wait(8, "r5", "EMPTY") if empty_wait else ""}
    add.u32 r6, r4, r2; st.shared.b32 [r3+64], r6;
    {"mbarrier.arrive.shared::cta.b64 _, [0];" if full_arrive else ""}"""
    consume = f"""
    {wait(0, "r5", "FULL") if full_wait else ""}
    ld.shared.b32 r6, [r3+64]; add.u32 r7, r7, r6;
    {"mbarrier.arrive.shared::cta.b64 d20, [8];" if empty_arrive else ""}"""
    return f"""{INIT}
    mov.b32 r4, 0; mov.b32 r7, 0;
    setp.ne.u32 p3, r1, 0; @p3 bra CONSUMER;
    PRODUCER: and.b32 r5, r4, 1; xor.b32 r5, r5, 1; {produce}
    add.u32 r4, r4, 1; setp.lt.u32 p4, r4, 8; @p4 bra PRODUCER; bra DONE;
    CONSUMER: and.b32 r5, r4, 1; {consume}
    add.u32 r4, r4, 1; setp.lt.u32 p4, r4, 8; @p4 bra CONSUMER;
    mul.wide.u32 d40, r2, 4; add.s64 d40, d40, d0; st.global.b32 [d40], r7;
    DONE: ret;"""


RACES = {"check_races": True}
MODES = [{}, {"late": True}, {"schedule": "warp", "seed": 3}, RACES, {**RACES, "schedule": "warp"}]
EXPECTED = 28 + 8 * np.arange(32, dtype=np.uint32)


def run_pipe(run_ptx, options, **parts):
    try:
        out = run_ptx(produce_and_consume(**parts), [np.zeros(32, np.uint32)], threads=64, shared=1024, **options)[0]
    except EmulationFault as fault:
        return fault.kind
    return "right" if np.array_equal(out, EXPECTED) else "wrong"


@pytest.mark.parametrize("options", MODES)
def test_producer_and_consumer(run_ptx, options):
    assert run_pipe(run_ptx, options) == "right"


@pytest.mark.parametrize("part", ["full_wait", "empty_wait"])
@pytest.mark.parametrize("schedule", ["program", "warp"])
def test_a_missing_wait_is_found(run_ptx, part, schedule):
    """A race; or the producer runs ahead by two phases, which the consumer takes for none."""
    found = run_pipe(run_ptx, {"check_races": True, "schedule": schedule, "seed": 1}, **{part: False})
    assert found in ("race", "uninitialised", "deadlock")


@pytest.mark.parametrize("part", ["full_arrive", "empty_arrive"])
def test_a_missing_arrive_is_a_deadlock(run_ptx, part):
    assert run_pipe(run_ptx, {}, **{part: False}) == "deadlock"


def test_state_tokens(run_ptx):
    """test_wait with the state of an arrive: false until the phase of that arrive completes."""
    body = f"""{INIT}
    @p1 mbarrier.init.shared::cta.b64 [16], 64; bar.sync 0;
    mbarrier.arrive.shared::cta.b64 d20, [16];
    SPIN: mbarrier.try_wait.shared::cta.b64 p5, [16], d20; @!p5 bra SPIN;
    mov.b32 r8, 7; mul.wide.u32 d40, r0, 4; add.s64 d40, d40, d0; st.global.b32 [d40], r8;"""
    assert (run_ptx(body, [np.zeros(64, np.uint32)], threads=64, shared=1024, schedule="warp")[0] == 7).all()


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("options", [{}, {"late": True}, {"late": True, "check_races": True, "schedule": "warp"}])
def test_cp_async_arrival(run_ptx, counted, options):
    """Each lane's copy arrives when it is complete: expected by the count (.noinc), or one more for each."""
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [0];"
    if not counted:
        arrive = "cp.async.mbarrier.arrive.shared::cta.b64 [0]; mbarrier.arrive.shared::cta.b64 _, [0];"
    body = f"""{INIT} mul.wide.u32 d40, r2, 4; add.s64 d41, d40, d0; add.s64 d42, d40, d1;
    setp.ne.u32 p3, r1, 0; @p3 bra CONSUMER;
    cp.async.ca.shared.global [r3+64], [d41], 4; {arrive} bra DONE;
    CONSUMER: {wait(0, 0, "FULL")} xor.b32 r4, r3, 124; ld.shared.b32 r5, [r4+64]; st.global.b32 [d42], r5;
    DONE: ret;"""
    values = np.arange(100, 132, dtype=np.uint32)
    out = run_ptx(body, [values, np.zeros(32, np.uint32)], threads=64, shared=1024, **options)[1]
    np.testing.assert_array_equal(out, values[::-1])
    if options:
        with pytest.raises(EmulationFault) as fault:
            text = body.replace(wait(0, 0, "FULL"), "")
            run_ptx(text, [values, np.zeros(32, np.uint32)], threads=64, shared=1024, **options)
        assert fault.value.kind in ("uninitialised", "race")


def test_a_missing_init(run_ptx):
    with pytest.raises(EmulationFault, match="no mbarrier.init") as fault:
        run_ptx("mbarrier.arrive.shared::cta.b64 _, [0];", [], threads=32, shared=64)
    assert fault.value.line > 0


@pytest.mark.parametrize(
    "text", ["mbarrier.pending_count.b64 r1, d1;", "mbarrier.arrive.noComplete.shared.b64 d1, [r1], 1;"]
)
def test_unknown_forms_are_refused(run_ptx, text):
    with pytest.raises(EmulationFault) as fault:
        run_ptx(text, [], threads=32, shared=64)
    assert fault.value.kind == "unknown instruction"
