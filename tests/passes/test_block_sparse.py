"""MiniMax-M3, ours and transformers': block-sparse attention, router and experts are recognised, nothing else is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from mmcompile.capture.decoder import _name_positions
from mmcompile.capture.export import Captured, capture_module
from mmcompile.capture.stand_ins import stand_in
from mmcompile.core.errors import CaptureError, LoweringError
from mmcompile.core.graph import describe_value, full_arguments, operation_name, value_of
from mmcompile.core.passes import Pass, PassContext, PassResult
from mmcompile.core.runner import copy_graph, count_operations, run_passes
from mmcompile.models import minimax_m3
from mmcompile.models.minimax_m3 import MLP, MODELS, Experts, MoE, SparseAttention
from mmcompile.passes.pipeline import list_passes, whole_graph

STANDARDISE = "passes.standardise"
M3, FLASH = "minimax-m3-tiny", "minimax-m3.1-flash-tiny"
BLOCK = 16
ONE = {"num_layers": 1, "sparse_attention_freq": (1,), "moe_layer_freq": (1,)}
BOTH_SPARSE = {"num_layers": 2, "sparse_attention_freq": (1, 1), "moe_layer_freq": (0, 0)}
TWO = {"num_layers": 2, "sparse_attention_freq": (0, 1), "moe_layer_freq": (0, 1)}
LENGTHS = (1, 17, 48, 49, 130)  # the tiny configs choose 3 blocks of 16


def list_own_passes() -> list[Pass]:
    """The passes up to token-major form, with those of this file where the pipeline takes them."""
    named = {p.name: p for p in list_passes("decoder")}
    new = ("match_block_sparse", "match_swiglu_oai", "match_moe", "insert_sparse_cache")
    named |= {name: whole_graph("standardise", STANDARDISE, name) for name in new}
    order = (
        "drop_no_ops", "fold_literals", "merge_common", "match_linear", "match_embedding", "match_rms_norm",
        "match_rope", "match_block_sparse", "match_attention", "match_swiglu_oai", "match_swiglu", "match_moe",
        "flatten_batch", "cancel_views",
    )  # fmt: skip
    return [named[name] for name in order]


def capture(module: torch.nn.Module, dtype: torch.dtype, *, batched: bool = False) -> Captured:
    torch.manual_seed(5)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5).to(dtype)
    name, example = ("position_ids", torch.arange(11)[None]) if batched else ("positions", torch.arange(11))
    axis = {int(batched): "tokens"}
    captured = capture_module(
        module, {"input_ids": torch.zeros_like(example), name: example}, dynamic={"input_ids": axis, name: axis},
        symbols={"tokens": (2, 1024)}, constants={"use_cache": False} if batched else None, kind="decoder",
    )  # fmt: skip
    _name_positions(captured, name)
    return captured


def standardise(captured: Captured) -> PassResult:
    """Run the passes; everything that they report, in one record."""
    total = PassResult()
    for report in run_passes(captured.graph_module, list_own_passes(), PassContext(max_context=256)):
        total.extend(report.result)
    return total


@cache
def standardise_ours(name: str, dtype: torch.dtype, **changes) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(graph as captured, graph after the passes) of a config; nothing may be a near miss."""
    captured = capture(minimax_m3.build(replace(MODELS[name], **changes)).eval(), dtype)
    before = copy_graph(captured.graph_module)
    assert standardise(captured).near_misses == []
    return before, captured.graph_module


def run_graph(graph: torch.fx.GraphModule, tokens: int) -> torch.Tensor:
    inputs = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(tokens)), torch.arange(tokens)
    nodes = graph.graph.find_nodes(op="placeholder")
    with torch.no_grad():
        out = graph(*(i[None] if value_of(n).dim() == 2 else i for i, n in zip(inputs, nodes, strict=True)))
    return out.reshape(tokens, -1)


def check_logits(before: torch.fx.GraphModule, after: torch.fx.GraphModule, dtype: torch.dtype) -> None:
    """Equal to rounding; in bfloat16 a few tokens have tied experts, between which topk chooses as it likes."""
    for tokens in LENGTHS:
        difference = (run_graph(after, tokens) - run_graph(before, tokens)).abs().amax(-1)
        if dtype == torch.float32:
            assert float(difference.max()) < 2e-4
        else:
            assert float((difference < 0.25).float().mean()) > 0.9


@pytest.mark.parametrize(("name", "dtype"), [(M3, torch.bfloat16), (FLASH, torch.float32)])
def test_our_model_becomes_operations(name, dtype):
    changes = TWO if name == M3 else ONE
    before, after = standardise_ours(name, dtype, **changes)
    counts = count_operations(after)
    for operation in ("index_score", "block_top_k", "block_sparse_attention", "moe", "route_top_k"):
        assert counts[f"mm.{operation}"] == 1
    assert (
        counts.get("mm.attention", 0) == changes["num_layers"] - 1 and counts["mm.swiglu_oai"] == changes["num_layers"]
    )
    assert "mm.swiglu" not in counts
    assert {c for c in counts if not c.startswith("mm.")} <= {
        "aten.add.Tensor", "aten.reshape.default", "aten.select.int", "getitem", "aten.to.dtype",
    }  # fmt: skip
    check_logits(before, after, dtype)


def test_attributes_are_the_config():
    _, after = standardise_ours(FLASH, torch.float32, **ONE, local_blocks=2, initial_blocks=1, top_k_blocks=4)
    (choice,) = after.graph.find_nodes(op="call_function", target=torch.ops.mm.block_top_k.default)
    assert list(full_arguments(choice).values())[2:] == [BLOCK, 4, 2, 1]
    (route,) = after.graph.find_nodes(op="call_function", target=torch.ops.mm.route_top_k.default)
    assert route.args[2:] == (2, 2.0)
    (moe,) = after.graph.find_nodes(op="call_function", target=torch.ops.mm.moe.default)
    assert moe.args[6:] == ("swiglu_oai", 1.702, 7.0) and operation_name(moe.args[5].target) == "mm.linear"


def test_a_shared_choice_is_one_choice():
    before, after = standardise_ours(FLASH, torch.float32, **BOTH_SPARSE, index_topk_pattern="FS")
    counts = count_operations(after)
    assert counts["mm.index_score"] == counts["mm.block_top_k"] == 1 and counts["mm.block_sparse_attention"] == 2
    torch.testing.assert_close(run_graph(after, 130), run_graph(before, 130), rtol=0, atol=2e-4)


def make_transformers(attention: str = "sdpa") -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=32, dense_intermediate_size=96, shared_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        num_local_experts=8, num_experts_per_tok=2, rotary_dim=8, index_n_heads=2, index_head_dim=16,
        index_block_size=BLOCK, index_topk_blocks=3, layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse"], bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = attention, "batched_mm"
    return transformers.MiniMaxM3VLForCausalLM(config).eval()


def list_operations(graph: torch.fx.GraphModule) -> Counter:
    """mm:: operations but linear layers (transformers merges gate and up), with their literal arguments."""
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and operation_name(n.target).startswith("mm.")]
    return Counter(
        (operation_name(n.target), *(a for a in full_arguments(n).values() if not isinstance(a, torch.fx.Node)))
        for n in calls
        if operation_name(n.target) != "mm.linear"
    )


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("sdpa", torch.float32), pytest.param("eager", torch.bfloat16, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_transformers_model_becomes_the_same_operations(attention, dtype):
    module = make_transformers(attention)
    assert stand_in(module) == ["model.layers.1.self_attn.indexer"]
    captured = capture(module, dtype, batched=True)
    before = copy_graph(captured.graph_module)
    result = standardise(captured)
    assert result.near_misses == []
    _, ours = standardise_ours(M3, dtype, **TWO)
    assert list_operations(captured.graph_module) == list_operations(ours)
    check_logits(before, captured.graph_module, dtype)


def test_stand_ins_equal_what_they_replace():
    module = make_transformers()
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape) / 5
    ids = torch.randint(0, 512, (1, 130))
    with torch.no_grad():
        want = module(input_ids=ids, use_cache=False).logits
        stand_in(module)
        have = module(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(have, want, rtol=0, atol=1e-4)
        with pytest.raises(CaptureError, match="use_cache=False"):
            module(input_ids=ids, use_cache=True)


def test_an_indexer_with_one_choice_for_all_heads_is_refused(monkeypatch):
    module = make_transformers()
    kind = type(module.model.layers[1].self_attn.indexer)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a: original(self, *a)[:, :1].expand(-1, self.num_heads, -1, -1))
    with pytest.raises(CaptureError, match="does not choose blocks for each KV group on its own"):
        stand_in(module)


class SeesAhead(SparseAttention):
    def _see(self, blocks, places):
        return super()._see(blocks, places._replace(future=places.future & False))


class SeesWorst(SparseAttention):
    def _choose(self, scores, places):
        return super()._choose(scores.masked_fill(scores == float("-inf"), float("inf")).neg(), places)


class ScoresBySum(SparseAttention):
    def _score(self, x, places):
        return super()._score(x, places).cumsum(-1)


class ChoosesOnceForAllHeads(SparseAttention):
    def _score(self, x, places):
        return super()._score(x, places).amax(1, keepdim=True).expand(-1, 2, -1)


class SwapsHalves(Experts):
    def forward(self, x, experts, weights):
        rows = x.repeat_interleave(2, dim=0).unsqueeze(-1)
        up, gate = torch.bmm(self.gate_up_proj[experts.reshape(-1)], rows).squeeze(-1).chunk(2, dim=-1)
        hidden = minimax_m3.swiglu_oai(gate, up, self.config).unsqueeze(-1)
        rows = torch.bmm(self.down_proj[experts.reshape(-1)], hidden).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
        return rows.view(x.shape[0], 2, -1).sum(dim=1)


class WeighsByBiasedScore(MoE):
    def forward(self, x):
        ranking = torch.sigmoid(self.gate(x).float()) + self.e_score_correction_bias
        weights, experts = torch.topk(ranking, 2, dim=-1)
        return self.experts(x, experts, weights / weights.sum(dim=-1, keepdim=True))


class ClampsUpOnOneSide(MLP):
    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=7.0), self.up_proj(x).clamp(max=7.0)
        return self.down_proj((up + 1.0) * (gate * torch.sigmoid(gate * 1.702)))


WRONG = (  # layer, module, its class, the rule that nearly matched, and why it did not
    (0, "self_attn", SeesAhead, "block_sparse_attention", "the mask is not that of the chosen blocks"),
    (1, "self_attn", SeesWorst, "block_sparse_attention", "it is not a choice of the 3 best blocks"),
    (2, "self_attn", ScoresBySum, "block_sparse_attention", "it is not a choice of the 3 best blocks"),
    (3, "self_attn", ChoosesOnceForAllHeads, "block_sparse_attention", "for 16 tokens and 2 index heads"),
    (0, "mlp.experts", SwapsHalves, "moe", "gate and up are not the first and second half"),
    (1, "mlp", WeighsByBiasedScore, "route_top_k", "found getitem where aten.gather.default is needed"),
    (2, "mlp.shared_experts", ClampsUpOnOneSide, "swiglu_oai", "up is clamped to None .. 7.0"),
)


@pytest.mark.slow
def test_near_misses_are_reported_and_left_alone():
    model = minimax_m3.build(
        replace(MODELS[FLASH], num_layers=4, sparse_attention_freq=(1,) * 4, moe_layer_freq=(1, 1, 1, 0))
    )
    for layer, place, kind, _, _ in WRONG:
        model.model.layers[layer].get_submodule(place).__class__ = kind
    captured = capture(model.eval(), torch.float32)
    before = copy_graph(captured.graph_module)
    misses = standardise(captured).near_misses
    for _, _, kind, rule, reason in WRONG:
        assert any(m.rule == rule and reason in m.reason for m in misses), (kind, misses)
    assert "mm.block_sparse_attention" not in count_operations(captured.graph_module)
    torch.testing.assert_close(run_graph(captured.graph_module, 70), run_graph(before, 70), rtol=0, atol=2e-4)


def test_paged_caches():
    _, stateless = standardise_ours(FLASH, torch.float32, **BOTH_SPARSE, index_topk_pattern="FS")
    paged = copy_graph(stateless)
    context = PassContext(cache_dtype="auto", page_size=BLOCK)
    insert = whole_graph("standardise", STANDARDISE, "insert_sparse_cache")
    (report,) = run_passes(paged, [insert], context)
    shapes = {str(n.target): describe_value(value_of(n)) for n in paged.graph.find_nodes(op="placeholder")}
    assert context.info["kv_layers"] == 2 and len(report.result.matches) == 3
    assert shapes["kv_cache_0"] == shapes["kv_cache_1"] == "f32[pages, 2, 16, 32]"
    assert shapes["kv_cache_0_index"] == "f32[pages, 16, 16]" and "kv_cache_1_index" not in shapes
    assert not {"mm.index_score", "mm.block_sparse_attention"} & set(report.operations)
    ids = torch.randint(0, 512, (100,), generator=torch.Generator().manual_seed(100))
    state = [torch.full((9, *map(int, value_of(n).shape[1:])), torch.nan)
             for n in paged.graph.find_nodes(op="placeholder") if str(n.target).startswith("kv_cache")]  # fmt: skip
    table, want, have = torch.tensor([[5, 2, 7, 0, 3, 8, 1]], dtype=torch.int32), run_graph(stateless, 100), []
    for begin, end in ((0, 60), (60, 61), (61, 69), (69, 70), (70, 100)):
        positions = torch.arange(begin, end, dtype=torch.int32)
        slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        batch = table, torch.tensor([end]).int(), torch.tensor([0, end - begin]).int()
        with torch.no_grad():
            have.append(paged(ids[begin:end].int(), positions, slots, *batch, *state))
    torch.testing.assert_close(torch.cat(have), want, rtol=0, atol=2e-4)


def test_a_page_must_be_a_block():
    _, stateless = standardise_ours(FLASH, torch.float32, **ONE)
    insert = whole_graph("standardise", STANDARDISE, "insert_sparse_cache")
    for dtype in ("auto", "nvfp4"):
        with pytest.raises(LoweringError, match="a page holds 64 tokens, block-sparse attention with blocks of 16"):
            run_passes(copy_graph(stateless), [insert], PassContext(cache_dtype=dtype, page_size=64))
