"""Hugging Face directories: what is read, what is refused, and both NVFP4 layouts."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mmcompile.capture.checkpoint import load_into, open_checkpoint
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import nvfp4

MODULES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
CT_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "scale_dtype": "torch.float8_e4m3fn",
            },
        }
    },
    "ignore": ["lm_head"],
}
MODELOPT_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}


def plain_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(10, 8, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(8),
        "lm_head.weight": torch.randn(10, 8, generator=generator).half(),
    }


def expected_of(tensors: dict[str, torch.Tensor], dtype=torch.float32):
    return {name: (tuple(tensor.shape), dtype) for name, tensor in tensors.items()}


def write(directory, tensors, config=None, shards=None):
    """Write a checkpoint; ``shards`` splits the tensors over that many files with an index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    if shards is None:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def quantized_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {module: torch.randn(24, 64, generator=generator) * 0.02 for module in MODULES}


def modelopt_tensors() -> dict[str, torch.Tensor]:
    tensors = plain_tensors()
    for module, weight in quantized_weights().items():
        packed, scale, multiplier = nvfp4.encode(weight)
        tensors |= {
            f"{module}.weight": packed,
            f"{module}.weight_scale": scale,
            f"{module}.weight_scale_2": multiplier,
            f"{module}.input_scale": torch.tensor(0.01),
        }
    return tensors


def ct_tensors() -> dict[str, torch.Tensor]:
    """Compressed by the compressed-tensors package itself."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = quantization.QuantizationScheme.model_validate(
        {"targets": ["Linear"], "weights": CT_CONFIG["config_groups"]["group_0"]["weights"]}
    )
    tensors = plain_tensors()
    for module, weight in quantized_weights().items():
        blocks = weight.view(weight.shape[0], -1, 16)
        global_scale = generate_gparam(weight.amin(), weight.amax())
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
        compressed = NVFP4PackedCompressor.compress(state, scheme)
        compressed["input_global_scale"] = torch.tensor([100.0])
        tensors |= {f"{module}.{part}": tensor for part, tensor in compressed.items()}
    return tensors


@pytest.mark.parametrize("shards", [None, 1, 2])
def test_reads_single_and_sharded(tmp_path, shards):
    tensors = plain_tensors()
    checkpoint = open_checkpoint(write(tmp_path / "model", tensors, {"hidden_size": 8}, shards))
    assert checkpoint.config["hidden_size"] == 8
    assert checkpoint.names == sorted(tensors)
    assert checkpoint.nvfp4 == {}
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
        assert torch.equal(checkpoint.load(name), tensor)


def test_load_into_casts_and_ignores_rotary_tables(tmp_path):
    tensors = plain_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    loaded = load_into(checkpoint, expected_of(plain_tensors()), {})
    assert set(loaded) == set(plain_tensors())
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert torch.equal(loaded["lm_head.weight"], tensors["lm_head.weight"].float())


@pytest.mark.parametrize("absent", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_tensors_may_be_stored_under_either_name(tmp_path, absent):
    tensors = plain_tensors()
    del tensors[absent]
    loaded = load_into(
        open_checkpoint(write(tmp_path, tensors)),
        expected_of(plain_tensors()),
        {"lm_head.weight": "model.embed_tokens.weight"},
    )
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]


def test_tied_tensors_that_differ_are_refused(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, plain_tensors()))
    with pytest.raises(CheckpointError, match="tied but differ"):
        load_into(checkpoint, expected_of(plain_tensors()), {"lm_head.weight": "model.embed_tokens.weight"})


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    tensors = plain_tensors()
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    expected = expected_of(tensors)
    more = {f"model.layers.{i}.w": ((1,), torch.float32) for i in range(7)}
    with pytest.raises(CheckpointError, match=r"missing.*layers\.0.*layers\.4\.w' and 2 more"):
        load_into(checkpoint, expected | more, {})
    fewer = {name: value for name, value in expected.items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match="does not have: 'lm_head.weight'"):
        load_into(checkpoint, fewer, {})
    flipped = expected | {"lm_head.weight": ((8, 10), torch.float32)}
    with pytest.raises(CheckpointError, match=r"lm_head.weight: \[10, 8\] instead of \[8, 10\]"):
        load_into(checkpoint, flipped, {})
    with pytest.raises(CheckpointError, match="'nothing' is missing"):
        checkpoint.load("nothing")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_is_refused_with_tensor_and_file(tmp_path, value, dtype):
    tensors = plain_tensors()
    tensors["model.norm.weight"] = torch.ones(8).to(dtype)
    tensors["model.norm.weight"][3] = value
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    with pytest.raises(CheckpointError, match="'model.norm.weight' holds NaN.*model.safetensors"):
        load_into(checkpoint, expected_of(tensors), {})


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file(tmp_path, keep):
    write(tmp_path, plain_tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        open_checkpoint(tmp_path)


def test_missing_shard_and_index_mismatch(tmp_path):
    write(tmp_path, plain_tensors(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"].pop("lm_head.weight")
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="disagree about 'lm_head.weight'"):
        open_checkpoint(tmp_path)
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"shard {shard} is missing"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside"):
        open_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(tmp_path)


def test_directories_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="config.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle.*save_pretrained"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="directory or a .gguf"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_text_settings(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    write(tmp_path, plain_tensors())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.chat_template is None
    with pytest.raises(CheckpointError, match="tokenizer.json is missing"):
        _ = checkpoint.tokenizer
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0, "?": 1}, unk_token="?")).save(
        str(tmp_path / "tokenizer.json")
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert checkpoint.chat_template == "{{ bos_token }}"
    assert checkpoint.tokenizer.encode("hi").ids == [0]


@pytest.mark.parametrize("layout", ["modelopt", "hf_quant_config", "compressed-tensors"])
def test_both_nvfp4_layouts(tmp_path, layout):
    if layout == "compressed-tensors":
        write(tmp_path, ct_tensors(), {"quantization_config": CT_CONFIG}, shards=2)
    elif layout == "modelopt":
        write(tmp_path, modelopt_tensors(), {"quantization_config": MODELOPT_CONFIG})
    else:
        write(tmp_path, modelopt_tensors())
        content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.nvfp4) == set(MODULES)
    assert checkpoint.names == sorted(plain_tensors())
    for module, weight in quantized_weights().items():
        assert checkpoint.nvfp4[module].shape == (24, 64)
        packed, scale, multiplier = checkpoint.load_nvfp4(module)
        assert multiplier.shape == (24,) and multiplier.dtype == torch.float32
        decoded = nvfp4.decode_blocks(packed, scale) * multiplier[:, None]
        assert (decoded - weight).norm() < 0.12 * weight.norm()
    with pytest.raises(CheckpointError, match="load_nvfp4"):
        load_into(checkpoint, expected_of(plain_tensors() | {f"{MODULES[0]}.weight": torch.zeros(24, 64)}), {})
    with pytest.raises(CheckpointError, match="no NVFP4 weight"):
        checkpoint.load_nvfp4("lm_head")


def test_compressed_tensors_decompressor_agrees(tmp_path):
    stored = ct_tensors()
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(
        {"targets": ["Linear"], "weights": CT_CONFIG["config_groups"]["group_0"]["weights"]}
    )
    checkpoint = open_checkpoint(write(tmp_path, stored, {"quantization_config": CT_CONFIG}))
    for module in MODULES:
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        theirs = NVFP4PackedCompressor.decompress({part: stored[f"{module}.{part}"] for part in parts}, scheme)
        packed, scale, multiplier = checkpoint.load_nvfp4(module)
        mine = nvfp4.decode_blocks(packed, scale) * multiplier[:, None]
        # The package decompresses in bf16: it rounds scale / global, then the product.
        step = (scale.float() * multiplier[:, None]).repeat_interleave(16, 1)
        assert bool(((mine - theirs["weight"].float()).abs() <= 6 * step * 2**-7).all())
        assert torch.equal(mine.sign(), theirs["weight"].float().sign())


def break_modelopt(change):
    tensors = modelopt_tensors()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop(f"{MODULES[0]}.weight_scale"), "without its scale.*up_proj.weight_scale"),
        (lambda t: t.pop(f"{MODULES[0]}.weight_scale_2"), "without its scale.*up_proj.weight_scale_2"),
        (lambda t: t.pop(f"{MODULES[0]}.weight"), "do not fit the modelopt convention"),
        (lambda t: t.update({"a.weight_global_scale": torch.ones(1)}), "do not fit the modelopt convention"),
        (lambda t: t.update({"a.weight": torch.ones(4, 32).to(torch.float8_e4m3fn)}), "do not fit.*a.weight"),
        (lambda t: t.update({f"{MODULES[0]}.weight": torch.zeros(2, 4, 8, dtype=torch.uint8)}), "not a matrix"),
        (lambda t: t.update({"a.k_proj.k_scale": torch.tensor(0.5)}), "k_scale' is not 1.0.*not supported yet"),
    ],
)
def test_incomplete_or_mixed_groups_are_refused(tmp_path, change, message):
    write(tmp_path, break_modelopt(change), {"quantization_config": MODELOPT_CONFIG})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_unit_cache_scales_are_accepted(tmp_path):
    tensors = modelopt_tensors() | {"a.k_proj.k_scale": torch.tensor(1.0), "a.v_proj.v_scale": torch.ones(1)}
    checkpoint = open_checkpoint(write(tmp_path, tensors, {"quantization_config": MODELOPT_CONFIG}))
    assert checkpoint.names == sorted(plain_tensors())


@pytest.mark.parametrize(
    "part,value,message",
    [
        ("weight_scale_2", lambda t: 1 / t, "which no model has"),
        ("weight_scale_2", lambda t: t * torch.nan, "global scale is NaN"),
        ("weight_scale", lambda t: torch.zeros(24, 4).to(torch.float8_e4m3fn), "block scale"),
        ("weight_scale", lambda t: t[:, :2].contiguous(), r"\[24, 4\]"),
    ],
)
def test_wrong_scales_are_refused(tmp_path, part, value, message):
    tensors = modelopt_tensors()
    name = f"{MODULES[1]}.{part}"
    tensors[name] = value(tensors[name])
    checkpoint = open_checkpoint(write(tmp_path, tensors, {"quantization_config": MODELOPT_CONFIG}))
    checkpoint.load_nvfp4(MODULES[0])
    with pytest.raises(CheckpointError, match=f"{message}.*down_proj"):
        checkpoint.load_nvfp4(MODULES[1])


def test_global_scale_in_the_other_convention(tmp_path):
    """compressed-tensors names holding ModelOpt's multiplier."""
    tensors = ct_tensors()
    name = f"{MODULES[0]}.weight_global_scale"
    tensors[name] = 1 / tensors[name]
    checkpoint = open_checkpoint(write(tmp_path, tensors, {"quantization_config": CT_CONFIG}))
    with pytest.raises(CheckpointError, match="convention"):
        checkpoint.load_nvfp4(MODULES[0])


def changed(config, **changes):
    return json.loads(json.dumps(config)) | changes


def ct_with(**weights):
    config = json.loads(json.dumps(CT_CONFIG))
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    "config,message",
    [
        (changed(MODELOPT_CONFIG, quant_algo="FP8"), "'FP8' is not a supported"),
        (changed(MODELOPT_CONFIG, quant_algo="MIXED_PRECISION"), "'MIXED_PRECISION' is not a supported"),
        (
            changed(MODELOPT_CONFIG, quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}}),
            "'FP8' is not a supported",
        ),
        (changed(MODELOPT_CONFIG, quantized_layers={"a": "NVFP4"}), "must map modules"),
        (changed(MODELOPT_CONFIG, group_size=32), "group_size 16"),
        (changed(CT_CONFIG, format="pack-quantized"), "'pack-quantized' of group_0"),
        (changed(CT_CONFIG, config_groups={}), "no config_groups"),
        (ct_with(group_size=32), "group_size"),
        (ct_with(num_bits=8), "num_bits"),
        ({"quant_method": "awq", "bits": 4}, "'awq' is not a supported"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, r"weight_block_size \[1, 32\]"),
        ({"quant_algo": "MXFP8", "group_size": 16}, "MXFP8 needs group_size 32, got 16"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8"}}}, "'W4A8' is not a supp"),
        ({"quant_algo": "MXFP8"}, "do not fit MXFP8"),
        ("nvfp4", "not a JSON object"),
        (None, "do not fit a checkpoint without quantization_config"),
    ],
)
def test_unknown_quantization_is_refused(tmp_path, config, message):
    write(tmp_path, modelopt_tensors(), {"quantization_config": config})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_mixed_precision_of_nvfp4_only(tmp_path):
    layers = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in MODULES}
    config = changed(MODELOPT_CONFIG, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    checkpoint = open_checkpoint(write(tmp_path, modelopt_tensors(), {"quantization_config": config}))
    assert set(checkpoint.nvfp4) == set(MODULES)
