"""Device memory of an emulated kernel: registered buffers in one arena with guard gaps; every access is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]

BASE = 0x7F00_0000_0000
GUARD = 4096
_ALIGNMENT = 256  # also the size of a block: ``index >> 8``
_FILL = 0xCD


@dataclass(frozen=True)
class Region:
    """A registered buffer: bytes [start, start + size) of the arena."""

    name: str
    start: int
    size: int
    writable: bool

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return BASE + self.start


class DeviceMemory:
    """All global memory that a launch may touch.

    Register every buffer first, then run. ``data`` is the arena as bytes; ``known[i]`` says whether byte i was ever
    written (True for buffers with contents). ``partly_unknown``: some byte of a buffer was not when it was registered.
    ``shadow_size``: bytes of all writable regions.
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.data: Bytes = np.full(GUARD, _FILL, np.uint8)
        self.known: npt.NDArray[np.bool_] = np.zeros(GUARD, np.bool_)
        self.partly_unknown = False
        self.shadow_size = 0
        self._room: tuple[Bytes, npt.NDArray[np.bool_]] = (self.data, self.known)
        # By block of 256 bytes: 0 for guards, else 1 + index of the region; then by region.
        self._owner: npt.NDArray[np.int16] = np.zeros(GUARD // _ALIGNMENT, np.int16)
        self._writable, self._shift, self._end = np.zeros(1, np.bool_), np.zeros(1, np.int64), np.zeros(1, np.int64)

    def register(
        self,
        contents: npt.NDArray[Any],
        name: str,
        *,
        writable: bool = True,
        known: npt.NDArray[np.bool_] | bool = True,
    ) -> int:
        """Copy ``contents`` in and return the device address.

        Args:
            known: whether the bytes hold values that a kernel may read: one bool, or one for each byte.
        """
        raw = np.ascontiguousarray(contents).reshape(-1).view(np.uint8)
        start, size = len(self.data), len(raw)
        gap = -size % _ALIGNMENT + GUARD
        self._grow(start + size + gap)
        self.data[start : start + size], self.data[start + size :] = raw, _FILL
        self.known[start : start + size], self.known[start + size :] = known, False
        self.partly_unknown |= not (known if isinstance(known, bool) else bool(known.all()))
        self.regions.append(Region(name, start, size, writable))
        blocks = -(-size // _ALIGNMENT)
        after = np.zeros((size + gap) // _ALIGNMENT - blocks, np.int16)
        self._owner = np.concatenate([self._owner, np.full(blocks, len(self.regions), np.int16), after])
        self._writable = np.append(self._writable, writable)
        self._end = np.append(self._end, start + size)
        self._shift = np.append(self._shift, self.shadow_size - start)
        self.shadow_size += size if writable else 0
        return BASE + start

    def _grow(self, size: int) -> None:
        """Make ``data`` and ``known`` ``size`` bytes long, with room for as much again before the next copy."""
        if size > len(self._room[0]):
            room = np.empty(2 * size, np.uint8), np.empty(2 * size, np.bool_)
            room[0][: len(self.data)], room[1][: len(self.known)] = self.data, self.known
            self._room = room
        self.data, self.known = self._room[0][:size], self._room[1][:size]

    def contents(self, address: int) -> Bytes:
        """A view of the region that starts at ``address``."""
        region = next(r for r in self.regions if r.address == address)
        return self.data[region.start : region.start + region.size]

    def locate(self, addresses: npt.NDArray[np.uint64], size: int, *, write: bool) -> Index:
        """Arena indices of accesses of ``size`` bytes (any power of two) at device ``addresses``.

        Raises EmulationFault: out of bounds (names the nearest buffer), misaligned, read-only, uninitialised.
        """
        index: Index = (addresses - np.uint64(BASE)).astype(np.int64)
        if not index.size:
            return index
        # Regions start at multiples of 256 bytes, so an aligned access is inside if its last byte is. All bits of all
        # indices together tell whether they are aligned; negative ones have the sign bit.
        bits = int(np.bitwise_or.reduce(index))
        owner = self._owner[index >> 8] if bits >= 0 and int(index.max()) < len(self.data) else None
        if bits & (size - 1) or owner is None or not (index + size <= self._end[owner]).all():
            self._report(index, size, "write" if write else "read")
        assert owner is not None
        if write:
            if not self._writable[owner].all():
                place = int(index[~self._writable[owner]][0])
                raise EmulationFault("read-only", f"write of {size} bytes to {self.describe(place)}, an input")
        elif self.partly_unknown:
            unknown = ~self.known[index] | ~self.known[index + size - 1]
            if unknown.any():
                raise EmulationFault("uninitialised", f"read of {self.describe(int(index[unknown][0]))}")
        return index

    def find_shadow(self, index: Index) -> tuple[npt.NDArray[np.bool_], Index]:
        """Which accesses go to writable regions, and their first bytes in a shadow of ``shadow_size`` bytes.

        Only writable regions have a shadow in the race check: nobody writes the others.
        """
        owner = self._owner[index >> 8]
        writable = self._writable[owner]
        return writable, (index + self._shift[owner])[writable]

    def read(self, index: Index, size: int) -> Bytes:
        """Bytes [lanes, size] at arena indices."""
        values: Bytes = self.data[index[:, None] + np.arange(size)]
        return values

    def write(self, index: Index, values: Bytes) -> None:
        """Store ``values`` [lanes, size]; the last of several lanes with one index wins."""
        places = index[:, None] + np.arange(values.shape[1])
        self.data[places] = values
        if self.partly_unknown:
            self.known[places] = True

    def describe(self, index: int) -> str:
        """E.g. ``byte 128 of buffer 'x' (64 bytes)``, for the nearest buffer."""
        if not self.regions:
            return f"address 0x{BASE + index:x}, no buffer is registered"
        nearest = min(self.regions, key=lambda r: max(r.start - index, index - r.start - r.size + 1, 0))
        return f"byte {index - nearest.start} of buffer {nearest.name!r} ({nearest.size} bytes)"

    def _report(self, index: Index, size: int, what: str) -> None:
        """Raise the fault of an access that is out of bounds or misaligned."""
        inside = (index >= 0) & (index < len(self.data))
        owner = self._owner[np.where(inside, index, 0) >> 8]
        wrong = index[~(inside & (index + size <= self._end[owner]))]
        if len(wrong):
            where = self.describe(int(wrong[0]))
            raise EmulationFault("out of bounds", f"global {what} of {size} bytes at {where}, {len(wrong)} lanes")
        place = int(index[(index & (size - 1)) != 0][0])
        raise EmulationFault("misaligned", f"global access of {size} bytes at {self.describe(place)}")
