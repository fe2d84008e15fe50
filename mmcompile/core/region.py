"""Regions of elementwise and row-reduction steps that no rule claims: record, JSON form, eager evaluator.

A region is a straight-line program in SSA form. Lowering builds one from a connected set of FX nodes; a
target generates one kernel from it; ``evaluate_program`` is its meaning. The operation's name is
``region.kind`` ("pointwise" or "reduction"), ``OpCall.attributes`` is ``region.to_json()``, the operands
are the inputs by name and the results are the outputs in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Argument = str | int | float | bool | None

UNARY_OPS = frozenset(
    {
        "abs",
        "bitwise_not",
        "ceil",
        "cos",
        "erf",
        "exp",
        "exp2",
        "floor",
        "gelu",
        "log",
        "log2",
        "logical_not",
        "neg",
        "reciprocal",
        "relu",
        "round",
        "rsqrt",
        "sigmoid",
        "silu",
        "sin",
        "sqrt",
        "square",
        "tanh",
    }
)
COMPARISON_OPS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
LOGICAL_OPS = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or"})
BINARY_OPS = COMPARISON_OPS | LOGICAL_OPS | {"add", "div", "maximum", "minimum", "mul", "pow", "rsub", "sub"}
CONSTANT_OPS = frozenset({"full", "scalar_tensor"})
COPY_OPS = frozenset({"_to_copy", "clone"})
CLAMP_OPS = frozenset({"clamp", "clamp_max", "clamp_min"})
POINTWISE_OPS = UNARY_OPS | BINARY_OPS | CONSTANT_OPS | COPY_OPS | CLAMP_OPS | {"masked_fill", "where"}
"""aten overload-packet names of the elementwise steps that a region may hold."""

REDUCING_OPS = frozenset({"amax", "amin", "argmax", "mean", "sum", "var"})
NORMALISING_OPS = frozenset({"_log_softmax", "_softmax", "log_softmax", "softmax"})
REDUCTION_OPS = REDUCING_OPS | NORMALISING_OPS
"""aten overload-packet names of the steps over the last dimension, which make a region a "reduction"."""

_OPTIONS: dict[str, frozenset[str]] = {
    "add": frozenset({"alpha"}),
    "sub": frozenset({"alpha"}),
    "rsub": frozenset({"alpha"}),
    "gelu": frozenset({"approximate"}),
    "var": frozenset({"correction", "keepdim"}),
    **{op: frozenset({"keepdim"}) for op in REDUCING_OPS - {"var"}},
}
_ARITY: dict[str, int] = {
    **dict.fromkeys(UNARY_OPS | CONSTANT_OPS | COPY_OPS | REDUCTION_OPS, 1),
    **dict.fromkeys(BINARY_OPS, 2),
    "clamp_max": 2,
    "clamp_min": 2,
    "clamp": 3,
    "masked_fill": 3,
    "where": 3,
}


@dataclass(frozen=True)
class Step:
    """One SSA step ``name = op(*args, **options)``.

    Attributes:
        name: result name, unique in the region.
        op: aten overload-packet name, one of POINTWISE_OPS or REDUCTION_OPS.
        args: a str names an input or an earlier step; a number is a Python scalar (torch's "wrapped
            number": it does not promote within its category). In full:
            unary op: (x,). binary op: (a, b), at least one of them a name; ``pow``: (x, scalar exponent).
            ``where``: (condition, a, b). ``masked_fill``: (x, mask, scalar). ``clamp``: (x, low or None,
            high or None). ``clamp_min``/``clamp_max``: (x, scalar). ``full`` (a tensor of one repeated
            value, shape [1]) and ``scalar_tensor`` (0-dim): (scalar,). ``_to_copy``: (x,), a cast to
            ``dtype``. reductions and softmax: (x,), over the last dimension.
        dtype: torch's short name of the result, as torch's own type promotion gives it, e.g. "bfloat16".
        options: ``alpha`` (add, sub, rsub), ``approximate`` "none" or "tanh" (gelu), ``keepdim`` (amax,
            amin, argmax, mean, sum, var; default False), ``correction`` (var; default 1).
    """

    name: str
    op: str
    args: tuple[Argument, ...]
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def keepdim(self) -> bool:
        """Whether a reducing step keeps the last dimension as 1."""
        return bool(self.options.get("keepdim", False))


@dataclass(frozen=True)
class Region:
    """A fused program: ``inputs`` are operand names ("in0", "in1", ...), ``outputs`` names of steps, in
    result order.

    Kind "pointwise": every output has the broadcast shape of the inputs. Kind "reduction": reductions are
    over the last dimension of that shape, any number of them; a value reduced with keepdim may be
    broadcast back over the row (so that softmax, layer norm and RMS norm are regions), one reduced without
    it may meet only scalars and values of its kind.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        if len(known) != len(self.inputs):
            raise ValueError(f"region inputs are not unique: {self.inputs}")
        for step in self.steps:
            _check_step(step, known)
            known.add(step.name)
        missing = [name for name in self.outputs if name not in known or name in self.inputs]
        if missing or not self.outputs:
            raise ValueError(f"region outputs must name steps, got {list(self.outputs)}")

    @property
    def kind(self) -> str:
        """The operation's name: "reduction" if any step works over the last dimension, else "pointwise"."""
        return "reduction" if any(step.op in REDUCTION_OPS for step in self.steps) else "pointwise"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: {"inputs": [...], "program": [[name, op, dtype, args, options], ...], "outputs":
        [...]}.

        A non-finite float argument is written as {"float": "inf"} so that the text stays strict JSON.
        """
        program = [
            [step.name, step.op, step.dtype, [_encode(a) for a in step.args], dict(step.options)] for step in self.steps
        ]
        return {"inputs": list(self.inputs), "program": program, "outputs": list(self.outputs)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Region:
        """Inverse of ``to_json``; keys other than its three are ignored. Raises ValueError on a malformed
        program."""
        steps = tuple(
            Step(name, op, tuple(_decode(a) for a in args), dtype, dict(options))
            for name, op, dtype, args, options in data["program"]
        )
        return cls(tuple(data["inputs"]), steps, tuple(data["outputs"]))


def _check_step(step: Step, known: set[str]) -> None:
    where = f"step {step.name!r}"
    if step.op not in _ARITY:
        raise ValueError(f"{where}: {step.op!r} is not an operation of regions")
    if step.name in known or not step.name.isidentifier():
        raise ValueError(f"{where}: the name is taken or not an identifier")
    if len(step.args) != _ARITY[step.op]:
        raise ValueError(f"{where}: {step.op} takes {_ARITY[step.op]} arguments, got {len(step.args)}")
    unknown = set(step.options) - _OPTIONS.get(step.op, frozenset())
    if unknown:
        raise ValueError(f"{where}: {step.op} has no option {', '.join(sorted(unknown))}")
    names = [a for a in step.args if isinstance(a, str)]
    if any(name not in known for name in names):
        raise ValueError(f"{where}: {step.args} names a value that is not defined before it")
    if not names and step.op not in CONSTANT_OPS:
        raise ValueError(f"{where}: {step.op} needs a tensor argument")
    if step.op in CONSTANT_OPS and names:
        raise ValueError(f"{where}: {step.op} takes a scalar")
    if step.op == "pow" and (not names or isinstance(step.args[1], str)):
        raise ValueError(f"{where}: pow takes a tensor and a scalar exponent")
    if any(a is None for a in step.args) and step.op != "clamp":
        raise ValueError(f"{where}: only clamp takes None")


def _encode(argument: Argument) -> Any:
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    return argument


def _decode(argument: Any) -> Argument:
    decoded: Argument = float(argument["float"]) if isinstance(argument, dict) else argument
    return decoded


def _apply(step: Step, args: list[Any], device: torch.device) -> Tensor:
    """Run one step eagerly."""
    result: Tensor
    dtype = getattr(torch, step.dtype)
    if step.op == "_to_copy":
        result = args[0].to(dtype)
    elif step.op in CONSTANT_OPS:
        result = torch.full((1,) if step.op == "full" else (), args[0], dtype=dtype, device=device)
    elif step.op == "var":
        result = torch.var(args[0], -1, correction=step.options.get("correction", 1), keepdim=step.keepdim)
    elif step.op in NORMALISING_OPS:
        function = torch.log_softmax if "log" in step.op else torch.softmax
        result = function(args[0], -1, dtype=torch.float32).to(dtype)
    elif step.op == "argmax":
        result = torch.argmax(args[0], -1, keepdim=step.keepdim)
    elif step.op in REDUCING_OPS:
        result = getattr(torch.ops.aten, step.op)(args[0], [-1], keepdim=step.keepdim)
    else:
        result = getattr(torch.ops.aten, step.op)(*args, **step.options)
    if result.dtype != dtype:
        raise ValueError(f"step {step.name!r}: {step.op} gives {result.dtype}, the region says {step.dtype}")
    return result


def evaluate_program(region: Region, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a region step by step in eager torch: the meaning that a generated kernel must reproduce.

    Args:
        inputs: one tensor for each of ``region.inputs``, shapes broadcasting as in torch.

    Returns: the outputs in order. Raises ValueError if a step's recorded dtype is not the one torch gives.
    """
    if len(inputs) != len(region.inputs):
        raise ValueError(f"the region takes {len(region.inputs)} inputs, got {len(inputs)}")
    values: dict[str, Tensor] = dict(zip(region.inputs, inputs, strict=True))
    device = inputs[0].device if inputs else torch.device("cpu")
    for step in region.steps:
        args = [values[a] if isinstance(a, str) else a for a in step.args]
        values[step.name] = _apply(step, args, device)
    return tuple(values[name] for name in region.outputs)
