"""Logic, comparison, selection, data movement between registers (PTX ISA sections of these names)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.data_types import WIDTH, is_integer, storage
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction, Operand

Array = npt.NDArray[Any]
LOGIC = {"and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_OPPOSITE = {"lt": ">=", "le": ">", "gt": "<=", "ge": "<"}
_COMMON_TABLES = {
    0x80: "{0} & {1} & {2}", 0xFE: "{0} | {1} | {2}", 0x96: "{0} ^ {1} ^ {2}", 0xC0: "{0} & {1}",
    0xEA: "({0} & {1}) | {2}", 0xF8: "{0} | ({1} & {2})", 0x6A: "({0} & {1}) ^ {2}", 0x78: "{0} ^ ({1} & {2})",
    0xCA: "({0} & {1}) | (~{0} & {2})",
}  # fmt: skip


@translates("and", "or", "xor")
def translate_logic(emitter: Emitter, instruction: Instruction) -> None:
    """and, or, xor of bits and predicates."""
    kind = instruction.type
    a, b = (emitter.source(x, kind) for x in instruction.operands[1:3])
    emitter.put(instruction.operands[0], f"{a} {LOGIC[instruction.op]} {b}", kind)


@translates("lop3")
def translate_lop3(emitter: Emitter, instruction: Instruction) -> None:
    """lop3: any function of three bits, given by its truth table."""
    if len(instruction.operands) != 5 or instruction.type != "b32":
        emitter.refuse()
    values = [emitter.full_source(x, "b32") for x in instruction.operands[1:4]]
    table = instruction.operands[4].integer
    common = _COMMON_TABLES.get(table)
    if common:
        result = common.format(*values)
    else:
        terms = [
            "(" + " & ".join(values[j] if row >> (2 - j) & 1 else f"~{values[j]}" for j in range(3)) + ")"
            for row in range(8)
            if table >> row & 1
        ]
        result = " | ".join(terms) or f"({values[0]} & uint32(0))"
    emitter.put(instruction.operands[0], result, "b32")


@translates("prmt")
def translate_permute(emitter: Emitter, instruction: Instruction) -> None:
    """prmt: four bytes of eight, or their signs."""
    if instruction.modifiers != ("b32",):
        emitter.refuse("mode")
    a, b = (emitter.full_source(x, "b32") for x in instruction.operands[1:3])
    selector = instruction.operands[3]
    if selector.kind == "immediate":
        expression = _select_bytes(emitter, a, b, [(selector.integer >> 4 * k) & 15 for k in range(4)])
    else:
        expression = f"permute_by({a}, {b}, {emitter.full_source(selector, 'b32')})"
    emitter.put(instruction.operands[0], expression, "b32")


def _select_bytes(emitter: Emitter, a: str, b: str, nibbles: list[int]) -> str:
    places = emitter.constant(np.array([n & 7 for n in nibbles]))
    signs = emitter.constant(np.array([n >> 3 for n in nibbles], np.bool_)) if any(n & 8 for n in nibbles) else "None"
    return f"permute({a}, {b}, {places}, {signs})"


@runtime
def permute(a: Array, b: Array, places: Array, signs: Array | None) -> Array:
    """prmt with the same byte numbers in all lanes."""
    eight = np.empty((len(a), 8), np.uint8)
    eight[:, :4], eight[:, 4:] = a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)
    four = eight[:, places]
    if signs is not None:
        four = np.where(signs, np.where(four >= 128, np.uint8(255), np.uint8(0)), four)
    return np.ascontiguousarray(four).view(np.uint32).ravel()


@runtime
def permute_by(a: Array, b: Array, selectors: Array) -> Array:
    """prmt with a selector for each lane."""
    eight = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
    nibbles = (selectors[:, None] >> (np.uint32(4) * np.arange(4, dtype=np.uint32))) & np.uint32(15)
    four = np.take_along_axis(eight, (nibbles & np.uint32(7)).astype(np.int64), 1)
    four = np.where(nibbles >= 8, np.where(four >= 128, np.uint8(255), np.uint8(0)), four)
    return np.ascontiguousarray(four).view(np.uint32).ravel()


# ---------------------------------------------------------------------- comparison and selection


def compare(emitter: Emitter, relation: str, a: str, b: str, kind: str) -> str:
    """Expression of a comparison (PTX ISA, Comparison and Selection Instructions, Floating Point Comparisons)."""
    if relation in ("num", "nan"):
        either = f"(np.isnan({a}) | np.isnan({b}))"
        return either if relation == "nan" else f"~{either}"
    if is_integer(kind):
        if relation not in _COMPARISONS:
            emitter.refuse("comparison")
        return f"({a} {_COMPARISONS[relation]} {b})"
    if relation == "ne":
        return f"(({a} < {b}) | ({a} > {b}))"
    if relation in _UNORDERED:
        ordered = _UNORDERED[relation]
        if ordered == "ne":
            return f"({a} != {b})"
        if ordered == "eq":
            return f"~(({a} < {b}) | ({a} > {b}))"
        return f"~({a} {_OPPOSITE[ordered]} {b})"
    return f"({a} {_COMPARISONS[relation]} {b})"


@translates("setp")
def translate_setp(emitter: Emitter, instruction: Instruction) -> None:
    """setp: a predicate, or it and its complement, combined with another predicate."""
    kind, modifiers = instruction.type, instruction.modifiers
    target, first, second = instruction.operands[:3]
    a, b = _read_compared(emitter, instruction, (first, second), kind)
    result = emitter.new_name()
    emitter.append(f"{result} = {compare(emitter, modifiers[0], a, b, kind)}")
    logic = LOGIC.get(modifiers[1])
    if kind in ("f16x2", "bf16x2"):
        if logic:
            emitter.refuse("packed comparison combined with a predicate")
        for part, start in zip(target.parts, "01", strict=True):
            emitter.put(part, f"{result}[{start}::2].copy()", "pred")
        return
    other = emitter.source(instruction.operands[3], "pred") if logic else ""
    targets = target.parts if target.kind == "pair" else (target,)
    values = [emitter.new_name() for _ in targets]
    for value, sign in zip(values, ("", "~"), strict=False):
        emitter.append(f"{value} = {sign}{result} {logic} {other}" if logic else f"{value} = {sign}{result}")
    for part, value in zip(targets, values, strict=True):
        emitter.put(part, value, "pred")


def _read_compared(
    emitter: Emitter, instruction: Instruction, operands: tuple[Operand, Operand], kind: str
) -> tuple[str, str]:
    a, b = (emitter.source(x, kind) for x in operands)
    if "ftz" in instruction.modifiers and kind == "f32":
        return f"flush({a})", f"flush({b})"
    return a, b


@translates("set")
def translate_set(emitter: Emitter, instruction: Instruction) -> None:
    """set: all ones or 1.0 where the comparison holds."""
    result, kind = instruction.modifiers[-2:]
    if LOGIC.get(instruction.modifiers[1]):
        emitter.refuse("combined with a predicate")
    a, b = _read_compared(emitter, instruction, (instruction.operands[1], instruction.operands[2]), kind)
    truth = compare(emitter, instruction.modifiers[0], a, b, kind)
    if is_integer(result):
        number = storage(result)
        emitter.put(
            instruction.operands[0], f"where({truth}, {number}({(1 << 8 * WIDTH[result]) - 1}), {number}(0))", result
        )
    else:
        emitter.put(instruction.operands[0], f"{truth}.astype(float32)", result)


@translates("selp")
def translate_selp(emitter: Emitter, instruction: Instruction) -> None:
    """selp: a where the predicate holds, else b."""
    target, first, second, predicate = instruction.operands
    bits = f"b{8 * WIDTH[instruction.type]}"
    a, b = (emitter.source(x, bits) for x in (first, second))
    emitter.put(target, f"where({emitter.source(predicate, 'pred')}, {a}, {b})", bits, packed=True)


@translates("slct")
def translate_slct(emitter: Emitter, instruction: Instruction) -> None:
    """slct: a where c >= 0, else b."""
    kind, sign = instruction.modifiers[-2:]
    bits = f"b{8 * WIDTH[kind]}"
    a, b = (emitter.source(x, bits) for x in instruction.operands[1:3])
    condition = emitter.full_source(instruction.operands[3], sign)
    emitter.put(instruction.operands[0], f"where({condition} >= 0, {a}, {b})", bits, packed=True)


@translates("mov")
def translate_mov(emitter: Emitter, instruction: Instruction) -> None:
    """mov: also packs {a, b} into one register and unpacks it."""
    target, operand = instruction.operands[:2]
    kind = "pred" if instruction.type == "pred" else f"b{8 * WIDTH[instruction.type]}"
    if kind == "b128":
        emitter.refuse("128 bits")
    emitter.put(target, emitter.source(operand, kind), kind)


@translates("cvta")
def translate_cvta(emitter: Emitter, instruction: Instruction) -> None:
    """cvta: generic addresses of global, local and parameter memory are the addresses themselves."""
    if any(m.startswith("shared") for m in instruction.modifiers):
        emitter.refuse("generic addresses of shared memory")
    emitter.put(instruction.operands[0], emitter.source(instruction.operands[1], "b64"), "b64")
