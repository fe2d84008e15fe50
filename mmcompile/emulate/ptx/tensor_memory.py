"""Tensor memory: allocation of columns, addresses of tcgen05.ld and st, accumulator layouts, scale factors.

PTX ISA, "Tensor Memory": 128 lanes of 512 columns (576 on sm_107a) of 32-bit cells for each block; "Tensor Memory
Allocation"; "Data Movement Shape"; "Data Path Layout Organization"; "Scale factor layout in Tensor Memory".
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault

Words = npt.NDArray[np.uint32]
Index = npt.NDArray[np.int64]

LANES = 128
COLUMNS = 512
EXCLUSIVE_COLUMNS = 576
_GRANULE = 32
_FILL = 0xCDCDCDCD
_LANE = np.arange(32, dtype=np.int64)
REGISTERS = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
"""Registers of one repetition (.x1) of each data movement shape."""


_POISON = np.uint32(0xFFFFFFFF)
"""A NaN in every floating point format."""


class TensorMemory:
    """The tensor memory of all blocks of a group.

    Attributes: words [blocks, 128, 576]: the cells. known: cells that were written. busy: cells with a tcgen05.ld that
        was not waited for (late mode).
    """

    def __init__(self, blocks: int) -> None:
        shape = (blocks, LANES, EXCLUSIVE_COLUMNS)
        self.words: Words = np.full(shape, _FILL, np.uint32)
        self.known = np.zeros(shape, np.bool_)
        self.busy = np.zeros(shape, np.bool_)
        self.allocations: list[list[tuple[int, int]]] = [[] for _ in range(blocks)]
        self.relinquished = np.zeros(blocks, np.bool_)

    # ------------------------------------------------------------------ allocation

    def allocate(self, block: int, columns: int, *, exclusive: bool, largest: int) -> int:
        """First column of a new allocation.

        Args:
            exclusive: the only allocation of the block (tcgen05.alloc.exclusive), also of more than 512 columns.
            largest: columns that the target has.

        Raises EmulationFault("illegal"): a size that is not allowed, no room, or after relinquish_alloc_permit.
        """
        used = self.allocations[block]
        if self.relinquished[block]:
            raise EmulationFault("illegal", "tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        allowed = columns & (columns - 1) == 0 and columns <= COLUMNS
        if exclusive:
            allowed = columns % _GRANULE == 0 and columns <= largest
        if columns < _GRANULE or not allowed:
            raise EmulationFault("illegal", f"tcgen05.alloc of {columns} columns")
        if exclusive and used:
            raise EmulationFault("illegal", f"exclusive tcgen05.alloc while {used} is allocated")
        start = 0
        while any(start < first + size and first < start + columns for first, size in used):
            start += _GRANULE
        if start + columns > (largest if exclusive else COLUMNS):
            raise EmulationFault("illegal", f"tcgen05.alloc of {columns} columns would block for ever: {used} is taken")
        used.append((start, columns))
        self.known[block, :, start : start + columns] = False
        return start

    def free(self, block: int, first: int, columns: int) -> None:
        """tcgen05.dealloc. Raises EmulationFault("illegal") for what is not allocated."""
        if (first, columns) not in self.allocations[block]:
            raise EmulationFault(
                "illegal", f"tcgen05.dealloc of {columns} columns at {first}, allocated: {self.allocations[block]}"
            )
        self.allocations[block].remove((first, columns))

    def check_columns(self, block: int, first: int, columns: int) -> None:
        """Raises EmulationFault("out of bounds") unless the columns lie in one allocation."""
        if not any(start <= first and first + columns <= start + size for start, size in self.allocations[block]):
            raise EmulationFault(
                "out of bounds",
                f"tensor memory columns {first} to {first + columns - 1}, allocated: {self.allocations[block]}",
            )

    # ------------------------------------------------------------------ cells

    def read(self, block: int, rows: Index, columns: Index, *, poison: bool = False) -> Words:
        """Cells at broadcast (rows, columns). Raises EmulationFault: out of bounds, uninitialised.

        Args:
            poison: cells that nobody wrote are NaN instead of a fault: kernels load accumulators that they do not use.
        """
        self._check(block, rows, columns)
        known = self.known[block, rows, columns]
        if poison:
            return np.where(known, self.words[block, rows, columns], _POISON)
        if not known.all():
            row, column = (np.broadcast_to(x, known.shape)[~known][0] for x in (rows, columns))
            raise EmulationFault("uninitialised", f"tensor memory lane {row}, column {column} was never written")
        cells: Words = self.words[block, rows, columns]
        return cells

    def write(self, block: int, rows: Index, columns: Index, cells: Words) -> None:
        """Store cells. Raises EmulationFault: out of bounds, or in flight: a tcgen05.ld of them was not waited for."""
        self._check(block, rows, columns)
        if self.busy[block, rows, columns].any():
            raise EmulationFault(
                "in flight", "tensor memory is overwritten while a tcgen05.ld of it has not been waited for"
            )
        self.words[block, rows, columns] = cells
        self.known[block, rows, columns] = True

    def _check(self, block: int, rows: Index, columns: Index) -> None:
        if rows.min() < 0 or rows.max() >= LANES:
            raise EmulationFault("out of bounds", f"tensor memory lane {int(rows.max())}")
        first = int(columns.min())
        self.check_columns(block, first, int(columns.max()) - first + 1)

    # ------------------------------------------------------------------ scale factors

    def read_scales(
        self, block: int, column: int, rows: int, count: int, identifier: int, scale_type: str
    ) -> npt.NDArray[np.float32]:
        """Scale factors [rows, count]: row r in lane r % 32 of each of the four partitions, column r // 32.

        Args:
            column: first column. count: scales of a row, one byte each: four to a cell, further ones in columns that
                lie ceil(rows / 32) apart. identifier: byte of the first one (scale factor ID). scale_type: "ue8m0" or
                "ue4m3".

        Raises EmulationFault: out of bounds, uninitialised, or illegal: partitions that differ, a ue4m3 with bit 7.
        """
        across, deep = (rows + 31) // 32, (identifier + count + 3) // 4
        lanes = np.arange(LANES, dtype=np.int64)[:, None]
        used = np.arange(across * deep, dtype=np.int64)
        partial = rows % 32
        present = lanes % 32 < partial if partial else np.ones((LANES, 1), np.bool_)
        cells = self._read_partitions(block, column, used, present | (used % across < across - 1))
        row = np.arange(rows)
        words = np.stack([cells[row % 32, row // 32 + group * across] for group in range(deep)], axis=1)
        codes = np.ascontiguousarray(words).view(np.uint8)[:, identifier : identifier + count]
        if scale_type == "ue4m3":
            if (codes >= 128).any():
                raise EmulationFault("illegal", f"scale factor 0x{int(codes.max()):02x} is no ue4m3: bit 7 is set")
            return formats.decode("e4m3", codes)
        return formats.decode("ue8m0", codes)

    def _read_partitions(self, block: int, column: int, used: Index, present: npt.NDArray[np.bool_]) -> Words:
        self.check_columns(block, column, len(used))
        here = slice(column, column + len(used))
        if not self.known[block, :, here][present].all():
            raise EmulationFault("uninitialised", f"scale factors at tensor memory column {column} were never written")
        cells = np.where(present, self.words[block, :, here], 0).reshape(4, 32, len(used))
        if (cells != cells[:1]).any():
            raise EmulationFault("illegal", "scale factors differ between the four partitions of tensor memory")
        first: Words = cells[0]
        return first


@functools.lru_cache(256)
def locate_access(shape: str, repeat: int, second_half: int = 0) -> tuple[Index, Index]:
    """Lane and column [32, registers] of tcgen05.ld and st of a warp, relative to the address.

    Args:
        shape: a key of ``REGISTERS``. repeat: of .xN. second_half: columns to the second half of 16x32bx2.
    """
    register = np.arange(repeat * REGISTERS[shape], dtype=np.int64)[None, :]
    lane = _LANE[:, None]
    if shape == "32x32b":
        row, column = lane, register
    elif shape == "16x32bx2":
        row, column = lane % 16, register + lane // 16 * second_half
    elif shape == "16x64b":
        row, column = lane // 4 + lane % 2 * 8, register * 2 + lane // 2 % 2
    elif shape == "16x128b":
        row, column = lane // 4 + register % 2 * 8, register // 2 * 4 + lane % 4
    else:
        row, column = lane // 4 + register // 2 % 2 * 8, register // 4 * 8 + lane % 4 * 2 + register % 2
    rows, columns = np.broadcast_arrays(row, column)
    return np.ascontiguousarray(rows), np.ascontiguousarray(columns)


@functools.lru_cache(64)
def locate_accumulator(rows: int) -> Index:
    """Tensor memory lane [rows] of each row of an accumulator: M=128 fills all, M=64 the first 16 of each 32."""
    row = np.arange(rows, dtype=np.int64)
    return row if rows == LANES else row // 16 * 32 + row % 16
