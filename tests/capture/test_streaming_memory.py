"""Two layers of MiniMax-M3.1 at real size are streamed within 4 GiB."""

import json
import math
import subprocess
import sys
import textwrap

import pytest

HIDDEN, WIDTH, EXPERTS, QUERIES = 6144, 3072, 128, 8192
LIMIT = 4 * 2**30
ITEM = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}


def list_tensors(layer):
    """(name, dtype, shape, byte that fills it or None for zeros)."""
    prefix = f"language_model.model.layers.{layer}"
    for expert in range(EXPERTS):
        for part, rows, columns in (("w1", WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH), ("w3", WIDTH, HIDDEN)):
            name = f"{prefix}.block_sparse_moe.experts.{expert}.{part}"
            yield f"{name}.weight", "U8", [rows, columns // 2], None
            yield f"{name}.weight_scale", "F8_E4M3", [rows, columns // 16], 0x38
            yield f"{name}.weight_scale_2", "F32", [], 0x3A
    yield f"{prefix}.self_attn.q_proj.weight", "F8_E4M3", [QUERIES, HIDDEN], None
    yield f"{prefix}.self_attn.q_proj.weight_scale_inv", "U8", [QUERIES, HIDDEN // 32], 120
    yield f"{prefix}.input_layernorm.weight", "BF16", [HIDDEN], None


def write_shard(path, tensors):
    """A safetensors file whose zeros are holes, so that it costs little disk."""
    header, end = {}, 0
    for name, dtype, shape, _ in tensors:
        size = math.prod(shape) * ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, _, _, byte in tensors:
            if byte is not None:
                begin, stop = header[name]["data_offsets"]
                file.seek(8 + len(text) + begin)
                file.write(bytes([byte]) * (stop - begin))


READER = """
    import sys
    from pathlib import Path
    from mmcompile.capture.checkpoint import open_checkpoint
    from mmcompile.capture.experts import stack_experts
    from mmcompile.capture.packed import stream_weights

    prefixes = [f"model.layers.{i}." for i in (3, 4)]
    leaves = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight", "input_layernorm.weight"]
    parameters = {prefix + leaf for prefix in prefixes for leaf in leaves}
    checkpoint = stack_experts(open_checkpoint(Path(sys.argv[1])), parameters)
    seen, stored = set(), 0
    for weight in stream_weights(checkpoint):
        seen.add(weight.name)
        stored += sum(part.numel() * part.element_size() for part in weight.parts)
        del weight
    assert seen == parameters, seen
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024, stored)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_two_layers_of_m31_are_streamed_within_4_gib(tmp_path):
    weight_map = {}
    for layer in (3, 4):
        tensors = list(list_tensors(layer))
        write_shard(tmp_path / f"layer{layer}.safetensors", tensors)
        weight_map |= dict.fromkeys((name for name, *_ in tensors), f"layer{layer}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    listed = {
        name.removesuffix(".weight"): {"quant_algo": "NVFP4" if ".experts." in name else "MXFP8"}
        for name in weight_map if name.endswith(("w1.weight", "w2.weight", "w3.weight", "q_proj.weight"))
    }  # fmt: skip
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READER), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, stored = map(int, done.stdout.split())
    assert stored > 2 * LIMIT * 0.9
    assert peak < LIMIT, f"{peak / 2**30:.2f} GiB"
