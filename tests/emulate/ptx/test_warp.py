"""Exchange between the lanes of a warp against the pseudo-code of the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest
from snippets import evaluate

from mmcompile.emulate.faults import EmulationFault

A = np.random.default_rng(2).integers(0, 2**32, 128, dtype=np.uint64).astype(np.uint32)
B = np.random.default_rng(3).integers(0, 32, 128).astype(np.uint32)


def shuffle(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and validity (PTX ISA, shfl.sync)."""
    limit, segment = c & 31, c >> 8 & 31
    highest = (lane & segment) | (limit & ~segment)
    lowest = lane & segment
    if mode == "up":
        source, valid = lane - b, lane - b >= highest
    elif mode == "down":
        source, valid = lane + b, lane + b <= highest
    elif mode == "bfly":
        source, valid = lane ^ b, lane ^ b <= highest
    else:
        source = lowest | (b & ~segment)
        valid = source <= highest
    return (source if valid else lane), valid


@pytest.mark.parametrize("clamp", [31, 0, 0x1807, 0x1800, 0x101F, 7])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode: str, clamp: int) -> None:
    for distance in (1, 3, 16, 31):
        body = f"shfl.sync.{mode}.b32 %r|%p, %a, {distance}, {clamp}, -1; @!%p not.b32 %r, %r;"
        got = evaluate(body, A)
        for thread in range(128):
            source, valid = shuffle(mode, thread % 32, distance, clamp)
            value = int(A[thread // 32 * 32 + source])
            assert got[thread] == (value if valid else value ^ 0xFFFFFFFF)


def test_shfl_by_register() -> None:
    got = evaluate("shfl.sync.idx.b32 %r, %a, %b, 31, -1;", A, B)
    np.testing.assert_array_equal(got, [A[t // 32 * 32 + B[t]] for t in range(128)])


def test_votes() -> None:
    warps = (A > 1 << 31).reshape(4, 32)
    test = "setp.gt.u32 %p, %a, 0x80000000;"
    masks = (warps.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1)
    np.testing.assert_array_equal(evaluate(f"{test} vote.sync.ballot.b32 %r, %p, -1;", A), np.repeat(masks, 32))
    values = np.repeat(np.array([5, 6, 7, 8], np.uint32), 32)
    values[40] = 9
    test = "setp.ne.u32 %p, %a, 6;"
    for mode, expected in (("any", [1, 1, 1, 1]), ("all", [1, 0, 1, 1]), ("uni", [1, 0, 1, 1])):
        got = evaluate(f"{test} vote.sync.{mode}.pred %q, %p, -1; selp.b32 %r, 1, 0, %q;", values)
        np.testing.assert_array_equal(got, np.repeat(expected, 32))


@pytest.mark.parametrize(
    ("form", "function"),
    [
        ("add.u32", lambda x: x.sum(dtype=np.uint32)), ("min.u32", np.min), ("max.u32", np.max),
        ("max.s32", lambda x: x.view(np.int32).max().view(np.uint32)), ("and.b32", np.bitwise_and.reduce),
        ("or.b32", np.bitwise_or.reduce), ("xor.b32", np.bitwise_xor.reduce),
        ("max.f32", lambda x: np.fmax.reduce(x.view(np.float32)).view(np.uint32)),
        ("min.abs.f32", lambda x: np.fmin.reduce(np.abs(x.view(np.float32))).view(np.uint32)),
    ],
)  # fmt: skip
def test_redux(form: str, function: object) -> None:
    expected = [function(A[w : w + 32]) for w in range(0, 128, 32)]  # type: ignore[operator]
    np.testing.assert_array_equal(evaluate(f"redux.sync.{form} %r, %a, -1;", A), np.repeat(expected, 32))


def test_match_and_elect() -> None:
    values = np.arange(128, dtype=np.uint32) % 3
    got = evaluate("match.any.sync.b32 %r, %a, -1;", values)
    for thread in range(128):
        warp = values[thread // 32 * 32 :][:32]
        assert got[thread] == sum(1 << lane for lane in range(32) if warp[lane] == values[thread])
    got = evaluate("elect.sync _|%p, -1; selp.b32 %r, 1, 0, %p;", values)
    np.testing.assert_array_equal(got, np.arange(128) % 32 == 0)


def test_special_registers() -> None:
    thread = np.arange(128)
    np.testing.assert_array_equal(evaluate("mov.u32 %r, %laneid;", A), thread % 32)
    np.testing.assert_array_equal(evaluate("mov.u32 %r, %lanemask_lt;", A), (1 << thread % 32) - 1)
    np.testing.assert_array_equal(evaluate("mov.u32 %r, %ntid.x;", A), 128)


def test_lanes_that_diverged_meet_before_a_warp_instruction() -> None:
    body = "mov.b32 %x, 1; and.b32 %y, %t, 1; setp.eq.u32 %p, %y, 0; @%p bra L; mov.b32 %x, 2;"
    body += " L: redux.sync.add.u32 %r, %x, -1;"
    np.testing.assert_array_equal(evaluate(body, A), 48)


def test_a_value_of_an_inactive_lane_is_refused() -> None:
    body = "mov.b32 %r, 0; setp.lt.u32 %p, %t, 16; @%p shfl.sync.idx.b32 %r, %a, 20, 31, -1;"
    with pytest.raises(EmulationFault, match="inactive lane 20") as caught:
        evaluate(body, A)
    assert caught.value.kind == "uninitialised"
