"""The ONNX door: a file becomes a captured graph, by running its operators through torch and exporting that."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from onnx import ModelProto, ValueInfoProto
from torch import Tensor, nn

from mmcompile.capture.export import Captured, capture_module
from mmcompile.capture.onnx.file import read_model
from mmcompile.capture.onnx.graph import Graph, prepare
from mmcompile.capture.onnx.run import compile_frame, run_steps
from mmcompile.capture.onnx.values import (
    BOUNDARY,
    Constant,
    Value,
    find_carrier,
    host_to_tensor,
    name_type,
)
from mmcompile.core.errors import CaptureError, unknown_name

LARGEST_DIM = 65536
_IMAGE_SIDE = 64
_POSITIONS = ("positions", "position_ids")


def capture_onnx(path: Path, *, fixed: Mapping[str, Any] | None = None) -> Captured:
    """Capture an ``.onnx`` file, opset 13 or newer.

    Args:
        fixed: symbolic dimension -> size, or input -> value (numbers, lists or arrays); the rest of the model is
            computed with what is fixed as a constant, so that it may decide shapes and branches.

    Returns: a Captured of kind "module" whose inputs are the file's, with its symbolic dimensions from 1 to 65536; of
        kind "decoder" if it maps ``input_ids`` and ``position_ids`` [tokens] or [1, tokens] to ``logits``. Weights
        that are stored as NVFP4 are also in ``nvfp4``; those in other narrow formats are decoded.

    Raises CheckpointError for a damaged file, CaptureError for a graph that is wrong or not supported.
    """
    path = Path(path)
    if not path.is_file():
        raise CaptureError("there is no such file", where=str(path))
    model = read_model(path)
    ports = _Ports(model, dict(fixed or {}), str(path))
    graph = prepare(model, ports.constants, path.name)
    module = OnnxModule(graph, ports.names, path.name)
    kind = "decoder" if ports.is_decoder else "module"
    captured = _capture(module, ports, kind, path)
    captured.nvfp4 = {
        module.parameter_names[n].removesuffix(".weight"): parts
        for n, parts in graph.packed.items()
        if n in module.parameter_names
    }
    return captured


def _capture(module: OnnxModule, ports: _Ports, kind: str, path: Path) -> Captured:
    """Export; where the model bounds a dimension (a table of 512 positions), once more within its bounds."""
    for last in (False, True):
        try:
            return capture_module(
                module, ports.examples, dynamic=ports.dynamic, symbols=ports.symbols, kind=kind, source=path.name
            )
        except CaptureError as error:
            if last or not _narrow(ports.symbols, _whole_text(error)):
                raise _explain(error, str(path)) from error
    raise AssertionError("unreachable")


def _whole_text(error: BaseException) -> str:
    text, cause = "", error.__cause__
    while cause is not None:
        text, cause = text + str(cause), cause.__cause__ or cause.__context__
    return text


def _narrow(symbols: dict[str, tuple[int, int]], text: str) -> bool:
    """Take over the bounds that torch suggests for dimensions; False if it asks for anything else or nothing."""
    suggested = text.partition("Suggested fixes:")[2].partition("\n\n")[0]
    lines = [line.strip() for line in suggested.splitlines() if line.strip()]
    found = [re.fullmatch(r"(\w+) = Dim\('\1'((?:, (?:min|max)=\d+)+)\)", line) for line in lines]
    if not found or not all(found):
        return False
    for match in found:
        assert match is not None
        bounds = dict(part.split("=") for part in match[2].removeprefix(", ").split(", "))
        low, high = symbols[match[1]]
        symbols[match[1]] = (max(low, int(bounds.get("min", low))), min(high, int(bounds.get("max", high))))
    return True


def _explain(error: CaptureError, where: str) -> CaptureError:
    """The sentence of the node at fault, if one is; else what keeps a dimension from being dynamic."""
    cause: BaseException | None = error
    while cause is not None:
        deeper = cause.__cause__ or cause.__context__
        if isinstance(cause, CaptureError) and cause is not error:
            return cause
        lines = [line.strip(" -") for line in str(cause).splitlines()]
        violated = [line for line in lines if line.startswith(("Not all values of", "You marked", "The values of"))]
        if violated:
            return CaptureError(
                f"a dimension cannot be dynamic: {violated[0].rstrip('.')}",
                where=where,
                fix="fix it, e.g. --fix NAME=4",
            )
        cause = deeper
    return error


def make_identifier(name: str) -> str:
    """A Python identifier that resembles ``name``."""
    text = re.sub(r"\W", "_", name) or "_"
    return f"_{text}" if text[0].isdigit() or keyword.iskeyword(text) else text


class _Ports:
    """The inputs of a model: their names in Python, examples, dynamic axes; and those that are fixed."""

    def __init__(self, model: ModelProto, fixed: dict[str, Any], where: str) -> None:
        self.names: dict[str, str] = {}
        self.examples: dict[str, Tensor] = {}
        self.dynamic: dict[str, dict[int, str]] = {}
        self.symbols: dict[str, tuple[int, int]] = {}
        self.constants: dict[str, Constant] = {}
        stored = {t.name for t in model.graph.initializer}
        inputs = [v for v in model.graph.input if v.name not in stored]
        self.sizes = {k: v for k, v in fixed.items() if k not in {i.name for i in inputs}}
        self.is_decoder = _is_decoder(inputs, model)
        used: set[str] = set()
        for value in inputs:
            if value.name in fixed:
                self._fix(value, fixed[value.name], where)
            else:
                self._add(value, used, where)
        unknown = sorted(set(self.sizes) - used)
        if unknown:
            raise unknown_name(
                "dimension or input to fix", unknown[0], [*used, *self.symbols, *self.names], where=where
            )

    def _fix(self, value: ValueInfoProto, given: Any, where: str) -> None:
        elem_type = value.type.tensor_type.elem_type
        carrier = find_carrier(elem_type, f"{where}, input {value.name!r}")
        tensor = torch.as_tensor(given).to(carrier)
        sizes = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if tensor.dim() != len(sizes) and tensor.numel() == 1:
            tensor = tensor.reshape([1] * len(sizes))
        if tensor.dim() != len(sizes) or any(s and s != t for s, t in zip(sizes, tensor.shape, strict=True)):
            raise CaptureError(f"the fixed value of {value.name!r} has shape {list(tensor.shape)}", where=where)
        self.constants[value.name] = Constant(value.name, tensor, elem_type)

    def _add(self, value: ValueInfoProto, used: set[str], where: str) -> None:
        name = make_identifier(value.name).lower()  # torch.export writes placeholders in lower case
        if self.is_decoder and value.name in _POSITIONS:
            name = "positions"
        while name in self.names.values():
            name += "_"
        self.names[value.name] = name
        elem_type = value.type.tensor_type.elem_type
        carrier = find_carrier(elem_type, f"{where}, input {value.name!r} ({name_type(elem_type)})")
        shape: list[int] = []
        dims = value.type.tensor_type.shape.dim
        for axis, dim in enumerate(dims):
            if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
                shape.append(dim.dim_value)
                continue
            symbol = dim.dim_param if dim.dim_param not in ("", "?") else f"{name}_{axis}"
            if symbol in self.sizes:
                used.add(symbol)
                shape.append(int(self.sizes[symbol]))
                continue
            symbol = self._name_symbol(symbol, axis, len(dims))
            self.dynamic.setdefault(name, {})[axis] = symbol
            is_side = len(dims) == 4 and axis >= 2
            order = list(self.symbols).index(symbol)
            shape.append(_IMAGE_SIDE + 32 * order if is_side else 11 + 2 * order)
        dtype = BOUNDARY.get(elem_type, carrier)
        self.examples[name] = torch.zeros(shape, dtype=torch.float32).to(dtype)

    def _name_symbol(self, symbol: str, axis: int, rank: int) -> str:
        if self.is_decoder and axis == rank - 1:
            symbol = "tokens"
        symbol = make_identifier(symbol)
        self.symbols[symbol] = (1, LARGEST_DIM)
        return symbol


def _is_decoder(inputs: list[ValueInfoProto], model: ModelProto) -> bool:
    """Whether the model maps token ids and positions of one sequence to logits."""
    names = [v.name for v in inputs]
    if len(names) != 2 or "input_ids" not in names or not set(names) & set(_POSITIONS) or len(model.graph.output) != 1:
        return False
    for value in inputs:
        dims = value.type.tensor_type.shape.dim
        one = len(dims) == 1 or (len(dims) == 2 and dims[0].dim_value == 1)
        if not one or value.type.tensor_type.elem_type != 7 or not dims[-1].dim_param:
            return False
    return True


class OnnxModule(nn.Module):
    """An ONNX graph as a module: constants are parameters under their names, ``forward`` takes the inputs by name."""

    def __init__(self, graph: Graph, inputs: Mapping[str, str], file: str) -> None:
        """``inputs``: ONNX name -> parameter name of forward. ``file``: what sources of the graph's nodes call it."""
        super().__init__()
        self._graph, self._inputs = graph, dict(inputs)
        self.parameter_names: dict[str, str] = {}
        used = {n for s in graph.steps for n in s.inputs} | set(graph.outputs)
        used |= {n for n in graph.constants if any(s.op in ("Loop", "Scan", "If") for s in graph.steps)}
        for name in [n for n in graph.constants if n in used]:
            self._register(name, graph.constants[name].tensor)
        self._frames = {}
        for step in graph.steps:
            name, _, number = step.name.rpartition(":")
            label = f"{file}/{name.strip('/')}".replace('"', "'")
            self._frames[step.name] = compile_frame(label, int(number) if number.isdigit() else 1)
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in inputs.values()]
        run = self._run

        def forward(*args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
            return run(dict(zip(inputs.values(), args, strict=False)) | kwargs)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def _register(self, name: str, tensor: Tensor) -> None:
        """Under the constant's own dotted name, or a flat one where a module stands in the way."""
        path = [re.sub(r"\W", "_", part) for part in name.removesuffix(".turned").split(".") if part]
        owner: nn.Module = self
        for part in path[:-1]:
            child = getattr(owner, part, None)
            if child is None:
                owner.add_module(part, nn.Module())
                child = getattr(owner, part)
            if not isinstance(child, nn.Module):
                owner, path = self, ["constant", *path]
                break
            owner = child
        leaf = path[-1] if owner is not self or len(path) == 1 else "_".join(path)
        while hasattr(owner, leaf):
            leaf += "_"
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
        found = next(n for n, m in self.named_modules() if m is owner)
        self.parameter_names[name] = f"{found}.{leaf}" if found else leaf

    def _tensor_of(self, constant: Constant) -> Tensor:
        name = self.parameter_names.get(constant.name)
        return constant.tensor if name is None else self.get_parameter(name)

    def _run(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        values: dict[str, Value] = dict(self._graph.constants)
        for name, argument in self._inputs.items():
            tensor = given[argument]
            carrier = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}.get(
                tensor.dtype
            )
            values[name] = tensor if carrier is None else tensor.to(carrier)
        run_steps(self._graph.steps, values, self._tensor_of, self._frames)
        return tuple(
            self._result(n, values[n], t) for n, t in zip(self._graph.outputs, self._graph.output_types, strict=True)
        )

    def _result(self, name: str, value: Value, elem_type: int) -> Tensor:
        if isinstance(value, list):
            raise CaptureError(f"the output {name!r} is a sequence, not a tensor")
        if isinstance(value, Constant):
            value = self._tensor_of(value)
        tensor = value if isinstance(value, Tensor) else host_to_tensor(value, elem_type)
        return tensor.to(BOUNDARY[elem_type]) if elem_type in BOUNDARY else tensor
