"""Attention and RotaryEmbedding of ONNX (opset 23 on)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.values import CARRIERS, Call


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def _attention(call: Call) -> Any:
    q, k, v = call.tensor(0), call.tensor(1), call.tensor(2)
    flat = q.dim() == 3
    if flat:
        q = _split_heads(q, call.attr("q_num_heads"))
        k, v = (_split_heads(x, call.attr("kv_num_heads")) for x in (k, v))
    past = call.tensor(4).shape[2] if call.has(4) else 0
    if call.has(4):
        k, v = torch.cat([call.tensor(4), k], 2), torch.cat([call.tensor(5), v], 2)
    present = k, v
    scale = call.attr("scale")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    windows = call.attr("left_window_size", -1), call.attr("right_window_size", -1)
    special = call.attr("softcap", 0.0) or call.has(6) or call.wants(3) or max(windows) >= 0
    special = special or (call.attr("is_causal", 0) and (call.has(3) or call.has(4)))
    short = call.has(3) and call.tensor(3).shape[-1] != k.shape[2]
    if special or short:
        y, scores = _spell_out(call, q, k, v, scale, past)
    else:
        y, scores = _built_in(call, q, k, v, scale), None
    if flat:
        y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], y.shape[1] * y.shape[3])
    return (y, *present, scores)[: len(call.step.outputs)]


def _built_in(call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    mask = call.maybe(3)
    grouped = q.shape[1] != k.shape[1]
    causal = bool(call.attr("is_causal", 0))
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


def _find_bias(call: Call, q: Tensor, k: Tensor, past: Any) -> Tensor | None:
    """What is added to the scores: mask, causality, window, padding; minus infinity where a key is hidden."""
    lowest, zero = torch.tensor(-math.inf, dtype=q.dtype), torch.tensor(0.0, dtype=q.dtype)
    queries, keys = q.shape[2], k.shape[2]
    bias: Tensor | None = None
    if call.has(3):
        bias = call.tensor(3)
        missing = keys - bias.shape[-1]
        bias = torch.where(bias, zero, lowest) if bias.dtype == torch.bool else bias
        bias = bias if missing == 0 else F.pad(bias, [0, missing], value=-math.inf)
    lengths = call.tensor(6).reshape(-1, 1, 1, 1) if call.has(6) else None
    offset = lengths - queries if lengths is not None and not call.has(4) else past
    place = torch.arange(queries)[:, None] + offset
    key = torch.arange(keys)[None]
    left, right = call.attr("left_window_size", -1), call.attr("right_window_size", -1)
    hidden = []
    if call.attr("is_causal", 0):
        hidden.append(key > place)
    if left >= 0:
        hidden.append(place - key > left)
    if right >= 0:
        hidden.append(key - place > right)
    if lengths is not None:
        hidden.append(key >= lengths)
    for condition in hidden:
        more = torch.where(condition, lowest, zero)
        bias = more if bias is None else bias + more
    return bias


def _spell_out(call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float, past: Any) -> tuple[Tensor, Tensor]:
    """Products and softmax one by one, rounding where the standard's function body rounds."""
    bias = _find_bias(call, q, k, past)
    repeats = q.shape[1] // k.shape[1]
    if repeats != 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    root = math.sqrt(scale)
    scores = torch.matmul(q * root, k.transpose(-1, -2) * root)
    mode, cap = call.attr("qk_matmul_output_mode", 0), call.attr("softcap", 0.0)
    shown = scores
    if cap:
        scores = torch.tanh(scores / cap) * cap
    shown = scores if mode == 1 else shown
    scores = scores if bias is None else scores + bias
    shown = scores if mode == 2 else shown
    precision = call.attr("softmax_precision")
    wide = scores.to(CARRIERS[precision]) if precision else scores
    weights = torch.softmax(wide, -1)
    if bias is not None:
        nothing = torch.isneginf(torch.amax(bias, -1, keepdim=True))
        weights = torch.where(nothing, torch.zeros_like(weights), weights)
    shown = weights.to(q.dtype) if mode == 3 else shown
    return torch.matmul(weights.to(q.dtype), v), shown


def _rotary(call: Call) -> Tensor:
    """Rotation of [batch, heads, tokens, d] or [batch, tokens, heads * d] by cached cosines and sines."""
    x, cos, sin = call.tensor(0), call.tensor(1), call.tensor(2)
    shape = x.shape
    if x.dim() == 3:
        heads = call.attr("num_heads")
        x = x.reshape(shape[0], shape[1], heads, shape[2] // heads).transpose(1, 2)
    if call.has(3):
        cos, sin = (F.embedding(call.tensor(3), table) for table in (cos, sin))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = call.attr("rotary_embedding_dim", 0) or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if call.attr("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], -1)
        y = turned * torch.cat([cos, cos], -1) + half * torch.cat([sin, sin], -1)
    y = torch.cat([y, rest], -1) if width != x.shape[-1] else y
    return y if len(shape) == 4 else y.transpose(1, 2).reshape(shape)


TABLE: dict[str, Callable[[Call], Any]] = {"Attention": _attention, "RotaryEmbedding": _rotary}
