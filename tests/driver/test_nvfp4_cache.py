"""--cache-dtype nvfp4 through the driver and the engine: text, the manifest's record, layouts by target, bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import mmcompile
from mmcompile.cli.views import model_table
from mmcompile.core.errors import ArtifactError, UsageError
from mmcompile.core.formats import nvfp4_cache
from mmcompile.core.formats.cache_pages import list_layouts
from mmcompile.core.plan import CacheSpec, Plan, seal
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.caches import describe_cache
from mmcompile.driver.doors import open_door
from mmcompile.driver.pack import hash_files
from mmcompile.driver.rewrite import rewrite_model
from mmcompile.driver.summary import read_passes, summarise
from mmcompile.driver.verify import verify_artifact
from mmcompile.lower.plan import lower_model
from mmcompile.models import minimax_m3
from mmcompile.runtime import SamplingParams
from mmcompile.runtime.artifact import open_artifact
from mmcompile.targets import cpu, gfx950, sm90, sm100, sm107

TINY, HEADS = "minimax-m3.1-flash-tiny", "minimax-m3.1-flash-tiny-heads"
SMALL: dict[str, Any] = {"max_context": 256, "max_tokens": 64, "max_batch": 4, "workers": 1, "dtype": "float32",
                         "cache_dtype": "nvfp4"}  # fmt: skip
TOKENS = 16


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with heads and blocks of the real size, for the CPU."""
    return build(HEADS, tmp_path_factory.mktemp("nvfp4") / "out", BuildOptions(**SMALL))


def through_the_cache(x: Tensor) -> Tensor:
    """Rows as they come back from an NVFP4 page."""
    return nvfp4_cache.dequantize_rows(*nvfp4_cache.quantize_rows(x))


@contextmanager
def plain_model(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    """The plain model with the weights of seed 0, whose keys, values and index keys pass through the quantizer."""
    torch.manual_seed(0)
    model = minimax_m3.build(minimax_m3.MODELS[name]).eval()
    keys: list[Tensor] = []
    plain_rotate = minimax_m3.rotate

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = plain_rotate(x, cos, sin)
        return through_the_cache(out) if any(x is key for key in keys) else out

    for name, module in model.named_modules():
        if name.endswith(("self_attn.k_norm", "index_k_norm")):
            module.register_forward_hook(lambda module, inputs, output: keys.append(output))
        if name.endswith("v_proj"):
            module.register_forward_hook(lambda module, inputs, output: through_the_cache(output))
    with monkeypatch.context() as patch:
        patch.setattr(minimax_m3, "rotate", rotate)
        yield model
    assert keys, "no key went through the quantizer"


def check_text(path: Path, name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]
    engine = mmcompile.load(path, device="cpu")
    results = engine.generate(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    engine.close()
    with plain_model(name, monkeypatch) as model, torch.no_grad():
        for prompt, result in zip(prompts, results, strict=True):
            text = list(prompt)
            for _ in range(TOKENS):
                text.append(int(model(torch.tensor(text), torch.arange(len(text)))[-1].argmax()))
            assert list(result.tokens) == text[len(prompt) :]


def test_greedy_text_is_that_of_the_plain_model_step_by_step(built, monkeypatch):
    check_text(built, HEADS, (5, 120), monkeypatch)


@pytest.mark.slow
def test_greedy_text_over_many_blocks(tmp_path, monkeypatch):
    """Within a block, over a block's end while decoding, and beyond the blocks that are all chosen (3 of 16 tokens)."""
    path = build(TINY, tmp_path / "out", BuildOptions(verify=True, **SMALL))
    check_text(path, TINY, (5, 40, 61), monkeypatch)


def test_the_manifest_names_the_quantizer_the_layouts_and_the_bytes(built):
    artifact = open_artifact(built)
    cache = artifact.manifest.cache
    assert cache is not None
    # K and V of one head of 128 at 72 bytes, and an index key.
    assert (cache.kv_bytes, cache.index_bytes, cache.bytes_per_token) == (144, 72, 216)
    assert (cache.dtype, cache.quantizer) == ("nvfp4", "minimax-m3.1")
    assert cache.layouts == {"cpu": ("nvfp4.linear", "nvfp4.index")}
    summary = summarise(artifact.manifest, {"cpu": artifact.plan("cpu")}, read_passes(built))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(model_table(summary))
    shown = capture.get()
    for words in ("216 bytes per token: 1 layers, nvfp4, pages of 128 tokens", "144 bytes of K and V, 72 of index keys",
                  "quantizer minimax-m3.1, layouts cpu nvfp4.linear, nvfp4.index"):  # fmt: skip
        assert words in shown


def lower_everywhere(model: str, cache_dtype: str, dump: Path) -> tuple[CacheSpec, dict[str, Plan]]:
    """The record of the caches and the plans of every target, whose kernels are left out."""
    options = BuildOptions(weights="none", **SMALL | {"cache_dtype": cache_dtype, "dtype": "bfloat16"})
    graphs = rewrite_model(open_door(model, options), options, dump, lambda *_: None)
    plans = {}
    for target in (cpu, gfx950, sm90, sm100, sm107):
        own = target.TARGET.spec
        spec = replace(cpu.TARGET.spec, name=own.name, cache_layouts=own.cache_layouts)
        plans[own.name] = lower_model(graphs.graphs, spec, (), graphs.symbols, graphs.outputs).plan
    return describe_cache(plans), plans


@pytest.mark.slow
def test_every_target_has_its_layout(tmp_path):
    cache, plans = lower_everywhere(HEADS, "nvfp4", tmp_path)
    quad, linear = ("nvfp4.token_quad", "nvfp4.index"), ("nvfp4.linear", "nvfp4.index")
    assert {name: cache.layouts[name] for name in ("cpu", "gfx950", "sm100", "sm107")} == {
        "cpu": linear, "gfx950": linear, "sm100": quad, "sm107": quad,
    }  # fmt: skip
    assert all(tag in sm90.TARGET.spec.cache_layouts or tag in linear for tag in cache.layouts["sm90"])
    for plan in plans.values():
        tags = {b.name: b.layout for b in plan.buffers.values() if b.role == "state"}
        launches = [la for phase in plan.phases.values() for la in phase.launches if "layout" in la.attributes]
        assert len(launches) == 6, "insertion, score and attention in both phases"
        for launch in launches:
            named = list_layouts(launch.inputs, launch.attributes)
            assert named
            for name, attribute in named.items():
                assert launch.attributes[attribute] == tags[launch.inputs[name].buffer]


@pytest.mark.slow
@pytest.mark.parametrize("model", [TINY, HEADS])
@pytest.mark.parametrize("target", ["sm90", "sm100", "sm107", "gfx950"])
def test_kernels_of_every_target_agree_with_the_references(tmp_path, model, target):
    """Sources in the interpreter and assembly in the emulators, tails of pages full of NaN; nothing runs otherwise."""
    options = SMALL | {"targets": (target,), "dtype": "bfloat16", "max_batch": 16, "strict": True}
    path = build(model, tmp_path / "out", BuildOptions(**options))
    verdicts = verify_artifact(path, kernel_pattern="*nvfp4*", quick=True)
    assert [v for v in verdicts if v.verdict != "ok"] == []
    proven = {v.op for v in verdicts}
    assert proven >= {"mm.qk_norm_rope_insert_index", "mm.paged_index_score", "mm.paged_block_sparse_attention"}


@pytest.mark.slow
def test_bytes_of_a_layer_of_the_real_model(tmp_path):
    for dtype, kv, index in (("nvfp4", 576, 72), ("float8_e4m3fn", 1024, 128), ("bfloat16", 2048, 256)):
        cache, _ = lower_everywhere("minimax-m3.1-flash-slice:1", dtype, tmp_path / dtype)
        assert (cache.kv_bytes, cache.index_bytes, cache.bytes_per_token) == (kv, index, kv + index)


def edit(built: Path, copy: Path, plan: Any = None, manifest: Any = None) -> Path:
    """A copy of an artifact with changed records and right hashes: what another writer could have made."""
    shutil.copytree(built, copy)
    for file, change in (("plan.cpu.json", plan), ("manifest.json", manifest)):
        record = json.loads((copy / file).read_text())
        if change is not None:
            change(record)
        if file == "manifest.json":
            record = seal(record | {"files": hash_files(copy)})
        (copy / file).write_text(json.dumps(record))
    return copy


def rename_attention(tag: str) -> Any:
    def change(record: dict[str, Any]) -> None:
        launches = record["phases"]["decode"]["launches"]
        attention = next(la for la in launches if la["op"] == "mm.paged_block_sparse_attention")
        attention["attributes"]["layout"] = tag

    return change


def rename_buffers(record: dict[str, Any]) -> None:
    for buffer in record["buffers"].values():
        buffer["layout"] = {"nvfp4.linear": "nvfp4.token_quad"}.get(buffer["layout"], buffer["layout"])


@pytest.mark.parametrize(("changes", "message"), [
    ({"plan": rename_attention("nvfp4.token_quad")},
     "the cache was written in the layout 'nvfp4.linear' and is read as 'nvfp4.token_quad'"),
    ({"plan": rename_attention("linear")},
     "the cache kv_cache_0 has the layout 'nvfp4.linear', decode.* takes it as 'linear'"),
    ({"plan": rename_buffers}, "gives the caches of cpu the layouts nvfp4.linear, nvfp4.index, kv_cache_0 has 'nvfp4."),
    ({"manifest": lambda record: record["cache"].update(quantizer="trtllm")},
     "the cache is written by the quantizer 'trtllm', this mmcompile has 'minimax-m3.1'"),
])
def test_a_cache_of_another_layout_is_refused(built, tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=message) as caught:
        mmcompile.load(edit(built, tmp_path / "copy", **changes), device="cpu")
    assert "\n" not in str(caught.value)


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="unknown cache dtype 'nvfp5'; did you mean 'nvfp4'"):
        BuildOptions(cache_dtype="nvfp5")
