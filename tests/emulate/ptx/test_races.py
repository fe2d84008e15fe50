"""Races: missing barriers, missing fences and wrong orderings are found, correct kernels pass in every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from snippets import THREADS, make_module, run_module

from mmcompile.emulate.faults import EmulationFault

SHARED = ".extern .shared .align 16 .b8 dynamic[];"


def run(body: str, grid: int = 1, schedule: str = "program", seed: int = 0) -> np.ndarray:
    head = " mov.u32 %t, %tid.x; ld.param.b64 %p0, [pa]; ld.param.b64 %p1, [pb]; ld.param.b64 %p2, [pc];"
    head += " ld.param.b64 %p3, [pr]; mul.wide.u32 %o, %t, 4;"
    text = make_module(body, outside=SHARED, head=head, tail=" ret;")
    arrays = [np.zeros(THREADS, np.uint32) for _ in range(4)]
    run_module(text, arrays, 1024, grid=(grid, 1, 1), schedule=schedule, seed=seed, check_races=True)
    return arrays[3]


def race(body: str, grid: int = 1, schedule: str = "program", seed: int = 0) -> str:
    with pytest.raises(EmulationFault) as caught:
        run(body, grid, schedule, seed)
    assert caught.value.kind == "race", caught.value
    assert caught.value.line
    return caught.value.what


EXCHANGE = """
 shl.b32 %x, %t, 2; add.u32 %y, %t, 1; st.shared.b32 [%x], %y; {barrier}
 xor.b32 %z, %t, {distance}; shl.b32 %z, %z, 2; ld.shared.b32 %r, [%z]; {second} st.shared.b32 [%x], %t;
 add.s64 %p3, %p3, %o; st.global.b32 [%p3], %r;
"""


@pytest.mark.parametrize("schedule", ["program", "warp", "interleaved"])
def test_barriers_order_shared_memory(schedule: str) -> None:
    body = EXCHANGE.format(barrier="bar.sync 0;", second="bar.sync 0;", distance=64)
    np.testing.assert_array_equal(run(body, schedule=schedule), (np.arange(THREADS) ^ 64) + 1)


def test_a_missing_barrier_is_found() -> None:
    assert "shared memory" in race(EXCHANGE.format(barrier="", second="bar.sync 0;", distance=64))
    for schedule in ("program", "warp"):
        race(EXCHANGE.format(barrier="bar.sync 0;", second="", distance=64), schedule=schedule)


def test_a_warp_that_runs_ahead_reads_what_nobody_wrote() -> None:
    with pytest.raises(EmulationFault) as caught:
        run(EXCHANGE.format(barrier="", second="bar.sync 0;", distance=64), schedule="warp")
    assert caught.value.kind in ("uninitialised", "race")


def test_lanes_of_a_warp_are_ordered() -> None:
    run(EXCHANGE.format(barrier="bar.warp.sync -1;", second="bar.warp.sync -1;", distance=1))


def test_a_barrier_of_other_warps_does_not_order() -> None:
    body = """
 shl.b32 %x, %t, 2; st.shared.b32 [%x], %t; setp.ge.u32 %p, %t, 64; @%p bra B; bar.sync 1, 64; bra E;
B: bar.sync 2, 64;
E: xor.b32 %z, %t, {distance}; shl.b32 %z, %z, 2; ld.shared.b32 %r, [%z];
"""
    run(body.format(distance=32))
    race(body.format(distance=64))


def test_arrive_orders_in_one_direction() -> None:
    body = """
 shl.b32 %x, %t, 2; setp.ge.u32 %p, %t, 64; @%p bra B; st.shared.b32 [%x], %t; bar.arrive 1, 128; {after} bra E;
B: bar.sync 1, 128; sub.u32 %x, %x, 256; ld.shared.b32 %r, [%x]; st.shared.b32 [%x+512], %r;
E:
"""
    run(body.format(after=""))
    race(body.format(after="bar.warp.sync -1; st.shared.b32 [%x], %x;"))


def test_warps_may_write_the_same_value() -> None:
    body = "and.b32 %x, %t, 31; shl.b32 %x, %x, 2; st.shared.b32 [%x], {value}; bar.sync 0; ld.shared.b32 %r, [%x];"
    run(body.format(value="%x"))
    race(body.format(value="%t"))
    race(body.format(value="%t"), schedule="warp")


FLAG = """
 mov.u32 %x, %ctaid.x; setp.ne.u32 %p, %x, 0; add.s64 %d0, %p1, %o; @%p bra W;
 st.global.b32 [%d0], %t; {producer_barrier} setp.ne.u32 %q, %t, 0; @%q bra E; mov.b32 %y, 1; {publish} bra E;
W: setp.ne.u32 %q, %t, 0; @%q bra G;
L: {poll} setp.eq.u32 %s, %y, 0; @%s bra L; {see}
G: {consumer_barrier} ld.global.b32 %r, [%d0]; add.s64 %p3, %p3, %o; st.global.b32 [%p3], %r;
E:
"""
CORRECT = {
    "producer_barrier": "bar.sync 0;", "publish": "st.release.gpu.global.b32 [%p0], %y;",
    "poll": "ld.acquire.gpu.global.b32 %y, [%p0];", "see": "", "consumer_barrier": "bar.sync 0;",
}  # fmt: skip
FENCED = CORRECT | {
    "publish": "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%p0], %y;",
    "poll": "ld.volatile.global.b32 %y, [%p0];", "see": "fence.acq_rel.gpu;",
}  # fmt: skip
ATOMIC = CORRECT | {
    "publish": "atom.global.gpu.acq_rel.exch.b32 %z, [%p0], %y;",
    "poll": "atom.global.gpu.acquire.add.u32 %y, [%p0], 0;",
}  # fmt: skip


@pytest.mark.parametrize("parts", [CORRECT, FENCED, ATOMIC], ids=["release", "fence", "atomic"])
def test_flags_between_programs(parts: dict[str, str]) -> None:
    for seed in range(3):
        got = run(FLAG.format(**parts), 2, "interleaved", seed)
        np.testing.assert_array_equal(got, np.arange(THREADS))


@pytest.mark.parametrize(
    ("parts", "change"),
    [
        (CORRECT, {"producer_barrier": ""}), (CORRECT, {"consumer_barrier": ""}),
        (CORRECT, {"publish": "st.relaxed.gpu.global.b32 [%p0], %y;"}),
        (CORRECT, {"poll": "ld.relaxed.gpu.global.b32 %y, [%p0];"}),
        (CORRECT, {"publish": "st.global.b32 [%p0], %y;"}),
        (FENCED, {"see": ""}), (FENCED, {"publish": "st.relaxed.gpu.global.b32 [%p0], %y;"}),
        (ATOMIC, {"publish": "atom.global.gpu.relaxed.exch.b32 %z, [%p0], %y;"}),
        (ATOMIC, {"poll": "atom.global.gpu.relaxed.add.u32 %y, [%p0], 0;"}),
    ],
)  # fmt: skip
def test_every_part_of_a_flag_is_needed(parts: dict[str, str], change: dict[str, str]) -> None:
    assert "global memory" in race(FLAG.format(**(parts | change)), 2, "interleaved")


def test_programs_that_write_one_place() -> None:
    body = "mov.u32 %x, %ctaid.x; add.u32 %x, %x, 1; add.s64 %p3, %p3, %o; st.global.b32 [%p3], %x;"
    race(body, 2)
    run(body.replace("add.u32 %x, %x, 1;", "mov.b32 %x, 5;"), 2)
    run("red.global.gpu.relaxed.add.u32 [%p3], 1;", 2)
