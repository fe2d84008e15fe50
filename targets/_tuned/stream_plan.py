"""Numbers of a decode step in one launch that follow from its shape: stream, memory, code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mmcompile.core.stream import TILE_ROWS, WARPS
from mmcompile.targets._kernels.common import ceil_div, next_power_of_two
from mmcompile.targets._tuned.stream_shape import HEADER_WORDS, PRIVATE_OFFSET, SHARED_BYTES, THREADS, TRACED, StepShape


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of ``n`` that is at most ``limit`` (at least 1)."""
    return next(d for d in range(max(1, min(n, limit)), 0, -1) if n % d == 0)


@dataclass(frozen=True)
class StepPlan:
    """Numbers that follow from a shape: tiles and stages, shared memory in bytes, workspace in 4-byte words."""

    shape: StepShape

    @cached_property
    def chunks(self) -> dict[str, int]:
        """Columns of each projection in pieces of ``warp_k`` for each warp."""
        s, slice_k = self.shape, WARPS * self.shape.warp_k
        return {"qkv": s.hidden // slice_k, "o": s.heads * s.head_dim // slice_k, "gate_up": s.hidden // slice_k,
                "down": s.intermediate // slice_k, "head": s.hidden // slice_k}  # fmt: skip

    @cached_property
    def packed(self) -> bool:
        """True for nvfp4: weights are the A operand of the MMA, 16 rows a tile, and a stage is two units."""
        return self.shape.weight_format == "nvfp4"

    @cached_property
    def folded(self) -> bool:
        """True if a tile's columns come in two halves: tokens are columns 0 to 3 of the MMA, and again 4 to 7."""
        return self.shape.folded and not self.packed and self.shape.max_tokens <= 4

    @cached_property
    def tile_rows(self) -> int:
        """Rows of weights of one tile."""
        return 16 if self.packed else TILE_ROWS

    @cached_property
    def rows(self) -> dict[str, int]:
        """Rows of each projection in one program."""
        s = self.shape
        counts = {"qkv": (s.heads + 2 * s.kv_heads) * s.head_dim, "o": s.hidden, "gate_up": 2 * s.intermediate,
                  "down": s.hidden, "head": s.vocabulary or 0}  # fmt: skip
        return {name: ceil_div(count, s.programs) for name, count in counts.items()}

    @cached_property
    def tiles(self) -> dict[str, int]:
        """Tiles of each projection in one program, the last one filled with zeros."""
        tiles = {name: ceil_div(rows, self.tile_rows) for name, rows in self.rows.items()}
        if self.packed and self.chunks["head"] == 1:
            tiles["head"] += tiles["head"] % 2
        return tiles

    @cached_property
    def joined(self) -> dict[str, int]:
        """Units (a tile by ``warp_k`` columns of each warp) in one stage: two of nvfp4 where that comes out even."""
        result = dict.fromkeys(self.tiles, 1)
        for name, tiles in self.tiles.items() if self.packed else ():
            chunks = self.chunks[name]
            inner, outer = (tiles, chunks) if name == "down" else (chunks, tiles)
            result[name] = 2 if inner % 2 == 0 or (inner == 1 and outer % 2 == 0) else 1
        return result

    @cached_property
    def batch_tiles(self) -> dict[str, int]:
        """Tiles between two barriers: their sums fit the scratch memory and few rounds of one element a thread."""
        b, tiles = self.shape.max_tokens, self.tiles
        wide = {"qkv": tiles["qkv"], "o": tiles["o"], "down": tiles["down"]}
        limits = {"gate_up": 2 * THREADS, "head": 2 * THREADS} if b > 1 else {"gate_up": 1 << 20, "head": 224}
        for name, limit in limits.items():
            step = 2 if self.joined[name] == 2 and self.chunks[name] == 1 else 1
            most = max(1, limit // (self.tile_rows * b * step))
            wide[name] = step * largest_divisor(tiles[name] // step or 1, most)
        return wide

    @cached_property
    def stages_of(self) -> dict[str, int]:
        """Stages of each projection."""
        return {name: self.tiles[name] * self.chunks[name] // self.joined[name] for name in self.tiles}

    @cached_property
    def layer_stages(self) -> int:
        """Stages of weights of one layer."""
        return sum(self.stages_of[name] for name in ("qkv", "o", "gate_up", "down"))

    @cached_property
    def head_stages(self) -> int:
        """Stages of the output projection."""
        return self.stages_of["head"] if self.shape.has_head else 0

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of one unit of weights of a warp."""
        return self.shape.warp_k * (9 if self.packed else 2 * TILE_ROWS)

    @cached_property
    def stage_bytes(self) -> int:
        """Most bytes of one warp's part of a stage of weights: one bulk copy."""
        return self.unit_bytes * max(self.joined.values())

    @cached_property
    def prefetch(self) -> tuple[int, ...]:
        """The shape's, where all stages are alike."""
        return (0,) * 5 if self.packed else self.shape.prefetch

    @cached_property
    def unit_tokens(self) -> int:
        """Tokens of the cache in one stage of a warp: 16 where they fit 4 KB, else 8."""
        return 16 if 16 * 4 * self.shape.head_dim <= 4096 else 8

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a ring slot of one warp."""
        return max(self.stage_bytes, self.unit_tokens * 4 * self.shape.head_dim)

    @cached_property
    def splits(self) -> int:
        """Most parts of one sequence's attention."""
        return self.shape.team // next_power_of_two(self.shape.max_tokens)

    @cached_property
    def part_tokens(self) -> int:
        """Fewest tokens of a part: what lets all programs of a team attend at 1024 tokens, and few parts be merged."""
        return self.shape.part_tokens or {1: 128, 2: 256}.get(self.shape.max_tokens, 64 * self.shape.max_tokens)

    @cached_property
    def merged_parts(self) -> int:
        """Parts of a sequence's attention that one poll of the output projection reads."""
        return min(8, self.splits, max(1, 16 // (max(1, self.shape.warp_k // 128) * self.chunks["o"])))

    @cached_property
    def merged_tokens(self) -> int:
        """Tokens that this poll reads: at most 16 vectors a thread."""
        vectors = max(1, self.shape.warp_k // 128) * self.chunks["o"] * self.merged_parts
        return largest_divisor(self.shape.max_tokens, max(1, 16 // vectors))

    @cached_property
    def load_chunks(self) -> dict[str, int]:
        """Chunks of activations that one poll reads: at most 16 vectors a thread, and all that "down" keeps at once."""
        vectors = max(1, self.shape.warp_k // 128) * self.shape.max_tokens
        limit = max(1, 16 // vectors)
        chunks = {name: largest_divisor(self.chunks[name], limit) for name in ("qkv", "down")}
        if self.across == 2 and chunks["down"] > 1:
            chunks["down"] = 2 * largest_divisor(self.chunks["down"] // 2, limit // 2)
        return chunks

    @cached_property
    def across(self) -> int:
        """Chunks of columns that a stage of "down" takes in: two where two units of one tile are joined."""
        return self.joined["down"] if self.tiles["down"] == 1 else 1

    @cached_property
    def held_chunks(self) -> int:
        """Chunks of activations of "down" that are in shared memory at once."""
        return max(self.load_chunks["down"], self.across)

    @cached_property
    def x_stride(self) -> int:
        """Bytes from one token's activations to the next: padded, so that no two lanes of a load share a bank."""
        return 2 * self.shape.warp_k + 64

    @cached_property
    def x_chunks(self) -> int:
        """Chunks of activations in shared memory."""
        return max(self.chunks["qkv"], self.chunks["o"], self.held_chunks)

    @cached_property
    def q_stride(self) -> int:
        """Bytes from one head of q, k and v to the next in shared memory."""
        return 2 * self.shape.head_dim + 64

    @cached_property
    def _partial_bytes(self) -> int:
        """Size of one warp's attention result: numerators, then (maximum, sum) of 8 heads."""
        return self.shape.group * self.shape.head_dim * 4 + 64

    @cached_property
    def partials_in_x(self) -> bool:
        """True if they fit behind the activations of the output projection."""
        room = (self.x_chunks - self.chunks["o"]) * self.shape.max_tokens * self.x_stride
        return room >= self._partial_bytes

    @cached_property
    def partial_stride(self) -> int:
        """Bytes from one warp's attention result to the next."""
        return self.x_chunks * self.shape.max_tokens * self.x_stride if self.partials_in_x else self._partial_bytes

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes of one of the two scratch buffers: sums of 8 warps, or their attention results."""
        rows = self.tile_rows * max(self.batch_tiles.values())
        sums = WARPS * self.shape.max_tokens * rows * 4
        return sums if self.partials_in_x else max(sums, WARPS * self._partial_bytes)

    @cached_property
    def shared(self) -> dict[str, int]:
        """First byte of each area of shared memory."""
        s = self.shape
        sizes = {"barriers": WARPS * 8 * 8, "dead": 64, "squares": 8 * WARPS * 4, "pointers": 8 * s.layers,
                 "qkv": (s.group + 2) * self.q_stride, "zeros": max(2 * s.warp_k, 2 * s.head_dim),
                 "x": WARPS * self.x_chunks * s.max_tokens * self.x_stride,
                 "scratch": 2 * self.scratch_bytes, "ring": 0}  # fmt: skip
        places, at = {}, PRIVATE_OFFSET
        for name, size in sizes.items():
            places[name] = at
            at += ceil_div(size, 128) * 128
        return places

    @cached_property
    def slots(self) -> int:
        """Ring slots of each warp, 6 at most: more do not pay."""
        return min(6, (SHARED_BYTES - self.shared["ring"]) // (WARPS * self.slot_bytes))

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        return self.shared["ring"] + WARPS * self.slots * self.slot_bytes

    @cached_property
    def workspace(self) -> dict[str, int]:
        """First word of each mailbox; "end" is the size. Zeros at first, then the kernel's own."""
        s, b = self.shape, self.shape.max_tokens
        parts, width = b * self.splits, s.heads * s.head_dim
        sizes = {"header": HEADER_WORDS, "residual": b * s.hidden, "after": b * s.hidden,
                 "qkv": b * (s.heads + 2 * s.kv_heads) * s.head_dim, "parts": parts * width,
                 "weights": 2 * parts * s.heads, "activation": b * s.intermediate,
                 "trace": 2 * s.programs * self.trace_stamps if s.trace else 0, "end": 0}  # fmt: skip
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += ceil_div(size, 32) * 32
        return places

    @cached_property
    def period(self) -> int:
        """Launches in which no tag comes twice: the workspace must be zero again before the next one.

        A tag has 16 bits and counts layers. Words of attention's parts are left alone while contexts are short, so an
        old one could be taken for the value of a step that has the same tag.
        """
        return 65535 // (self.shape.layers + 1)

    @cached_property
    def trace_stamps(self) -> int:
        """Times of one program: ``TRACED`` for each layer, two for the head."""
        return len(TRACED) * (self.shape.end - self.shape.first) + 2

    @cached_property
    def layer_units(self) -> int:
        """Units of one layer."""
        return sum(self.tiles[name] * self.chunks[name] for name in ("qkv", "o", "gate_up", "down"))

    @cached_property
    def units(self) -> int:
        """Units of the stream of this launch."""
        head = self.tiles["head"] * self.chunks["head"] if self.shape.has_head else 0
        return self.layer_units * (self.shape.end - self.shape.first) + head

    @cached_property
    def stream_bytes(self) -> int:
        """Size of the stream."""
        return self.units * self.shape.programs * WARPS * self.unit_bytes

    @cached_property
    def gains(self) -> dict[str, int]:
        """First of the factors of each projection's rows in those of a layer; "end" is their number."""
        places, at = {}, 0
        for name in ("qkv", "o", "gate_up", "down", "end"):
            places[name] = at
            at += self.shape.programs * self.tiles.get(name, 0) * self.tile_rows
        return places
