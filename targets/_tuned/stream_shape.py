"""Shape of a decode step in one launch, what it can be, and the numbers that stream, memory and code follow from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mmcompile.core.spec import Architecture
from mmcompile.targets._kernels.common import ceil_div, next_power_of_two

WARPS = 8
THREADS = 32 * WARPS
TILE_ROWS = 8
"""Rows of weights (or tokens of the cache) that one MMA multiplies: its N."""
SHARED_BYTES = 232448
"""Dynamic shared memory of one program on sm_90: 227 KB, so one program on each multiprocessor."""
PRIVATE_OFFSET = 1024
"""First byte of the shared memory that the inline assembly keeps for itself; Triton's own must end before it."""
MULTIPROCESSORS = {"sm_90a": 132}
FAULT_WORD = 16
"""Word of the workspace of the fault record: 1 + 8 * layer + stage, then the program; 0 = none."""
STAGES = ("residual", "qkv", "attention", "residual after attention", "activation", "head", "program", "ring")
"""Names of the stages in a fault record: whose values the program waited for ("ring": its own copies)."""
TRACED = ("residual read", "q, k, v", "q, k, v read", "attention", "parts merged", "o", "residual again", "gate, up",
          "activation read", "down")  # fmt: skip
"""What has just been done at the times of a trace, layer by layer; then the same of the head: read, done."""
_HEADER_WORDS = 64


@dataclass(frozen=True)
class StepShape:
    """A decode step, or a range of its layers, of a dense decoder with grouped-query attention and SwiGLU.

    Attributes:
        vocabulary: rows of the output projection; None: the launch ends with the residual stream.
        cache_dtype: torch's name. weight_format: "bf16" or "nvfp4" (see ``core/formats/nvfp4_fragments.py``, flavour
            float16). max_tokens: rows that every launch computes, 1 to 8.
        programs: blocks of the launch, all resident. first, last: layers of this launch (last None = the final one);
            a launch that does not reach the final layer ends with the residual stream.
        warp_k: columns of the weights in one stage of a warp's stream; smaller ones are for tests.
        prefetch: how many stages of weights beyond those in flight the L2 is asked for: always; and before a program
            waits for q, k, v; for attention; for the residual after attention; for the activation.
        prefetch_lines: bytes that one prefetch instruction brings, 64 or 128; 0: in bulk copies of a warp's part.
        part_tokens: tokens of context for each part of a sequence's attention, more in long contexts.
        trace: write the time of every phase of every layer to the workspace, for measurements.
        spin_limit: polls after which a wait gives up and writes the fault record.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int | None
    eps: float = 1e-5
    page_size: int = 16
    cache_dtype: str = "bfloat16"
    weight_format: str = "bf16"
    max_tokens: int = 1
    programs: int = 128
    first: int = 0
    last: int | None = None
    warp_k: int = 256
    prefetch: tuple[int, int, int, int, int] = (0, 2, 4, 4, 0)
    prefetch_lines: int = 0
    part_tokens: int | None = None
    trace: bool = False
    spin_limit: int = 2_000_000

    @property
    def end(self) -> int:
        """The layer after the last of this launch."""
        return self.layers if self.last is None else self.last + 1

    @property
    def has_head(self) -> bool:
        """True if the launch ends with logits."""
        return self.vocabulary is not None and self.end == self.layers

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def team(self) -> int:
        """Programs that share one KV head."""
        return self.programs // self.kv_heads


def refuse_stream(shape: StepShape, architecture: Architecture) -> str | None:
    """None if ``emit_stream`` can serve the shape, else the reason in one clause."""
    s = shape
    if architecture.name not in MULTIPROCESSORS:
        return f"it is made for {', '.join(MULTIPROCESSORS)}, not {architecture.name}"
    if s.programs > MULTIPROCESSORS[architecture.name]:
        return f"{s.programs} programs cannot be resident at once on {MULTIPROCESSORS[architecture.name]} processors"
    if s.weight_format not in ("bf16", "nvfp4") or s.cache_dtype != "bfloat16":
        return f"weights in {s.weight_format} with a cache in {s.cache_dtype}: bf16 and nvfp4 with bfloat16 are written"
    if not 1 <= s.max_tokens <= TILE_ROWS:
        return f"{s.max_tokens} tokens, and one MMA holds 1 to {TILE_ROWS}"
    if not 0 <= s.first < s.end <= s.layers:
        return f"layers {s.first} to {s.end - 1} of {s.layers}"
    return _refuse_attention(s) or _refuse_columns(s) or _refuse_rows(s)


def _refuse_columns(s: StepShape) -> str | None:
    """Every warp gets the same number of whole stages of columns."""
    slice_k = WARPS * s.warp_k
    if s.weight_format == "nvfp4" and s.warp_k != 256:
        return f"warp_k = {s.warp_k}, and the tiles of nvfp4 have 256 columns"
    if s.warp_k not in (32, 64) and s.warp_k % 128:
        return f"warp_k = {s.warp_k} is not 32, 64 or a multiple of 128"
    for name, k in (("hidden", s.hidden), ("heads * head_dim", s.heads * s.head_dim), ("intermediate", s.intermediate)):
        if k % slice_k:
            return f"{name} = {k} is not a multiple of {slice_k}, the columns of one stage"
    if s.warp_k < 128 and s.heads * s.head_dim != slice_k:
        return f"warp_k = {s.warp_k} needs heads * head_dim = {slice_k}"
    return None


def _refuse_attention(s: StepShape) -> str | None:
    if s.head_dim not in (64, 128):
        return f"head_dim {s.head_dim}, not 64 or 128"
    if s.heads % s.kv_heads or s.group > TILE_ROWS:
        return f"{s.heads} heads on {s.kv_heads} KV heads: at most {TILE_ROWS} for each"
    if s.programs % s.kv_heads:
        return f"{s.programs} programs are not a multiple of {s.kv_heads} KV heads"
    if s.max_tokens > s.team:
        return f"{s.max_tokens} sequences, and {s.team} programs for each KV head"
    if s.page_size % 16:
        return f"pages of {s.page_size} tokens, not a multiple of 16"
    return None


def _refuse_rows(s: StepShape) -> str | None:
    """Every program gets the same number of whole tiles of each projection, and one residual element a thread."""
    counts = {"q, k and v": (s.heads + 2 * s.kv_heads) * s.head_dim, "hidden": s.hidden, "gate": 2 * s.intermediate}
    for name, rows in counts.items():
        whole = 16 if s.weight_format == "nvfp4" and name == "gate" else TILE_ROWS
        if rows % (s.programs * whole):
            return f"the {rows} rows of {name} are not whole tiles of {whole} for {s.programs} programs"
    if s.hidden // s.programs * s.max_tokens > THREADS:
        return f"{s.hidden // s.programs} residual rows of {s.max_tokens} tokens in a program, at most {THREADS} in all"
    plan = StepPlan(s)
    if plan.layer_stages <= plan.stages_of["qkv"] + plan.slots:
        return f"a layer has {plan.layer_stages} stages, too few for a ring of {plan.slots}"
    if plan.slots < 3:
        return f"shared memory holds {plan.slots} stages of the stream, 3 are needed"
    return None


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
        return {name: largest_divisor(self.chunks[name], limit) for name in ("qkv", "down")}

    @cached_property
    def x_stride(self) -> int:
        """Bytes from one token's activations to the next: padded, so that no two lanes of a load share a bank."""
        return 2 * self.shape.warp_k + 64

    @cached_property
    def x_chunks(self) -> int:
        """Chunks of activations in shared memory."""
        return max(self.chunks["qkv"], self.chunks["o"], self.load_chunks["down"])

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
        sizes = {"header": _HEADER_WORDS, "residual": b * s.hidden, "after": b * s.hidden,
                 "qkv": b * (s.heads + 2 * s.kv_heads) * s.head_dim, "parts": parts * width,
                 "weights": 2 * parts * s.heads, "activation": b * s.intermediate,
                 "trace": 2 * s.programs * self.trace_stamps if s.trace else 0, "end": 0}  # fmt: skip
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += ceil_div(size, 32) * 32
        return places

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
