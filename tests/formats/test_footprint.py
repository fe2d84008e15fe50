"""Bytes of checkpoints and caches: counted ones against stored ones, and the published sizes of MiniMax-M3."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.capture.export import without_weights
from mmcompile.core.formats import footprint, mxfp8, nvfp4, nvfp4_cache
from mmcompile.models import _minimax_m3_checkpoint as published
from mmcompile.models import minimax_m3

FLASH_SHARDS = 250_116_419_880  # bytes of the 48 main files of MiniMax-M3.1-Flash
M3_MXFP8 = 451.5e9


def shapes_of(name):
    with without_weights():
        module = minimax_m3.build(minimax_m3.MODELS[name])
    return {n: tuple(p.shape) for n, p in module.named_parameters()}


def count(name, mix, mtp_modules=0):
    config = minimax_m3.MODELS[name]
    weights = published.list_checkpoint_weights(shapes_of(name), config, mix, mtp_modules=mtp_modules)
    return footprint.count_checkpoint_bytes(weights)


def test_the_published_size_of_m31_flash():
    counted = count("minimax-m3.1-flash", "nvfp4_mxfp8")
    assert abs(counted["total"] / FLASH_SHARDS - 1) < 1e-3
    assert counted["total"] < FLASH_SHARDS, "the files have headers"
    assert counted["nvfp4"] / counted["total"] > 0.9


def test_the_published_size_of_m3_in_mxfp8():
    counted = count("minimax-m3", "mxfp8", mtp_modules=1)
    assert abs(counted["total"] / M3_MXFP8 - 1) < 1e-3
    assert abs(count("minimax-m3", "mxfp8")["total"] / M3_MXFP8 - 1) > 0.01, "the MTP module is part of it"


def test_m3_in_bf16():
    assert abs(count("minimax-m3", "bf16")["total"] / 854.2e9 - 1) < 1e-3


def test_vision_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig

    config = MiniMaxM3VLConfig()
    with torch.device("meta"):
        parts = {
            "vision_tower": modeling.MiniMaxM3VLVisionModel(config.vision_config),
            "multi_modal_projector": modeling.MiniMaxM3VLMultiModalProjector(config),
        }
    want = {f"{n}.{k}": tuple(p.shape) for n, module in parts.items() for k, p in module.named_parameters()}
    config = minimax_m3.MODELS["minimax-m3"]
    have = {w.name: w.shape for w in published.list_checkpoint_weights({}, config, "mxfp8")}
    assert have == want


def test_the_mtp_module_is_a_sparse_layer_with_experts():
    name = "minimax-m3.1-flash-tiny"
    shapes = shapes_of(name)
    weights = published.list_checkpoint_weights(shapes, minimax_m3.MODELS[name], "bf16", mtp_modules=1)
    mtp = {w.name.removeprefix("model.mtp.layers.0."): w.shape for w in weights if ".mtp." in w.name}
    layer = {n.removeprefix("model.layers.1."): s for n, s in shapes.items() if n.startswith("model.layers.1.")}
    gate_up = layer.pop("mlp.experts.gate_up_proj")
    layer |= {f"mlp.experts.{part}_proj": (gate_up[0], gate_up[1] // 2, gate_up[2]) for part in ("gate", "up")}
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
    assert set(mtp) == set(layer) | own
    assert {n: s for n, s in mtp.items() if n not in own} == layer


def test_formats_of_the_mix():
    names = {
        "model.layers.3.mlp.experts.down_proj": "nvfp4", "model.layers.3.mlp.gate.weight": "fp32",
        "model.layers.3.mlp.e_score_correction_bias": "fp32",
        "model.layers.3.mlp.shared_experts.up_proj.weight": "mxfp8",
        "model.layers.3.self_attn.index_k_proj.weight": "mxfp8", "model.layers.0.mlp.gate_proj.weight": "mxfp8",
        "model.embed_tokens.weight": "bf16", "lm_head.weight": "bf16",
    }  # fmt: skip
    for name, form in names.items():
        assert published.choose_format(name, (64, 64), "nvfp4_mxfp8") == form, name
    assert published.choose_format("model.layers.3.self_attn.index_k_norm.weight", (128,), "nvfp4_mxfp8") == "bf16"
    assert published.choose_format("model.layers.3.mlp.experts.down_proj", (2, 64, 64), "mxfp8") == "mxfp8"
    with pytest.raises(ValueError, match="mix must be one of"):
        published.choose_format("a", (1,), "fp8")


def size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5))
def test_counted_bytes_are_those_of_the_encoders(rows, blocks):
    weight = torch.randn(rows, 32 * blocks)
    shape = tuple(weight.shape)
    assert footprint.count_weight_bytes(shape, "mxfp8") == size(*mxfp8.encode(weight))
    input_scale = torch.tensor(1.0)
    assert footprint.count_weight_bytes(shape, "nvfp4") == size(*nvfp4.encode(weight), input_scale)
    assert footprint.count_weight_bytes((3, *shape), "nvfp4") == 3 * footprint.count_weight_bytes(shape, "nvfp4")
    assert footprint.count_weight_bytes(shape, "bf16") == size(weight.bfloat16())
    assert footprint.count_weight_bytes(shape, "fp32") == size(weight)


def test_cache_bytes_per_token():
    assert [footprint.count_cache_bytes(4, 128, form) for form in ("bf16", "fp8", "nvfp4")] == [2048, 1024, 576]
    assert [footprint.count_index_bytes(128, form) for form in ("bf16", "fp8", "nvfp4")] == [256, 128, 72]
    assert 1 - 576 / 1024 == 0.4375
    model = 60 * (footprint.count_cache_bytes(4, 128, "nvfp4") + footprint.count_index_bytes(128, "nvfp4"))
    assert model == 38_880
    cache = torch.zeros(1, 8, 128, nvfp4_cache.row_bytes(128), dtype=torch.uint8)
    assert size(cache) == 128 * footprint.count_cache_bytes(4, 128, "nvfp4")


@pytest.mark.parametrize(
    ("shape", "form", "message"),
    [
        ((4, 40), "mxfp8", "multiple of 32"),
        ((4, 40), "nvfp4", "multiple of 16"),
        ((64,), "nvfp4", "needs a matrix"),
        ((4, 40), "int8", "format must be one of"),
    ],
)
def test_refused(shape, form, message):
    with pytest.raises(ValueError, match=message):
        footprint.count_weight_bytes(shape, form)


def test_refused_caches():
    with pytest.raises(ValueError, match="cache format must be one of"):
        footprint.count_cache_bytes(4, 128, "int8")
    with pytest.raises(ValueError, match="head_dim a multiple of 16"):
        footprint.count_cache_bytes(4, 72, "nvfp4")
