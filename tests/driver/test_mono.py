"""Merged decode launches without a GPU or a compiler: proposals, proofs of recorded schedules, tables, reports."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from mmcompile.core.errors import LoweringError, ToolchainError
from mmcompile.core.plan import Choice, KernelLaunch
from mmcompile.core.schedule import ARGUMENTS, COUNTER_STRIDE, STAGE_WORDS, WAITS
from mmcompile.driver.emulated_device import EmulatedDriver
from mmcompile.driver.mono import reschedule
from mmcompile.driver.mono_summary import draw_timeline, estimate_timeline, list_schedules
from mmcompile.driver.shorten import shorten_decode, with_schedule
from mmcompile.emulate.memory import BASE
from mmcompile.lower.merge import WAIT_SECONDS, propose_merges
from mmcompile.runtime.device_gpu import GpuExecutor
from tests.driver.mono_model import LINEAR, NORM, PROGRAMS, SPEC, TILES, Model, make_case, scheduler, tamper, view

WIDTH, TILE = 8, 8 // TILES


def test_the_longest_run_is_merged_for_every_range_of_token_counts() -> None:
    model = Model(2)
    few = (Choice(max_tokens=8, template="few", kernels=model.choices[1][0].kernels), *model.choices[1])
    model.choices[1] = few
    phase = model.plan().phases["decode"].model_copy(update={"launches": tuple(model.launches)})
    merges, reason = propose_merges(phase, model.stages)
    assert [(m.low, m.high) for m in merges] == [(1, 2), (3, 8), (9, 16)]
    assert [launch for launch, _ in merges[0].places] == [0, 1, 2, 3, 4] and merges[0].kernels == (NORM, LINEAR)
    assert reason == "mm.sample: it is drawn by the host"
    assert merges[0].name == merges[1].name
    model.choices[2] = ()
    merges, _ = propose_merges(phase, model.stages)
    assert [launch for launch, _ in merges[0].places] == [0, 1]
    wide = KernelLaunch(kernel=LINEAR, grid=("1", "1", "1"), arguments=(view(model.buffers["x"]),) * 17)
    model.choices[0] = (Choice(max_tokens=None, template="t", kernels=(wide,)),)
    assert "more than 16 pointers" in propose_merges(phase, model.stages)[1]


def test_few_tokens_are_normed_by_every_program_and_more_by_one() -> None:
    small, large = Model(2).schedule(which=0), Model(2).schedule(which=1)
    assert [s.replicated for s in small.stages] == [True, False, True, False, False]
    assert small.private.keys() == {"n0", "n1"} and small.private_bytes >= 4 * WIDTH * 2
    assert not any(s.replicated for s in large.stages) and large.private_bytes == 0
    assert [s.waits for s in small.stages] == [(), (), (1,), (), (3,)]
    assert [s.waits for s in large.stages] == [(), (0,), (1,), (2,), (3,)]
    assert small.layers == ((0, 2), (2, 4), (4, 5)) and small.mode == "step" and small.basis == "cost model"


@pytest.mark.parametrize("fault", ["dropped", "forward", "shared", "private", "space", "alone", "programs", "none"])
def test_a_recorded_schedule_with_a_planted_fault_is_refused(fault: str) -> None:
    model = Model(2)
    plan, schedule, resident = model.plan(), model.schedule(which=0), PROGRAMS
    match = ""
    if fault == "dropped":
        schedule, match = tamper(schedule, 2, waits=()), r"stage 2 \(n2\) may start before stage 1 \(n1\)"
    elif fault == "forward":
        schedule, match = tamper(schedule, 2, waits=(3,)), r"stage 2 \(n2\) waits for stage 3 \(n3\)"
    elif fault == "shared":
        moved = plan.buffers["h1"].model_copy(update={"offset": plan.buffers["h0"].offset})
        plan = plan.model_copy(update={"buffers": plan.buffers | {"h1": moved}})
        match = r"stage 3 \(n3\) writes .*: h0 and h1 overlap"
    elif fault == "private":
        schedule = schedule.model_copy(update={"private": {"n0": 0, "n1": 0}})
        swapped = [schedule.stages[i] for i in (0, 2, 1, 3, 4)]
        schedule = schedule.model_copy(update={"stages": tuple(swapped)})
        match = r"stage 2 \(n1\) finds n1, which stage 1 \(n2\) wrote, where it expects n0|may start before"
    elif fault == "space":
        schedule, match = schedule.model_copy(update={"private_bytes": 8}), "take more than 8 bytes"
    elif fault == "alone":
        schedule, match = tamper(schedule, 0, replicated=False), r"stage 0 \(n0\) is not run by every program"
    elif fault == "programs":
        resident, match = PROGRAMS - 1, "3 programs .* 2 are"
    if fault == "none":
        scheduler(plan).prove(schedule, resident)
        return
    with pytest.raises(LoweringError, match=match):
        scheduler(plan).prove(schedule, resident)


def test_a_result_overwritten_before_its_reader_is_refused() -> None:
    """n1 is written where n0 lies, which the head would still read: every wait is right, the place is not."""
    model = Model(2)
    model.launches[-2] = model.launches[-2].model_copy(
        update={"inputs": model.launches[-2].inputs | {"x": view(model.buffers["n0"])}}
    )
    record = model.choices[-2][0].kernels[0]
    record = record.model_copy(update={"arguments": (view(model.buffers["n0"]), *record.arguments[1:])})
    model.choices[-2] = (Choice(max_tokens=None, template="t", kernels=(record,)),)
    schedule = model.schedule(which=1)
    plan = model.plan()
    moved = plan.buffers["n1"].model_copy(update={"offset": plan.buffers["n0"].offset})
    with pytest.raises(
        LoweringError, match=r"stage 4 \(n4\) finds n1, which stage 2 \(n2\) wrote, where it expects n0"
    ):
        scheduler(plan.model_copy(update={"buffers": plan.buffers | {"n1": moved}})).prove(schedule, PROGRAMS)


def test_a_deep_model_is_shortened_to_two_layers_of_each_kind() -> None:
    plan = Model(6).merged_plan()
    short = shorten_decode(plan)
    phase = short.plan.phases["decode"]
    assert short.coverage == "layers 0 and 1 of 6, and what is around them"
    assert [la.name for la in phase.launches] == ["n0", "n1", "n2", "n3", "n12"]
    assert phase.launches[-1].inputs["x"].buffer == "h1"
    assert "layers.2.proj" not in short.plan.buffers and "layers.1.proj" in short.plan.buffers
    assert shorten_decode(Model(2).merged_plan()).coverage == ""
    made = reschedule(short.plan, SPEC, phase.schedules[0], 4)
    assert len(made.stages) == 5 and made.programs == 4
    assert all(a.buffer in short.plan.buffers for s in made.stages for a in s.record.arguments)


def test_a_layer_whose_results_do_not_correspond_is_kept() -> None:
    """The fourth layer leaves something more behind."""
    model = Model(4)
    extra = view(model.buffers["n3"])
    model.launches[-2] = model.launches[-2].model_copy(update={"inputs": model.launches[-2].inputs | {"bias": extra}})
    assert shorten_decode(model.merged_plan()).coverage == ""


def test_reports_count_launches_waits_and_bytes() -> None:
    plan = Model(2).merged_plan(programs=5)
    (record,) = list_schedules(plan, SPEC)
    assert record["launches"] == {
        "standalone": {"step": 5, "layer": 2}, "layer": {"step": 3, "layer": 1}, "step": {"step": 1, "layer": 0}
    }  # fmt: skip
    assert record["waits"] == {"none": 3, "counter": 2} and record["replicated"] == 2
    weights = 3 * 4 * WIDTH * WIDTH
    assert record["weight_bytes"]["least"] < record["weight_bytes"]["most"] <= weights + 2 * 256
    timeline = estimate_timeline(plan, SPEC, plan.phases["decode"].schedules[0], 1)
    ran = ~np.isnan(timeline.ended)
    assert (timeline.arrived <= timeline.started)[ran].all() and (timeline.started < timeline.ended)[ran].all()
    assert (np.isnan(timeline.ended) == ~np.stack([p.programs for p in timeline.placed])).all()
    assert timeline.started[2].min() >= np.nanmax(timeline.ended[1]) + 0.99 * WAIT_SECONDS
    assert sum(timeline.split().values()) == pytest.approx(np.nanmax(timeline.ended))
    work = timeline.weights + timeline.other + timeline.compute
    np.testing.assert_allclose((timeline.ended - timeline.started)[ran], work[ran])
    assert not work[~ran].any() and timeline.split()["compute"] == pytest.approx(timeline.compute.sum() / 5)
    picture = draw_timeline(Model(2, 2048).merged_plan(programs=5), SPEC)
    assert {bar["kind"] for bar in picture["bars"]} >= {"weights", "compute", "wait"}
    assert max(bar["x"] + bar["width"] for bar in picture["bars"]) <= picture["width"] + 1
    assert draw_timeline(Model(2).plan(), SPEC) is None


class TableDriver(EmulatedDriver):
    """Walks the table of a launch as a merged kernel does, one program after the other in an order of waits."""

    hangs_at = -1

    def launch(self, function, grid, threads, shared, parameters, cooperative=False, early=False) -> None:
        assert cooperative
        if self._recorded is not None:
            return
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        table, self.counters, times, first, last, tokens = (
            ctypes.c_uint64.from_address(pointers[i]).value & 0xFFFFFFFFFFFFFFFF for i in range(6)
        )
        assert times == 0 and self.launches >= 0
        self.launches += 1
        arrivals: dict[int, int] = {}
        for stage in range(first, last):
            row = self.words(table + 8 * STAGE_WORDS * stage, STAGE_WORDS)
            for wait in range(row[6]):
                source, target = row[WAITS + 2 * wait : WAITS + 2 * wait + 2]
                assert source < first or arrivals[int(source)] == target
            if stage == self.hangs_at:
                self.words(self.counters + 4, 1, np.int64)[0] = (stage + 1 + 2 * 65536) | 1 << 32
                return
            tiles = [self.list_tiles(row, program, grid[0]) for program in range(grid[0])]
            assert row[5] or sorted(sum(tiles, [])) == list(range(row[1]))
            arrivals[stage] = sum(bool(t) for t in tiles)
            for program, chosen in enumerate(tiles):
                addresses = [int(row[ARGUMENTS + 2 * a] + program * row[ARGUMENTS + 2 * a + 1]) for a in range(4)]
                for tile in chosen:
                    (self.run_norm if row[0] == 0 else self.run_linear)(addresses, tile, tokens)

    @staticmethod
    def list_tiles(row, program: int, programs: int) -> list[int]:
        return list(range(row[1])) if row[5] else list(range((program - row[4]) % programs, row[1], programs))

    def words(self, address: int, count: int, dtype=np.int64) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        self.memory.known[address - BASE : address - BASE + size * count] = True
        return self.memory.data[address - BASE : address - BASE + size * count].view(dtype)

    def floats(self, address: int, *shape: int) -> np.ndarray:
        return self.words(address, int(np.prod(shape)), np.float32).reshape(shape)

    def run_norm(self, addresses: list[int], tile: int, tokens: int) -> None:
        x, weight, out = (
            self.floats(a, *shape)
            for a, shape in zip(addresses, ((tokens, WIDTH), (WIDTH,), (tokens, WIDTH)), strict=False)
        )
        out[tile] = x[tile] / np.sqrt((x[tile] ** 2).mean()) * weight

    def run_linear(self, addresses: list[int], tile: int, tokens: int) -> None:
        shapes = ((tokens, WIDTH), (WIDTH, WIDTH), (tokens, WIDTH), (tokens, WIDTH))
        x, weight, residual, out = (self.floats(a, *shape) for a, shape in zip(addresses, shapes, strict=True))
        columns = slice(tile * TILE, (tile + 1) * TILE)
        out[:, columns] = residual[:, columns] + x @ weight[columns].T


def execute(mono: str, tokens: int, which: int, hangs_at: int = -1) -> tuple[torch.Tensor, torch.Tensor, TableDriver]:
    """(result, reference, driver) of one step."""
    plan = Model(2).merged_plan(which=which)
    (schedule,) = plan.phases["decode"].schedules
    plan = with_schedule(plan, schedule.model_copy(update={"mode": "step"}))
    weights, x, expected = make_case(plan, tokens)
    kernels = {name: ("", k.binaries["sm_90a"], len(k.parameters)) for name, k in plan.kernels.items()}
    driver = TableDriver(kernels, "9.0")
    driver.hangs_at = hangs_at
    executor = GpuExecutor(plan, iter(weights.items()), 1, driver, "sm_90a", lambda name, _: name.encode(), mono)
    result = executor.run("decode", {"x": x}, {"tokens": tokens, "batch": tokens}, ("out",))["out"]
    return result, expected, driver


@pytest.mark.parametrize(("mono", "launches"), [("auto", 1), ("step", 1), ("layer", 3)])
@pytest.mark.parametrize(("tokens", "which"), [(1, 0), (2, 0), (3, 1), (16, 1)])
def test_tables_lead_to_the_right_memory(mono: str, launches: int, tokens: int, which: int) -> None:
    result, expected, driver = execute(mono, tokens, which)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert driver.launches == launches
    size = COUNTER_STRIDE * 6
    assert (driver.words(driver.counters, size, np.int32) == 0).all()


def test_a_hanging_wait_is_reported_with_stage_and_program() -> None:
    with pytest.raises(
        ToolchainError, match=r"program 2 waited in vain before stage 2 \(n2\) for n1 \(\d arrivals\); it saw 1"
    ) as caught:
        execute("step", 3, 1, hangs_at=2)
    assert "mono='off'" in caught.value.fix
