"""Build an ONNX graph value by value: names, constants, nodes, functions, dimensions as symbols."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

OPSET = 23
IR_VERSION = 11
DOMAIN = "mm"
ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int8: TensorProto.INT8,
    torch.int16: TensorProto.INT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}


def make_tensor(name: str, tensor: Tensor, elem_type: int | None = None, shape: list[int] | None = None) -> TensorProto:
    """A tensor stored by its bytes; ``elem_type`` and ``shape`` say what packed bytes mean."""
    raw = tensor.detach().contiguous().cpu()
    data = raw.reshape(-1).view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    proto = TensorProto(name=name, data_type=elem_type or ELEMENT_TYPES[tensor.dtype], raw_data=data)
    proto.dims.extend(list(tensor.shape) if shape is None else shape)
    return proto


def describe_shape(value: Tensor) -> list[int | str]:
    """Sizes as ints and texts over the symbol names."""
    return [int(s) if not isinstance(s, torch.SymInt) else str(s) for s in value.shape]


class Builder:
    """Nodes, initialisers, inputs and outputs of a graph that grows."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.functions: dict[str, onnx.FunctionProto] = {}
        self._count = 0

    def new_name(self, hint: str) -> str:
        """A name that no value has yet."""
        self._count += 1
        return f"{hint}_{self._count}"

    def add(
        self,
        op: str,
        inputs: list[str],
        *,
        name: str = "",
        outputs: int | list[str] = 1,
        domain: str = "",
        **attributes: Any,
    ) -> Any:
        """Add a node; returns the name of its result, or the names if there are several. ``name``: its origin."""
        hint = name or op.lower()
        results = [self.new_name(hint) for _ in range(outputs)] if isinstance(outputs, int) else outputs
        self.nodes.append(
            helper.make_node(op, inputs, results, name=self.new_name(f"{hint}.{op}"), domain=domain, **attributes)
        )
        return results[0] if len(results) == 1 else results

    def call(self, function: onnx.FunctionProto, inputs: list[str], *, name: str = "", **attributes: Any) -> Any:
        """Add a call of an ``mm`` function, and the function itself once."""
        self.functions.setdefault(function.name, function)
        count = len(function.output)
        return self.add(function.name, inputs, name=name, outputs=count, domain=DOMAIN, **attributes)

    def constant(self, value: Any, hint: str, dtype: Any = np.int64) -> str:
        """An initialiser of numbers; equal ones are shared."""
        array = np.asarray(value, dtype=dtype)
        proto = onnx.numpy_helper.from_array(array)
        name = f"{hint}_{array.dtype}_{'x'.join(map(str, array.shape)) or 'scalar'}_{array.tobytes().hex()[:64]}"
        for other, known in self.initializers.items():
            if other == name and known.raw_data != proto.raw_data:
                name = self.new_name(name)
                break
        proto.name = name
        self.initializers.setdefault(name, proto)
        return name

    def scalar_like(self, number: float, value: Tensor) -> str:
        """A number as a scalar of a tensor's dtype."""
        tensor = torch.tensor(number, dtype=value.dtype)
        name = f"scalar_{str(value.dtype).removeprefix('torch.')}_{number!r}"
        if name not in self.initializers:
            self.initializers[name] = make_tensor(name, tensor)
        return name

    def weight(self, name: str, tensor: Tensor, elem_type: int | None = None, shape: list[int] | None = None) -> str:
        """A stored tensor under its own name."""
        if name not in self.initializers:
            self.initializers[name] = make_tensor(name, tensor, elem_type, shape)
        return name

    def finish(self, graph_name: str, facts: dict[str, str]) -> onnx.ModelProto:
        """The model, with functions that are used and facts as metadata."""
        graph = helper.make_graph(
            self.nodes, graph_name, self.inputs, self.outputs, [self.initializers[n] for n in sorted(self.initializers)]
        )
        imports = [helper.make_opsetid("", OPSET)]
        if self.functions:
            imports.append(helper.make_opsetid(DOMAIN, 1))
        model = helper.make_model(
            graph, opset_imports=imports, functions=[self.functions[n] for n in sorted(self.functions)],
            producer_name="mmcompile", ir_version=IR_VERSION,
        )  # fmt: skip
        for key, value in sorted(facts.items()):
            model.metadata_props.add(key=key, value=value)
        return model
