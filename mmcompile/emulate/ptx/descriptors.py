"""Shared-memory matrix descriptors of wgmma and tcgen05: canonical layouts, swizzles, and reading an operand's values.

PTX ISA, "Matrix Descriptor Format" and "Shared Memory Layout" of wgmma.mma_async; "Shared memory descriptor" and
"Canonical layouts" of tcgen05.mma.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

ELEMENT_BITS = {"tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "e2m1": 4,
                "e2m1 padded": 8, "e2m3 padded": 8, "e3m2 padded": 8}  # fmt: skip
"""Bits from one element of a row to the next. Padded: 16 packed elements at the start of 16 bytes."""

_WGMMA_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}
_VERSION = 1


@dataclass(frozen=True)
class MatrixDescriptor:
    """A matrix in shared memory.

    Attributes (bytes): start: address of the first element. leading, stride: leading and stride dimension byte
        offsets. span: width of the swizzle pattern, one of 0 (none), 32, 64, 128.
    """

    start: int
    leading: int
    stride: int
    span: int


def swizzle(addresses: Index, span: int) -> Index:
    """XOR the 16-byte chunk number with the row number of the swizzle pattern (rows are 128 bytes of address)."""
    if not span:
        return addresses
    return addresses ^ (((addresses >> 7) & (span // 16 - 1)) << 4)


def parse_wgmma_descriptor(bits: int) -> MatrixDescriptor:
    """The 64-bit descriptor of wgmma.mma_async. Raises EmulationFault("illegal")."""
    return _parse(bits, _WGMMA_SPANS[bits >> 62 & 3])


def parse_tcgen05_descriptor(bits: int) -> MatrixDescriptor:
    """The 64-bit descriptor of tcgen05.mma and tcgen05.cp. Raises EmulationFault("illegal")."""
    mode = bits >> 61 & 7
    if mode not in _TCGEN05_SPANS:
        raise EmulationFault("illegal", f"matrix descriptor 0x{bits:016x} has swizzle mode {mode}, not modelled")
    if bits >> 46 & 7 != _VERSION:
        raise EmulationFault("illegal", f"matrix descriptor 0x{bits:016x} lacks the constant 0b001 in bits 46-48")
    if bits >> 52 & 0x1FF:
        raise EmulationFault("illegal", f"matrix descriptor 0x{bits:016x} has bits of 52-60 set, not modelled")
    return _parse(bits, _TCGEN05_SPANS[mode])


def _parse(bits: int, span: int) -> MatrixDescriptor:
    if span and bits >> 49 & 7:
        raise EmulationFault("illegal", f"matrix descriptor 0x{bits:016x} has a base offset, not modelled")
    return MatrixDescriptor((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, span)


@functools.lru_cache(1024)
def locate_elements(
    descriptor: MatrixDescriptor, rows: int, columns: int, element_bits: int, transposed: bool = False
) -> Index:
    """Shared-memory addresses [rows, columns] of the bytes that hold an operand's elements.

    Args:
        rows: along M or N. columns: along K. transposed: M or N runs fastest in memory (MN-major), else K does.

    Raises EmulationFault("illegal") for a row that leaves its swizzle pattern.
    """
    row, column = np.arange(rows, dtype=np.int64)[:, None], np.arange(columns, dtype=np.int64)[None, :]
    leading, stride, span = descriptor.leading, descriptor.stride, descriptor.span
    fast, slow = (row, column) if transposed else (column, row)
    fast = fast * element_bits // 8
    if not transposed and span and descriptor.start % span + int(fast.max()) >= span:
        raise EmulationFault("illegal", f"a row of {columns} elements crosses the swizzle pattern of {span} bytes")
    if not span:
        slow_step, fast_step = (leading, stride) if transposed else (stride, leading)
        offset = (slow // 8) * slow_step + (slow % 8) * 16 + (fast // 16) * fast_step + fast % 16
    elif transposed:
        offset = (slow // 8) * stride + (slow % 8) * span + (fast // span) * leading + fast % span
    else:
        offset = (slow // 8) * stride + (slow % 8) * span + fast
    return swizzle(descriptor.start + offset, span)


def read_elements(shared: Bytes, places: Index, element_type: str) -> Values:
    """Values [..., rows, columns] (fp32, or int32 for s8 and u8) at byte ``places`` of ``shared``.

    Args:
        element_type: a key of ``ELEMENT_BITS``.
    """
    if element_type == "tf32":
        words: Values = shared.view(np.uint32)[places >> 2] & np.uint32(0xFFFFE000)
        return words.view(np.float32)
    if element_type in ("f16", "bf16"):
        halves = shared.view(np.uint16)[places >> 1]
        return formats.decode_bf16(halves) if element_type == "bf16" else halves.view(np.float16).astype(np.float32)
    if element_type == "s8":
        return shared[places].view(np.int8).astype(np.int32)
    if element_type == "u8":
        return shared[places].astype(np.int32)
    if element_type == "e2m1":
        codes = shared[places]
        codes[..., 1::2] >>= 4
        return formats.decode("e2m1", codes & 15)
    if element_type.endswith(" padded"):
        return _read_padded(shared, places, element_type.split()[0])
    return formats.decode(element_type, shared[places])


def _read_padded(shared: Bytes, places: Index, element_type: str) -> Values:
    """16 packed elements of 4 or 6 bits, then padding up to 16 bytes."""
    bits = 4 if element_type == "e2m1" else 6
    column = np.arange(places.shape[-1]) % 16
    first = places[..., np.arange(places.shape[-1]) // 16 * 16] + column * bits // 8
    shift = (column * bits % 8).astype(np.uint16)
    last = np.where(shift + bits > 8, first + 1, first)
    words = shared[first].astype(np.uint16) | (shared[last].astype(np.uint16) << np.uint16(8))
    return formats.decode(element_type, ((words >> shift) & np.uint16((1 << bits) - 1)).astype(np.uint8))
