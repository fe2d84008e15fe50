"""Artifacts as graphs again: what was built is exported, and every pass can be looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmcompile.core.errors import ArtifactError, LoweringError, UsageError
from mmcompile.core.graph import describe_value, print_graph
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.doors import open_door
from mmcompile.driver.export import export
from mmcompile.driver.reopen import find_before, find_stored, list_stored, read_stored, reopen
from mmcompile.runtime import load
from mmcompile.runtime.artifact import open_artifact

SMALL: dict[str, Any] = {"weights": "random", "max_context": 128, "max_tokens": 64, "max_batch": 32}
IDS = torch.randint(512, (40,), generator=torch.Generator().manual_seed(0)).tolist()
# fp32 sums in another order, in log-probabilities of about -6.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """smollm2-tiny with NVFP4 weights in fp32; do not change it."""
    options = BuildOptions(**SMALL, dtype="float32", quantization="nvfp4", score=True)
    return build("smollm2-tiny", tmp_path_factory.mktemp("built") / "tiny", options)


def score(graph: Callable[..., Any]) -> torch.Tensor:
    """Log-probability of each of IDS but the first, by a graph over the whole sequence."""
    with torch.no_grad():
        logits = graph(torch.tensor(IDS), torch.arange(len(IDS)))
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def test_the_finished_graph_with_the_packed_weights(artifact: Path) -> None:
    captured, last = reopen(artifact)
    assert last == "fold_constants" and captured.kind == "decoder"
    assert (score(captured.graph_module) - load(artifact, device="cpu").score(IDS)).abs().max() <= TOLERANCE
    shapes = {i.name: (i.shape, i.dtype) for i in captured.inputs}
    assert shapes == {"input_ids": (("tokens",), "int64"), "positions": (("tokens",), "int64")}
    assert captured.symbols == {"tokens": (2, 128)}
    (output,) = captured.graph_module.graph.find_nodes(op="output")
    assert describe_value(output.args[0].meta["val"]) == "f32[tokens, 512]"
    text = print_graph(captured.graph_module)
    assert "mm.attention(" in text and "mm.linear_nvfp4(" in text
    assert not any(word in text for word in ("kv_cache", "insert", "paged", "gather_last", "sample", "query_start"))


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float16"])
def test_a_narrow_cache_stays_a_rounding(tmp_path: Path, cache_dtype: str) -> None:
    options = BuildOptions(**SMALL, dtype="float32", cache_dtype=cache_dtype, score=True)
    path = build("smollm2-tiny", tmp_path / "out", options)
    graph_module = reopen(path)[0].graph_module
    have = score(graph_module)
    error = (have - load(path, device="cpu").score(IDS)).abs().max()
    rounding = (have - score(open_door("smollm2-tiny", options).graph_module)).abs().max()
    assert error <= TOLERANCE and error < rounding / 5, "closer to the artifact than to the model without rounding"
    text = print_graph(graph_module)
    assert text.count(f"torch.{cache_dtype})") == 4 and text.count("aten.clamp") == 4 * (cache_dtype[5] == "8")


def test_every_pass_is_read_as_it_was_printed(artifact: Path) -> None:
    opened = open_artifact(artifact)
    stored = list_stored(opened)
    assert [p.index for p in stored] == list(range(len(stored)))
    for item in (stored[0], find_stored(opened, "match_rope"), find_stored(opened, "layout")):
        text = (artifact / "passes" / f"{item.index:02d}-{item.name}.txt").read_text()
        assert print_graph(read_stored(opened, item)) == text


def test_passes_by_name_number_and_phase_and_what_came_before(artifact: Path) -> None:
    opened = open_artifact(artifact)
    rope = find_stored(opened, "match_rope")
    assert find_stored(opened, f"{rope.index:02d}") == rope
    assert find_before(opened, rope).index == rope.index - 1
    first, last = find_stored(opened, "one_token_per_sequence"), find_stored(opened, "decode")
    assert find_before(opened, first).name == "append_sampler" and first.index < last.index
    with pytest.raises(UsageError, match="did you mean 'match_rope'"):
        find_stored(opened, "match_ropes")
    with pytest.raises(UsageError, match=r"drop_no_ops is the first pass.*--after capture"):
        find_before(opened, find_stored(opened, "0"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"after": "match_rope"}, "packed weights for its finished graph alone, not for the one after match_rope"),
        ({"options": BuildOptions(quantization="nvfp4")}, "an artifact was built with its options"),
    ],
)
def test_what_was_decided_when_it_was_built_is_refused(
    artifact: Path, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export(str(artifact), tmp_path / "x.onnx", **{"options": BuildOptions()} | more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_artifact_without_weights_is_refused(tmp_path: Path) -> None:
    path = build("smollm2-tiny", tmp_path / "out", BuildOptions(**SMALL | {"weights": "none"}))
    with pytest.raises(ArtifactError, match="the artifact holds no weights.*build it without --weights none"):
        reopen(path)


@pytest.mark.slow
def test_an_indexer_has_no_meaning_without_pages(tmp_path: Path) -> None:
    path = build("minimax-m3.1-flash-tiny", tmp_path / "out", BuildOptions(**SMALL))
    with pytest.raises(LoweringError, match=r"slot_mapping, which has no meaning without .* \(at node .*minimax"):
        reopen(path)


def test_a_module_is_reopened_as_it_is(modules: Path, tmp_path: Path) -> None:
    path = build(f"{modules}:projected", tmp_path / "out", BuildOptions(dtype="float32"))
    captured, _ = reopen(path)
    assert captured.kind == "module" and captured.symbols == {"rows": (2, 64)}
    x = torch.randn(9, 48)
    with torch.no_grad():
        have = captured.graph_module(x)
    assert torch.equal(have, load(path, device="cpu").forward(x=x)["result"])


@pytest.mark.slow
def test_a_pass_before_and_after_by_the_verb(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch_mlir", reason="torch-mlir is absent: pip install 'mmcompile[mlir]'")
    from mmcompile.cli import main

    words = ["inspect", str(artifact), "--mlir"]
    assert main([*words, "--pass", "match_swiglu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [shown[side]["mlir"].count("torch.mm.swiglu") for side in ("before", "after")] == [0, 2]
    assert shown["after"]["pass"].endswith("-match_swiglu")
    assert main([*words, "--pass", "decode"]) == 0
    said = capsys.readouterr().out
    assert "// before: the graph after" in said and "torch.mm.qkv_norm_rope_insert" in said.partition("// after")[2]
    assert main(words) == 2 and main([*words[:2], "--pass", "1"]) == 2
