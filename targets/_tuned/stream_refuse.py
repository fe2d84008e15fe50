"""Which decode steps can be one launch."""

from __future__ import annotations

from mmcompile.core.spec import Architecture
from mmcompile.core.stream import TILE_ROWS, WARPS
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_shape import MULTIPROCESSORS, THREADS, StepShape


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
    return _refuse_attention(s) or refuse_columns(s) or _refuse_rows(s)


def refuse_columns(s: StepShape) -> str | None:
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
