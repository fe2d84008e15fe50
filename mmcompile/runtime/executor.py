"""What a device must offer to run a plan, and the arithmetic of buffers and views that devices share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError, RequestError
from mmcompile.core.expression import Expression, evaluate, evaluate_shape
from mmcompile.core.plan import Buffer, Phase, Plan, View

Symbols = Mapping[str, int]
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


class Executor(Protocol):
    """A device with a plan's weights and state in its memory.

    ``pads_decode``: True if decode steps should come in few sizes (batch padded with empty rows, tokens == batch),
    because each size is captured once and replayed.
    """

    pads_decode: bool

    def run(
        self, phase: str, inputs: Mapping[str, Tensor], symbols: Symbols, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Run a phase on CPU tensors and return the named outputs as CPU tensors, valid until the next run.

        ``inputs`` holds one contiguous tensor for each of the phase's inputs, of the shape that ``symbols`` gives.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Facts about the loaded plan: device, kernels, launches, fallbacks, memory by role, graphs."""
        ...

    def close(self) -> None:
        """Free device memory. The executor cannot be used afterwards."""
        ...


def torch_dtype(buffer: Buffer) -> torch.dtype:
    """The buffer's dtype; ArtifactError if torch has none of that name."""
    dtype = getattr(torch, buffer.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(
            f"buffer {buffer.name!r} has the unknown dtype {buffer.dtype!r}", fix="rebuild the artifact"
        )
    return dtype


def count_bytes(buffer: Buffer, symbols: Symbols) -> int:
    """Size of a buffer for the given symbols."""
    size = torch_dtype(buffer).itemsize
    for dimension in buffer.shape:
        size *= evaluate(dimension, symbols)
    return size


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for dimension in reversed(shape):
        strides.append(step)
        step *= max(dimension, 1)
    return tuple(reversed(strides))


class Evaluation:
    """Shapes and views of a plan for one set of symbol values; every expression is evaluated once."""

    def __init__(self, plan: Plan, symbols: Symbols) -> None:
        self.symbols = dict(symbols)
        self._plan = plan
        self._numbers: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def number(self, expression: Expression) -> int:
        """Value of an expression."""
        if isinstance(expression, int):
            return expression
        value = self._numbers.get(expression)
        if value is None:
            value = self._numbers[expression] = evaluate(expression, self.symbols)
        return value

    def numbers(self, expressions: tuple[Expression, ...]) -> tuple[int, ...]:
        """Values of several expressions."""
        return tuple(map(self.number, expressions))

    def shape(self, buffer: str) -> tuple[int, ...]:
        """Shape of a buffer."""
        if buffer not in self._shapes:
            self._shapes[buffer] = self.numbers(self._plan.buffers[buffer].shape)
        return self._shapes[buffer]

    def view(self, view: View) -> Geometry:
        """(shape, strides, offset) of a view, in elements."""
        return self.numbers(view.shape), self.numbers(view.strides), self.number(view.offset)

    def is_whole(self, view: View) -> bool:
        """True if a view is its buffer, shape included."""
        geometry, shape = self.view(view), self.shape(view.buffer)
        return geometry[0] == shape and covers(geometry, shape)


def is_dense(geometry: Geometry) -> bool:
    """True if the view is row-major without gaps (strides of dimensions of size 1 do not matter)."""
    shape, strides, _ = geometry
    return all(s == c or n == 1 for n, s, c in zip(shape, strides, contiguous_strides(shape), strict=True))


def covers(geometry: Geometry, shape: tuple[int, ...]) -> bool:
    """True if a view is the whole of a buffer of ``shape``, element for element, whatever its own shape."""
    return geometry[2] == 0 and torch.Size(geometry[0]).numel() == torch.Size(shape).numel() and is_dense(geometry)


def check_symbols(plan: Plan, phase: str, symbols: Symbols) -> None:
    """RequestError if a symbol exceeds the largest value that the plan was built for."""
    for name, limit in plan.symbols.items():
        if symbols.get(name, 0) > limit:
            raise RequestError(
                f"{name} = {symbols[name]} exceeds the limit {limit} of the artifact",
                where=f"phase {phase}",
                fix=f"send a smaller request, or build the artifact with a larger {name}",
            )


def check_inputs(plan: Plan, phase: Phase, inputs: Mapping[str, Tensor], symbols: Symbols) -> None:
    """RequestError unless ``inputs`` are exactly the phase's, with the right shapes and dtypes, and contiguous."""
    if inputs.keys() != set(phase.inputs):
        raise RequestError(
            f"inputs {sorted(inputs)} given, {sorted(phase.inputs)} needed",
            where=f"phase {phase.name}",
            fix="pass exactly the inputs of the phase",
        )
    for name, tensor in inputs.items():
        buffer = plan.buffers[name]
        shape = evaluate_shape(buffer.shape, symbols)
        if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(buffer) or not tensor.is_contiguous():
            raise RequestError(
                f"input {name!r} is {tensor.dtype} {list(tensor.shape)}, needed: {buffer.dtype} {list(shape)}",
                where=f"phase {phase.name}",
                fix="pass a contiguous tensor of that shape and dtype",
            )


def memory_by_role(plan: Plan, symbols: Symbols) -> dict[str, int]:
    """Bytes of persistent buffers by role; "arena" for what temporaries and outputs share at most."""
    totals: dict[str, int] = {}
    for buffer in plan.buffers.values():
        if buffer.role in ("weight", "derived", "state"):
            totals[buffer.role] = totals.get(buffer.role, 0) + count_bytes(buffer, symbols)
    totals["arena"] = max((phase.arena_bytes for phase in plan.phases.values()), default=0)
    return totals


def describe_weights(random_weights: int | None) -> str:
    """Where an engine's weights came from: the artifact, or a seed."""
    return "packed" if random_weights is None else f"random (seed {random_weights})"


def list_fallbacks(plan: Plan) -> list[dict[str, str]]:
    """Launches without a kernel, with their reason."""
    return [
        {"phase": phase.name, "launch": launch.name, "op": launch.op, "reason": launch.reason}
        for phase in plan.phases.values()
        for launch in phase.launches
        if not launch.choices
    ]
