"""Weights of a decode step in the order in which its kernel reads them, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmcompile.targets._tuned.stream_shape import TILE_ROWS, WARPS, StepPlan, StepShape

LAYER_ROLES = ("qkv", "o", "gate_up", "down")
"""Projections of a layer in the order of the stream; "qkv" rows are [q | k | v], "gate_up" rows [gate | up]."""


def order_rows(shape: StepShape, role: str) -> Tensor:
    """int64: for each row in the order of the stream (program, then tile, then row), its row in the weight.

    q, k and v: a KV head's programs hold its group's heads, every pair of rows one RoPE pair. gate_up: pairs of gate
    and up. The rest in natural order.
    """
    if role == "gate_up":
        return torch.arange(2 * shape.intermediate).view(2, -1).t().reshape(-1)
    if role != "qkv":
        return torch.arange(StepPlan(shape).tiles[role] * TILE_ROWS * shape.programs)
    d, half = shape.head_dim, shape.head_dim // 2
    first_k, first_v = shape.heads * d, (shape.heads + shape.kv_heads) * d
    rows = []
    for kv in range(shape.kv_heads):
        heads = [(kv * shape.group + j) * d for j in range(shape.group)] + [first_k + kv * d, first_v + kv * d]
        for head in heads:
            start = torch.arange(head, head + half)
            rows.append(torch.stack([start, start + half], 1).reshape(-1))
    return torch.cat(rows)


def _view(shape: StepShape, role: str, chunks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a weight in the order of rows, and the permutation of its dimensions to the order of the stream.

    Dimensions: program, tile, row, warp, chunk, 32 columns, lane's quarter, 8 columns. "down" goes through its chunks
    outermost, as all its sums fit registers; the others through their tiles.
    """
    plan = StepPlan(shape)
    sizes = (shape.programs, plan.tiles[role], TILE_ROWS, WARPS, chunks, shape.warp_k // 32, 4, 8)
    outer = (4, 1) if role == "down" else (1, 4)
    return sizes, (*outer, 0, 3, 5, 2, 6, 7)


def pack_projection(shape: StepShape, role: str, weight: Tensor) -> Tensor:
    """bf16 [rows, k] -> uint8 [stages, bytes]; rows of "head" that are missing are zeros."""
    order = order_rows(shape, role).to(weight.device)
    if len(order) > len(weight):
        weight = torch.cat([weight, weight.new_zeros(len(order) - len(weight), weight.shape[1])])
    sizes, permutation = _view(shape, role, StepPlan(shape).chunks[role])
    rows = weight[order] if role in ("qkv", "gate_up") else weight
    packed = rows.view(sizes).permute(permutation).contiguous()
    return packed.view(packed.shape[0] * packed.shape[1], -1).view(torch.uint8)


def unpack_projection(shape: StepShape, role: str, packed: Tensor) -> Tensor:
    """The inverse of ``pack_projection``: bf16 [rows of whole tiles, k]."""
    sizes, permutation = _view(shape, role, StepPlan(shape).chunks[role])
    back = sorted(range(8), key=permutation.__getitem__)
    rows = packed.view(torch.bfloat16).view([sizes[p] for p in permutation]).permute(back)
    rows = rows.reshape(sizes[0] * sizes[1] * sizes[2], -1)
    out = torch.empty_like(rows)
    out[order_rows(shape, role).to(rows.device)] = rows
    return out


def pack_stream(shape: StepShape, weights: Mapping[tuple[str, int], Tensor]) -> Tensor:
    """The whole stream of a launch, uint8 [stages, bytes of a stage].

    weights: bf16 by (role, layer), roles of ``LAYER_ROLES`` for each layer of the launch, and ("head", layers) if it
    has one.
    """
    plan = StepPlan(shape)
    roles = [(role, layer) for layer in range(shape.first, shape.end) for role in LAYER_ROLES]
    if shape.has_head:
        roles.append(("head", shape.layers))
    any_weight = weights[roles[0]]
    width = plan.stream_bytes // plan.stages
    stream = torch.empty((plan.stages, width), dtype=torch.uint8, device=any_weight.device)
    at = 0
    for role, layer in roles:
        packed = pack_projection(shape, role, weights[role, layer])
        stream[at : at + len(packed)] = packed
        at += len(packed)
    assert at == plan.stages
    return stream


def unpack_stream(shape: StepShape, stream: Tensor) -> dict[tuple[str, int], Tensor]:
    """The inverse of ``pack_stream``; "head" has the rows of whole tiles."""
    plan, weights, at = StepPlan(shape), {}, 0
    roles = [(role, layer) for layer in range(shape.first, shape.end) for role in LAYER_ROLES]
    if shape.has_head:
        roles.append(("head", shape.layers))
    for role, layer in roles:
        stages = plan.tiles[role] * plan.chunks[role]
        weights[role, layer] = unpack_projection(shape, role, stream[at : at + stages])
        at += stages
    return weights


def pack_norms(shape: StepShape, norms: Mapping[tuple[str, int], Tensor]) -> Tensor:
    """bf16 [2 * layers of the launch + 1, hidden]: by ("input" | "after", layer), then ("final", layers) or zeros."""
    rows = [norms[role, layer] for layer in range(shape.first, shape.end) for role in ("input", "after")]
    rows.append(norms["final", shape.layers] if shape.has_head else torch.zeros_like(rows[0]))
    return torch.stack(rows)
