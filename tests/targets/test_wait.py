"""Waits of a merged launch on gfx950: what a clock alone cannot tell, and a wait that is really in vain."""

from __future__ import annotations

import functools
import re

import numpy as np
import triton
import triton.language as tl

from mmcompile.core.kernel import CompiledKernel, KernelSource, Parameter
from mmcompile.driver.targets import load_target
from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._intrinsics import synchronise, synchronise_hip

CODE, FOUND, REACHED, SEEN = 1, 2, 3, 4
"""Words behind the counter: what the watchdog reports, whether the wait was not in vain, and what was behind it."""


@triton.jit
def tile_wait(program, words, data, delay, target):
    """Program 0 waits for ``target`` arrivals; program 1 works for ``delay`` rounds, writes and arrives."""
    if program == 0:
        if wait_for(words, target, words + 1, 7):  # noqa: F821
            tl.store(words + 3, 1)
            tl.store(words + 4, tl.load(data))
    else:
        total = program
        for _ in tl.range(0, delay, num_stages=1):
            total = total * 3 + 1
        tl.store(data + 1, total)
        tl.store(data, 42)
        count_arrival(words)  # noqa: F821


@functools.cache
def compile_wait() -> CompiledKernel:
    tile_wait.fn.__globals__.update(wait_for=synchronise.wait_for, count_arrival=synchronise.count_arrival)
    parameters = [Parameter("words", "*i32", "words"), Parameter("data", "*i32", "data"),
                  Parameter("delay", "i32", "delay"), Parameter("target", "i32", "target")]  # fmt: skip
    source: KernelSource = emit_kernel(
        name="wait", title="A wait.", tiles=[tile_wait], constants={}, parameters=parameters,
        body="tile_wait(tl.program_id(0), words, data, delay, target)", grid=("2", "1", "1"),
        intrinsics=vars(synchronise_hip),
    )  # fmt: skip
    loaded = load_target("gfx950")
    return loaded.compile(source, loaded.spec.architectures[0])


def wait(delay: int, target: int, ticks: int, seed: int) -> list[int]:
    """The words after a launch in which a part of the patience is ``ticks`` instructions."""
    compiled = compile_wait()
    text, count = re.subn(r"0x773593f\b", hex(10 * ticks - 1), compiled.assembly)
    assert count == 1, "the patience is not where it was"
    memory = DeviceMemory()
    words, data = (memory.register(np.zeros(n, np.int32), name) for n, name in ((5, "words"), (2, "data")))
    run_kernel(Launch(text, compiled.metadata["name"], (2, 1, 1), 256, int(compiled.metadata["shared"]),
                      [words, data, delay, target, 0, 0], memory, schedule="interleaved", check_races=True,
                      seed=seed))  # fmt: skip
    return memory.contents(words).view(np.int32).tolist()


def test_a_poll_that_gives_up_reads_again_before_it_is_a_fault() -> None:
    """The clock runs out several times before the arrival: a single poll would have called that a hang."""
    for seed in range(2):
        words = wait(delay=3000, target=1, ticks=1, seed=seed)
        assert words[REACHED] == 1 and words[SEEN] == 42 and words[CODE] == 0


def test_a_wait_in_vain_ends_and_says_what_it_saw() -> None:
    words = wait(delay=3, target=2, ticks=250, seed=0)
    assert words[CODE] == 7 and words[FOUND] == 1 and words[REACHED] == 0 and words[SEEN] == 0
