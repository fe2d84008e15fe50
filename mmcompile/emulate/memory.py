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
_ALIGNMENT = 256
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

    Register every buffer first, then run. ``data`` is the arena as bytes; ``owner[i]`` is 0 for guard bytes, else
    1 + index of the region; ``known[i]`` says whether byte i was ever written (True for buffers with contents).
    ``shadow_size``: bytes of all writable regions.
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.data: Bytes = np.full(GUARD, _FILL, np.uint8)
        self.owner: npt.NDArray[np.int16] = np.zeros(GUARD, np.int16)
        self.known: npt.NDArray[np.bool_] = np.zeros(GUARD, np.bool_)
        self._writable = np.zeros(1, np.bool_)
        self._partly_unknown = False
        self._shift = np.zeros(1, np.int64)
        self.shadow_size = 0

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
        index = len(self.regions) + 1
        self.regions.append(Region(name, start, size, writable))
        self.data = np.concatenate([self.data, raw, np.full(gap, _FILL, np.uint8)])
        self.owner = np.concatenate([self.owner, np.full(size, index, np.int16), np.zeros(gap, np.int16)])
        marks = np.broadcast_to(np.asarray(known, np.bool_), (size,))
        self.known = np.concatenate([self.known, marks, np.zeros(gap, np.bool_)])
        self._writable = np.append(self._writable, writable)
        self._shift = np.append(self._shift, self.shadow_size - start)
        self.shadow_size += size if writable else 0
        self._partly_unknown |= not bool(marks.all())
        return BASE + start

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
        bits, last = int(np.bitwise_or.reduce(index)), index + (size - 1)
        owner = self.owner[last] if bits >= 0 and int(last.max()) < len(self.owner) else None
        if bits & (size - 1) or owner is None or not owner.all():
            self._report(index, size, "write" if write else "read")
        assert owner is not None
        if write:
            if not self._writable[owner].all():
                place = int(index[~self._writable[owner]][0])
                raise EmulationFault("read-only", f"write of {size} bytes to {self.describe(place)}, an input")
        elif self._partly_unknown:
            unknown = ~self.known[index] | ~self.known[index + size - 1]
            if unknown.any():
                raise EmulationFault("uninitialised", f"read of {self.describe(int(index[unknown][0]))}")
        return index

    def find_shadow(self, index: Index) -> tuple[npt.NDArray[np.bool_], Index]:
        """Which accesses go to writable regions, and their first bytes in a shadow of ``shadow_size`` bytes.

        Only writable regions have a shadow in the race check: nobody writes the others.
        """
        owner = self.owner[index]
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
        if self._partly_unknown:
            self.known[places] = True

    def describe(self, index: int) -> str:
        """E.g. ``byte 128 of buffer 'x' (64 bytes)``, for the nearest buffer."""
        if not self.regions:
            return f"address 0x{BASE + index:x}, no buffer is registered"
        nearest = min(self.regions, key=lambda r: max(r.start - index, index - r.start - r.size + 1, 0))
        return f"byte {index - nearest.start} of buffer {nearest.name!r} ({nearest.size} bytes)"

    def _report(self, index: Index, size: int, what: str) -> None:
        """Raise the fault of an access that is out of bounds or misaligned."""
        inside = (index >= 0) & (index + size <= len(self.data))
        first, last = (self.owner[np.where(inside, place, 0)] for place in (index, index + size - 1))
        wrong = index[~(inside & (first > 0) & (first == last))]
        if len(wrong):
            where = self.describe(int(wrong[0]))
            raise EmulationFault("out of bounds", f"global {what} of {size} bytes at {where}, {len(wrong)} lanes")
        place = int(index[(index & (size - 1)) != 0][0])
        raise EmulationFault("misaligned", f"global access of {size} bytes at {self.describe(place)}")
