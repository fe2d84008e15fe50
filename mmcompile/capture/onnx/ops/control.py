"""Control flow of ONNX that is decided when the graph is made: branches chosen, loops unrolled, sequences as lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mmcompile.capture.onnx.values import Call, Constant, Subgraph, Value

LONGEST_LOOP = 4096


def _if(call: Call) -> Any:
    chosen: Subgraph = call.attr("then_branch" if bool(call.host(0).reshape(-1)[0]) else "else_branch")
    return tuple(call.run(chosen, []))


def _loop(call: Call) -> Any:
    body: Subgraph = call.attr("body")
    trips = int(call.host(0).reshape(-1)[0]) if call.has(0) else None
    going = bool(call.host(1).reshape(-1)[0]) if call.has(1) else True
    carried: list[Value] = [v for v in call.values[2:] if v is not None]
    scanned: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]
    i = 0
    while going and (trips is None or i < trips):
        if i >= LONGEST_LOOP:
            raise call.refuse(f"it runs more than {LONGEST_LOOP} times, and loops are unrolled")
        with _disable_current_modes():  # real numbers, also while torch traces
            first: list[Value] = [Constant("", torch.tensor(i), 7), Constant("", torch.tensor(going), 9)]
        results = call.run(body, [*first, *carried])
        going = _read_condition(call, results[0])
        carried = results[1 : 1 + len(carried)]
        for held, value in zip(scanned, results[1 + len(carried) :], strict=True):
            held.append(_tensor(call, value))
        i += 1
    if any(not held for held in scanned):
        raise call.refuse("it runs zero times, so its scan outputs have no shape")
    return (*carried, *(torch.stack(held) for held in scanned))


def _read_condition(call: Call, value: Value) -> bool:
    if isinstance(value, Constant):
        return bool(value.array.reshape(-1)[0])
    if isinstance(value, np.ndarray):
        return bool(value.reshape(-1)[0])
    raise call.refuse(
        "its condition is computed from data, and loops are unrolled",
        fix="export the model with a fixed number of steps",
    )


def _tensor(call: Call, value: Value) -> torch.Tensor:
    return Call(call.step, [value], call.materialise, call.run, call.folding).tensor(0)


def _scan(call: Call) -> Any:
    body: Subgraph = call.attr("body")
    count = call.attr("num_scan_inputs")
    states: list[Value] = [v for v in call.values[: len(call.values) - count] if v is not None]
    inputs = [call.tensor(len(states) + i) for i in range(count)]
    axes = call.attr("scan_input_axes", [0] * count)
    backwards = call.attr("scan_input_directions", [0] * count)
    length = inputs[0].shape[axes[0]]
    if not isinstance(length, int):
        raise call.refuse("the length that it runs over is dynamic, and loops are unrolled", fix="fix it with --fix")
    outputs = len(body.outputs) - len(states)
    out_axes = call.attr("scan_output_axes", [0] * outputs)
    out_backwards = call.attr("scan_output_directions", [0] * outputs)
    scanned: list[list[torch.Tensor]] = [[] for _ in range(outputs)]
    for i in range(length):
        slices = [
            x.select(a, length - 1 - i if back else i) for x, a, back in zip(inputs, axes, backwards, strict=True)
        ]
        results = call.run(body, [*states, *slices])
        states = results[: len(states)]
        for held, value in zip(scanned, results[len(states) :], strict=True):
            held.append(_tensor(call, value))
    stacked = [
        torch.stack(held[::-1] if back else held, axis)
        for held, axis, back in zip(scanned, out_axes, out_backwards, strict=True)
    ]
    return (*states, *stacked)


def _list_of(call: Call) -> list[Any]:
    value = call.values[0]
    if not isinstance(value, list):
        raise call.refuse("its input is no sequence")
    return value


def _position(call: Call, index: int, count: int) -> int:
    place = int(call.host(index).reshape(-1)[0]) if call.has(index) else count
    return place + count if place < 0 else place


def _insert(call: Call) -> list[Any]:
    items = list(_list_of(call))
    items.insert(_position(call, 2, len(items)), call.tensor(1))
    return items


def _erase(call: Call) -> list[Any]:
    items = list(_list_of(call))
    del items[_position(call, 1, len(items)) if call.has(1) else -1]
    return items


def _split_to_sequence(call: Call) -> list[Any]:
    x, axis, keep = call.tensor(0), call.attr("axis", 0), call.attr("keepdims", 1)
    if not call.has(1):
        parts = list(torch.split(x, 1, axis))
        return parts if keep else [p.squeeze(axis) for p in parts]
    sizes = call.host(1)
    return list(torch.split(x, int(sizes) if sizes.ndim == 0 else [int(s) for s in sizes], axis))


def _concat_sequence(call: Call) -> torch.Tensor:
    items, axis = _list_of(call), call.attr("axis")
    return torch.stack(items, axis) if call.attr("new_axis", 0) else torch.cat(items, axis)


TABLE: dict[str, Callable[[Call], Any]] = {
    "Identity": lambda call: call.values[0] if isinstance(call.values[0], list) else call.tensor(0),
    "OptionalGetElement": lambda call: call.values[0] if isinstance(call.values[0], list) else call.tensor(0),
    "OptionalHasElement": lambda call: np.array(call.has(0)),
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceEmpty": lambda call: [],
    "SequenceConstruct": lambda call: call.tensors(),
    "SequenceAt": lambda call: _list_of(call)[_position(call, 1, len(_list_of(call)))],
    "SequenceLength": lambda call: np.array(len(_list_of(call))),
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SplitToSequence": _split_to_sequence,
    "ConcatFromSequence": _concat_sequence,
}
