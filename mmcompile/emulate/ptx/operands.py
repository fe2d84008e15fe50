"""Operands of wgmma and tcgen05.mma in the shared memory of a group: bounds, values, and the chunks that are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.descriptors import ELEMENT_BITS, MatrixDescriptor, locate_elements, read_elements
from mmcompile.emulate.ptx.group import Group

Index = npt.NDArray[np.int64]

CHUNK = 16
"""Bytes that every canonical layout keeps together."""


def find_operand(
    g: Group, descriptor: MatrixDescriptor, rows: int, columns: int, element_type: str, transposed: bool
) -> Index:
    """Addresses [rows, columns] of an operand's elements. Raises EmulationFault: out of bounds, or illegal."""
    places = locate_elements(descriptor, rows, columns, ELEMENT_BITS[element_type], transposed)
    last = int(places.max()) + max(1, ELEMENT_BITS[element_type] // 8)
    if last > g.shared_bytes:
        raise g.fault(
            "out of bounds", f"a matrix descriptor reaches {last} bytes of shared memory, there are {g.shared_bytes}"
        )
    return places


def read_operand(g: Group, blocks: Index, places: Index, element_type: str) -> Any:
    """Values [blocks, rows, columns] as the asynchronous proxy sees them."""
    index = places[None] + (blocks * g.shared_stride)[:, None, None]
    return read_elements(g.async_shared, index, element_type)


def check_published(g: Group, index: Index, size: int) -> None:
    """What an operation reads through the asynchronous proxy must be published to it when the operation is issued.

    Args:
        index: first bytes in ``Group.shared`` of pieces of ``size`` bytes.

    Raises EmulationFault("in flight"), in late mode only: a generic write without fence.proxy.async after it.
    """
    if not g.late:
        return
    every = index.reshape(-1, 1) + np.arange(size)
    stale = (g.shared[every] != g.async_shared[every]).any(axis=1)
    if stale.any():
        place = int(index.reshape(-1)[stale][0]) % g.shared_stride
        what = f"byte {place} of shared memory is read asynchronously, without fence.proxy.async after its write"
        raise g.fault("in flight", what)


def count_chunk_bytes(element_type: str) -> int:
    """Bytes of a 16-byte chunk that hold elements: the rest is padding, which nobody needs to write."""
    return {"e2m1 padded": 8, "e2m3 padded": 12, "e3m2 padded": 12}.get(element_type, CHUNK)


def list_chunks(places: Index, element_type: str, transposed: bool) -> Index:
    """First bytes of the 16-byte chunks that hold the elements at ``places`` [rows, columns]."""
    step = CHUNK * 8 // ELEMENT_BITS[element_type]
    return (places[::step] if transposed else places[:, ::step]).reshape(-1) // CHUNK * CHUNK
