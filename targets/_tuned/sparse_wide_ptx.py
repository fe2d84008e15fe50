"""PTX of the index scores of 32 columns: wgmma.m64n32k16 with decoded keys in registers, columns in shared memory."""

from __future__ import annotations

from mmcompile.targets._tuned.sparse_ptx import MINUS_INFINITY, Assembly, Text, convert_scales, scale, unpack

FEATURES = frozenset({"wgmma", "cvt_e4m3_f16x2"})
COLUMNS, STEPS = 32, 8
CORE = 128
"""Bytes of a core matrix: 8 columns times 8 elements."""
LEADING, STRIDE = COLUMNS // 8 * CORE, CORE
"""Bytes from a core matrix to the next along a row of keys, and along the columns."""
SHARED = 2 * STEPS * LEADING
PLACE = 1024
"""Where the columns begin in dynamic shared memory, behind what Triton takes for itself."""


def base_address() -> Text:
    """First byte of the columns in shared memory; the operand says nothing."""
    asm = Assembly(["=r"])
    asm.take("r", 1)
    asm.add(f"mov.u32 $0, global_smem; add.u32 $0, $0, {PLACE};")
    return asm.build()


def store_columns() -> Text:
    """Store a lane's words of its warp's 8 columns, for the reads of wgmma; the result is nothing.

    Operands: four tensors (u, j) of query words; the lane's first place, the base plus 4 bytes a thread.
    """
    asm = Assembly(["=r"] * 4)
    words, place = [asm.take("r") for _ in range(4)], asm.take("r")
    for part in range(4):
        asm.add(*(f"st.shared.b32 [{place[0]}+{(4 * part + i) * LEADING}], {words[part][i]};" for i in range(4)))
    asm.add("fence.proxy.async.shared::cta;", *(f"mov.b32 ${i}, 0;" for i in range(4)))
    return asm.build()


def multiply_wide(d: list[str], a: list[str], descriptor: str, add: bool) -> str:
    """One wgmma of 16 elements of every row of keys; ``add``: to what ``d`` holds."""
    return (f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.f16.f16 {{{', '.join(d)}}}, {{{', '.join(a)}}}, "
            f"{descriptor}, {int(add)}, 1, 1, 0;")  # fmt: skip


def score_keys(pair: int, heads: int, whole: bool) -> Text:
    """The largest scores so far of 32 columns (queries), and of the 16 tokens of two tiles of a page.

    pair: which two tiles; heads: successive columns of one token; whole: all tokens are visible to all. Operands: the
    tiles' words; scales of the half page; the columns' base (all registers alike); the largest so far of columns 2 t
    and 2 t + 1 of groups 0 and 1, and of groups 2 and 3; visible tokens of the page for the former. NaN stays.
    """
    asm = Assembly(["=&f"] * 8)
    words, scales, base = [asm.take("r") for _ in range(2)], asm.take("r"), asm.take("r")
    best, visible = asm.take("f") + asm.take("f"), asm.take("r")
    asm.add(".reg .b32 p<16>, r<16>, s<4>, y<2>, k, w, v; .reg .b16 l, h; .reg .pred P, Q; .reg .b64 m;")
    asm.add(f".reg .f32 d<{COLUMNS // 2}>, z; mov.b32 k, 0x54005400;", *convert_scales(scales[pair % 4], "s1", "s3"))
    asm.add(*(f"mov.b32 {{l, h}}, s{i + 1}; mov.b32 s{i}, {{l, l}}; mov.b32 s{i + 1}, {{h, h}};" for i in (0, 2)))
    asm.add(f"shr.u32 w, {base[0]}, 4; or.b32 w, w, {LEADING // 16 << 16:#x}; mov.b32 v, {STRIDE // 16};")
    asm.add("mov.b64 m, {w, v};")
    sums = [f"d{i}" for i in range(COLUMNS // 2)]
    for half in range(2):  # the second half is decoded while the first is multiplied
        for word in (2 * half, 2 * half + 1):
            for j, name in enumerate("pr"):
                registers = [f"{name}{4 * word + q}" for q in range(4)]
                asm.add(*rename(unpack(words[j][word], "y") + scale("y", f"s{2 * j + half}"), registers))
        asm.add("wgmma.fence.sync.aligned;")
        for step in range(4 * half, 4 * half + 4):
            a = [f"{name}{2 * step + high}" for high in range(2) for name in "pr"]
            asm.add(multiply_wide(sums, a, "m", step > 0))
            if step < STEPS - 1:
                asm.add(f"add.s64 m, m, {2 * LEADING // 16};")
        asm.add("wgmma.commit_group.sync.aligned;")
    asm.add("wgmma.wait_group.sync.aligned 0;")
    if not whole:
        asm.add("mov.u32 w, %laneid; shr.u32 w, w, 2;", *(f"sub.s32 y{i}, {visible[i]}, w;" for i in range(2)))
    for register in range(8):
        low, high = (f"d{4 * (register // 2) + register % 2 + 2 * row}" for row in range(2))
        if not whole:
            seen, first = f"y{register % 2}", 16 * pair - 8 * (register // 2) // heads
            asm.add(f"setp.gt.s32 P, {seen}, {first}; setp.gt.s32 Q, {seen}, {first + 8};")
            asm.add(f"selp.f32 {low}, {low}, {MINUS_INFINITY}, P; selp.f32 {high}, {high}, {MINUS_INFINITY}, Q;")
        asm.add(f"max.NaN.f32 z, {low}, {high}; max.NaN.f32 ${register}, {best[register]}, z;")
    return asm.build()


def rename(lines: list[str], registers: list[str]) -> list[str]:
    """The lines with ``registers`` for y0, y1, ..."""
    for i, register in enumerate(registers):
        lines = [line.replace(f"y{i}", register) for line in lines]
    return lines
