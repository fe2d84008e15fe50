"""Register fragments of the warp-level matrix instructions: which lane and register holds which matrix element.

PTX ISA, "Matrix Fragments for mma.m16n8k16 ..." (the same pattern for every m16n8 shape), "ldmatrix", and "Register
Fragments" of wgmma.mma_async.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate import formats

Words = npt.NDArray[np.uint32]
Index = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

WARP = 32
ELEMENTS_OF_WORD = {"tf32": 1, "f16": 2, "bf16": 2, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4}
_LANE = np.arange(WARP, dtype=np.int64)


def unpack_words(words: Words, element_type: str) -> Values:
    """32-bit words [...] to their elements [..., n], lowest bits first: fp32, or int32 for s8 and u8.

    tf32 ignores the 13 low bits of the word.
    """
    words = np.ascontiguousarray(words)
    if element_type == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    if element_type in ("f16", "bf16"):
        halves = words.view(np.uint16).reshape(*words.shape, 2)
        return formats.decode_bf16(halves) if element_type == "bf16" else halves.view(np.float16).astype(np.float32)
    codes = words.view(np.uint8).reshape(*words.shape, 4)
    if element_type in ("s8", "u8"):
        return codes.view(np.int8 if element_type == "s8" else np.uint8).astype(np.int32)
    return formats.decode(element_type, codes)


@functools.lru_cache(64)
def locate_a(registers: int, elements: int) -> tuple[Index, Index]:
    """Row and column [32, registers, elements] of the elements of a 16 x K fragment of A.

    ``registers``: words of a lane; ``elements``: elements of a word. K is registers * elements * 2.
    """
    lane, register, element = _spread(registers, elements)
    row = lane // 4 + 8 * (register % 2)
    return _same_shape(row, (register // 2) * 4 * elements + (lane % 4) * elements + element)


@functools.lru_cache(64)
def locate_b(registers: int, elements: int) -> tuple[Index, Index]:
    """K index and column [32, registers, elements] of the elements of a K x 8 fragment of B."""
    lane, register, element = _spread(registers, elements)
    return _same_shape(register * 4 * elements + (lane % 4) * elements + element, lane // 4)


@functools.lru_cache(64)
def locate_accumulator(columns: int) -> tuple[Index, Index]:
    """Row and column [32, columns / 2] of a 16 x ``columns`` accumulator of 32-bit elements."""
    lane, register, _ = _spread(columns // 2, 1)
    row = lane // 4 + 8 * (register // 2 % 2)
    row, column = _same_shape(row, 8 * (register // 4) + 2 * (lane % 4) + register % 2)
    return row[..., 0], column[..., 0]


@functools.lru_cache(64)
def locate_half_accumulator(columns: int) -> tuple[Index, Index]:
    """Row and column [32, columns / 4, 2] of a 16 x ``columns`` accumulator of f16 pairs."""
    lane, register, element = _spread(columns // 4, 2)
    row = lane // 4 + 8 * (register % 2)
    return _same_shape(row, 8 * (register // 2) + 2 * (lane % 4) + element)


def gather_accumulator(words: Words, columns: int, element_type: str) -> Values:
    """Matrix [..., 16, columns] from the words [..., 32, registers] of a warp; element_type f32, s32 or f16."""
    values: Values
    if element_type == "f16":
        row, column = locate_half_accumulator(columns)
        values = unpack_words(words, "f16")
    else:
        row, column = locate_accumulator(columns)
        values = np.ascontiguousarray(words).view(np.float32 if element_type == "f32" else np.int32)
    matrix = np.empty((*words.shape[:-2], 16, columns), values.dtype)
    matrix[..., row, column] = values
    return matrix


def scatter_accumulator(matrix: Values, element_type: str) -> Words:
    """Words [..., 32, registers] of a matrix [..., 16, columns], rounded to nearest even once."""
    if element_type == "f16":
        row, column = locate_half_accumulator(matrix.shape[-1])
        halves = formats.encode_f16(matrix[..., row, column])
        return np.ascontiguousarray(halves).view(np.uint32)[..., 0]
    row, column = locate_accumulator(matrix.shape[-1])
    if element_type == "s32":
        whole = matrix[..., row, column].astype(np.int64) & 0xFFFFFFFF
        return whole.astype(np.uint32)
    return np.ascontiguousarray(matrix[..., row, column].astype(np.float32)).view(np.uint32)


def _spread(registers: int, elements: int) -> tuple[Index, Index, Index]:
    return (
        _LANE[:, None, None],
        np.arange(registers, dtype=np.int64)[None, :, None],
        np.arange(elements, dtype=np.int64)[None, None, :],
    )


def _same_shape(row: Index, column: Index) -> tuple[Index, Index]:
    rows, columns = np.broadcast_arrays(row, column)
    return np.ascontiguousarray(rows), np.ascontiguousarray(columns)
