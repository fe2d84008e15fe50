"""Bad input through build() and load(): one sentence that says what and where, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmcompile
from mmcompile.core.errors import CaptureError, CheckpointError, LoweringError, RequestError, UsageError
from mmcompile.driver import BuildOptions, build
from mmcompile.runtime import Engine, SamplingParams

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODULES = """
import torch


class Branching(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Sorting(torch.nn.Module):
    def forward(self, x):
        return torch.sort(x * 2.0, dim=0).values


def branching():
    return Branching(), (torch.randn(4),)


def sorting():
    return Sorting(), (torch.randn(4, 8),)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """An output path; after the test nothing but what was there before lies beside it."""
    parent = tmp_path / "place"
    parent.mkdir()
    yield parent / "out"
    assert list(parent.iterdir()) == []


@pytest.fixture
def module_file(tmp_path: Path) -> Path:
    """A Python file of modules that cannot be built."""
    path = tmp_path / "user_model.py"
    path.write_text(MODULES)
    return path


def line_of(file: Path, text: str) -> str:
    """ "name:number" of the first line that holds ``text``."""
    number = next(i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line)
    return f"{file.name}:{number}"


def test_a_branch_on_values_names_its_line(module_file: Path, place: Path) -> None:
    with pytest.raises(CaptureError, match="Branching cannot be exported") as caught:
        build(f"{module_file}:branching", place, BuildOptions())
    assert caught.value.where.endswith(line_of(module_file, "if x.sum() > 0"))
    assert "independent of tensor values" in caught.value.fix
    assert str(caught.value).count("\n") == 0


def test_strict_names_the_operation_its_node_and_its_line(module_file: Path, place: Path) -> None:
    with pytest.raises(LoweringError, match="aten.sort") as caught:
        build(f"{module_file}:sorting", place, BuildOptions(targets=("sm90",), strict=True, workers=1))
    assert caught.value.where.startswith("node sort")
    assert caught.value.where.endswith(line_of(module_file, "torch.sort"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that transformers saved; copy it before you change it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(folder)
    return folder


UP = "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def with_nan(tensors: Tensors) -> Tensors:
    tensors[UP][3, 5] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: v for n, v in t.items() if n != UP}, f"missing tensors: '{UP}'"),
        (lambda t: t | {"model.layers.1.extra.weight": torch.ones(2)}, "does not have: 'model.layers.1.extra.weight'"),
        (lambda t: t | {UP: torch.ones(32, 48)}, rf"{UP}: \[32, 48\] instead of \[48, 32\]"),
        (with_nan, f"'{UP}' holds NaN"),
    ],
    ids=["missing", "extra", "wrong shape", "NaN"],
)
def test_a_wrong_tensor_is_named(
    checkpoint: Path, tmp_path: Path, place: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(change(load_file(checkpoint / "model.safetensors")), broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        build(str(broken), place, BuildOptions(max_batch=4))
    assert "broken" in caught.value.where


@pytest.mark.parametrize("keep", [0, 100, -1], ids=["empty", "header", "last byte"])
def test_a_truncated_file_is_named(checkpoint: Path, tmp_path: Path, place: Path, keep: int) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a complete safetensors file.*download it again") as caught:
        build(str(broken), place, BuildOptions())
    assert caught.value.where.endswith("model.safetensors")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model-1.safetensors"}}',
            "shard model-1.safetensors is m",
        ),
        ("pytorch_model.bin", "", "only pickled weights found"),
    ],
)
def test_weights_that_cannot_be_read_are_never_replaced_by_random_ones(
    checkpoint: Path, tmp_path: Path, place: Path, file: str, content: str, message: str
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        build(str(folder), place, BuildOptions())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llamas"}, "no causal language model of type 'llamas'"),
        ({"hidden_size": 33}, "hidden size .33. is not a multiple of the number of attention heads"),
        ({"num_attention_heads": "four"}, "'num_attention_heads' expected int"),
        ({"hidden_act": "silent"}, "LlamaForCausalLM.*KeyError: 'silent'"),
    ],
)
def test_a_config_that_makes_no_model(tmp_path: Path, place: Path, fields: dict[str, Any], message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **CONFIG, **fields}))
    with pytest.raises(CaptureError, match=message) as caught:
        build(str(file), place, BuildOptions(weights="none"))
    assert "config.json" in caught.value.where and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("smollm2-135n", {}, "unknown model 'smollm2-135n'; did you mean 'smollm2-135m'"),
        ("smollm2-tiny", {"targets": ("cpu", "sm_90")}, "unknown target 'sm_90'; did you mean 'sm90'"),
        ("smollm2-tiny", {"disabled": ("merge_linear",)}, "unknown pass 'merge_linear'; did you mean 'merge_linears'"),
        ("smollm2-tiny", {"quantization": "nvfp44"}, "unknown quantization 'nvfp44'; did you mean 'nvfp4'"),
        (
            "smollm2-tiny",
            {"quantization": "nvfp4", "quantization_options": {"metod": "search"}},
            "unknown option of nvfp4 'metod'; did you mean 'method'",
        ),
        (
            "smollm2-tiny",
            {"quantization": "none", "quantization_options": {"method": "search"}},
            "options of a quantization, but none is asked for: method",
        ),
    ],
    ids=["model", "target", "pass", "scheme", "option of a scheme", "option without a scheme"],
)
def test_an_unknown_name_brings_the_closest(place: Path, model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(model, place, BuildOptions(weights="none", **options))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """smollm2-tiny with a context of 64 tokens and six pages of 8."""
    options = BuildOptions(weights="random", dtype="float32", page_size=8, max_context=64, max_tokens=16, max_batch=4)
    out = build("smollm2-tiny", tmp_path_factory.mktemp("artifact") / "tiny", options)
    loaded = mmcompile.load(out, device="cpu", pages=6)
    assert isinstance(loaded, Engine)
    return loaded


def test_a_prompt_longer_than_the_context(engine: Engine) -> None:
    with pytest.raises(RequestError, match="the prompt has 65 tokens, the context holds 64"):
        engine.generate([[1, 2, 3], list(range(65))])
    assert not engine.busy and engine.describe()["pages"]["free"] == 6
    with pytest.raises(RequestError, match="the prompt needs 7 pages, the cache has 6"):
        engine.generate([list(range(49))])


def test_out_of_pages_changes_nobody_elses_tokens(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    prompts = [[5, 6, 7], [9] * 10, [11, 12]]
    alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert [g.reason for g in alone] == ["length"] * 3
    together = engine.generate(prompts, params)
    assert [g.tokens for g in together] == [g.tokens for g in alone], "15 pages are wanted, 6 are there"
    long = engine.generate([[1] * 40, [5, 6, 7]], params)
    assert long[0].reason == "out_of_pages" and len(long[0].tokens) < 30
    assert long[1].tokens == alone[0].tokens
    assert engine.describe()["pages"]["free"] == 6


def test_out_of_pages_at_the_low_level(engine: Engine) -> None:
    with pytest.raises(RequestError, match="out of pages: 2 of 6 are free"):
        engine.prefill([list(range(30)), list(range(30))])
    assert engine.describe()["pages"]["free"] == 6
