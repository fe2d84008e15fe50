"""Paged cache and last-token gather: what the graph looks like and that batches of sequences come out the same."""

import pytest
import torch

from mmcompile.core.errors import LoweringError, UsageError
from mmcompile.core.graph import describe_value, find_op, full_arguments, value_of
from mmcompile.core.passes import PassContext
from mmcompile.core.plan import DECODER_INPUTS
from mmcompile.core.runner import copy_graph, count_operations, run_passes
from mmcompile.core.sample_inputs import make_decoder_inputs
from mmcompile.passes.pipeline import whole_graph

STANDARDISE = "passes.standardise"
MM = torch.ops.mm


def passes(*names):
    return [whole_graph("standardise", STANDARDISE, name) for name in names]


def run(graph, *names, verify=True, **options):
    context = PassContext(**{"cache_dtype": "auto", "page_size": 4} | options)
    make_inputs = make_decoder_inputs if verify else None
    return run_passes(graph, passes(*names), context, make_inputs=make_inputs), context


def result_of(graph, inputs):
    value = graph(*inputs)
    return value[0] if isinstance(value, tuple | list) else value


def test_inputs_and_caches(standard_decoder):
    graph = standard_decoder(layers=3)
    (report,), context = run(graph, "insert_paged_cache")
    shapes = {n.target: describe_value(value_of(n)) for n in graph.graph.find_nodes(op="placeholder")}
    assert list(shapes) == [*DECODER_INPUTS, "kv_cache_0", "kv_cache_1", "kv_cache_2"]
    assert shapes["block_table"] == "int32[batch, max_blocks]" and shapes["query_start"] == "int32[batch + 1]"
    assert shapes["kv_cache_2"] == "f32[pages, 2, 4, 32]"
    assert report.operations["mm.insert_kv"] == report.operations["mm.paged_attention"] == 3
    assert "mm.attention" not in report.operations
    assert context.info["kv_layers"] == 3
    assert report.certificate.max_error == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_sequences_equals_each_alone(standard_decoder, dtype):
    stateless = standard_decoder(dtype=dtype, qk_norm=True)
    paged = copy_graph(stateless)
    run(paged, "insert_paged_cache", "gather_last_token", verify=False)
    lengths, page_size = [5, 1, 9], 4
    table = torch.tensor([[6, 1, -1], [3, -1, -1], [0, 7, 4]], dtype=torch.int32)
    ids = [torch.randint(0, 80, (n,), dtype=torch.int32) for n in lengths]
    positions = [torch.arange(n, dtype=torch.int32) for n in lengths]
    slots = [table[b, p // page_size].long() * page_size + p % page_size for b, p in enumerate(positions)]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    caches = [torch.full((8, 2, page_size, 32), torch.nan, dtype=dtype) for _ in range(2)]
    joined = [torch.cat(ids), torch.cat(positions), torch.cat(slots), table, torch.tensor(lengths).int(), starts]
    have = result_of(paged, [*joined, *caches])
    assert have.shape == (3, 80)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for row, tokens, place in zip(have, ids, positions, strict=True):
        want = result_of(stateless, [tokens, place])[-1]
        torch.testing.assert_close(row, want, rtol=tolerance, atol=tolerance)


def test_fp8_cache_is_declared_quantizing(standard_decoder):
    (report,), _ = run(standard_decoder(), "insert_paged_cache", cache_dtype="float8_e4m3fn")
    assert report.certificate.kind == "quantizing"
    assert report.certificate.snr_db > 20


def test_nvfp4_cache_is_pages_of_bytes(standard_decoder):
    graph = standard_decoder(layers=2)
    (report,), _ = run(graph, "insert_paged_cache", cache_dtype="nvfp4")
    shapes = {n.target: describe_value(value_of(n)) for n in graph.graph.find_nodes(op="placeholder")}
    assert shapes["kv_cache_1"] == "uint8[pages, 4, 4, 9]"  # two runs for each of 2 heads of 16
    calls = [n for n in graph.graph.nodes if n.target in (MM.insert_kv.default, MM.paged_attention.default)]
    assert len(calls) == 4 and {full_arguments(n)["layout"] for n in calls} == {"nvfp4.linear"}
    assert report.certificate.kind == "quantizing" and report.certificate.snr_db > 8


def test_heads_that_nvfp4_cannot_hold_are_refused(standard_decoder):
    graph = standard_decoder(layers=1)
    (node,) = graph.graph.find_nodes(op="call_function", target=MM.attention.default)
    for operand in node.args[:3]:
        operand.meta["val"] = operand.meta["val"][..., :12]
    with pytest.raises(LoweringError, match="needs a head_dim that is a multiple of 16, here it is 12"):
        run(graph, "insert_paged_cache", cache_dtype="nvfp4", verify=False)
    with pytest.raises(LoweringError, match="pages of a multiple of 4 tokens, here they hold 6"):
        run(standard_decoder(layers=1), "insert_paged_cache", cache_dtype="nvfp4", page_size=6, verify=False)


def test_unknown_cache_dtype(standard_decoder):
    with pytest.raises(UsageError, match="unknown cache dtype 'float8'"):
        run(standard_decoder(), "insert_paged_cache", cache_dtype="float8")


def test_window_and_scale_survive(standard_decoder):
    graph = standard_decoder(layers=1)
    (node,) = graph.graph.find_nodes(op="call_function", target=MM.attention.default)
    node.args, node.kwargs = node.args[:3], {"scale": 0.125, "window": 3}
    graph.recompile()
    (report,), _ = run(graph, "insert_paged_cache")
    (paged,) = graph.graph.find_nodes(op="call_function", target=MM.paged_attention.default)
    assert paged.args[5:] == (0.125, 3, "linear")
    assert report.certificate.max_error == 0.0


def test_a_graph_without_attention_is_refused(standard_decoder):
    graph = standard_decoder(layers=0)
    with pytest.raises(LoweringError, match="no attention to cache"):
        run(graph, "insert_paged_cache")


def test_a_foreign_input_is_refused(standard_decoder):
    graph = standard_decoder(layers=1)
    (last,) = [n for n in graph.graph.find_nodes(op="placeholder") if n.target == "positions"]
    with graph.graph.inserting_after(last):
        extra = graph.graph.placeholder("pixel_values")
    extra.meta["val"] = last.meta["val"]
    with pytest.raises(LoweringError, match="also has pixel_values"):
        run(graph, "insert_paged_cache", verify=False)


def test_gather_climbs_above_norm_and_head(standard_decoder):
    graph = standard_decoder()
    (_, report), _ = run(graph, "insert_paged_cache", "gather_last_token")
    (gathered,) = graph.graph.find_nodes(op="call_function", target=MM.gather_last.default)
    (norm,) = gathered.users
    assert find_op(norm.target).name == "rms_norm"
    (output,) = graph.graph.find_nodes(op="output")
    assert describe_value(value_of(output.all_input_nodes[0])) == "f32[batch, 80]"
    assert report.certificate.kind == "last_token"


def append(graph, *steps):
    """Append calls (target, *other arguments) to the result of the graph; "x" stands for the result itself."""
    (output,) = graph.graph.find_nodes(op="output")
    (value,) = output.all_input_nodes
    for target, *rest in steps:
        with graph.graph.inserting_before(output):
            node = graph.graph.call_function(target, (value, *(value if r == "x" else r for r in rest)))
        node.meta["val"] = value.meta["val"]
        value = node
    output.replace_input_with(output.all_input_nodes[0], value)
    graph.recompile()


def test_gather_climbs_above_a_soft_cap(standard_decoder):
    graph = standard_decoder(layers=1)
    aten = torch.ops.aten
    append(graph, (aten.div.Tensor, 30.0), (aten.tanh.default,), (aten.mul.Tensor, 30.0))
    run(graph, "insert_paged_cache", "gather_last_token")
    (gathered,) = graph.graph.find_nodes(op="call_function", target=MM.gather_last.default)
    assert find_op(next(iter(gathered.users)).target).name == "rms_norm"


def test_gather_stops_below_an_operation_of_two_varying_values(standard_decoder):
    """swiglu(logits, logits): gathering one operand alone would mix rows of different tokens."""
    graph = standard_decoder(layers=1)
    append(graph, (torch.ops.aten.relu.default,), (MM.swiglu.default, "x"))
    (output,) = graph.graph.find_nodes(op="output")
    (swiglu,) = output.all_input_nodes
    linear = swiglu.args[0].args[0]
    swiglu.args = (swiglu.args[0], linear)
    graph.recompile()
    run(graph, "insert_paged_cache", "gather_last_token")
    (gathered,) = graph.graph.find_nodes(op="call_function", target=MM.gather_last.default)
    assert gathered.args[0] is swiglu and list(gathered.users) == [output]


def test_gather_stops_where_rows_are_mixed(standard_decoder):
    graph = standard_decoder(layers=1)
    append(graph, (torch.ops.aten.cumsum.default, 0))
    (_, report), _ = run(graph, "insert_paged_cache", "gather_last_token")
    assert count_operations(graph)["mm.gather_last"] == 1
    (output,) = graph.graph.find_nodes(op="output")
    assert output.all_input_nodes[0].target == MM.gather_last.default


def test_two_results_are_refused(standard_decoder):
    graph = standard_decoder(layers=1)
    (output,) = graph.graph.find_nodes(op="output")
    (value,) = output.all_input_nodes
    output.args = ((value, value.args[0]),)
    graph.recompile()
    with pytest.raises(LoweringError, match="a decoder has one result, the logits; this graph has 2"):
        run(graph, "insert_paged_cache", "gather_last_token", verify=False)
