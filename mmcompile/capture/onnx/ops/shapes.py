"""Operators of ONNX that move data without changing it: reshape, slice, join, pad, gather, make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.ops.host import tidy
from mmcompile.capture.onnx.values import CARRIERS, Call, Constant, Host


def _shape(call: Call) -> Host:
    sizes = list(call.tensor(0).shape)
    start, end = call.attr("start", 0), call.attr("end", len(sizes))
    sizes = sizes[slice(start, end)]
    return tidy(sizes, (len(sizes),)) if sizes else np.zeros(0, np.int64)


def _size(call: Call) -> Host:
    return tidy([call.tensor(0).numel()], ())


def _reshape(call: Call) -> Tensor:
    x, shape = call.tensor(0), call.ints(1)
    if not call.attr("allowzero", 0):
        shape = [x.shape[i] if isinstance(s, int) and s == 0 else s for i, s in enumerate(shape)]
    return x.reshape(shape)


def _squeeze(call: Call) -> Tensor:
    x = call.tensor(0)
    if not call.has(1):
        return x.reshape([s for s in x.shape if not (isinstance(s, int) and s == 1)])
    axes = sorted(int(a) % x.dim() for a in call.ints(1))
    for axis in axes:
        if isinstance(x.shape[axis], int) and x.shape[axis] != 1:
            raise call.refuse(f"dimension {axis} is {x.shape[axis]}, only 1 can be dropped")
    for axis in reversed(axes):
        x = x.squeeze(axis) if isinstance(x.shape[axis], int) else x.select(axis, 0)
    return x


def _unsqueeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), [int(a) for a in call.ints(1)]
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def _flatten(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attr("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 0:
        return x.reshape(1, -1)
    return x.reshape(x.shape[0], -1) if axis == 1 else x.flatten(0, axis - 1).flatten(1)


def _transpose(call: Call) -> Tensor:
    x = call.tensor(0)
    order = call.attr("perm", list(reversed(range(x.dim()))))
    moved = [i for i, p in enumerate(order) if i != p]
    if len(moved) == 2:
        return x.transpose(*moved)
    return x.permute(order) if moved else x


def _concat(call: Call) -> Tensor:
    return torch.cat(call.tensors(), call.attr("axis", 0))


def _split(call: Call) -> tuple[Tensor, ...]:
    x, axis = call.tensor(0), call.attr("axis", 0)
    count = call.attr("num_outputs", len(call.step.outputs))
    if call.has(1):
        return tuple(torch.split(x, call.ints(1), axis))
    return tuple(torch.split(x, -(-x.shape[axis] // count), axis))


def _slice(call: Call) -> Tensor:
    x, starts, ends = call.tensor(0), call.ints(1), call.ints(2)
    axes = call.ints(3) if call.has(3) else list(range(len(starts)))
    steps = call.ints(4) if call.has(4) else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _slice_one(x, start, end, int(axis) % x.dim(), int(step))
    return x


def _slice_one(x: Tensor, start: Any, end: Any, axis: int, step: int) -> Tensor:
    if step > 0:
        return torch.ops.aten.slice.Tensor(x, axis, start, end, step)
    size = x.shape[axis]
    first = min(start + size if start < 0 else start, size - 1)
    last = max(end + size if end < 0 else end, -1) if end >= -size else -1
    return torch.ops.aten.slice.Tensor(torch.flip(x, [axis]), axis, size - 1 - first, max(size - 1 - last, 0), -step)


def _expand(call: Call) -> Tensor:
    x, shape = call.tensor(0), call.ints(1)
    rank = max(x.dim(), len(shape))
    own = [1] * (rank - x.dim()) + list(x.shape)
    shape = [1] * (rank - len(shape)) + shape
    both = [o if isinstance(s, int) and s == 1 else s for o, s in zip(own, shape, strict=True)]
    return x.expand([-1 if i >= rank - x.dim() and _same(s, o) else s for i, (s, o) in enumerate(zip(both, own))])  # noqa: B905


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a == b


def _tile(call: Call) -> Tensor:
    return call.tensor(0).repeat(call.ints(1))


def _pad(call: Call) -> Tensor:
    x, pads, mode = call.tensor(0), call.ints(1), call.attr("mode", "constant")
    axes = [int(a) % x.dim() for a in call.ints(3)] if call.has(3) else list(range(x.dim()))
    for i, axis in enumerate(axes):
        before, after = pads[i], pads[i + len(axes)]
        if mode == "constant":
            value = call.literal(2) if call.has(2) else 0
            flat = [0, 0] * (x.dim() - 1 - axis) + [before, after]
            if any(not isinstance(p, int) or p for p in (before, after)):
                inside = None if value is not None else F.pad(torch.ones_like(x, dtype=torch.bool), flat)
                x = F.pad(x, flat, value=0 if value is None else value)
                x = x if inside is None else torch.where(inside, x, call.tensor(2).reshape(()))
        else:
            x = _pad_by_index(x, axis, int(before), int(after), mode)
    return x


def _pad_by_index(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """Other modes than "constant": gather the positions that the new elements repeat; negative pads crop."""
    if before == after == 0:
        return x
    if before < 0 or after < 0:
        x = x.narrow(axis, max(-before, 0), x.shape[axis] + min(before, 0) + min(after, 0))
        before, after = max(before, 0), max(after, 0)
    size = x.shape[axis]
    index = torch.arange(-before, size + after, device=x.device)
    if mode == "edge":
        index = index.clamp(0, size - 1)
    elif mode == "wrap":
        index = torch.remainder(index, size)
    else:  # reflect, without repeating the edge
        period = 2 * (size - 1)
        index = torch.remainder(index, period)
        index = torch.where(index >= size, period - index, index)
    return torch.index_select(x, axis, index)


def _depth_to_space(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attr("blocksize")
    b, c, h, w = x.shape
    if call.attr("mode", "DCR") == "DCR":
        parts = x.reshape(b, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(b, c // size**2, size, size, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(b, c // size**2, h * size, w * size)


def _space_to_depth(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attr("blocksize")
    b, c, h, w = x.shape
    parts = x.reshape(b, c, h // size, size, w // size, size)
    parts = parts.permute(0, 3, 5, 1, 2, 4) if call.attr("mode", "DCR") == "DCR" else parts.permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(b, c * size * size, h // size, w // size)


def _reverse_sequence(call: Call) -> Tensor:
    x, lengths = call.tensor(0), call.tensor(1)
    batch_axis, time_axis = call.attr("batch_axis", 1), call.attr("time_axis", 0)
    x = x.movedim((batch_axis, time_axis), (0, 1))
    step = torch.arange(x.shape[1], device=x.device)[None]
    index = torch.where(step < lengths[:, None], lengths[:, None] - 1 - step, step)
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(x.shape)
    return torch.gather(x, 1, index).movedim((0, 1), (batch_axis, time_axis))


def _range(call: Call) -> Tensor:
    start, limit, delta = (call.host(i).reshape(-1)[0] for i in range(3))
    values = [v.item() if isinstance(v, np.generic) else v for v in (start, limit, delta)]
    dtype = CARRIERS[call.in_type(0)] if call.in_type(0) else torch.int64
    return torch.arange(*values, dtype=dtype)


def _eye_like(call: Call) -> Tensor:
    x = call.tensor(0)
    rows, columns = x.shape
    dtype = CARRIERS[call.attr("dtype")] if call.attr("dtype") else x.dtype
    offset = torch.arange(columns)[None] - torch.arange(rows)[:, None]
    return (offset == call.attr("k", 0)).to(dtype)


def _one_hot(call: Call) -> Tensor:
    index, values, axis = call.tensor(0).long(), call.tensor(2), call.attr("axis", -1)
    depth = int(call.ints(1)[0])
    axis = axis if axis >= 0 else axis + index.dim() + 1
    index = torch.where(index < 0, index + depth, index).unsqueeze(axis)
    lane = torch.arange(depth).reshape([-1 if i == axis else 1 for i in range(index.dim())])
    return torch.where(index == lane, values[1], values[0])


def _trilu(call: Call) -> Tensor:
    x = call.tensor(0)
    k = int(call.ints(1)[0]) if call.has(1) else 0
    return torch.triu(x, k) if call.attr("upper", 1) else torch.tril(x, k)


def _constant_of_shape(call: Call) -> Tensor:
    value: Constant | None = call.attr("value")
    filler = torch.zeros(1) if value is None else value.tensor
    return torch.full(call.ints(0), 0.0 if value is None else value.array.reshape(-1)[0].item(), dtype=filler.dtype)


def _constant(call: Call) -> Any:
    attributes = call.step.attributes
    if "value" in attributes:
        return attributes["value"].tensor
    for name, dtype in (("value_float", torch.float32), ("value_int", torch.int64)):
        for key in (name, f"{name}s"):
            if key in attributes:
                return torch.tensor(attributes[key], dtype=dtype)
    raise call.refuse(f"it holds {', '.join(attributes)}", fix="store the constant as a dense tensor of numbers")


def _center_crop_pad(call: Call) -> Tensor:
    x, shape = call.tensor(0), call.ints(1)
    axes = [a % x.dim() for a in call.attr("axes", list(range(x.dim())))]
    for axis, size in zip(axes, shape, strict=True):
        have = x.shape[axis]
        if size < have:
            x = x.narrow(axis, (have - size) // 2, size)
        elif size > have:
            before = (size - have) // 2
            x = F.pad(x, [0, 0] * (x.dim() - 1 - axis) + [before, size - have - before])
    return x


TABLE: dict[str, Callable[[Call], Any]] = {
    "Shape": _shape,
    "Size": _size,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "ReverseSequence": _reverse_sequence,
    "Range": _range,
    "EyeLike": _eye_like,
    "OneHot": _one_hot,
    "Trilu": _trilu,
    "ConstantOfShape": _constant_of_shape,
    "Constant": _constant,
    "CenterCropPad": _center_crop_pad,
}
