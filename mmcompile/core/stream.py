"""What the streamed decode step of a target and the runtime agree on: the order of its weights, and its fault record.

The stream is all weights of a step in the order in which every program's warps read them (targets/_tuned/stream_*.py).
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mmcompile.core.plan import Mode, Plan, Schedule
from mmcompile.core.schedule import MERGED_PHASE

WARPS = 8
TILE_ROWS = 8
"""Rows of weights (or tokens of the cache) that one MMA multiplies: its N."""
FAULT_WORD = 16
"""Word of the workspace of the fault record: 1 + 8 * layer + stage, then the program; 0 = none."""
STAGES = ("residual", "qkv", "attention", "residual after attention", "activation", "head", "program", "ring")
"""Names of the stages in a fault record: whose values the program waited for ("ring": its own copies)."""
LINEAR = "linear"
_TAG = re.compile(r"stream_(natural|pairs|heads(\d+)x(\d+)x(\d+))_(\d+)x(\d+)x(\d+)x(\d+)(_across)?_([0-9a-f]{8})")


@dataclass(frozen=True)
class Arrangement:
    """Order of a bf16 weight [rows, k] in the stream.

    Rows go to ``programs`` in whole tiles of 8, ``tiles`` to each, missing ones as zeros; columns to the 8 warps, in
    ``chunks`` of ``warp_k`` for each. Every warp reads tile by tile, all chunks of each; ``across``: chunk by chunk,
    all tiles of each. Rows come in their natural order; ``pairs``: row i of the first half, then row i of the second;
    ``heads`` (query heads, KV heads, head_dim) of [q | k | v]: the heads of a KV head's group together, every pair of
    rows one RoPE pair.
    """

    programs: int
    tiles: int
    chunks: int
    warp_k: int
    across: bool = False
    pairs: bool = False
    heads: tuple[int, int, int] | None = None

    @property
    def tag(self) -> str:
        """The layout's name in a plan. It ends with a digest of the order, so that another order is no silent one."""
        rows = "heads{}x{}x{}".format(*self.heads) if self.heads else "pairs" if self.pairs else "natural"
        sizes = f"{self.programs}x{self.tiles}x{self.chunks}x{self.warp_k}"
        return f"stream_{rows}_{sizes}{'_across' if self.across else ''}_{_digest(self)}"

    @property
    def rows(self) -> int:
        """Rows with those of zeros."""
        return self.programs * self.tiles * TILE_ROWS

    @property
    def nbytes(self) -> int:
        """Size of the arranged weight."""
        return 2 * self.rows * WARPS * self.chunks * self.warp_k

    def order_rows(self) -> Tensor:
        """int64 [rows]: for each row in the order of the stream (program, then tile, then row), its row in the weight.

        A weight with fewer rows has zeros from its end on.
        """
        if self.pairs:
            return order_pairs(self.rows)
        return torch.arange(self.rows) if self.heads is None else order_heads(*self.heads)

    def _turn(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the ordered rows, and the permutation of its dimensions to the order of the stream.

        Dimensions: program, tile, row, warp, chunk, 32 columns, lane's quarter, 8 columns.
        """
        sizes = (self.programs, self.tiles, TILE_ROWS, WARPS, self.chunks, self.warp_k // 32, 4, 8)
        return sizes, (*((4, 1) if self.across else (1, 4)), 0, 3, 5, 2, 6, 7)

    def arrange(self, weight: Tensor) -> Tensor:
        """bf16 [rows, k] -> uint8 [nbytes]; fewer rows are filled up with zeros. ValueError for any other weight."""
        k = WARPS * self.chunks * self.warp_k
        if weight.dtype != torch.bfloat16 or weight.dim() != 2 or weight.shape[1] != k or len(weight) > self.rows:
            raise ValueError(f"the layout {self.tag} is for bf16 [{self.rows}, {k}], not {list(weight.shape)}")
        missing = self.rows - len(weight)
        if missing:
            weight = torch.cat([weight, weight.new_zeros(missing, k)])
        if self.pairs or self.heads:
            weight = weight[self.order_rows().to(weight.device)]
        sizes, permutation = self._turn()
        return weight.reshape(sizes).permute(permutation).contiguous().view(-1).view(torch.uint8)

    def restore(self, packed: Tensor) -> Tensor:
        """The inverse of ``arrange``: bf16 [rows, k]."""
        sizes, permutation = self._turn()
        back = sorted(range(8), key=permutation.__getitem__)
        rows = packed.view(torch.bfloat16).view([sizes[p] for p in permutation]).permute(back).reshape(self.rows, -1)
        out = torch.empty_like(rows)
        out[self.order_rows().to(rows.device)] = rows
        return out


def order_pairs(rows: int) -> Tensor:
    """int64 [rows]: row i of the first half, then row i of the second."""
    return torch.arange(rows).view(2, -1).t().reshape(-1)


def order_heads(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """int64 [rows of q, k and v]: a KV head's group together, every pair of rows one RoPE pair."""
    half, group = head_dim // 2, heads // kv_heads
    first_k, first_v = heads * head_dim, (heads + kv_heads) * head_dim
    rows = []
    for kv in range(kv_heads):
        starts = [(kv * group + j) * head_dim for j in range(group)]
        for head in [*starts, first_k + kv * head_dim, first_v + kv * head_dim]:
            start = torch.arange(head, head + half)
            rows.append(torch.stack([start, start + half], 1).reshape(-1))
    return torch.cat(rows)


@cache
def _digest(arrangement: Arrangement) -> str:
    order = arrangement.order_rows().numpy().tobytes()
    return hashlib.sha256(order + repr(arrangement._turn()).encode()).hexdigest()[:8]


def parse_tag(tag: str) -> Arrangement | None:
    """The arrangement of a layout's tag; None if it is none, or was made of another order than it has here."""
    found = _TAG.fullmatch(tag)
    if found is None:
        return None
    heads, kv_heads, head_dim, programs, tiles, chunks, warp_k = (int(n) if n else 0 for n in found.groups()[1:8])
    arrangement = Arrangement(
        programs, tiles, chunks, warp_k, across=bool(found[9]), pairs=found[1] == "pairs",
        heads=(heads, kv_heads, head_dim) if found[2] else None,
    )  # fmt: skip
    whole = arrangement.nbytes and (
        not found[2] or (kv_heads and (heads + 2 * kv_heads) * head_dim == arrangement.rows)
    )
    if not whole:
        return None
    return arrangement if found[10] == _digest(arrangement) else None


def arrange_part(weight: Tensor, layout: str) -> Tensor:
    """The bytes of a weight in a layout, "linear" or an arrangement's tag; raises ValueError for an unknown one."""
    if layout == LINEAR:
        return weight.contiguous().view(-1).view(torch.uint8)
    arrangement = parse_tag(layout)
    if arrangement is None:
        raise ValueError(f"no weight has the layout {layout!r}")
    return arrangement.arrange(weight)


def count_copied(plan: Plan) -> int:
    """Bytes of weights that a device holds a second time to run the plan as its schedules say."""
    phase = plan.phases.get(MERGED_PHASE)
    streams = [s.stream for s in phase.schedules if s.mode == "stream" and s.stream is not None] if phase else []
    return max((stream.bytes for stream in streams), default=0)


def _find_mode(schedule: Schedule) -> Mode:
    """The mode of a schedule without its stream."""
    others: tuple[Mode, ...] = ("standalone", "step")
    kept = schedule.mode != "stream"
    return schedule.mode if kept else min(others, key=lambda mode: schedule.seconds.get(mode, math.inf))


def drop_streams(plan: Plan) -> Plan:
    """The plan without streamed steps and their buffers, for where none runs; the general merged launches stay."""
    phase = plan.phases.get(MERGED_PHASE)
    streams = [s.stream for s in phase.schedules if s.stream is not None] if phase else []
    if phase is None or not streams:
        return plan
    schedules = tuple(s.model_copy(update={"stream": None, "mode": _find_mode(s)}) for s in phase.schedules)
    phases = plan.phases | {MERGED_PHASE: phase.model_copy(update={"schedules": schedules})}
    kernels = {stream.record.kernel for stream in streams}
    return plan.model_copy(
        update={
            "phases": phases,
            "buffers": {name: buffer for name, buffer in plan.buffers.items() if not buffer.parts},
            "kernels": {name: kernel for name, kernel in plan.kernels.items() if name not in kernels},
        }
    )
