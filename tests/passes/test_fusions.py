"""Every fusion rule: it matches once, keeps the numbers, and says why it does not match what is nearly the same."""

import operator

import pytest
import torch

from mmcompile.core.graph import infer_meta
from mmcompile.core.passes import PassContext
from mmcompile.core.runner import copy_graph, count_operations, run_passes
from mmcompile.core.sample_inputs import make_decode_inputs, make_decoder_inputs
from mmcompile.passes.pipeline import list_decode_passes, rule_file, rule_folder, whole_graph

MM, ATEN = torch.ops.mm, torch.ops.aten
FUSION, STANDARDISE = "passes.fusion", "passes.standardise"


def prepare(standard_decoder, *, nvfp4=False, merge=True, edit=None, **options):
    """One layer with paged cache, (quantized and) merged projections; ``edit(graph)`` before the merging."""
    graph = standard_decoder(**{"layers": 1} | options)
    if edit is not None:
        edit(graph)
        graph.recompile()
    passes = [whole_graph("standardise", STANDARDISE, "insert_paged_cache")]
    passes += [whole_graph("quantize", "passes.quant", "nvfp4")] if nvfp4 else []
    passes += [whole_graph("fuse", FUSION, "merge_linears")] if merge else []
    context = PassContext(cache_dtype="auto", page_size=4, quantization="nvfp4" if nvfp4 else "none")
    run_passes(graph, passes, context)
    return graph


def fuse(graph, name):
    """Run one fusion under verification."""
    item = whole_graph("fuse", FUSION, name) if name == "merge_linears" else rule_file("fuse", FUSION, name)
    (report,) = run_passes(graph, [item], PassContext(), make_inputs=make_decoder_inputs)
    assert report.certificate is not None or not report.result.matches
    return report


def find(graph, target):
    return list(graph.graph.find_nodes(op="call_function", target=target))


def insert(graph, after, target, *rest):
    """Put ``target(after, *rest)`` between a node and its readers."""
    readers = list(after.users)
    with graph.graph.inserting_after(after):
        node = graph.graph.call_function(target, (after, *rest))
    infer_meta(graph, [node])
    node.meta["source"] = after.meta["source"]
    for reader in readers:
        reader.replace_input_with(after, node)
    return node


def reasons(report):
    return [miss.reason for miss in report.result.near_misses]


@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_merge_linears(standard_decoder, nvfp4, bias):
    graph = prepare(standard_decoder, nvfp4=nvfp4, merge=False, bias=bias)
    report = fuse(graph, "merge_linears")
    assert sorted(m.rule for m in report.result.matches) == ["merge_gate_up", "merge_qkv"]
    operation = "mm.linear_nvfp4" if nvfp4 else "mm.linear"
    assert report.operations[operation] == (4 if nvfp4 else 5)
    assert report.operations["aten.split_with_sizes.default"] == 2


def test_merge_linears_needs_bias_on_all_or_none(standard_decoder):
    def drop_bias(graph):
        node = find(graph, MM.linear.default)[1]
        node.args = node.args[:2]

    report = fuse(prepare(standard_decoder, merge=False, bias=True, edit=drop_bias), "merge_linears")
    assert [m.rule for m in report.result.matches] == ["merge_gate_up"]
    assert reasons(report) == ["some of the layers have a bias and some do not"]
    assert "conftest.py" in report.result.near_misses[0].source


def test_merge_linears_leaves_epilogues(standard_decoder):
    def activate(graph):
        node = find(graph, MM.linear.default)[0]
        node.args = (*node.args[:2], None, node.args[0], "none")

    report = fuse(prepare(standard_decoder, merge=False, edit=activate), "merge_linears")
    assert reasons(report) == ["one of the layers has an epilogue already"]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_rope_insert(standard_decoder, qk_norm, dtype):
    graph = prepare(standard_decoder, qk_norm=qk_norm, dtype=dtype)
    report = fuse(graph, "qk_norm_rope_insert")
    assert [m.rule for m in report.result.matches] == ["qk_norm_rope_insert" if qk_norm else "rope_insert"]
    assert not report.result.near_misses
    assert report.operations["mm.qk_norm_rope_insert"] == 1
    assert not {"mm.rope", "mm.insert_kv"} & set(report.operations)
    (node,) = find(graph, MM.qk_norm_rope_insert.default)
    assert node.args[7:11] == (4, 2, 16, 1e-6 if qk_norm else 0.0)


def test_partial_rotary_passes_through(standard_decoder):
    graph = prepare(standard_decoder, qk_norm=True)
    graph.cos_sin = torch.nn.Buffer(graph.cos_sin[:, :8].contiguous())
    report = fuse(graph, "qk_norm_rope_insert")
    assert len(report.result.matches) == 1 and report.certificate.max_error == 0.0


def other_eps(graph):
    node = [n for n in find(graph, MM.rms_norm.default) if len(n.meta["val"].shape) == 3][1]
    node.args = (*node.args[:2], 1e-3)


def no_k_norm(graph):
    node = [n for n in find(graph, MM.rms_norm.default) if len(n.meta["val"].shape) == 3][1]
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)


def other_positions(graph):
    node = find(graph, MM.rope.default)[1]
    with graph.graph.inserting_before(node):
        shifted = graph.graph.call_function(ATEN.add.Tensor, (node.args[1], 1))
    infer_meta(graph, [shifted])
    node.args = (node.args[0], shifted, node.args[2])


def other_table(graph):
    node = find(graph, MM.rope.default)[1]
    with graph.graph.inserting_before(node):
        table = graph.graph.call_function(ATEN.mul.Tensor, (node.args[2], 0.5))
    infer_meta(graph, [table])
    node.args = (*node.args[:2], table)


def stray_view(graph):
    insert(graph, find(graph, MM.rope.default)[1], ATEN.contiguous.default)


NEAR_QK = {
    other_eps: "eps is",
    no_k_norm: "mm.rms_norm where the pattern has aten.reshape.default",
    other_positions: "positions is",
    other_table: "cos_sin is",
    stray_view: "aten.contiguous.default where the pattern has mm.rope",
}


@pytest.mark.parametrize("edit", NEAR_QK, ids=lambda edit: edit.__name__)
def test_qk_norm_rope_insert_near_misses(standard_decoder, edit):
    report = fuse(prepare(standard_decoder, qk_norm=True, edit=edit), "qk_norm_rope_insert")
    assert not report.result.matches
    assert any(NEAR_QK[edit] in reason for reason in reasons(report)), reasons(report)
    assert all(miss.source for miss in report.result.near_misses)


@pytest.mark.parametrize("nvfp4", [False, True])
def test_linear_swiglu(standard_decoder, nvfp4):
    report = fuse(prepare(standard_decoder, nvfp4=nvfp4), "linear_swiglu")
    assert [m.rule for m in report.result.matches] == ["linear_nvfp4_swiglu" if nvfp4 else "linear_swiglu"]
    assert "mm.swiglu" not in report.operations and not report.result.near_misses


def test_linear_swiglu_order(standard_decoder):
    graph = prepare(standard_decoder)
    (node,) = find(graph, MM.swiglu.default)
    node.args = node.args[::-1]
    report = fuse(graph, "linear_swiglu")
    assert not report.result.matches
    assert "takes element 1, the pattern takes 0" in reasons(report)


def test_linear_swiglu_stray_view(standard_decoder):
    graph = prepare(standard_decoder)
    insert(graph, find(graph, MM.swiglu.default)[0].args[0], ATEN.contiguous.default)
    assert not fuse(graph, "linear_swiglu").result.matches


def test_linear_swiglu_extra_user_of_the_projection(standard_decoder):
    graph = prepare(standard_decoder)
    (node,) = find(graph, MM.swiglu.default)
    wide = node.args[0].args[0].args[0]
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((*output.all_input_nodes, wide),)
    report = fuse(graph, "linear_swiglu")
    assert not report.result.matches
    assert any("also used by output" in reason for reason in reasons(report))


def test_linear_swiglu_unequal_split(standard_decoder):
    from mmcompile.passes.fusion.linear_swiglu import guard

    assert guard({"sizes": [96, 96]}) is None
    assert "not into equal gate and up halves" in guard({"sizes": [64, 128]})
    assert guard({"sizes": [64, 64, 64]}) is not None


@pytest.mark.parametrize("nvfp4", [False, True])
def test_linear_residual(standard_decoder, nvfp4):
    report = fuse(prepare(standard_decoder, nvfp4=nvfp4), "linear_residual")
    assert [m.rule for m in report.result.matches] == ["linear_nvfp4_residual" if nvfp4 else "linear_residual"] * 2
    assert "aten.add.Tensor" not in report.operations


def test_linear_residual_broadcast(standard_decoder):
    graph = prepare(standard_decoder)
    node = find(graph, ATEN.add.Tensor)[0]
    with graph.graph.inserting_before(node):
        row = graph.graph.call_function(ATEN.slice.Tensor, (node.args[0], 0, 0, 1))
    infer_meta(graph, [row])
    node.args = (row, node.args[1])
    report = fuse(graph, "linear_residual")
    assert len(report.result.matches) == 1
    assert reasons(report) == ["what is added is broadcast"]


def test_linear_residual_stray_view(standard_decoder):
    graph = prepare(standard_decoder)
    insert(graph, find(graph, ATEN.add.Tensor)[0].args[1], ATEN.contiguous.default)
    report = fuse(graph, "linear_residual")
    assert len(report.result.matches) == 1
    assert len(reasons(report)) == 1 and reasons(report)[0].endswith("where the pattern has mm.linear")


def sums_without_linear(graph):
    """Put a function that is no linear layer between every projection and its sum, as a mixture of experts would."""
    for node in find(graph, ATEN.add.Tensor):
        insert(graph, node.args[1], ATEN.tanh.default)


def test_add_rms_norm_takes_the_sums_that_no_linear_makes(standard_decoder):
    graph = prepare(standard_decoder, layers=2, edit=sums_without_linear)
    reports = run_passes(graph, rule_folder("fuse", FUSION), PassContext(), make_inputs=make_decoder_inputs)
    counts = {r.name: len(r.result.matches) for r in reports}
    assert counts == {"qk_norm_rope_insert": 2, "linear_swiglu": 2, "linear_residual": 0, "add_rms_norm": 4}
    assert count_operations(graph)["mm.rms_norm"] == 1


def test_add_rms_norm_refuses_constants_and_broadcast(standard_decoder):
    graph = prepare(standard_decoder, edit=sums_without_linear)
    first, second = find(graph, ATEN.add.Tensor)
    first.args = (first.args[0], 1.0)
    with graph.graph.inserting_before(second):
        row = graph.graph.call_function(ATEN.slice.Tensor, (second.args[1], 0, 0, 1))
    infer_meta(graph, [row])
    second.args = (second.args[0], row)
    graph.recompile()
    report = fuse(graph, "add_rms_norm")
    assert not report.result.matches
    assert any("a constant is added" in reason for reason in reasons(report))
    assert any("the summands differ" in reason for reason in reasons(report))


@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_decode_fusion(standard_decoder, nvfp4, bias):
    graph = prepare(standard_decoder, nvfp4=nvfp4, bias=bias, qk_norm=True)
    run_passes(graph, [whole_graph("standardise", STANDARDISE, "gather_last_token")], PassContext())
    run_passes(graph, rule_folder("fuse", FUSION), PassContext())
    before = copy_graph(graph)
    reports = run_passes(graph, list_decode_passes(), PassContext(), make_inputs=make_decode_inputs)
    rule = "qkv_norm_rope_insert_nvfp4" if nvfp4 else "qkv_norm_rope_insert"
    assert [m.rule for m in reports[-1].result.matches] == [rule]
    assert count_operations(graph)[f"mm.{rule}"] == 1
    assert "mm.gather_last" not in count_operations(graph) and "mm.gather_last" in count_operations(before)
    assert operator.eq(*(sum(count_operations(g).values()) for g in (before, graph))) is False
