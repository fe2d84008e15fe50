"""Moving bytes between register lanes and byte arrays (device memory, local memory)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.state import Waves

Array = npt.NDArray[Any]
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def gather(data: Array, index: Array, size: int) -> Array:
    """``size`` bytes at each byte ``index`` of uint8 ``data``, as uint32 [lanes, dwords] (zero-extended)."""
    if size < 4:
        return _gather_small(data, index, size).astype(np.uint32)[:, None]
    words = data.view(np.uint32)
    count = size // 4
    if (index & 3).any():
        raw: Array = data[index[:, None] + np.arange(size)]
        return raw.view(np.uint32)
    if count in (2, 4) and not (index & (size - 1)).any():
        rows: Array = words[: len(words) // count * count].reshape(-1, count)[index // size]
        return rows
    result: Array = words[(index >> 2)[:, None] + np.arange(count)]
    return result


def _gather_small(data: Array, index: Array, size: int) -> Array:
    if size == 1:
        single: Array = data[index]
        return single
    if (index & 1).any():
        joined: Array = data[index].astype(np.uint16) | (data[index + 1].astype(np.uint16) << np.uint16(8))
        return joined
    values: Array = data.view(np.uint16)[index >> 1]
    return values


def scatter(data: Array, index: Array, size: int, values: Array) -> None:
    """Store uint32 [lanes, dwords] (its low ``size`` bytes); the last of several lanes with one index wins."""
    if (index & (min(size, 4) - 1)).any():
        raw = np.ascontiguousarray(values).view(np.uint8)
        data[index[:, None] + np.arange(size)] = raw[:, :size]
    elif size < 4:
        data.view(_UNITS[size])[index // size] = values[:, 0].astype(_UNITS[size])
    elif size == 4:
        data.view(np.uint32)[index >> 2] = values[:, 0]
    else:
        data.view(np.uint32)[(index >> 2)[:, None] + np.arange(size // 4)] = values


def flatten(w: Waves, values: Array) -> Array:
    """Values [waves, 64] (or broadcastable) of the active lanes, in order of waves and lanes."""
    if values.shape != w.active.shape:
        values = np.broadcast_to(values, w.active.shape)
    flat: Array = values.reshape(-1) if w.full else values[w.active]
    return flat


def list_lanes(w: Waves) -> tuple[Array, Array]:
    """Wave and lane of every active lane, in the order of ``flatten``."""
    position, lane = np.nonzero(w.active)
    return w.waves[position], lane


def read_registers(w: Waves, first: int, count: int) -> Array:
    """Registers of the active lanes, uint32 [lanes, count]."""
    return np.stack([flatten(w, w.vector[first + i, w.rows]) for i in range(count)], axis=1)


def read_unknown_registers(w: Waves, first: int, count: int) -> Array | None:
    """Undefined bits of the active lanes, uint32 [lanes, count]; None if there are none."""
    if w.unknown.isdisjoint(range(first, first + count)):
        return None
    return np.stack([flatten(w, w.vector_unknown[first + i, w.rows]) for i in range(count)], axis=1)


def write_registers(w: Waves, first: int, values: Array, lanes: tuple[Array, Array] | None = None) -> None:
    """Store uint32 [lanes, count] to the active lanes, or to the given waves and lanes."""
    for i in range(values.shape[1]):
        column = values[:, i]
        if lanes is not None:
            w.vector[first + i, lanes[0], lanes[1]] = column
        elif w.full:
            w.vector[first + i, w.rows] = column.reshape(w.active.shape)
        else:
            target = w.vector[first + i, w.rows]
            target[w.active] = column
            if not w.whole:
                w.vector[first + i, w.rows] = target


def mark_unknown(w: Waves, registers: Sequence[int], masks: Array | None, lanes: tuple[Array, Array] | None) -> None:
    """Undefined bits, uint32 [lanes, count] or None for none, of registers that a load has written."""
    if masks is None and w.unknown.isdisjoint(registers):
        return
    if masks is None and lanes is None:
        for register in registers:
            w.set_unknown(register, 0)
        return
    where = list_lanes(w) if lanes is None else lanes
    for i, register in enumerate(registers):
        w.set_unknown(register, 0 if masks is None else masks[:, i], where)
