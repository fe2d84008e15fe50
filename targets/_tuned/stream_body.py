"""Triton text of the streamed step's entry point, phase by phase."""

from __future__ import annotations

import textwrap

from mmcompile.targets._tuned.stream_attention import part_vectors
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_shape import THREADS, StepShape
from mmcompile.targets._tuned.stream_text import (
    add_residual,
    apply_gains,
    call_assembly,
    count_rounds,
    load_gain,
    load_norms,
    poll_residual,
    stamp_layer,
    tile_sizes,
    write_stamp,
)


def write_body(shape: StepShape) -> str:
    """Statements of the entry point, indented."""
    layer = [
        _write_qkv(shape),
        _write_attention(shape),
        _write_output(shape),
        _write_gate_up(shape),
        _write_down(shape),
    ]
    parts = [_write_start(shape), "for layer in range(FIRST, END):", textwrap.indent("\n".join(layer), "    ")]
    parts += [_write_head(shape) if shape.has_head else _write_residual(shape)]
    parts.append("if program == 0:\n    tl.store(workspace, epoch + 1)")
    return textwrap.indent("\n".join(parts), "    ")


def _write_start(shape: StepShape) -> str:
    plan, rows = StepPlan(shape), shape.hidden // shape.programs
    token = "lane // 4 % 4" if plan.folded else "lane // 4"
    offset = f"lane % 4 * {32 if plan.packed else 16}" + (" + lane // 16 * 8" if plan.folded else "")
    zeros = max(2 * shape.warp_k, 2 * shape.head_dim)
    lines = [
        "program = tl.program_id(0)", "tid = tl.arange(0, 32 * WARPS)", "warp, lane = tid // 32, tid % 32",
        "base = run(BASE, BASE_C, [tid])", "base = tl.max(base, 0) + tid * 0  # Triton declares its shared memory",
        "zero = (tid * 0).to(tl.float32)", "none = program * 0", "member, team = program % TEAM, program // TEAM",
        "longest = none",
    ]  # fmt: skip
    for i in range(shape.max_tokens):
        lines.append(f"longest = tl.maximum(longest, tl.load(seq_lens + {i}, mask={i} < tokens, other=0))")
    per = plan.part_tokens
    lines += [
        f"splits = tl.minimum(tl.maximum((longest + {per - 1}) // {per}, 1), {plan.splits})",
        "cfg = (stream, block_table, seq_lens, workspace, tokens, max_blocks, splits, program, member, team, tid,"
        " base)",
        "run(SET_UP, SET_UP_C, [base + BARRIERS + warp * (8 * SLOTS)])",
        'run("st.shared.b32 [$1], 0; mov.b32 $0, 0;", "=r,r", [base + DEAD])',
        f'run("st.shared.b32 [$1], 0; mov.b32 $0, 0;", "=r,r", [base + ZEROS + tid * 4 % {zeros}])',
    ]
    for i in range(shape.first, shape.end):
        value = f"cache_{i}.to(tl.int64) + tid.to(tl.int64) * 0"
        lines.append(f'run("st.shared.b64 [$1], $2; mov.b32 $0, 0;", "=r,r,l", [base + POINTERS + {8 * i}, {value}])')
    lines += [
        "tl.debug_barrier()",
        "sequence, first, end, stages, length, part, busy = find_work(none + FIRST, member, splits, seq_lens, tokens)",
        "state = (none, none, none + FIRST, none, none, sequence, first, end, stages, length, part, busy, none, none)",
        "for i in range(SLOTS):",
        "    state = leave_slot(state, cfg)",
        f"state = (none, none, {', '.join(f'state[{i}]' for i in range(2, 13))}, none)",
        "epoch = tl.load(workspace, volatile=True)",
        f"x_warp = base + X + warp * {plan.x_chunks * shape.max_tokens * plan.x_stride}",
        f"live = {token} < MAX_TOKENS",
        f"x = tl.where(live, x_warp + {token} * X_STRIDE, base + ZEROS) + {offset}",
        "x_step = tl.where(live, MAX_TOKENS * X_STRIDE, 0)",
        f"column = lane * 4 % {shape.warp_k}",
        f"x_column = {'column // 8 * 16 + column // 4 % 2 * 4' if plan.folded else 'column * 2'}",
        "q = tl.where(lane // 4 < GROUP, base + HEADS_PLACE + lane // 4 * Q_STRIDE, base + ZEROS) + lane % 4 * 16",
        f"own_row, own_token = program * {rows} + tid % {rows}, tid // {rows}",
        f"owner = tid < {rows * shape.max_tokens}", "given = owner & (own_token < tokens)",
        "own = own_token * HIDDEN + own_row",
    ]  # fmt: skip
    if shape.first == 0:
        lines.append("token = tl.load(input_ids + own_token, mask=given, other=0).to(tl.int64)")
        lines.append("residual = tl.load(embedding + token * HIDDEN + own_row, mask=given, other=0.0).to(tl.float32)")
    else:
        lines.append("start = residual")
        lines.append("residual = tl.load(start + own, mask=given, other=0.0).to(tl.float32)")
    lines.append(f"tag = (epoch * {shape.layers + 1} + FIRST + 1) & 0xFFFF")
    lines.append("post(workspace + MAIL_RESIDUAL + own, word(residual, tag), owner)")
    return "\n".join([*lines, *_write_tables(shape), *load_norms(shape, "entry", "0")])


def _write_tables(shape: StepShape) -> list[str]:
    """What each thread's RoPE pairs need, the same in every layer."""
    pairs, half = StepPlan(shape).rows["qkv"] // 2, shape.head_dim // 2
    lines = []
    for r in count_rounds(pairs * shape.max_tokens):
        lines += [
            f"turn{r} = tid + {THREADS * r}", f"token{r} = turn{r} // {pairs}",
            f"pair = member * {pairs} + turn{r} % {pairs}",
            f"head, dim = pair // {half}, pair % {half}", f"valid{r} = turn{r} < {pairs * shape.max_tokens}",
            f"here = valid{r} & (token{r} < tokens)", "rotary = here & (head <= GROUP)",
            f"angle = tl.load(positions + token{r}, mask=here, other=0).to(tl.int64) * HEAD_DIM + dim",
            f"cos{r} = tl.load(table + angle, mask=rotary, other=1.0).to(tl.float32)",
            f"sin{r} = tl.load(table + angle + {half}, mask=rotary, other=0.0).to(tl.float32)",
            f"slot = tl.load(slot_mapping + token{r}, mask=here, other=-1)",
            f"stored{r} = here & (head >= GROUP) & (slot >= 0)",
            "slot = ((slot // PAGE * KV_HEADS + team) * PAGE + slot % PAGE) * (2 * HEAD_DIM)",
            f"place{r} = (slot + tl.where(head > GROUP, HEAD_DIM, 0) + dim) * 2",
            f"word{r} = (token{r} * KV_HEADS + team) * {(shape.group + 2) * shape.head_dim} + head * HEAD_DIM + dim",
        ]  # fmt: skip
    return lines


def _write_qkv(shape: StepShape) -> str:
    plan, pairs = StepPlan(shape), StepPlan(shape).rows["qkv"] // 2
    lines = [f"tag = (epoch * {shape.layers + 1} + layer + 1) & 0xFFFF", "code = layer * 8 + 1"]
    lines += load_norms(shape, "after", "(layer - FIRST) * 2 + 1")
    for r in count_rounds(pairs * shape.max_tokens):
        lines += load_gain(shape, f"even{r}", "qkv", f"turn{r} % {pairs} * 2")
        lines += load_gain(shape, f"odd{r}", "qkv", f"turn{r} % {pairs} * 2 + 1")
    lines += [*poll_residual(shape, "residual", "entry", "code"), *stamp_layer(shape, 0)]
    lines += run_batch(shape, "qkv")
    row = plan.tiles["qkv"] * plan.tile_rows * 4
    for r in count_rounds(pairs * shape.max_tokens):
        lines += [
            f"asked = tl.minimum(token{r}, MAX_TOKENS - 1)",
            f"sums_at = scratch + asked * {row} + turn{r} % {pairs} * 8",
            f"even, odd = add_pairs(sums_at, {row * shape.max_tokens})",
            "rstd = find_rstd(cfg, asked)",
            *apply_gains(shape, f"even even{r}", f"odd odd{r}"),
            "even, odd = round_bf16(even * rstd), round_bf16(odd * rstd)",
            f"real, imaginary = even * cos{r} - odd * sin{r}, odd * cos{r} + even * sin{r}",
            f"post(workspace + MAIL_QKV + word{r}, word(real, tag), valid{r})",
            f"post(workspace + MAIL_QKV + HEAD_DIM // 2 + word{r}, word(imaginary, tag), valid{r})",
            f"target = read_pointer(base + POINTERS + 8 * layer) + place{r}",
            f"tl.store(target.to(tl.pointer_type(tl.bfloat16)), real.to(tl.bfloat16), mask=stored{r})",
            "target = (target + HEAD_DIM).to(tl.pointer_type(tl.bfloat16))",
            f"tl.store(target, imaginary.to(tl.bfloat16), mask=stored{r})",
        ]
    lines += ["state = flip(state)", *stamp_layer(shape, 1)]
    return "\n".join([*lines, f"state = ask_l2(state, cfg, {StepPlan(shape).prefetch[1]})"])


def _write_attention(shape: StepShape) -> str:
    plan, d, numbers = StepPlan(shape), shape.head_dim, 2 + shape.head_dim // 4
    words = (shape.group + 2) * d
    # The stage that is copied next is of this layer still: what it attends to is in the state.
    lines = [
        f"{name} = state[{i}]"
        for i, name in enumerate(("sequence", "first", "end", "stages", "length", "part", "busy"), 5)
    ]
    inner = []
    for r in count_rounds(words // 4):
        inner += [
            f"four = (tid + {THREADS * r}) % {words // 4} * 4",
            f"mail_at = workspace + MAIL_QKV + (sequence * KV_HEADS + team) * {words} + four",
            "heads_at = base + HEADS_PLACE + four // HEAD_DIM * Q_STRIDE + four % HEAD_DIM * 2",
            "poll(POLL_HEADS, POLL_HEADS_C, cfg, mail_at, tag, code + 1, heads_at)",
        ]
    state = ", ".join(f"sums[{i}]" for i in range(numbers))
    scale = shape.head_dim**-0.5 * 1.4426950408889634  # scores in base 2
    place = "area, q, base + HEADS_PLACE + GROUP * Q_STRIDE, base + HEADS_PLACE + (GROUP + 1) * Q_STRIDE"
    inner += [
        "tl.debug_barrier()",
        *stamp_layer(shape, 2),
        f"sums = (zero - 1e30, {', '.join(['zero'] * (numbers - 1))})",
        "for i in range(stages):",
        "    area = await_slot(state, cfg, code + 7)",
        "    unit = first + i * WARPS + warp",
        "    index = tl.where(unit < end, length - 1 - unit * UNIT, -1)",
        "    limit = index + 1",
        f"    sums = {call_assembly('ATTEND', f'{place}, limit, index, zero + {scale!r}, {state}', numbers)}",
        "    state = leave_slot(state, cfg)",
        f"scratch = {_find_partials(shape)}",
        f"run(STORE_PART, STORE_PART_C, [scratch + warp * {plan.partial_stride}, {state}])",
        "tl.debug_barrier()",
        "mail = sequence * SPLITS + part",
    ]
    for r in count_rounds(shape.group * d):
        inner += [
            f"spot = tid + {THREADS * r}",
            f"valid, head = spot < {shape.group * d}, tl.minimum(spot // HEAD_DIM, GROUP - 1)",
            "value, weight = read_pair(MERGE_WARPS, MERGE_WARPS_C, [scratch, head, head * HEAD_DIM + spot % HEAD_DIM])",
            "mail_at = workspace + MAIL_PARTS + (mail * KV_HEADS + team) * (GROUP * HEAD_DIM) + spot",
            "post(mail_at, word(value, tag), valid)",
            "mail_at = workspace + MAIL_WEIGHTS + 2 * (mail * HEADS + team * GROUP + head)",
            "chosen = (valid & (spot % HEAD_DIM == 0)).to(tl.int32)",
            "run(POST_PAIR, POST_PAIR_C, [mail_at, weight.to(tl.int32, bitcast=True), tag + tid * 0, chosen])",
        ]
    body = textwrap.indent("\n".join(inner).replace("SPLITS", str(plan.splits)), "    ")
    lines += ["if busy:", body, *stamp_layer(shape, 3)]
    return "\n".join([*lines, f"state = ask_l2(state, cfg, {StepPlan(shape).prefetch[2]})"])


def _find_partials(shape: StepShape) -> str:
    """Where the warps' attention results go: behind the output projection's activations, else the scratch buffer that
    it will not write to."""
    plan = StepPlan(shape)
    if plan.partials_in_x:
        return f"base + X + {plan.chunks['o'] * shape.max_tokens * plan.x_stride}"
    return "base + SCRATCH + (1 - state[13]) * SCRATCH_BYTES"


def _write_output(shape: StepShape) -> str:
    plan, width = StepPlan(shape), shape.heads * shape.head_dim
    tokens, parts = plan.merged_tokens, plan.merged_parts
    count = 6 * len(part_vectors(shape, tokens))
    lines = load_gain(shape, "gain_o", "o", f"tid % {plan.rows['o']}")
    lines += [f"spots = warp * {width // 8} + column"]
    for b in range(0, shape.max_tokens, tokens):
        words = f"workspace + MAIL_PARTS + {b * plan.splits * width} + from_part * {width} + spots"
        weights = (
            f"workspace + MAIL_WEIGHTS + {2 * b * plan.splits * shape.heads} + from_part * (2 * HEADS) "
            "+ spots // HEAD_DIM * 2"
        )
        start = ", ".join("zero - 1e30" if i % 6 == 0 else "zero" for i in range(count))
        state = ", ".join(f"sums[{i}]" for i in range(count))
        common = "tag + tid * 0, workspace + tid * 0, code + 2 + tid * 0, splits - from_part + tid * 0"
        lines += [
            f"sums = ({start})",
            f"for from_part in range(0, splits, {parts}):",
            f"    sums = {call_assembly('MERGE_PARTS', f'{words}, {weights}, {common}, {state}', count)}",
            f"run(FINISH_PARTS, FINISH_PARTS_C, [x_warp + x_column + {b * plan.x_stride}, {state}])",
        ]
    lines += [
        *stamp_layer(shape, 4),
        "scratch = find_scratch(state, cfg)",
        f"state = run_tiles(state, cfg, code + 7, x, x_step, scratch, {tile_sizes(shape, 'o')})",
        *add_residual(shape, "o", "after", "tag"),
        *stamp_layer(shape, 5),
        *load_norms(shape, "entry", "(layer - FIRST) * 2 + 2"),
        f"state = ask_l2(state, cfg, {StepPlan(shape).prefetch[3]})",
    ]
    return "\n".join(lines)


def run_batch(shape: StepShape, role: str) -> list[str]:
    """Statements that bring the sums of a batch of tiles to the scratch area, for all threads."""
    return [
        "scratch = find_scratch(state, cfg)",
        f"state = run_tiles(state, cfg, code + 7, x, x_step, scratch, {tile_sizes(shape, role)})",
        "tl.debug_barrier()",
    ]


def _write_gate_up(shape: StepShape) -> str:
    plan = StepPlan(shape)
    tiles = plan.batch_tiles["gate_up"]
    batches, per = plan.tiles["gate_up"] // tiles, tiles * plan.tile_rows // 2
    inner = []
    for r in count_rounds(per * shape.max_tokens):
        inner += load_gain(shape, f"even{r}", "gate_up", f"(batch * {per} + (tid + {THREADS * r}) % {per}) * 2")
        inner += load_gain(shape, f"odd{r}", "gate_up", f"(batch * {per} + (tid + {THREADS * r}) % {per}) * 2 + 1")
    inner += run_batch(shape, "gate_up")
    for r in count_rounds(per * shape.max_tokens):
        inner += [
            f"turn = tid + {THREADS * r}", f"asked = tl.minimum(turn // {per}, MAX_TOKENS - 1)",
            f"sums_at = scratch + asked * {per * 8} + turn % {per} * 8",
            f"gate, up = add_pairs(sums_at, {per * 8 * shape.max_tokens})",
            *apply_gains(shape, f"gate even{r}", f"up odd{r}"),
            "rstd = find_rstd(cfg, asked)", "gate, up = round_bf16(gate * rstd), round_bf16(up * rstd)",
            "active = gate / (1.0 + tl.exp(-gate)) * up",
            f"into = asked * {shape.intermediate} + program * {plan.rows['gate_up'] // 2}",
            f"into += batch * {per} + turn % {per}",
            f"post(workspace + MAIL_ACTIVATION + into, word(active, tag), turn < {per * shape.max_tokens})",
        ]  # fmt: skip
    inner.append("state = flip(state)")
    lines = [*poll_residual(shape, "after", "after", "code + 3"), *stamp_layer(shape, 6)]
    lines += [f"for batch in range({batches}):", textwrap.indent("\n".join(inner), "    ")]
    return "\n".join([*lines, *stamp_layer(shape, 7), f"state = ask_l2(state, cfg, {StepPlan(shape).prefetch[4]})"])


def _write_down(shape: StepShape) -> str:
    plan = StepPlan(shape)
    tiles, held, chunks = plan.tiles["down"], plan.held_chunks, plan.load_chunks["down"]
    source = f"workspace + MAIL_ACTIVATION + warp * {shape.intermediate // 8} + column + block * {held * shape.warp_k}"
    lines = load_gain(shape, "gain_down", "down", f"tid % {plan.rows['down']}")
    four = plan.packed or plan.folded
    count = 4 if four else 2
    sums = [[f"down{t}{c}" for c in "abcd"[:count]] for t in range(tiles)]
    lines += [f"{name} = zero" for names in sums for name in names]
    lines += [
        f"for block in range({plan.chunks['down'] // held}):",
        *(f"    {_poll_activation(shape, source, first)}" for first in range(0, held, chunks)),
        *(f"    {line}" for line in stamp_layer(shape, 8)),
    ]
    lines += [f"    for chunk in range(0, {held}, {plan.across}):", "        at = x + chunk * x_step"]
    lines += [f"        {line}" for line in (_multiply_units if four else _multiply_rows)(shape, sums)]
    lines.append("scratch = find_scratch(state, cfg)")
    for t, names in enumerate(sums):
        values = f"({', '.join(names)})" if four else ", ".join(names)
        lines.append(f"keep(cfg, scratch, {tiles * plan.tile_rows}, {t}, {values})")
    return "\n".join([*lines, *add_residual(shape, "down", "residual", "tag + 1"), *stamp_layer(shape, 9)])


def _poll_activation(shape: StepShape, source: str, first: int) -> str:
    """Read chunks of activations from number ``first`` on of those that are held at once."""
    place = first * shape.max_tokens * StepPlan(shape).x_stride
    words = f"{source} + {first * shape.warp_k}, tag, code + 4, x_warp + x_column + {place}"
    return f"poll(POLL_ACTIVATION, POLL_ACTIVATION_C, cfg, {words})"


def _multiply_rows(shape: StepShape, sums: list[list[str]]) -> list[str]:
    """One stage for each tile of a chunk."""
    return [f"state, {a}, {b} = multiply(state, cfg, code + 7, at, {a}, {b})" for a, b in sums]


def _multiply_units(shape: StepShape, sums: list[list[str]]) -> list[str]:
    """The units of a chunk, or of two chunks where one tile's are joined, stage by stage."""
    joined, lines = StepPlan(shape).joined["down"], []
    units = [(names, "at") for names in sums]
    if len(sums) == 1 and joined == 2:
        units.append((sums[0], "at + x_step"))
    for n, (names, x) in enumerate(units):
        if n % joined == 0:
            lines.append("area = await_slot(state, cfg, code + 7)")
        values = ", ".join(names)
        place = f"area + {n % joined} * UNIT_BYTES"
        lines.append(f"{values} = multiply({place}, cfg, {x}, ({values}))")
        if n % joined == joined - 1:
            lines.append("state = leave_slot(state, cfg)")
    return lines


def _write_head(shape: StepShape) -> str:
    plan = StepPlan(shape)
    tiles = plan.batch_tiles["head"]
    rows = tiles * plan.tile_rows
    lines = ["tag = (tag + 1) & 0xFFFF", "code = END * 8 + 1", *poll_residual(shape, "residual", "entry", "code + 5")]
    lines += write_stamp(shape, f"{plan.trace_stamps - 2}")
    inner = []
    for r in count_rounds(rows * shape.max_tokens):
        inner += load_gain(shape, f"gain{r}", "head", f"batch * {rows} + (tid + {THREADS * r}) % {rows}")
    inner += run_batch(shape, "head")
    for r in count_rounds(rows * shape.max_tokens):
        inner += [
            f"turn = tid + {THREADS * r}", f"asked = tl.minimum(turn // {rows}, MAX_TOKENS - 1)",
            f"sums_at = scratch + (asked * {rows} + turn % {rows}) * 4",
            f"logit = add_warps(sums_at, {4 * rows * shape.max_tokens})",
            *apply_gains(shape, f"logit gain{r}"),
            "logit *= find_rstd(cfg, asked)",
            f"row = program * {plan.tiles['head'] * plan.tile_rows} + batch * {rows} + turn % {rows}",
            f"valid = (turn < tokens * {rows}) & (row < {shape.vocabulary})",
            f"tl.store(result + asked.to(tl.int64) * {shape.vocabulary} + row, logit.to(tl.bfloat16), mask=valid)",
        ]  # fmt: skip
    inner.append("state = flip(state)")
    lines += [f"for batch in range({plan.tiles['head'] // tiles}):", textwrap.indent("\n".join(inner), "    ")]
    return "\n".join([*lines, *write_stamp(shape, f"{plan.trace_stamps - 1}")])


def _write_residual(shape: StepShape) -> str:
    return "tl.store(result + own, residual.to(tl.bfloat16), mask=given)"
