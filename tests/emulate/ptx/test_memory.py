"""Loads, stores and atomics in every address space, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from snippets import THREADS, evaluate, make_module, run_module

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel

SHARED = ".extern .shared .align 16 .b8 dynamic[];"
NUMBERS = np.arange(THREADS, dtype=np.uint32) * np.uint32(0x01010101)


def fails(body: str, kind: str, shared: int = 512, outside: str = SHARED, **options: Any) -> EmulationFault:
    """The fault of a body, which must be of the kind and have a line."""
    with pytest.raises(EmulationFault) as caught:
        run_body(body, shared, outside, **options)
    assert caught.value.kind == kind, caught.value
    assert caught.value.line
    return caught.value


def run_body(body: str, shared: int = 512, outside: str = SHARED, **options: Any) -> np.ndarray:
    arrays = [NUMBERS.copy(), NUMBERS.copy(), NUMBERS.copy(), np.zeros(THREADS, np.uint32)]
    run_module(make_module(body, outside=outside), arrays, shared, **options)
    return arrays[3]


EXCHANGE = """
 shl.b32 %x, %t, 2; mov.b32 %y, dynamic; add.u32 %x, %x, %y; st.shared.b32 [%x], %a; bar.sync 0;
 xor.b32 %z, %t, 127; shl.b32 %z, %z, 2; add.u32 %z, %z, %y; ld.shared.b32 %r, [%z];
"""


@pytest.mark.parametrize("schedule", ["program", "warp", "interleaved"])
def test_exchange_through_shared_memory(schedule: str) -> None:
    np.testing.assert_array_equal(run_body(EXCHANGE, schedule=schedule), NUMBERS[::-1])


def test_vectors_and_narrow_accesses() -> None:
    body = """
 shl.b32 %x, %t, 2; mov.b32 {%h, %g}, %a; st.shared.v2.b16 [%x], {%g, %h}; ld.shared.v2.b8 {%h, %g}, [%x+2];
 cvt.u32.u8 %y, %h; cvt.u32.u8 %z, %g; shl.b32 %z, %z, 8; or.b32 %r, %y, %z;
"""
    np.testing.assert_array_equal(run_body(body), NUMBERS & 0xFFFF)
    signed = "shl.b32 %x, %t, 2; st.shared.b32 [%x], %a; ld.shared.s8 %r, [%x];"
    expected = NUMBERS.view(np.int8)[::4].astype(np.int32).view(np.uint32)
    np.testing.assert_array_equal(run_body(signed), expected)


def test_local_memory_and_generic_addresses() -> None:
    body = """
 .local .align 4 .b8 frame[16]; mov.b64 %d0, frame; st.local.b32 [%d0+4], %a; cvta.local.u64 %d1, %d0;
 ld.b32 %r, [%d1+4];
"""
    np.testing.assert_array_equal(run_body(body), NUMBERS)
    fails(".local .align 4 .b8 frame[16]; mov.b64 %d0, frame; st.local.b32 [%d0+16], %a;", "out of bounds")


def test_global_variables() -> None:
    outside = ".global .align 4 .b32 table[3] = {7, 8, 9};"
    got = run_body("mov.b64 %d0, table; ld.global.b32 %r, [%d0+8];", outside=outside)
    assert (got == 9).all()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("ld.global.b32 %r, [%p0+4];", "out of bounds", "global read of 4 bytes"),
        ("st.global.b32 [%p3+-4], %a;", "out of bounds", "global write of 4 bytes"),
        ("setp.lt.u32 %p, %t, 9; mov.b32 %r, 0; add.s64 %p0, %p0, 2; @%p ld.global.b32 %r, [%p0];", "misaligned", ""),
        ("mov.b64 %d0, 0; ld.global.b32 %r, [%d0];", "out of bounds", ""),
        ("shl.b32 %x, %t, 3; st.shared.b32 [%x], %a;", "out of bounds", "the block has 512 bytes"),
        ("mov.b32 %x, 2; st.shared.b32 [%x], %a;", "misaligned", "shared memory"),
        ("mov.b32 %x, 4; ld.shared.b32 %r, [%x];", "uninitialised", "byte 4 of shared memory"),
        ("mov.b32 %x, 4; atom.shared.add.u32 %r, [%x], 1;", "uninitialised", ""),
    ],
)
def test_faults(body: str, kind: str, words: str) -> None:
    assert words in fails(body, kind).what


def test_read_only_and_uninitialised_global_memory() -> None:
    text = make_module("st.global.b32 [%p0], %c;", tail="ret;")
    memory = DeviceMemory()
    addresses = [memory.register(NUMBERS, name, writable=name == "r") for name in "abcr"]
    with pytest.raises(EmulationFault, match="an input") as caught:
        run_kernel(Launch(text, "k", (1, 1, 1), THREADS, 0, addresses, memory))
    assert caught.value.kind == "read-only"
    memory = DeviceMemory()
    addresses = [memory.register(NUMBERS, name, known=name != "b") for name in "abcr"]
    with pytest.raises(EmulationFault, match="'b'") as caught:
        run_kernel(Launch(make_module("mov.b32 %r, %a;"), "k", (1, 1, 1), THREADS, 0, addresses, memory))
    assert caught.value.kind == "uninitialised"


def test_memory_that_the_kernel_wrote_is_known() -> None:
    text = make_module("st.global.b32 [%p3], %a; ld.global.b32 %r, [%p3]; add.u32 %r, %r, 1;")
    memory = DeviceMemory()
    addresses = [memory.register(NUMBERS, name, known=name != "r") for name in "abcr"]
    run_kernel(Launch(text, "k", (1, 1, 1), THREADS, 0, addresses, memory))
    np.testing.assert_array_equal(memory.contents(addresses[3]).view(np.uint32), NUMBERS + 1)


# ---------------------------------------------------------------------- registers that nobody wrote


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("mov.b32 %r, %z;", "a stored value"),
        ("setp.lt.u32 %p, %t, 64; @%p mov.b32 %r, 1;", "a stored value"),
        ("cvt.u64.u32 %d0, %z; add.s64 %d0, %p0, %d0; ld.global.b32 %r, [%d0];", "an address"),
        ("mov.b32 %r, 1; setp.eq.u32 %p, %z, 1; @%p bra E; E:", "a condition"),
        ("setp.lt.u32 %p, %t, 64; @%p bra L; mov.b32 %r, 1; L: ", "a stored value"),
        ("add.u32 %y, %z, 1; redux.sync.add.u32 %r, %y, -1;", "an operand of all lanes"),
        ("setp.lt.u32 %p, %t, 64; @%p mov.b32 %y, 1; shfl.sync.bfly.b32 %r, %y, 1, 31, -1;", "a stored value"),
    ],
)
def test_undefined_registers_are_found_where_they_matter(body: str, what: str) -> None:
    assert what in fails(body, "uninitialised").what


@pytest.mark.parametrize(
    "body",
    [
        "setp.lt.u32 %p, %t, 64; @%p ld.global.b32 %y, [%p0]; add.u32 %y, %y, 1; selp.b32 %r, %y, 0, %p;",
        "setp.lt.u32 %p, %t, 64; @%p mov.b32 %r, 1; @!%p mov.b32 %r, 2;",
        "setp.lt.u32 %p, %t, 64; @%p mov.b32 %y, 1; shfl.sync.idx.b32 %r, %y, 0, 31, -1; not.pred %q, %p; "
        "@%q mov.b32 %r, 0;",
        "mov.b32 %y, 0; L: setp.gt.u32 %q, %y, 0; @%q add.u32 %x, %x, 1; @!%q mov.b32 %x, 5; add.u32 %y, %y, 1; "
        "setp.lt.u32 %p, %y, 3; @%p bra L; mov.b32 %r, %x;",
    ],
)
def test_values_that_are_defined_where_they_are_used(body: str) -> None:
    run_body(body)


# ---------------------------------------------------------------------- atomics


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, x: old + x & 0xFFFFFFFF,
    "min.s32": lambda old, x: min(signed(old), signed(x)) & 0xFFFFFFFF,
    "max.u32": max,
    "and.b32": lambda old, x: old & x,
    "or.b32": lambda old, x: old | x,
    "xor.b32": lambda old, x: old ^ x,
    "exch.b32": lambda old, x: x,
    "inc.u32": lambda old, x: 0 if old >= x else old + 1,
    "dec.u32": lambda old, x: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("form", ATOMICS)
def test_atomics_in_lane_order(form: str, space: str) -> None:
    """Thread t works on place t % 5; each gets the value that the thread before it left."""
    values = np.random.default_rng(5).integers(0, 2**32, THREADS, dtype=np.uint64).astype(np.uint32)
    if form[:3] in ("inc", "dec"):
        values %= 20
    start = np.array([3, 0x80000000, 0xFFFFFFFF, 0, 17] + [0] * 123, np.uint32)
    result = np.zeros(THREADS, np.uint32)
    if space == "global":
        body = "rem.u32 %x, %t, 5; mul.wide.u32 %d0, %x, 4; ld.param.b64 %d1, [pb]; add.s64 %d0, %d0, %d1;"
        body += f" atom.global.gpu.relaxed.{form} %r, [%d0], %a;"
    else:
        body = "shl.b32 %x, %t, 2; st.shared.b32 [%x], %b; bar.sync 0; rem.u32 %x, %t, 5; shl.b32 %x, %x, 2;"
        body += f" atom.shared.{form} %r, [%x], %a; bar.sync 0; shl.b32 %x, %t, 2; ld.shared.b32 %y, [%x];"
        body += " st.global.b32 [%p1], %y;"
    places = start.copy()
    run_module(make_module(body, outside=SHARED), [values, places, start.copy(), result], 512)
    memory, expected = start.tolist(), []
    for thread, value in enumerate(values.tolist()):
        expected.append(memory[thread % 5])
        memory[thread % 5] = ATOMICS[form](memory[thread % 5], value)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(places, memory)


def test_compare_and_swap() -> None:
    body = "ld.param.b64 %d0, [pb]; atom.global.cas.b32 %r, [%d0], %t, 77; "
    memory = np.zeros(THREADS, np.uint32)
    result = np.zeros(THREADS, np.uint32)
    run_module(make_module(body), [NUMBERS, memory, NUMBERS, result])
    assert memory[0] == 77
    np.testing.assert_array_equal(result, [0] + [77] * (THREADS - 1))


def test_float_and_half_reductions() -> None:
    values = np.random.default_rng(1).standard_normal(THREADS).astype(np.float32)
    total = np.zeros(THREADS, np.float32)
    body = "ld.param.b64 %d0, [pb]; red.global.add.f32 [%d0], %a; red.global.gpu.relaxed.add.v2.f32 [%d0+8], {%a, %a};"
    run_module(make_module(body, tail="ret;"), [values, total, values, values.copy()])
    expected = np.float32(0)
    for value in values:
        expected = np.float32(expected + value)
    assert total[0] == expected
    assert (total[2:4] == expected).all()
    for half, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        pairs = torch.from_numpy(values).to(dtype).repeat_interleave(2)
        memory = np.zeros(THREADS, np.uint32)
        body = f"ld.param.b64 %d0, [pb]; red.global.gpu.relaxed.add.noftz.{half}x2 [%d0], %a;"
        words = pairs.view(torch.int16).numpy().view(np.uint32)
        run_module(make_module(body, tail="ret;"), [words, memory, words, words.copy()])
        running = torch.zeros((), dtype=dtype)
        for value in pairs[::2]:
            running = (running.float() + value.float()).to(dtype)
        bits = int(running.view(torch.int16)) & 0xFFFF
        assert memory[0] == bits | bits << 16


def test_atomic_returns_are_needed_by_lane() -> None:
    body = "ld.param.b64 %d0, [pb]; and.b32 %x, %t, 1; setp.eq.u32 %p, %x, 1; mov.b32 %r, 99; "
    body += "@%p atom.global.add.u32 %r, [%d0], 1;"
    memory = np.zeros(THREADS, np.uint32)
    result = np.zeros(THREADS, np.uint32)
    run_module(make_module(body), [NUMBERS, memory, NUMBERS, result])
    np.testing.assert_array_equal(result, [t // 2 if t % 2 else 99 for t in range(THREADS)])
    assert evaluate("mov.b32 %r, 1;", 0)[0] == 1
