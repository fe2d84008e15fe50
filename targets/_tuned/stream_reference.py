"""A decode step in plain torch, for the tests and the error bound of the streamed kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.targets._tuned.stream_shape import StepShape


@dataclass(frozen=True)
class StepInputs:
    """What a step reads: int tensors as the runtime gives them, one token for each sequence.

    table: cosines and sines [positions, head_dim]. caches: [pages, kv_heads, page_size, 2 * head_dim] of each layer.
    start: [tokens, hidden], embeddings or the residual stream at the first layer of the launch.
    """

    start: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    table: Tensor
    caches: Sequence[Tensor]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)).to(x.dtype)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(x.dtype)


def run_step(
    shape: StepShape,
    weights: Mapping[tuple[str, int], Tensor],
    norms: Mapping[tuple[str, int], Tensor],
    inputs: StepInputs,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logits [tokens, vocabulary], or the residual stream [tokens, hidden], computed in ``dtype``.

    The new keys and values are written to ``inputs.caches`` (rounded to their dtype, and attended to as such).
    """
    d, hk = shape.head_dim, shape.kv_heads
    x = inputs.start.to(dtype)
    row = inputs.table[inputs.positions.long()].float()[:, None, :]
    cosines, sines = row.chunk(2, -1)
    for layer in range(shape.first, shape.end):
        y = F.linear(_norm(x, norms["input", layer], shape.eps), weights["qkv", layer].to(dtype))
        q, k, v = (p.view(len(x), -1, d) for p in y.split([shape.heads * d, hk * d, hk * d], -1))
        cache = inputs.caches[layer]
        new = torch.cat([_rotate(k, cosines, sines), v], -1).to(cache.dtype)
        attended = _attend(shape, _rotate(q, cosines, sines), new, cache, inputs)
        x = x + F.linear(attended.reshape(len(x), -1), weights["o", layer].to(dtype))
        y = F.linear(_norm(x, norms["after", layer], shape.eps), weights["gate_up", layer].to(dtype))
        gate, up = y.chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, weights["down", layer].to(dtype))
    if not shape.has_head:
        return x
    return F.linear(_norm(x, norms["final", shape.layers], shape.eps), weights["head", shape.layers].to(dtype))


def _attend(shape: StepShape, q: Tensor, new: Tensor, cache: Tensor, inputs: StepInputs) -> Tensor:
    """Insert ``new`` and attend: q [tokens, heads, d] -> the same shape."""
    out, size = torch.zeros_like(q), shape.page_size
    for b, slot in enumerate(inputs.slot_mapping.tolist()):
        length = int(inputs.seq_lens[b])
        if slot >= 0:
            cache[slot // size, :, slot % size] = new[b]
        if length <= 0:
            continue
        pages = inputs.block_table[b, : -(-length // size)].long()
        rows = cache[pages].transpose(1, 2).reshape(-1, shape.kv_heads, 2 * shape.head_dim)[:length].to(q.dtype)
        k, v = rows.transpose(0, 1).split(shape.head_dim, -1)
        query = q[b].view(shape.kv_heads, shape.group, -1)
        weights = torch.softmax((query @ k.transpose(1, 2)).float() * shape.head_dim**-0.5, -1).to(q.dtype)
        out[b] = (weights @ v).reshape(shape.heads, -1)
    return out
