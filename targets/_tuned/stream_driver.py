"""Triton text of the streamed step's helpers: the same for every shape; the constants come from ``stream_emit``.

The state of a program, a tuple carried through everything:
    slot, parity: of the ring, at the stage that is read next.
    layer, index: of the stage that is copied next, SLOTS stages ahead; index counts the layer's stages, those of the
        cache between q, k, v and o. weight: units of weights copied so far.
    sequence, unit, end, stages, length, part, busy: what that layer attends to here (``find_work``).
    reached: stages of weights that the L2 was asked for. side: which scratch buffer comes next.
"""

HELPERS = '''
@triton.jit
def run(ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, arguments):
    return tl.inline_asm_elementwise(ASM, CONSTRAINTS, arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read(ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, arguments):
    return tl.inline_asm_elementwise(ASM, CONSTRAINTS, arguments, dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def read_pair(ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, arguments):
    return tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, arguments, dtype=(tl.float32, tl.float32), is_pure=False, pack=1)


@triton.jit
def read_pointer(place):
    """int64 at a place of shared memory."""
    return tl.inline_asm_elementwise("ld.shared.b64 $0, [$1];", "=l,r", [place], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def word(value, tag):
    """A mailbox word: the value as bf16 over the tag."""
    bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return (bits << 16) | (tag & 0xFFFF)


@triton.jit
def round_bf16(value):
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def post(place, value, mask):
    run(POST_WORD, POST_WORD_C, [place, value, mask.to(tl.int32)])


@triton.jit
def poll(ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, cfg, mail, tag, code, into):
    """Read mailbox words and leave their values in shared memory."""
    tid = cfg[10]
    run(ASM, CONSTRAINTS, [mail, tag + tid * 0, cfg[3] + tid * 0, code + tid * 0, into])


@triton.jit
def add_warps(place, step):
    """Sum over the warps of what lies ``step`` bytes apart in scratch memory."""
    return read(ADD_WARPS, ADD_WARPS_C, [place, place * 0 + step])


@triton.jit
def add_pairs(place, step):
    """The same for two values side by side."""
    return read_pair(ADD_PAIRS, ADD_PAIRS_C, [place, place * 0 + step])


@triton.jit
def find_work(layer, member, splits, seq_lens, tokens):
    """What a program attends to in a layer: sequence, first unit, end, stages, length, part, whether it has one.

    The parts go round the team from layer to layer, so that no program carries the cache alone.
    """
    item = (member + layer * (MAX_TOKENS * splits)) % TEAM
    sequence, part = item // splits, item % splits
    busy = (layer < END) & (item < MAX_TOKENS * splits)
    length = tl.load(seq_lens + sequence, mask=busy & (sequence < tokens), other=0)
    units = (length + UNIT - 1) // UNIT
    share = (units + splits - 1) // splits
    first = part * share
    end = tl.minimum(first + share, units)
    stages = (tl.maximum(end - first, 0) + WARPS - 1) // WARPS
    return sequence, first, end, stages, length, part, busy


@triton.jit
def produce(state, cfg):
    """Start the copy of the next stage of the stream into the slot that was just read."""
    slot, parity, layer, index, weight, sequence, unit, end, stages, length, part, busy, reached, side = state
    stream, block_table, seq_lens, workspace, tokens, max_blocks, splits, program, member, team, tid, base = cfg
    warp = tid // 32
    alive = (layer < END) | (index < HEAD_STAGES)
    of_cache = (index >= QKV_STAGES) & (index < QKV_STAGES + stages)
    if of_cache:
        mine = unit + (index - QKV_STAGES) * WARPS + warp
        token = mine * UNIT
        there = mine < end
        page = tl.load(block_table + sequence * max_blocks + token // PAGE, mask=there, other=0)
        row = (page.to(tl.int64) * KV_HEADS + team) * PAGE + token % PAGE
        source = read_pointer(base + POINTERS + 8 * layer) + row * (4 * HEAD_DIM)
        count = tl.where(there, tl.maximum(tl.minimum(length - 1 - token, UNIT), 0), 0)
        size = count * (4 * HEAD_DIM)
    else:
        joined = count_units(index - tl.where(index < QKV_STAGES, 0, stages), layer)
        source = stream.to(tl.int64) + weight.to(tl.int64) * (PROGRAMS * WARPS * UNIT_BYTES)
        source += (program * WARPS + warp) * (joined * UNIT_BYTES)
        size = tid * 0 + joined * UNIT_BYTES
        weight += joined
    ring = base + RING + warp * (SLOTS * SLOT) + slot * SLOT
    barrier = base + BARRIERS + warp * (8 * SLOTS) + slot * 8
    run(REFILL, REFILL_C, [ring, barrier, source, size, alive.to(tl.int32) + tid * 0])
    index += 1
    if (layer < END) & (index == LAYER_STAGES + stages):
        layer += 1
        index *= 0
        sequence, unit, end, stages, length, part, busy = find_work(layer, member, splits, seq_lens, tokens)
    return slot, parity, layer, index, weight, sequence, unit, end, stages, length, part, busy, reached, side


@triton.jit
def ask_l2(state, cfg, AHEAD: tl.constexpr):
    """Ask the L2 for this warp's part of the stages of weights up to AHEAD behind those that are being copied."""
    slot, parity, layer, index, weight, sequence, unit, end, stages, length, part, busy, reached, side = state
    if AHEAD > 0:
        stream, program, tid = cfg[0], cfg[7], cfg[10]
        first = tl.maximum(reached, weight)
        reached = tl.maximum(first, tl.minimum(weight + AHEAD, UNITS))
        place = stream.to(tl.int64) + (first.to(tl.int64) * PROGRAMS + program) * (WARPS * UNIT_BYTES)
        run(PREFETCH, PREFETCH_C, [place + (tid // 32) * UNIT_BYTES, reached - first + tid * 0])
    return slot, parity, layer, index, weight, sequence, unit, end, stages, length, part, busy, reached, side


@triton.jit
def await_slot(state, cfg, code):
    """Wait for the stage in the next slot; where this warp's part of it lies."""
    slot, parity = state[0], state[1]
    workspace, tid, base = cfg[3], cfg[10], cfg[11]
    warp = tid // 32
    barrier = base + BARRIERS + warp * (8 * SLOTS) + slot * 8
    run(WAIT, WAIT_C, [barrier, parity + tid * 0, workspace + tid * 0, code + tid * 0])
    return base + RING + warp * (SLOTS * SLOT) + slot * SLOT


@triton.jit
def leave_slot(state, cfg):
    """The slot was read: refill it and go on to the next."""
    state = ask_l2(produce(state, cfg), cfg, STEADY)
    slot, parity, layer, index, weight, sequence, unit, end, stages, length, part, busy, reached, side = state
    slot += 1
    wraps = (slot == SLOTS).to(tl.int32)
    return (slot * (1 - wraps), parity ^ wraps, layer, index, weight, sequence, unit, end, stages, length, part, busy,
            reached, side)


@triton.jit
def flip(state):
    """The other scratch buffer, after a barrier."""
    slot, parity, layer, index, weight, sequence, unit, end, stages, length, part, busy, reached, side = state
    return slot, parity, layer, index, weight, sequence, unit, end, stages, length, part, busy, reached, 1 - side


@triton.jit
def find_scratch(state, cfg):
    return cfg[11] + SCRATCH + state[13] * SCRATCH_BYTES


@triton.jit
def find_rstd(cfg, token):
    """1 / root mean square of a token's residual stream, from the warps' sums."""
    return tl.rsqrt(read(ADD_SQUARES, ADD_SQUARES_C, [cfg[11] + SQUARES + token * 32]) * (1.0 / HIDDEN) + EPS)
'''

BF16 = '''
@triton.jit
def count_units(index, layer):
    """Units of weights in a stage."""
    return 1


@triton.jit
def multiply(state, cfg, code, x, a0, a1):
    """One stage of weights: (a0, a1) += its rows times the activations at ``x``."""
    place = await_slot(state, cfg, code)
    a0, a1 = read_pair(MULTIPLY, MULTIPLY_C, [x, place + (cfg[10] % 32) * 16, a0, a1])
    return leave_slot(state, cfg), a0, a1


@triton.jit
def keep(cfg, scratch, ROWS: tl.constexpr, tile, a0, a1):
    """Sums of one tile to scratch memory [warp][token][ROWS]."""
    tid = cfg[10]
    lane = tid % 32
    place = scratch + (((tid // 32) * MAX_TOKENS + lane // 4) * ROWS + tile * 8 + 2 * (lane % 4)) * 4
    run(KEEP, KEEP_C, [place, lane, a0, a1])


@triton.jit
def run_tiles(state, cfg, code, x, x_step, scratch, TILES: tl.constexpr, CHUNKS: tl.constexpr, JOINED: tl.constexpr):
    """TILES tiles one after the other, all columns of each; partial sums to scratch memory."""
    zero = (cfg[10] * 0).to(tl.float32)
    for tile in range(TILES):
        a0, a1 = zero, zero
        for chunk in tl.static_range(CHUNKS):
            state, a0, a1 = multiply(state, cfg, code, x + chunk * x_step, a0, a1)
        keep(cfg, scratch, TILES * 8, tile, a0, a1)
    return state
'''
"""The products of a stage of bf16 weights."""
