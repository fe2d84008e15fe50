"""MiniMax-M3.1-Flash through the driver: the tiny model end to end, slices and the full size without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmcompile
from mmcompile.core.errors import LoweringError, UsageError
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.counts import read_counts
from mmcompile.driver.doors import open_door
from mmcompile.driver.summary import read_passes, summarise
from mmcompile.models import minimax_m3
from mmcompile.runtime import SamplingParams
from mmcompile.runtime.artifact import open_artifact

TINY = "minimax-m3.1-flash-tiny"
SMALL: dict[str, Any] = {"max_context": 256, "max_tokens": 64, "max_batch": 4, "workers": 1, "dtype": "float32"}
TOKENS = 24


def summary_of(path: Path) -> dict[str, Any]:
    artifact = open_artifact(path)
    plans = {name: artifact.plan(name) for name in artifact.manifest.targets}
    return summarise(artifact.manifest, plans, read_passes(path), read_counts(path))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts of the tiny model for the CPU, by scheme; every pass was compared with the graph before it."""
    folder = tmp_path_factory.mktemp("m3")
    return {
        scheme: build(TINY, folder / scheme, BuildOptions(quantization=scheme, verify=True, **SMALL))
        for scheme in ("none", "nvfp4_mxfp8")
    }


def plain_model() -> torch.nn.Module:
    """The weights that a build with seed 0 draws."""
    torch.manual_seed(0)
    return minimax_m3.build(minimax_m3.MODELS[TINY]).eval()


def continue_greedily(model: torch.nn.Module, ids: list[int], tokens: int) -> list[int]:
    text = list(ids)
    with torch.no_grad():
        for _ in range(tokens):
            text.append(int(model(torch.tensor(text), torch.arange(len(text)))[-1].argmax()))
    return text[len(ids) :]


@pytest.mark.slow
def test_greedy_text_equals_the_plain_models(built: dict[str, Path]) -> None:
    engine = mmcompile.load(built["none"], device="cpu")
    generator = torch.Generator().manual_seed(1)
    # Within a block, over a block's end while decoding, and beyond the blocks that are all chosen (3 of 16 tokens).
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in (5, 40, 61)]
    results = engine.generate(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    engine.close()
    model = plain_model()
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.tokens) == continue_greedily(model, prompt, TOKENS)


@pytest.mark.slow
def test_greedy_text_of_the_quantized_model_is_that_of_its_decoded_weights(built: dict[str, Path]) -> None:
    from mmcompile.core.formats import mxfp8
    from mmcompile.core.ops.moe_nvfp4 import nvfp4_dequantize_experts

    model = plain_model()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parts = torch.ops.mm.nvfp4_quantize_experts(parameter.detach(), "max6")
            parameter.data = nvfp4_dequantize_experts(*parts, torch.float32)
        elif name.endswith("_proj.weight"):
            parameter.data = mxfp8.decode(*mxfp8.encode(parameter.detach()))
    prompt = torch.randint(3, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = mmcompile.load(built["nvfp4_mxfp8"], device="cpu")
    (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    engine.close()
    assert list(result.tokens) == continue_greedily(model, prompt, TOKENS)


@pytest.mark.slow
def test_every_part_is_one_operation(built: dict[str, Path]) -> None:
    for scheme, experts in (("none", "mm.moe"), ("nvfp4_mxfp8", "mm.moe_nvfp4")):
        summary = summary_of(built[scheme])
        (target,) = summary["targets"]
        decode = next(p for p in target["phases"] if p["name"] == "decode")
        wanted = {experts: 2, "mm.route_top_k": 2, "mm.paged_block_sparse_attention": 3, "mm.block_top_k": 3}
        assert {op: decode["by_operation"].get(op) for op in wanted} == wanted
        assert summary["cache"]["page_size"] == 16 and summary["cache"]["layers"] == 3
        # K and V of 2 heads of 16, an index key of 16, fp32, in each of 3 layers.
        assert summary["cache"]["bytes_per_token"] == 3 * (2 * 2 * 16 + 16) * 4


@pytest.mark.slow
def test_counts_of_launches_and_bytes(built: dict[str, Path]) -> None:
    summary = summary_of(built["none"])
    (target,) = summary["targets"]
    parameters = sum(p.numel() for p in plain_model().parameters())
    assert summary["model"]["parameters"] == parameters
    assert summary["checkpoint"] == {"fp32": 4 * parameters, "total": 4 * parameters} and summary["beside"] == {}
    pairs = {(record["phase"], record["name"]): record["launches"] for record in summary["passes"]}
    before, after = pairs["standardise", "match_moe"]
    assert after["step"] < before["step"] and after["layer"] < before["layer"]
    steps = [record["launches"] for record in summary["passes"] if record["phase"] != "decode"]
    assert all(a[1] == b[0] for a, b in zip(steps, steps[1:], strict=False))
    assert steps[-1][1]["step"] == next(p["launches"] for p in target["phases"] if p["name"] == "prefill")
    last = [record["launches"] for record in summary["passes"]][-1][1]
    decode = next(p for p in target["phases"] if p["name"] == "decode")
    assert (last["step"], last["layer"]) == (decode["launches"], decode["layer_launches"])
    before, after = (counts["step"] for counts in steps[-1])
    assert f"{before} &rarr; <b>{after}</b>" in (built["none"] / "report.html").read_text()


@pytest.mark.slow
def test_counts_of_a_quantized_checkpoint(built: dict[str, Path]) -> None:
    stored = summary_of(built["nvfp4_mxfp8"])["checkpoint"]
    config = minimax_m3.MODELS[TINY]
    experts = 2 * config.num_experts * 3 * config.intermediate_size * config.hidden_size
    scalars = 2 * 2 * config.num_experts * 8  # a global and an input scale for each of the two stacks of an expert
    assert stored["nvfp4"] == experts * 9 // 16 + scalars
    assert stored["total"] == sum(size for form, size in stored.items() if form != "total")
    assert stored["mxfp8"] * 32 % 33 == 0


@pytest.mark.slow
def test_page_size_follows_the_block_and_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="blocks of 16 needs pages of 16"):
        build(TINY, tmp_path / "out", BuildOptions(page_size=32, **SMALL))


@pytest.mark.parametrize("name", ["minimax-m3.1-flash-slice:0", "minimax-m3.1-flash-slice:61", "smollm2-tiny-slice:1"])
def test_slices_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        open_door(name, BuildOptions(weights="none"))


@pytest.mark.parametrize("scheme", [pytest.param("none", marks=pytest.mark.slow), "nvfp4_mxfp8"])
def test_a_slice_at_real_dimensions_builds_without_weights(scheme: str, tmp_path: Path) -> None:
    options = BuildOptions(weights="none", quantization=scheme)
    summary = summary_of(build("minimax-m3.1-flash-slice:2", tmp_path / "out", options))
    assert summary["weights"] == "none" and summary["cache"]["page_size"] == 128
    assert summary["cache"]["bytes_per_token"] == 2 * (2048 + 256)  # bf16


class _StopError(Exception):
    """Ends a build before its kernels are compiled."""


@pytest.mark.slow
def test_the_full_size_lowers_within_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 60 layers at real dimensions, for targets with kernels too, whose sources are not compiled here."""
    import resource
    import time

    sources: dict[str, int] = {}

    def stop(given: dict[str, Any], *_: object) -> None:
        sources.update({name: len(kernels) for name, kernels in given.items()})
        raise _StopError

    options = BuildOptions(("sm100", "sm107", "gfx950"), weights="none", quantization="nvfp4_mxfp8")
    started, cpu = time.perf_counter(), time.process_time()
    with monkeypatch.context() as patch, pytest.raises(_StopError):
        patch.setattr("mmcompile.driver.compile_sources", stop)
        build("minimax-m3.1-flash", tmp_path / "out", options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"capture, passes, lowering for 3 targets: {wall:.1f} s, {cpu:.1f} s of CPU, {peak:.2f} GiB; {sources}")
    assert peak < 4 and all(30 < count < 120 for count in sources.values()), "60 layers share their kernels"


@pytest.mark.slow
def test_the_full_size_is_counted_as_published(tmp_path: Path) -> None:
    path = build("minimax-m3.1-flash", tmp_path / "out", BuildOptions(weights="none", quantization="nvfp4_mxfp8"))
    summary = summary_of(path)
    assert "55 of 60 equal layers repeated" in summary["model"]["door"]
    published = 250_116_419_880
    total = summary["checkpoint"]["total"] + sum(summary["beside"].values())
    assert abs(total - published) < published / 1000
    assert summary["published"] == {"nvfp4_mxfp8": total}
    assert summary["cache"]["bytes_per_token"] == 60 * (2048 + 256)
    assert json.loads((path / "counts.json").read_text())["passes"][-1][1]["layer"] < 20


@pytest.mark.slow
def test_m3_is_counted_in_mxfp8_from_its_graph() -> None:
    """The published size of M3's MXFP8 checkpoint, multi-token prediction and vision included."""
    captured = open_door("minimax-m3", BuildOptions(weights="none"))
    assert abs(captured.config["published"]["mxfp8"] - 451.5e9) < 451.5e6
