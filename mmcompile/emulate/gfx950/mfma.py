"""Matrix instructions v_mfma_* and v_mfma_scale_* (AMD Instinct CDNA4 ISA, "Matrix Arithmetic Instructions").

Products are summed in float64 and rounded once; the hardware's order of accumulation is not modelled. The execution
mask is ignored, as in hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.formats import decode, decode_bf16, decode_f16, unpack_nibbles
from mmcompile.emulate.gfx950.decoded import ALL, Decoded, Unknowns
from mmcompile.emulate.gfx950.operands import Operand, find_constant, parse_operand, read_bits
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import Waves

Array = npt.NDArray[Any]
LANE = np.arange(64)


@dataclass(frozen=True)
class Shape:
    """D [blocks, m, n] = A [blocks, m, k] B [blocks, k, n] + C; ``inputs`` name the formats of A and B."""

    m: int
    n: int
    k: int
    blocks: int
    inputs: tuple[str, str]
    integer: bool = False


SHAPES: dict[str, Shape] = {
    "f32_32x32x8_f16": Shape(32, 32, 8, 1, ("f16", "f16")),
    "f32_32x32x8_bf16": Shape(32, 32, 8, 1, ("bf16", "bf16")),
    "f32_16x16x16_f16": Shape(16, 16, 16, 1, ("f16", "f16")),
    "f32_16x16x16_bf16": Shape(16, 16, 16, 1, ("bf16", "bf16")),
    "f32_32x32x16_f16": Shape(32, 32, 16, 1, ("f16", "f16")),
    "f32_32x32x16_bf16": Shape(32, 32, 16, 1, ("bf16", "bf16")),
    "f32_16x16x32_f16": Shape(16, 16, 32, 1, ("f16", "f16")),
    "f32_16x16x32_bf16": Shape(16, 16, 32, 1, ("bf16", "bf16")),
    "f32_4x4x4_16b_f16": Shape(4, 4, 4, 16, ("f16", "f16")),
    "f32_4x4x4_16b_bf16": Shape(4, 4, 4, 16, ("bf16", "bf16")),
    "f32_32x32x2_f32": Shape(32, 32, 2, 1, ("f32", "f32")),
    "f32_16x16x4_f32": Shape(16, 16, 4, 1, ("f32", "f32")),
    "f32_4x4x1_16b_f32": Shape(4, 4, 1, 16, ("f32", "f32")),
    "i32_32x32x16_i8": Shape(32, 32, 16, 1, ("i8", "i8"), True),
    "i32_16x16x32_i8": Shape(16, 16, 32, 1, ("i8", "i8"), True),
    "i32_32x32x32_i8": Shape(32, 32, 32, 1, ("i8", "i8"), True),
    "i32_16x16x64_i8": Shape(16, 16, 64, 1, ("i8", "i8"), True),
    **{
        f"f32_{m}x{m}x{k}_{a}_{b}": Shape(m, m, k, 1, (a, b))
        for m, k in ((32, 16), (16, 32)) for a in ("fp8", "bf8") for b in ("fp8", "bf8")
    },
}  # fmt: skip
"""v_mfma_NAME."""

SCALED = {"f32_16x16x128_f8f6f4": (16, 128), "f32_32x32x64_f8f6f4": (32, 64)}
CODES = {0: "fp8", 1: "bf8", 2: "fp6", 3: "bf6", 4: "fp4"}
"""cbsz (A) and blgp (B) of the f8f6f4 instructions."""
NOTE_SUMS = "matrix instructions are summed in fp64 and rounded once; the hardware's order and width of sums differ"
REGISTERS = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}
_DECODE = {"fp8": "e4m3", "bf8": "e5m2", "fp6": "e2m3", "bf6": "e3m2", "fp4": "e2m1"}


def unpack(words: Array, name: str) -> Array:
    """Registers of a lane, uint32 [waves, 64, count], to its values, float64 [waves, 64, n]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if name == "bf16":
        return decode_bf16(raw.view(np.uint16)).astype(np.float64)
    if name == "f16":
        return decode_f16(raw.view(np.uint16)).astype(np.float64)
    if name == "f32":
        return raw.view(np.float32).astype(np.float64)
    if name == "i8":
        return raw.view(np.int8).astype(np.float64)
    if name == "fp4":
        return decode("e2m1", unpack_nibbles(raw)).astype(np.float64)
    if name in ("fp6", "bf6"):
        bits = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, 6)
        codes = (bits * (1 << np.arange(6))).sum(axis=-1).astype(np.uint8)
        return decode(_DECODE[name], codes).astype(np.float64)
    return decode(_DECODE[name], raw).astype(np.float64)


def arrange(values: Array, rows: int, blocks: int, split: bool) -> Array:
    """Values of the lanes [waves, 64, n] to a matrix [waves, blocks, rows, k].

    Lane = rows * group + row, each group holds n consecutive k. With ``split`` (8-bit operands of the f8f6f4
    instructions) a group holds 16 k of the first half and 16 of the second.
    """
    waves, _, count = values.shape
    if blocks > 1:
        return values.reshape(waves, blocks, rows, count)
    groups = 64 // rows
    parts = values.reshape(waves, groups, rows, count)
    if not split:
        return parts.transpose(0, 2, 1, 3).reshape(waves, 1, rows, groups * count)
    halves = parts.reshape(waves, groups, rows, 2, count // 2)
    return halves.transpose(0, 2, 3, 1, 4).reshape(waves, 1, rows, groups * count)


def find_places(m: int, blocks: int) -> tuple[Array, Array, Array]:
    """Block, row and column of D for every (register, lane): arrays [registers, 64]."""
    if blocks > 1:
        register = np.arange(4)[:, None]
        return (LANE // 4)[None, :] + 0 * register, register + 0 * LANE, (LANE % 4)[None, :] + 0 * register
    register = np.arange(m * m // 64)[:, None]
    row = 4 * (LANE // 16) + register if m == 16 else 8 * (register // 4) + 4 * (LANE // 32) + register % 4
    return 0 * row, row, np.broadcast_to(LANE % m, row.shape)


def read_words(w: Waves, operand: Operand) -> Array:
    """Registers uint32 [waves, 64, count]."""
    first = operand.index
    return np.stack([w.vector[first + k, w.rows] for k in range(operand.count)], axis=-1)


def read_word_unknown(w: Waves, operand: Operand) -> Array:
    """Lanes with an undefined bit in any register, bool [waves, 64]."""
    total = np.zeros((len(w.waves), 64), np.bool_)
    for k in range(operand.count):
        if operand.index + k in w.unknown:
            total |= w.vector_unknown[operand.index + k, w.rows] != 0
    return total


def write_all(w: Waves, first: int, values: Array) -> None:
    """Write uint32 [waves, registers, 64] to every lane, whatever the execution mask."""
    for k in range(values.shape[1]):
        w.vector[first + k, w.rows] = values[:, k]


def read_accumulator(operand: Operand, integer: bool) -> Callable[[Waves, int], Array]:
    """C as float64 [waves, registers, 64]."""
    dtype = np.int32 if integer else np.float32
    if operand.kind == "vector":
        return lambda w, count: (
            np.stack([w.vector[operand.index + k, w.rows] for k in range(count)], axis=1).view(dtype).astype(np.float64)
        )
    constant = np.array([find_constant(operand)], np.uint32).view(dtype).astype(np.float64)
    return lambda w, count: constant


def build_matrix(i: Instruction, shape: Shape, scaled: bool) -> Decoded | None:
    """Decode an instruction of a shape."""
    target, a, b, c, *scales = (parse_operand(text) for text in i.operands)
    eight_bit = i.op.endswith("f8f6f4")
    accumulate = read_accumulator(c, shape.integer)
    places = find_places(shape.m, shape.blocks)
    low, high = i.list_modifier("op_sel", (0, 0, 0)), i.list_modifier("op_sel_hi", (0, 0, 0))
    select = [x + 2 * y for x, y in zip(low, high, strict=True)]
    scale_readers = [read_bits(operand) for operand in scales]

    def read_matrix(w: Waves, operand: Operand, which: int) -> Array:
        name = shape.inputs[which]
        split = eight_bit and name in ("fp8", "bf8")
        rows = shape.m if which == 0 else shape.n
        matrix = arrange(unpack(read_words(w, operand), name), rows, shape.blocks, split)
        if not scaled:
            return matrix
        codes = np.broadcast_to(scale_readers[which](w) >> np.uint32(8 * select[which]), (len(w.waves), 64))
        values = decode("ue8m0", codes & np.uint32(255)).astype(np.float64)
        factors = values.reshape(-1, 64 // rows, rows).transpose(0, 2, 1)
        return matrix * np.repeat(factors, 32, axis=2)[:, None]

    def step(w: Waves) -> None:
        product = read_matrix(w, a, 0) @ read_matrix(w, b, 1).swapaxes(-1, -2)
        count = places[1].shape[0]
        total = product[:, places[0], places[1], places[2]] + accumulate(w, count)
        if shape.integer:
            write_all(w, target.index, total.astype(np.int64).astype(np.uint32))
        else:
            write_all(w, target.index, total.astype(np.float32).view(np.uint32))

    def taint(w: Waves) -> Unknowns:
        return find_unknown(w, shape, (a, b, c), target, places)

    reads = [r for operand in (a, b, c, *scales) for r in operand.list_registers()]
    note = "" if shape.integer else NOTE_SUMS
    return Decoded(step, reads, target.list_registers(), taint, all_lanes=True, note=note)


def find_unknown(
    w: Waves, shape: Shape, operands: tuple[Operand, Operand, Operand], target: Operand, places: tuple[Array, ...]
) -> Unknowns:
    """An undefined value spoils its row (A) or column (B) of D."""
    a, b, c = operands
    sides: list[Any] = []
    for operand, rows in ((a, shape.m), (b, shape.n)):
        lanes = read_word_unknown(w, operand)
        if shape.blocks > 1:
            sides.append(lanes.reshape(-1, shape.blocks, rows))
        else:
            grouped: Any = lanes.reshape(-1, 64 // rows, rows)
            sides.append(grouped.any(axis=1)[:, None])
    spoiled = sides[0][:, places[0], places[1]] | sides[1][:, places[0], places[2]]
    found: Unknowns = []
    for k in range(target.count):
        mask = spoiled[:, k]
        if c.kind == "vector":
            mask = mask | (w.vector_unknown[c.index + k, w.rows] != 0)
        found.append((target.index + k, np.where(mask, ALL, np.uint32(0))))
    return found


def build(i: Instruction) -> Decoded | None:
    """Matrix instructions; None for anything else."""
    match = re.match(r"^v_mfma_(scale_)?(\w+?)(_e64)?$", i.op)
    if not match:
        return None
    name = match[2].replace("bf16_1k", "bf16")
    if name in SCALED:
        if set(i.modifiers) - {"cbsz", "blgp", "op_sel", "op_sel_hi"}:
            return None
        formats = tuple(CODES[int(i.modifiers.get(key, "0"), 0)] for key in ("cbsz", "blgp"))
        m, k = SCALED[name]
        return build_matrix(i, Shape(m, m, k, 1, (formats[0], formats[1])), bool(match[1]))
    if name in SHAPES and not match[1] and not i.modifiers:
        return build_matrix(i, SHAPES[name], False)
    return None
