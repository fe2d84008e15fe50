"""Scalar ALU: SOP1, SOP2, SOPC, SOPK (AMD Instinct CDNA4 ISA, "Scalar ALU Operations").

An operation takes and gives one value for every wave. The result of most logic and shift operations also sets SCC.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.decoded import Decoded, Taint, Unknowns, spread_scalar
from mmcompile.emulate.gfx950.operands import Operand, Reader, parse_operand, read_scalar
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import EXEC, SCALAR, SCC, Waves

Array = npt.NDArray[Any]
_1, _63 = np.uint64(1), np.uint64(63)


@dataclass(frozen=True)
class ScalarOp:
    """``run(*sources)`` gives the result, or (result, scc). ``sources``: a type for each: u, i (32 bits), q, s (64).

    ``scc``: "" not written; "result" set where the result is not zero; "given" the second value. ``carry``: SCC is a
    last source. ``bitwise``: undefined bits stay where they are.
    """

    run: Callable[..., Any]
    sources: str
    scc: str = ""
    wide: bool = False
    carry: bool = False
    bitwise: bool = False
    accumulates: bool = False


def _carry_add(a: Array, b: Array, c: Any = 0) -> tuple[Array, Array]:
    total = a.astype(np.uint64) + b.astype(np.uint64) + np.asarray(c, np.uint64)
    return total.astype(np.uint32), total >> np.uint64(32)


def _borrow_sub(a: Array, b: Array, c: Any = 0) -> tuple[Array, Array]:
    total = a.astype(np.int64) - b.astype(np.int64) - np.asarray(c, np.int64)
    return total.astype(np.uint32), total < 0


def _overflow(total: Array) -> tuple[Array, Array]:
    return total.astype(np.int32), (total < -(2**31)) | (total >= 2**31)


def _bfe(bits: Any, signed: bool) -> Callable[[Array, Array], Array]:
    """Field of ``a``: offset in the low bits of ``b`` (5 or 6), width in bits 22:16."""

    def run(a: Array, b: Array) -> Array:
        offset = (b & np.uint32(bits - 1)).astype(np.int64)
        width = np.minimum((b >> np.uint32(16)) & np.uint32(0x7F), bits).astype(np.int64)
        values = []
        for value, o, n in np.broadcast(a, offset, width):
            field = (int(value) % (1 << bits) >> int(o)) & ((1 << int(n)) - 1)
            if signed and n and field >> (int(n) - 1) & 1:
                field |= ((1 << bits) - 1) & ~((1 << int(n)) - 1)
            values.append(field)
        return np.array(values, np.uint64 if bits == 64 else np.uint32)

    return run


def _count(bits: int, find: Callable[[str], int]) -> Callable[[Array], Array]:
    """A function of the bits, written from the highest to the lowest."""
    return lambda a: np.array([find(f"{int(x) % (1 << bits):0{bits}b}") for x in a], np.int64).astype(np.uint32)


def _first_one(text: str) -> int:
    return len(text) - 1 - text.rindex("1") if "1" in text else -1


def _leading(text: str) -> int:
    return text.find("1")


def _sign_bits(text: str) -> int:
    rest = text.lstrip(text[0])
    return len(text) - len(rest) if rest else -1


def _reverse(bits: int) -> Callable[[Array], Array]:
    dtype = np.uint64 if bits == 64 else np.uint32
    return lambda a: np.array([int(f"{int(x):0{bits}b}"[::-1], 2) for x in a], dtype)


def _shift_add(amount: int) -> ScalarOp:
    def run(a: Array, b: Array) -> tuple[Array, Array]:
        total = (a.astype(np.uint64) << np.uint64(amount)) + b.astype(np.uint64)
        return total.astype(np.uint32), total > 0xFFFFFFFF

    return ScalarOp(run, "uu", "given")


def _mask(bits: int) -> Callable[[Array, Array], Array]:
    one = np.uint64(1)
    dtype = np.uint64 if bits == 64 else np.uint32
    low = np.uint64(bits - 1)
    return lambda a, b: (((one << (a & low)) - one) << (b.astype(np.uint64) & low)).astype(dtype)


def _make_logic() -> dict[str, ScalarOp]:
    """Operations that exist for b32 and b64."""
    logic: dict[str, Callable[..., Any]] = {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b), "not": lambda a: ~a,
    }  # fmt: skip
    table = {}
    for bits, kind in ((32, "u"), (64, "q")):
        wide, low = bits == 64, (np.uint64 if bits == 64 else np.uint32)(bits - 1)
        for name, run in logic.items():
            count = 1 if name == "not" else 2
            table[f"{name}_b{bits}"] = ScalarOp(run, kind * count, "result", wide, bitwise=True)
        signed, second = ("s", "q") if wide else ("i", "u")
        table[f"lshl_b{bits}"] = ScalarOp(lambda a, b, m=low: a << (b & m), kind + kind, "result", wide)
        table[f"lshr_b{bits}"] = ScalarOp(lambda a, b, m=low: a >> (b & m), kind + kind, "result", wide)
        table[f"ashr_i{bits}"] = ScalarOp(
            lambda a, b, m=low: a >> (b & m).astype(a.dtype), signed + second, "result", wide
        )
        table[f"mov_b{bits}"] = ScalarOp(lambda a: a, kind, "", wide, bitwise=True)
        table[f"brev_b{bits}"] = ScalarOp(_reverse(bits), kind, "", wide)
        table[f"bfm_b{bits}"] = ScalarOp(_mask(bits), "qu", "", wide)
        table[f"bfe_u{bits}"] = ScalarOp(_bfe(bits, False), kind + "u", "result", wide)
        table[f"bfe_i{bits}"] = ScalarOp(_bfe(bits, True), kind + "u", "result", wide)
        table[f"ff1_i32_b{bits}"] = ScalarOp(_count(bits, _first_one), kind)
        table[f"flbit_i32_b{bits}"] = ScalarOp(_count(bits, _leading), kind)
        table[f"bcnt1_i32_b{bits}"] = ScalarOp(_count(bits, lambda t: t.count("1")), kind, "result")
        table[f"bcnt0_i32_b{bits}"] = ScalarOp(_count(bits, lambda t: t.count("0")), kind, "result")
        table[f"cselect_b{bits}"] = ScalarOp(
            lambda a, b, c: np.where(c != 0, a, b), kind * 2, "", wide, carry=True, bitwise=False
        )
        table[f"bitset0_b{bits}"] = ScalarOp(
            lambda a, old, m=low: old & ~(old.dtype.type(1) << (a.astype(old.dtype) & m)), "u" + kind, "", wide,
            accumulates=True,
        )  # fmt: skip
        table[f"bitset1_b{bits}"] = ScalarOp(
            lambda a, old, m=low: old | (old.dtype.type(1) << (a.astype(old.dtype) & m)), "u" + kind, "", wide,
            accumulates=True,
        )  # fmt: skip
    return table


OPERATIONS: dict[str, ScalarOp] = {
    **_make_logic(),
    "add_u32": ScalarOp(_carry_add, "uu", "given"),
    "addc_u32": ScalarOp(_carry_add, "uu", "given", carry=True),
    "sub_u32": ScalarOp(_borrow_sub, "uu", "given"),
    "subb_u32": ScalarOp(_borrow_sub, "uu", "given", carry=True),
    "add_i32": ScalarOp(lambda a, b: _overflow(a.astype(np.int64) + b), "ii", "given"),
    "sub_i32": ScalarOp(lambda a, b: _overflow(a.astype(np.int64) - b), "ii", "given"),
    "addk_i32": ScalarOp(lambda k, a: _overflow(a.astype(np.int64) + k), "ii", "given", accumulates=True),
    "mulk_i32": ScalarOp(lambda k, a: a * k, "ii", accumulates=True),
    "movk_i32": ScalarOp(lambda k: k, "i"),
    "cmovk_i32": ScalarOp(lambda k, old, c: np.where(c != 0, k, old), "ii", carry=True, accumulates=True),
    "cmov_b32": ScalarOp(lambda a, old, c: np.where(c != 0, a, old), "uu", carry=True, accumulates=True),
    "mul_i32": ScalarOp(lambda a, b: a * b, "ii"),
    "mul_hi_i32": ScalarOp(lambda a, b: ((a.astype(np.int64) * b) >> 32).astype(np.int32), "ii"),
    "mul_hi_u32": ScalarOp(lambda a, b: ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32), "uu"),
    "absdiff_i32": ScalarOp(lambda a, b: np.abs(a.astype(np.int64) - b).astype(np.uint32), "ii", "result"),
    "abs_i32": ScalarOp(lambda a: np.abs(a.astype(np.int64)).astype(np.uint32), "i", "result"),
    "min_i32": ScalarOp(lambda a, b: (np.minimum(a, b), a < b), "ii", "given"),
    "max_i32": ScalarOp(lambda a, b: (np.maximum(a, b), a > b), "ii", "given"),
    "min_u32": ScalarOp(lambda a, b: (np.minimum(a, b), a < b), "uu", "given"),
    "max_u32": ScalarOp(lambda a, b: (np.maximum(a, b), a > b), "uu", "given"),
    "sext_i32_i8": ScalarOp(lambda a: a.astype(np.uint8).view(np.int8).astype(np.int32), "u"),
    "sext_i32_i16": ScalarOp(lambda a: a.astype(np.uint16).view(np.int16).astype(np.int32), "u"),
    "flbit_i32": ScalarOp(_count(32, _sign_bits), "u"),
    "flbit_i32_i64": ScalarOp(_count(64, _sign_bits), "q"),
    "pack_ll_b32_b16": ScalarOp(lambda a, b: (a & np.uint32(0xFFFF)) | (b << np.uint32(16)), "uu"),
    "pack_lh_b32_b16": ScalarOp(lambda a, b: (a & np.uint32(0xFFFF)) | (b & np.uint32(0xFFFF0000)), "uu"),
    "pack_hh_b32_b16": ScalarOp(lambda a, b: (a >> np.uint32(16)) | (b & np.uint32(0xFFFF0000)), "uu"),
    **{f"lshl{k}_add_u32": _shift_add(k) for k in (1, 2, 3, 4)},
}
"""s_NAME."""

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
"""s_cmp_NAME and s_cmpk_NAME."""

_VIEWS = {"u": np.uint32, "i": np.int32, "q": np.uint64, "s": np.int64}


IMMEDIATE = re.compile(r"^(movk|cmovk|addk|mulk)_i32$")
"""SOPK: their immediate has 16 bits, is sign-extended, and is printed without its sign."""


def extend_immediate(operand: Operand, signed: bool) -> Operand:
    """A 16-bit immediate as the number that it stands for."""
    value = int(operand.value) & 0xFFFF
    return replace(operand, value=value - 0x10000 if signed and value & 0x8000 else value)


def make_reader(operand: Operand, kind: str) -> Reader:
    """Values [waves] or [1] of a type of ``ScalarOp.sources``."""
    if kind in "qs" and operand.kind == "scalar" and operand.count == 1:
        narrow = read_scalar(operand)
        return lambda w: narrow(w).astype(np.uint64).view(_VIEWS[kind])
    read = read_scalar(operand, 64 if kind in "qs" else 32)
    dtype = _VIEWS[kind]
    return lambda w: read(w).view(dtype)


def put_scalar(w: Waves, index: int, values: Array, wide: bool) -> None:
    """Write 32 or 64 bits to the scalar register(s) of the selected waves."""
    if wide:
        w.put_pair(index, np.asarray(values).view(np.uint64))
    else:
        bits = np.asarray(values)
        w.scalar[w.rows, index] = bits.view(np.uint32) if bits.dtype.itemsize == 4 else bits.astype(np.uint32)


def make_taint(op: ScalarOp, sources: list[Operand], reads: list[int], writes: list[int]) -> Taint:
    """Undefined bits of a result: bit by bit for logic and moves, else everything if anything is undefined."""
    readers = [make_reader(operand, kind) for operand, kind in zip(sources, op.sources, strict=True)]

    def taint(w: Waves) -> Unknowns:
        whole = spread_scalar(w, reads)
        if not op.bitwise:
            return [(register, whole) for register in writes]
        found: Unknowns = []
        for part in range(2 if op.wide else 1):
            masks = [_part_unknown(w, operand, part) for operand in sources]
            values = [(r(w) >> r(w).dtype.type(32 * part)).astype(np.uint32) for r in readers]
            found.append((writes[part], combine_bitwise(op.run, values, masks)))
        return found + [(register, whole) for register in writes[2 if op.wide else 1 :]]

    return taint


def combine_bitwise(run: Callable[..., Any], values: list[Array], masks: list[Array]) -> Array:
    """Bits that change with the undefined bits of the sources: all undefined bits as 0, as 1, and mixed."""
    low = [value & ~mask for value, mask in zip(values, masks, strict=True)]
    high = [value | mask for value, mask in zip(values, masks, strict=True)]
    base = run(*low)
    changed = base ^ run(*high)
    if len(values) > 1:
        changed = changed | (base ^ run(low[0], *high[1:])) | (base ^ run(high[0], *low[1:]))
    result: Array = changed.astype(np.uint32)
    return result


def _part_unknown(w: Waves, operand: Operand, part: int) -> Array:
    if operand.kind == "scalar" and part < operand.count:
        return w.scalar_unknown[w.rows, operand.index + part]
    return np.zeros(1, np.uint32)


def build_operation(i: Instruction, op: ScalarOp) -> Decoded:
    """SOP1, SOP2, SOPK of the table."""
    target, *given = (parse_operand(text) for text in i.operands)
    if IMMEDIATE.match(i.op[2:]):
        given = [extend_immediate(given[0], True)]
    sources = [*given, target] if op.accumulates else given
    if len(sources) != len(op.sources):
        raise ValueError(i.text)
    readers = [make_reader(operand, kind) for operand, kind in zip(sources, op.sources, strict=True)]
    if op.carry:
        readers.append(lambda w: w.scalar[w.rows, SCC])
    index, wide, run, scc = target.index, op.wide, op.run, op.scc

    def step(w: Waves) -> None:
        result = run(*(read(w) for read in readers))
        if scc == "given":
            result, flag = result
            w.scalar[w.rows, SCC] = flag
        elif scc:
            w.scalar[w.rows, SCC] = result != 0
        put_scalar(w, index, result, wide)

    reads = [r for operand in sources for r in operand.list_registers()] + ([SCALAR + SCC] if op.carry else [])
    writes = target.list_registers() + ([SCALAR + SCC] if op.scc else [])
    return Decoded(step, reads, writes, make_taint(op, sources, reads, writes))


def build_compare(i: Instruction, name: str, kind: str, immediate: bool) -> Decoded:
    """s_cmp_*, s_cmpk_*: sets SCC."""
    operands = [parse_operand(text) for text in i.operands]
    if immediate:
        operands[1] = extend_immediate(operands[1], kind == "i")
    readers = [make_reader(operand, kind) for operand in operands]
    compare = COMPARE[name]

    def step(w: Waves) -> None:
        w.scalar[w.rows, SCC] = compare(readers[0](w), readers[1](w))

    reads = [r for operand in operands for r in operand.list_registers()]
    return Decoded(step, reads, [SCALAR + SCC], lambda w: [(SCALAR + SCC, spread_scalar(w, reads))])


def build_bit_compare(i: Instruction, wanted: int, wide: bool) -> Decoded:
    """s_bitcmp0_b32 and the like: SCC = (bit of the first operand == wanted)."""
    value, bit = (parse_operand(text) for text in i.operands)
    read, read_bit = make_reader(value, "q" if wide else "u"), make_reader(bit, "u")

    def step(w: Waves) -> None:
        place = read_bit(w).astype(np.uint64) & np.uint64(63 if wide else 31)
        w.scalar[w.rows, SCC] = ((read(w).astype(np.uint64) >> place) & _1) == wanted

    reads = value.list_registers() + bit.list_registers()
    return Decoded(step, reads, [SCALAR + SCC], lambda w: [(SCALAR + SCC, spread_scalar(w, reads))])


def build_save_exec(i: Instruction, name: str) -> Decoded:
    """s_and_saveexec_b64 and the like: D = EXEC; EXEC = S0 op EXEC; SCC = (EXEC != 0)."""
    op = OPERATIONS[f"{'andn2' if name == 'andn1' else name}_b64"]
    target, source = (parse_operand(text) for text in i.operands)
    read, index = make_reader(source, "q"), target.index
    swapped = name == "andn1"

    def step(w: Waves) -> None:
        old, value = w.read_pair(EXEC), read(w)
        new = op.run(old, value) if swapped else op.run(value, old)
        w.put_pair(index, old)
        w.put_pair(EXEC, new)
        w.scalar[w.rows, SCC] = new != 0

    def taint(w: Waves) -> Unknowns:
        found: Unknowns = []
        for part in range(2):
            executing = w.scalar[w.rows, EXEC + part]
            value = (read(w) >> np.uint64(32 * part)).astype(np.uint32)
            pairs = [(value, _part_unknown(w, source, part)), (executing, np.zeros(1, np.uint32))]
            pairs = pairs[::-1] if swapped else pairs
            found.append((SCALAR + EXEC + part, combine_bitwise(op.run, [p[0] for p in pairs], [p[1] for p in pairs])))
        return found

    execution = [SCALAR + EXEC, SCALAR + EXEC + 1]
    writes = [*target.list_registers(), *execution, SCALAR + SCC]
    return Decoded(step, [*source.list_registers(), *execution], writes, taint)


def build(i: Instruction) -> Decoded | None:
    """Scalar ALU instructions; None for anything else."""
    if not i.op.startswith("s_") or i.modifiers:
        return None
    name = i.op[2:]
    if name in OPERATIONS:
        return build_operation(i, OPERATIONS[name])
    match = re.match(r"^cmp(k?)_(eq|lg|lt|le|gt|ge)_([ui])(32|64)$", name)
    if match:
        kind = {"u32": "u", "i32": "i", "u64": "q", "i64": "s"}[match[3] + match[4]]
        return build_compare(i, match[2], kind, bool(match[1]))
    match = re.match(r"^bitcmp([01])_b(32|64)$", name)
    if match:
        return build_bit_compare(i, int(match[1]), match[2] == "64")
    match = re.match(r"^(and|or|xor|andn2|orn2|nand|nor|xnor|andn1)_saveexec_b64$", name)
    return build_save_exec(i, match[1]) if match else None
