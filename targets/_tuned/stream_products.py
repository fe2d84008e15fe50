"""Products of the streamed step that fill an MMA: NVFP4 tiles of 16 rows, and bf16 tiles of 8 rows, folded.

A unit of NVFP4 is 16 rows by 256 columns of a warp: 512 words of codes and 8 bytes of scales for each lane, in fragment
order. Codes come out of a word times 2^-14 and their products with scales are exact in float16, subnormals included: a
product is a multiple of 2^-24 with six significant bits. Activations are float16 times 2^-6, so that the residual
stream, which is not normalised before the product, does not overflow. Both powers are in ``pack_gains``.

A folded tile of bf16 has 8 rows: the words 0 and 2 of a lane's 16 bytes are rows 0 to 7 of A, the words 1 and 3 rows 8
to 15. Columns 0 to 3 of B hold the tokens' activations that belong to the former, columns 4 to 7 to the latter.
"""

from __future__ import annotations

from mmcompile.targets._tuned.linear_ptx import unpack_pairs
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_ptx import Assembly, _registers
from mmcompile.targets._tuned.stream_shape import StepShape


def multiply_unit() -> Assembly:
    """($0 to $3) = ($7 to $10) + a unit times activations; lane (g, t): rows g and g + 8 of tokens 2t and 2t + 1.

    $4: the lane's activations (64 columns: 128 bytes on). $5: its codes (512 bytes on). $6: its scales.
    """
    text = [
        "{ .reg .b32 w<4>, x<8>, p<4>, q, s0, s1, c<2>; .reg .b16 low, high; .reg .f32 d<4>, e<4>;",
        "".join(f"mov.f32 d{k}, ${7 + k}; mov.f32 e{k}, 0f00000000;" for k in range(4)),
        "ld.shared.v2.b32 {c0, c1}, [$6];",
    ]
    for u in range(4):
        text.append(f"ld.shared.v4.b32 {_registers('w', 0, 4)}, [$5+{512 * u}];")
        text += [f"ld.shared.v4.b32 {_registers('x', 4 * h, 4)}, [$4+{128 * u + 16 * h}];" for h in (0, 1)]
        half = ("low", "high")[u % 2]
        text.append(f"mov.b32 {{low, high}}, c{u // 2}; cvt.rn.f16x2.e4m3x2 q, {half};")
        text.append("prmt.b32 s0, q, q, 0x1010; prmt.b32 s1, q, q, 0x3232;")
        for j in range(4):
            text.append(unpack_pairs("float16", f"w{j}"))
            text.append("".join(f"mul.rn.f16x2 p{k}, p{k}, s{k % 2};" for k in range(4)))
            sums = _registers("de"[j % 2], 0, 4)
            text.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {sums}, {{p0, p1, p2, p3}}, "
                f"{{x{2 * j}, x{2 * j + 1}}}, {sums};"
            )
    text.append("".join(f"add.f32 ${k}, d{k}, e{k};" for k in range(4)) + "}")
    return "\n".join(text), ",".join(["=&f"] * 4 + ["r"] * 3 + ["f"] * 4)


def store_unit_sums(shape: StepShape) -> Assembly:
    """The sums of live tokens to scratch memory: $1 the lane's place, $2 bytes to the next, $3 lane, $4 on: sums."""
    return (
        f"""{{ .reg .pred p, q; .reg .b32 t, a; and.b32 t, $3, 3; shl.b32 t, t, 1;
setp.lt.u32 p, t, {shape.max_tokens}; add.u32 t, t, 1; setp.lt.u32 q, t, {shape.max_tokens}; add.u32 a, $1, $2;
@p st.shared.f32 [$1], $4; @p st.shared.f32 [$1+32], $6; @q st.shared.f32 [a], $5; @q st.shared.f32 [a+32], $7;
mov.b32 $0, 0; }}""",
        "=r,r,r,r,f,f,f,f",
    )


def multiply_folded(shape: StepShape) -> Assembly:
    """($0 to $3) = ($6 to $9) + a unit times activations; $4: the lane's activations, 64 bytes on; $5: its weights."""
    steps = shape.warp_k // 32
    chains = "defh"[: min(4, steps)]
    text = ["{ .reg .b32 w<4>, x<2>;"]
    text += [f".reg .f32 {c}<4>; " + "".join(f"mov.f32 {c}{k}, 0f00000000;" for k in range(4)) for c in chains]
    text.append("".join(f"mov.f32 d{k}, ${6 + k};" for k in range(4)))
    for j in range(steps):
        sums = _registers(chains[j % len(chains)], 0, 4)
        text.append(f"ld.shared.v4.b32 {_registers('w', 0, 4)}, [$5+{512 * j}];")
        text.append(f"ld.shared.v2.b32 {_registers('x', 0, 2)}, [$4+{64 * j}];")
        text.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {_registers('w', 0, 4)}, {{x0, x1}}, {sums};"
        )
    for k in range(4):
        if len(chains) == 4:
            text.append(f"add.f32 d{k}, d{k}, e{k}; add.f32 f{k}, f{k}, h{k}; add.f32 ${k}, d{k}, f{k};")
        else:
            text.append(f"add.f32 ${k}, d{k}, e{k};" if len(chains) == 2 else f"mov.f32 ${k}, d{k};")
    return "\n".join(text) + "}", ",".join(["=&f"] * 4 + ["r"] * 2 + ["f"] * 4)


def store_folded_sums(shape: StepShape) -> Assembly:
    """Add the halves, which lie two lanes apart, and store as ``store_unit_sums`` does, one row a lane."""
    return (
        f"""{{ .reg .pred p, q; .reg .b32 t, a; .reg .f32 f, h; and.b32 t, $3, 3; shl.b32 t, t, 1;
shfl.sync.bfly.b32 f, $6, 2, 31, -1; add.f32 f, f, $4; shfl.sync.bfly.b32 h, $7, 2, 31, -1; add.f32 h, h, $5;
setp.lt.u32 p, t, {shape.max_tokens}; add.u32 t, t, 1; setp.lt.u32 q, t, {shape.max_tokens}; add.u32 a, $1, $2;
@p st.shared.f32 [$1], f; @q st.shared.f32 [a], h; mov.b32 $0, 0; }}""",
        "=r,r,r,r,f,f,f,f",
    )


def write_helpers(shape: StepShape) -> str:
    """Triton text in place of ``stream_driver.BF16``."""
    plan, at, single = StepPlan(shape), 0, []
    if plan.folded:
        return FILLED.replace("COUNT", "1").replace("PLACES", "x, place + lane * 16")
    for name in ("qkv", "o", "gate_up", "down"):
        if plan.joined[name] == 1:
            single.append(f"((index >= {at}) & (index < {at + plan.stages_of[name]}) & (layer < END))")
        at += plan.stages_of[name]
    if plan.joined["head"] == 1:
        single.append("(layer >= END)")
    alone = " | ".join(single)
    count = f"2 - ({alone}).to(tl.int32)" if single else "2"
    return FILLED.replace("COUNT", count).replace("PLACES", "x, place + lane * 16, place + 2048 + lane * 8")


FILLED = '''
@triton.jit
def count_units(index, layer):
    """Units of weights in a stage; index without the stages of the cache."""
    return COUNT


@triton.jit
def multiply(place, cfg, x, sums):
    """A unit's rows times the activations at ``x``, added to four sums."""
    lane = cfg[10] % 32
    return tl.inline_asm_elementwise(
        MULTIPLY, MULTIPLY_C, [PLACES, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1)


@triton.jit
def keep(cfg, scratch, ROWS: tl.constexpr, tile, sums):
    """Sums of one tile to scratch memory [warp][token][ROWS]."""
    tid = cfg[10]
    lane = tid % 32
    place = scratch + (((tid // 32) * MAX_TOKENS + lane % 4 * 2) * ROWS + tile * TILE_ROWS + lane // 4) * 4
    run(KEEP, KEEP_C, [place, tid * 0 + ROWS * 4, lane, sums[0], sums[1], sums[2], sums[3]])


@triton.jit
def run_tiles(state, cfg, code, x, x_step, scratch, TILES: tl.constexpr, CHUNKS: tl.constexpr, JOINED: tl.constexpr):
    """TILES tiles one after the other, all columns of each; partial sums to scratch memory."""
    zero = (cfg[10] * 0).to(tl.float32)
    if JOINED == 2 and CHUNKS == 1:
        for pair in range(TILES // 2):
            place = await_slot(state, cfg, code)
            first = multiply(place, cfg, x, (zero, zero, zero, zero))
            second = multiply(place + UNIT_BYTES, cfg, x, (zero, zero, zero, zero))
            state = leave_slot(state, cfg)
            keep(cfg, scratch, TILES * TILE_ROWS, 2 * pair, first)
            keep(cfg, scratch, TILES * TILE_ROWS, 2 * pair + 1, second)
    else:
        for tile in range(TILES):
            sums = (zero, zero, zero, zero)
            for step in tl.static_range(0, CHUNKS, JOINED):
                place = await_slot(state, cfg, code)
                sums = multiply(place, cfg, x + step * x_step, sums)
                if JOINED == 2:
                    sums = multiply(place + UNIT_BYTES, cfg, x + (step + 1) * x_step, sums)
                state = leave_slot(state, cfg)
            keep(cfg, scratch, TILES * TILE_ROWS, tile, sums)
    return state
'''
