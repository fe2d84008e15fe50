"""Streamed decode steps of artifacts: what the runtime launches, and in the emulator beside standalone launches."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmcompile.driver
from mmcompile.core.errors import LoweringError, ToolchainError, VerificationError
from mmcompile.core.plan import Binary, Kernel, Plan, Schedule, Stream
from mmcompile.core.stream import FAULT_WORD, drop_streams
from mmcompile.driver import BuildOptions, build, verify_mono
from mmcompile.driver.emulated_device import EmulatedDriver
from mmcompile.driver.mono import _offer_stream, prove_stream
from mmcompile.driver.mono_summary import list_schedules
from mmcompile.driver.shorten import with_schedule
from mmcompile.driver.summary import measure_memory
from mmcompile.driver.verify_mono import MonoCase, compare_steps, list_cases, run_mode
from mmcompile.emulate.memory import BASE
from mmcompile.lower.merge import propose_merges
from mmcompile.runtime.artifact import open_artifact
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.loading import _choose_streams
from mmcompile.runtime.mono import find_schedule
from mmcompile.targets._tuned.stream_offer import offer_stream
from mmcompile.targets.sm90 import TARGET
from tests.driver.mono_model import Model, scheduler
from tests.targets.stream_decoder import Decoder

SPEC = dataclasses.replace(TARGET.spec, units=8)
SMALL = dataclasses.replace(TARGET, spec=dataclasses.replace(TARGET.spec, units=4))
"""A device that the emulator can run whole."""
MERGED = "merged"


def make_binary(symbol: str, shared: int = 65536) -> Binary:
    return Binary(
        file="", assembly="", sha256="", symbol=symbol, shared=shared, num_warps=8, warp_size=32, registers=200,
        spills=0, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, ledger={},
    )  # fmt: skip


def make_plan(mode: str = "stream") -> Plan:
    """A plan of one layer whose steps of one token may be streamed."""
    decoder = Decoder(1)
    decoder.launches = decoder.launches[:-1]
    plan = decoder.plan()
    found = offer_stream(plan, plan.phases["decode"], SPEC, 1)
    stream = found.streams[1]
    schedule = Schedule(
        low=1, high=1, kernel=MERGED, programs=1, stages=(), layers=(), private={}, private_bytes=0, mode=mode,
        seconds={"standalone": 3e-6, "stream": 1e-6}, basis="cost model", stream=stream,
    )  # fmt: skip
    phase = plan.phases["decode"].model_copy(update={"schedules": (schedule,)})
    parameters = tuple((p.name, p.type) for p in found.sources[1].parameters)
    kernels = {
        name: Kernel(name=name, source="", parameters=own, num_stages=1, expectations={},
                     binaries={"sm_90a": make_binary(name)})
        for name, own in ((stream.record.kernel, parameters), (MERGED, ()))
    }  # fmt: skip
    return plan.model_copy(
        update={"phases": {"decode": phase}, "buffers": plan.buffers | found.buffers, "kernels": kernels}
    )


class Recorder(EmulatedDriver):
    """Keeps the arguments of launches, and reports a fault if told to."""

    def __init__(self, kernels: Any) -> None:
        super().__init__(kernels, "sm_90a")
        self.calls: list[dict[str, int]] = []
        self.fault: tuple[int, int] | None = None

    def launch(self, function, grid, threads, shared, parameters, cooperative=False, early=False) -> None:
        _, binary, names = function
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.c_uint64.from_address(pointers[i]).value for i in range(len(names) + 2)]
        assert cooperative and values[-2:] == [0, 0]
        call = dict(zip(names, values, strict=False))
        self.calls.append(call | {"programs": grid[0], "threads": threads, "shared": shared})
        if self._recorded is None:
            words = self.words(call["workspace"], FAULT_WORD + 2)
            words[0] += 1  # as the kernel counts its launches
            if self.fault is not None:
                words[FAULT_WORD : FAULT_WORD + 2] = torch.tensor(self.fault).numpy()

    def words(self, address: int, count: int) -> Any:
        return self.memory.data[address - BASE : address - BASE + 4 * count].view("int32")


def make_executor(plan: Plan, mono: str = "auto") -> tuple[GpuExecutor, Recorder]:
    kernels = {n: ("", k.binaries["sm_90a"], [p for p, _ in k.parameters]) for n, k in plan.kernels.items()}
    driver = Recorder(kernels)
    generator = torch.Generator().manual_seed(0)
    weights = [
        (b.name, torch.randn(tuple(map(int, b.shape)), generator=generator).bfloat16())
        for b in plan.buffers.values() if b.role == "weight"
    ]  # fmt: skip
    return GpuExecutor(plan, iter(weights), 3, driver, "sm_90a", lambda name, _: name.encode(), mono), driver


def run(executor: GpuExecutor) -> None:
    inputs = {name: torch.zeros(1, dtype=torch.int32) for name in ("input_ids", "positions", "seq_lens")}
    inputs |= {"slot_mapping": torch.zeros(1, dtype=torch.int64), "block_table": torch.zeros(1, 3, dtype=torch.int32),
               "query_start": torch.zeros(2, dtype=torch.int32)}  # fmt: skip
    executor.run("decode", inputs, {"tokens": 1, "batch": 1, "max_blocks": 3}, ("logits",))


def test_a_streamed_step_is_one_cooperative_launch_on_a_workspace_that_is_zero_once() -> None:
    plan = make_plan()
    executor, driver = make_executor(plan)
    run(executor)
    run(executor)
    stream = plan.phases["decode"].schedules[0].stream
    assert stream is not None
    first, second = driver.calls
    assert first == second and first["programs"] == 8 and first["threads"] == 256 and first["shared"] == 65536
    assert first["tokens"] == 1 and first["max_blocks"] == 3
    assert driver.words(first["workspace"], 1)[0] == 2  # the kernel's own count, which nobody sets back
    places = executor._persistent
    assert first["stream"] == places["decode.stream"] and first["norms"] == places["decode.stream_norms"]
    assert first["embedding"] == places["embed"] and first["cache_0"] == places["kv_cache_0"]
    assert first["table"] == places["cos_sin"]
    assert not executor._driver.memory.data[first["result"] - BASE : first["result"] - BASE + 1000].any()
    with pytest.raises(Exception, match="no times of stages"):
        executor.read_stages()


def test_the_workspace_is_zero_again_before_tags_come_round() -> None:
    plan = make_plan()
    schedule = plan.phases["decode"].schedules[0]
    stream = schedule.stream
    assert stream is not None and stream.period == 65535 // 2
    short = schedule.model_copy(update={"stream": stream.model_copy(update={"period": 2})})
    executor, driver = make_executor(with_schedule(plan, short))
    counts = []
    for _ in range(5):
        run(executor)
        counts.append(int(driver.words(driver.calls[0]["workspace"], 1)[0]))
    assert counts == [1, 2, 1, 2, 1]


def test_a_wait_in_vain_names_what_was_waited_for_and_the_workspace_is_zero_again() -> None:
    executor, driver = make_executor(make_plan())
    driver.fault = (1 + 8 * 0 + 4, 5)
    with pytest.raises(ToolchainError, match="program 5 waited in vain for 'activation' of layer 0"):
        run(executor)
    assert not driver.words(driver.calls[0]["workspace"], FAULT_WORD + 2).any()


def test_modes_choose_between_schedules_and_copies() -> None:
    plan, phase = make_plan(), make_plan().phases["decode"]
    symbols = {"tokens": 1}
    assert find_schedule(phase, symbols, "auto").mode == "stream"
    assert find_schedule(phase, symbols, "step").mode == "step" and find_schedule(phase, symbols, "off") is None
    assert find_schedule(make_plan("step").phases["decode"], symbols, "stream").mode == "stream"
    without = drop_streams(make_plan("step"))
    assert find_schedule(without.phases["decode"], symbols, "stream").mode == "step"
    assert (
        _choose_streams(plan, "auto") is plan and _choose_streams(make_plan("step"), "stream").buffers["decode.stream"]
    )
    for mono, mode in (("off", "stream"), ("step", "stream"), ("auto", "step")):
        assert "decode.stream" not in _choose_streams(make_plan(mode), mono).buffers


@pytest.mark.parametrize("fault", ["none", "order", "programs", "shape", "operations", "resident"])
def test_a_recorded_step_is_proven_against_the_plan(fault: str) -> None:
    plan, spec = make_plan(), SPEC
    stream = plan.phases["decode"].schedules[0].stream
    assert stream is not None
    if fault == "order":
        buffer = plan.buffers["decode.stream"]
        parts = (buffer.parts[1], buffer.parts[0], *buffer.parts[2:])
        moved = buffer.model_copy(update={"parts": parts})
        plan = plan.model_copy(update={"buffers": plan.buffers | {"decode.stream": moved}})
    elif fault == "programs":
        stream = stream.model_copy(update={"programs": 4})
    elif fault == "shape":
        stream = stream.model_copy(update={"shape": stream.shape | {"eps": 1e-6}})
    elif fault == "operations":
        launches = [la.model_copy(update={"attributes": la.attributes | {"window": 7}})
                    if la.op == "mm.paged_attention" else la for la in plan.phases["decode"].launches]  # fmt: skip
        phase = plan.phases["decode"].model_copy(update={"launches": tuple(launches)})
        plan = plan.model_copy(update={"phases": {"decode": phase}})
    elif fault == "resident":
        stream = stream.model_copy(update={"programs": 9})
    expected = {"order": "another order", "operations": "a window of 7 tokens", "resident": "9 programs"}
    if fault == "none":
        prove_stream(plan, spec, stream)
        return
    with pytest.raises(LoweringError, match=expected.get(fault, "not the one")):
        prove_stream(plan, spec, stream)


def test_ranges_end_where_a_streamed_step_does() -> None:
    model = Model(2)
    phase = model.plan().phases["decode"].model_copy(update={"launches": tuple(model.launches)})
    merges, _ = propose_merges(phase, model.stages, (1, 2, 4, 8))
    assert [(m.low, m.high) for m in merges] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]


def test_portable_builds_and_launches_a_layer_have_no_stream() -> None:
    decoder = Decoder(1)
    offers = {
        (mono, portable): _offer_stream(decoder.plan(), SMALL, 1, mono, portable).find(1)
        for mono, portable in (("step", False), ("step", True), ("layer", False))
    }
    assert isinstance(offers["step", False], Stream)
    assert "--portable" in str(offers["step", True]) and "--mono layer" in str(offers["layer", False])


def test_the_fastest_mode_is_chosen_and_the_reason_against_a_stream_is_kept() -> None:
    model, stream = Model(2), make_plan().phases["decode"].schedules[0].stream
    assert stream is not None
    phase = model.plan().phases["decode"].model_copy(update={"launches": tuple(model.launches)})
    merge = propose_merges(phase, model.stages)[0][0]
    maker = scheduler(model.plan())
    fast = maker.make(merge, "merged", 3, 3, "step", stream.model_copy(update={"latency": 0.0, "bytes": 8}))
    assert fast.mode == "stream" and fast.seconds["stream"] < fast.seconds["step"] < fast.seconds["standalone"]
    slow = maker.make(merge, "merged", 3, 3, "step", stream.model_copy(update={"latency": 1.0}))
    assert slow.mode == "step" and slow.stream is not None and slow.seconds["stream"] > 1.0
    none = maker.make(merge, "merged", 3, 3, "step", "because")
    assert none.unstreamed == "because" and none.stream is None and "stream" not in none.seconds
    few = maker.make(merge, "merged", 3, 3, "step", stream.model_copy(update={"programs": 1}))
    assert few.seconds["stream"] > fast.seconds["stream"]


def test_differences_are_measured_against_the_rows_that_were_written() -> None:
    want = torch.zeros(16, 64).bfloat16()
    want[3] = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    got = want.clone()
    got[3, 5] = -0.96875
    assert compare_steps({"cache": want}, {"cache": got}, True)[0] == pytest.approx(0.03125)
    with pytest.raises(VerificationError, match="by 0.12"):
        compare_steps({"cache": want}, {"cache": got})
    got[7, 0] = 0.125  # a row that should not have been written
    with pytest.raises(VerificationError, match="cache differs .* by 0.12"):
        compare_steps({"cache": want}, {"cache": got}, True)


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 500, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama for a device of 4 units, so that the emulator has 4 programs to run."""
    folder = tmp_path_factory.mktemp("stream")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = BuildOptions(
        targets=("sm90",), weights="none", max_context=128, max_batch=2, max_tokens=32, page_size=16, mono="step"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmcompile.driver, "load_target", lambda name: SMALL)
        return build(str(folder), folder / "a", options)


def list_streamed(path: Path) -> list[MonoCase]:
    opened = open_artifact(path)
    schedules = opened.plan("sm90").phases["decode"].schedules
    cases = [case for s in schedules for case in list_cases(opened, "sm90", s, True, 0, 4)]
    return [case for case in cases if case.mode == "stream"]


@pytest.mark.slow
def test_verify_runs_streamed_steps_beside_standalone_launches(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound: as for merged launches, 8 times what bf16 rounds."""
    monkeypatch.setattr(verify_mono, "load_target", lambda name: SMALL)
    verdicts = verify_mono.verify_schedules(artifact, quick=True, programs=4, workers=1)
    assert all(v.verdict == "ok" for v in verdicts), verdicts
    streamed = [v for v in verdicts if v.mode == "stream"]
    assert [(v.tokens, v.programs) for v in streamed] == [(1, 4)]
    assert all(v.proofs == ("assembled", "ledger", "schedule", "emulator") for v in streamed)
    assert all(0 < v.difference < 0.0625 for v in streamed)


@pytest.mark.slow
def test_an_artifact_says_what_the_copy_costs(artifact: Path) -> None:
    opened = open_artifact(artifact)
    plan = opened.plan("sm90")
    schedules = plan.phases["decode"].schedules
    assert [(s.low, s.high) for s in schedules] == [(1, 1), (2, 2)]
    assert all(s.stream is not None and "stream" in s.seconds for s in schedules)
    copied = 1835008 if any(s.mode == "stream" for s in schedules) else 0
    assert opened.manifest.targets["sm90"].copied_bytes == copied
    assert ("weights that are there a second time" in (artifact / "report.html").read_text()) == bool(copied)
    assert measure_memory(plan)["derived"] == (copied + 5 * 512 if copied else 0)
    records = list_schedules(plan, SMALL.spec)
    assert all(r["stream"]["bytes"] == 1835008 and r["launches"]["stream"]["step"] == 3 for r in records)


@pytest.mark.slow
def test_every_interleaving_gives_the_same_bits(artifact: Path) -> None:
    """Two rows, of which one has no sequence."""
    case = list_streamed(artifact)[1]
    results = [run_mode(dataclasses.replace(case, order=order), "stream") for order in range(2)]
    for name, value in results[0].items():
        assert torch.equal(value.view(torch.uint8), results[1][name].view(torch.uint8)), name
    assert 0 < compare_steps(run_mode(case, "off"), results[0], True)[0] < 0.0625
