"""Run one step of an ONNX graph: on constants for real, on sizes on the host, else as torch calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mmcompile.capture.onnx.file import first_line
from mmcompile.capture.onnx.ops import HOST_OPERATORS, OPERATORS
from mmcompile.capture.onnx.ops.host import tidy
from mmcompile.capture.onnx.values import HOST_LIMIT, Call, Constant, Step, Subgraph, Value
from mmcompile.core.errors import CaptureError

Values = Mapping[str, Value]


def run_step(
    step: Step,
    values: Values,
    materialise: Callable[[Constant], Tensor] = lambda constant: constant.tensor,
    folding: bool = False,
) -> dict[str, Value]:
    """Results of a step by name. Raises CaptureError that names the node for whatever goes wrong in it.

    Args:
        values: what is known so far, at least the inputs.
        materialise: tensor of a constant. folding: compute on the constants themselves and return constants.
    """
    inputs = [values[name] if name else None for name in step.inputs]
    if not folding and inputs and all(v is None or isinstance(v, Constant) for v in inputs) and not _has_body(step):
        with _disable_current_modes():
            return run_step(step, values, folding=True)
    call = Call(step, inputs, materialise, lambda g, given: run_subgraph(g, given, values, materialise), folding)
    try:
        results = _evaluate(call)
    except CaptureError:
        raise
    except Exception as error:
        shapes = ", ".join(str(list(v.shape)) for v in inputs if isinstance(v, Tensor | np.ndarray))
        raise CaptureError(
            f"{step.op} cannot be computed on inputs of shape {shapes or 'given by constants'}: {first_line(error)}",
            where=step.place,
            fix="fix the dynamic dimensions, e.g. --fix NAME=SIZE" if "s" in shapes else "",
        ) from error
    listed = results if isinstance(results, tuple) else (results,)
    named = {n: v for n, v in zip(step.outputs, listed, strict=False) if n}
    return {n: _freeze(n, v, step) for n, v in named.items()} if folding else named


def _has_body(step: Step) -> bool:
    return any(isinstance(a, Subgraph) for a in step.attributes.values())


def _freeze(name: str, value: Any, step: Step) -> Value:
    """A folded result as a Constant, with the element type that inference found."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.tensor(value)
    if not isinstance(value, Tensor):
        return value  # type: ignore[no-any-return]
    index = step.outputs.index(name)
    elem_type = step.output_types[index] if index < len(step.output_types) else 0
    return Constant(name, value.detach(), elem_type)


def _evaluate(call: Call) -> Any:
    handler = HOST_OPERATORS.get(call.step.op)
    if handler is not None and not call.folding and _is_arithmetic_of_sizes(call):
        result = handler(call)
        if result is not None:
            return result if isinstance(result, np.ndarray | tuple) else tidy([result], ())
    return OPERATORS[call.step.op](call)


def _is_arithmetic_of_sizes(call: Call) -> bool:
    """True if every input is known on the host and at least one is there already."""
    given = [v for v in call.values if v is not None]
    small = all(
        isinstance(v, np.ndarray) or (isinstance(v, Constant) and v.tensor.numel() <= HOST_LIMIT) for v in given
    )
    return small and any(isinstance(v, np.ndarray) for v in given)


def run_subgraph(
    body: Subgraph, given: list[Value], outer: Values, materialise: Callable[[Constant], Tensor]
) -> list[Value]:
    """Outputs of a branch or loop body on ``given`` inputs, with the values around it in reach."""
    values: dict[str, Value] = {**outer, **body.constants, **dict(zip(body.inputs, given, strict=True))}
    run_steps(body.steps, values, materialise, {})
    return [values[name] for name in body.outputs]


def run_steps(
    steps: list[Step],
    values: dict[str, Value],
    materialise: Callable[[Constant], Tensor],
    frames: dict[str, CodeType],
) -> None:
    """Run steps in order and add their results to ``values``.

    ``frames``: step name -> compiled ``call()``; its file and line are what a stack trace of the step shows, so what
    the captured graph calls its source.
    """
    for step in steps:
        code = frames.get(step.name)
        if code is None:
            values.update(run_step(step, values, materialise))
            continue
        scope: dict[str, Any] = {"call": lambda step=step: run_step(step, values, materialise)}
        exec(code, scope)
        values.update(scope["result"])


def compile_frame(file: str, line: int) -> CodeType:
    """Code of one line that calls ``call()`` and keeps its result, placed at a line of a file that need not exist."""
    return compile("\n" * (line - 1) + "result = call()", file, "exec")
