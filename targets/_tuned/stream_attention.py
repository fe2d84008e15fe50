"""PTX of the streamed step's attention: one stage of the cache, the merge of a program's warps, the merge of parts.

Scores are q k as an MMA with the heads of one KV head as rows of A and 8 tokens as columns of B; the probabilities of
tokens 2t and 2t + 1 that lane (g, t) then holds for head g are its fragment of A for the product with v. All in base 2.
"""

from __future__ import annotations

from mmcompile.core.stream import WARPS
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_ptx import (
    _SPIN,
    NEVER,
    Assembly,
    _registers,
    check_tags,
    give_up,
    pack_four,
    store_four,
)
from mmcompile.targets._tuned.stream_shape import StepShape


def _mma(sums: str, a: tuple[str, str], b: tuple[str, str]) -> str:
    fragment = f"{{{a[0]}, zero, {a[1]}, zero}}"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {fragment}, {{{b[0]}, {b[1]}}}, {sums};"


def attend_stage(shape: StepShape) -> Assembly:
    """One step of online softmax over the tokens of one slot.

    Results and state: maximum, this lane's share of the sum, then head_dim / 4 numerators (head g, dimensions
    64 h + 16 t + 8 c + j at 16 h + 2 j + c). Inputs after the results: slot, the lane's q (64 bytes on for 32
    dimensions), new token's k and v in shared memory, number of tokens to attend to, index of the new token among
    them (its row of the slot is not valid), scale, state.
    """
    d, unit = shape.head_dim, StepPlan(shape).unit_tokens
    outputs, tiles = 2 + d // 4, unit // 8
    slot, q, new_k, new_v, limit, index, scale = (f"${outputs + i}" for i in range(7))
    state = [f"${outputs + 7 + i}" for i in range(outputs)]
    text = [
        f"{{ .reg .pred P, Q; .reg .b32 q<{d // 8}>, w<8>, ln, g, t, n, u, ka, va, vb, zero, pa0, pa1;",
        f".reg .f32 s<{4 * tiles}>, o<{d // 2}>, m, l, x, f, z;",
        "mov.b32 zero, 0; mov.b32 pa1, 0; mov.f32 z, 0f00000000;",
        "mov.u32 ln, %laneid; shr.u32 g, ln, 2; and.b32 t, ln, 3;",
    ]
    text += [f"ld.shared.v4.b32 {_registers('q', 4 * j, 4)}, [{q}+{64 * j}];" for j in range(d // 32)]
    for i in range(tiles):
        text += _score_tile(d, i, slot, new_k, index)
    text += _soften(tiles, limit, scale, state)
    for j in range(d // 8):  # rows 8 to 15 of the accumulators stay zero
        text += [f"mul.f32 o{4 * j + c}, {state[2 + 2 * j + c]}, x;" for c in (0, 1)]
        text += [f"mov.f32 o{4 * j + c}, z;" for c in (2, 3)]
    for h in range(d // 64):
        text += _weigh_values(d, tiles, h, slot, new_v, index)
    text += ["mov.f32 $0, m; mov.f32 $1, l;"]
    text += [f"mov.f32 ${2 + 2 * j + c}, o{4 * j + c};" for j in range(d // 8) for c in (0, 1)]
    constraints = ["=&f"] * outputs + ["r"] * 6 + ["f"] + ["f"] * outputs
    return "\n".join(text) + "}", ",".join(constraints)


def _score_tile(d: int, i: int, slot: str, new_k: str, index: str) -> list[str]:
    """Scores of 8 tokens: s of head g, tokens 2t and 2t + 1 of tile i. Lane (g, t) reads token g's key."""
    sums = _registers("s", 4 * i, 4)
    text = [
        f"add.u32 n, g, {8 * i}; setp.ge.s32 P, n, {index}; shl.b32 u, t, 4;",
        f"mad.lo.u32 ka, n, {4 * d}, {slot}; selp.b32 ka, {new_k}, ka, P; add.u32 ka, ka, u;",
        "".join(f"mov.f32 s{4 * i + c}, z;" for c in range(4)),
    ]
    for j in range(d // 32):
        text.append(f"ld.shared.v4.b32 {_registers('w', 0, 4)}, [ka+{64 * j}];")
        text += [_mma(sums, (f"q{4 * j + h}", f"q{4 * j + h + 1}"), (f"w{h}", f"w{h + 1}")) for h in (0, 2)]
    return text


def _soften(tiles: int, limit: str, scale: str, state: list[str]) -> list[str]:
    """Scores to probabilities: new maximum m, sum l, factor x of what came before; A fragments pa0, pa1."""
    text, used = [], [4 * i + c for i in range(tiles) for c in (0, 1)]
    for i in range(tiles):
        for c in (0, 1):
            s = f"s{4 * i + c}"
            text.append(
                f"shl.b32 n, t, 1; add.u32 n, n, {8 * i + c}; setp.lt.s32 P, n, {limit}; mul.f32 {s}, {s}, {scale};"
            )
            text.append(f"selp.f32 {s}, {s}, {NEVER}, P;")
    text.append(f"mov.f32 m, {state[0]};" + "".join(f"max.f32 m, m, s{k};" for k in used))
    text += [f"shfl.sync.bfly.b32 f, m, {distance}, 31, -1; max.f32 m, m, f;" for distance in (1, 2)]
    text.append(f"sub.f32 x, {state[0]}, m; ex2.approx.ftz.f32 x, x; mul.f32 l, {state[1]}, x;")
    for i in range(tiles):
        for c in (0, 1):
            s = f"s{4 * i + c}"
            text.append(f"setp.gt.f32 P, {s}, {NEVER}; sub.f32 {s}, {s}, m; ex2.approx.ftz.f32 {s}, {s};")
            text.append(f"selp.f32 {s}, {s}, z, P; add.f32 l, l, {s};")
        text.append(f"cvt.rn.bf16x2.f32 pa{i}, s{4 * i + 1}, s{4 * i};")
    return text


def _weigh_values(d: int, tiles: int, h: int, slot: str, new_v: str, index: str) -> list[str]:
    """o += p v for 64 dimensions: lane (g, t): tokens 2t, 2t + 1, dimensions 64 h + 8 g + j as column g of tile j."""
    text = []
    for i in range(tiles):
        first = 8 * i
        text.append(f"shl.b32 n, t, 1; add.u32 n, n, {first}; mad.lo.u32 va, n, {4 * d}, {slot}; shl.b32 u, g, 4;")
        text.append(f"add.u32 vb, va, {6 * d}; add.u32 va, va, {2 * d}; setp.ge.s32 P, n, {index};")
        text.append(f"add.u32 n, n, 1; setp.ge.s32 Q, n, {index};")
        text.append(f"selp.b32 va, {new_v}, va, P; selp.b32 vb, {new_v}, vb, Q; add.u32 va, va, u; add.u32 vb, vb, u;")
        text.append(f"{{ .reg .b32 a<4>, b<4>; ld.shared.v4.b32 {_registers('a', 0, 4)}, [va+{128 * h}];")
        text.append(f"ld.shared.v4.b32 {_registers('b', 0, 4)}, [vb+{128 * h}];")
        for j in range(8):
            word = f"y{8 * i + j}"
            text.append(f"prmt.b32 {word}, a{j // 2}, b{j // 2}, {('0x5410', '0x7632')[j % 2]};")
        text.append("}")
    second = (lambda j: f"y{8 + j}") if tiles == 2 else (lambda j: "zero")
    products = [_mma(_registers("o", 32 * h + 4 * j, 4), ("pa0", "pa1"), (f"y{j}", second(j))) for j in range(8)]
    return [f"{{ .reg .b32 y<{8 * tiles}>;", *text, *products, "}"]


def store_part(shape: StepShape) -> Assembly:
    """A warp's result to scratch: $1 the warp's place, $2 maximum, $3 lane's share of the sum, $4... numerators."""
    d = shape.head_dim
    text = [
        "{ .reg .pred P, Q; .reg .b32 ln, g, t, a, b; .reg .f32 l, f; mov.u32 ln, %laneid; shr.u32 g, ln, 2;",
        f"and.b32 t, ln, 3; mov.f32 l, $3; setp.lt.u32 P, g, {shape.group}; setp.eq.and.u32 Q, t, 0, P;",
        "shfl.sync.bfly.b32 f, l, 1, 31, -1; add.f32 l, l, f; shfl.sync.bfly.b32 f, l, 2, 31, -1; add.f32 l, l, f;",
        f"shl.b32 a, g, 3; add.u32 a, a, $1; @Q st.shared.v2.f32 [a+{4 * shape.group * d}], {{$2, l}};",
        f"mad.lo.u32 a, g, {4 * d}, $1; shl.b32 b, t, 6; add.u32 a, a, b;",
    ]
    for h in range(d // 64):
        for c in (0, 1):
            for j in (0, 4):
                four = ", ".join(f"${4 + 16 * h + 2 * (j + k) + c}" for k in range(4))
                text.append(f"@P st.shared.v4.f32 [a+{256 * h + 32 * c + 4 * j}], {{{four}}};")
    return "\n".join(text) + "mov.b32 $0, 0; }", ",".join(["=r", "r"] + ["f"] * (2 + d // 4))


def merge_warps(shape: StepShape) -> Assembly:
    """($0, $1) = (output, log2 of its weight) of one dimension of one head: $2 scratch, $3 head, $4 place of both."""
    stride, sums = StepPlan(shape).partial_stride, 4 * shape.group * shape.head_dim
    text = ["{ .reg .pred P; .reg .f32 m<8>, l<8>, o<8>, x, y, s, t; .reg .b32 a, b;"]
    text.append("shl.b32 a, $4, 2; add.u32 a, a, $2; shl.b32 b, $3, 3; add.u32 b, b, $2;")
    for i in range(WARPS):
        text.append(f"ld.shared.v2.f32 {{m{i}, l{i}}}, [b+{sums + stride * i}]; ld.shared.f32 o{i}, [a+{stride * i}];")
    text.append("mov.f32 x, m0;" + "".join(f"max.f32 x, x, m{i};" for i in range(1, WARPS)))
    text.append("mov.f32 s, 0f00000000; mov.f32 t, 0f00000000;")
    for i in range(WARPS):
        text.append(f"sub.f32 y, m{i}, x; ex2.approx.ftz.f32 y, y; fma.rn.f32 s, y, l{i}, s; fma.rn.f32 t, y, o{i}, t;")
    text.append(
        "setp.gt.f32 P, s, 0f00000000; rcp.approx.ftz.f32 y, s; mul.f32 t, t, y; selp.f32 $0, t, 0f00000000, P;"
    )
    text.append(f"lg2.approx.ftz.f32 y, s; add.f32 y, y, x; selp.f32 $1, y, {NEVER}, P; }}")
    return "\n".join(text), "=&f,=&f,r,r,r"


def part_vectors(shape: StepShape, tokens: int) -> list[tuple[int, int, int]]:
    """(token, chunk, part of 128 columns) of the vectors of four attended values that a lane merges at once."""
    parts = max(1, shape.warp_k // 128)
    return [(b, c, i) for b in range(tokens) for c in range(StepPlan(shape).chunks["o"]) for i in range(parts)]


def merge_parts(shape: StepShape, tokens: int, parts: int) -> Assembly:
    """Merge up to ``parts`` parts of the attention of ``tokens`` tokens into a running state.

    For each vector six results and six state inputs: maximum, sum, four values. Inputs after the results: the lane's
    first word, its first weight, tag, workspace, fault code, number of parts that exist, then the state.
    """
    plan, vectors = StepPlan(shape), part_vectors(shape, tokens)
    count, width = 6 * len(vectors), shape.heads * shape.head_dim
    words, weights, tag, workspace, code, live = (f"${count + i}" for i in range(6))
    reads = [(v, s) for v in range(len(vectors)) for s in range(parts)]
    text = [f"{{ {_SPIN} .reg .pred L<{parts}>; .reg .b32 a<{4 * len(reads)}>, k<{len(reads)}>, c, e;"]
    text += [f".reg .f32 w<{len(reads)}>, x, y, f;"]
    text += [f"setp.gt.s32 L{s}, {live}, {s};" for s in range(parts)]
    for n in range(len(reads)):
        text += [f"mov.b32 a{4 * n + i}, {tag};" for i in range(4)]
        text.append(f"mov.b32 k{n}, {tag}; mov.f32 w{n}, {NEVER};")
    text.append("AGAIN:")
    for n, (v, s) in enumerate(reads):
        b, chunk, part = vectors[v]
        column, row = chunk * shape.warp_k + 128 * part, b * plan.splits + s
        place = 8 * (row * shape.heads + column // shape.head_dim)
        text.append(f"{{ .reg .b64 v; @!L{s} bra SKIP; ld.relaxed.gpu.global.b64 v, [{weights}+{place}];")
        text.append(f"mov.b64 {{e, k{n}}}, v; mov.b32 w{n}, e;")
        text.append(
            f"ld.relaxed.gpu.global.v4.b32 {_registers('a', 4 * n, 4)}, [{words}+{4 * (row * width + column)}];"
        )
        text.append("SKIP: }")
    text.append(check_tags(4 * len(reads), tag).replace("and.b32 c, c, 0xffff;", _check_weights(len(reads), tag)))
    text.append("@p bra DONE;" + give_up(shape, workspace, code, "DONE", "AGAIN") + "DONE: bar.warp.sync -1;")
    for v in range(len(vectors)):
        text += _merge_vector(v, [n for n, read in enumerate(reads) if read[0] == v], f"{count + 6}")
    constraints = ["=&f"] * count + ["l", "l", "r", "l", "r", "r"] + ["f"] * count
    return "\n".join(text) + "}", ",".join(constraints)


def _check_weights(count: int, tag: str) -> str:
    return "and.b32 c, c, 0xffff;" + "".join(f"xor.b32 e, k{n}, {tag}; or.b32 c, c, e;" for n in range(count))


def _merge_vector(v: int, reads: list[int], state: str) -> list[str]:
    """New state of vector ``v`` from its old one (operands from ``state`` on) and its parts."""
    old = [f"${int(state) + 6 * v + i}" for i in range(6)]
    text = [f"mov.f32 x, {old[0]};" + "".join(f"max.f32 x, x, w{n};" for n in reads)]
    text.append(f"sub.f32 y, {old[0]}, x; ex2.approx.ftz.f32 y, y; mov.f32 ${6 * v}, x;")
    text += [f"mul.f32 ${6 * v + i}, {old[i]}, y;" for i in range(1, 6)]
    for n in reads:
        text.append(f"sub.f32 y, w{n}, x; ex2.approx.ftz.f32 y, y; add.f32 ${6 * v + 1}, ${6 * v + 1}, y;")
        for i in range(4):
            text.append(f"and.b32 c, a{4 * n + i}, 0xffff0000; mov.b32 f, c;")
            text.append(f"fma.rn.f32 ${6 * v + 2 + i}, f, y, ${6 * v + 2 + i};")
    return text


def finish_parts(shape: StepShape, tokens: int) -> Assembly:
    """Divide by the sums and leave bf16 activations: $1 the lane's place at the first of the tokens, then the state."""
    plan, text = StepPlan(shape), ["{ .reg .b32 c, e; .reg .f32 r, v<4>;"]
    vectors = part_vectors(shape, tokens)
    for v, (b, chunk, part) in enumerate(vectors):
        state = 2 + 6 * v
        text.append(
            f"rcp.approx.ftz.f32 r, ${state + 1};" + "".join(f"mul.f32 v{i}, ${state + 2 + i}, r;" for i in range(4))
        )
        place = (chunk * shape.max_tokens + b) * plan.x_stride + 256 * part
        text.append(
            f"{pack_four(shape, ('v0', 'v1', 'v2', 'v3'), ('c', 'e'))} {store_four(shape, '$1', place, ('c', 'e'))}"
        )
    return "\n".join(text) + "bar.warp.sync -1; mov.b32 $0, 0; }", ",".join(["=r", "r"] + ["f"] * (6 * len(vectors)))
