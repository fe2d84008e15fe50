"""Branches, loops, calls, barriers, polling, deadlock and trap."""

from __future__ import annotations

import numpy as np
import pytest
from snippets import THREADS, evaluate, make_module, run_module

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx import scheduler

THREAD = np.arange(THREADS, dtype=np.uint32)


def fails(body: str, kind: str, **options: object) -> EmulationFault:
    with pytest.raises(EmulationFault) as caught:
        run_module(make_module(body), [THREAD.copy() for _ in range(4)], **options)
    assert caught.value.kind == kind, caught.value
    assert caught.value.line
    return caught.value


@pytest.mark.parametrize("schedule", ["program", "warp", "interleaved"])
def test_a_loop_with_another_trip_count_in_every_lane(schedule: str) -> None:
    body = """
 mov.b32 %r, 0; mov.b32 %x, 0;
L: setp.ge.u32 %p, %x, %a; @%p bra E; add.u32 %x, %x, 1; and.b32 %y, %x, 1; setp.eq.u32 %q, %y, 0; @%q bra L;
 add.u32 %r, %r, %x; bra L;
E:
"""
    expected = [sum(x for x in range(1, t + 1) if x % 2) for t in range(THREADS)]
    np.testing.assert_array_equal(evaluate(body, THREAD, schedule=schedule), expected)


def test_indexed_branch() -> None:
    body = """
 rem.u32 %x, %t, 3; brx.idx %x, table;
table: .branchtargets A, B, C;
A: mov.b32 %r, 10; bra E; B: mov.b32 %r, 20; bra E; C: mov.b32 %r, 30; E:
"""
    np.testing.assert_array_equal(evaluate(body, THREAD), 10 * (THREAD % 3 + 1))


def test_calls_with_early_returns() -> None:
    outside = """
.func (.param .b32 result) f(.param .b32 value)
{ .reg .b32 %v; .reg .pred %p; ld.param.b32 %v, [value]; setp.lt.u32 %p, %v, 64; @%p bra S; shl.b32 %v, %v, 1;
 st.param.b32 [result], %v; ret; S: st.param.b32 [result], 5; ret; }
"""
    body = "{ .param .b32 i; .param .b32 o; st.param.b32 [i], %t; call.uni (o), f, (i); ld.param.b32 %r, [o]; }"
    arrays = [THREAD.copy() for _ in range(4)]
    run_module(make_module(body, outside=outside), arrays)
    np.testing.assert_array_equal(arrays[3], np.where(THREAD < 64, 5, 2 * THREAD))


def test_exit_of_some_threads_completes_a_barrier() -> None:
    body = "mov.b32 %r, 3; setp.lt.u32 %p, %t, 32; @%p exit; bar.sync 0;"
    arrays = [THREAD.copy() for _ in range(4)]
    run_module(make_module(body), arrays)
    np.testing.assert_array_equal(arrays[3], np.where(THREAD < 32, THREAD, 3))


def test_named_barriers_with_counts_and_arrive() -> None:
    body = """
 mov.b32 %r, 1; setp.lt.u32 %p, %t, 64; @%p bra C; bar.arrive 1, 128; bra E; C: bar.sync 1, 128; mov.b32 %r, 2;
E:
"""
    arrays = [THREAD.copy() for _ in range(4)]
    for schedule in ("program", "warp"):
        run_module(make_module(body), arrays, schedule=schedule)
        np.testing.assert_array_equal(arrays[3], np.where(THREAD < 64, 2, 1))


@pytest.mark.parametrize("schedule", ["program", "warp"])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("setp.lt.u32 %p, %t, 64; @%p bra A; bar.sync 1; bra E; A: bar.sync 2; E: mov.b32 %r, 0;", "divergent barrier"),
        ("setp.lt.u32 %p, %t, 16; @%p bra A; bar.sync 0; bra E; A: bar.sync 0; E: mov.b32 %r, 0;", "divergent barrier"),
        ("mov.b32 %r, 0; setp.lt.u32 %p, %t, 64; @%p bra E; bar.sync 1, 128; E:", "deadlock"),
        ("mov.b32 %r, 0; L: ld.volatile.global.b32 %x, [%p0]; setp.ne.u32 %p, %x, 1000; @%p bra L;", "deadlock"),
        ("mov.b32 %r, 0; setp.eq.u32 %p, %t, 77; @%p trap;", "trap"),
    ],
)
def test_faults(body: str, kind: str, schedule: str) -> None:
    fault = fails(body, kind, schedule=schedule)
    if kind == "trap":
        assert "thread 77" in fault.what


@pytest.mark.parametrize("schedule", ["program", "warp", "interleaved"])
def test_loops_that_only_loop(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without polling or waiting lets others run, and is a deadlock if nothing else is left."""
    monkeypatch.setattr(scheduler, "_LONG_LOOP", 40)
    waits = "mov.b32 %r, 7; setp.lt.u32 %p, %t, 64; @%p bra W; {} bra E; W: ld.shared.b32 %x, [0];"
    waits += "setp.ne.u32 %q, %x, 5; @%q bra W; E:"
    flag = "mov.b32 %y, 5; setp.eq.u32 %s, %t, 64; @%s st.shared.b32 [0], %y;"
    clear = "mov.b32 %z, 0; setp.eq.u32 %s, %t, 0; @%s st.shared.b32 [0], %z; bar.sync 0;"
    arrays = [np.zeros(THREADS, np.uint32) for _ in range(4)]
    run_module(make_module(clear + waits.format(flag)), arrays, shared=16, schedule=schedule)
    assert (arrays[3] == 7).all()
    with pytest.raises(EmulationFault, match="only polling is left") as caught:
        run_module(make_module(clear + waits.format("")), arrays, shared=16, schedule=schedule)
    assert caught.value.kind == "deadlock"


@pytest.mark.parametrize("schedule", ["program", "warp", "interleaved"])
def test_a_barrier_of_each_warp(schedule: str) -> None:
    """Warps may name barriers of their own in one instruction; with twice the threads the same waits for another."""
    own = "shr.u32 %x, %t, 5; add.u32 %x, %x, 1; bar.sync %x, {}; add.u32 %r, %a, 1;"
    np.testing.assert_array_equal(evaluate(own.format(32), THREAD, schedule=schedule), THREAD + 1)
    assert fails(own.format(64), "deadlock", schedule=schedule)


def test_lanes_of_a_warp_name_different_barriers() -> None:
    fault = fails("and.b32 %x, %t, 1; bar.sync %x, 32; mov.b32 %r, 0;", "divergent barrier")
    assert "lanes of a warp name different barriers" in fault.what


def test_more_threads_than_a_barrier_takes() -> None:
    assert "128 threads at barrier 1 of 64" in fails("mov.b32 %r, 0; bar.sync 1, 64;", "illegal").what


def test_unknown_instructions_are_not_started() -> None:
    fault = fails("mov.b32 %r, 0; ret; frobnicate.b32 %r, %r;", "unknown instruction")
    assert fault.text == "frobnicate.b32"


GRID_BARRIER = """
 mov.b32 %r, 0; bar.sync 0; setp.ne.u32 %p, %t, 0; @%p bra W; ld.param.b64 %d0, [pa];
 atom.global.gpu.acq_rel.add.u32 %x, [%d0], 1;
L: ld.acquire.gpu.global.b32 %x, [%d0]; setp.lt.u32 %q, %x, 4; @%q bra L;
W: bar.sync 0; ld.param.b64 %d0, [pa]; ld.global.cg.b32 %r, [%d0];
"""


def test_a_barrier_of_the_grid_needs_all_programs() -> None:
    text = make_module(GRID_BARRIER, head=" mov.u32 %t, %tid.x; ld.param.b64 %p3, [pr];")
    for seed in range(3):
        arrays = [np.zeros(THREADS, np.uint32) for _ in range(4)]
        run_module(text, arrays, grid=(4, 1, 1), schedule="interleaved", seed=seed)
        assert arrays[3][0] == 4
    arrays = [np.zeros(THREADS, np.uint32) for _ in range(4)]
    with pytest.raises(EmulationFault, match="only polling is left") as caught:
        run_module(text, arrays, grid=(4, 1, 1), schedule="interleaved", programs=[(0, 0, 0), (1, 0, 0)])
    assert caught.value.kind == "deadlock"
