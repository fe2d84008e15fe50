"""Canonical graphs: names, symbols, sources, purity, meta weights; and failures that say where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mmcompile.capture.decoder import capture_decoder
from mmcompile.capture.export import Captured, capture_module
from mmcompile.capture.module import capture_file
from mmcompile.core.errors import CaptureError, CheckpointError, UsageError
from mmcompile.core.graph import get_parameter, is_pure, operation_name, print_graph
from mmcompile.models import llama

TINY = llama.MODELS["smollm2-tiny"]


def _capture(weights: str = "random", dtype: torch.dtype = torch.float32) -> Captured:
    return capture_decoder(
        lambda: llama.build(TINY), dtype=dtype, max_positions=TINY.max_positions, weights=weights, seed=3, source="tiny"
    )


@pytest.fixture(scope="module")
def captured() -> Captured:
    return _capture()


def test_graph_computes_what_the_module_computes(captured: Captured) -> None:
    torch.manual_seed(3)
    module = llama.build(TINY).eval()
    for tokens in (1, 2, 29):
        ids, positions = torch.randint(0, TINY.vocab_size, (tokens,)), torch.arange(tokens)
        assert torch.equal(captured.graph_module(ids, positions), module(ids, positions))


def test_every_node_has_value_and_source(captured: Captured) -> None:
    for node in captured.graph_module.graph.nodes:
        if node.op == "output":
            continue
        assert "val" in node.meta
        assert is_pure(node)
        if node.op == "call_function" and "sym_size" not in operation_name(node.target):
            assert node.meta["source"].startswith("mmcompile/models/llama.py:"), node
    assert "f32[tokens, 64]" in print_graph(captured.graph_module)


def test_weights_keep_their_names_and_tied_ones_have_one(captured: Captured) -> None:
    names = {str(n.target) for n in captured.graph_module.graph.find_nodes(op="get_attr")}
    state = {n for n in llama.build(TINY).state_dict() if n != "lm_head.weight"}
    assert names == state | {"model.rotary"}


def test_record(captured: Captured) -> None:
    assert captured.kind == "decoder"
    assert [(i.name, i.shape, i.dtype) for i in captured.inputs] == [
        ("input_ids", ("tokens",), "int64"),
        ("positions", ("tokens",), "int64"),
    ]
    assert captured.symbols == {"tokens": (2, TINY.max_positions)}
    assert "random (seed 3)" in captured.source


def test_no_weights_gives_meta_tensors_but_real_frequencies(captured: Captured) -> None:
    bare = _capture("none", torch.bfloat16)
    for node in bare.graph_module.graph.find_nodes(op="get_attr"):
        tensor = get_parameter(bare.graph_module, str(node.target))
        assert tensor.is_meta == (node.target != "model.rotary")
        assert node.meta["val"].is_contiguous()
    rotary = get_parameter(bare.graph_module, "model.rotary")
    assert torch.equal(rotary, get_parameter(captured.graph_module, "model.rotary"))


def test_real_weights_need_a_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="ask for random weights or none"):
        _capture("real")


def test_seed_decides_the_weights(captured: Captured) -> None:
    again = _capture()
    for name, tensor in captured.graph_module.named_parameters():
        assert torch.equal(tensor, get_parameter(again.graph_module, name))


class _Casts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).type_as(x) + x.float().to("cpu").to(dtype=x.dtype)


def test_casts_have_one_spelling() -> None:
    captured = capture_module(_Casts(), {"x": torch.zeros(3, dtype=torch.bfloat16)})
    calls = [n for n in captured.graph_module.graph.nodes if n.op == "call_function"]
    casts = [n for n in calls if operation_name(n.target) != "aten.add.Tensor"]
    assert {operation_name(n.target) for n in casts} == {"aten.to.dtype"}
    assert all(len(n.args) == 2 and not n.kwargs for n in casts)
    same = capture_module(_Casts(), {"x": torch.zeros(3)})
    assert [operation_name(n.target) for n in same.graph_module.graph.nodes if n.op == "call_function"] == [
        "aten.add.Tensor"
    ]


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        row += 1
        return y


def test_writes_become_pure() -> None:
    captured = capture_module(_InPlace(), {"x": torch.zeros(3, 4)})
    assert all(is_pure(n) for n in captured.graph_module.graph.nodes if n.op == "call_function")
    x = torch.randn(3, 4)
    assert torch.equal(captured.graph_module(x), _InPlace()(x))


class _Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line to be named
            return x
        return -x


def test_failure_names_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        capture_module(_Branches(), {"x": torch.zeros(3)})
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "the line to be named" in line)
    assert caught.value.where.endswith(f"test_export.py:{number}")
    assert "independent of tensor values" in caught.value.fix


FACTORY = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x, scale):
        return self.layer(x) * scale
def make():
    return Net(), (torch.zeros(5, 4), 2.0), {"x": {0: "rows"}}
def unknown_input():
    return Net(), (torch.zeros(5, 4), 2.0), {"y": {0: "rows"}}
def too_many():
    return Net(), (torch.zeros(5, 4), 2.0, 3)
def nothing():
    return None
"""


def test_factory(tmp_path) -> None:
    file = tmp_path / "net.py"
    file.write_text(FACTORY)
    captured = capture_file(f"{file}:make", seed=1)
    assert captured.kind == "module"
    assert [(i.name, i.shape) for i in captured.inputs] == [("x", ("rows", 4))]
    torch.manual_seed(1)
    layer = torch.nn.Linear(4, 3)
    x = torch.randn(7, 4)
    assert torch.equal(captured.graph_module(x), layer(x) * 2.0)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("mak", UsageError, "did you mean 'make'"),
        ("unknown_input", UsageError, "unknown input 'y'"),
        ("too_many", CaptureError, "do not fit Net.forward"),
        ("nothing", CaptureError, "returned NoneType"),
    ],
)
def test_bad_factories(tmp_path, name: str, error: type[Exception], text: str) -> None:
    file = tmp_path / "net.py"
    file.write_text(FACTORY)
    with pytest.raises(error, match=text):
        capture_file(f"{file}:{name}")


def test_spec_must_name_a_function(tmp_path) -> None:
    with pytest.raises(CaptureError, match="path/to/file.py:function"):
        capture_file("net.py")
    with pytest.raises(CaptureError, match="no such file"):
        capture_file(f"{tmp_path}/absent.py:make")
