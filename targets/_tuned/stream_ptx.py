"""PTX of the streamed step: the ring of bulk copies, the product of a stage, the mailboxes.

Every function returns (text, constraints) for ``tl.inline_asm_elementwise``; operand 0 is a result that nobody reads
unless said otherwise. A mailbox word is a bf16 value in its high half and the tag of step and layer in its low half;
readers poll the words themselves, so no fence is needed: each word is written and read by one relaxed access.
"""

from __future__ import annotations

from mmcompile.core.stream import FAULT_WORD, WARPS
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_shape import StepShape

Assembly = tuple[str, str]
NEVER = "0fF149F2CA"
"""-1e30: the score of what is not attended to."""


def _registers(name: str, first: int, count: int) -> str:
    return "{" + ",".join(f"{name}{first + i}" for i in range(count)) + "}"


def give_up(shape: StepShape, workspace: str, code: str, done: str, again: str) -> str:
    """After a failed poll: count it; after too many write the fault record, once, and let every later wait end.

    Uses predicate ``tp`` and registers ``it``, ``dd``, ``da``.
    """
    dead = StepPlan(shape).shared["dead"]
    return f"""mov.u32 da, global_smem; ld.shared.b32 dd, [da+{dead}]; setp.ne.u32 tp, dd, 0; @tp bra {done};
add.u32 it, it, 1; setp.le.u32 tp, it, {shape.spin_limit}; @tp bra {again};
st.shared.b32 [da+{dead}], 1;
{{ .reg .b64 place; add.s64 place, {workspace}, {4 * FAULT_WORD};
atom.relaxed.gpu.global.cas.b32 dd, [place], 0, {code};
setp.ne.u32 tp, dd, 0; @tp bra {done}; mov.u32 dd, %ctaid.x; st.relaxed.gpu.global.b32 [place+4], dd; }}
"""


_SPIN = ".reg .pred p, tp; .reg .b32 it, dd, da; mov.b32 it, 0;"


def base_address() -> Assembly:
    """$0 = first byte of the dynamic shared memory."""
    return "mov.u32 $0, global_smem; // $1", "=r,r"


def set_up(shape: StepShape) -> Assembly:
    """Lane 0 of each warp makes its barriers. $1: the warp's first barrier."""
    lines = "".join(f"mbarrier.init.shared::cta.b64 [$1+{8 * i}], 1;" for i in range(StepPlan(shape).slots))
    return (
        f"""{{ .reg .pred q; .reg .b32 ln; mov.b32 $0, 0; mov.u32 ln, %laneid; setp.ne.u32 q, ln, 0; @q bra DONE;
{lines} fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; DONE: bar.warp.sync -1; }}""",
        "=r,r",
    )


def refill() -> Assembly:
    """Lane 0 starts one copy. $1 slot, $2 barrier, $3 source, $4 bytes (0: the stage is empty), $5 not past the end.

    Weights are read once: evict-first (the policy word is createpolicy's for all of an access).
    """
    return (
        """{ .reg .pred q, c; .reg .b32 ln; .reg .b64 state, policy; mov.b64 policy, 0x12F0000000000000;
bar.warp.sync -1; mov.u32 ln, %laneid; setp.eq.u32 q, ln, 0; setp.ne.and.b32 q, $5, 0, q; setp.ne.and.b32 c, $4, 0, q;
@q mbarrier.arrive.expect_tx.shared::cta.b64 state, [$2], $4;
@c cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$1], [$3], $4, [$2], policy;
mov.b32 $0, 0; }""",
        "=r,r,r,l,r,r",
    )


def wait_copy(shape: StepShape) -> Assembly:
    """Wait for a slot. $1 barrier, $2 parity, $3 workspace, $4 fault code."""
    return (
        f"""{{ {_SPIN} AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @p bra DONE;
{give_up(shape, "$3", "$4", "DONE", "AGAIN")} DONE: mov.b32 $0, 0; }}""",
        "=r,r,r,l,r",
    )


def prefetch(shape: StepShape) -> Assembly:
    """Ask the L2 for the warp's part of $2 stages of weights, the first at $1: lane by lane, or in bulk copies."""
    plan = StepPlan(shape)
    step, size = shape.programs * WARPS * plan.unit_bytes, plan.unit_bytes
    if shape.prefetch_lines:
        lines = "".join(f"prefetch.global.L2 [a+{at}];" for at in range(0, 128, shape.prefetch_lines))
        first = f"mul.wide.u32 a, ln, 128; add.s64 a, a, $1; setp.ge.u32 q, ln, {size // 128}; @q bra DONE;"
    else:
        lines = f"cp.async.bulk.prefetch.L2.global [a], {size};"
        first = "setp.ne.u32 q, ln, 0; @q bra DONE; mov.b64 a, $1;"
    return (
        f"""{{ .reg .pred q; .reg .b32 ln, i; .reg .b64 a; mov.b32 $0, 0; mov.u32 ln, %laneid; {first}
mov.u32 i, 0; AGAIN: setp.ge.s32 q, i, $2; @q bra DONE; {lines}
add.s64 a, a, {step}; add.u32 i, i, 1; bra AGAIN; DONE: bar.warp.sync -1; }}""",
        "=r,l,r",
    )


def stamp() -> Assembly:
    """Thread 0 writes the time in nanoseconds to $1."""
    return (
        """{ .reg .pred q; .reg .b32 t; .reg .b64 c; mov.u32 t, %tid.x; setp.eq.u32 q, t, 0; mov.u64 c, %globaltimer;
@q st.global.b64 [$1], c; mov.b32 $0, 0; }""",
        "=r,l",
    )


def multiply_stage(shape: StepShape) -> Assembly:
    """($0, $1) = ($4, $5) + 8 rows of weights times activations; lane (g, t) holds token g, rows 2t and 2t + 1.

    $2: the lane's activations (32 columns: 64 bytes on). $3: its weights (512 bytes on). The weights are the B operand
    of the MMA, tokens the rows of A (8 to 15 are zeros); the columns of a lane's 16 bytes are the same on both sides.
    """
    steps = shape.warp_k // 32
    chains = "defh"[: min(4, 2 * steps)]
    text = ["{ .reg .b32 w<4>, x<4>, zero; mov.b32 zero, 0;"]
    text += [f".reg .f32 {c}<4>; " + "".join(f"mov.f32 {c}{k}, 0f00000000;" for k in range(4)) for c in chains]
    text.append("mov.f32 d0, $4; mov.f32 d1, $5;")
    for j in range(steps):
        text.append(f"ld.shared.v4.b32 {_registers('w', 0, 4)}, [$3+{512 * j}];")
        text.append(f"ld.shared.v4.b32 {_registers('x', 0, 4)}, [$2+{64 * j}];")
        for half in (0, 1):
            sums = _registers(chains[(2 * j + half) % len(chains)], 0, 4)
            a, b = f"{{x{2 * half}, zero, x{2 * half + 1}, zero}}", f"{{w{2 * half}, w{2 * half + 1}}}"
            text.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {a}, {b}, {sums};")
    for k in (0, 1):
        text.append("".join(f"add.f32 {a}{k}, {a}{k}, {b}{k};" for a, b in zip(chains[::2], chains[1::2], strict=True)))
        text.append(f"add.f32 ${k}, d{k}, f{k};" if len(chains) == 4 else f"mov.f32 ${k}, d{k};")
    return "\n".join(text) + "}", "=&f,=&f,r,r,f,f"


def store_sums(shape: StepShape) -> Assembly:
    """Lanes of live tokens store their two sums. $1 the lane's address, $2 lane, $3 and $4 sums."""
    return (
        f"{{ .reg .pred p; setp.lt.u32 p, $2, {4 * shape.max_tokens}; @p st.shared.v2.f32 [$1], {{$3, $4}}; "
        "mov.b32 $0, 0; }",
        "=r,r,r,f,f",
    )


def add_warps(pair: bool) -> Assembly:
    """Sum over the 8 warps, in a fixed order. One value: $0 = sum from $1 by $2 bytes; a pair: $0, $1 from $2 by $3."""
    count = 2 if pair else 1
    place, step = f"${count}", f"${count + 1}"
    text = [f"{{ .reg .f32 a<{8 * count}>; .reg .b32 ad; mov.b32 ad, {place};"]
    for i in range(WARPS):
        form = f"v2.f32 {{a{2 * i}, a{2 * i + 1}}}" if pair else f"f32 a{i}"
        text.append(f"ld.shared.{form}, [ad]; add.u32 ad, ad, {step};")
    for distance in (1, 2, 4):
        for i in range(0, 8, 2 * distance):
            for k in range(count):
                text.append(f"add.f32 a{count * i + k}, a{count * i + k}, a{count * (i + distance) + k};")
    text.append("".join(f"mov.f32 ${k}, a{k};" for k in range(count)) + "}")
    return "\n".join(text), ",".join(["=&f"] * count + ["r", "r"])


def add_squares() -> Assembly:
    """$0 = sum of the 8 floats at $1."""
    text = "{ .reg .f32 a<8>; ld.shared.v4.f32 {a0,a1,a2,a3}, [$1]; ld.shared.v4.f32 {a4,a5,a6,a7}, [$1+16];"
    for distance in (1, 2, 4):
        text += "".join(f"add.f32 a{i}, a{i}, a{i + distance};" for i in range(0, 8, 2 * distance))
    return text + "mov.f32 $0, a0; }", "=f,r"


def post_word() -> Assembly:
    """Store mailbox word $2 at $1 where $3 is not 0."""
    return (
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
    )


def post_pair() -> Assembly:
    """Store the two words ($2, $3) at $1 as one access where $4 is not 0."""
    return (
        "{ .reg .pred p; .reg .b64 v; mov.b64 v, {$2, $3}; setp.ne.b32 p, $4, 0; "
        "@p st.relaxed.gpu.global.b64 [$1], v; mov.b32 $0, 0; }",
        "=r,l,r,r,r",
    )


def check_tags(words: int, tag: str) -> str:
    """Set ``p`` if the low halves of words a0... equal the tag's; uses c and e."""
    text = f"xor.b32 c, a0, {tag};"
    text += "".join(f"xor.b32 e, a{i}, {tag}; or.b32 c, c, e;" for i in range(1, words))
    return text + "and.b32 c, c, 0xffff; setp.eq.u32 p, c, 0;"


def _vectors(shape: StepShape, chunks: int) -> list[tuple[int, int, int]]:
    """(chunk, token, part of 128 columns) of the vectors of four words that a lane reads."""
    parts = max(1, shape.warp_k // 128)
    return [(c, b, i) for c in range(chunks) for b in range(shape.max_tokens) for i in range(parts)]


def x_offset(shape: StepShape, chunk: int, token: int, part: int) -> int:
    """Byte of a vector's four bf16 values in a warp's activations, without the lane's share."""
    return (chunk * shape.max_tokens + token) * StepPlan(shape).x_stride + 256 * part


def pack_four(shape: StepShape, values: tuple[str, str, str, str], into: tuple[str, str]) -> str:
    """Four fp32 registers to two words of activations: bf16, or float16 times 2^-6 (see ``stream_nvfp4``)."""
    a, b, c, d = values
    if not StepPlan(shape).packed:
        return f"cvt.rn.bf16x2.f32 {into[0]}, {b}, {a}; cvt.rn.bf16x2.f32 {into[1]}, {d}, {c};"
    scaled = "".join(f"mul.f32 {v}, {v}, 0f3C800000;" for v in values)
    return f"{scaled} cvt.rn.f16x2.f32 {into[0]}, {b}, {a}; cvt.rn.f16x2.f32 {into[1]}, {d}, {c};"


def store_four(shape: StepShape, register: str, offset: int, words: tuple[str, str]) -> str:
    """Store two words of activations, four columns. Folded: words 1 and 2 of eight columns change places."""
    if StepPlan(shape).folded:
        return f"st.shared.b32 [{register}+{offset}], {words[0]}; st.shared.b32 [{register}+{offset + 8}], {words[1]};"
    return f"st.shared.v2.b32 [{register}+{offset}], {{{words[0]}, {words[1]}}};"


def poll_activations(shape: StepShape, width: int, chunks: int) -> Assembly:
    """Read tagged words [token][width] and leave them as bf16 in the warp's activations.

    $1 the lane's first word, $2 tag, $3 workspace, $4 fault code, $5 the lane's place in shared memory.
    """
    vectors = _vectors(shape, chunks)
    text = [f"{{ {_SPIN} .reg .b32 a<{4 * len(vectors)}>, c, e; .reg .f32 v<4>; AGAIN:"]
    text += _load_words(shape, vectors, width, "$1")
    text.append(check_tags(4 * len(vectors), "$2") + "@p bra DONE;")
    text.append(give_up(shape, "$3", "$4", "DONE", "AGAIN") + "DONE: bar.warp.sync -1;")
    for n, vector in enumerate(vectors):
        a = 4 * n
        if StepPlan(shape).packed:
            text += [f"and.b32 a{a + k}, a{a + k}, 0xffff0000; mov.b32 v{k}, a{a + k};" for k in range(4)]
            text.append(pack_four(shape, ("v0", "v1", "v2", "v3"), (f"a{a}", f"a{a + 1}")))
        else:
            text.append(f"prmt.b32 a{a}, a{a}, a{a + 1}, 0x7632; prmt.b32 a{a + 1}, a{a + 2}, a{a + 3}, 0x7632;")
        text.append(store_four(shape, "$5", x_offset(shape, *vector), (f"a{a}", f"a{a + 1}")))
    return "\n".join(text) + "bar.warp.sync -1; mov.b32 $0, 0; }", "=r,l,r,l,r,r"


def _load_words(shape: StepShape, vectors: list[tuple[int, int, int]], width: int, place: str) -> list[str]:
    return [
        f"ld.relaxed.gpu.global.v4.b32 {_registers('a', 4 * n, 4)}, "
        f"[{place}+{4 * (b * width + c * shape.warp_k + 128 * i)}];"
        for n, (c, b, i) in enumerate(vectors)
    ]


def poll_residual(shape: StepShape, chunks: int) -> Assembly:
    """Read the residual stream, leave it times the norm's weight as bf16, and return each token's sum of squares.

    Results $0..: one float a token, this lane's share. Then the lane's first word, tag, workspace, fault code, the
    lane's place in shared memory, and two words of norm weights for each (chunk, part).
    """
    b, parts = shape.max_tokens, max(1, shape.warp_k // 128)
    vectors = _vectors(shape, chunks)
    place, tag, workspace, code, x = (f"${b + i}" for i in range(5))
    text = [f"{{ {_SPIN} .reg .b32 a<{4 * len(vectors)}>, c, e; .reg .f32 f, v<4>, s<{b}>; AGAIN:"]
    text += _load_words(shape, vectors, shape.hidden, place)
    text.append(check_tags(4 * len(vectors), tag) + "@p bra DONE;")
    text.append(give_up(shape, workspace, code, "DONE", "AGAIN") + "DONE: bar.warp.sync -1;")
    text += [f"mov.f32 s{i}, 0f00000000;" for i in range(b)]
    for n, (chunk, token, part) in enumerate(vectors):
        weights = b + 5 + 2 * (chunk * parts + part)
        for k in range(4):
            word = f"${weights + k // 2}"
            widen = f"shl.b32 e, {word}, 16;" if k % 2 == 0 else f"and.b32 e, {word}, 0xffff0000;"
            text.append(
                f"and.b32 c, a{4 * n + k}, 0xffff0000; mov.b32 v{k}, c; fma.rn.f32 s{token}, v{k}, v{k}, s{token};"
                f"{widen} mov.b32 f, e; mul.f32 v{k}, v{k}, f;"
            )
        text.append(pack_four(shape, ("v0", "v1", "v2", "v3"), ("c", "e")))
        text.append(store_four(shape, x, x_offset(shape, chunk, token, part), ("c", "e")))
    if shape.warp_k < 128:  # the other lanes read the same words again
        text.append(f"mov.u32 c, %laneid; setp.ge.u32 p, c, {shape.warp_k // 4};")
        text += [f"@p mov.f32 s{i}, 0f00000000;" for i in range(b)]
    text += [f"mov.f32 ${i}, s{i};" for i in range(b)]
    constraints = ["=&f"] * b + ["l", "r", "l", "r", "r"] + ["r"] * (2 * chunks * parts)
    return "\n".join(text) + "bar.warp.sync -1; }", ",".join(constraints)


def store_squares(shape: StepShape) -> Assembly:
    """Sum each token's squares over the warp and store them: $1 the warp's place (32 bytes a token), then the sums."""
    text = ["{ .reg .pred p; .reg .b32 ln; .reg .f32 f, s; mov.u32 ln, %laneid; setp.eq.u32 p, ln, 0;"]
    for token in range(shape.max_tokens):
        text.append(f"mov.f32 s, ${2 + token};")
        text += [f"shfl.sync.bfly.b32 f, s, {m}, 31, -1; add.f32 s, s, f;" for m in (16, 8, 4, 2, 1)]
        text.append(f"@p st.shared.f32 [$1+{4 * WARPS * token}], s;")
    return "\n".join(text) + "mov.b32 $0, 0; }", ",".join(["=r", "r"] + ["f"] * shape.max_tokens)


def load_weights(shape: StepShape, chunks: int) -> Assembly:
    """Norm weights of a lane: two words for each (chunk, part), at the address in the last operand."""
    parts = max(1, shape.warp_k // 128)
    places = [(c, i) for c in range(chunks) for i in range(parts)]
    source = f"${2 * len(places)}"
    text = [
        f"ld.global.nc.v2.b32 {{${2 * n}, ${2 * n + 1}}}, [{source}+{2 * (c * shape.warp_k + 128 * i)}];"
        for n, (c, i) in enumerate(places)
    ]
    return "\n".join(text), ",".join(["=&r"] * (2 * len(places)) + ["l"])


def poll_heads(shape: StepShape) -> Assembly:
    """Read four words of q, k, v and leave them as bf16. $1 words, $2 tag, $3 workspace, $4 fault code, $5 place."""
    return (
        f"""{{ {_SPIN} .reg .b32 a<4>, c, e; AGAIN: ld.relaxed.gpu.global.v4.b32 {{a0,a1,a2,a3}}, [$1];
{check_tags(4, "$2")} @p bra DONE; {give_up(shape, "$3", "$4", "DONE", "AGAIN")} DONE: bar.warp.sync -1;
prmt.b32 a0, a0, a1, 0x7632; prmt.b32 a1, a2, a3, 0x7632; st.shared.v2.b32 [$5], {{a0, a1}};
mov.b32 $0, 0; }}""",
        "=r,l,r,l,r,r",
    )
