"""Run one launch by its meaning: an mm reference, a region program or an aten operator, on CPU tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError, UsageError
from mmcompile.core.ops.define import get_op
from mmcompile.core.plan import Launch
from mmcompile.core.region import Region, evaluate_program

_TORCH_KINDS = ("dtype", "memory_format", "layout")


@dataclass(frozen=True)
class Call:
    """A launch ready to be called: ``function(*arguments)`` after the tensors are put in place.

    Attributes:
        function: returns a tensor, a tuple of tensors, or None.
        template: positional arguments with None where a tensor goes.
        slots: (position, input name) of every tensor that is present.
        mutated: names of the inputs that the function writes.
        aliases: True if a result may share memory with an input.
    """

    function: Callable[..., Any]
    template: tuple[Any, ...]
    slots: tuple[tuple[int, str], ...]
    mutated: tuple[str, ...]
    aliases: bool = False


def bind_call(launch: Launch) -> Call:
    """Parse the attributes of a launch once. Raises ArtifactError on an unknown operation or attribute."""
    if launch.op in ("region.pointwise", "region.reduction"):
        return _bind_region(launch)
    if launch.op.startswith("mm."):
        return _bind_mm(launch)
    if launch.op.startswith("aten."):
        return _bind_aten(launch)
    raise _malformed(launch, f"unknown operation {launch.op!r}")


def _malformed(launch: Launch, what: str) -> ArtifactError:
    return ArtifactError(what, where=f"launch {launch.name}", fix="rebuild the artifact with this mmcompile")


def _slots(launch: Launch, order: list[str]) -> tuple[tuple[int, str], ...]:
    return tuple((i, name) for i, name in enumerate(order) if launch.inputs.get(name) is not None)


def _bind_mm(launch: Launch) -> Call:
    try:
        op = get_op(launch.op.removeprefix("mm."))
    except UsageError as error:
        raise _malformed(launch, error.what) from None
    parameters = inspect.signature(op.reference).parameters
    unknown = sorted((launch.inputs.keys() | launch.attributes.keys()) - parameters.keys())
    if unknown:
        raise _malformed(launch, f"{launch.op} has no parameter {unknown[0]!r}")
    template: list[Any] = []
    for name, parameter in parameters.items():
        if name in launch.attributes:
            value = _parse(launch, launch.attributes[name])
            is_dtype = parameter.annotation in ("torch.dtype", torch.dtype) and isinstance(value, str)
            template.append(_torch_constant(launch, value) if is_dtype else value)
        elif name in launch.inputs:
            template.append(None)
        elif parameter.default is not inspect.Parameter.empty:
            template.append(parameter.default)
        else:
            raise _malformed(launch, f"{launch.op} needs {name!r}")
    return Call(op.reference, tuple(template), _slots(launch, list(parameters)), op.mutates)


def _bind_region(launch: Launch) -> Call:
    try:
        region = Region.from_json(launch.attributes)
    except (ValueError, KeyError, TypeError) as error:
        raise _malformed(launch, f"malformed region ({error})") from None
    slots = _slots(launch, list(region.inputs))
    if len(slots) != len(region.inputs):
        raise _malformed(launch, "the region's inputs are not all given")
    function = lambda *tensors: evaluate_program(region, tensors)  # noqa: E731
    return Call(function, (None,) * len(slots), slots, ())


def _bind_aten(launch: Launch) -> Call:
    _, name, overload = launch.op.split(".") if launch.op.count(".") == 2 else ("", "", "")
    packet = getattr(torch.ops.aten, name, None) if name else None
    if packet is None or overload not in packet.overloads():
        raise _malformed(launch, f"unknown operation {launch.op!r}")
    operator = getattr(packet, overload)
    order = list(launch.inputs)
    args = _parse(launch, launch.attributes.get("args", []))
    kwargs = {k: _parse(launch, v) for k, v in launch.attributes.get("kwargs", {}).items() if k != "device"}

    def call(*tensors: Tensor | None) -> Any:
        values = dict(zip(order, tensors, strict=True))
        return operator(*_fill(args, values), **_fill(kwargs, values))

    schema = operator._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    mutated = tuple(
        value.name
        for argument, value in [*zip((a.name for a in schema.arguments), args, strict=False), *kwargs.items()]
        if argument in written and isinstance(value, _Input)
    )
    aliases = any(r.alias_info is not None for r in schema.returns)
    return Call(call, (None,) * len(order), _slots(launch, order), mutated, aliases)


@dataclass(frozen=True)
class _Input:
    """Stands for an input tensor in a tree of aten arguments."""

    name: str


def _torch_constant(launch: Launch, name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        raise _malformed(launch, f"torch has no dtype, layout or memory format {name!r}")
    return value


def _parse(launch: Launch, tree: Any) -> Any:
    """JSON tree -> Python values: {"input": n}, {"dtype": d}, {"float": "inf"}; {"device": d} is ignored."""
    if isinstance(tree, list):
        return [_parse(launch, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise _malformed(launch, f"malformed argument {tree}")
    ((kind, value),) = tree.items()
    if kind == "input" and value in launch.inputs:
        return _Input(value)
    if kind in _TORCH_KINDS:
        return _torch_constant(launch, value)
    if kind == "float":
        return float(value)
    if kind == "device":
        return None
    raise _malformed(launch, f"malformed argument {tree}")


def _fill(tree: Any, values: Mapping[str, Tensor | None]) -> Any:
    if isinstance(tree, _Input):
        return values[tree.name]
    if isinstance(tree, list):
        return [_fill(item, values) for item in tree]
    if isinstance(tree, dict):
        return {key: _fill(item, values) for key, item in tree.items()}
    return tree
