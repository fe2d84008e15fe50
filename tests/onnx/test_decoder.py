"""A decoder as torch's ONNX exporter writes it becomes an artifact that generates what transformers generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmcompile.driver import BuildOptions, build
from mmcompile.runtime import SamplingParams, load

FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MATCHES = {
    "match_linear": 15,
    "match_rms_norm": 5,
    "match_rope": 4,
    "match_attention": 2,
    "match_swiglu": 2,
    "insert_paged_cache": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
def test_every_part_of_a_llama_is_found_in_the_exporters_spelling(tmp_path: Path, opset: int):
    """Opset 18 has neither Attention nor RMSNormalization, so that the exporter takes them apart."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**FIELDS)).eval()

    class Stateless(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits

    example = torch.arange(7)[None]
    axes = {1: torch.export.Dim("tokens", max=64)}
    path = tmp_path / "llama.onnx"
    torch.onnx.export(
        Stateless(), (example.clone(), example), path, dynamo=True, dynamic_shapes=(axes, axes), opset_version=opset,
        input_names=["input_ids", "position_ids"], output_names=["logits"], verbose=False,
    )  # fmt: skip
    options = BuildOptions(max_context=64, dtype="float32", max_batch=4)
    out = build(str(path), tmp_path / "out", options)
    reports = [json.loads(file.read_text()) for file in sorted((out / "passes").glob("*.json"))]
    found = {r["name"]: len(r["result"]["matches"]) for r in reports}
    assert {name: found[name] for name in MATCHES} == MATCHES
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    tokens = load(out, device="cpu").generate([prompt], params)[0].tokens
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert tokens == wanted[0, len(prompt) :].tolist()
