"""The table of ONNX operators, each in terms of torch: one room of operators a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmcompile.capture.onnx.ops import (
    attention,
    control,
    convolution,
    elementwise,
    host,
    linear,
    normalisation,
    pooling,
    quantization,
    recurrent,
    reductions,
    resize,
    scatter,
    shapes,
    signal,
)

Handler = Callable[[Any], Any]

_ROOMS = (
    attention, control, convolution, elementwise, linear, normalisation, pooling, quantization, recurrent, reductions,
    resize, scatter, shapes, signal,
)  # fmt: skip

OPERATORS: dict[str, Handler] = {name: handler for room in _ROOMS for name, handler in room.TABLE.items()}
"""Operator of the standard domain -> function from a Call to its result or results."""

HOST_OPERATORS: dict[str, Handler] = host.TABLE
"""Operators that also compute on sizes known while the graph is made (see host)."""
