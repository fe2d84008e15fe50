"""Values of an ONNX graph while it is captured (constants, sizes on the host, tensors), and one call's view of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mmcompile.core.errors import CaptureError

# What the graph computes with. Types that torch cannot add or compare are carried by the next wider one; four-bit and
# two-bit numbers one a byte; E2M1 by its values in fp32, which hold them exactly.
CARRIERS: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.int32,
    TensorProto.UINT32: torch.int64,
    TensorProto.UINT64: torch.int64,
    TensorProto.BOOL: torch.bool,
    TensorProto.COMPLEX64: torch.complex64,
    TensorProto.COMPLEX128: torch.complex128,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    TensorProto.FLOAT8E8M0: torch.float8_e8m0fnu,
    TensorProto.INT4: torch.int8,
    TensorProto.UINT4: torch.uint8,
    TensorProto.INT2: torch.int8,
    TensorProto.UINT2: torch.uint8,
    TensorProto.FLOAT4E2M1: torch.float32,
}
# Types of the graph's inputs and outputs where they differ from the carrier.
BOUNDARY = {
    TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
}
_BITS = {torch.int16: np.int16, torch.uint8: np.uint8}
_BYTES = {
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
}
HOST_LIMIT = 4096
"""Elements of the largest constant that may take part in the arithmetic of sizes."""


def name_type(elem_type: int) -> str:
    """ONNX's name of an element type, such as FLOAT16."""
    return str(TensorProto.DataType.Name(elem_type)) if elem_type in TensorProto.DataType.values() else str(elem_type)


def find_carrier(elem_type: int, where: str) -> torch.dtype:
    """The torch dtype that carries an ONNX element type. Raises CaptureError for strings and unknown types."""
    if elem_type not in CARRIERS:
        raise CaptureError(
            f"tensors of the element type {name_type(elem_type)} are not supported",
            where=where,
            fix="leave pre- and postprocessing of such values outside the model",
        )
    return CARRIERS[elem_type]


def to_torch(array: np.ndarray[Any, Any], elem_type: int, where: str) -> Tensor:
    """The carrier tensor of a numpy array as ``onnx.numpy_helper`` gives it (ml_dtypes for narrow floats)."""
    carrier = find_carrier(elem_type, where)
    if carrier in _BYTES or elem_type == TensorProto.BFLOAT16:
        bits, code = (torch.uint8, np.uint8) if carrier in _BYTES else (torch.int16, np.int16)
        raw = np.ascontiguousarray(array).view(code)
        return torch.tensor(raw, dtype=bits).view(carrier)
    if elem_type in (TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2):
        array = array.astype(np.int8 if carrier == torch.int8 else np.uint8)
    elif elem_type == TensorProto.FLOAT4E2M1:
        array = array.astype(np.float32)
    elif elem_type == TensorProto.UINT64:
        array = array.view(np.int64)
    array = np.ascontiguousarray(array).reshape(array.shape)
    return torch.tensor(array).to(carrier)


@dataclass(frozen=True)
class Constant:
    """A value known when the model is read: an initialiser, a Constant node, or what follows from such alone."""

    name: str
    tensor: Tensor
    elem_type: int

    @cached_property
    def array(self) -> Host:
        """The numbers, also while torch traces."""
        with _disable_current_modes():
            narrow = self.tensor.dtype in _BYTES or self.tensor.dtype == torch.bfloat16
            result: Host = (self.tensor.float() if narrow else self.tensor).detach().numpy()
        return result


Host = np.ndarray[Any, Any]
"""Sizes on the host: a numpy array, of Python objects where it holds torch.SymInt."""
Value = Tensor | Constant | Host | list[Any]


@dataclass
class Step:
    """One node, ready to run. ``node`` is its place in the file; types are ONNX element types, 0 where unknown."""

    op: str
    domain: str
    name: str
    place: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    opset: int
    input_types: tuple[int, ...]
    output_types: tuple[int, ...]


@dataclass
class Subgraph:
    """A branch or loop body: its steps, the names it takes and gives, and its own constants."""

    steps: list[Step]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Constant] = field(default_factory=dict)


@dataclass
class Call:
    """A node with the values of its inputs: what an operator's handler works on.

    ``materialise`` gives the tensor of a constant (a parameter of the module while it is exported); ``run`` runs a
    subgraph on given values; ``folding`` says that every input is a constant, so that values may decide shapes.
    """

    step: Step
    values: list[Value | None]
    materialise: Callable[[Constant], Tensor]
    run: Callable[[Subgraph, list[Value]], list[Value]]
    folding: bool

    @property
    def opset(self) -> int:
        """Version of the operator set that the node belongs to."""
        return self.step.opset

    def has(self, index: int) -> bool:
        """Whether the optional input ``index`` is given."""
        return index < len(self.values) and self.values[index] is not None

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute as a Python value."""
        return self.step.attributes.get(name, default)

    def in_type(self, index: int) -> int:
        """ONNX element type of an input."""
        value = self.values[index] if index < len(self.values) else None
        known = self.step.input_types[index] if index < len(self.step.input_types) else 0
        return value.elem_type if isinstance(value, Constant) else known

    def out_type(self, index: int = 0) -> int:
        """ONNX element type of an output."""
        return self.step.output_types[index] if index < len(self.step.output_types) else 0

    def wants(self, index: int) -> bool:
        """Whether output ``index`` is used."""
        return index < len(self.step.outputs) and bool(self.step.outputs[index])

    def tensor(self, index: int) -> Tensor:
        """Input ``index`` as a tensor."""
        value = self.values[index]
        if isinstance(value, Tensor):
            return value
        if isinstance(value, Constant):
            return self.materialise(value)
        if isinstance(value, np.ndarray):
            return host_to_tensor(value, self.in_type(index))
        raise self.refuse(f"its input {index} is a sequence, a tensor is needed")

    def maybe(self, index: int) -> Tensor | None:
        """Input ``index`` as a tensor, None if it is left out."""
        return self.tensor(index) if self.has(index) else None

    def tensors(self) -> list[Tensor]:
        """All inputs as tensors."""
        return [self.tensor(i) for i in range(len(self.values))]

    def host(self, index: int) -> Host:
        """Input ``index`` as numbers known while the graph is made. Raises CaptureError if they depend on data."""
        value = self.values[index]
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, Constant):
            return value.array
        name = self.step.inputs[index]
        raise CaptureError(
            f"the value {name!r} decides shapes, so it must be known when the model is captured",
            where=self.step.place,
            fix="fix the inputs that it depends on, e.g. --fix NAME=VALUE",
        )

    def ints(self, index: int) -> list[Any]:
        """Input ``index`` as a flat list of ints or SymInts."""
        return list(self.host(index).reshape(-1).tolist())

    def literal(self, index: int) -> Any:
        """The Python number of a constant with one element; None for anything else."""
        value = self.values[index] if index < len(self.values) else None
        if isinstance(value, Constant) and value.tensor.numel() == 1 and not value.tensor.is_complex():
            return value.array.reshape(-1)[0].item()
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype != object:
            return value.reshape(-1)[0].item()
        return None

    def refuse(self, reason: str, fix: str = "") -> CaptureError:
        """The error for a node that is not supported, with its operator and its name."""
        return CaptureError(f"{self.step.op} is not supported here: {reason}", where=self.step.place, fix=fix)


def host_to_tensor(array: Host, elem_type: int) -> Tensor:
    """Numbers of the host as a tensor; sizes that are symbols become calls over the graph's sizes."""
    dtype = CARRIERS.get(elem_type, torch.int64)
    if array.dtype != object:
        return torch.tensor(array.copy()).to(dtype)
    items = [item if isinstance(item, torch.SymInt) else int(item) for item in array.reshape(-1).tolist()]
    if array.ndim == 0:
        return torch.full((), items[0], dtype=dtype)
    return torch.stack([torch.full((), item, dtype=dtype) for item in items]).reshape(array.shape)


def read_attributes(node: onnx.NodeProto, read_graph: Callable[[onnx.GraphProto], Subgraph]) -> dict[str, Any]:
    """Attributes as Python values: strings decoded, tensors as Constants, graphs through ``read_graph``."""
    read: dict[str, Any] = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        elif isinstance(value, onnx.TensorProto):
            array = onnx.numpy_helper.to_array(value)
            value = Constant("", to_torch(array, value.data_type, node.name), value.data_type)
        elif isinstance(value, onnx.GraphProto):
            value = read_graph(value)
        elif attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
            value = list(value)
        elif attribute.type == onnx.AttributeProto.STRINGS:
            value = [item.decode("utf-8", "replace") for item in value]
        read[attribute.name] = value
    return read
