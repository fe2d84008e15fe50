"""Graphs as text: what print_graph writes is read back to the same text, and nothing else is taken."""

from __future__ import annotations

import pytest
import torch

import mmcompile.core.ops  # noqa: F401  defines the mm operations that the texts name
from mmcompile.core.errors import ArtifactError
from mmcompile.core.graph import get_parameter, print_graph
from mmcompile.core.graph_text import read_graph

TEXT = """\
x = placeholder x    # f32[rows, 8]
y = placeholder y    # bf16[batch + 1, 2*rows]
w = get_attr block.w    # f32[12, 8]
one = get_attr one    # f32[]
packed = get_attr packed    # uint8[4, 4]
scale = get_attr scale    # f8_e4m3fn[4, 1]
gain = get_attr gain    # f32[4]
linear = mm.linear(x, w, None, None, 'swiglu')    # f32[rows, 6]  models/net.py:7
size = aten.sym_size.int(x, 0)    # rows
twice = mul(size, 2)    # 2*rows
view = aten.reshape.default(linear, [twice, -1])    # f32[2*rows, 3]
split = aten.split_with_sizes.default(view, [1, 2], -1)    # (f32[2*rows, 1], f32[2*rows, 2])
getitem = getitem(split, 1)    # f32[2*rows, 2]
clamp = aten.clamp.default(getitem, -inf, 6.5)    # f32[2*rows, 2]
gelu = aten.gelu.default(clamp, approximate='tanh')    # f32[2*rows, 2]
narrow = aten.to.dtype(gelu, torch.bfloat16)    # bf16[2*rows, 2]
places = aten.arange.default(size, dtype=torch.int64, device='cpu', pin_memory=False)    # int64[rows]
add = aten.add.Tensor(y, one)    # bf16[batch + 1, 2*rows]
decoded = mm.nvfp4_dequantize(packed, scale, gain, torch.float16)    # f16[4, 8]
return (narrow, places, [add], decoded, None, (linear,))
"""


def test_what_is_printed_is_read_back() -> None:
    graph_module = read_graph(TEXT, where="net.txt", symbols={"rows": (2, 64)})
    assert print_graph(graph_module) == TEXT
    weight = get_parameter(graph_module, "block.w")
    assert weight.is_meta and weight.shape == (12, 8) and weight.dtype == torch.float32
    values = {n.name: n.meta["val"] for n in graph_module.graph.nodes if n.op != "output"}
    rows = values["x"].shape[0]
    assert values["view"].shape[0].node.expr == 2 * rows.node.expr
    ranges = rows.node.shape_env.var_to_range
    assert {str(s): int(ranges[s].upper) for s in ranges if str(s) == "rows"} == {"rows": 64}


def test_a_graph_that_was_read_computes() -> None:
    text = (
        "x = placeholder x    # f32[n, 4]\n"
        "add_tensor = aten.add.Tensor(x, 2.5)    # f32[n, 4]\n"
        "sum_dim = aten.sum.dim_IntList(add_tensor, [1], True)    # f32[n, 1]\n"
        "return sum_dim\n"
    )
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(read_graph(text, where="x")(x), (x + 2.5).sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("y = os.system(x)    # f32[n]", r"unknown operation os.system \(at net.txt:2\)"),
        ("y = system('true')    # f32[n]", "unknown operation system"),
        ("y = aten.relu.nothing(x)    # f32[n]", "unknown operation aten.relu.nothing"),
        ("y = mm.relu(x)    # f32[n]", "unknown operation mm.relu"),
        ("y = aten.relu.default(x.real)    # f32[n]", "no arguments of a graph"),
        ("y = aten.relu.default(__import__('os'))    # f32[n]", "no arguments of a graph"),
        ("y = aten.relu.default(z)    # f32[n]", "no arguments of a graph"),
        ("y = aten.relu.default(x, 1, 2)    # f32[n]", "does not take these arguments"),
        ("y = aten.relu.default(x)    # f32[n, 4]", r"y is f32\[n\], the text says f32\[n, 4\]"),
        ("y = aten.relu.default(x)    # bf16[n]", "y is f32"),
        ("y = aten.relu.default(x)", "y is f32"),
        ("y = get_attr w    # f33[4]", "y has no shape and dtype"),
        ("y: aten.relu.default(x)    # f32[n]", "no line of a graph"),
        ("y = aten.relu.default(x    # f32[n]", "no line of a graph"),
    ],
)
def test_anything_else_is_refused_with_its_line(line: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_graph(f"x = placeholder x    # f32[n]\n{line}\nreturn y\n", where="net.txt")


def test_a_text_that_breaks_off() -> None:
    with pytest.raises(ArtifactError, match="the graph has no end"):
        read_graph("x = placeholder x    # f32[n]\n", where="net.txt")
