"""Spell bfloat16 out for runtimes that only move it: every operation in fp32, its result rounded to bfloat16."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper, inliner, shape_inference

from mmcompile.core.errors import LoweringError

# These move values and need no arithmetic; Cast is what the others are spelled out with.
_MOVING = {
    "Cast", "Concat", "Expand", "Gather", "Identity", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip
# The standard defines these by a body that rounds within; taking it keeps each rounding in its place.
_BODIES = [("", "RMSNormalization"), ("", "RotaryEmbedding")]
_ROUNDED, _WIDE = TensorProto.BFLOAT16, TensorProto.FLOAT


def widen_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same numbers by fp32 kernels: inputs, outputs and weights stay bfloat16.

    Functions and the standard's own bodies are spelled out first, so that what they round between their steps is
    rounded here. Attention is one operation: fp32 within, its result rounded. Raises LoweringError if a value has no
    known type.
    """
    if not _holds_bfloat16(model):
        return model
    flat = shape_inference.infer_shapes(inliner.inline_local_functions(model), strict_mode=True)
    for weight in flat.graph.initializer:  # the inliner looks for their types among the values
        flat.graph.value_info.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    flat = inliner.inline_selected_functions(flat, _BODIES, inline_schema_functions=True)
    types = _find_types(flat)
    nodes: list[onnx.NodeProto] = []
    wide: dict[str, str] = {}
    for node in flat.graph.node:
        names = [*filter(None, node.input), *filter(None, node.output)]
        unknown = [name for name in names if name not in types]
        if unknown:
            raise LoweringError(f"the value {unknown[0]} has no known type", where=f"node {node.name}")
        if node.op_type not in _MOVING and _ROUNDED in {types[name] for name in names}:
            nodes += _widen(node, types, wide)
        else:
            nodes.append(node)
    del flat.graph.value_info[:]
    del flat.graph.node[:]
    flat.graph.node.extend(nodes)
    return flat


def _holds_bfloat16(model: onnx.ModelProto) -> bool:
    values = [*model.graph.input, *model.graph.output]
    types = {v.type.tensor_type.elem_type for v in values} | {t.data_type for t in model.graph.initializer}
    return _ROUNDED in types


def _find_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element type of every value by name."""
    graph = shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    return types | {t.name: t.data_type for t in graph.initializer}


def _widen(node: onnx.NodeProto, types: dict[str, int], wide: dict[str, str]) -> list[onnx.NodeProto]:
    """Casts, the node over fp32 values, casts. ``wide``: fp32 twin of a value; grows."""
    before, after = [], []
    for i, name in enumerate(node.input):
        if name and types[name] == _ROUNDED:
            if name not in wide:
                wide[name] = f"{name}.fp32"
                before.append(helper.make_node("Cast", [name], [wide[name]], name=f"{name}.widen", to=_WIDE))
            node.input[i] = wide[name]
    for i, name in enumerate(node.output):
        if name and types[name] == _ROUNDED:
            node.output[i] = f"{name}.unrounded"
            after.append(helper.make_node("Cast", [node.output[i]], [name], name=f"{name}.round", to=_ROUNDED))
    return [*before, node, *after]
