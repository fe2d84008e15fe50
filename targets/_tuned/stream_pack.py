"""Weights of a decode step in the order in which its kernel reads them, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmcompile.core.formats.nvfp4_fragments import arrange
from mmcompile.core.stream import WARPS, Arrangement, order_heads, order_pairs
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_shape import StepShape

Weight = Tensor | tuple[Tensor, Tensor, Tensor]
LAYER_ROLES = ("qkv", "o", "gate_up", "down")
"""Projections of a layer in the order of the stream; "qkv" rows are [q | k | v], "gate_up" rows [gate | up]."""


def order_rows(shape: StepShape, role: str) -> Tensor:
    """int64: for each row in the order of the stream (program, then tile, then row), its row in the weight.

    q, k and v: a KV head's programs hold its group's heads, every pair of rows one RoPE pair. gate_up: pairs of gate
    and up. The rest in natural order.
    """
    if role == "gate_up":
        return order_pairs(2 * shape.intermediate)
    if role == "qkv":
        return order_heads(shape.heads, shape.kv_heads, shape.head_dim)
    plan = StepPlan(shape)
    return torch.arange(plan.tiles[role] * plan.tile_rows * shape.programs)


def arrange_role(shape: StepShape, role: str) -> Arrangement:
    """How a bf16 projection lies in the stream.

    "down" goes through its chunks outermost, as all its sums fit registers; the others through their tiles.
    """
    plan = StepPlan(shape)
    heads = (shape.heads, shape.kv_heads, shape.head_dim) if role == "qkv" else None
    return Arrangement(
        shape.programs, plan.tiles[role], plan.chunks[role], shape.warp_k, role == "down", role == "gate_up", heads
    )


def pack_projection(shape: StepShape, role: str, weight: Weight) -> Tensor:
    """bf16 [rows, k], or (packed, scale, ...) of nvfp4 -> uint8 [bytes]; rows of "head" that are missing are zeros."""
    if not isinstance(weight, Tensor):
        return _pack_codes(shape, role, *weight[:2])
    return arrange_role(shape, role).arrange(weight)


def _fill_tiles(shape: StepShape, role: str, rows: Tensor) -> Tensor:
    """Rows of a weight in the order of the stream, every program's last tile filled with zeros: [programs, rows, ...].

    The rows of "head" go to the programs in whole tiles.
    """
    plan = StepPlan(shape)
    each = plan.tiles[role] * plan.tile_rows
    if role == "head":
        missing = each * shape.programs - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]).view(shape.programs, each, *rows.shape[1:])
    order = order_rows(shape, role)[: plan.rows[role] * shape.programs].to(rows.device)
    own = rows[order].view(shape.programs, plan.rows[role], *rows.shape[1:])
    missing = own.new_zeros(shape.programs, each - plan.rows[role], *rows.shape[1:])
    return torch.cat([own, missing], 1)


def _pack_codes(shape: StepShape, role: str, packed: Tensor, scale: Tensor) -> Tensor:
    """nvfp4: units of 2048 bytes of codes and 256 of scales in the order (stage, program, warp, unit of the stage)."""
    plan = StepPlan(shape)
    tiles, chunks = plan.tiles[role], plan.chunks[role]
    parts = []
    for tensor, size in ((packed, 2048), (scale.view(torch.uint8), 256)):
        filled = _fill_tiles(shape, role, tensor).flatten(0, 1).contiguous()
        turned = arrange(filled if size == 2048 else filled.view(torch.float8_e4m3fn), "float16")
        parts.append(turned.view(torch.uint8).view(shape.programs, tiles, WARPS, chunks, size))
    units = torch.cat(parts, -1)
    inner = units.permute(3, 1, 0, 2, 4) if role == "down" else units.permute(1, 3, 0, 2, 4)
    stages = inner.reshape(-1, plan.joined[role], shape.programs, WARPS, plan.unit_bytes)
    return stages.permute(0, 2, 3, 1, 4).reshape(-1)


def pack_gains(shape: StepShape, weights: Mapping[tuple[str, int], Weight]) -> Tensor:
    """fp32: the factor of every row of nvfp4 weights in the order of the stream, layer after layer, then of "head".

    It holds the rows' global scales and what the kernel leaves out: codes and activations are scaled by powers of two.
    """
    roles = list_roles(shape)
    rows = [_fill_tiles(shape, role, weights[role, layer][2].float()).reshape(-1) for role, layer in roles]
    return torch.cat(rows) * 2.0**20


def unpack_projection(shape: StepShape, role: str, packed: Tensor) -> Tensor:
    """The inverse of ``pack_projection`` for bf16: [rows of whole tiles, k]."""
    return arrange_role(shape, role).restore(packed)


def list_roles(shape: StepShape) -> list[tuple[str, int]]:
    """(role, layer) of the projections of a launch in the order of its stream."""
    roles = [(role, layer) for layer in range(shape.first, shape.end) for role in LAYER_ROLES]
    return [*roles, ("head", shape.layers)] if shape.has_head else roles


def pack_stream(shape: StepShape, weights: Mapping[tuple[str, int], Weight]) -> Tensor:
    """The whole stream of a launch, uint8 [bytes].

    weights: by (role, layer), roles of ``LAYER_ROLES`` for each layer of the launch, and ("head", layers) if it has
    one: bf16 [rows, k], or for nvfp4 (packed uint8 [rows, k/2], scale float8_e4m3fn [rows, k/16], global scale [rows]).
    """
    stream, at = None, 0
    for role, layer in list_roles(shape):
        packed = pack_projection(shape, role, weights[role, layer])
        if stream is None:
            stream = torch.empty(StepPlan(shape).stream_bytes, dtype=torch.uint8, device=packed.device)
        stream[at : at + len(packed)] = packed
        at += len(packed)
    assert stream is not None and at == len(stream)
    return stream


def unpack_stream(shape: StepShape, stream: Tensor) -> dict[tuple[str, int], Tensor]:
    """The inverse of ``pack_stream`` for bf16; "head" has the rows of whole tiles."""
    plan, weights, at = StepPlan(shape), {}, 0
    for role, layer in list_roles(shape):
        size = plan.tiles[role] * plan.chunks[role] * shape.programs * WARPS * plan.unit_bytes
        weights[role, layer] = unpack_projection(shape, role, stream[at : at + size])
        at += size
    return weights


def pack_norms(shape: StepShape, norms: Mapping[tuple[str, int], Tensor]) -> Tensor:
    """bf16 [2 * layers of the launch + 1, hidden]: by ("input" | "after", layer), then ("final", layers) or zeros."""
    rows = [norms[role, layer] for layer in range(shape.first, shape.end) for role in ("input", "after")]
    rows.append(norms["final", shape.layers] if shape.has_head else torch.zeros_like(rows[0]))
    return torch.stack(rows)
