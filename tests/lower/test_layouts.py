"""Weights get the layout that tuned kernels want only if every reader wants and can read it."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mmcompile.core import ops  # noqa: F401
from mmcompile.core.discover import load_module
from mmcompile.core.errors import ArtifactError
from mmcompile.core.formats import nvfp4_fragments
from mmcompile.core.plan import Launch
from mmcompile.lower.plan import lower_model
from mmcompile.runtime.layouts import check_weight_layouts, place_weight
from mmcompile.targets._kernels.catalogue import list_kernels

MM = torch.ops.mm
SPEC = load_module("targets", "sm90").TARGET.spec
TAG = "nvfp4_fragments_bfloat16"


class Weights(torch.nn.Module):
    def __init__(self, rows: int, k: int) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(rows, k // 2, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(rows, k // 16).to(torch.float8_e4m3fn))
        self.register_buffer("global_scale", torch.ones(rows))


def make_graph(extra=None, *, rows=32, k=256, dtype=torch.bfloat16):
    """linear_nvfp4 of 4 tokens, and what ``extra`` makes of (graph, packed, scale, global_scale)."""
    root, graph, mode = Weights(rows, k), fx.Graph(), FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    x = graph.placeholder("x")
    parts = [graph.get_attr(name) for name in ("packed", "scale", "global_scale")]
    results = [graph.call_function(MM.linear_nvfp4.default, (x, *parts))]
    results += [extra(graph, x, *parts)] if extra else []
    graph.output(tuple(results))
    module = fx.GraphModule(root, graph)
    with mode:
        x.meta["val"] = torch.empty(4, k, dtype=dtype)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(getattr(root, node.target))
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
    return module


def lower(*graphs, portable=False):
    phases = {f"phase{i}": graph for i, graph in enumerate(graphs)}
    names = {name: tuple(f"{name}.{i}" for i in range(len(graph.graph.find_nodes(op="output")[0].args[0])))
             for name, graph in phases.items()}  # fmt: skip
    return lower_model(phases, SPEC, list_kernels(SPEC), {name: {} for name in phases}, names, portable=portable).plan


def layouts(plan):
    return {name: plan.buffers[name].layout for name in ("packed", "scale", "global_scale")}


LINEAR = dict.fromkeys(("packed", "scale", "global_scale"), "linear")
ARRANGED = LINEAR | {"packed": TAG, "scale": TAG}


def test_one_copy_serves_all_phases():
    plan = lower(make_graph(), make_graph())
    assert layouts(plan) == ARRANGED
    for phase in plan.phases.values():
        assert [c.template for c in phase.launches[0].choices] == ["linear_nvfp4_fragments"]


def test_portable_kernels_read_rows():
    plan = lower(make_graph(), portable=True)
    assert layouts(plan) == LINEAR
    assert plan.phases["phase0"].launches[0].choices[0].template == "linear_nvfp4_gemm"


def decoded(graph, x, packed, scale, global_scale):
    return graph.call_function(MM.nvfp4_dequantize.default, (packed, scale, global_scale, torch.bfloat16))


def first_rows(graph, x, packed, scale, global_scale):
    narrow = [graph.call_function(torch.ops.aten.slice.Tensor, (t, 0, 0, 16)) for t in (packed, scale, global_scale)]
    return graph.call_function(MM.linear_nvfp4.default, (x, *narrow))


def as_float16(graph, x, packed, scale, global_scale):
    half = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.float16})
    return graph.call_function(MM.linear_nvfp4.default, (half, packed, scale, global_scale))


@pytest.mark.parametrize("extra", [decoded, first_rows, as_float16])
def test_another_reader_keeps_a_weight_row_major(extra):
    """A reference at load, a reader of a part, one that wants another flavour; also in another phase."""
    for graphs in ((make_graph(extra),), (make_graph(), make_graph(extra))):
        assert layouts(lower(*graphs)) == LINEAR


def test_near_misses():
    assert layouts(lower(make_graph(rows=40))) == LINEAR
    assert layouts(lower(make_graph(k=320))) == LINEAR
    assert layouts(lower(make_graph(dtype=torch.float32))) == LINEAR


def test_weights_are_arranged_when_they_are_read():
    plan = lower(make_graph())
    packed = torch.randint(0, 256, (32, 128), dtype=torch.int32).byte()
    assert torch.equal(place_weight(plan.buffers["packed"], packed), nvfp4_fragments.arrange(packed, "bfloat16"))
    assert place_weight(plan.buffers["global_scale"], packed) is packed


def test_a_reference_must_not_read_an_arranged_weight():
    plan = lower(make_graph())
    check_weight_layouts(plan, "plan")
    phase = plan.phases["phase0"]
    bare = [Launch.model_validate(launch.model_dump() | {"choices": ()}) for launch in phase.launches]
    broken = plan.model_copy(update={"phases": {"phase0": phase.model_copy(update={"launches": tuple(bare)})}})
    with pytest.raises(ArtifactError, match=f"has no kernel and reads packed, which has the layout '{TAG}'"):
        check_weight_layouts(broken, "plan")
    strange = plan.buffers | {"packed": plan.buffers["packed"].model_copy(update={"layout": "spiral"})}
    with pytest.raises(ArtifactError, match="packed has the unknown layout 'spiral'"):
        check_weight_layouts(plan.model_copy(update={"buffers": strange}), "plan")
