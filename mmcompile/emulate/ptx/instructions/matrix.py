"""Warp-level matrix instructions: ldmatrix, stmatrix, mma.sync.

PTX ISA, "Warp-level matrix instructions". Products are summed exactly (in fp64, or in integers) and rounded once for
each instruction; the hardware's own order and width of sums is not documented.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx import fragments
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction

Words = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_] | None
WARP = 32

_SHAPE = re.compile(r"m16n8k(\d+)$")
_INPUTS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f32", "f16"), "e5m2": ("f32", "f16"),
           "s8": ("s32",), "u8": ("s32",)}  # fmt: skip
"""Input types, and the accumulator types that they allow."""
_DEPTHS = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32), "s8": (16, 32),
           "u8": (16, 32)}  # fmt: skip
NOTE_SUMS = "tensor core products are summed exactly and rounded once; the hardware's order and width of sums differ"
_PLAIN = ("sync", "aligned", "row", "col", "satfinite")


def _count_matrices(emitter: Emitter, instruction: Instruction) -> int:
    counts = [int(m[1]) for m in instruction.modifiers if re.fullmatch(r"x[124]", m)]
    spaces = [m for m in instruction.modifiers if m.startswith("shared")]
    if len(counts) != 1 or "m8n8" not in instruction.modifiers or instruction.type != "b16" or not spaces:
        emitter.refuse("only .m8n8 matrices of .b16 in shared memory are modelled")
    return counts[0]


@translates("ldmatrix")
def translate_ldmatrix(emitter: Emitter, instruction: Instruction) -> None:
    """ldmatrix.sync.aligned.m8n8.num{.trans}.shared.b16."""
    count = _count_matrices(emitter, instruction)
    destination, address = instruction.operands
    transposed = "trans" in instruction.modifiers
    call = f"load_matrices(g, {emitter.address(address)}, {count}, {transposed}, {emitter.mask})"
    emitter.put_all(destination.elements(), call, "b32")


@translates("stmatrix")
def translate_stmatrix(emitter: Emitter, instruction: Instruction) -> None:
    """stmatrix.sync.aligned.m8n8.num{.trans}.shared.b16."""
    count = _count_matrices(emitter, instruction)
    address, source = instruction.operands
    if len(source.elements()) != count:
        emitter.refuse("number of source registers")
    transposed = "trans" in instruction.modifiers
    emitter.append(
        f"store_matrices(g, {emitter.address(address)}, {transposed}, {emitter.registers(source)}, {emitter.mask})"
    )


@translates("mma")
def translate_mma(emitter: Emitter, instruction: Instruction) -> None:
    """mma.sync.aligned.m16n8kK.row.col.dtype.atype.btype.ctype."""
    modifiers = [m for m in instruction.modifiers if m not in _PLAIN]
    shape = _SHAPE.match(modifiers[0])
    if not shape or len(modifiers) != 5 or len(instruction.operands) != 4 or "row" not in instruction.modifiers:
        emitter.refuse("only dense m16n8 shapes without block scaling are modelled")
    depth, (d_type, a_type, b_type, c_type) = int(shape[1]), modifiers[1:]
    pair = {a_type, b_type}
    same = a_type == b_type or pair == {"s8", "u8"} or pair == {"e4m3", "e5m2"}
    if a_type not in _INPUTS or not same or d_type != c_type or d_type not in _INPUTS[a_type]:
        emitter.refuse("types")
    destination, a, b, c = instruction.operands
    elements = fragments.ELEMENTS_OF_WORD[a_type]
    words = depth // (4 * elements)
    sizes = [len(x.elements()) for x in (destination, a, b, c)]
    if depth not in _DEPTHS[a_type] or sizes != [2 if d_type == "f16" else 4, 2 * words, words, sizes[0]]:
        emitter.refuse("shape")
    saturate = "satfinite" in instruction.modifiers
    if d_type != "s32":
        emitter.notes.add(NOTE_SUMS)
    call = (
        f"multiply_fragments(g, {d_type!r}, {a_type!r}, {b_type!r}, {emitter.registers(a)}, {emitter.registers(b)}, "
        f"{emitter.registers(c)}, {saturate})"
    )
    emitter.put_all(destination.elements(), call, "b32")


@runtime
def load_matrices(g: Group, addresses: Any, count: int, transposed: bool, mask: Mask) -> list[Words]:
    """Registers [count][lanes]: rows of 16 bytes at the addresses of lanes 8 i to 8 i + 7 are matrix i."""
    warps = g.active_warps(mask)
    lanes = (warps[:, None] * WARP + np.arange(8 * count)).reshape(-1)
    index = g.shared_index(addresses[lanes], 16, lanes)
    g.note_shared_read(index, 16, lanes)
    halves = g.shared.view(np.uint16).reshape(-1, 8)[index // 16].reshape(len(warps), count, 8, 8)
    if transposed:
        halves = halves.swapaxes(2, 3)
    words = np.ascontiguousarray(halves).view(np.uint32).reshape(len(warps), count, WARP)
    result = np.zeros((count, g.lanes // WARP, WARP), np.uint32)
    result[:, warps] = words.swapaxes(0, 1)
    return list(result.reshape(count, g.lanes))


@runtime
def store_matrices(g: Group, addresses: Any, transposed: bool, sources: list[Words], mask: Mask) -> None:
    """The inverse of ``load_matrices``."""
    warps, count = g.active_warps(mask), len(sources)
    lanes = (warps[:, None] * WARP + np.arange(8 * count)).reshape(-1)
    index = g.shared_index(addresses[lanes], 16, lanes)
    words = np.stack([source.reshape(-1, WARP)[warps] for source in sources], axis=1)
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(len(warps), count, 8, 8)
    if transposed:
        halves = halves.swapaxes(2, 3)
    rows = np.ascontiguousarray(halves).reshape(-1, 8)
    g.note_shared_write(index, 16, lanes, rows.view(np.uint8))
    g.shared.view(np.uint16).reshape(-1, 8)[index // 16] = rows


@runtime
def multiply_fragments(
    g: Group,
    d_type: str,
    a_type: str,
    b_type: str,
    a_words: list[Words],
    b_words: list[Words],
    c_words: list[Words],
    saturate: bool,
) -> list[Words]:
    """Registers of D = A B + C of every warp (also of inactive ones, whose results are not used)."""
    a = gather_a(np.stack(a_words, axis=-1).reshape(-1, WARP, len(a_words)), a_type)
    words = np.stack(b_words, axis=-1).reshape(-1, WARP, len(b_words))
    values = fragments.unpack_words(words, b_type)
    row, column = fragments.locate_b(len(b_words), values.shape[-1])
    b = np.empty((len(words), a.shape[-1], 8), values.dtype)
    b[:, row, column] = values
    c = fragments.gather_accumulator(np.stack(c_words, axis=-1).reshape(-1, WARP, len(c_words)), 8, d_type)
    total = multiply(a, b) + c
    if saturate and d_type == "s32":
        total = np.clip(total, -(2**31), 2**31 - 1)
    result = fragments.scatter_accumulator(total, d_type)
    return list(np.ascontiguousarray(result.reshape(g.lanes, -1).T))


def gather_a(words: Words, element_type: str) -> npt.NDArray[Any]:
    """Matrices [warps, 16, K] of the A fragments [warps, 32, registers]."""
    values = fragments.unpack_words(words, element_type)
    row, column = fragments.locate_a(words.shape[-1], values.shape[-1])
    matrix = np.empty((len(words), 16, int(column.max()) + 1), values.dtype)
    matrix[:, row, column] = values
    return matrix


def multiply(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A B in fp64 (exact sums of the products of up to 16-bit floats of like size), or in int64."""
    wide = np.float64 if a.dtype.kind == "f" else np.int64
    if wide is np.int64:  # exact: |products| of 8-bit integers summed over K < 2**36
        return np.rint(a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)
    return a.astype(np.float64) @ b.astype(np.float64)
