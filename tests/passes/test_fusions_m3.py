"""MiniMax-M3's fusions: QKV with an indexer from projection to both caches, sum and norm; near misses say why."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import cache

import pytest
import torch

from mmcompile.capture.decoder import capture_decoder
from mmcompile.capture.export import capture_module
from mmcompile.core.graph import full_arguments, infer_meta
from mmcompile.core.passes import PassContext
from mmcompile.core.runner import copy_graph, count_operations, run_passes
from mmcompile.core.sample_inputs import make_decode_inputs, make_decoder_inputs
from mmcompile.models import minimax_m3
from mmcompile.models.minimax_m3 import MODELS
from mmcompile.passes.fusion.qk_norm_rope_insert import guard_index
from mmcompile.passes.pipeline import list_decode_passes, list_passes, rule_file, rule_folder, whole_graph

MM, ATEN = torch.ops.mm, torch.ops.aten
FUSION = "passes.fusion"
PAGE = 16
LAYERS = {
    "sparse": {"num_layers": 1, "sparse_attention_freq": (1,), "moe_layer_freq": (0,)},
    "shared": {"num_layers": 2, "sparse_attention_freq": (1, 1), "moe_layer_freq": (0, 0), "index_topk_pattern": "FS"},
    "dense first": {"num_layers": 2, "sparse_attention_freq": (0, 1), "moe_layer_freq": (0, 0)},
}


@cache
def capture_paged(layers: str, cache_dtype: str) -> torch.fx.GraphModule:
    """A tiny M3 with random norms, captured and taken through the passes before quantization."""
    torch.manual_seed(5)
    module = minimax_m3.build(replace(MODELS["minimax-m3.1-flash-tiny"], **LAYERS[layers])).eval()
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5).bfloat16()
    example = {"input_ids": torch.zeros(11, dtype=torch.int32), "positions": torch.arange(11, dtype=torch.int32)}
    dynamic = {name: {0: "tokens"} for name in example}
    graph = capture_module(module, example, dynamic=dynamic, symbols={"tokens": (2, 1024)}, kind="decoder").graph_module
    before = [p for p in list_passes("decoder") if p.phase in ("clean", "standardise")]
    run_passes(graph, before, PassContext(cache_dtype=cache_dtype, page_size=PAGE, max_context=256))
    return graph


def prepare(layers="sparse", *, weights="none", cache_dtype="auto", edit=None, merge=True):
    """The graph before the fusions, its projections in the format ``weights``; ``edit(graph)`` before the merging."""
    graph = copy_graph(capture_paged(layers, cache_dtype))
    if edit is not None:
        edit(graph)
        graph.recompile()
    if weights != "none":
        encode_projections(graph, weights)
    if merge:
        run_passes(graph, [whole_graph("fuse", FUSION, "merge_linears")], PassContext())
    return graph


def encode_projections(graph, weights):
    """Replace the linear layers by those on NVFP4 or MXFP8 weights."""
    op, encode = {"nvfp4": (MM.linear_nvfp4, MM.nvfp4_quantize), "mxfp8": (MM.linear_mxfp8, MM.mxfp8_quantize)}[weights]
    for node in find(graph, MM.linear.default):
        x, weight, *rest = full_arguments(node).values()
        with graph.graph.inserting_before(node):
            made = [graph.graph.call_function(encode.default, (weight,))]
            parts = 3 if weights == "nvfp4" else 2
            made += [graph.graph.call_function(operator.getitem, (made[0], i)) for i in range(parts)]
            made.append(graph.graph.call_function(op.default, (x, *made[1:], *rest)))
        infer_meta(graph, made)
        made[-1].meta["source"] = node.meta["source"]
        node.replace_all_uses_with(made[-1])
        graph.graph.erase_node(node)
    graph.recompile()


def find(graph, target):
    return list(graph.graph.find_nodes(op="call_function", target=target))


def call_before(graph, node, target, *arguments):
    """A new call in front of ``node``."""
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(target, arguments)
    infer_meta(graph, [made])
    made.meta["source"] = node.meta["source"]
    return made


def fuse(graph, name="qk_norm_rope_insert"):
    """Run one fusion under verification."""
    (report,) = run_passes(graph, [rule_file("fuse", FUSION, name)], PassContext(), make_inputs=make_decoder_inputs)
    assert report.certificate is not None or not report.result.matches
    return report


def rules(report):
    return [match.rule for match in report.result.matches]


@pytest.mark.parametrize("weights", ["none", "nvfp4", "mxfp8"])
def test_the_projections_are_one_gemm_in_the_order_of_the_operation(weights):
    graph = prepare(weights=weights, merge=False)
    (report,) = run_passes(
        graph, [whole_graph("fuse", FUSION, "merge_linears")], PassContext(), make_inputs=make_decoder_inputs
    )
    assert "merge_qkv_index" in rules(report)
    (split, *_) = find(graph, ATEN.split_with_sizes.default)
    assert split.args[1] == [64, 32, 32, 32, 16]


@pytest.mark.parametrize("cache_dtype", ["auto", "float8_e4m3fn"])
def test_qk_norm_rope_insert_index(cache_dtype):
    graph = prepare(cache_dtype=cache_dtype)
    report = fuse(graph)
    assert rules(report) == ["qk_norm_rope_insert_index"] and not report.result.near_misses
    assert report.certificate.max_error == 0.0
    assert not {"mm.rope", "mm.insert_kv", "mm.insert_index"} & set(report.operations)
    (node,) = find(graph, MM.qk_norm_rope_insert_index.default)
    arguments = full_arguments(node)
    assert [str(arguments[name].target) for name in ("kv_cache", "index_cache")] == ["kv_cache_0", "kv_cache_0_index"]
    names = ("num_heads", "num_kv_heads", "num_index_heads", "head_dim", "eps", "weight_offset", "round_before_scale")
    assert [arguments[name] for name in names] == [4, 2, 2, 16, 1e-6, 1.0, False]
    assert arguments["cos_sin"].meta["val"].shape[1] == 8  # partial rotary: 8 of 16


def test_a_layer_that_shares_blocks_has_no_index_part():
    graph = prepare("shared")
    assert rules(fuse(graph)) == ["qk_norm_rope_insert_index", "qk_norm_rope_insert"]
    assert count_operations(graph)["mm.qk_norm_rope_insert"] == 1


def test_a_dense_layer_has_no_index_part():
    graph = prepare("dense first")
    report = fuse(graph)
    assert sorted(rules(report)) == ["qk_norm_rope_insert", "qk_norm_rope_insert_index"]
    assert not report.result.near_misses


@pytest.mark.slow
def test_transformers_model_is_fused_alike():
    transformers = pytest.importorskip("transformers")
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=32, dense_intermediate_size=96, shared_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        num_local_experts=8, num_experts_per_tok=2, rotary_dim=8, index_n_heads=2, index_head_dim=16,
        index_block_size=PAGE, index_topk_blocks=3, layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"], bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    graph = capture_decoder(
        lambda: transformers.MiniMaxM3VLForCausalLM(config).eval(), dtype=torch.bfloat16, max_positions=1024,
        batched=True,
    ).graph_module  # fmt: skip
    run_passes(graph, [p for p in list_passes("decoder") if p.phase in ("clean", "standardise")],
               PassContext(cache_dtype="auto", page_size=PAGE, max_context=256))  # fmt: skip
    run_passes(graph, [whole_graph("fuse", FUSION, "merge_linears")], PassContext())
    assert sorted(rules(fuse(graph))) == ["qk_norm_rope_insert", "qk_norm_rope_insert_index"]


@pytest.mark.parametrize("cache_dtype", ["auto", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["none", pytest.param("nvfp4", marks=pytest.mark.slow), "mxfp8"])
def test_decode_takes_the_projection_in(weights, cache_dtype):
    graph = prepare("shared", weights=weights, cache_dtype=cache_dtype)
    run_passes(graph, rule_folder("fuse", FUSION), PassContext())
    reports = run_passes(graph, list_decode_passes(), PassContext(), make_inputs=make_decode_inputs)
    suffix = "" if weights == "none" else f"_{weights}"
    found = {r.name: rules(r) for r in reports}
    assert found["qkv_norm_rope_insert"] == [f"qkv_norm_rope_insert{suffix}", f"qkv_norm_rope_insert_index{suffix}"]
    assert not {"mm.qk_norm_rope_insert", "mm.qk_norm_rope_insert_index"} & set(count_operations(graph))


def add_lora(graph):
    """Add something to every merged QKV projection, as an adapter does."""
    for split in find(graph, ATEN.split_with_sizes.default):
        if split.args[1][:3] == [64, 32, 32]:
            wide = split.args[0]
            delta = call_before(graph, split, ATEN.mul.Tensor, call_before(graph, split, wide.target, *wide.args), 0.25)
            split.replace_input_with(wide, call_before(graph, split, ATEN.add.Tensor, wide, delta))
    graph.recompile()


@pytest.mark.parametrize("weights", ["none", pytest.param("nvfp4", marks=pytest.mark.slow), "mxfp8"])
def test_what_lora_adds_goes_before_the_norms(weights):
    graph = prepare("shared", weights=weights)
    add_lora(graph)
    run_passes(graph, rule_folder("fuse", FUSION), PassContext(), make_inputs=make_decoder_inputs)
    assert count_operations(graph)["mm.qk_norm_rope_insert_index"] == 1
    run_passes(graph, list_decode_passes(), PassContext(), make_inputs=make_decode_inputs)
    suffix = "" if weights == "none" else f"_{weights}"
    for op in ("qkv_norm_rope_insert_index", "qkv_norm_rope_insert"):
        (node,) = find(graph, getattr(MM, op + suffix).default)
        assert full_arguments(node)["delta"].target == ATEN.mul.Tensor


def test_sums_and_gemma_norms():
    graph = prepare("shared")
    report = fuse(graph, "add_rms_norm")
    assert len(report.result.matches) == 3  # the last norm reads gathered rows: it follows in decode
    for node in find(graph, MM.add_rms_norm.default):
        assert list(full_arguments(node).values())[3:] == [1e-6, 1.0, False]
    reports = run_passes(graph, list_decode_passes(), PassContext(), make_inputs=make_decode_inputs)
    assert len(next(r for r in reports if r.name == "add_rms_norm").result.matches) == 1
    assert [str(n.args[1].target) for n in find(graph, MM.rms_norm.default) if len(n.meta["val"].shape) == 2] == [
        "model.layers.0.input_layernorm.weight"
    ]


def ropes(graph):
    """The rotations of q, k, index_q, index_k by where they end."""
    ends = {MM.insert_kv.default: "k", MM.paged_index_score.default: "index_q", ATEN.select.int: "index_k"}
    return {ends.get(next(iter(n.users)).target, "q"): n for n in find(graph, MM.rope.default)}


def full_rotary(graph):
    """index_k rotated over all of its dimensions, the others over half of them."""
    node = ropes(graph)["index_k"]
    table = call_before(graph, node, ATEN.cat.default, [node.args[2], node.args[2]], 1)
    node.args = (*node.args[:2], table)


def no_rope(graph):
    node = ropes(graph)["index_q"]
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)


def stray_view(graph):
    node = ropes(graph)["index_k"]
    node.replace_input_with(node.args[0], call_before(graph, node, ATEN.contiguous.default, node.args[0]))


def stray_view_of_k(graph):
    node = ropes(graph)["k"]
    node.replace_input_with(node.args[0], call_before(graph, node, ATEN.contiguous.default, node.args[0]))


def other_eps(graph):
    node = ropes(graph)["index_q"].args[0]
    node.args = (*node.args[:2], 1e-3, *node.args[3:])


def llama_norm(graph):
    node = ropes(graph)["index_k"].args[0]
    node.args = (*node.args[:3], 0.0, True)


def no_norm(graph):
    node = ropes(graph)["index_q"].args[0]
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)


def other_positions(graph):
    node = ropes(graph)["index_q"]
    node.args = (node.args[0], call_before(graph, node, ATEN.mul.Tensor, node.args[1], 1), node.args[2])


def other_slots(graph):
    (node,) = find(graph, MM.insert_index.default)
    node.args = (*node.args[:2], call_before(graph, node, ATEN.mul.Tensor, node.args[2], 1))


def wrong_cache(graph):
    """index_k goes into a cache that the score does not read."""
    (node,) = find(graph, MM.insert_index.default)
    (placeholder,) = (n for n in graph.graph.find_nodes(op="placeholder") if str(n.target) == "kv_cache_0_index")
    with graph.graph.inserting_after(placeholder):
        other = graph.graph.placeholder("kv_cache_1_index")
    other.meta = dict(placeholder.meta)
    node.args = (node.args[0], other, node.args[2])


NEAR = {
    full_rotary: "cos_sin is",
    no_rope: "found mm.rms_norm where the pattern has mm.rope",
    stray_view: "found aten.contiguous.default where the pattern has mm.rms_norm",
    stray_view_of_k: "found aten.contiguous.default where the pattern has mm.rms_norm",
    other_eps: "eps is",
    llama_norm: "weight_offset is",
    no_norm: "found aten.reshape.default where the pattern has mm.rms_norm",
    other_positions: "positions is",
    other_slots: "slot_mapping is",
    wrong_cache: "index_cache is",
}


@pytest.mark.parametrize("edit", NEAR, ids=lambda edit: edit.__name__)
def test_near_misses(edit):
    graph = prepare(edit=edit)
    report = fuse(graph)
    assert not report.result.matches
    reasons = [miss.reason for miss in report.result.near_misses]
    assert any(NEAR[edit] in reason for reason in reasons), reasons
    assert all("minimax_m3.py" in miss.source for miss in report.result.near_misses)


def test_another_head_size_is_a_near_miss():
    sizes = {"sizes": [64, 32, 32, 32, 16], "q_shape": [-1, 4, 16], "k_shape": [-1, 2, 16], "v_shape": [-1, 2, 16]}
    index = {"index_q_shape": [-1, 2, 16], "index_k_shape": [-1, 1, 16]}
    assert guard_index(sizes | index) is None
    assert "the heads differ in head_dim" in guard_index(sizes | index | {"index_q_shape": [-1, 1, 32]})
    assert "the heads differ in head_dim" in guard_index(sizes | index | {"v_shape": [-1, 1, 32]})
    two_keys = {"index_k_shape": [-1, 2, 16], "sizes": [64, 32, 32, 32, 32]}
    assert "2 key heads, not one" in guard_index(sizes | index | two_keys)
    assert "is split into" in guard_index(sizes | index | {"sizes": [64, 32, 32, 16, 32]})


@pytest.mark.parametrize("swapped", [False, True])
def test_swapped_gate_and_up_are_a_near_miss(swapped):
    def use_silu(graph):
        (node,) = find(graph, MM.swiglu_oai.default)
        node.target, node.args = MM.swiglu.default, node.args[:2]

    graph = prepare(edit=use_silu)
    (node,) = find(graph, MM.swiglu.default)
    node.args = node.args[::-1] if swapped else node.args
    report = fuse(graph, "linear_swiglu")
    assert rules(report) == ([] if swapped else ["linear_swiglu"])
    assert [m.reason for m in report.result.near_misses] == (
        ["takes element 1, the pattern takes 0"] if swapped else []
    )
