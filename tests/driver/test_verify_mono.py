"""A merged kernel of a hand-written model in the emulators: right numbers, and planted faults that they catch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmcompile.core.errors import ToolchainError
from mmcompile.core.kernel import CompiledKernel
from mmcompile.core.plan import Plan
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.emulated_device import EmulatedDriver
from mmcompile.driver.shorten import with_schedule
from mmcompile.driver.targets import load_target
from mmcompile.driver.verify_mono import verify_schedules
from mmcompile.emulate.faults import EmulationFault
from mmcompile.runtime import mono
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.targets._merge import merge_kernels
from tests.driver.mono_model import LINEAR, NORM, Model, make_binary, make_case, make_sources, tamper

WIDTH = 128
TARGETS = ("sm90", "gfx950")
FEW, MANY = (1, 0), (3, 1)
"""(tokens, schedule): norms on every program, and on one."""


@functools.cache
def compile_merged(target: str) -> CompiledKernel:
    loaded = load_target(target)
    name = Model(2, WIDTH).schedule().kernel
    sources = make_sources(WIDTH)
    merged = merge_kernels(name, [sources[NORM], sources[LINEAR]], loaded.spec)
    return loaded.compile(merged, loaded.spec.architectures[0])


def make_plan(target: str, which: int, programs: int = 3) -> Plan:
    compiled = compile_merged(target)
    data = {k: int(compiled.metadata.get(k) or 0) for k in ("shared", "num_warps", "warp_size", "registers")}
    binary = make_binary(compiled.metadata["name"], **data)
    return Model(2, WIDTH).merged_plan(compiled.architecture, binary, which=which, programs=programs)


def execute(
    plan: Plan,
    target: str,
    tokens: int,
    edit: Callable[[str], str] = lambda text: text,
    mode: str = "step",
    seed: int = 0,
    steps: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, expected) of the last of some equal steps."""
    compiled = compile_merged(target)
    text = edit(compiled.assembly)
    assert (text == compiled.assembly) == (edit.__name__ == "<lambda>" and edit("text") == "text")
    kernels = {name: (text, k.binaries[compiled.architecture], len(k.parameters)) for name, k in plan.kernels.items()}
    driver = EmulatedDriver(kernels, compiled.architecture, seed)
    weights, x, expected = make_case(plan, tokens)
    executor = GpuExecutor(
        plan, iter(weights.items()), 1, driver, compiled.architecture, lambda name, _: name.encode(), mode
    )
    for _ in range(steps):
        results = executor.run("decode", {"x": x}, {"tokens": tokens, "batch": tokens}, ("out",))
    return results["out"].clone(), expected


@pytest.mark.parametrize("target", TARGETS)
def test_merged_launches_compute_what_the_operations_do(target: str) -> None:
    """Two steps: the second is a replayed graph, on counters that the first has to leave at zero."""
    for tokens, which in (FEW, MANY):
        plan = make_plan(target, which)
        result, expected = execute(plan, target, tokens, steps=2)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    layers, _ = execute(plan, target, tokens, mode="layer")
    assert torch.equal(layers, result)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_interleaving_gives_the_same_bits(target: str) -> None:
    for tokens, which in (FEW, MANY):
        for programs in (2, 5):
            plan = make_plan(target, which, programs)
            results = [execute(plan, target, tokens, seed=seed)[0] for seed in range(4)]
            assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm90", "sm100", "sm107", "gfx950"])
def test_a_real_step_agrees_with_its_standalone_launches(target: str, tmp_path: Path) -> None:
    """Triton once pipelined the loop over tiles and ran the else branch of a condition behind the last one (gfx950)."""
    options = BuildOptions(targets=(target,), weights="none", max_context=128, max_batch=2, max_tokens=32, mono="step")
    path = build("smollm2-tiny", tmp_path / "a", options)
    for programs in (4, 5):
        verdicts = verify_schedules(path, programs=programs)
        assert verdicts and all(v.verdict == "ok" for v in verdicts), [v.reason for v in verdicts]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "quantization", "cache"), [
    ("sm90", "nvfp4_mxfp8", "nvfp4"), ("sm90", "none", "float8_e4m3fn"), ("sm100", "nvfp4_mxfp8", "nvfp4"),
    ("sm107", "nvfp4_mxfp8", "nvfp4"), ("gfx950", "nvfp4_mxfp8", "nvfp4"), ("gfx950", "none", "auto"),
])  # fmt: skip
def test_block_sparse_attention_and_experts_have_the_bits_of_standalone_launches(
    target: str, quantization: str, cache: str, tmp_path: Path
) -> None:
    """One dense layer, and one with an indexer and experts, whose ids and blocks only the device knows."""
    options = BuildOptions(
        targets=(target,), weights="none", max_context=256, max_batch=2, max_tokens=32, mono="step",
        quantization=quantization, cache_dtype=cache,
    )  # fmt: skip
    path = build("minimax-m3-tiny-slice:2", tmp_path / "a", options)
    for programs in (4, 5):
        verdicts = verify_schedules(path, programs=programs)
        assert verdicts and all(v.verdict == "ok" and v.equal == 1.0 for v in verdicts), [v.reason for v in verdicts]


def catch(kinds: tuple[str, ...], *arguments: Any, **options: Any) -> EmulationFault:
    with pytest.raises(EmulationFault) as caught:
        execute(*arguments, **options)
    assert caught.value.kind in kinds, caught.value.message
    return caught.value


@pytest.mark.parametrize("target", TARGETS)
def test_a_dropped_wait_is_a_race_or_a_read_of_nothing(target: str) -> None:
    plan = make_plan(target, 1)
    (schedule,) = plan.phases["decode"].schedules
    assert schedule.stages[1].waits == (0,)
    catch(("race", "uninitialised"), with_schedule(plan, tamper(schedule, 1, waits=())), target, 3)


def change_target(monkeypatch: pytest.MonkeyPatch, stage: int, change: int) -> None:
    build = mono.build_table

    def wrong(*arguments: Any) -> Any:
        table = build(*arguments)
        table[stage, 9] += change
        return table

    monkeypatch.setattr(mono, "build_table", wrong)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_too_low_is_never_missed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is for the very value: where the counter is beyond it already there is no end, else the stage is early."""
    change_target(monkeypatch, 2, -2)
    plan, early = make_plan(target, 1), {"race", "uninitialised"}
    kinds = {catch((*early, "deadlock"), plan, target, 3, seed=seed).kind for seed in (0, 1)}
    assert kinds & early


def shorten_patience(text: str) -> str:
    """Waits in vain end after a few polls (NVIDIA) or after a few instructions by the clock (AMD)."""
    return text.replace("2097152", "8").replace("polls, 4095", "polls, 3").replace("0x773593f", "0x3f")


@pytest.mark.parametrize("target", TARGETS)
def test_the_watchdog_names_the_stage_and_the_program(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change_target(monkeypatch, 2, 1)
    plan = make_plan(target, 1)
    with pytest.raises(ToolchainError, match=r"program [012] waited in vain before stage 2 \(n2\) for n1") as caught:
        execute(plan, target, 3, edit=shorten_patience)
    arrivals = re.search(r"n1 \((\d) arrivals\); it saw (\d)", caught.value.what)
    assert arrivals and arrivals[1] == arrivals[2]


@pytest.mark.parametrize("target", TARGETS)
def test_a_wait_without_an_end_is_a_deadlock_where_nobody_watches(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change_target(monkeypatch, 2, 1)
    catch(("deadlock",), make_plan(target, 1), target, 3)


def drop_barrier(text: str) -> str:
    """Arrivals are counted without waiting for the other warps of the program."""
    lines = text.split("\n")
    arrivals = [i for i, line in enumerate(lines) if re.search(r"atom\..*acq_rel.*add|global_atomic_add\b", line)]
    assert arrivals
    for arrival in arrivals:
        barriers = [i for i in range(arrival) if re.search(r"^\s*(bar\.sync|s_barrier)\b", lines[i])]
        for i in barriers[-2:]:
            lines[i] = ""
    return "\n".join(lines)


@pytest.mark.parametrize("target", TARGETS)
def test_a_dropped_barrier_is_a_race(target: str) -> None:
    catch(("race",), make_plan(target, 1), target, 3, edit=drop_barrier)


@pytest.mark.parametrize("target", TARGETS)
def test_overlapping_buffers_are_a_race(target: str) -> None:
    """The head's result lies on its input."""
    plan = make_plan(target, 1)
    moved = plan.buffers["out"].model_copy(update={"offset": plan.buffers["h1"].offset})
    catch(("race",), plan.model_copy(update={"buffers": plan.buffers | {"out": moved}}), target, 3)
