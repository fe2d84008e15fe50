"""Integer and bit vector instructions (AMD Instinct CDNA4 ISA, "Vector ALU Operations", VOP1, VOP2, VOP3, VOPC)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.decoded import ALL, Decoded, Unknowns, collapse, make_source, read_unknown
from mmcompile.emulate.gfx950.operands import parse_operand, read_bits
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import Waves
from mmcompile.emulate.gfx950.undefined import (
    pass_and,
    pass_and_or,
    pass_any,
    pass_logic,
    pass_move,
    pass_or,
    pass_select,
    pass_shift,
    pass_shift_or,
)
from mmcompile.emulate.gfx950.vector_op import VectorOp, build_vector, list_lane_unknowns, strip_encoding

Array = npt.NDArray[Any]
Masks = Sequence[Array]
U = np.uint32
_31, _16, _LOW = U(31), U(16), U(0xFFFF)
_63 = np.uint64(63)


def _permute(masks: Masks, values: Masks) -> Array:
    return np.where(masks[2] != 0, ALL, permute_bytes(masks[0], masks[1], values[2], constants=False))


# ---------------------------------------------------------------------- operations


def permute_bytes(a: Array, b: Array, selector: Array, *, constants: bool = True) -> Array:
    """v_perm_b32: bytes of {a, b} (b is bytes 0..3); 8..11 a sign, 12 zero, above 0xff."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    raw = np.concatenate(
        [np.ascontiguousarray(x)[..., None].view(np.uint8).reshape(*x.shape, 4) for x in (b, a)], axis=-1
    )
    choice = np.ascontiguousarray(selector)[..., None].view(np.uint8).reshape(*selector.shape, 4)
    picked = np.take_along_axis(raw, np.minimum(choice, 7).astype(np.int64), axis=-1)
    signs = np.take_along_axis(raw, np.array([1, 3, 5, 7])[np.clip(choice.astype(np.int64) - 8, 0, 3)], axis=-1)
    special = np.where(choice < 12, np.where(signs & 0x80, 0xFF, 0), np.where(choice == 12, 0, 0xFF))
    result = np.where(choice < 8, picked, special if constants else 0).astype(np.uint8)
    words: Array = result.view(np.uint32)[..., 0]
    return words


def _bfe_u(a: Array, offset: Array, width: Array) -> Array:
    field: Array = (a >> (offset & _31)) & ((U(1) << (width & _31)) - U(1))
    return field


def _bfe_i(a: Array, offset: Array, width: Array) -> Array:
    field, bits = _bfe_u(a, offset, width), width & _31
    sign = np.where(bits == 0, U(0), U(1) << ((bits - U(1)) & _31))
    return (field ^ sign) - sign


def _reverse_bits(a: Array) -> Array:
    raw = np.ascontiguousarray(a)[..., None].view(np.uint8)
    flipped = np.packbits(np.unpackbits(raw, axis=-1), axis=-1, bitorder="little")
    return np.ascontiguousarray(flipped[..., ::-1]).view(np.uint32)[..., 0]


def _first_high(a: Array) -> Array:
    """v_ffbh_u32: zeros above the highest one, 0xffffffff for 0."""
    exponent = np.frexp(a.astype(np.float64))[1]
    return np.where(a == 0, -1, 32 - exponent).astype(np.int32)


def _first_low(a: Array) -> Array:
    exponent = np.frexp((a & (~a + U(1))).astype(np.float64))[1]
    return np.where(a == 0, -1, exponent - 1).astype(np.int32)


def _first_sign(a: Array) -> Array:
    """v_ffbh_i32: bits until one differs from the sign, -1 if none."""
    flipped = np.where(a >> _31, ~a, a)
    return np.where(flipped == 0, -1, _first_high(flipped)).astype(np.int32)


def _low(a: Array) -> Array:
    return a & U(0xFFFFFF)


def _signed24(a: Array) -> Array:
    return (a << 8) >> 8


def _short(a: Array) -> Array:
    """The low 16 bits as int16, in int32."""
    return (a.view(np.int32) << 16) >> 16


def _carry(a: Array, b: Array, c: Any = None) -> tuple[Array, Array]:
    total = a.astype(np.uint64) + b
    total = total if c is None else total + c
    return total.astype(np.uint32), total > 0xFFFFFFFF


def _borrow(a: Array, b: Array, c: Any = None) -> tuple[Array, Array]:
    total = a.astype(np.int64) - b
    total = total if c is None else total - c
    return total.astype(np.uint32), total < 0


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _make_shifts() -> dict[str, VectorOp]:
    """Shifts with the amount first, modulo the width."""
    table = {}
    runs: dict[str, tuple[Callable[..., Any], str]] = {
        "lshlrev_b32": (lambda n, a: a << (n & _31), "uu"),
        "lshrrev_b32": (lambda n, a: a >> (n & _31), "uu"),
        "ashrrev_i32": (lambda n, a: a.view(np.int32) >> (n & _31).view(np.int32), "uu"),
        "lshlrev_b16": (lambda n, a: (a << (n & U(15))) & _LOW, "uu"),
        "lshrrev_b16": (lambda n, a: (a & _LOW) >> (n & U(15)), "uu"),
        "ashrrev_i16": (lambda n, a: (_short(a) >> (n & U(15)).view(np.int32)).view(np.uint32) & _LOW, "uu"),
    }
    for name, (run, kinds) in runs.items():
        table[name] = VectorOp(run, kinds, precise=pass_shift(run, 0, 1))
    table["lshlrev_b64"] = VectorOp(lambda n, a: a << (n.astype(np.uint64) & _63), "uq", "q")
    table["lshrrev_b64"] = VectorOp(lambda n, a: a >> (n.astype(np.uint64) & _63), "uq", "q")
    table["ashrrev_i64"] = VectorOp(lambda n, a: a >> (n & U(63)).astype(np.int64), "us", "q")
    return table


OPERATIONS: dict[str, VectorOp] = {
    **_make_shifts(),
    "mov_b32": VectorOp(lambda a: a, "u", precise=pass_move),
    "not_b32": VectorOp(lambda a: ~a, "u", precise=pass_move),
    "accvgpr_read_b32": VectorOp(lambda a: a, "u", precise=pass_move),
    "accvgpr_write_b32": VectorOp(lambda a: a, "u", precise=pass_move),
    "accvgpr_mov_b32": VectorOp(lambda a: a, "u", precise=pass_move),
    "bfrev_b32": VectorOp(_reverse_bits, "u", precise=lambda m, v: _reverse_bits(m[0])),
    "ffbh_u32": VectorOp(_first_high, "u"),
    "ffbl_b32": VectorOp(_first_low, "u"),
    "ffbh_i32": VectorOp(_first_sign, "u"),
    "bcnt_u32_b32": VectorOp(lambda a, b: np.bitwise_count(a).astype(np.uint32) + b, "uu"),
    "and_b32": VectorOp(lambda a, b: a & b, "uu", precise=pass_and),
    "or_b32": VectorOp(lambda a, b: a | b, "uu", precise=pass_or),
    "xor_b32": VectorOp(lambda a, b: a ^ b, "uu", precise=pass_any),
    "xnor_b32": VectorOp(lambda a, b: ~(a ^ b), "uu", precise=pass_any),
    "add_u32": VectorOp(lambda a, b: a + b, "uu", saturated=lambda a, b: np.where(a + b < a, ~U(0), a + b)),
    "sub_u32": VectorOp(lambda a, b: a - b, "uu", saturated=lambda a, b: np.where(a < b, U(0), a - b)),
    "subrev_u32": VectorOp(lambda a, b: b - a, "uu", saturated=lambda a, b: np.where(b < a, U(0), b - a)),
    "add_i32": VectorOp(lambda a, b: a + b, "uu"),
    "sub_i32": VectorOp(lambda a, b: a - b, "uu"),
    "add_u16": VectorOp(lambda a, b: (a + b) & _LOW, "uu"),
    "sub_u16": VectorOp(lambda a, b: (a - b) & _LOW, "uu"),
    "subrev_u16": VectorOp(lambda a, b: (b - a) & _LOW, "uu"),
    "mul_lo_u16": VectorOp(lambda a, b: (a * b) & _LOW, "uu"),
    "mad_legacy_u16": VectorOp(lambda a, b, c: (a * b + c) & _LOW, "uuu"),
    "mad_u16": VectorOp(lambda a, b, c: (a * b + c) & _LOW, "uuu"),
    "min_u16": VectorOp(lambda a, b: np.minimum(a & _LOW, b & _LOW), "uu"),
    "max_u16": VectorOp(lambda a, b: np.maximum(a & _LOW, b & _LOW), "uu"),
    "min_i16": VectorOp(lambda a, b: np.minimum(_short(a), _short(b)).view(np.uint32) & _LOW, "uu"),
    "max_i16": VectorOp(lambda a, b: np.maximum(_short(a), _short(b)).view(np.uint32) & _LOW, "uu"),
    "min_u32": VectorOp(np.minimum, "uu"),
    "max_u32": VectorOp(np.maximum, "uu"),
    "min_i32": VectorOp(np.minimum, "ii"),
    "max_i32": VectorOp(np.maximum, "ii"),
    "min3_u32": VectorOp(lambda a, b, c: np.minimum(np.minimum(a, b), c), "uuu"),
    "max3_u32": VectorOp(lambda a, b, c: np.maximum(np.maximum(a, b), c), "uuu"),
    "min3_i32": VectorOp(lambda a, b, c: np.minimum(np.minimum(a, b), c), "iii"),
    "max3_i32": VectorOp(lambda a, b, c: np.maximum(np.maximum(a, b), c), "iii"),
    "med3_u32": VectorOp(_median, "uuu"),
    "med3_i32": VectorOp(_median, "iii"),
    "mul_lo_u32": VectorOp(lambda a, b: a * b, "uu"),
    "mul_hi_u32": VectorOp(lambda a, b: ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32), "uu"),
    "mul_hi_i32": VectorOp(lambda a, b: ((a.astype(np.int64) * b) >> 32).astype(np.int32), "ii"),
    "mul_u32_u24": VectorOp(lambda a, b: _low(a) * _low(b), "uu"),
    "mul_i32_i24": VectorOp(lambda a, b: _signed24(a) * _signed24(b), "ii"),
    "mul_hi_u32_u24": VectorOp(
        lambda a, b: ((_low(a).astype(np.uint64) * _low(b)) >> np.uint64(32)).astype(np.uint32), "uu"
    ),
    "mad_u32_u24": VectorOp(lambda a, b, c: _low(a) * _low(b) + c, "uuu"),
    "mad_i32_i24": VectorOp(lambda a, b, c: _signed24(a) * _signed24(b) + c, "iii"),
    "add3_u32": VectorOp(lambda a, b, c: a + b + c, "uuu"),
    "xad_u32": VectorOp(lambda a, b, c: (a ^ b) + c, "uuu"),
    "lshl_add_u32": VectorOp(lambda a, b, c: (a << (b & _31)) + c, "uuu"),
    "add_lshl_u32": VectorOp(lambda a, b, c: (a + b) << (c & _31), "uuu"),
    "lshl_or_b32": VectorOp(lambda a, b, c: (a << (b & _31)) | c, "uuu", precise=pass_shift_or),
    "and_or_b32": VectorOp(lambda a, b, c: (a & b) | c, "uuu", precise=pass_and_or),
    "or3_b32": VectorOp(lambda a, b, c: a | b | c, "uuu", precise=pass_logic(lambda a, b, c: a | b | c)),
    "bfi_b32": VectorOp(
        lambda a, b, c: (a & b) | (~a & c), "uuu", precise=pass_logic(lambda a, b, c: (a & b) | (~a & c))
    ),
    "bfe_u32": VectorOp(
        _bfe_u, "uuu", precise=lambda m, v: np.where((m[1] | m[2]) != 0, ALL, _bfe_u(m[0], v[1], v[2]))
    ),
    "bfe_i32": VectorOp(
        _bfe_i, "uuu", precise=lambda m, v: np.where((m[1] | m[2]) != 0, ALL, _bfe_i(m[0], v[1], v[2]))
    ),
    "bfm_b32": VectorOp(lambda a, b: ((U(1) << (a & _31)) - U(1)) << (b & _31), "uu"),
    "perm_b32": VectorOp(permute_bytes, "uuu", precise=_permute),
    "alignbit_b32": VectorOp(
        lambda a, b, c: (((a.astype(np.uint64) << np.uint64(32)) | b) >> (c & _31)).astype(np.uint32), "uuu"
    ),
    "alignbyte_b32": VectorOp(
        lambda a, b, c: (((a.astype(np.uint64) << np.uint64(32)) | b) >> ((c & U(3)) * U(8))).astype(np.uint32), "uuu"
    ),
    "sad_u32": VectorOp(lambda a, b, c: np.where(a > b, a - b, b - a) + c, "uuu"),
    "cndmask_b32": VectorOp(lambda a, b, m: np.where(m, b, a), "bbm", precise=pass_select),
    "add_co_u32": VectorOp(_carry, "uu", "k"),
    "addc_co_u32": VectorOp(_carry, "uum", "k"),
    "sub_co_u32": VectorOp(_borrow, "uu", "k"),
    "subb_co_u32": VectorOp(_borrow, "uum", "k"),
    "subrev_co_u32": VectorOp(lambda a, b: _borrow(b, a), "uu", "k"),
    "subbrev_co_u32": VectorOp(lambda a, b, c: _borrow(b, a, c), "uum", "k"),
    "lshl_add_u64": VectorOp(lambda a, n, c: (a << (n.astype(np.uint64) & np.uint64(7))) + c, "quq", "q"),
    "sext_i32_i16": VectorOp(_short, "u"),
    "dot4_i32_i8": VectorOp(lambda a, b, c: _dot_bytes(a, b, np.int8) + c, "uui"),
    "dot4_u32_u8": VectorOp(lambda a, b, c: _dot_bytes(a, b, np.uint8).view(np.uint32) + c, "uuu"),
}
"""v_NAME, lane by lane."""


def _mad_unsigned(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    total = a.astype(np.uint64) * b + c
    return total, total < c


def _mad_signed(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product, addend = a.view(np.int32).astype(np.int64) * b.view(np.int32), c.view(np.int64)
    total = product + addend
    return total, ((product ^ total) & (addend ^ total)) < 0


MULTIPLY_ADD_64 = {"mad_u64_u32": _mad_unsigned, "mad_i64_i32": _mad_signed}
"""64-bit multiply-add: the sum, and whether it overflowed."""


def _dot_bytes(a: Array, b: Array, dtype: Any) -> Array:
    x, y = np.broadcast_arrays(a, b)
    x, y = (np.ascontiguousarray(v)[..., None].view(dtype).astype(np.int32) for v in (x, y))
    return np.asarray((x * y).sum(axis=-1), np.int32)


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ne": np.not_equal, "lg": np.not_equal,
    "ge": np.greater_equal,
}  # fmt: skip


def _narrow_compare(name: str, kind: str) -> Callable[[Array, Array], Array]:
    """Comparison of the low 16 bits."""
    compare = _COMPARE[name]
    if kind == "i":
        return lambda a, b: compare(_short(a), _short(b))
    return lambda a, b: compare(a & _LOW, b & _LOW)


def build_compare(i: Instruction, name: str, kind: str, bits: int, encoding: str) -> Decoded | None:
    """v_cmp_* of integers: a lane mask, zero for inactive lanes."""
    if bits == 16:
        return build_vector(i, VectorOp(_narrow_compare(name, kind), "uu", "c"), encoding, False)
    letter = {32: kind, 64: "q" if kind == "u" else "s"}[bits]
    return build_vector(i, VectorOp(_COMPARE[name], letter * 2, "c"), encoding, False)


def build_bitop(i: Instruction, half: bool) -> Decoded | None:
    """v_bitop3_b32, v_bitop3_b16: any function of three bits, by its truth table (index 4*a + 2*b + c)."""
    table = int(i.modifiers["bitop3"], 0)
    if set(i.modifiers) - {"bitop3"}:
        return None

    def run(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros((1, 1), np.uint32)
        for k in range(8):
            if table >> k & 1:
                result = result | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
        return result & _LOW if half else result

    plain = Instruction(i.op, i.operands, {}, i.line, i.text)
    return build_vector(plain, VectorOp(run, "uuu", precise=pass_logic(run)), "", False)


def build_mad_64(i: Instruction, run: Callable[..., Any]) -> Decoded | None:
    """v_mad_u64_u32, v_mad_i64_i32: the overflow goes to a scalar pair."""
    if i.modifiers:
        return None
    target, carry, *given = (parse_operand(text) for text in i.operands)
    sources = [make_source(operand, kind) for operand, kind in zip(given, "uuq", strict=True)]
    index, lanes, low_addend = target.index, carry.index, read_unknown(given[2])

    def step(w: Waves) -> None:
        values, overflow = run(*[source.read(w) for source in sources])
        w.put_wide(index, values)
        w.put_lanes(lanes, overflow & w.active)

    def taint(w: Waves) -> Unknowns:
        mask = collapse([source.unknown(w) for source in sources])
        # LLVM leaves the high dword of the addend undefined where it needs only the low one of the sum.
        low = collapse([*(source.unknown(w) for source in sources[:2]), low_addend(w)])
        undefined = np.broadcast_to(mask != 0, w.active.shape) & w.active
        return [(index, low), (index + 1, mask), *list_lane_unknowns(carry, undefined)]

    reads = [register for source in sources for register in source.registers]
    return Decoded(step, reads, [*target.list_registers(), *carry.list_registers()], taint)


def build_moves(i: Instruction, selected: bool) -> Decoded:
    """v_mov_b64, and v_pk_mov_b32, whose op_sel takes the low or high dword of each source."""
    target, *sources = (parse_operand(text) for text in i.operands)
    if selected:
        picks = list(zip(sources, i.list_modifier("op_sel", (0, 0))[:2], strict=True))
    else:
        picks = [(sources[0], 0), (sources[0], 1)]
    reads = [read_bits(operand, part if operand.count > 1 or not selected else 0) for operand, part in picks]
    unknowns = [read_unknown(operand, part) for operand, part in picks]
    index = target.index

    def step(w: Waves) -> None:
        low, high = reads[0](w), reads[1](w).copy()
        w.put(index, low)
        w.put(index + 1, high)

    registers = [r for operand, part in picks for r in operand.list_registers(part, 1)]
    return Decoded(
        step,
        registers,
        target.list_registers(),
        lambda w: [(index, unknowns[0](w)), (index + 1, unknowns[1](w).copy())],
    )


def build(i: Instruction) -> Decoded | None:
    """Integer vector instructions; None for anything else."""
    if not i.op.startswith("v_"):
        return None
    name, encoding = strip_encoding(i.op)
    if name in OPERATIONS:
        return build_vector(i, OPERATIONS[name], encoding, False)
    match = re.match(r"^cmp_(lt|eq|le|gt|ne|ge)_([ui])(16|32|64)$", name)
    if match:
        return build_compare(i, match[1], match[2], int(match[3]), encoding)
    if name in ("bitop3_b32", "bitop3_b16"):
        return build_bitop(i, name.endswith("16"))
    if name in MULTIPLY_ADD_64:
        return build_mad_64(i, MULTIPLY_ADD_64[name])
    if name == "mov_b64" and not i.modifiers:
        return build_moves(i, False)
    if name == "pk_mov_b32" and not set(i.modifiers) - {"op_sel", "op_sel_hi"}:
        return build_moves(i, True)
    return None
