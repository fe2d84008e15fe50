"""The steps of an ONNX graph: functions inlined, types inferred, constants folded, weights turned for linear layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
import onnx.inliner
from onnx import ModelProto, TensorProto, numpy_helper
from torch import Tensor

from mmcompile.capture.onnx.file import describe_node, find_opsets
from mmcompile.capture.onnx.ops import OPERATORS
from mmcompile.capture.onnx.run import run_step
from mmcompile.capture.onnx.values import Constant, Step, Subgraph, read_attributes, to_torch
from mmcompile.core.errors import CaptureError
from mmcompile.core.formats import nvfp4

Packed = tuple[Tensor, Tensor, Tensor]
_SMALL = 1024
_BODIES = "mm.bodies"


@dataclass
class Graph:
    """An ONNX graph ready to run.

    ``constants``: by value name. ``origins``: constant -> the node that made it, where folding did. ``packed``:
    constant [n, k] -> its NVFP4 parts (packed, scale, global scale), where it is stored so.
    """

    steps: list[Step]
    constants: dict[str, Constant]
    outputs: tuple[str, ...]
    output_types: tuple[int, ...]
    origins: dict[str, Step] = field(default_factory=dict)
    packed: dict[str, Packed] = field(default_factory=dict)


def prepare(model: ModelProto, fixed: dict[str, Constant], where: str) -> Graph:
    """Graph of a checked model. ``fixed``: inputs that are constants from now on."""
    constants = {t.name: _read_tensor(t, where) for t in model.graph.initializer}
    constants |= fixed
    _inline(model, constants)
    typed = onnx.shape_inference.infer_shapes(model)
    reader = _Reader(find_opsets(model), where)
    main = reader.read(typed.graph, {})
    graph = Graph([], constants, main.outputs, tuple(v.type.tensor_type.elem_type for v in model.graph.output))
    graph.constants |= {n: c for n, c in main.constants.items() if n not in constants}
    graph.steps = _fold(main.steps, graph)
    _turn_weights(graph)
    _merge_bias(graph)
    _mark_ids(graph, {v.name for v in model.graph.input})
    return graph


def _read_tensor(tensor: TensorProto, where: str) -> Constant:
    array = numpy_helper.to_array(tensor)
    return Constant(
        tensor.name, to_torch(array, tensor.data_type, f"{where}, tensor {tensor.name!r}"), tensor.data_type
    )


def _inline(model: ModelProto, constants: dict[str, Constant]) -> None:
    """Replace calls of functions by their bodies: the model's own, and the standard's where there is no handler.

    Large weights leave the message first, so that what is copied and serialised on the way is small.
    """
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) > _SMALL:
            tensor.raw_data = b""
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="weights")
    if model.functions:
        model.CopyFrom(onnx.inliner.inline_local_functions(model))
    for _ in range(8):
        missing = sorted({(n.domain, n.op_type) for n in _all_nodes(model.graph) if _has_only_body(n, model)})
        if not missing:
            return
        typed = onnx.shape_inference.infer_shapes(model)
        _name_bodies(typed)
        model.CopyFrom(onnx.inliner.inline_selected_functions(typed, missing, inline_schema_functions=True))
        model.CopyFrom(onnx.inliner.inline_local_functions(model))


def _name_bodies(model: ModelProto) -> None:
    """Give each node whose body depends on its types and on which inputs are left out a function of its own."""
    values = (*model.graph.input, *model.graph.value_info)
    types = {v.name: v.type.SerializeToString() for v in values}
    types |= {t.name: _type_of(t).SerializeToString() for t in model.graph.initializer}
    empty = onnx.TypeProto().SerializeToString()
    for number, node in enumerate(model.graph.node):
        if not _has_only_body(node, model) or all(node.input):
            continue
        schema = onnx.defs.get_schema(node.op_type, find_opsets(model).get(node.domain, 1), node.domain)
        if not schema.has_context_dependent_function:
            continue
        given = [types.get(name, empty) for name in node.input]
        version = schema.since_version
        raw = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), given)
        body = onnx.FunctionProto.FromString(raw)
        body.domain, body.name = _BODIES, f"{node.op_type}_{number}"
        node.domain, node.op_type = body.domain, body.name
        del node.attribute[:]
        model.functions.append(body)
    if model.functions and _BODIES not in find_opsets(model):
        model.opset_import.add(domain=_BODIES, version=1)


def _type_of(tensor: TensorProto) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))


def _all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                nodes += _all_nodes(attribute.g)
    return nodes


def _has_only_body(node: onnx.NodeProto, model: ModelProto) -> bool:
    if node.domain in ("", "ai.onnx") and node.op_type in OPERATORS:
        return False
    version = find_opsets(model).get("" if node.domain == "ai.onnx" else node.domain, 1)
    if not onnx.defs.has(node.op_type, node.domain):
        return False
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    return bool(schema.has_function or schema.has_context_dependent_function)


class _Reader:
    """Reads graphs and subgraphs into steps."""

    def __init__(self, opsets: dict[str, int], where: str) -> None:
        self.opsets, self.where, self.count = opsets, where, 0

    def read(self, graph: onnx.GraphProto, outer: dict[str, int]) -> Subgraph:
        """``outer``: element types of the values around the graph."""
        types = dict(outer)
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.HasField("tensor_type"):
                types[value.name] = value.type.tensor_type.elem_type
        types |= {t.name: t.data_type for t in graph.initializer}
        constants = {
            t.name: _read_tensor(t, self.where) for t in graph.initializer if t.data_location != TensorProto.EXTERNAL
        }
        steps = [self._read_node(node, types) for node in graph.node]
        return Subgraph(steps, tuple(v.name for v in graph.input), tuple(v.name for v in graph.output), constants)

    def _read_node(self, node: onnx.NodeProto, types: dict[str, int]) -> Step:
        self.count += 1
        place = describe_node(node, self.where)
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain or node.op_type not in OPERATORS:
            full = f"{domain}.{node.op_type}" if domain else node.op_type
            raise CaptureError(f"the operator {full} is not supported", where=place, fix="export the model without it")
        name = node.name or f"{node.op_type}_{self.count}"
        return Step(
            node.op_type, domain, f"{name}:{self.count}", place, tuple(node.input), tuple(node.output),
            read_attributes(node, lambda g: self.read(g, types)), self.opsets[domain],
            tuple(types.get(n, 0) for n in node.input), tuple(types.get(n, 0) for n in node.output),
        )  # fmt: skip


def _fold(steps: list[Step], graph: Graph) -> list[Step]:
    """Compute what depends on constants alone; put the chosen branch of a decided If in its place."""
    kept: list[Step] = []
    constants = graph.constants
    for step in steps:
        inner = [a for a in step.attributes.values() if isinstance(a, Subgraph)]
        if step.op == "If" and step.inputs[0] in constants:
            chosen = "then_branch" if bool(constants[step.inputs[0]].tensor.item()) else "else_branch"
            kept += _fold(_splice(step, step.attributes[chosen], graph), graph)
            continue
        known = all(not name or name in constants for name in step.inputs)
        if inner or not known or not all(step.output_types or (0,)) and step.op.startswith("Sequence"):
            for body in inner:
                body.steps = _fold_body(body, graph)
            kept.append(step)
            continue
        results = run_step(step, dict(constants), folding=True)
        if not all(isinstance(r, Constant) for r in results.values()):
            kept.append(step)
            continue
        for name, constant in results.items():
            constants[name] = constant  # type: ignore[assignment]
            graph.origins[name] = step
        _recognise_nvfp4(step, graph)
    return kept


def _fold_body(body: Subgraph, graph: Graph) -> list[Step]:
    inside = Graph([], graph.constants | body.constants, (), ())
    for name in body.inputs:
        inside.constants.pop(name, None)
    steps = _fold(body.steps, inside)
    body.constants = {n: c for n, c in inside.constants.items() if graph.constants.get(n) is not c}
    return steps


def _splice(step: Step, branch: Subgraph, graph: Graph) -> list[Step]:
    """The branch's steps with its own names made unique, then its outputs under the names of the If."""
    own = {n for s in branch.steps for n in s.outputs if n} | set(branch.constants)
    names = {n: f"{step.name}/{n}" for n in own}
    graph.constants |= {names[n]: c for n, c in branch.constants.items()}
    steps = [_rename(s, names) for s in branch.steps]
    for inner, outer in zip(branch.outputs, step.outputs, strict=True):
        makers = [s for s in branch.steps if inner in s.outputs]
        elem_type = makers[0].output_types[makers[0].outputs.index(inner)] if makers else 0
        name, types = f"{step.name}/{inner}", (elem_type,)
        source = (names.get(inner, inner),)
        steps.append(Step("Identity", "", name, step.place, source, (outer,), {}, step.opset, types, types))
    return steps


def _rename(step: Step, names: dict[str, str]) -> Step:
    attributes: dict[str, Any] = {}
    for key, value in step.attributes.items():
        if isinstance(value, Subgraph):
            outputs = tuple(names.get(n, n) for n in value.outputs)
            value = Subgraph([_rename(s, names) for s in value.steps], value.inputs, outputs, value.constants)
        attributes[key] = value
    return replace(
        step, inputs=tuple(names.get(n, n) for n in step.inputs), outputs=tuple(names.get(n, n) for n in step.outputs),
        attributes=attributes,
    )  # fmt: skip


def _recognise_nvfp4(step: Step, graph: Graph) -> None:
    """``DequantizeLinear(e2m1, DequantizeLinear(e4m3, global))`` in blocks of 16 along k is an NVFP4 weight."""
    constants = graph.constants
    if step.op != "DequantizeLinear" or step.attributes.get("block_size") != nvfp4.BLOCK:
        return
    codes, scales = constants[step.inputs[0]], graph.origins.get(step.inputs[1])
    if codes.elem_type != TensorProto.FLOAT4E2M1 or codes.tensor.dim() != 2 or scales is None:
        return
    if scales.op != "DequantizeLinear" or constants[scales.inputs[0]].elem_type != TensorProto.FLOAT8E4M3FN:
        return
    multiplier = constants[scales.inputs[1]].tensor.float()
    values, scale = codes.tensor, constants[scales.inputs[0]].tensor
    turned = step.attributes.get("axis", 1) % 2 == 0
    if turned:
        values, scale = values.t(), scale.t()
    rows = 1 if turned else 0  # the axis of the stored scales that counts the rows of the weight
    by_row = multiplier.dim() == 1 and multiplier.numel() == values.shape[0]
    by_row = by_row and scales.attributes.get("axis", 1) % 2 == rows
    if not (multiplier.numel() == 1 or by_row) or len(step.inputs) > 2 and step.inputs[2]:
        return
    packed = nvfp4.pack_codes(nvfp4.encode_e2m1(values.contiguous()))
    graph.packed[step.outputs[0]] = (
        packed, scale.contiguous(), multiplier.reshape(-1).expand(packed.shape[0]).contiguous()
    )  # fmt: skip


def _turn_weights(graph: Graph) -> None:
    """Weights of MatMul and Gemm lie [k, n]; linear layers want [n, k]. A weight that was transposed goes back."""
    for i, step in enumerate(graph.steps):
        if step.op not in ("MatMul", "Gemm") or step.attributes.get("transB") or step.inputs[1] not in graph.constants:
            continue
        weight = graph.constants[step.inputs[1]]
        plain = step.attributes.get("alpha", 1.0) == step.attributes.get("beta", 1.0) == 1.0
        if weight.tensor.dim() != 2 or not weight.tensor.is_floating_point() or not plain:
            continue
        name = _turn(step.inputs[1], graph)
        inputs = (step.inputs[0], name, *step.inputs[2:])
        graph.steps[i] = replace(step, inputs=inputs, attributes=step.attributes | {"turned": True})


def _turn(name: str, graph: Graph) -> str:
    """Name of the constant [n, k] of the weight ``name`` [k, n]."""
    origin = graph.origins.get(name)
    if origin is not None and origin.op == "Transpose" and origin.inputs[0] in graph.constants:
        return origin.inputs[0]
    turned = f"{name}.turned"
    if turned not in graph.constants:
        weight = graph.constants[name]
        graph.constants[turned] = Constant(turned, weight.tensor.t().contiguous(), weight.elem_type)
        if name in graph.packed:
            graph.packed[turned] = graph.packed[name]
    return turned


def _mark_ids(graph: Graph, inputs: set[str]) -> None:
    """Lookups in a stored table by an input of the model: token ids, which are never negative."""
    for step in graph.steps:
        if step.op == "Gather" and step.inputs[1] in inputs and step.inputs[0] in graph.constants:
            step.attributes["ids"] = True


def _merge_bias(graph: Graph) -> None:
    """``Add(MatMul(x, w), bias)`` with a bias [n] is one linear layer."""
    uses = Counter(n for s in graph.steps for n in s.inputs) + Counter(graph.outputs)
    makers = {s.outputs[0]: s for s in graph.steps if s.op == "MatMul" and s.attributes.get("turned")}
    merged: dict[str, Step] = {}
    for step in graph.steps:
        if step.op != "Add":
            continue
        for product, bias in (step.inputs, step.inputs[::-1]):
            layer, constant = makers.get(product), graph.constants.get(bias)
            if layer is None or constant is None or uses[product] != 1:
                continue
            if list(constant.tensor.shape) == [graph.constants[layer.inputs[1]].tensor.shape[0]]:
                merged[step.outputs[0]] = replace(layer, inputs=(*layer.inputs[:2], bias), outputs=step.outputs)
                merged[product] = layer
    graph.steps = [
        merged.get(s.outputs[0], s) for s in graph.steps if not (s.outputs[0] in merged and s.op == "MatMul")
    ]
