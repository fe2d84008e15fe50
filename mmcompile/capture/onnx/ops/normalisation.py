"""Normalisations of ONNX, in the spelling that the standardise passes know from PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.values import CARRIERS, Call


def _stash(call: Call, x: Tensor) -> torch.dtype:
    return CARRIERS[call.attr("stash_type", 1)]


def _layer_norm(call: Call) -> Any:
    x, weight, bias = call.tensor(0), call.tensor(1), call.maybe(2)
    axis, eps = call.attr("axis", -1) % x.dim(), call.attr("epsilon", 1e-5)
    shape = list(x.shape[axis:])
    fits = all(isinstance(s, int) for s in shape) and list(weight.shape) == shape
    if fits and not call.wants(1) and (bias is None or list(bias.shape) == shape):
        return F.layer_norm(x, shape, weight, bias, eps)
    axes = list(range(axis, x.dim()))
    wide = x.to(_stash(call, x))
    mean = wide.mean(axes, keepdim=True)
    centred = wide - mean
    inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    y = (centred * inverse).to(x.dtype) * weight
    return (y if bias is None else y + bias), mean, inverse


def _rms_norm(call: Call) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps)`` in fp32, rounded, then scaled: as Llama's RMSNorm in transformers."""
    x, weight = call.tensor(0), call.tensor(1)
    axes = list(range(call.attr("axis", -1) % x.dim(), x.dim()))
    wide = x.to(_stash(call, x))
    normed = wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + call.attr("epsilon", 1e-5))
    return weight * normed.to(x.dtype)


def _over_channels(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.reshape([1, -1] + [1] * (x.dim() - 2))


def _batch_norm(call: Call) -> Any:
    x, scale, bias, mean, variance = call.tensors()
    eps = call.attr("epsilon", 1e-5)
    if not call.attr("training_mode", 0):
        if x.dtype == scale.dtype == mean.dtype and x.dim() > 1:
            return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, eps)
        y = (x.float() - _over_channels(mean.float(), x)) * torch.rsqrt(_over_channels(variance.float(), x) + eps)
        return (y * _over_channels(scale.float(), x) + _over_channels(bias.float(), x)).to(x.dtype)
    momentum = call.attr("momentum", 0.9)
    axes = [i for i in range(x.dim()) if i != 1]
    now = x.mean(axes)
    spread = ((x - _over_channels(now, x)) ** 2).mean(axes)
    y = (x - _over_channels(now, x)) * torch.rsqrt(_over_channels(spread, x) + eps)
    y = y * _over_channels(scale, x) + _over_channels(bias, x)
    return y, mean * momentum + now * (1 - momentum), variance * momentum + spread * (1 - momentum)


def _instance_norm(call: Call) -> Tensor:
    x, scale, bias = call.tensors()
    axes = list(range(2, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + call.attr("epsilon", 1e-5))
    return y * _over_channels(scale, x) + _over_channels(bias, x)


def _group_norm(call: Call) -> Tensor:
    x, scale, bias = call.tensors()
    groups, eps = call.attr("num_groups"), call.attr("epsilon", 1e-5)
    if call.opset < 21:  # one scale a group until opset 20, one a channel since
        scale, bias = (p.repeat_interleave(x.shape[1] // groups) for p in (scale, bias))
    return F.group_norm(x, groups, scale, bias, eps)


def _lrn(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attr("size")
    before = (size - 1) // 2
    squares = F.pad((x * x).movedim(1, -1), [before, size - 1 - before])
    total = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (call.attr("bias", 1.0) + call.attr("alpha", 1e-4) / size * total) ** call.attr("beta", 0.75)


def _mean_variance(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.attr("axes", [0, 2, 3])
    mean = x.mean(axes, keepdim=True)
    deviation = torch.sqrt((x * x).mean(axes, keepdim=True) - mean * mean)
    return (x - mean) / (deviation + 1e-9)


def _dropout(call: Call) -> Any:
    """Inference: nothing is dropped. Training with a ratio other than 0 draws random numbers and is refused."""
    x = call.tensor(0)
    training = call.has(2) and bool(call.host(2).reshape(-1)[0])
    ratio = float(call.host(1).reshape(-1)[0]) if call.has(1) else 0.5
    if training and ratio:
        raise call.refuse("it draws random numbers (training_mode)", fix="export the model for inference")
    return (x, torch.ones_like(x, dtype=torch.bool)) if call.wants(1) else x


TABLE: dict[str, Callable[[Call], Any]] = {
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "LRN": _lrn,
    "MeanVarianceNormalization": _mean_variance,
    "Dropout": _dropout,
}
