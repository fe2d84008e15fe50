"""Checkpoints that mix NVFP4 experts, MXFP8 projections and plain tensors: read, written, streamed, refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmcompile.capture.checkpoint import open_checkpoint
from mmcompile.capture.decoder import load_weights
from mmcompile.capture.experts import stack_experts
from mmcompile.capture.export import without_weights
from mmcompile.capture.packed import load_packed, stream_weights
from mmcompile.capture.quantized import MXFP8_SCALES, NAMES
from mmcompile.capture.tensors import Checkpoint, PackedLinear, ScaledLinear
from mmcompile.capture.writer import hold, write_checkpoint
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import mxfp8, nvfp4
from mmcompile.models import minimax_m3

CONFIG = minimax_m3.MODELS["minimax-m3.1-flash-tiny"]
LAYOUTS = ["modelopt", "compressed-tensors"]
EXPERTS = "language_model.model.layers.1.block_sparse_moe.experts"
PROJECTION = "language_model.model.layers.0.self_attn.q_proj"


def make_weights():
    """The model's weights under the checkpoint's names: one matrix an expert, fp32 router, everything else bf16."""
    torch.manual_seed(0)
    weights = {}
    for name, tensor in minimax_m3.build(CONFIG).state_dict().items():
        stored = f"language_model.{name}"
        if ".mlp." in name and CONFIG.moe_layer_freq[int(name.split(".")[2])]:
            stored = stored.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("gate_up_proj"):
            for i, matrix in enumerate(tensor):
                parts = dict(zip(("w1", "w3"), matrix.chunk(2), strict=True))
                for part, rows in parts.items():
                    weights[stored.replace("gate_up_proj", f"{i}.{part}.weight")] = rows * (1 + 3 * (part == "w3"))
        elif name.endswith("experts.down_proj"):
            weights |= {stored.replace("down_proj", f"{i}.w2.weight"): m for i, m in enumerate(tensor)}
        else:
            router = ".gate." in stored or stored.endswith("e_score_correction_bias")
            weights[stored] = tensor if router else tensor.bfloat16()
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def choose_format(name):
    if ".experts." in name:
        return "nvfp4"
    projection = "_proj.weight" in name and "norm" not in name
    return "mxfp8" if projection else "plain"


def make_checkpoint(convention="modelopt", apart=True):
    """In memory. ``apart``: gate and up keep the global scale of their own, which differ."""
    tensors, packed, scaled = {}, {}, {}
    weights = make_weights()
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        form = choose_format(name)
        if form == "plain":
            tensors[name] = hold(tensor)
        elif form == "mxfp8":
            scaled[module] = ScaledLinear(*map(hold, mxfp8.encode(tensor)))
        else:
            partner = name.replace(".w1.", ".w3.") if ".w1." in name else name.replace(".w3.", ".w1.")
            shared = torch.maximum(tensor.abs().max(), weights[partner].abs().max()) / nvfp4.FULL_RANGE
            given = None if apart else shared
            codes, scale, multiplier = nvfp4.encode(tensor, convention=convention, global_scale=given)
            stored = multiplier if convention == "modelopt" else (1.0 / multiplier).reshape(1)
            packed[module] = PackedLinear(hold(codes), hold(scale), hold(stored), convention)
    extra = {
        "vision_tower.blocks.0.weight": hold(torch.ones(4, 4)),
        "multi_modal_projector.a.bias": hold(torch.ones(4)),
    }
    config = {"model_type": "minimax_m3_vl"}
    return Checkpoint("memory", config, tensors | extra, lambda: None, nvfp4=packed, mxfp8=scaled)


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def empty_model():
    with without_weights():
        return minimax_m3.build(CONFIG)


def parameters_of():
    return dict(empty_model().named_parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_and_read_again(tmp_path, layout):
    before = make_checkpoint(layout, apart=False)
    files = write_checkpoint(tmp_path, before, layout, shard_bytes=60_000)
    assert len(files) > 2 and all(file.stat().st_size < 80_000 for file in files)
    after = open_checkpoint(tmp_path)
    assert set(after.nvfp4) == set(before.nvfp4) and set(after.mxfp8) == set(before.mxfp8)
    assert set(after.tensors) == set(before.tensors)
    for module in before.nvfp4:
        for have, want in zip(after.load_nvfp4(module), before.load_nvfp4(module), strict=True):
            assert torch.equal(bytes_of(have), bytes_of(want)), module
    for module in before.mxfp8:
        for have, want in zip(after.load_mxfp8(module), before.load_mxfp8(module), strict=True):
            assert torch.equal(bytes_of(have), bytes_of(want)), module
    for name in before.tensors:
        assert torch.equal(bytes_of(after.load(name)), bytes_of(before.load(name)))
        assert after.dtype(name) == before.dtype(name)


def test_names_and_configuration_of_modelopts_mix(tmp_path):
    write_checkpoint(tmp_path, make_checkpoint(), "modelopt")
    stored = load_file(tmp_path / "model.safetensors")
    expert = f"{EXPERTS}.3.w2"
    kinds = {name: (t.dtype, tuple(t.shape)) for name, t in stored.items() if name.startswith((expert, PROJECTION))}
    assert kinds == {
        f"{expert}.weight": (torch.uint8, (64, 16)),
        f"{expert}.weight_scale": (torch.float8_e4m3fn, (64, 2)),
        f"{expert}.weight_scale_2": (torch.float32, ()),
        f"{expert}.input_scale": (torch.float32, ()),
        f"{PROJECTION}.weight": (torch.float8_e4m3fn, (64, 64)),
        f"{PROJECTION}.weight_scale_inv": (torch.uint8, (64, 2)),
    }
    assert stored["language_model.model.layers.1.block_sparse_moe.gate.weight"].dtype == torch.float32
    config = json.loads((tmp_path / "config.json").read_text())
    record = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert config["model_type"] == "minimax_m3_vl" and config["quantization_config"]["quant_method"] == "modelopt"
    assert record["quant_algo"] == "MIXED_PRECISION"
    assert record["quantized_layers"][expert] == {"quant_algo": "NVFP4", "group_size": 16}
    assert record["quantized_layers"][PROJECTION]["quant_algo"] == "MXFP8"
    assert "language_model.lm_head" in record["exclude_modules"]


def test_compressed_tensors_opens_what_was_written(tmp_path):
    package = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor

    write_checkpoint(tmp_path, make_checkpoint("compressed-tensors"), "compressed-tensors")
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    parsed = package.QuantizationConfig.model_validate(config)
    assert parsed.format == "mixed-precision"
    groups = {group.format: group for group in parsed.config_groups.values()}
    checkpoint = open_checkpoint(tmp_path)
    parts = {p: stored[f"{PROJECTION}.{p}"] for p in ("weight", "weight_scale")}
    theirs = MXFP8QuantizationCompressor.decompress(parts, groups["mxfp8-quantized"])["weight"]
    assert torch.equal(mxfp8.decode(*checkpoint.load_mxfp8(PROJECTION)).to(theirs.dtype), theirs)
    expert = f"{EXPERTS}.3.w1"
    parts = {p: stored[f"{expert}.{p}"] for p in ("weight_packed", "weight_scale", "weight_global_scale")}
    theirs = NVFP4PackedCompressor.decompress(parts, groups["nvfp4-pack-quantized"])["weight"].float()
    packed, scale, multiplier = checkpoint.load_nvfp4(expert)
    step = (scale.float() * multiplier[:, None]).repeat_interleave(16, 1)
    assert bool(((nvfp4.decode_blocks(packed, scale) * multiplier[:, None] - theirs).abs() <= 6 * step * 2**-7).all())
    targets = groups["nvfp4-pack-quantized"].targets
    assert len(targets) == 3 and all(t.startswith("re:") for t in targets)


def test_minimax_layout_holds_mxfp8_only(tmp_path):
    checkpoint = make_checkpoint()
    with pytest.raises(CheckpointError, match="holds no NVFP4 weights"):
        write_checkpoint(tmp_path, checkpoint, "minimax")
    scaled = dict(checkpoint.mxfp8)
    scaled |= {
        name.removesuffix(".weight"): ScaledLinear(*map(hold, mxfp8.encode(tensor)))
        for name, tensor in make_weights().items() if choose_format(name) == "nvfp4"
    }  # fmt: skip
    write_checkpoint(tmp_path, replace(checkpoint, nvfp4={}, mxfp8=scaled), "minimax")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp8" and config["weight_block_size"] == [1, 32]
    model = empty_model()
    packed = load_weights(model, open_checkpoint(tmp_path))
    assert not packed.nvfp4 and "model.layers.0.self_attn.q_proj" in packed.mxfp8
    want = mxfp8.decode(*mxfp8.encode(make_weights()[f"{EXPERTS}.2.w3.weight"]))
    assert torch.equal(model.model.layers[1].mlp.experts.gate_up_proj[2, 32:], want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_gets_its_decoded_weights(tmp_path, layout):
    write_checkpoint(tmp_path, make_checkpoint(layout), layout, shard_bytes=100_000)
    model = empty_model()
    packed = load_weights(model, open_checkpoint(tmp_path))
    weights = make_weights()
    state = dict(model.named_parameters())
    assert not any(tensor.is_meta for tensor in state.values())
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    assert set(packed.nvfp4) == {f"model.layers.{i}.mlp.experts.{p}_proj" for i in (1, 2) for p in ("gate_up", "down")}
    assert [tuple(t.shape) for t in packed.nvfp4[stack]] == [(8, 64, 32), (8, 64, 4), (8, 64)]
    for expert in range(8):
        dense = torch.cat([weights[f"{EXPERTS}.{expert}.{part}.weight"] for part in ("w1", "w3")])
        assert float((state[stack][expert] - dense).norm() / dense.norm()) < 0.12
    q_proj = weights[f"{PROJECTION}.weight"]
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], mxfp8.decode(*mxfp8.encode(q_proj)))
    gate = weights["language_model.model.layers.1.block_sparse_moe.gate.weight"]
    assert torch.equal(state["model.layers.1.mlp.gate.weight"], gate)
    assert torch.equal(state["lm_head.weight"], weights["language_model.lm_head.weight"].float())


def write_apart(directory):
    """A checkpoint as vllm issue 54974 met it: gate and up of an expert with global scales of their own."""
    tensors, listed = {}, {}
    checkpoint = make_checkpoint(apart=True)
    for module, packed in checkpoint.nvfp4.items():
        parts = (packed.packed, packed.scale, packed.global_scale)
        tensors |= {f"{module}.{n}": lazy.read() for n, lazy in zip(NAMES["modelopt"], parts, strict=True)}
        listed[module] = {"quant_algo": "NVFP4", "group_size": 16}
    for module, scaled in checkpoint.mxfp8.items():
        tensors |= {f"{module}.weight": scaled.values.read(), f"{module}.{MXFP8_SCALES[0]}": scaled.scale.read()}
        listed[module] = {"quant_algo": "MXFP8"}
    tensors |= {name: lazy.read() for name, lazy in checkpoint.tensors.items()}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    save(directory, tensors, quantization)
    return tensors, quantization


def save(directory, tensors, quantization, shards=1):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    weight_map = {}
    for number in range(shards):
        part = {name: tensor.contiguous() for name, tensor in list(tensors.items())[number::shards]}
        save_file(part, directory / f"shard{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"shard{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_gate_and_up_of_different_scales_keep_them_when_read(tmp_path):
    write_apart(tmp_path)
    checkpoint = stack_experts(open_checkpoint(tmp_path), parameters_of())
    packed, scale, multiplier = checkpoint.experts["model.layers.1.mlp.experts.gate_up_proj"].load()
    gate, up = multiplier[:, :32], multiplier[:, 32:]
    assert bool((up > 2 * gate).all()) and bool((gate == gate[:, :1]).all())
    for expert in range(8):
        for part, rows in (("w1", slice(0, 32)), ("w3", slice(32, 64))):
            want = nvfp4.encode(make_weights()[f"{EXPERTS}.{expert}.{part}.weight"])
            assert torch.equal(packed[expert, rows], want[0])
            assert torch.equal(bytes_of(scale[expert, rows]), bytes_of(want[1]))
            assert torch.equal(multiplier[expert, rows], want[2].expand(32))


def test_gate_and_up_of_different_scales_are_brought_to_one_when_written(tmp_path):
    write_apart(tmp_path / "apart")
    before = open_checkpoint(tmp_path / "apart")
    write_checkpoint(tmp_path / "one", before, "modelopt")
    after = open_checkpoint(tmp_path / "one")
    for expert in range(8):
        gate, up = (after.load_nvfp4(f"{EXPERTS}.{expert}.{part}") for part in ("w1", "w3"))
        old_gate, old_up = (before.load_nvfp4(f"{EXPERTS}.{expert}.{part}") for part in ("w1", "w3"))
        assert gate[2][0] == up[2][0] == old_up[2][0] > old_gate[2][0]
        assert torch.equal(gate[0], old_gate[0]) and torch.equal(bytes_of(up[1]), bytes_of(old_up[1]))
        steps, old_steps = (p[1].float() * p[2][:, None] for p in (gate, old_gate))
        assert bool(((steps - old_steps).abs() <= torch.maximum(old_steps / 16, gate[2][:, None] * 2.0**-10)).all())
        ratio = old_up[2][0] / old_gate[2][0]
        naive = old_gate[1].float() * gate[2][:, None]  # what the loaders of that issue computed
        torch.testing.assert_close(naive / old_steps, torch.full_like(naive, float(ratio)))


def test_streaming_gives_every_weight_once_layer_by_layer(tmp_path):
    write_checkpoint(tmp_path, make_checkpoint(apart=False), shard_bytes=50_000)
    parameters = parameters_of()
    checkpoint = stack_experts(open_checkpoint(tmp_path), parameters)
    weights = list(stream_weights(checkpoint))
    assert sorted(w.name for w in weights) == sorted(parameters)
    layers = [int(w.name.split(".")[2]) for w in weights if w.name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert {w.format for w in weights} == {"plain", "nvfp4", "mxfp8"}
    packed = load_packed(checkpoint, parameters)
    for weight in weights:
        module = weight.name.removesuffix(".weight")
        want = packed.nvfp4.get(module) or packed.mxfp8.get(module) or (checkpoint.load(weight.name),)
        for a, b in zip(weight.parts, want, strict=True):
            assert torch.equal(bytes_of(a), bytes_of(b))


def remove_expert(tensors, listed, number):
    for name in [n for n in tensors if n.startswith(f"{EXPERTS}.{number}.")]:
        del tensors[name]
    for name in [n for n in listed if n.startswith(f"{EXPERTS}.{number}.")]:
        del listed[name]


SCALE, GLOBAL = f"{PROJECTION}.weight_scale_inv", f"{EXPERTS}.2.w2.weight_scale_2"
REFUSED = {
    "missing expert": (
        lambda t, q: remove_expert(t, q, 5), "missing tensors: 'model.layers.1.mlp.experts.5.w1.weight'",
    ),
    "missing last expert": (
        lambda t, q: remove_expert(t, q, 7), r"gate_up_proj: \[7, 64, 64\] instead of \[8, 64, 64\]",
    ),
    "listed expert missing": (
        lambda t, q: remove_expert(t, {}, 5), r"not stored as quantized_layers lists them: .*experts.5.w1 \(NVFP4\)",
    ),
    "NVFP4 scale missing": (
        lambda t, q: t.pop(f"{EXPERTS}.2.w3.weight_scale"), "without its scale: .*2.w3.weight_scale",
    ),
    "NVFP4 global missing": (
        lambda t, q: t.pop(f"{EXPERTS}.2.w3.weight_scale_2"), "without its scale: .*weight_scale_2",
    ),
    "MXFP8 scale missing": (lambda t, q: t.pop(SCALE), "MXFP8 weight without its scale"),
    "MXFP8 scale twice": (lambda t, q: t.update({SCALE[:-4]: t[SCALE].clone()}), "MXFP8 weight with two scales"),
    "MXFP8 scale NaN": (lambda t, q: t[SCALE].fill_(255), r"MXFP8 scale is NaN .*q_proj"),
    "MXFP8 scale inverted": (lambda t, q: t.update({SCALE: 254 - t[SCALE]}), "check the scale convention"),
    "MXFP8 scale of another type": (lambda t, q: t.update({SCALE: torch.ones(64, 2)}), "scales must be uint8"),
    "NVFP4 block scale NaN": (
        lambda t, q: t[f"{EXPERTS}.2.w2.weight_scale"].view(torch.uint8).fill_(0x7F), "block scale is NaN.*2.w2",
    ),
    "NVFP4 global NaN": (lambda t, q: t[GLOBAL].fill_(torch.nan), "global scale is NaN.*2.w2"),
    "NVFP4 global inverted": (lambda t, q: t.update({GLOBAL: 1 / t[GLOBAL]}), "check the global scale convention"),
    "listed in another format": (
        lambda t, q: q.update({PROJECTION: {"quant_algo": "NVFP4"}}), r"lists them: '.*q_proj \(NVFP4\)'",
    ),
    "expert in another format": (
        lambda t, q: turn_into_mxfp8(t, q, f"{EXPERTS}.4.w1"), "experts of one layer in different formats",
    ),
    "expert of another shape": (
        lambda t, q: shorten(t, f"{EXPERTS}.4.w1"), r"tensors of the wrong shape: .*4.w1.weight: \[16, 64\]",
    ),
    "projection of another shape": (
        lambda t, q: shorten(t, PROJECTION), r"q_proj.weight: \[32, 64\] instead of \[64, 64\]",
    ),
    "unknown module": (
        lambda t, q: (t.update({"a.b.weight": t[f"{PROJECTION}.weight"].clone(),
                                "a.b.weight_scale_inv": t[SCALE].clone()})),
        "the model has no module 'a.b'",
    ),
}  # fmt: skip


def turn_into_mxfp8(tensors, listed, module):
    for part in NAMES["modelopt"]:
        del tensors[f"{module}.{part}"]
    values, scale = mxfp8.encode(torch.randn(32, 64) * 0.02)
    tensors |= {f"{module}.weight": values, f"{module}.weight_scale_inv": scale}
    listed[module] = {"quant_algo": "MXFP8"}


def shorten(tensors, module):
    for part in ("weight", "weight_scale", "weight_scale_inv"):
        if f"{module}.{part}" in tensors:
            tensors[f"{module}.{part}"] = tensors[f"{module}.{part}"].chunk(2)[0].clone()


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    change, message = REFUSED[case]
    tensors, quantization = write_apart(tmp_path)
    change(tensors, quantization["quantized_layers"])
    save(tmp_path, tensors, quantization, shards=2)
    with pytest.raises(CheckpointError, match=message):
        load_weights(empty_model(), open_checkpoint(tmp_path))


def test_truncated_shard_and_mismatching_index(tmp_path):
    tensors, quantization = write_apart(tmp_path)
    save(tmp_path, tensors, quantization, shards=3)
    load_weights(empty_model(), open_checkpoint(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = f"{EXPERTS}.2.w3.weight"
    shard = content["weight_map"].pop(name)
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"index and shard disagree about '{name}'"):
        open_checkpoint(tmp_path)
    other = next(s for s in content["weight_map"].values() if s != shard)
    content["weight_map"][name] = other
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"index and shard disagree about '{name}'"):
        open_checkpoint(tmp_path)
    save(tmp_path, tensors, quantization, shards=3)
    whole = (tmp_path / shard).read_bytes()
    (tmp_path / shard).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="not a complete safetensors file.*download it again"):
        open_checkpoint(tmp_path)


def test_what_cannot_be_written(tmp_path):
    checkpoint = make_checkpoint()
    with pytest.raises(ValueError, match="layout must be one of"):
        write_checkpoint(tmp_path, checkpoint, "gguf")
    with pytest.raises(CheckpointError, match="stacked experts cannot be written"):
        write_checkpoint(tmp_path, stack_experts(checkpoint, parameters_of()))
    with pytest.raises(CheckpointError, match="cannot be written over itself"):
        write_checkpoint(tmp_path, replace(checkpoint, where=str(tmp_path)))
    packed = checkpoint.nvfp4[f"{EXPERTS}.0.w1"]
    rows = replace(packed, global_scale=hold(torch.rand(32) + 0.5))
    with pytest.raises(CheckpointError, match="have several global scales"):
        write_checkpoint(tmp_path, replace(checkpoint, nvfp4=checkpoint.nvfp4 | {f"{EXPERTS}.0.w1": rows}))
    wrong = replace(hold(torch.ones(3)), shape=(4,))
    with pytest.raises(CheckpointError, match=r"'a' is torch.float32 \[3\] instead of torch.float32 \[4\]"):
        write_checkpoint(tmp_path, Checkpoint("memory", {}, {"a": wrong}, lambda: None))
