"""Bad ONNX files through the command line: one sentence that says what and where, a stable code, nothing written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from mmcompile.cli import main  # noqa: E402

CAPTURE, CHECKPOINT, USAGE = 3, 5, 2
X = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])


def make(nodes: list, inputs: list | None = None, outputs: list | None = None, weights=(), **rest):
    """A model of the newest tested opset, unless ``opset`` says otherwise."""
    graph = helper.make_graph(nodes, "g", inputs or [X], outputs or [Y], list(weights))
    imports = [helper.make_opsetid("", rest.pop("opset", 21)), *rest.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, **rest)


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator:
    """``refuse(model)``: (exit code, the sentence), after proving that the build left nothing behind."""
    folder = tmp_path / "model"
    folder.mkdir()

    def run(model, *more: str) -> tuple[int, str]:
        raw = model if isinstance(model, bytes) else model.SerializeToString()
        (folder / "m.onnx").write_bytes(raw)
        place = tmp_path / "place"
        place.mkdir()
        code = main(["build", str(folder / "m.onnx"), "--target", "cpu", "-o", str(place / "out"), *more])
        assert list(place.iterdir()) == []
        said = capsys.readouterr().err.strip()
        assert said.startswith("error: ") and said.endswith(".")
        return code, " ".join(said.split())

    return run


def relu(**names):
    return helper.make_node("Relu", ["x"], ["y"], name="the_node", **names)


def test_a_truncated_file(refuse):
    code, said = refuse(make([relu()]).SerializeToString()[:-7])
    assert code == CHECKPOINT and "truncated or damaged" in said and "m.onnx" in said


def test_a_file_that_is_something_else(refuse):
    code, said = refuse(b"")
    assert code == CHECKPOINT and "not an ONNX model" in said


def _external(location: str, **facts: str):
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **facts}.items():
        weight.external_data.add(key=key, value=value)
    return make([helper.make_node("Add", ["x", "w"], ["y"])], weights=[weight])


def test_missing_external_data(refuse):
    code, said = refuse(_external("weights.bin"))
    assert code == CHECKPOINT and "'weights.bin' of the tensor 'w' is missing" in said


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", "a/../../weights.bin", ""])
def test_external_data_outside_the_folder(refuse, tmp_path: Path, location: str):
    (tmp_path / "weights.bin").write_bytes(bytes(24))
    code, said = refuse(_external(location))
    assert code == CHECKPOINT and "leaves the model's folder" in said and "'w'" in said


def test_external_data_behind_a_link_that_leads_out(refuse, tmp_path: Path):
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    (tmp_path / "model" / "weights.bin").symlink_to(tmp_path / "secret.bin")
    code, said = refuse(_external("weights.bin"))
    assert code == CHECKPOINT and "leaves the model's folder" in said


def test_external_data_that_is_too_short(refuse, tmp_path: Path):
    (tmp_path / "model" / "weights.bin").write_bytes(bytes(20))
    code, said = refuse(_external("weights.bin", offset="0", length="24"))
    assert code == CHECKPOINT and "beyond the end" in said


def test_an_unknown_operator_is_named_with_its_node(refuse):
    code, said = refuse(make([helper.make_node("Relux", ["x"], ["y"], name="the_node")]))
    assert code == CAPTURE and "no operator Relux in opset 21" in said and "'the_node'" in said


def test_an_operator_newer_than_the_opset(refuse):
    code, said = refuse(make([helper.make_node("Swish", ["x"], ["y"], name="the_node")]))
    assert code == CAPTURE and "no operator Swish in opset 21" in said


def test_an_unknown_domain_is_named_with_its_node(refuse):
    node = helper.make_node("Relux", ["x"], ["y"], name="the_node", domain="com.example")
    code, said = refuse(make([node], imports=[helper.make_opsetid("com.example", 1)]))
    assert code == CAPTURE and "com.example.Relux is of an unknown domain" in said and "'the_node'" in said


def test_a_domain_that_is_not_imported(refuse):
    code, said = refuse(make([helper.make_node("Relux", ["x"], ["y"], name="the_node", domain="com.example")]))
    assert code == CAPTURE and "does not import" in said and "'the_node'" in said


def test_a_known_operator_without_a_handler(refuse):
    node = helper.make_node("RandomNormalLike", ["x"], ["y"], name="the_node")
    code, said = refuse(make([node]))
    assert code == CAPTURE and "operator RandomNormalLike is not supported" in said and "'the_node'" in said


@pytest.mark.parametrize("opset", [11, 9999])
def test_an_unsupported_opset(refuse, opset: int):
    code, said = refuse(make([relu()], opset=opset))
    assert code == CAPTURE and f"opset {opset}, opsets 13 to" in said


def test_a_cycle(refuse):
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], name="one"), helper.make_node("Relu", ["a"], ["b"], name="two")]
    code, said = refuse(make([*nodes, helper.make_node("Relu", ["b"], ["y"])]))
    assert code == CAPTURE and "cycle through the value 'b'" in said and "'one'" in said


def test_functions_that_call_each_other(refuse):
    def make_function(name: str, calls: str):
        node = helper.make_node(calls, ["a"], ["b"], domain="d")
        return helper.make_function("d", name, ["a"], ["b"], [node], [helper.make_opsetid("d", 1)])

    functions = [make_function("one", "two"), make_function("two", "one")]
    node = helper.make_node("one", ["x"], ["y"], domain="d")
    code, said = refuse(make([node], imports=[helper.make_opsetid("d", 1)], functions=functions))
    assert code == CAPTURE and "must not be recursive" in said


def test_nodes_out_of_order(refuse):
    nodes = [helper.make_node("Relu", ["a"], ["y"], name="one"), helper.make_node("Relu", ["x"], ["a"], name="two")]
    code, said = refuse(make(nodes))
    assert code == CAPTURE and "'a' is used before it is computed" in said and "'one'" in said


def test_a_value_from_nowhere(refuse):
    code, said = refuse(make([helper.make_node("Add", ["x", "ghost"], ["y"], name="one")]))
    assert code == CAPTURE and "'ghost' is not defined anywhere" in said


def test_an_output_from_nowhere(refuse):
    code, said = refuse(make([helper.make_node("Relu", ["x"], ["z"])]))
    assert code == CAPTURE and "output 'y' is not computed" in said


def test_an_untyped_input(refuse):
    model = make([relu()])
    model.graph.input[0].ClearField("type")
    code, said = refuse(model)
    assert code == CAPTURE and "the input 'x' has no type" in said


def test_an_input_of_strings(refuse):
    text = helper.make_tensor_value_info("x", TensorProto.STRING, [2])
    out = helper.make_tensor_value_info("y", TensorProto.STRING, [2])
    code, said = refuse(make([helper.make_node("Identity", ["x"], ["y"])], [text], [out]))
    assert code == CAPTURE and "element type STRING" in said and "'x'" in said


def test_dimensions_that_contradict_each_other(refuse):
    w = numpy_helper.from_array(np.ones((4, 5), np.float32), "w")
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5])
    code, said = refuse(make([helper.make_node("MatMul", ["x", "w"], ["y"], name="the_node")], None, [out], [w]))
    assert code == CAPTURE and "contradict" in said and "MatMul" in said


def test_dimensions_that_contradict_each_other_only_when_computed(refuse):
    """The standard's inference cannot know this shape; the fake tensors of the capture do."""
    nodes = [
        helper.make_node("Constant", [], ["s"], value_ints=[4, 2]),
        helper.make_node("Identity", ["s"], ["t"]),
        helper.make_node("Reshape", ["x", "t"], ["y"], name="the_node"),
    ]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])
    code, said = refuse(make(nodes, None, [out]))
    assert code == CAPTURE and "Reshape" in said and "'the_node'" in said


def test_a_shape_that_depends_on_data_says_what_to_fix(refuse):
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [2])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])
    code, said = refuse(make([helper.make_node("Reshape", ["x", "shape"], ["y"])], [X, shape], [out]))
    assert code == CAPTURE and "'shape' decides shapes" in said and "--fix" in said


def test_an_unknown_name_to_fix(refuse):
    code, said = refuse(make([relu()]), "--fix", "batsch=3")
    assert code == USAGE and "unknown dimension or input to fix 'batsch'" in said
