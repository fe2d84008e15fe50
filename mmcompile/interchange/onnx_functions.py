"""Functions of the ``mm`` domain with bodies of standard operators, so that any runtime can run them."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from mmcompile.core.formats.nvfp4 import BLOCK, E2M1_VALUES
from mmcompile.interchange.onnx_builder import DOMAIN, OPSET


def _make(
    name: str, inputs: list[str], outputs: list[str], nodes: list[onnx.NodeProto], attributes: list[str]
) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", OPSET)]
    return helper.make_function(DOMAIN, name, inputs, outputs, nodes, imports, attributes)


def _reference(node: onnx.NodeProto, attribute: str, given: str, kind: int) -> onnx.NodeProto:
    """Let a node's attribute take the value of the function's own."""
    node.attribute.append(onnx.AttributeProto(name=attribute, ref_attr_name=given, type=kind))
    return node


def make_swiglu() -> onnx.FunctionProto:
    """``silu(gate) * up`` (mm.swiglu)."""
    nodes = [
        helper.make_node("Sigmoid", ["gate"], ["s"]),
        helper.make_node("Mul", ["gate", "s"], ["silu"]),
        helper.make_node("Mul", ["silu", "up"], ["y"]),
    ]
    return _make("swiglu", ["gate", "up"], ["y"], nodes, [])


def make_add_rms_norm() -> onnx.FunctionProto:
    """``(RMSNormalization(x + residual), x + residual)`` (mm.add_rms_norm)."""
    norm = helper.make_node("RMSNormalization", ["sum", "weight"], ["y"], axis=-1)
    _reference(norm, "epsilon", "epsilon", onnx.AttributeProto.FLOAT)
    nodes = [helper.make_node("Add", ["x", "residual"], ["sum"]), norm]
    return _make("add_rms_norm", ["x", "residual", "weight"], ["y", "sum"], nodes, ["epsilon"])


def make_nvfp4_dequantize() -> onnx.FunctionProto:
    """Packed bytes uint8 [n, k/2], scale float8_e4m3fn [n, k/16], global scale fp32 [n, 1] -> fp32 [n, k].

    The spelling for runtimes without FLOAT4E2M1: element 2i is the low nibble of byte i, 2i + 1 the high one; the value
    of a code is looked up.
    """

    def ints(name: str, values: list[int], kind: int = TensorProto.INT64) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, [len(values)], values))

    table = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    nodes = [
        helper.make_node("Constant", [], ["table"], value=helper.make_tensor("table", TensorProto.FLOAT, [16], table)),
        ints("sixteen", [16], TensorProto.INT32),
        ints("last", [-1]),
        ints("rows", [0, -1]),
        ints("blocks", [0, -1, BLOCK]),
        helper.make_node("Cast", ["packed"], ["bytes"], to=TensorProto.INT32),
        helper.make_node("Mod", ["bytes", "sixteen"], ["low"]),
        helper.make_node("Div", ["bytes", "sixteen"], ["high"]),
        helper.make_node("Unsqueeze", ["low", "last"], ["low1"]),
        helper.make_node("Unsqueeze", ["high", "last"], ["high1"]),
        helper.make_node("Concat", ["low1", "high1"], ["codes"], axis=-1),
        helper.make_node("Gather", ["table", "codes"], ["values"]),
        helper.make_node("Reshape", ["values", "blocks"], ["blocked"]),
        helper.make_node("Cast", ["scale"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["wide", "global_scale"], ["whole"]),
        helper.make_node("Unsqueeze", ["whole", "last"], ["spread"]),
        helper.make_node("Mul", ["blocked", "spread"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "rows"], ["y"]),
    ]
    return _make("nvfp4_dequantize", ["packed", "scale", "global_scale"], ["y"], nodes, [])
