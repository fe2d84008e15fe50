"""transformers' decoders, unmodified: everything is recognised, and the results stay what they were."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from mmcompile.capture.decoder import capture_huggingface
from mmcompile.core.graph import operation_name, value_of
from mmcompile.core.passes import Pass, PassContext
from mmcompile.core.runner import PassReport, count_operations, run_passes
from mmcompile.core.sample_inputs import make_decoder_inputs
from mmcompile.passes.pipeline import list_passes

pytest.importorskip("transformers")

LAYERS = 1
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {"rope_theta": 5000.0},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma": {},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention"]},
}
MOE_FAMILIES = ("mixtral", "qwen3_moe")
DENSE = {"aten.add.Tensor", "aten.reshape.default"}
CASES = [
    ("llama", "sdpa", torch.bfloat16),
    ("llama", "eager", torch.float32),
    ("qwen3", "eager", torch.bfloat16),
    ("mistral", "sdpa", torch.float32),
    ("mixtral", "sdpa", torch.bfloat16),
    pytest.param("qwen3_moe", "sdpa", torch.float32, marks=pytest.mark.slow),
    ("gemma", "sdpa", torch.bfloat16),
    ("gemma3_text", "sdpa", torch.bfloat16),
]


def standardise_passes() -> list[Pass]:
    """The passes up to token-major form: what comes before the paged cache."""
    passes = list_passes("decoder")
    names = [p.name for p in passes]
    return passes[: names.index("insert_paged_cache")]


@lru_cache
def _standardise(family: str, attention: str, dtype: torch.dtype) -> tuple:
    """(captured and rewritten, logits before, reports of the passes)."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({"model_type": family, **BASE, **FAMILIES[family]}))
        captured = capture_huggingface(config, dtype=dtype, attention=attention, seed=5)
    before = capture_logits(captured.graph_module, batched=True)
    reports = run_passes(
        captured.graph_module, standardise_passes(), PassContext(max_context=64), make_inputs=make_decoder_inputs
    )
    return captured, before, reports


def capture_logits(graph_module: torch.fx.GraphModule, *, batched: bool) -> list[torch.Tensor]:
    """Logits [tokens, vocab] for some prompt lengths, beyond every window."""
    results = []
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 31):
        ids, positions = torch.randint(0, 64, (tokens,), generator=generator), torch.arange(tokens)
        with torch.no_grad():
            results.append(graph_module(ids[None], positions[None])[0] if batched else graph_module(ids, positions))
    return results


def _counts(captured) -> dict[str, int]:
    return count_operations(captured.graph_module)


@pytest.mark.parametrize(("family", "attention", "dtype"), CASES)
def test_family(family: str, attention: str, dtype: torch.dtype) -> None:
    captured, before, reports = _standardise(family, attention, dtype)
    counts = _counts(captured)
    norms = {"qwen3": 4, "qwen3_moe": 4, "gemma3_text": 6}.get(family, 2) * LAYERS + 1
    assert counts["mm.rms_norm"] == norms
    assert counts["mm.rope"] == 2 * LAYERS
    assert counts["mm.attention"] == LAYERS
    assert counts["mm.embedding"] == 1
    if not family.startswith("gemma"):
        gated = "mm.moe" if family in MOE_FAMILIES else "mm.swiglu"
        assert {name: counts[name] for name in ("mm.moe", "mm.swiglu") if name in counts} == {gated: LAYERS}
        assert _near_misses(reports) == []
    if family in ("llama", "qwen3", "mistral"):
        assert counts["mm.linear"] == 7 * LAYERS + 1
        assert {c for c in counts if not c.startswith("mm.")} <= DENSE
    assert "aten.transpose.int" not in counts
    _check_token_major(captured.graph_module)
    _check_window(captured.graph_module, FAMILIES[family].get("sliding_window") or 0)
    exact = attention == "sdpa" and family not in MOE_FAMILIES
    _check_logits(before, capture_logits(captured.graph_module, batched=False), exact, dtype)


def _near_misses(reports: list[PassReport]) -> list:
    return [miss for report in reports for miss in report.result.near_misses]


def _check_token_major(graph_module: torch.fx.GraphModule) -> None:
    for node in graph_module.graph.find_nodes(op="placeholder"):
        assert [str(d) for d in value_of(node).shape] == ["tokens"]
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and operation_name(node.target) in ("mm.attention", "mm.rope", "mm.linear"):
            assert str(value_of(node).shape[0]) == "tokens"
    (output,) = graph_module.graph.find_nodes(op="output")
    assert [str(d) for d in value_of(output.args[0]).shape] == ["tokens", "64"]


def _check_window(graph_module: torch.fx.GraphModule, window: int) -> None:
    found = [n.args[4] for n in graph_module.graph.nodes if operation_name(n.target) == "mm.attention"]
    assert found == [window] * LAYERS


def _check_logits(before: list, after: list, exact: bool, dtype: torch.dtype) -> None:
    """Bitwise with sdpa; the eager spelling sums in another order and, in bf16, rounds the probabilities.

    mm.moe multiplies all rows of an expert at once, which sums in another order than a product for each row.
    """
    for want, have in zip(before, after, strict=True):
        if exact:
            assert torch.equal(want, have)
        else:
            bound = 2e-6 if dtype == torch.float32 else 2e-2
            assert (want - have).abs().max() <= bound * want.abs().max()


def test_gemma_norm_and_gate() -> None:
    captured, _, reports = _standardise("gemma", "sdpa", torch.bfloat16)
    norms = [n for n in captured.graph_module.graph.nodes if operation_name(n.target) == "mm.rms_norm"]
    assert all(n.args[3] == 1.0 for n in norms)
    (miss,) = _near_misses(reports)
    assert miss.rule == "swiglu"
    assert "aten.gelu.default" in miss.reason
    assert miss.source.startswith("transformers/activations.py:")


def test_rope_table_follows_the_config() -> None:
    captured, *_ = _standardise("llama", "eager", torch.float32)
    table = captured.graph_module.cos_sin_table
    angles = torch.arange(64)[:, None].float() * (1.0 / 5000.0 ** (torch.arange(0, 8, 2).float() / 8))
    torch.testing.assert_close(table, torch.cat([angles.cos(), angles.sin()], 1), rtol=0, atol=1e-6)


def test_unknown_model_type(tmp_path: Path) -> None:
    from mmcompile.core.errors import CaptureError

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(CaptureError, match="no causal language model of type 'no_such_model'"):
        capture_huggingface(tmp_path, dtype=torch.float32)
    with pytest.raises(CaptureError, match="no config.json"):
        capture_huggingface(tmp_path / "absent", dtype=torch.float32)
