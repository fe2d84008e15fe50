"""PTX of the tuned decode linears: packed E2M1 codes to mma.m16n8k16 fragments, and the multiplications.

With lane = 4 g + t, the A fragment of an mma holds rows g and g + 8 (registers 0, 2 and 1, 3) at two pairs of k
(registers 0, 1 and 2, 3). Which k a pair stands for is free as long as A and B agree, so that every lane takes runs of
consecutive k, which it loads 16 bytes at a time.
"""

from __future__ import annotations

from mmcompile.core.formats.nvfp4_fragments import FLAVOURS

# By dtype: packed type, and what brings E4M3 numbers, moved to the exponent of that type, to their value times
# 2^118 (bfloat16) or 2^6 (float16). Codes come out times 2^-126 or 2^-14, so weights come out times 2^-8.
_TYPES = {"bfloat16": "bf16", "float16": "f16"}


def unpack_pairs(dtype: str, word: str) -> str:
    """The four pairs of codes of a word in registers p0..p3, as numbers times 2^-126 (bfloat16) or 2^-14 (float16).

    See FLAVOURS for where the bits are. A multiplication moves sign and magnitude by different distances at once.
    """
    (sign, magnitude), *_ = FLAVOURS[dtype]
    kept = ((1 << sign) | (7 << magnitude)) * 0x10001
    lines = [f"and.b32 p0, {word}, {kept:#x};", f"shl.b32 p1, {word}, 3; and.b32 p1, p1, {kept:#x};"]
    if dtype == "bfloat16":
        return " ".join([
            *lines,
            f"and.b32 p2, {word}, 0x40074007; mul.lo.u32 p2, p2, 66; and.b32 p2, p2, {kept:#x};",
            f"shr.u32 p3, {word}, 3; and.b32 p3, p3, 0x01C001C0; shl.b32 q, {word}, 2;",
            "lop3.b32 p3, q, 0x80008000, p3, 0xEA;",
        ])  # fmt: skip
    return " ".join([
        *lines,
        f"and.b32 p2, {word}, 0x40384038; mul.lo.u32 p2, p2, 66; and.b32 p2, p2, {kept:#x};",
        f"and.b32 p3, {word}, 0x20072007; mul.lo.u32 p3, p3, 516; and.b32 p3, p3, {kept:#x};",
    ])  # fmt: skip


def convert_pairs(dtype: str, word: str) -> str:
    """The four pairs of codes of a word of the flavour "pairs" in registers p0..p3, one conversion each."""
    converted = " ".join(f"cvt.rn.{_TYPES[dtype]}x2.e2m1x2 p{i}, c{i};" for i in range(4))
    return f"{{ .reg .b8 c<4>; mov.b32 {{c0, c1, c2, c3}}, {word}; {converted} }}"


def _spread_scales(dtype: str, register: str, chunk: int, *, pairs: bool) -> str:
    """The scales of rows g and g + 8 for a chunk, twice each, in registers s0 and s1: weights come out times 2^-8."""
    halves = "mov.b32 {low, high}, q; mov.b32 s0, {low, low}; mov.b32 s1, {high, high};"
    if pairs:
        half, short = "high" if chunk % 2 else "low", _TYPES[dtype]
        factor = {"bf16": "0x3B803B80", "f16": "0x1C001C00"}[short]  # 2^-8, twice
        return (
            f"mov.b32 {{low, high}}, {register}; cvt.rn.{short}x2.e4m3x2 q, {half}; mov.b32 s0, {factor}; "
            f"mul.rn.{short}x2 q, q, s0; {halves}"
        )
    if dtype == "bfloat16":
        selector, factor = 0x4342 if chunk % 2 else 0x4140, "mov.b32 s0, 0x7B007B00;"  # 2^119, twice
        return (
            f"prmt.b32 q, {register}, 0, {selector:#x}; shl.b32 q, q, 4; {factor} "
            f"mul.rn.bf16x2 q, q, s0; mul.rn.bf16x2 q, q, s0; {halves}"
        )
    half, factor = "high" if chunk % 2 else "low", "mov.b32 s0, 0x54005400;"  # 2^6
    return (
        f"mov.b32 {{low, high}}, {register}; cvt.rn.f16x2.e4m3x2 q, {half}; {factor} mul.rn.f16x2 q, q, s0; {halves}"
    )


def decode_word(dtype: str, *, pairs: bool = False) -> str:
    """$0 to $3: the four pairs of word $4 times the scales in the low bytes of $5, times 2^-8.

    ``pairs``: the word has the flavour "pairs" instead of that of ``dtype``.
    """
    short = _TYPES[dtype]
    lines = [
        "{ .reg .b32 p<4>, q, s0, s1; .reg .b16 low, high;",
        _spread_scales(dtype, "$5", 0, pairs=pairs),
        (convert_pairs if pairs else unpack_pairs)(dtype, "$4"),
        *(f"mul.rn.{short}x2 ${i}, p{i}, s{i % 2};" for i in range(4)),
        "}",
    ]
    return " ".join(lines)


def _multiply(dtype: str, a: str, b: str, group: int) -> str:
    """One mma of fragments ``a`` and ``b`` into the accumulators d of a token group."""
    short = _TYPES[dtype]
    d = ", ".join(f"d{4 * group + i}" for i in range(4))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{d}}};"


def _wrap(body: list[str], inputs: int, groups: int) -> tuple[str, str]:
    """Assembly with the accumulators as last inputs and as results, and its constraints."""
    count = 4 * groups
    first = count + inputs
    lines = [
        f"{{ .reg .b32 p<4>, q, s0, s1; .reg .b16 low, high; .reg .f32 d<{count}>;",
        *(f"mov.f32 d{i}, ${first + i};" for i in range(count)),
        *body,
        *(f"mov.f32 ${i}, d{i};" for i in range(count)),
        "}",
    ]
    return " ".join(lines), ",".join(["=&f"] * count + ["r"] * inputs + ["f"] * count)


def multiply_fragments(dtype: str, chunk: int, groups: int, *, pairs: bool = False) -> tuple[str, str]:
    """16 rows times 64 k of NVFP4 fragments (mmcompile.core.formats.nvfp4_fragments), for 8 tokens a group.

    Operands: 4 code words, 2 registers of scales for the chunks 0 to 3, 8 words of x a group, 4 sums a group.
    ``pairs``: the words have the flavour "pairs" instead of that of ``dtype``.
    """
    words, scales = [f"${4 * groups + i}" for i in range(4)], [f"${4 * groups + 4 + i}" for i in range(2)]
    x = 4 * groups + 6
    short = _TYPES[dtype]
    body = [_spread_scales(dtype, scales[chunk // 2], chunk, pairs=pairs)]
    for j, word in enumerate(words):
        body.append((convert_pairs if pairs else unpack_pairs)(dtype, word))
        body += [f"mul.rn.{short}x2 p{i}, p{i}, s{i % 2};" for i in range(4)]
        for group in range(groups):
            place = x + 8 * group + 2 * j
            body.append(_multiply(dtype, "p0, p1, p2, p3", f"${place}, ${place + 1}", group))
    return _wrap(body, 6 + 8 * groups, groups)


def multiply_rows(dtype: str, groups: int) -> tuple[str, str]:
    """16 rows times 32 k of unquantized weights, for 8 tokens a group.

    Operands: 4 words of row g, 4 of row g + 8, 4 words of x a group, 4 sums a group.
    """
    upper, lower = [f"${4 * groups + i}" for i in range(4)], [f"${4 * groups + 4 + i}" for i in range(4)]
    x = 4 * groups + 8
    body = []
    for j in (0, 2):
        a = f"{upper[j]}, {lower[j]}, {upper[j + 1]}, {lower[j + 1]}"
        for group in range(groups):
            place = x + 4 * group + j
            body.append(_multiply(dtype, a, f"${place}, ${place + 1}", group))
    return _wrap(body, 8 + 4 * groups, groups)


def hold_loads() -> str:
    """A barrier of each warp with itself: ptxas moves no load across it, so all loads before it are in flight together.

    It takes barriers 1 to the number of warps; ptxas drops bar.warp.sync, which would take none.
    """
    return (
        "{ .reg .b32 own; mov.u32 own, %tid.x; shr.u32 own, own, 5; add.u32 own, own, 1; bar.sync own, 32; "
        "mov.b32 $0, $1; }"
    )
