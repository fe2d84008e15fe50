"""Pieces of Triton text that several phases of the streamed step are made of."""

from __future__ import annotations

from mmcompile.targets._kernels.common import ceil_div
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_shape import THREADS, TRACED, StepShape


def call_assembly(name: str, arguments: str, results: int, kind: str = "tl.float32") -> str:
    """A call of inline assembly with several results."""
    types = kind if results == 1 else "(" + ", ".join([kind] * results) + ")"
    return f"tl.inline_asm_elementwise({name}, {name}_C, [{arguments}], dtype={types}, is_pure=False, pack=1)"


def as_tuple(call: str, results: int) -> str:
    """The call as a tuple also where there is one result."""
    return f"({call},)" if results == 1 else call


def tile_sizes(shape: StepShape, role: str) -> str:
    """Arguments of run_tiles: tiles of a batch, chunks of columns, units in a stage."""
    plan = StepPlan(shape)
    return f"{plan.batch_tiles[role]}, {plan.chunks[role]}, {plan.joined[role]}"


def load_gain(shape: StepShape, name: str, role: str, row: str) -> list[str]:
    """For nvfp4: the factor of a row of the program, loaded ahead of its use."""
    plan = StepPlan(shape)
    if not plan.packed:
        return []
    each = plan.tiles[role] * plan.tile_rows
    first = (shape.end - shape.first) * plan.gains["end"] if role == "head" else plan.gains[role]
    layer = "" if role == "head" else f" + (layer - FIRST) * {plan.gains['end']}"
    return [f"{name} = tl.load(gains + {first} + program * {each}{layer} + {row})"]


def apply_gains(shape: StepShape, *gains: str) -> list[str]:
    """Multiply sums by their gains: pairs (value, gain) as "value gain"."""
    pairs = [pair.split() for pair in gains]
    return [f"{value} *= {gain}" for value, gain in pairs] if StepPlan(shape).packed else []


def count_rounds(count: int) -> range:
    """Rounds of one element a thread for ``count`` elements."""
    return range(ceil_div(count, THREADS))


def write_stamp(shape: StepShape, number: str) -> list[str]:
    """The time at the end of a phase, where the shape asks for it."""
    plan = StepPlan(shape)
    place = f"workspace + {plan.workspace['trace']} + 2 * (program * {plan.trace_stamps} + {number})"
    return [f"run(STAMP, STAMP_C, [{place} + tid * 0])"] if shape.trace else []


def stamp_layer(shape: StepShape, phase: int) -> list[str]:
    """The time at the end of a phase of the layer, numbered as in ``TRACED``."""
    return write_stamp(shape, f"(layer - FIRST) * {len(TRACED)} + {phase}")


def load_norms(shape: StepShape, name: str, row: str) -> list[str]:
    """Load a norm's weights into tuples, ahead of their use."""
    plan = StepPlan(shape)
    chunks, results = plan.load_chunks["qkv"], 2 * plan.load_chunks["qkv"] * max(1, shape.warp_k // 128)
    lines = []
    for c in range(plan.chunks["qkv"] // chunks):
        place = f"norms + ({row}) * HIDDEN + warp * (HIDDEN // WARPS) + {c * chunks * shape.warp_k} + column"
        lines.append(f"{name}{c} = {call_assembly('LOAD_WEIGHTS', place, results, 'tl.int32')}")
    return lines


def poll_residual(shape: StepShape, mailbox: str, name: str, code: str) -> list[str]:
    """The residual stream times the norm's weights to shared memory, and the squares."""
    plan, tokens = StepPlan(shape), shape.max_tokens
    chunks, weights = plan.load_chunks["qkv"], 2 * plan.load_chunks["qkv"] * max(1, shape.warp_k // 128)
    lines = []
    for c in range(plan.chunks["qkv"] // chunks):
        source = f"workspace + MAIL_{mailbox.upper()} + {c * chunks * shape.warp_k} + warp * (HIDDEN // WARPS) + column"
        into = f"x_warp + x_column + {c * chunks * tokens * plan.x_stride}"
        norm = ", ".join(f"{name}{c}[{i}]" for i in range(weights))
        call = call_assembly(
            "POLL_RESIDUAL", f"{source}, tag + tid * 0, workspace + tid * 0, {code} + tid * 0, {into}, {norm}", tokens
        )
        lines.append(f"new = {as_tuple(call, tokens)}")
        for b in range(tokens):
            lines.append(f"square{b} = new[{b}]" if c == 0 else f"square{b} += new[{b}]")
    squares = ", ".join(f"square{b}" for b in range(tokens))
    lines.append(f"run(STORE_SQUARES, STORE_SQUARES_C, [base + SQUARES + warp * 4, {squares}])")
    return lines


def add_residual(shape: StepShape, role: str, mailbox: str, tag: str) -> list[str]:
    """Add the sums in scratch memory to the owners' residual stream and post it."""
    plan = StepPlan(shape)
    each, rows = plan.tiles[role] * plan.tile_rows, plan.rows[role]
    return [
        "tl.debug_barrier()",
        f"sums_at = scratch + (tl.minimum(own_token, MAX_TOKENS - 1) * {each} + tid % {rows}) * 4",
        f"total = add_warps(sums_at, {each * shape.max_tokens * 4})",
        *apply_gains(shape, f"total gain_{role}"),
        "residual = round_bf16(residual + total)",
        f"post(workspace + MAIL_{mailbox.upper()} + own, word(residual, {tag}), owner)",
        "state = flip(state)",
    ]
