"""PTX of the tuned block-sparse kernels: NVFP4 pages in lane order to fragments of mma.m16n8k16, softmax, output rows.

Every function returns the text and the constraints of one ``tl.inline_asm_elementwise`` over tensors of four registers
a thread. With lane = 4 g + t, the pages are those of ``core/formats/nvfp4_cache_sm90.py``. Codes come out times 2^-14
and scales times 2^6, so keys and values come out times 2^-8.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

Text = tuple[str, str]
FEATURES = frozenset({"mma_m16n8k16", "cvt_e4m3_f16x2"})
MINUS_INFINITY = "0fFF800000"


@dataclass
class Assembly:
    """Text in the making. ``outputs``: constraint of every result register; inputs follow as they are taken."""

    outputs: list[str]
    inputs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def take(self, constraint: str, count: int = 4) -> list[str]:
        """The registers of the next operand."""
        first = len(self.outputs) + len(self.inputs)
        self.inputs += [constraint] * count
        return [f"${first + i}" for i in range(count)]

    def add(self, *lines: str) -> None:
        """Append instructions."""
        self.lines += lines

    def build(self) -> Text:
        """Text and constraints, in a scope of its own."""
        return "\n".join(["{", *self.lines, "}"]), ",".join(self.outputs + self.inputs)


def as_constant(*texts: Text) -> str:
    """(text, constraints, text, constraints, ...) as an expression of emitted source, a line of assembly a line."""
    parts = [[*(f"{line}\n" for line in text.split("\n")), None, constraints] for text, constraints in texts]
    lines = [part for text in parts for part in (*text, None)]
    return "(\n" + "\n".join("    ," if line is None else f"    {line!r}" for line in lines) + "\n)"


def unpack(word: str, name: str) -> list[str]:
    """The pairs of codes 0 to 3 of a word's two halves in registers name0..name3, times 2^-14.

    A multiplication moves sign and magnitude by different distances at once.
    """
    return [
        f"and.b32 {name}0, {word}, 0x8E008E00;",
        f"shl.b32 {name}1, {word}, 3; and.b32 {name}1, {name}1, 0x8E008E00;",
        f"and.b32 {name}2, {word}, 0x40384038; mul.lo.u32 {name}2, {name}2, 66; and.b32 {name}2, {name}2, 0x8E008E00;",
        f"and.b32 {name}3, {word}, 0x20072007; mul.lo.u32 {name}3, {name}3, 516; and.b32 {name}3, {name}3, 0x8E008E00;",
    ]


def scale(name: str, factor: str) -> list[str]:
    """The four pairs times their blocks' scales."""
    return [f"mul.rn.f16x2 {name}{q}, {name}{q}, {factor};" for q in range(4)]


def convert_scales(word: str, low: str, high: str) -> list[str]:
    """Four E4M3 scales as two pairs, times 2^6 (needs registers b16 l, h and b32 k = 0x54005400)."""
    return [
        f"mov.b32 {{l, h}}, {word}; cvt.rn.f16x2.e4m3x2 {low}, l; cvt.rn.f16x2.e4m3x2 {high}, h;",
        f"mul.rn.f16x2 {low}, {low}, k; mul.rn.f16x2 {high}, {high}, k;",
    ]


def multiply(d: list[str], a: list[str], b: list[str], c: list[str], sums: str, kind: str = "f16") -> str:
    """One mma of fragments of a kind, "f16" or "bf16"; sums: "f32" or "f16"."""
    operands = ", ".join(f"{{{', '.join(part)}}}" for part in (d, a, b, c))
    return f"mma.sync.aligned.m16n8k16.row.col.{sums}.{kind}.{kind}.{sums} {operands};"


def first_in_quad(limit: str) -> list[str]:
    """Register c: ``limit`` less the first of the lane's two columns in a tile of 8 (needs b32 c, w)."""
    return ["mov.u32 w, %laneid; and.b32 w, w, 3; shl.b32 w, w, 1;", f"sub.s32 c, {limit}, w;"]


def split_scales() -> Text:
    """Scales of a step of 32 tokens for all uses of them, those of values that are not visible set to 0.

    Operands: the lane's 16 bytes of scales; visible tokens of the step (all registers alike). Results: pairs of K's
    scales of the four tiles (blocks t and 4 + t), pairs of V's (even and odd token).
    """
    asm = Assembly(["=&r"] * 8)
    words, visible = asm.take("r"), asm.take("r")
    asm.add(".reg .b16 l, h; .reg .b32 v, c, w, m, k; .reg .pred p; mov.b32 k, 0x54005400;", *first_in_quad(visible[0]))
    for i in range(2):
        asm.add(*convert_scales(words[i], f"${2 * i}", f"${2 * i + 1}"))
    for i in range(2):
        asm.add("mov.b32 m, 0;")
        for byte, token in enumerate((16 * i, 16 * i + 1, 16 * i + 8, 16 * i + 9)):
            asm.add(f"setp.gt.s32 p, c, {token}; @p or.b32 m, m, {0xFF << 8 * byte:#x};")
        asm.add(f"and.b32 v, {words[2 + i]}, m;", *convert_scales("v", f"${4 + 2 * i}", f"${5 + 2 * i}"))
    return asm.build()


def score_tiles(tile: int) -> Text:
    """Scores [16 heads, 8 tokens] of the tiles ``tile`` and ``tile + 1`` of a step, interleaved.

    Operands: the two tiles' words; K's scales; eight tensors of query words (u, j, head half); what to start from.
    """
    asm = Assembly(["=&f"] * 8)
    words, scales = [asm.take("r") for _ in range(2)], asm.take("r")
    query, start = [asm.take("r") for _ in range(8)], asm.take("f")
    asm.add(".reg .b32 p<4>, r<4>, s<4>; .reg .b16 l, h; .reg .f32 d<4>, e<4>;")
    for j in range(2):
        asm.add(f"mov.b32 {{l, h}}, {scales[tile + j]}; mov.b32 s{2 * j}, {{l, l}}; mov.b32 s{2 * j + 1}, {{h, h}};")
    for step in range(8):
        if step % 2 == 0:
            for j, name in enumerate("pr"):
                asm.add(*unpack(words[j][step // 2], name), *scale(name, f"s{2 * j + step // 4}"))
        low, high = query[step // 2 * 2], query[step // 2 * 2 + 1]
        even = 2 * (step % 2)
        a = [low[even], high[even], low[even + 1], high[even + 1]]
        for sums, name in (("d", "p"), ("e", "r")):
            d = [f"{sums}{i}" for i in range(4)]
            asm.add(multiply(d, a, [f"{name}{even}", f"{name}{even + 1}"], start if step == 0 else d, "f32"))
    asm.add(*(f"mov.f32 ${i}, d{i}; mov.f32 ${4 + i}, e{i};" for i in range(4)))
    return asm.build()


def update_softmax(shift: int, factor: float, tiles: int = 4, kind: str = "f16") -> Text:
    """One online softmax step in base 2 over the scores of 8 * ``tiles`` tokens, times ``factor``, which is positive.

    The factor costs nothing where the maximum is taken off; in f16 queries it would leave them less than f16's range.

    Operands: a tensor of scores a tile; state (maximum of heads g and g + 8, the lane's share of their weights);
    visible tokens of the step. Results: weights of 16 tokens a pair of tiles, as A fragments of ``kind``, times
    2^shift; the state; what earlier sums decay by (head g twice, head g + 8 twice).
    """
    weights, columns = 2 * tiles, range(2 * tiles)
    asm = Assembly(["=&r"] * weights + ["=&f"] * 8)
    scores, state, visible = [asm.take("f") for _ in range(tiles)], asm.take("f"), asm.take("r")
    asm.add(f".reg .f32 s<{4 * tiles}>, mx, x, ms, al, sm; .reg .pred p; .reg .b32 w, c;", *first_in_quad(visible[0]))
    for column in columns:
        tile, odd = divmod(column, 2)
        asm.add(f"setp.gt.s32 p, c, {8 * tile + odd};")
        for place in (4 * tile + odd, 4 * tile + odd + 2):
            asm.add(f"selp.f32 s{place}, {scores[tile][place % 4]}, {MINUS_INFINITY}, p;")
    for half in range(2):
        mine = [f"s{4 * (column // 2) + 2 * half + column % 2}" for column in columns]
        asm.add(f"max.f32 mx, {mine[0]}, {mine[1]};", *(f"max.f32 mx, mx, {x};" for x in mine[2:]))
        asm.add(*(f"shfl.sync.bfly.b32 x, mx, {k}, 31, -1; max.f32 mx, mx, x;" for k in (1, 2)))
        asm.add(
            f"mul.f32 mx, mx, {float_bits(factor)}; max.f32 mx, mx, {state[half]};",
            f"setp.eq.f32 p, mx, {MINUS_INFINITY}; selp.f32 ms, 0f00000000, mx, p;",
            f"sub.f32 al, {state[half]}, ms; ex2.approx.ftz.f32 al, al; mul.f32 sm, {state[2 + half]}, al;",
            f"sub.f32 ms, {float_bits(shift)}, ms;",
            *(f"fma.rn.f32 {x}, {x}, {float_bits(factor)}, ms; ex2.approx.ftz.f32 {x}, {x};" for x in mine),
            *(f"add.f32 sm, sm, {x};" for x in mine),
            f"mov.f32 ${weights + half}, mx; mov.f32 ${weights + 2 + half}, sm;",
            f"mov.f32 ${weights + 4 + 2 * half}, al; mov.f32 ${weights + 5 + 2 * half}, al;",
        )
    for register in range(weights):
        first = 4 * (2 * (register // 4) + register % 4 // 2) + 2 * (register % 2)
        asm.add(f"cvt.rn.{kind}x2.f32 ${register}, s{first + 1}, s{first};")
    return asm.build()


def float_bits(value: float) -> str:
    """A number as a PTX literal of fp32."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def add_values(half: int, quarter: int) -> Text:
    """Sums [16 heads, 4 values of each of the 8 blocks] plus weights times V, in f16, for 16 tokens.

    half: which tokens of the step; quarter: which values of a block of 16. Operands: the words of two tiles; scales;
    weights; the sums of the even and the odd pair of values.
    """
    asm = Assembly(["=&r"] * 8)
    words, scales, weights = [asm.take("r"), asm.take("r")], asm.take("r"), asm.take("r")
    sums = asm.take("r") + asm.take("r")
    asm.add(".reg .b32 p<4>, r<4>, d<8>;", *(f"mov.b32 d{i}, {register};" for i, register in enumerate(sums)))
    for j, name in enumerate("pr"):
        asm.add(*unpack(words[j][quarter], name), *scale(name, scales[2 * half + j]))
    for q in range(4):
        d = [f"d{2 * q}", f"d{2 * q + 1}"]
        asm.add(multiply(d, weights, [f"p{q}", f"r{q}"], d, "f16"))
    asm.add(*(f"mov.b32 ${i}, d{i};" for i in range(8)))
    return asm.build()


def decay_sums() -> Text:
    """f16 sums times what they decay by. Operands: sums; the decay as ``update_softmax`` gives it."""
    asm = Assembly(["=&r"] * 4)
    sums, decay = asm.take("r"), asm.take("f")
    asm.add(".reg .b32 x, y;", *(f"cvt.rn.f16x2.f32 {n}, {decay[i]}, {decay[i + 1]};" for n, i in (("x", 0), ("y", 2))))
    asm.add(*(f"mul.rn.f16x2 ${i}, {sums[i]}, {'xy'[i % 2]};" for i in range(4)))
    return asm.build()


def store_rows(half: int) -> Text:
    """Store bf16 rows of sums over their weights, 8 of a block's 16 values; zeros where no token was visible.

    Operands: four sums; the state with the weights of all lanes; int64 addresses of (head half, block). The result is
    nothing.
    """
    asm = Assembly(["=r"] * 4)
    sums, state, place = [asm.take("r") for _ in range(4)], asm.take("f"), asm.take("l")
    asm.add(".reg .f32 w0, w1, x, y; .reg .b32 r<4>; .reg .b16 l, h; .reg .pred p;")
    for row in range(2):
        asm.add(f"rcp.approx.ftz.f32 w{row}, {state[2 + row]}; setp.gt.f32 p, {state[2 + row]}, 0f00000000;")
        asm.add(f"selp.f32 w{row}, w{row}, 0f00000000, p; mul.f32 w{row}, w{row}, 0f43800000;")
    for target in range(4):
        row, part = target // 2, "lh"[target % 2]
        for k, pair in enumerate(sums):
            for name, word in (("x", pair[row]), ("y", pair[2 + row])):
                asm.add(f"mov.b32 {{l, h}}, {word}; cvt.f32.f16 {name}, {part}; mul.f32 {name}, {name}, w{row};")
            asm.add(f"cvt.rn.bf16x2.f32 r{k}, y, x;")
        asm.add(f"st.global.v4.b32 [{place[target]}+{16 * half}], {{r0, r1, r2, r3}};")
    asm.add(*(f"mov.b32 ${i}, 0;" for i in range(4)))
    return asm.build()


def store_weight() -> Text:
    """Store log2 of the weights of heads g and g + 8, minus infinity for none, by lanes t = 0.

    Operands: the state with the weights of all lanes; int64 addresses of (head half, nothing).
    """
    asm = Assembly(["=r"] * 4)
    state, place = asm.take("f"), asm.take("l")
    asm.add(".reg .f32 v; .reg .pred p, q; .reg .b32 w; mov.u32 w, %laneid; and.b32 w, w, 3; setp.eq.u32 q, w, 0;")
    for row in range(2):
        asm.add(f"lg2.approx.ftz.f32 v, {state[2 + row]}; add.f32 v, v, {state[row]};")
        asm.add(f"setp.gt.f32 p, {state[2 + row]}, 0f00000000; selp.f32 v, v, {MINUS_INFINITY}, p;")
        asm.add(f"@q st.global.f32 [{place[2 * row]}], v;")
    asm.add(*(f"mov.b32 ${i}, 0;" for i in range(4)))
    return asm.build()


def score_keys(pair: int, groups: int, heads: int) -> Text:
    """The largest scores so far of up to 16 columns (queries), and of the 16 tokens of two tiles of a page.

    pair: which two tiles; groups: 1 or 2 groups of 8 columns; heads: successive columns of one token. Operands: the
    tiles' words; scales of the half page; four tensors (u, j) of query words a group; the largest so far, and the
    visible tokens of the page, for the columns 2 t and 2 t + 1 of both groups. NaN stays.
    """
    asm = Assembly(["=&f"] * 4)
    words, scales = [asm.take("r") for _ in range(2)], asm.take("r")
    query = [[asm.take("r") for _ in range(4)] for _ in range(groups)]
    best, visible = asm.take("f"), asm.take("r")
    asm.add(".reg .b32 p<4>, r<4>, s<4>, k, w, v; .reg .b16 l, h; .reg .pred P, Q;", f".reg .f32 d<{4 * groups}>, z;")
    asm.add("mov.b32 k, 0x54005400; mov.f32 z, 0f00000000;", *convert_scales(scales[pair % 4], "s1", "s3"))
    asm.add(*(f"mov.b32 {{l, h}}, s{i + 1}; mov.b32 s{i}, {{l, l}}; mov.b32 s{i + 1}, {{h, h}};" for i in (0, 2)))
    for step in range(8):
        if step % 2 == 0:
            for j, name in enumerate("pr"):
                asm.add(*unpack(words[j][step // 2], name), *scale(name, f"s{2 * j + step // 4}"))
        even = 2 * (step % 2)
        a = [f"{name}{even + high}" for high in range(2) for name in "pr"]
        for group in range(groups):
            d = [f"d{4 * group + i}" for i in range(4)]
            b = [query[group][step // 2][even], query[group][step // 2][even + 1]]
            asm.add(multiply(d, a, b, ["z"] * 4 if step == 0 else d, "f32"))
    keep_largest(asm, pair, groups, heads, best, visible)
    return asm.build()


def keep_largest(asm: Assembly, pair: int, groups: int, heads: int, best: list[str], visible: list[str]) -> None:
    """The end of ``score_keys``: the largest of the sums d of 16 tokens (needs f32 z, b32 w, v, predicates P, Q)."""
    asm.add(f"mov.u32 w, %laneid; shr.u32 w, w, 2; add.u32 w, w, {16 * pair}; add.u32 v, w, 8;")
    for register in range(4):
        if register >= 2 * groups:
            asm.add(f"mov.f32 ${register}, {best[register]};")
            continue
        low, high = (f"d{4 * (register // 2) + register % 2 + 2 * half}" for half in range(2))
        seen = visible[register if heads == 1 else register // 2 * 2]  # two columns of one token see alike
        asm.add(
            f"setp.gt.s32 P, {seen}, w; setp.gt.s32 Q, {seen}, v;",
            f"selp.f32 {low}, {low}, {MINUS_INFINITY}, P; selp.f32 {high}, {high}, {MINUS_INFINITY}, Q;",
            f"max.NaN.f32 z, {low}, {high}; max.NaN.f32 ${register}, {best[register]}, z;",
        )


def store_largest(groups: int, factor: float = 256.0) -> Text:
    """Store the largest over the eight lanes of equal t, times ``factor``, for each column that is wanted.

    groups: 1 or 2. Operands: largest scores as ``score_keys`` leaves them; int64 address of the block in the row of
    column 0; elements from a row to the next; number of wanted columns (all registers alike). The result is nothing.
    """
    asm = Assembly(["=r"] * 4)
    best, place, row, wanted = asm.take("f"), asm.take("l"), asm.take("r"), asm.take("r")
    asm.add(".reg .f32 b, x; .reg .b32 w, c, n; .reg .b64 a; .reg .pred P; mov.u32 w, %laneid; shl.b32 c, w, 1;")
    asm.add(f"setp.lt.u32 P, w, 4; selp.b32 n, {wanted[0]}, 0, P;")
    for register in range(2 * groups):
        asm.add(f"mov.f32 b, {best[register]};")
        asm.add(*(f"shfl.sync.bfly.b32 x, b, {k}, 31, -1; max.NaN.f32 b, b, x;" for k in (4, 8, 16)))
        asm.add(f"mul.f32 b, b, {float_bits(factor)}; add.s32 w, c, {8 * (register // 2) + register % 2};")
        asm.add(f"setp.lt.s32 P, w, n; mul.lo.s32 w, w, {row[0]}; mad.wide.s32 a, w, 4, {place[0]};")
        asm.add("@P st.global.f32 [a], b;")
    asm.add(*(f"mov.b32 ${i}, 0;" for i in range(4)))
    return asm.build()


def sum_quads() -> Text:
    """The state with its weights added over the four lanes t of a quad."""
    asm = Assembly(["=&f"] * 4)
    state = asm.take("f")
    asm.add(f".reg .f32 x, u, v; mov.f32 $0, {state[0]}; mov.f32 $1, {state[1]};")
    asm.add(f"mov.f32 u, {state[2]}; mov.f32 v, {state[3]};")
    for k in (1, 2):
        asm.add(*(f"shfl.sync.bfly.b32 x, {n}, {k}, 31, -1; add.f32 {n}, {n}, x;" for n in "uv"))
    asm.add("mov.f32 $2, u; mov.f32 $3, v;")
    return asm.build()


def scale_query(factor: float) -> Text:
    """A pair of bf16 as a pair of f16 times ``factor``; one register."""
    asm = Assembly(["=r"])
    (pair,) = asm.take("r", 1)
    asm.add(".reg .f32 a, b; .reg .b32 u;")
    asm.add(f"shl.b32 u, {pair}, 16; mov.b32 a, u; and.b32 u, {pair}, 0xffff0000; mov.b32 b, u;")
    asm.add(f"mul.f32 a, a, {float_bits(factor)}; mul.f32 b, b, {float_bits(factor)}; cvt.rn.f16x2.f32 $0, b, a;")
    return asm.build()


def shuffle() -> Text:
    """The value of another lane: operands value and lane, one register each."""
    asm = Assembly(["=r"])
    (value,), (lane,) = asm.take("r", 1), asm.take("r", 1)
    asm.add(f"shfl.sync.idx.b32 $0, {value}, {lane}, 31, -1;")
    return asm.build()


def hold_loads() -> Text:
    """A barrier of the warp alone, which ptxas moves no load across; no operand, for up to 15 warps."""
    asm = Assembly(["=r"])
    asm.add(".reg .b32 w; mov.u32 w, %tid.x; shr.u32 w, w, 5; add.u32 w, w, 1; bar.sync w, 32; mov.b32 $0, 0;")
    return asm.build()
