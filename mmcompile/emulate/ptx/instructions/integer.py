"""Integer arithmetic (PTX ISA, Integer Arithmetic Instructions, Extended-Precision Integer Arithmetic Instructions)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.data_types import WIDTH, element, is_integer, storage
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction

Array = npt.NDArray[Any]


def translate_add(emitter: Emitter, instruction: Instruction) -> None:
    """add and sub of integers: modulo 2**n, or saturating for s32."""
    kind, target = instruction.type, instruction.operands[0]
    if "cc" in instruction.modifiers:
        translate_carry(emitter, instruction)
        return
    sign = "+" if instruction.op == "add" else "-"
    if "sat" in instruction.modifiers:
        if kind != "s32":
            emitter.refuse("saturation of another type than s32")
        a, b = (f"{emitter.source(x, kind)}.astype(int64)" for x in instruction.operands[1:3])
        emitter.put(target, f"np.clip({a} {sign} {b}, -2147483648, 2147483647).astype(int32)", kind)
        return
    unsigned = kind if kind in ("u16x2", "s16x2") else f"u{kind[1:]}"
    a, b = (emitter.source(x, unsigned) for x in instruction.operands[1:3])
    emitter.put(target, f"{a} {sign} {b}", unsigned)


@translates("addc", "subc", "madc")
def translate_carry(emitter: Emitter, instruction: Instruction) -> None:
    """add, sub and mad with carry-out (.cc) or carry-in (addc, subc, madc), 32 bits."""
    op, modifiers = instruction.op, instruction.modifiers
    if instruction.type not in ("u32", "s32", "b32") or "wide" in modifiers:
        emitter.refuse("extended precision is modelled for 32 bits")
    values = [f"{emitter.full_source(x, 'u32')}.astype(uint64)" for x in instruction.operands[1:]]
    first, second = values[0], values[-1]
    if op.startswith("mad"):
        product = f"{values[0]} * {values[1]}"
        if "hi" in modifiers and instruction.type == "s32":
            emitter.refuse("signed high product with carry")
        first = f"(({product}) >> uint64(32))" if "hi" in modifiers else f"(({product}) & uint64(0xFFFFFFFF))"
    if op.startswith("sub"):  # a - b = a + ~b + 1: the flag holds "no borrow"
        second = f"({second} ^ uint64(0xFFFFFFFF))"
    carry_in = "g.carry" if op.endswith("c") else f"uint64({int(op == 'sub')})"
    total = emitter.new_name()
    emitter.append(f"{total} = {first} + {second} + {carry_in}")
    if "cc" in modifiers:
        out = f"{total} >> uint64(32)"
        emitter.append(f"g.carry = where({emitter.mask}, {out}, g.carry)" if emitter.mask else f"g.carry = {out}")
    emitter.put(instruction.operands[0], f"{total}.astype(uint32)", "b32", packed=True)


def translate_multiply(emitter: Emitter, instruction: Instruction) -> None:
    """mul and mad of integers: .lo, .hi and .wide."""
    kind, modifiers = instruction.type, instruction.modifiers
    if "cc" in modifiers:
        translate_carry(emitter, instruction)
        return
    if "sat" in modifiers:
        emitter.refuse("saturation")
    a, b = instruction.operands[1:3]
    result = kind
    if "wide" in modifiers:
        result = f"{kind[0]}{16 * WIDTH[kind]}"
        wide = element(result)
        product = f"{emitter.source(a, kind)}.astype({wide}) * {emitter.source(b, kind)}.astype({wide})"
    elif "hi" in modifiers:
        product = multiply_high(emitter.source(a, kind), emitter.source(b, kind), kind)
    else:
        result = f"u{kind[1:]}"
        product = f"{emitter.source(a, result)} * {emitter.source(b, result)}"
    if instruction.op == "mad":
        product = f"{product} + {emitter.source(instruction.operands[3], result)}"
    emitter.put(instruction.operands[0], product, result)


@translates("mad")
def translate_mad(emitter: Emitter, instruction: Instruction) -> None:
    """mad of integers; that of floats is fma."""
    if is_integer(instruction.type):
        translate_multiply(emitter, instruction)
        return
    from mmcompile.emulate.ptx.instructions.floating import translate_fma

    translate_fma(emitter, instruction)


def multiply_high(a: str, b: str, kind: str) -> str:
    """Expression of the upper half of a product."""
    if WIDTH[kind] == 8:
        return f"multiply_high_64({a}, {b})"
    wide = element(f"{kind[0]}{16 * WIDTH[kind]}")
    return f"(({a}.astype({wide}) * {b}.astype({wide})) >> {wide}({8 * WIDTH[kind]})).astype({element(kind)})"


@runtime
def multiply_high_64(a: Array, b: Array) -> Array:
    """Upper 64 bits of 128-bit products, from 32-bit halves (signed: corrected as in Hacker's Delight, 8-3)."""
    a, b = np.broadcast_arrays(a, b)
    x, y = a.view(np.uint64) if a.flags.c_contiguous else a.astype(np.uint64), b.astype(np.uint64)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + ((x0 * y0) >> shift)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> shift) + (other >> shift)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, 0).astype(np.uint64) - np.where(b < 0, x, 0).astype(np.uint64)
        return np.asarray(high.view(np.int64))
    return np.asarray(high)


def translate_divide(emitter: Emitter, instruction: Instruction) -> None:
    """div of integers, towards zero; division by zero gives all ones (its value is unspecified)."""
    kind = instruction.type
    a, b = (emitter.source(x, kind) for x in instruction.operands[1:3])
    emitter.put(instruction.operands[0], f"divide_integers({a}, {b})", kind)


@translates("rem")
def translate_remainder(emitter: Emitter, instruction: Instruction) -> None:
    """rem: the sign is that of the dividend."""
    kind = instruction.type
    a, b = (emitter.full_source(x, kind) for x in instruction.operands[1:3])
    emitter.put(instruction.operands[0], f"({a} - divide_integers({a}, {b}) * {b})", kind)


@runtime
def divide_integers(a: Array, b: Array) -> Array:
    """Quotients rounded towards zero; all ones where b is zero."""
    a, b = np.broadcast_arrays(a, b)
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * b != a) & ((a < 0) != (b < 0)))
    ones = np.zeros(1, a.dtype)
    return np.where(b == 0, ~ones, quotient).astype(a.dtype)


@translates("shl", "shr")
def translate_shift(emitter: Emitter, instruction: Instruction) -> None:
    """shl and shr: amounts beyond the width clamp; shr of a signed type fills with the sign."""
    kind, target, (value, amount) = instruction.type, instruction.operands[0], instruction.operands[1:3]
    bits, number = 8 * WIDTH[kind], element(kind)
    sign = "<<" if instruction.op == "shl" else ">>"
    fills_with_sign = instruction.op == "shr" and kind[0] == "s"
    a = emitter.source(value, kind)
    if amount.kind == "immediate":
        distance = amount.integer % (1 << 32)
        if distance >= bits:
            distance = bits - 1
            a = a if fills_with_sign else f"({a} & {number}(0))"
        emitter.put(target, f"{a} {sign} {emitter.constant(np.dtype(number).type(distance))}", kind)
        return
    b = emitter.source(amount, "u32")
    shifted = f"{a} {sign} np.minimum({b}, uint32({bits - 1})).astype({number})"
    emitter.put(target, shifted if fills_with_sign else f"where({b} < {bits}, {shifted}, {number}(0))", kind)


@translates("shf")
def translate_funnel_shift(emitter: Emitter, instruction: Instruction) -> None:
    """shf: shift of the 64-bit value {b, a}; .l keeps the upper word, .r the lower one."""
    a, b, amount = (emitter.full_source(x, "u32") for x in instruction.operands[1:4])
    distance = f"({amount} & uint32(31))" if "wrap" in instruction.modifiers else f"np.minimum({amount}, uint32(32))"
    value = f"({a}.astype(uint64) | ({b}.astype(uint64) << uint64(32)))"
    left = f"(({value} << {distance}.astype(uint64)) >> uint64(32))"
    result = left if "l" in instruction.modifiers else f"({value} >> {distance}.astype(uint64))"
    emitter.put(instruction.operands[0], f"{result}.astype(uint32)", "b32")


@translates("bfe")
def translate_extract(emitter: Emitter, instruction: Instruction) -> None:
    """bfe: bit field extract, sign-extended for signed types."""
    kind, (value, position, length) = instruction.type, instruction.operands[1:4]
    a, number, bits = emitter.source(value, kind), element(kind), 8 * WIDTH[kind]
    if position.kind == length.kind == "immediate":
        start, size = position.integer & 255, length.integer & 255
        if size > 0 and start + size <= bits:
            left, right = bits - start - size, bits - size
            moved = f"({a} << {number}({left}))" if left else a
            emitter.put(instruction.operands[0], f"{moved} >> {number}({right})", kind)
            return
    a = emitter.full_source(value, kind)
    p, n = (emitter.source(x, "u32") for x in (position, length))
    emitter.put(instruction.operands[0], f"extract_field({a}, {p}, {n})", kind)


@runtime
def extract_field(values: Array, position: Array, length: Array) -> Array:
    """bfe for any positions and lengths (PTX ISA: only bits 7:0 of them count)."""
    bits, kind = 8 * values.dtype.itemsize, np.dtype(f"uint{8 * values.dtype.itemsize}")
    start = (np.asarray(position) & 255).astype(np.int64)
    size = (np.asarray(length) & 255).astype(np.int64)
    end = np.minimum(start + size, bits)
    taken = np.maximum(end - start, 0)
    unsigned = values.view(kind)
    field = np.where(start < bits, unsigned >> np.minimum(start, bits - 1).astype(kind), 0).astype(kind)
    mask = _low_bits(taken, kind)
    field &= mask
    if values.dtype.kind == "i":
        top = (unsigned >> np.clip(end - 1, 0, bits - 1).astype(kind)) & kind.type(1)
        negative = (top == 1) & (size > 0)
        return np.where(negative, field | ~mask, field).astype(kind).view(values.dtype)
    return field


def _low_bits(count: Array, kind: np.dtype[Any]) -> Any:
    """Numbers whose lowest ``count`` bits are set."""
    bits, one = 8 * kind.itemsize, kind.type(1)
    return np.where(count >= bits, ~kind.type(0), (one << np.minimum(count, bits - 1).astype(kind)) - one)


@translates("bfi")
def translate_insert(emitter: Emitter, instruction: Instruction) -> None:
    """bfi: insert the low bits of a into b."""
    kind = instruction.type
    a, b = (emitter.full_source(x, kind) for x in instruction.operands[1:3])
    position, length = (emitter.source(x, "u32") for x in instruction.operands[3:5])
    emitter.put(instruction.operands[0], f"insert_field({a}, {b}, {position}, {length})", kind)


@runtime
def insert_field(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi (PTX ISA: bits 7:0 of position and length count; bits beyond the width are dropped)."""
    kind, bits = a.dtype, 8 * a.dtype.itemsize
    start = (np.asarray(position) & 255).astype(np.int64)
    size = np.minimum(np.asarray(length) & 255, bits).astype(np.int64)
    shift = np.minimum(start, bits - 1).astype(kind)
    mask = np.where(start < bits, _low_bits(size, kind) << shift, kind.type(0))
    return np.asarray(((a << shift) & mask) | (b & ~mask))


@translates("popc", "clz", "brev", "bfind")
def translate_count(emitter: Emitter, instruction: Instruction) -> None:
    """popc, clz, bfind (position of the highest set bit, or of the highest bit unlike the sign) and brev."""
    op, kind, target = instruction.op, instruction.type, instruction.operands[0]
    x = emitter.full_source(instruction.operands[1], kind)
    if op == "brev":
        emitter.put(target, f"reverse_bits({x})", kind)
        return
    if op == "popc":
        emitter.put(target, f"np.bitwise_count({x}).astype(uint32)", "b32")
        return
    if op == "bfind" and kind[0] == "s":
        x = f"({x} ^ ({x} >> {element(kind)}({8 * WIDTH[kind] - 1}))).view({storage(kind)})"
    zeros = f"leading_zeros({x})"
    if op == "bfind" and "shiftamt" not in instruction.modifiers:
        zeros = f"(uint32({8 * WIDTH[kind] - 1}) - {zeros})"
    elif op == "bfind":
        zeros = f"where({x} == 0, uint32(0xFFFFFFFF), {zeros})"
    emitter.put(target, zeros, "b32")


@runtime
def leading_zeros(values: Array) -> Array:
    """Number of zero bits above the highest set bit, as uint32; the width where there is none."""
    bits = 8 * values.dtype.itemsize
    spread = values.copy()
    for distance in (1, 2, 4, 8, 16, 32):
        if distance < bits:
            spread |= spread >> values.dtype.type(distance)
    return np.asarray(np.uint32(bits) - np.bitwise_count(spread).astype(np.uint32))


@runtime
def reverse_bits(values: Array) -> Array:
    """brev."""
    size = values.dtype.itemsize
    bits = np.unpackbits(np.ascontiguousarray(values).view(np.uint8).reshape(-1, size), axis=1, bitorder="little")
    back = np.packbits(bits[:, ::-1], axis=1, bitorder="little")
    return np.ascontiguousarray(back).view(values.dtype).ravel()


@translates("dp4a")
def translate_dot_product(emitter: Emitter, instruction: Instruction) -> None:
    """dp4a: four 8-bit products added to a 32-bit value."""
    type_a, type_b = instruction.modifiers[-2:]
    terms = []
    for operand, kind in zip(instruction.operands[1:3], (type_a, type_b), strict=True):
        small = "int8" if kind == "s32" else "uint8"
        terms.append(f"{emitter.full_source(operand, 'b32')}.view({small}).astype(int32).reshape(-1, 4)")
    addend = emitter.full_source(instruction.operands[3], "s32")
    emitter.put(instruction.operands[0], f"(({terms[0]} * {terms[1]}).sum(1).astype(int32) + {addend})", "s32")
