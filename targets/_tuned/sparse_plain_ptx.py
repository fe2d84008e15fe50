"""PTX of the tuned block-sparse kernels over plain pages of bf16 or float8_e4m3fn: rows to fragments of mma.m16n8k16.

As in sparse_ptx, whose functions take over from the scores on. With lane = 4 g + t, a lane holds 16 bytes of row g of
a tile of 8 tokens for K, and 16 bytes of each of the rows 2 t and 2 t + 1 for V. fp8 becomes f16, exactly.
"""

from __future__ import annotations

from mmcompile.targets._tuned.sparse_ptx import Assembly, Text, keep_largest, multiply

KINDS = {"bfloat16": "bf16", "float8_e4m3fn": "f16"}
"""What the pages' elements are multiplied as."""
KEY_LOADS = {"bf16": 4, "f16": 2}
"""Operands of 16 bytes a lane that hold the keys of a tile."""


def convert(word: str, name: str) -> str:
    """Four fp8 as the pairs name0 and name1 of f16 (needs registers b16 l, h)."""
    return f"mov.b32 {{l, h}}, {word}; cvt.rn.f16x2.e4m3x2 {name}0, l; cvt.rn.f16x2.e4m3x2 {name}1, h;"


def take_pairs(asm: Assembly, kind: str, loads: list[list[str]], step: int, name: str) -> list[str]:
    """The two pairs of a tile that a lane gives to one of eight steps of 16 elements of a row."""
    if kind == "bf16":
        even = 2 * (step % 2)
        return loads[step // 2][even : even + 2]
    asm.add(convert(loads[step // 4][step % 4], name))
    return [f"{name}0", f"{name}1"]


def score_tiles(kind: str) -> Text:
    """Scores [16 heads, 8 tokens] of two tiles, interleaved.

    Operands: the loads of the first tile, those of the second; eight tensors of query words (step // 2, head half);
    what to start from.
    """
    asm = Assembly(["=&f"] * 8)
    loads = [[asm.take("r") for _ in range(KEY_LOADS[kind])] for _ in range(2)]
    query, start = [asm.take("r") for _ in range(8)], asm.take("f")
    asm.add(".reg .b32 p<2>, r<2>; .reg .b16 l, h; .reg .f32 d<4>, e<4>;")
    for step in range(8):
        low, high = query[step // 2 * 2], query[step // 2 * 2 + 1]
        even = 2 * (step % 2)
        a = [low[even], high[even], low[even + 1], high[even + 1]]
        for tile, (sums, name) in enumerate((("d", "p"), ("e", "r"))):
            d = [f"{sums}{i}" for i in range(4)]
            b = take_pairs(asm, kind, loads[tile], step, name)
            asm.add(multiply(d, a, b, start if step == 0 else d, "f32", kind))
    asm.add(*(f"mov.f32 ${i}, d{i}; mov.f32 ${4 + i}, e{i};" for i in range(4)))
    return asm.build()


def add_values(kind: str, quarter: int) -> Text:
    """Sums [16 heads, 8 columns] of four columns of each lane g, plus weights times V, for 16 tokens.

    quarter: which words of a load, two of bf16 or one of fp8.
    Operands: the words of rows 2 t and 2 t + 1 of one tile, those of the next; weights; four sums.
    """
    asm = Assembly(["=&f"] * 16)
    rows, weights = [asm.take("r") for _ in range(4)], asm.take("r")
    sums = [register for _ in range(4) for register in asm.take("f")]
    asm.add(".reg .b32 p<4>, r<4>, w; .reg .b16 l, h;")
    words = range(2 * quarter, 2 * quarter + 2) if kind == "bf16" else (quarter,)
    for i, word in enumerate(words):
        for tile, name in enumerate("pr"):
            pair = f"{rows[2 * tile][word]}, {rows[2 * tile + 1][word]}"
            if kind == "bf16":
                asm.add(f"prmt.b32 {name}{2 * i}, {pair}, 0x5410; prmt.b32 {name}{2 * i + 1}, {pair}, 0x7632;")
                continue
            for part, selector in enumerate(("0x5140", "0x7362")):
                asm.add(f"prmt.b32 w, {pair}, {selector}; mov.b32 {{l, h}}, w;")
                asm.add(*(f"cvt.rn.f16x2.e4m3x2 {name}{2 * part + k}, {'lh'[k]};" for k in range(2)))
    for q in range(4):
        d = [f"${4 * q + i}" for i in range(4)]
        asm.add(multiply(d, weights, [f"p{q}", f"r{q}"], sums[4 * q : 4 * q + 4], "f32", kind))
    return asm.build()


def score_keys(pair: int, groups: int, heads: int) -> Text:
    """As ``sparse_ptx.score_keys`` for keys of fp8.

    Operands: the two loads of each of two tiles; four tensors of query words a group; the largest so far; the visible
    tokens of the page. NaN stays.
    """
    asm = Assembly(["=&f"] * 4)
    loads = [[asm.take("r") for _ in range(KEY_LOADS["f16"])] for _ in range(2)]
    query = [[asm.take("r") for _ in range(4)] for _ in range(groups)]
    best, visible = asm.take("f"), asm.take("r")
    asm.add(f".reg .b32 p<2>, r<2>, w, v; .reg .b16 l, h; .reg .pred P, Q; .reg .f32 d<{4 * groups}>, z;")
    asm.add("mov.f32 z, 0f00000000;")
    for step in range(8):
        first, second = (take_pairs(asm, "f16", loads[tile], step, name) for tile, name in enumerate("pr"))
        even = 2 * (step % 2)
        for group in range(groups):
            d = [f"d{4 * group + i}" for i in range(4)]
            b = query[group][step // 2][even : even + 2]
            asm.add(multiply(d, [first[0], second[0], first[1], second[1]], b, ["z"] * 4 if step == 0 else d, "f32"))
    keep_largest(asm, pair, groups, heads, best, visible)
    return asm.build()


def store_rows(offset: int) -> Text:
    """Store bf16 rows of sums over their weights, 8 values at ``offset`` bytes; zeros where no token was visible.

    Operands: eight sums; the state with the weights of all lanes; int64 addresses of (head half, the lane's first or
    second column). The result is nothing.
    """
    asm = Assembly(["=r"] * 4)
    sums, state, place = [asm.take("f") for _ in range(8)], asm.take("f"), asm.take("l")
    asm.add(".reg .f32 w0, w1, x, y; .reg .b32 r<4>; .reg .pred p;")
    for row in range(2):
        asm.add(f"rcp.approx.ftz.f32 w{row}, {state[2 + row]}; setp.gt.f32 p, {state[2 + row]}, 0f00000000;")
        asm.add(f"selp.f32 w{row}, w{row}, 0f00000000, p;")
    for target in range(4):
        for k in range(4):
            asm.add(f"mul.f32 x, {sums[2 * k][target]}, w{target // 2};")
            asm.add(f"mul.f32 y, {sums[2 * k + 1][target]}, w{target // 2}; cvt.rn.bf16x2.f32 r{k}, y, x;")
        asm.add(f"st.global.v4.b32 [{place[target]}+{offset}], {{r0, r1, r2, r3}};")
    asm.add(*(f"mov.b32 ${i}, 0;" for i in range(4)))
    return asm.build()
