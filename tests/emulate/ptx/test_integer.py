"""Integer and logic instructions against Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from snippets import evaluate

M = 0xFFFFFFFF
Reference = Callable[[int, int, int], int]


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def truncated_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def permute(a: int, b: int, selector: int) -> int:
    eight = [(a | b << 32) >> 8 * k & 255 for k in range(8)]
    result = 0
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = eight[nibble & 7]
        result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * k
    return result


def extract(a: int, position: int, length: int, *, sign: bool) -> int:
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    last = min(position + length - 1, 31)
    fill = (a >> last & 1) if sign else 0
    bits = [(a >> (position + i) & 1) if i < length and position + i <= 31 else fill for i in range(32)]
    return sum(bit << i for i, bit in enumerate(bits))


def insert(a: int, b: int, position: int, length: int) -> int:
    result = b
    for i in range(length & 255):
        place = (position & 255) + i
        if place < 32:
            result = result & ~(1 << place) | (a >> i & 1) << place
    return result & M


def lookup(table: int) -> Reference:
    return lambda a, b, c: sum(
        (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
    )


def wide(a: int, b: int) -> int:
    return a | b << 32


def xor_words(value: int) -> int:
    return (value & M) ^ (value >> 32 & M)


CASES: dict[str, Reference] = {
    "add.u32 %r, %a, %b;": lambda a, b, c: a + b & M,
    "sub.s32 %r, %a, %c;": lambda a, b, c: a - c & M,
    "add.sat.s32 %r, %a, %c;": lambda a, b, c: min(max(signed(a) + signed(c), -(2**31)), 2**31 - 1) & M,
    "sub.sat.s32 %r, %a, %c;": lambda a, b, c: min(max(signed(a) - signed(c), -(2**31)), 2**31 - 1) & M,
    "shl.b32 %r, %a, %b;": lambda a, b, c: a << b & M if b < 32 else 0,
    "shr.u32 %r, %a, %b;": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 %r, %a, %b;": lambda a, b, c: signed(a) >> min(b, 31) & M,
    "shl.b32 %r, %a, 40;": lambda a, b, c: 0,
    "shr.s32 %r, %a, 40;": lambda a, b, c: signed(a) >> 31 & M,
    "shf.l.wrap.b32 %r, %a, %b, %c;": lambda a, b, c: (wide(a, b) << (c & 31)) >> 32 & M,
    "shf.l.clamp.b32 %r, %a, %c, %b;": lambda a, b, c: (wide(a, c) << min(b, 32)) >> 32 & M,
    "shf.r.clamp.b32 %r, %a, %b, %c;": lambda a, b, c: wide(a, b) >> min(c, 32) & M,
    "shf.r.wrap.b32 %r, %a, %b, 7;": lambda a, b, c: wide(a, b) >> 7 & M,
    "bfe.u32 %r, %a, %b, %c;": lambda a, b, c: extract(a, b, c, sign=False),
    "bfe.s32 %r, %a, %b, %c;": lambda a, b, c: extract(a, b, c, sign=True),
    "bfe.s32 %r, %a, 5, 9;": lambda a, b, c: extract(a, 5, 9, sign=True),
    "bfe.u32 %r, %a, 0, 8;": lambda a, b, c: a & 255,
    "bfi.b32 %r, %a, %c, %b, 7;": lambda a, b, c: insert(a, c, b, 7),
    "and.b32 %x, %c, 63; shr.u32 %y, %c, 26; bfi.b32 %r, %a, %b, %x, %y;": (
        lambda a, b, c: insert(a, b, c & 63, c >> 26)
    ),
    "prmt.b32 %r, %a, %b, %c;": permute,
    "prmt.b32 %r, %a, %c, 0xb3d6;": lambda a, b, c: permute(a, c, 0xB3D6),
    "popc.b32 %r, %a;": lambda a, b, c: a.bit_count(),
    "clz.b32 %r, %b;": lambda a, b, c: 32 - b.bit_length(),
    "brev.b32 %r, %a;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %r, %b;": lambda a, b, c: (b.bit_length() - 1) & M,
    "bfind.s32 %r, %a;": lambda a, b, c: ((~a & M if a >> 31 else a).bit_length() - 1) & M,
    "bfind.shiftamt.u32 %r, %b;": lambda a, b, c: 32 - b.bit_length() if b else M,
    "mul.lo.s32 %r, %a, %c;": lambda a, b, c: a * c & M,
    "mul.hi.u32 %r, %a, %c;": lambda a, b, c: a * c >> 32,
    "mul.hi.s32 %r, %a, %c;": lambda a, b, c: signed(a) * signed(c) >> 32 & M,
    "mad.lo.s32 %r, %a, %b, %c;": lambda a, b, c: a * b + c & M,
    "mad.hi.s32 %r, %a, %b, %c;": lambda a, b, c: (signed(a) * signed(b) >> 32) + c & M,
    "mul.wide.s32 %d0, %a, %c; mov.b64 {%x, %r}, %d0; xor.b32 %r, %r, %x;": lambda a, b, c: xor_words(
        signed(a) * signed(c)
    ),
    "mov.b64 %d1, {%b, %c}; mad.wide.u32 %d0, %a, %c, %d1; mov.b64 {%x, %r}, %d0; xor.b32 %r, %r, %x;": (
        lambda a, b, c: xor_words(a * c + wide(b, c))
    ),
    "mov.b64 %d0, {%a, %b}; mov.b64 %d1, {%b, %c}; mul.hi.u64 %d0, %d0, %d1; mov.b64 {%r, %x}, %d0;": (
        lambda a, b, c: (wide(a, b) * wide(b, c) >> 64) & M
    ),
    "mov.b64 %d0, {%a, %c}; mov.b64 %d1, {%b, %a}; mul.hi.s64 %d0, %d0, %d1; mov.b64 {%r, %x}, %d0;": (
        lambda a, b, c: (signed(wide(a, c), 64) * signed(wide(b, a), 64) >> 64) & M
    ),
    "add.cc.u32 %x, %a, %c; addc.u32 %r, %b, %a; xor.b32 %r, %r, %x;": lambda a, b, c: xor_words(
        (wide(a, b) + wide(c, a)) % 2**64
    ),
    "sub.cc.u32 %x, %a, %c; subc.u32 %r, %b, %a; xor.b32 %r, %r, %x;": lambda a, b, c: xor_words(
        (wide(a, b) - wide(c, a)) % 2**64
    ),
    "mad.lo.cc.u32 %x, %a, %c, %b; madc.hi.u32 %r, %a, %c, 5; xor.b32 %r, %r, %x;": lambda a, b, c: xor_words(
        a * c + b + (5 << 32)
    ),
    "or.b32 %x, %b, 1; div.s32 %r, %a, %x;": lambda a, b, c: truncated_quotient(signed(a), signed(b | 1)) & M,
    "or.b32 %x, %c, 1; rem.s32 %r, %a, %x;": lambda a, b, c: (
        signed(a) - signed(c | 1) * truncated_quotient(signed(a), signed(c | 1))
    )
    & M,
    "or.b32 %x, %b, 1; div.u32 %r, %a, %x;": lambda a, b, c: a // (b | 1),
    "or.b32 %x, %b, 1; rem.u32 %r, %a, %x;": lambda a, b, c: a % (b | 1),
    "max.s32 %r, %a, %c;": lambda a, b, c: max(signed(a), signed(c)) & M,
    "min.u32 %r, %a, %c;": lambda a, b, c: min(a, c),
    "abs.s32 %r, %a;": lambda a, b, c: abs(signed(a)) & M,
    "neg.s32 %r, %a;": lambda a, b, c: -a & M,
    "not.b32 %r, %a;": lambda a, b, c: ~a & M,
    "cnot.b32 %r, %b;": lambda a, b, c: int(b == 0),
    "lop3.b32 %r, %a, %b, %c, 0xca;": lookup(0xCA),
    "slct.b32.s32 %r, %a, %b, %c;": lambda a, b, c: a if signed(c) >= 0 else b,
    "setp.gt.s32 %q, %b, 5; setp.lt.and.s32 %p|%q, %a, %c, %q; selp.b32 %r, 1, 0, %p; selp.b32 %x, 2, 0, %q; "
    "or.b32 %r, %r, %x;": lambda a, b, c: (
        int(signed(a) < signed(c) and signed(b) > 5) | 2 * int(signed(a) >= signed(c) and signed(b) > 5)
    ),
    "setp.hi.u32 %p, %a, %c; set.eq.u32.u32 %r, %a, %a; @!%p mov.b32 %r, 3;": lambda a, b, c: M if a > c else 3,
    "dp4a.u32.u32 %r, %a, %c, %b;": lambda a, b, c: (
        sum((a >> 8 * k & 255) * (c >> 8 * k & 255) for k in range(4)) + b & M
    ),
    "dp4a.s32.u32 %r, %a, %c, %b;": lambda a, b, c: (
        sum(signed(a >> 8 * k & 255, 8) * (c >> 8 * k & 255) for k in range(4)) + b & M
    ),
    "mov.b32 {%h, %g}, %a; add.s16 %h, %h, %g; cvt.u32.u16 %r, %h;": lambda a, b, c: (a & 0xFFFF) + (a >> 16) & 0xFFFF,
    "mov.b32 {%h, %g}, %a; shr.s16 %h, %h, 3; cvt.s32.s16 %r, %h;": lambda a, b, c: signed(a & 0xFFFF, 16) >> 3 & M,
    "mov.b32 {%h, %g}, %a; mul.hi.u16 %h, %h, %g; cvt.u32.u16 %r, %h;": lambda a, b, c: (a & 0xFFFF) * (a >> 16) >> 16,
    "max.u16x2 %r, %a, %c;": lambda a, b, c: (
        max(a & 0xFFFF, c & 0xFFFF) | max(a >> 16, c >> 16) << 16
    ),
}  # fmt: skip


def make_operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    a, c = (generator.integers(0, 2**32, 256, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    b = np.concatenate([generator.integers(0, 40, 192), generator.integers(0, 2**32, 64)]).astype(np.uint32)
    a[:8] = [0, 1, 0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x8000, 0xFFFF0000, 0x12345678]
    c[:8] = [0, 0xFFFFFFFF, 0x80000000, 0xFFFFFFFF, 1, 0x80, 0x8000, 31]
    return a, b, c


OPERANDS = make_operands()


@pytest.mark.parametrize("body", CASES)
def test_instruction(body: str) -> None:
    results = evaluate(body, *OPERANDS)
    expected = [CASES[body](int(a), int(b), int(c)) for a, b, c in zip(*OPERANDS, strict=True)]
    np.testing.assert_array_equal(results, np.array(expected, np.uint32))


def test_every_truth_table_of_lop3() -> None:
    a, b, c = (x[:32] for x in OPERANDS)
    for table in range(256):
        expected = [lookup(table)(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
        body = f"lop3.b32 %r, %a, %b, %c, {table};"
        np.testing.assert_array_equal(evaluate(body, a, b, c), np.array(expected, np.uint32), err_msg=hex(table))


def test_a_masked_instruction_leaves_the_other_lanes() -> None:
    a, b, _ = OPERANDS
    body = "setp.lt.u32 %p, %b, 20; mov.b32 %r, %b; @%p add.u32 %r, %a, 1; @!%p bra E; not.b32 %r, %r; E:"
    results = evaluate(body, a, b)
    np.testing.assert_array_equal(results, np.where(b < 20, ~(a + np.uint32(1)), b))
