"""PTX of the tuned insertion into NVFP4 pages in lane order: 16 lanes hold a head of 128, 8 values of bf16 each.

Lane L of a half warp holds the values 8 L to 8 L + 7 in four registers; two lanes share a block of 16.
"""

from __future__ import annotations

from mmcompile.targets._tuned.sparse_ptx import Assembly, Text

FEATURES = frozenset({"cvt_e4m3_f16x2"})
KEY, VALUE = 1, 2
"""Kinds of rows that are quantized, in the order of the layout."""
_MOVES = ((0, 9), (3, 6), (1, 3), (2, 0))
"""For the codes 0 to 3 of a half: how far its sign moves right from bit 15, how far its magnitude left."""


def sum_lanes() -> Text:
    """The sum over the 16 lanes of a half warp; one register."""
    asm = Assembly(["=f"])
    (value,) = asm.take("f", 1)
    asm.add(f".reg .f32 x, y; mov.f32 x, {value};")
    asm.add(*(f"shfl.sync.bfly.b32 y, x, {k}, 31, -1; add.f32 x, x, y;" for k in (1, 2, 4, 8)), "mov.f32 $0, x;")
    return asm.build()


def turn_words(distance: int) -> Text:
    """Words times cosines plus words of the lane whose number differs in the bit ``distance`` times sines.

    Operands: words of values, of cosines, of sines with their signs. Products and sums round to bf16.
    """
    asm = Assembly(["=&r"] * 4)
    words, cos, sin = asm.take("r"), asm.take("r"), asm.take("r")
    asm.add(".reg .b32 x, y;")
    for i in range(4):
        asm.add(f"shfl.sync.bfly.b32 x, {words[i]}, {distance}, 31, -1; mul.rn.bf16x2 x, x, {sin[i]};")
        asm.add(f"mul.rn.bf16x2 y, {words[i]}, {cos[i]}; add.rn.bf16x2 ${i}, y, x;")
    return asm.build()


def store_block() -> Text:
    """Quantize 8 values as ``quantize_rows`` does and store their codes, and one of two lanes the scale.

    Operands: words of values; kind of the row (KEY, VALUE, or 0 for nothing, all registers alike); int64 addresses of
    the lane's codes and of its block's scale (all alike). The result is nothing. x / scale is not divided: its distance
    to a border between two codes is 0 or at least 2^-8 of it, so a product by 1 / scale, rounded to f16, falls on the
    border or on its side; from there the codes are f16 subnormals, rounded to even by an addition.
    """
    asm = Assembly(["=r"] * 4)
    words, kind, codes, scale = asm.take("r"), asm.take("r"), asm.take("l"), asm.take("l")
    asm.add(".reg .b32 v<4>, u<4>, w, n, c; .reg .f32 a<8>, m, y, z; .reg .b16 e, l, h; .reg .pred V, K, E;")
    asm.add(f"setp.eq.s32 V, {kind[0]}, {VALUE}; setp.eq.s32 K, {kind[0]}, {KEY};")
    for q in range(4):  # a half of V's codes holds successive values, one of K's every other
        pair = f"{words[q // 2]}, {words[2 + q // 2]}, {'0x7632' if q % 2 else '0x5410'}"
        asm.add(f"prmt.b32 w, {pair}; selp.b32 v{q}, w, {words[q]}, V; and.b32 u{q}, v{q}, 0x7FFF7FFF;")
        asm.add(f"shl.b32 w, u{q}, 16; mov.b32 a{2 * q}, w; and.b32 w, u{q}, 0xFFFF0000; mov.b32 a{2 * q + 1}, w;")
    asm.add("max.f32 m, a0, a1;", *(f"max.f32 m, m, a{i};" for i in range(2, 8)))
    asm.add("shfl.sync.bfly.b32 y, m, 1, 31, -1; max.f32 m, m, y;")
    # m / 6, correctly rounded: a product by 1 / 6 and the remainder's share
    asm.add("mul.f32 y, m, 0f3E2AAAAB; fma.rn.f32 z, y, 0fC0C00000, m; fma.rn.f32 m, z, 0f3E2AAAAB, y;")
    asm.add("max.f32 m, m, 0f3B000000; min.f32 m, m, 0f43E00000; cvt.rn.satfinite.e4m3x2.f32 e, m, m;")
    asm.add("cvt.rn.f16x2.e4m3x2 w, e; mov.b32 {l, h}, w; cvt.f32.f16 m, l;")
    asm.add("rcp.approx.ftz.f32 m, m; mov.b32 n, 0;")
    for q, (sign, magnitude) in enumerate(_MOVES):
        asm.add(*(f"mul.f32 a{i}, a{i}, m; min.f32 a{i}, a{i}, 0f40C00000;" for i in (2 * q, 2 * q + 1)))
        asm.add(f"cvt.rn.f16x2.f32 w, a{2 * q + 1}, a{2 * q}; mov.b32 c, 0x04000400; mul.rn.f16x2 w, w, c;")
        asm.add("shr.u32 c, w, 9; and.b32 c, c, 0x00010001; add.u32 w, w, c; add.u32 w, w, 0x00FF00FF;")
        asm.add("shr.u32 w, w, 9; and.b32 w, w, 0x00070007; add.u32 c, w, 0x00070007; shl.b32 c, c, 12;")
        asm.add(f"and.b32 c, c, 0x80008000; and.b32 c, c, v{q}; shr.u32 c, c, {sign}; or.b32 n, n, c;")
        asm.add(f"shl.b32 w, w, {magnitude}; or.b32 n, n, w;")
    asm.add(f"@K st.global.b32 [{codes[0]}], n; mov.b32 {{l, h}}, n;")
    asm.add(f"@V st.global.b16 [{codes[0]}], l; @V st.global.b16 [{codes[0]}+4], h;")
    asm.add(f"mov.u32 w, %laneid; and.b32 w, w, 1; setp.eq.u32 E, w, 0; setp.ne.and.s32 E, {kind[0]}, 0, E;")
    asm.add(f"cvt.u32.u16 w, e; @E st.global.b8 [{scale[0]}], w;", *(f"mov.b32 ${i}, 0;" for i in range(4)))
    return asm.build()
