"""A MiniMax-M3 directory in ModelOpt's layout: opened on our model and on transformers', buffers and fp32 routers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mmcompile.capture.checkpoint import open_checkpoint
from mmcompile.capture.decoder import capture_huggingface, load_weights
from mmcompile.capture.export import without_weights
from mmcompile.capture.tensors import Checkpoint, PackedLinear, ScaledLinear
from mmcompile.capture.writer import hold, write_checkpoint
from mmcompile.core.errors import CaptureError, CheckpointError
from mmcompile.core.formats import mxfp8, nvfp4
from mmcompile.driver.doors import open_door
from mmcompile.driver.options import BuildOptions
from mmcompile.models import minimax_m3

C = minimax_m3.MODELS["minimax-m3.1-flash-tiny"]
TEXT = {
    "model_type": "minimax_m3_vl_text", "vocab_size": C.vocab_size, "hidden_size": C.hidden_size,
    "intermediate_size": C.intermediate_size, "dense_intermediate_size": C.dense_intermediate_size,
    "shared_intermediate_size": C.shared_intermediate_size, "num_hidden_layers": C.num_layers,
    "num_attention_heads": C.num_heads, "num_key_value_heads": C.num_kv_heads, "head_dim": C.head_dim,
    "rotary_dim": C.rotary_dim, "max_position_embeddings": C.max_positions, "num_local_experts": C.num_experts,
    "num_experts_per_tok": C.experts_per_token, "moe_layer_freq": list(C.moe_layer_freq), "hidden_act": "swigluoai",
    "rope_parameters": {"rope_type": "default", "rope_theta": C.rope_theta,
                        "partial_rotary_factor": C.rotary_dim / C.head_dim},
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_num_index_heads": C.index_heads, "sparse_index_dim": C.index_head_dim,
        "sparse_block_size": C.block_size, "sparse_topk_blocks": C.top_k_blocks, "sparse_init_block": 0,
        "sparse_local_block": C.local_blocks, "sparse_score_type": "max",
        "sparse_attention_freq": list(C.sparse_attention_freq), "sparse_disable_index_value": [1, 1, 1],
    },
    "bos_token_id": 1, "eos_token_id": 2, "num_mtp_modules": 1,
}  # fmt: skip
FIELDS = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "text_config": TEXT,
}
OTHERS = ("vision_tower.vision_model.pre_layrnorm.weight", "patch_merge_mlp.linear_1.bias",
          "multi_modal_projector.linear_1.bias", "language_model.model.mtp.layers.0.enorm.weight")  # fmt: skip
ROUTER = "model.layers.1.mlp"


def draw_weights() -> dict[str, torch.Tensor]:
    """Values of every parameter, the router's bias included, spread so that experts and blocks are told apart."""
    generator = torch.Generator().manual_seed(3)
    state = minimax_m3.build(C).state_dict()
    return {
        name: torch.randn(t.shape, generator=generator) / (t.shape[-1] if t.dim() > 1 else 25) ** 0.5
        for name, t in state.items()
    }


def name_stored(name: str) -> str:
    moe = ".mlp." in name and C.moe_layer_freq[int(name.split(".")[2])]
    return "language_model." + (name.replace(".mlp.", ".block_sparse_moe.") if moe else name)


def pack(module: str, weight: torch.Tensor, made: Checkpoint) -> torch.Tensor:
    """Store an NVFP4 matrix; returns what it decodes to."""
    codes, scale, multiplier = nvfp4.encode(weight)
    made.nvfp4[module] = PackedLinear(hold(codes), hold(scale), hold(multiplier), "modelopt")
    return nvfp4.decode_blocks(codes, scale) * multiplier


def make_checkpoint() -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """A checkpoint in memory, gate and up of an expert with equal scales, and the weights that it stands for."""
    made = Checkpoint("memory", FIELDS, {other: hold(torch.ones(4)) for other in OTHERS}, lambda: None, {}, {})
    decoded = {}
    for name, tensor in draw_weights().items():
        stored = name_stored(name)
        if ".experts." in name:
            parts = ("w1", "w3") if "gate_up" in name else ("w2",)
            folder = stored.rpartition(".")[0]
            tensor[:, ::33, 0] = 1.5  # the same largest value in every matrix
            decoded[name] = torch.stack([
                torch.cat([pack(f"{folder}.{i}.{part}", m.contiguous(), made)
                           for part, m in zip(parts, matrix.chunk(len(parts)), strict=True)])
                for i, matrix in enumerate(tensor)
            ])  # fmt: skip
        elif name.endswith("_proj.weight"):
            values, scale = mxfp8.encode(tensor)
            made.mxfp8[stored.removesuffix(".weight")] = ScaledLinear(hold(values), hold(scale))
            decoded[name] = mxfp8.decode(values, scale)
        else:
            fp32 = ".gate." in name or "e_score" in name
            decoded[name] = tensor if fp32 else tensor.bfloat16().float()
            made.tensors[stored] = hold(tensor if fp32 else tensor.bfloat16())
    return made, decoded


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("m3")
    write_checkpoint(path, make_checkpoint()[0], "modelopt", shard_bytes=100_000)
    return path


def reference_logits(ids: torch.Tensor) -> torch.Tensor:
    model = minimax_m3.build(C).eval()
    model.load_state_dict(make_checkpoint()[1], strict=True)
    with torch.no_grad():
        return model(ids, torch.arange(len(ids)))


IDS = torch.randint(0, 512, (75,), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_opens_on_our_model_with_the_dequantized_weights(directory: Path) -> None:
    captured = open_door(str(directory), BuildOptions(dtype="float32"))
    with torch.no_grad():
        logits = captured.graph_module(IDS, torch.arange(len(IDS)))
    torch.testing.assert_close(logits, reference_logits(IDS), rtol=0, atol=0)
    left = "left out: mtp (1 tensors), multi_modal_projector (1 tensors), patch_merge_mlp (1 tensors), vision_tower"
    assert "(minimax_m3)" in captured.source and left in captured.source
    assert captured.config["block_size"] == C.block_size and captured.config["eos_token_ids"] == [2]
    assert len(captured.nvfp4) == 4 and "model.layers.0.self_attn.index_k_proj" in captured.mxfp8


@pytest.mark.slow
def test_opens_on_the_text_class_of_transformers(directory: Path) -> None:
    pytest.importorskip("transformers")
    captured = capture_huggingface(directory, dtype=torch.float32)
    assert "MiniMaxM3VLForCausalLM of transformers" in captured.source and "left out: mtp" in captured.source
    with torch.no_grad():
        logits = captured.graph_module(IDS[None], torch.arange(len(IDS))[None])[0]
    torch.testing.assert_close(logits, reference_logits(IDS), rtol=2e-4, atol=2e-4)


def test_the_config_is_read() -> None:
    assert minimax_m3.read_config(FIELDS) == C
    flat = {k: v for k, v in TEXT.items() if k not in ("sparse_attention_config", "moe_layer_freq", "rotary_dim")}
    flat |= {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 3,
             "index_local_blocks": 1, "layer_types": ["minimax_m3_sparse"] * 3,
             "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
    assert minimax_m3.read_config(flat) == C
    shared = {"use_index_cache": True, "index_topk_pattern": ["F", "S", "S"]}
    assert not minimax_m3.read_config({"text_config": TEXT | shared}).chooses_blocks(1)


SPARSE = TEXT["sparse_attention_config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_attention_config": {}}, "neither layer_types nor sparse_attention_freq"),
        ({"moe_layer_freq": None}, "neither mlp_layer_types nor moe_layer_freq"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types holds 'linear_attention'"),
        ({"attention_output_gate": True}, "attention_output_gate is True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e6}}, "rope_type is 'yarn'"),
        ({"sparse_attention_config": SPARSE | {"sparse_score_type": "mean"}}, "sparse_score_type is 'mean'"),
        ({"sparse_attention_config": SPARSE | {"sparse_disable_index_value": [1, 0, 1]}}, "layer 1 has an indexer"),
    ],
)
def test_variants_that_we_do_not_compute_are_refused(change: dict, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        minimax_m3.read_config({"text_config": TEXT | change})


def test_a_tensor_that_nothing_takes_is_refused(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["language_model.model.norm.weight"]
    tensors = load_file(tmp_path / shard)
    for name in ("language_model.model.layers.1.block_sparse_moe.surprise", "visual.weight"):
        save_file(tensors | {name: torch.ones(3)}, tmp_path / shard)
        changed = {"weight_map": index["weight_map"] | {name: shard}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=f"tensors that the model does not have: '{name}'"):
            open_door(str(tmp_path), BuildOptions())


@pytest.mark.slow
def test_the_router_stays_fp32_in_a_bf16_model(directory: Path) -> None:
    captured = open_door(str(directory), BuildOptions(dtype="bfloat16"))
    weights = dict(captured.graph_module.named_parameters())
    wanted = make_checkpoint()[1]
    for name in (f"{ROUTER}.gate.weight", f"{ROUTER}.e_score_correction_bias"):
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], wanted[name])
    assert {t.dtype for n, t in weights.items() if ".gate." not in n and "e_score" not in n} == {torch.bfloat16}


@pytest.mark.slow
def test_transformers_router_runs_in_the_dtype_of_the_model_with_an_fp32_bias(directory: Path) -> None:
    pytest.importorskip("transformers")
    captured = capture_huggingface(directory, dtype=torch.bfloat16)
    tensors = {**dict(captured.graph_module.named_parameters()), **dict(captured.graph_module.named_buffers())}
    assert tensors[f"{ROUTER}.gate.weight"].dtype == torch.bfloat16
    bias = tensors[f"{ROUTER}.gate.e_score_correction_bias"]
    assert torch.equal(bias, make_checkpoint()[1][f"{ROUTER}.e_score_correction_bias"])


class Scaled(nn.Module):
    """A model with a persistent buffer, one that is not, and a parameter that asks for fp32."""

    _keep_in_fp32_modules = ["half_only"]
    _keep_in_fp32_modules_strict = ["rout*.weight"]

    def __init__(self) -> None:
        super().__init__()
        self.router, self.half_only = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("table", torch.ones(4), persistent=False)


def load_scaled(path: Path, dtype: torch.dtype, **changes: torch.Tensor | None) -> nn.Module:
    from mmcompile.capture.decoder import _cast_parameters

    tensors = {"router.weight": torch.rand(4, 4), "half_only.weight": torch.rand(4, 4), "scale": torch.arange(4.0)}
    tensors = {n: t for n, t in (tensors | changes).items() if t is not None}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    with without_weights():
        module = _cast_parameters(Scaled(), dtype)
    load_weights(module, open_checkpoint(path))
    return module


@pytest.mark.parametrize(("dtype", "other"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_persistent_buffers_are_loaded_and_kept_parameters_are_fp32(tmp_path: Path, dtype, other) -> None:
    module = load_scaled(tmp_path, dtype)
    assert torch.equal(module.scale, torch.arange(4.0)) and "scale" in dict(module.named_buffers())
    assert module.router.weight.dtype == torch.float32 and module.half_only.weight.dtype == other
    assert torch.equal(module.table, torch.ones(4))


def test_missing_and_extra_buffers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing tensors: 'scale'"):
        load_scaled(tmp_path, torch.bfloat16, scale=None)
    with pytest.raises(CheckpointError, match="the model does not have: 'table'"):
        load_scaled(tmp_path, torch.bfloat16, table=torch.ones(4))
