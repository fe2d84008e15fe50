"""The runner: certificates, required and disabled passes, dumps, dead parameters, structure."""

import json

import pytest
import torch
from torch import nn

from mmcompile.capture.export import capture_module
from mmcompile.core.errors import LoweringError, VerificationError
from mmcompile.core.passes import Match, NearMiss, Pass, PassContext, PassResult
from mmcompile.core.runner import measure_difference, run_passes
from mmcompile.core.sample_inputs import make_decoder_inputs

ATEN, MM = torch.ops.aten, torch.ops.mm
ADD, MUL = ATEN.add.Tensor, ATEN.mul.Tensor


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=generator).to(dtype), requires_grad=False)
        self.tied = self.weight

    def forward(self, a):
        return MM.linear(a, self.weight) + MM.linear(a, self.tied).relu()


def capture(dtype=torch.float32):
    return capture_module(Model(dtype), {"a": torch.randn(4, 8).to(dtype)}).graph_module


def edit(change, *, report=True):
    """A pass body that calls ``change(graph)`` and says so, or keeps silent about it."""

    def run(graph_module, context):
        change(graph_module)
        return PassResult([Match("edit", ("a",))] if report else [])

    return run


def scale_result(factor):
    """Multiply the result."""

    def change(graph_module):
        (output,) = graph_module.graph.find_nodes(op="output")
        (value,) = output.all_input_nodes
        with graph_module.graph.inserting_before(output):
            scaled = graph_module.graph.call_function(MUL, (value, factor))
        scaled.meta["val"] = value.meta["val"]
        output.replace_input_with(value, scaled)

    return change


def verify(change, effect, *, dtype=torch.float32, report=True):
    item = Pass("wrong", "test", edit(change, report=report), "a pass", effect)
    return run_passes(capture(dtype), [item], PassContext(), make_inputs=make_decoder_inputs)[0].certificate


def test_unchanged_graph_needs_no_certificate():
    assert verify(lambda graph_module: None, "bitwise") is None


def test_bitwise():
    assert verify(scale_result(1.0), "bitwise").max_error == 0.0
    with pytest.raises(VerificationError, match="wrong declares itself bitwise but changed a result"):
        verify(scale_result(1.0 + 2**-22), "bitwise")


@pytest.mark.parametrize(("dtype", "good", "bad"), [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 2e-2, 8e-2)])
def test_bounded_depends_on_the_dtype(dtype, good, bad):
    certificate = verify(scale_result(1 + good), "bounded", dtype=dtype)
    assert 0 < certificate.max_error / certificate.scale < 1.5 * good
    assert certificate.snr_db > 30
    with pytest.raises(VerificationError, match="bounded"):
        verify(scale_result(1 + bad), "bounded", dtype=dtype)


def test_quantizing_is_judged_by_the_ratio():
    assert verify(scale_result(1.1), "quantizing").snr_db == pytest.approx(20.0, abs=0.01)
    with pytest.raises(VerificationError, match="only 6.0 dB"):
        verify(scale_result(1.5), "quantizing")


@pytest.mark.parametrize("effect", ["bitwise", "bounded", "quantizing", "last_token"])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_nan_and_infinity_never_pass(effect, factor):
    with pytest.raises(VerificationError):
        verify(scale_result(factor), effect)


def keep_rows(rows, factor=1.0):
    def change(graph_module):
        scale_result(factor)(graph_module)
        (output,) = graph_module.graph.find_nodes(op="output")
        (value,) = output.all_input_nodes
        with graph_module.graph.inserting_before(output):
            part = graph_module.graph.call_function(ATEN.slice.Tensor, (value, 0, *rows))
        part.meta["val"] = value.meta["val"][slice(*rows)]
        output.replace_input_with(value, part)

    return change


def test_last_token():
    verify(keep_rows((3, 4)), "last_token")
    verify(keep_rows((3, 4), 1 + 1e-6), "last_token")
    for change in (keep_rows((2, 3)), keep_rows((2, 4)), keep_rows((3, 4), 1.01)):
        with pytest.raises(VerificationError):
            verify(change, "last_token")


def test_a_change_that_no_one_reports_is_verified():
    def swap_argument(graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=ADD):
            node.args = (node.args[0], node.args[0])

    def swap_weight(graph_module):
        graph_module.register_parameter("weight", nn.Parameter(torch.zeros(8, 8), requires_grad=False))

    for change in (swap_argument, swap_weight):
        with pytest.raises(VerificationError, match="bitwise"):
            verify(change, "bitwise", report=False)


def test_results_may_be_added_but_not_dropped():
    def set_results(count):
        def change(graph_module):
            (output,) = graph_module.graph.find_nodes(op="output")
            output.args = (tuple(output.all_input_nodes) * count,)

        return change

    assert verify(set_results(2), "bitwise").max_error == 0.0
    with pytest.raises(VerificationError, match="left 0 of 1 results"):
        verify(set_results(0), "bitwise")


def test_error_of_a_small_result_is_not_hidden_by_a_large_one():
    class Two(nn.Module):
        def forward(self, a):
            return a * 1000.0, a * 2.0

    def change(graph_module):
        node = list(graph_module.graph.find_nodes(op="call_function", target=MUL))[1]
        node.args = (node.args[0], 2.001)

    graph = capture_module(Two(), {"a": torch.randn(4)}).graph_module
    with pytest.raises(VerificationError, match="bounded"):
        run_passes(graph, [Pass("p", "t", edit(change), "", "bounded")], PassContext(), make_inputs=make_decoder_inputs)


def test_measure_difference():
    inf, nan = float("inf"), float("nan")
    one = torch.tensor([1.0, inf, nan])
    assert measure_difference(one, one) == (0.0, 1.0, None)
    assert measure_difference(one, torch.tensor([1.0, -inf, nan]))[0] == inf
    assert measure_difference(torch.tensor([3.0]), torch.tensor([nan]))[:2] == (inf, 3.0)
    assert measure_difference(torch.empty(0), torch.empty(0)) == (0.0, 0.0, None)
    error, scale, snr = measure_difference(torch.tensor([10.0, 0.0]), torch.tensor([10.0, 1.0]))
    assert (error, scale, snr) == (1.0, 10.0, pytest.approx(20.0))


def test_effect_of_the_result_goes_before_the_declared_one():
    def run(graph_module, context):
        scale_result(1.1)(graph_module)
        return PassResult([Match("edit", ("a",))], effect="quantizing")

    item = Pass("p", "t", run, "", "bitwise")
    (report,) = run_passes(capture(), [item], PassContext(), make_inputs=make_decoder_inputs)
    assert report.certificate.kind == "quantizing"


def nearly(graph_module, context):
    misses = [NearMiss("fusion", "relu", "found aten.relu where the pattern has aten.neg", "model.py:7")]
    return PassResult(near_misses=misses)


def test_required():
    item = Pass("fuse", "test", nearly, "")
    for name in ("fusion", "fuse"):
        with pytest.raises(LoweringError, match=f"rule {name} matched nowhere: found aten.relu .*model.py:7"):
            run_passes(capture(), [item], PassContext(), required=[name])
    hit = Pass("hit", "test", edit(scale_result(1.0)), "")
    assert run_passes(capture(), [hit], PassContext(), required=["edit", "hit"])


def test_disabled_passes_do_not_run():
    seen = []
    passes = [Pass("broken", "t", nearly, ""), Pass("kept", "t", nearly, "")]
    reports = run_passes(capture(), passes, PassContext(), disabled=["broken"], progress=seen.append)
    assert [(r.index, r.name) for r in reports] == [(0, "kept")] == [(r.index, r.name) for r in seen]


def test_dumps_are_readable_and_deterministic(tmp_path):
    passes = [Pass("scale", "t", edit(scale_result(1.0)), "scale it"), Pass("fuse", "t", nearly, "")]
    for folder in ("one", "two"):
        run_passes(capture(), passes, PassContext(), make_inputs=make_decoder_inputs, dump=tmp_path / folder)
    names = ["00-scale.json", "00-scale.txt", "01-fuse.json", "01-fuse.txt"]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    data = json.loads((tmp_path / "one" / "00-scale.json").read_text())
    assert (data["name"], data["certificate"]["max_error"]) == ("scale", 0.0)
    assert "seconds" not in data
    text = (tmp_path / "one" / "00-scale.txt").read_text()
    assert "aten.mul.Tensor" in text and "test_runner.py" in text


def test_dead_parameters_are_dropped_under_all_their_names():
    def drop(graph_module):
        (output,) = graph_module.graph.find_nodes(op="output")
        (placeholder,) = graph_module.graph.find_nodes(op="placeholder")
        output.replace_input_with(output.all_input_nodes[0], placeholder)

    graph = capture()
    assert dict(graph.named_parameters())
    run_passes(graph, [Pass("drop", "t", edit(drop), "")], PassContext())
    assert not dict(graph.named_parameters(remove_duplicate=False))
    assert {n.op for n in graph.graph.nodes} == {"placeholder", "output"}


def test_a_node_without_shape_is_refused():
    def change(graph_module):
        scale_result(1.0)(graph_module)
        for node in graph_module.graph.find_nodes(op="call_function", target=MUL):
            del node.meta["val"]

    with pytest.raises(VerificationError, match="pass bare left the node mul.* without shape and dtype"):
        run_passes(capture(), [Pass("bare", "t", edit(change), "")], PassContext())


def test_a_malformed_graph_is_refused():
    def change(graph_module):
        (add,) = graph_module.graph.find_nodes(op="call_function", target=ADD)
        next(iter(graph_module.graph.nodes)).prepend(add)

    with pytest.raises(VerificationError, match="pass tangled left a malformed graph"):
        run_passes(capture(), [Pass("tangled", "t", edit(change), "")], PassContext())
