"""Read an ONNX file and check it: every way in which it can be wrong is one sentence, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from mmcompile.core.errors import CaptureError, CheckpointError

OLDEST_OPSET = 13
_STANDARD = ("", "ai.onnx")
_SERIAL_LIMIT = 2**31 - 1


def read_model(path: Path) -> ModelProto:
    """Parse, load external data and check. Raises CheckpointError for damaged files, CaptureError for bad graphs."""
    where = str(path)
    model = ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        raise CheckpointError(
            "not a complete ONNX file: its protobuf message is truncated or damaged",
            where=where,
            fix="download it again",
        ) from None
    if not model.HasField("graph") or not model.opset_import:
        raise CheckpointError("not an ONNX model: it has no graph or no opset", where=where, fix="check the file")
    _check_opsets(model, where)
    check_graphs(model, where)
    _load_external(model, path)
    _run_checker(model, path)
    return model


def find_opsets(model: ModelProto) -> dict[str, int]:
    """Version by domain; the standard domain is ""."""
    return {"" if o.domain in _STANDARD else o.domain: o.version for o in model.opset_import}


def _check_opsets(model: ModelProto, where: str) -> None:
    version = find_opsets(model).get("")
    newest = onnx.defs.onnx_opset_version()
    if version is not None and not OLDEST_OPSET <= version <= newest:
        raise CaptureError(
            f"the model uses opset {version}, opsets {OLDEST_OPSET} to {newest} are supported",
            where=where,
            fix="convert it with onnx.version_converter, or upgrade the package onnx",
        )


def list_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initialisers and attributes, in subgraphs and functions too."""
    yield from _list_graph_tensors(model.graph)
    for function in model.functions:
        yield from _list_node_tensors(function.node)


def _list_graph_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    yield from _list_node_tensors(graph.node)


def _list_node_tensors(nodes: Any) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _list_graph_tensors(graph)


def _load_external(model: ModelProto, path: Path) -> None:
    """Read tensors that lie in other files, all of which must be in the model's own folder."""
    folder = path.parent.resolve()
    for tensor in list_tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        facts = {entry.key: entry.value for entry in tensor.external_data}
        location = facts.get("location", "")
        target = (folder / location).resolve()
        if not location or Path(location).is_absolute() or not target.is_relative_to(folder):
            raise CheckpointError(
                f"the external data of {tensor.name!r} is at {location!r}, which leaves the model's folder",
                where=str(path),
                fix="put the data file beside the model",
            )
        if not target.is_file():
            raise CheckpointError(
                f"the external data file {location!r} of the tensor {tensor.name!r} is missing",
                where=str(path),
                fix="put it beside the model",
            )
        _read_external(tensor, target, facts)


def _read_external(tensor: TensorProto, target: Path, facts: dict[str, str]) -> None:
    try:
        offset, length = int(facts.get("offset", "0")), int(facts.get("length", "-1"))
    except ValueError:
        raise CheckpointError(f"offset or length of {tensor.name!r} is no number", where=str(target)) from None
    size = target.stat().st_size
    length = size - offset if length < 0 else length
    if offset < 0 or offset + length > size:
        raise CheckpointError(
            f"the tensor {tensor.name!r} reaches beyond the end of its external data file",
            where=str(target),
            fix="download it again",
        )
    with target.open("rb") as stream:
        stream.seek(offset)
        tensor.raw_data = stream.read(length)
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def check_graphs(model: ModelProto, where: str) -> None:
    """Typed inputs, known operators, values defined before their use, in the main graph and in every subgraph."""
    versions = find_opsets(model)
    functions = {(f.domain, f.name) for f in model.functions}
    for value in model.graph.input:
        kind = value.type.WhichOneof("value")
        if kind is None:
            raise CaptureError(f"the input {value.name!r} has no type", where=where, fix="export the model again")
        if kind != "tensor_type":
            raise CaptureError(f"the input {value.name!r} is a {kind.removesuffix('_type')}, not a tensor", where=where)
        if not value.type.tensor_type.elem_type or not value.type.tensor_type.HasField("shape"):
            raise CaptureError(f"the input {value.name!r} has no element type or no shape", where=where)
    if not model.graph.output:
        raise CaptureError("the graph has no outputs", where=where)
    _check_graph(model.graph, set(), versions, functions, where)


def describe_node(node: onnx.NodeProto, where: str) -> str:
    """Where a node is: file, name and operator."""
    name = f"node {node.name!r}" if node.name else f"node of {node.output[0]!r}" if node.output else "unnamed node"
    return f"{where}, {name}"


def _check_graph(
    graph: onnx.GraphProto, outer: set[str], versions: dict[str, int], functions: set[tuple[str, str]], where: str
) -> None:
    known = outer | {v.name for v in graph.input} | {t.name for t in graph.initializer}
    known |= {t.values.name for t in graph.sparse_initializer}
    made = {name: node for node in graph.node for name in node.output if name}
    for node in graph.node:
        _check_operator(node, versions, functions, where)
        for name in node.input:
            if name and name not in known:
                raise _explain_unknown(name, node, made, where)
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                _check_graph(inner, known, versions, functions, where)
        for name in node.output:
            if name and name in known:
                raise CaptureError(f"the value {name!r} is defined twice", where=describe_node(node, where))
            known.add(name)
    for value in graph.output:
        if value.name not in known:
            raise CaptureError(f"the output {value.name!r} is not computed by any node", where=where)


def _check_operator(
    node: onnx.NodeProto, versions: dict[str, int], functions: set[tuple[str, str]], where: str
) -> None:
    domain = "" if node.domain in _STANDARD else node.domain
    place = describe_node(node, where)
    if (node.domain, node.op_type) in functions:
        return
    if domain not in versions:
        raise CaptureError(
            f"the operator {domain}.{node.op_type} is of a domain that the model does not import", where=place
        )
    if domain and not onnx.defs.has(node.op_type, domain):
        raise CaptureError(
            f"the operator {domain}.{node.op_type} is of an unknown domain and has no function body",
            where=place,
            fix="export with standard operators, or add a function that defines it",
        )
    if not onnx.defs.has(node.op_type, domain) or not _has_version(node.op_type, domain, versions[domain]):
        raise CaptureError(
            f"there is no operator {node.op_type} in opset {versions[domain]} of the domain {domain or 'ai.onnx'}",
            where=place,
            fix="check its name, or import the opset that it belongs to",
        )


def _has_version(op: str, domain: str, version: int) -> bool:
    try:
        return not onnx.defs.get_schema(op, version, domain).deprecated
    except onnx.defs.SchemaError:
        return False


def _explain_unknown(name: str, node: onnx.NodeProto, made: dict[str, Any], where: str) -> CaptureError:
    place = describe_node(node, where)
    if name not in made:
        return CaptureError(f"the value {name!r} is not defined anywhere", where=place, fix="export the model again")
    reached: set[str] = set()
    stack = list(made[name].input)
    while stack:
        value = stack.pop()
        if value in node.output:
            return CaptureError(f"the graph has a cycle through the value {name!r}", where=place)
        if value in made and value not in reached:
            reached.add(value)
            stack += made[value].input
    return CaptureError(
        f"the value {name!r} is used before it is computed: the nodes are not in topological order", where=place
    )


def _run_checker(model: ModelProto, path: Path) -> None:
    """The standard's own checker, and strict inference, which finds dimensions that contradict each other."""
    if model.ByteSize() > _SERIAL_LIMIT:
        return
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise CaptureError(f"the model is not valid ONNX: {first_line(error)}", where=str(path)) from None
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        if _is_about_a_body(model, str(error)):
            return
        raise CaptureError(f"types or dimensions contradict each other: {first_line(error)}", where=str(path)) from None


def _is_about_a_body(model: ModelProto, text: str) -> bool:
    """Whether the error lies in the body of a standard function (onnx cannot infer some of its own)."""
    found = re.search(r"op_type:(\w+)", text)
    version = find_opsets(model).get("", 0)
    if found is None or not _has_version(found[1], "", version):
        return False
    schema = onnx.defs.get_schema(found[1], version, "")
    return bool(schema.has_function) and text.count("op_type:") > 1


def first_line(error: Exception) -> str:
    """The first line of an error's text that says something, without its full stop."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.endswith("Inference error(s):")]
    return (said or [type(error).__name__])[0].rstrip(".").removeprefix("(op_type:")
