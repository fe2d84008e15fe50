"""Registers, local memory and outstanding memory operations of the waves that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.memory import DeviceMemory

if TYPE_CHECKING:
    from mmcompile.emulate.gfx950.synchronise import Races

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Rows = slice | npt.NDArray[np.int64]

SCALAR = 512
"""Identifiers of registers: vector 0..255, accumulation 256..511, scalar from here on, by their encoding."""
VCC, M0, EXEC, SCC = 106, 124, 126, 128
KERNARG = 0x7E00_0000_0000
"""Device address of the kernel argument segment."""
LANES = 64


def name_register(register: int) -> str:
    """E.g. v12, a3, s7, vcc, exec."""
    if register < 256:
        return f"v{register}"
    if register < SCALAR:
        return f"a{register - 256}"
    index = register - SCALAR
    names = {VCC: "vcc", VCC + 1: "vcc_hi", M0: "m0", EXEC: "exec", EXEC + 1: "exec_hi", SCC: "scc"}
    return names.get(index, f"s{index}")


@dataclass
class Deferred:
    """A memory operation whose effect is still to come: delivered for the waves whose wait reaches ``numbers``."""

    waves: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    deliver: Callable[[Mask], None]


class Counter:
    """A wait counter (vmcnt, or lgkmcnt for local memory): operations return in order.

    ``issued`` and ``done`` [waves] count operations; ``mark`` [registers, waves] is the number of the last operation
    that writes a register.
    """

    def __init__(self, registers: int, waves: int) -> None:
        self.issued: npt.NDArray[np.int64] = np.zeros(waves, np.int64)
        self.done: npt.NDArray[np.int64] = np.zeros(waves, np.int64)
        self.mark: npt.NDArray[np.int64] = np.zeros((registers, waves), np.int64)
        self.deferred: list[Deferred] = []


class Waves:
    """All waves of the programs that are resident, and the present selection of them (``select``).

    Attributes:
        vector: uint32 [512, waves, 64]. scalar: uint32 [waves, 130]. Bits set in ``vector_unknown`` and
        ``scalar_unknown`` are undefined; ``unknown_in`` [registers, waves] says where any is, ``unknown`` holds the
        registers in which any is for the selected waves.
        pending: registers that an outstanding load may still write. rows: the selected waves; ``active`` [selected,
        64] the lanes that write: their execution mask ``executing``, which DPP narrows; ``full`` if all of it is set.
    """

    def __init__(self, waves: int, per_program: int, memory: DeviceMemory, lds_bytes: int, scratch_bytes: int) -> None:
        self.count, self.per_program, self.memory = waves, per_program, memory
        self.vector: npt.NDArray[np.uint32] = np.zeros((512, waves, LANES), np.uint32)
        self.vector_unknown: npt.NDArray[np.uint32] = np.full((512, waves, LANES), 0xFFFFFFFF, np.uint32)
        self.scalar: npt.NDArray[np.uint32] = np.zeros((waves, 130), np.uint32)
        self.scalar_unknown: npt.NDArray[np.uint32] = np.full((waves, 130), 0xFFFFFFFF, np.uint32)
        self.unknown_in: Mask = np.ones((SCALAR + 130, waves), np.bool_)
        self.unknown: set[int] = set()
        self.pending: set[int] = set()
        self.load_line = [0] * (SCALAR + 130)
        self.vm, self.lgkm = Counter(SCALAR, waves), Counter(SCALAR, waves)
        self.smem: Mask = np.zeros((130, waves), np.bool_)
        programs = waves // per_program
        self.lds_limit, lds_bytes = lds_bytes, lds_bytes + -lds_bytes % 16
        self.lds_bytes = lds_bytes
        self.lds: npt.NDArray[np.uint8] = np.zeros(programs * lds_bytes + 16, np.uint8)
        self.lds_unknown: npt.NDArray[np.uint8] = np.full(programs * lds_bytes + 16, 0xFF, np.uint8)
        self.lds_base: npt.NDArray[np.int64] = np.arange(waves) // per_program * lds_bytes
        self.scratch: npt.NDArray[np.uint8] = np.zeros((waves, LANES, scratch_bytes), np.uint8)
        self.scratch_unknown: npt.NDArray[np.uint8] = np.full((waves, LANES, scratch_bytes), 0xFF, np.uint8)
        self.kernarg_address = KERNARG
        self.kernarg: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.memory_partly_unknown = memory.partly_unknown
        self.late = False
        self.races: Races | None = None
        self.line, self.text, self.index = 0, "", 0
        self.jump: Array | None = None
        # Instructions executed by all waves.
        self.executed = 0
        # Changes of device memory; polls of each wave since the last one; sums of addresses by line (``count_polls``).
        self.progress = 0
        self.polled: npt.NDArray[np.int64] = np.zeros(waves, np.int64)
        self.asked: dict[int, npt.NDArray[np.uint64]] = {}
        self.everything = np.arange(waves)
        self.select(slice(None))

    # ------------------------------------------------------------------ selection

    def select(self, rows: Rows) -> None:
        """Run the waves ``rows`` from here on."""
        self.rows = rows
        self.whole = isinstance(rows, slice)
        self.waves: npt.NDArray[np.int64] = self.everything[rows]
        self.unknown.clear()
        self.unknown.update(np.flatnonzero(self.unknown_in[:, rows].any(axis=1)).tolist())
        self.refresh()

    def refresh(self) -> None:
        """Read the execution masks of the selected waves again."""
        self.executing: Mask = self.read_lanes(EXEC)
        self.active = self.executing
        self.lanes = int(np.count_nonzero(self.active))
        self.full = self.lanes == self.active.size

    def count_polls(self, owners: Array, addresses: Array) -> None:
        """The selected waves run a synchronising load or an atomic: at the same addresses as its last time, it polls.

        Args:
            owners: wave of each active lane. addresses: of each active lane.
        """
        before = self.asked.setdefault(self.line, np.zeros(self.count, np.uint64))
        now = np.zeros(self.count, np.uint64)
        np.add.at(now, owners, addresses)
        repeated = before[self.waves] == now[self.waves]
        self.polled[self.waves] = np.where(repeated, self.polled[self.waves] + 1, 0)
        before[self.waves] = now[self.waves]

    # ------------------------------------------------------------------ registers

    def put(self, register: int, values: Array) -> None:
        """Write a vector register of the active lanes; floats and signed integers by their bits."""
        if values.dtype != np.uint32:
            values = values.view(np.uint32) if values.dtype.itemsize == 4 else values.astype(np.uint32)
        if self.full:
            self.vector[register, self.rows] = values
            return
        target = self.vector[register, self.rows]
        np.copyto(target, values, where=self.active)
        if not self.whole:
            self.vector[register, self.rows] = target

    def put_wide(self, register: int, values: Array) -> None:
        """Write 64-bit values to a pair of vector registers."""
        words = np.ascontiguousarray(values).view(np.uint32)
        self.put(register, words[:, 0::2])
        self.put(register + 1, words[:, 1::2])

    def read_pair(self, index: int) -> Array:
        """Scalar registers index, index + 1 as uint64 [waves]; possibly a view."""
        pair: Array = self.scalar[self.rows, index : index + 2].view(np.uint64)[:, 0]
        return pair

    def put_pair(self, index: int, values: Array) -> None:
        """Write uint64 [waves] to a scalar pair."""
        self.scalar[self.rows, index : index + 2] = np.ascontiguousarray(values).view(np.uint32).reshape(-1, 2)

    def read_lanes(self, index: int) -> Mask:
        """A scalar pair as lane mask, bool [waves, 64]."""
        return unpack_lanes(self.scalar[self.rows, index : index + 2])

    def put_lanes(self, index: int, mask: Mask) -> None:
        """Write a lane mask, bool [waves, 64], to a scalar pair."""
        self.scalar[self.rows, index : index + 2] = pack_lanes(mask)

    # ------------------------------------------------------------------ undefined bits

    def set_unknown(self, register: int, mask: Array | int, lanes: tuple[Array, Array] | None = None) -> None:
        """Undefined bits of a register: of the active lanes, or of the given waves and lanes; [waves] for a scalar."""
        if register >= SCALAR:
            self.scalar_unknown[self.rows, register - SCALAR] = mask
            left = self.scalar_unknown[self.rows, register - SCALAR] != 0
        elif lanes is not None:
            self.vector_unknown[register, lanes[0], lanes[1]] = mask
            left = self.vector_unknown[register, self.rows].any(axis=1)
        else:
            if self.full:
                self.vector_unknown[register, self.rows] = mask
            else:
                target = self.vector_unknown[register, self.rows]
                np.copyto(target, np.asarray(mask, np.uint32), where=self.active)
                if not self.whole:
                    self.vector_unknown[register, self.rows] = target
            if isinstance(mask, int) and mask == 0 and self.full:
                self.unknown_in[register, self.rows] = False
                self.unknown.discard(register)
                return
            left = self.vector_unknown[register, self.rows].any(axis=1)
        self.unknown_in[register, self.rows] = left
        if left.any():
            self.unknown.add(register)
        else:
            self.unknown.discard(register)

    # ------------------------------------------------------------------ faults

    def fault(self, kind: Any, what: str) -> EmulationFault:
        """A fault at the present instruction."""
        return EmulationFault(kind, what, self.line, self.text)

    def check_pending(self, reads: Iterable[int], writes: Iterable[int], queue: str) -> None:
        """Fault if a register is touched while a load into it is in flight.

        Loads of one queue return in order: a load may overwrite the register of an earlier one of its queue.
        """
        for registers, what in ((reads, "read"), (writes, "overwritten")):
            for register in registers:
                if register in self.pending and self.is_in_flight(register, queue if registers is writes else ""):
                    line = self.load_line[register]
                    raise self.fault(
                        "in flight",
                        f"{name_register(register)} is {what} before a wait for the load of line {line}",
                    )

    def is_in_flight(self, register: int, own_queue: str = "") -> bool:
        """Whether a load into the register is outstanding for one of the selected waves."""
        if register >= SCALAR:
            return own_queue != "smem" and bool(self.smem[register - SCALAR, self.rows].any())
        for counter, name in ((self.vm, "vm"), (self.lgkm, "lgkm")):
            if name != own_queue and (counter.mark[register, self.rows] > counter.done[self.rows]).any():
                return True
        return False


def unpack_lanes(words: Array) -> Mask:
    """Scalar pairs uint32 [waves, 2] to lanes, bool [waves, 64]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little").view(np.bool_)


def pack_lanes(mask: Mask) -> npt.NDArray[np.uint32]:
    """Lanes, bool [waves, 64], to scalar pairs uint32 [waves, 2]."""
    return np.packbits(mask, axis=1, bitorder="little").view(np.uint32)
