"""Resize, Upsample and GridSample of ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.values import Call


def _scales_and_sizes(call: Call, x: Tensor, axes: list[int]) -> tuple[list[Any], list[Any]]:
    """(scale, output size) of every axis in ``axes``."""
    if call.has(2) and call.host(2).size:
        scales = [float(s) for s in call.ints(2)]
        return scales, [_floor(x.shape[a], s) for a, s in zip(axes, scales, strict=True)]
    sizes = call.ints(3)
    inputs = [x.shape[a] for a in axes]
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    scales = [s / n for s, n in zip(sizes, inputs, strict=True)]
    if policy == "stretch":
        return scales, sizes
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [scale] * len(axes), [int(math.floor(scale * n + 0.5)) for n in inputs]


def _floor(size: Any, scale: float) -> Any:
    return size * int(scale) if float(scale).is_integer() else math.floor(size * scale)


def _resize(call: Call) -> Tensor:
    x = call.tensor(0)
    axes = [a % x.dim() for a in call.attr("axes", list(range(x.dim())))]
    scales, sizes = _scales_and_sizes(call, x, axes)
    mode = call.attr("mode", "nearest")
    transform = call.attr("coordinate_transformation_mode", "half_pixel")
    built_in = _built_in(call, x, axes, scales, sizes, mode, transform)
    if built_in is not None:
        return built_in
    if any(not isinstance(s, int) for s in (*x.shape, *sizes)):
        raise call.refuse(f"{mode} with {transform} needs fixed sizes", fix="fix the dynamic dimensions with --fix")
    roi = call.host(1).reshape(-1).tolist() if call.has(1) else []
    y, outside = x, []
    for i, axis in enumerate(axes):
        crop = (roi[i], roi[i + len(axes)]) if transform == "tf_crop_and_resize" else (0.0, 1.0)
        matrix, out = _interpolation(call, x.shape[axis], sizes[i], scales[i], mode, transform, crop)
        outside.append((axis, out))
        if x.shape[axis] != sizes[i] or scales[i] != 1.0 or transform == "tf_crop_and_resize":
            y = _along(y, torch.tensor(matrix), axis, mode)
    for axis, out in outside:
        if transform == "tf_crop_and_resize" and out.any():
            shape = [-1 if k == axis else 1 for k in range(y.dim())]
            y = torch.where(torch.tensor(out).reshape(shape), call.attr("extrapolation_value", 0.0), y)
    return y.to(x.dtype)


def _built_in(
    call: Call, x: Tensor, axes: list[int], scales: list[Any], sizes: list[Any], mode: str, transform: str
) -> Tensor | None:
    """torch's own upsampling where it means the same: whole factors for nearest, half pixels for linear."""
    spatial = sorted((a, s, n) for a, s, n in zip(axes, scales, sizes, strict=True) if a >= 2)
    outer = [s for a, s in zip(axes, scales, strict=True) if a < 2 and not (isinstance(s, float | int) and s == 1)]
    if x.dim() != 4 or outer or len(spatial) != 2 or not x.is_floating_point() or call.attr("antialias", 0):
        return None
    factors = [s for _, s, _ in spatial]
    whole = all(isinstance(s, float | int) and float(s).is_integer() for s in factors)
    if mode == "nearest" and whole and transform in ("asymmetric", "half_pixel"):
        rounding = call.attr("nearest_mode", "round_prefer_floor")
        if rounding == "floor" if transform == "asymmetric" else rounding.startswith("round"):
            return x.repeat_interleave(int(factors[0]), 2).repeat_interleave(int(factors[1]), 3)
    exact = call.has(3) and call.host(3).size or whole
    single = any(isinstance(n, int) and n == 1 for _, _, n in spatial)  # pytorch_half_pixel takes position 0 then
    if mode == "linear" and exact and (transform == "half_pixel" or transform == "pytorch_half_pixel" and not single):
        return F.interpolate(x, size=[n for _, _, n in spatial], mode="bilinear", align_corners=False)
    return None


def _along(x: Tensor, matrix: Tensor, axis: int, mode: str) -> Tensor:
    moved = x.movedim(axis, -1)
    y = torch.matmul(moved.to(matrix.dtype), matrix.T)
    return y.movedim(-1, axis)


def _coordinate(i: Any, size: int, out: int, scale: float, transform: str, crop: tuple[float, float]) -> Any:
    """Place in the input of output position ``i`` (the standard's coordinate_transformation_mode)."""
    if transform == "asymmetric":
        return i / scale
    if transform == "align_corners":
        return i * (size - 1) / (scale * size - 1) if out > 1 else i * 0.0
    if transform == "tf_crop_and_resize":
        start, end = crop
        if out > 1:
            return start * (size - 1) + i * (end - start) * (size - 1) / (out - 1)
        return i * 0.0 + 0.5 * (start + end) * (size - 1)
    if transform == "pytorch_half_pixel":
        return (i + 0.5) / scale - 0.5 if out > 1 else i * 0.0
    if transform == "half_pixel_symmetric":
        adjustment = out / (scale * size)
        return size / 2 * (1 - adjustment) + (i + 0.5) / scale - 0.5
    return (i + 0.5) / scale - 0.5  # half_pixel


def _interpolation(
    call: Call, size: int, out: int, scale: float, mode: str, transform: str, crop: tuple[float, float]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Weights [out, size] of one axis, and which outputs lie outside the input."""
    place = _coordinate(np.arange(out, dtype=np.float64), size, out, scale, transform, crop)
    outside = (place < 0) | (place > size - 1)
    matrix = np.zeros((out, size))
    if mode == "nearest":
        index = _round(place, call.attr("nearest_mode", "round_prefer_floor"))
        matrix[np.arange(out), np.clip(index, 0, size - 1).astype(int)] = 1.0
        return matrix.astype(np.float32), outside
    narrow = min(scale, 1.0) if call.attr("antialias", 0) else 1.0
    kernel = _linear if mode == "linear" else _cubic(call.attr("cubic_coeff_a", -0.75))
    reach = (1 if mode == "linear" else 2) / narrow
    for row in range(out):
        first, last = math.floor(place[row] - reach) + 1, math.ceil(place[row] + reach)
        taps = np.arange(first, last + 1)
        weights = np.array([kernel((t - place[row]) * narrow) for t in taps])
        if call.attr("exclude_outside", 0) or call.attr("antialias", 0) and call.attr("exclude_outside", 0):
            weights[(taps < 0) | (taps >= size)] = 0.0
        weights = weights / weights.sum()
        np.add.at(matrix[row], np.clip(taps, 0, size - 1), weights)
    return matrix.astype(np.float32), outside


def _round(x: np.ndarray[Any, Any], mode: str) -> np.ndarray[Any, Any]:
    if mode == "floor":
        return np.floor(x)
    if mode == "ceil":
        return np.ceil(x)
    return np.ceil(x - 0.5) if mode == "round_prefer_floor" else np.floor(x + 0.5)


def _linear(distance: float) -> float:
    return max(0.0, 1.0 - abs(distance))


def _cubic(a: float) -> Callable[[float], float]:
    def kernel(distance: float) -> float:
        d = abs(distance)
        if d <= 1:
            return ((a + 2) * d - (a + 3)) * d * d + 1
        return (((d - 5) * d + 8) * d - 4) * a if d < 2 else 0.0

    return kernel


def _upsample(call: Call) -> Tensor:
    x, scales = call.tensor(0), [float(s) for s in call.ints(1)]
    for axis, scale in enumerate(scales):
        if not scale.is_integer():
            raise call.refuse(f"the scale {scale} is no whole number", fix="export with opset 13 or newer (Resize)")
        x = x.repeat_interleave(int(scale), axis) if scale != 1.0 else x
    return x


def _grid_sample(call: Call) -> Tensor:
    x, grid = call.tensor(0), call.tensor(1)
    mode = {
        "linear": "bilinear",
        "bilinear": "bilinear",
        "nearest": "nearest",
        "cubic": "bicubic",
        "bicubic": "bicubic",
    }
    chosen = mode[call.attr("mode", "linear")]
    if chosen == "bicubic" and x.dim() == 5:
        raise call.refuse("cubic interpolation in three dimensions")
    padding = call.attr("padding_mode", "zeros")
    return F.grid_sample(x, grid, chosen, padding, bool(call.attr("align_corners", 0)))


TABLE: dict[str, Callable[[Call], Any]] = {"Resize": _resize, "Upsample": _upsample, "GridSample": _grid_sample}
