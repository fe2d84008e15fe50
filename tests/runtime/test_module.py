"""Module artifacts on the CPU: views, partial outputs, aten launches, several results, wrong inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmcompile.core.errors import ArtifactError, RequestError
from mmcompile.core.plan import View
from mmcompile.core.region import Region, Step
from mmcompile.runtime import ModuleEngine, load


def define(b: Any) -> None:
    """forward(x [rows, 6], y [rows + 1]): joined = [relu(left half) | -right half], and layer norm, sum, transpose."""
    b.symbols = {"rows": 8}
    for name, shape, dtype in (("x", ("rows", 6), "float32"), ("y", ("rows + 1",), "int64")):
        b.buffer(name, shape, dtype, "input")
    for name, shape in (("joined", ("rows", 6)), ("normed", ("rows", 6)), ("turned", (6, "rows")), ("total", ())):
        b.buffer(name, shape, "float32", "output")
    b.buffer("scale", (6,), "float32", "weight")
    left = View(buffer="x", shape=("rows", 3), strides=(6, 1))
    right = View(buffer="x", shape=("rows", 3), strides=(6, 1), offset=3)
    relu = Region(("in0",), (Step("s0", "relu", ("in0",), "float32"),), ("s0",))
    b.launch(
        "region.pointwise", {"in0": left}, [View(buffer="joined", shape=("rows", 3), strides=(6, 1))], **relu.to_json()
    )
    joined_right = View(buffer="joined", shape=("rows", 3), strides=(6, 1), offset=3)
    b.launch("aten.neg.default", {"arg0": right}, [joined_right], args=[{"input": "arg0"}])
    arguments = [{"input": "arg0"}, [6], {"input": "arg1"}, None, 1e-5]
    b.launch("aten.native_layer_norm.default", {"arg0": "joined", "arg1": "scale"}, ["normed"], args=arguments)
    b.launch("aten.t.default", {"arg0": "normed"}, ["turned"], args=[{"input": "arg0"}])
    keywords = {"dtype": {"dtype": "float32"}}
    b.launch("aten.sum.default", {"arg0": "y"}, ["total"], args=[{"input": "arg0"}], kwargs=keywords)
    b.finish("forward", ("x", "y"), ("joined", "normed", "turned", "total"))


@pytest.fixture
def engine(builder: Any, store_artifact: Callable[..., Path], tmp_path: Path) -> ModuleEngine:
    b = builder()
    define(b)
    weights = {"scale": torch.arange(6.0)}
    loaded = load(store_artifact(tmp_path, {"cpu": b.plan("cpu")}, weights, kind="module"), device="cpu")
    assert isinstance(loaded, ModuleEngine)
    return loaded


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_forward(engine: ModuleEngine, rows: int) -> None:
    for _ in range(2):
        x, y = torch.randn(rows, 6), torch.arange(rows + 1)
        out = engine.forward(x=x, y=y)
        joined = torch.cat([x[:, :3].relu(), -x[:, 3:]], 1)
        normed = torch.nn.functional.layer_norm(joined, (6,), torch.arange(6.0))
        assert out.keys() == {"joined", "normed", "turned", "total"}
        torch.testing.assert_close(out["joined"], joined, rtol=0, atol=0)
        torch.testing.assert_close(out["normed"], normed)
        torch.testing.assert_close(out["turned"], normed.T.contiguous())
        assert out["total"] == y.sum()


def test_non_contiguous_inputs(engine: ModuleEngine) -> None:
    x = torch.randn(6, 4).T
    torch.testing.assert_close(engine.forward(x=x, y=torch.arange(5))["joined"][:, :3], x[:, :3].relu())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "input 'x' is missing"),
        ({"z": torch.zeros(1)}, "inputs .* given"),
        ({"x": torch.zeros(4, 5)}, r"torch.float32 \[4, 5\], needed: float32 \[4, 6\]"),
        ({"x": torch.zeros(4, 6).double()}, "torch.float64"),
        ({"x": torch.zeros(4)}, "has 1 dimensions, needed: 2"),
        ({"y": torch.zeros(4).long()}, r"needed: int64 \[5\]"),
        ({"x": torch.zeros(9, 6), "y": torch.zeros(10).long()}, "rows = 9 exceeds the limit 8"),
    ],
)
def test_wrong_inputs(engine: ModuleEngine, change: dict[str, Any], message: str) -> None:
    inputs = {"x": torch.zeros(4, 6), "y": torch.zeros(5).long()} | change
    with pytest.raises(RequestError, match=message):
        engine.forward(**{k: v for k, v in inputs.items() if v is not None})


def test_describe(engine: ModuleEngine) -> None:
    facts = engine.describe()
    assert facts["launches"] == {"forward": 5} and len(facts["fallbacks"]) == 5
    assert facts["memory"]["weight"] == 24 and engine.inputs == ("x", "y")


def test_aliases_are_not_shared(builder: Any, store_artifact: Callable[..., Path], tmp_path: Path) -> None:
    """A view of the state must not change when the state does afterwards."""
    b = builder(symbols={})
    b.buffer("x", (2,), "float32", "input")
    b.buffer("state", (2,), "float32", "state")
    b.buffer("old", (2,), "float32", "output")
    b.launch("aten.view.default", {"arg0": "state"}, ["old"], args=[{"input": "arg0"}, [2]])
    b.launch("aten.add_.Tensor", {"arg0": "state", "arg1": "x"}, [], args=[{"input": "arg0"}, {"input": "arg1"}])
    b.finish("forward", ("x",), ("old",))
    engine = load(store_artifact(tmp_path, {"cpu": b.plan("cpu")}, {}, kind="module"), device="cpu")
    assert [engine.forward(x=torch.ones(2))["old"].tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_a_result_of_another_shape_is_refused(
    builder: Any, store_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    b = builder(symbols={"rows": 8})
    b.buffer("x", ("rows",), "float32", "input")
    b.buffer("out", ("rows",), "float32", "output")
    b.launch("aten.gt.Scalar", {"arg0": "x"}, ["out"], args=[{"input": "arg0"}, 0])
    b.finish("forward", ("x",), ("out",))
    engine = load(store_artifact(tmp_path, {"cpu": b.plan("cpu")}, {}, kind="module"), device="cpu")
    with pytest.raises(ArtifactError, match=r"aten.gt.Scalar gave torch.bool \[3\] for 'out'"):
        engine.forward(x=torch.ones(3))


def test_a_module_needs_its_phase(make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match='needs a phase "forward"'):
        load(make_artifact(tmp_path, kind="module"), device="cpu")
