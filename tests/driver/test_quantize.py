"""The verb quantize: what it writes is what a build would make of the checkpoint, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmcompile.capture.checkpoint import open_checkpoint
from mmcompile.capture.decoder import load_weights
from mmcompile.capture.experts import stack_experts
from mmcompile.capture.export import without_weights
from mmcompile.capture.packed import PackedWeights, load_packed
from mmcompile.capture.shards import write_shards
from mmcompile.capture.writer import hold
from mmcompile.core.errors import ArtifactError, CheckpointError, MMError, UsageError
from mmcompile.core.ops.linear_mxfp8 import mxfp8_quantize
from mmcompile.core.ops.moe_nvfp4 import nvfp4_quantize_experts
from mmcompile.driver import quantize
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.progress import silent
from mmcompile.driver.quantize import quantize_checkpoint
from mmcompile.models import minimax_m3
from tests.capture.test_minimax_m3_directory import FIELDS, C, draw_weights, name_stored
from tests.capture.test_streaming_memory import write_shard

DECIDE = quantize._decide
MIX = BuildOptions(quantization="nvfp4_mxfp8")
STACK = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.1"
PROJECTION = "language_model.model.layers.0.self_attn.q_proj"
VISION = "vision_tower.blocks.0.weight"


def list_tensors(stacked: bool = False) -> dict[str, torch.Tensor]:
    """The tiny model as a bf16 checkpoint stores it, one matrix an expert or, as transformers does, all in one."""
    tensors = {} if stacked else {VISION: torch.ones(4, 4)}
    for name, tensor in draw_weights().items():
        value = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        if stacked or ".experts." not in name or "shared" in name:
            tensors[name if stacked else name_stored(name)] = value
            continue
        layer, leaf = name_stored(name).rsplit(".", 1)
        parts = ("w1", "w3") if leaf == "gate_up_proj" else ("w2",)
        for i, matrix in enumerate(value):
            rows = zip(parts, matrix.chunk(len(parts)), strict=True)
            tensors |= {f"{layer}.{i}.{part}.weight": m * (1 + 2 * (part == "w3")) for part, m in rows}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_source(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    write_shards(folder, {name: hold(tensor) for name, tensor in tensors.items()}, 200_000)
    (folder / "config.json").write_text(json.dumps(FIELDS))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("quantize") / "bf16", list_tensors())


@pytest.fixture(autouse=True)
def decide_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model in every test: its graph decides once, by the first one."""
    monkeypatch.setattr(quantize, "_decide", lambda *_: _decide(source))


@cache
def _decide(source: Path) -> Any:
    return DECIDE(source, MIX, silent)


def read(folder: Path) -> tuple[torch.nn.Module, PackedWeights]:
    """The model with the weights of a directory, and what is quantized among them."""
    with without_weights():
        model = minimax_m3.build(C).bfloat16()
    checkpoint = open_checkpoint(folder)
    return model, load_weights(model, checkpoint)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_build_of_it_takes_over_what_a_build_with_quant_makes(source: Path, tmp_path: Path, stacked: bool) -> None:
    given = write_source(tmp_path / "stacked", list_tensors(True)) if stacked else source
    told: list[tuple[str, int, int]] = []
    facts = quantize_checkpoint(
        given, tmp_path / "out", MIX, shard_bytes=100_000,
        progress=lambda step, detail, done, total: told.append((step, done, total)),
    )  # fmt: skip
    plain, nothing = read(given)
    _, packed = read(tmp_path / "out")
    assert not [*nothing] and facts["files"] > 1
    assert {STACK, STACK.replace("gate_up", "down")} <= set(packed.nvfp4)
    assert len(packed.mxfp8) == facts["weights"]["mxfp8"] > 10
    parameters = dict(plain.named_parameters())
    for name, parts in packed.nvfp4.items():
        for have, want in zip(parts, nvfp4_quantize_experts(parameters[name].bfloat16()), strict=True):
            assert torch.equal(bytes_of(have), bytes_of(want)), name
    for name, parts in packed.mxfp8.items():
        for have, want in zip(parts, mxfp8_quantize(parameters[f"{name}.weight"].bfloat16()), strict=True):
            assert torch.equal(bytes_of(have), bytes_of(want)), name
    before, after = open_checkpoint(given), open_checkpoint(tmp_path / "out")
    for name in after.tensors:
        assert torch.equal(bytes_of(after.load(name)), bytes_of(before.load(name))), name
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert told[-1] == ("quantize", told[-1][2], told[-1][2])
    assert {reason.split(";")[0].split(" ")[-1] for reason in facts["kept"].values()} >= {"token"}


def test_layouts(source: Path, tmp_path: Path) -> None:
    for layout in ("compressed-tensors", "minimax"):
        quantize_checkpoint(source, tmp_path / layout, MIX, layout=layout)
    with without_weights():
        parameters = dict(minimax_m3.build(C).named_parameters())
    packed = load_packed(stack_experts(open_checkpoint(tmp_path / "compressed-tensors"), parameters), parameters)
    plain = dict(read(source)[0].named_parameters())
    for name in packed.nvfp4:
        error = packed.decode(name, torch.float32) - plain[name].float()
        assert error.norm() < 0.15 * plain[name].float().norm()  # half a step of E2M1 is at most a sixth of a value
    minimax = open_checkpoint(tmp_path / "minimax")
    assert not minimax.nvfp4 and f"{EXPERT}.w1" in minimax.mxfp8 and PROJECTION in minimax.mxfp8


def test_what_is_quantized_already_is_taken_over(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "one", MIX)
    quantize_checkpoint(tmp_path / "one", tmp_path / "two", MIX)
    for file in (tmp_path / "one").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def _break(tensors: dict[str, torch.Tensor], case: str) -> None:
    if case == "expert":
        for part in ("w1", "w2", "w3"):
            del tensors[f"{EXPERT}.{part}.weight"]
    elif case == "projection":
        del tensors[f"{PROJECTION}.weight"]
    elif case == "nan expert":
        tensors[f"{EXPERT}.w3.weight"][3, 5] = torch.nan
    elif case == "infinite projection":
        tensors[f"{PROJECTION}.weight"][0, 0] = torch.inf
    elif case == "nan norm":
        tensors["language_model.model.norm.weight"][0] = torch.nan


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("expert", "missing tensors"),
        ("projection", "missing tensors.*q_proj"),
        ("nan expert", "experts.1.w3.*NaN"),
        ("infinite projection", "q_proj.*infinity"),
        ("nan norm", "model.norm.weight.*NaN"),
    ],
)
def test_damaged_checkpoints_are_refused_and_leave_nothing(tmp_path: Path, case: str, message: str) -> None:
    tensors = list_tensors()
    _break(tensors, case)
    given = write_source(tmp_path / "bf16", tensors)
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(given, tmp_path / "out", MIX)
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight_scale_2", None, "without its scale"),
        ("weight_scale_2", 2000.0, "scale"),
        ("weight_scale", torch.nan, "NaN|scale"),
    ],
)
def test_damaged_scales_are_refused(source: Path, tmp_path: Path, part: str, value: Any, message: str) -> None:
    """Of a checkpoint that is quantized already: a scale is missing, is meant the other way, or is NaN."""
    quantize_checkpoint(source, tmp_path / "one", MIX)
    name, (file,) = f"{EXPERT}.w1.{part}", (tmp_path / "one").glob("*.safetensors")
    tensors = load_file(file)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = torch.full_like(tensors[name].float(), value).to(tensors[name].dtype)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path / "one", tmp_path / "two", MIX, layout="modelopt")
    assert not (tmp_path / "two").exists()


def test_refusals(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(
        kind: type[MMError], message: str, given: Path, options: BuildOptions, layout: str = "modelopt"
    ) -> None:
        with pytest.raises(kind, match=message):
            quantize_checkpoint(given, tmp_path / "out", options, layout=layout)
        assert not list(tmp_path.iterdir())

    refused(UsageError, "modelopt", source, MIX, layout="modelop")
    refused(UsageError, "no quantization", source, BuildOptions())
    refused(CheckpointError, "Hugging Face directory", source / "config.json", MIX)
    usage = namedtuple("usage", "total used free")(1, 1, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    refused(ArtifactError, "no room", source, MIX)
    with pytest.raises(ArtifactError, match="exists already"):
        quantize_checkpoint(source, source, MIX)


RUNNER = """
import sys
from pathlib import Path
from mmcompile.cli import main

code = main(["quantize", sys.argv[1], "--quant", "nvfp4_mxfp8", "-o", sys.argv[2], "--json"])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_real_matrices_are_quantized_within_4_gib(tmp_path: Path) -> None:
    """A layer of M3.1-Flash with 48 of its experts, and its embedding and output projection, 10 GiB in bf16."""
    limit, stacks = 4 * 2**30, 48
    real = {
        "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072, "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "rotary_dim": 64,
        "max_position_embeddings": 8192, "num_local_experts": stacks, "num_experts_per_tok": 4, "moe_layer_freq": [1],
    }  # fmt: skip
    sparse = FIELDS["text_config"]["sparse_attention_config"] | {
        "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128, "sparse_topk_blocks": 16,
        "sparse_attention_freq": [1], "sparse_disable_index_value": [1],
    }  # fmt: skip
    text = FIELDS["text_config"] | real | {"sparse_attention_config": sparse}
    with without_weights():
        state = minimax_m3.build(minimax_m3.read_config({**FIELDS, "text_config": text})).state_dict()
    (tmp_path / "bf16").mkdir()
    stored = [(name, "BF16", list(tensor.shape), None) for name, tensor in state.items()]
    write_shard(tmp_path / "bf16" / "model.safetensors", stored)
    (tmp_path / "bf16" / "config.json").write_text(json.dumps({**FIELDS, "text_config": text}))
    command = [sys.executable, "-c", RUNNER, str(tmp_path / "bf16"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts, peak = json.loads(done.stdout), int(done.stderr.split()[-1])
    assert facts["bytes_before"] > 2 * limit and facts["weights"]["nvfp4"] == 3 * stacks
    assert peak < limit, f"{peak / 2**30:.2f} GiB"
