"""Signal operators of ONNX: Fourier transforms, windows, mel weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmcompile.capture.onnx.values import CARRIERS, Call


def _dft(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = int(call.ints(2)[0]) if call.has(2) else call.attr("axis", 1 if call.opset < 20 else -2)
    rank = x.dim()
    axis = axis % rank if call.opset >= 20 else axis % (rank - 1) if axis < 0 else axis
    length = int(call.ints(1)[0]) if call.has(1) else None
    inverse, half = bool(call.attr("inverse", 0)), bool(call.attr("onesided", 0))
    wide = x.float() if x.dtype.itemsize < 4 else x
    if half and inverse:
        signal = torch.view_as_complex(wide.contiguous())
        return torch.fft.irfft(signal, length, axis).unsqueeze(-1).to(x.dtype)
    if half:
        return torch.view_as_real(torch.fft.rfft(wide.select(-1, 0), length, axis)).to(x.dtype)
    real = isinstance(x.shape[-1], int) and x.shape[-1] == 1
    signal = torch.complex(wide.select(-1, 0), torch.zeros_like(wide.select(-1, 0))) if real else _complex(wide)
    function = torch.fft.ifft if inverse else torch.fft.fft
    return torch.view_as_real(function(signal, length, axis)).to(x.dtype)


def _complex(x: Tensor) -> Tensor:
    return torch.complex(x.select(-1, 0), x.select(-1, 1))


def _stft(call: Call) -> Tensor:
    x, step = call.tensor(0), int(call.ints(1)[0])
    window = call.maybe(2)
    length = int(call.ints(3)[0]) if call.has(3) else int(window.shape[0]) if window is not None else 0
    if not length:
        raise call.refuse("it has neither a window nor a frame length")
    half = bool(call.attr("onesided", 1))
    is_real = x.dim() == 2 or (isinstance(x.shape[-1], int) and x.shape[-1] == 1)
    signal = (x if x.dim() == 2 else x.select(-1, 0)) if is_real else _complex(x)
    frames = signal.unfold(1, length, step)
    if window is not None:
        frames = frames * window
    if is_real and half:
        return torch.view_as_real(torch.fft.rfft(frames))
    return torch.view_as_real(torch.fft.fft(frames))


def _window(coefficients: Callable[[Tensor], Tensor]) -> Callable[[Call], Tensor]:
    def handler(call: Call) -> Tensor:
        size = int(call.ints(0)[0])
        period = size if call.attr("periodic", 1) else size - 1
        angle = 2.0 * math.pi * torch.arange(size, dtype=torch.float32) / period
        return coefficients(angle).to(CARRIERS[call.attr("output_datatype", 1)])

    return handler


def _mel(call: Call) -> Tensor:
    """Triangular filters between equally spaced points of the mel scale, on bins of the spectrum."""
    bins, length, rate = (int(call.ints(i)[0]) for i in range(3))
    low, high = (float(call.ints(i)[0]) for i in (3, 4))
    mel_low, mel_high = (2595.0 * math.log10(1.0 + f / 700.0) for f in (low, high))
    points = torch.arange(bins + 2, dtype=torch.float64) * ((mel_high - mel_low) / (bins + 2)) + mel_low
    edges = torch.floor((length + 1) * (700.0 * (10.0 ** (points / 2595.0) - 1.0)) / rate)
    weights = torch.zeros(length // 2 + 1, bins)
    for i in range(bins):
        left, centre, right = (int(edges[i + j]) for j in range(3))
        for j in range(left, centre + 1):
            weights[j, i] = 1.0 if centre == left else (j - left) / (centre - left)
        for j in range(centre, right):
            weights[j, i] = (right - j) / (right - centre)
    return weights.to(CARRIERS[call.attr("output_datatype", 1)])


TABLE: dict[str, Callable[[Call], Any]] = {
    "DFT": _dft,
    "STFT": _stft,
    "HannWindow": _window(lambda a: 0.5 - 0.5 * torch.cos(a)),
    "HammingWindow": _window(lambda a: 25.0 / 46.0 - 21.0 / 46.0 * torch.cos(a)),
    "BlackmanWindow": _window(lambda a: 0.42 - 0.5 * torch.cos(a) + 0.08 * torch.cos(2.0 * a)),
    "MelWeightMatrix": _mel,
}
