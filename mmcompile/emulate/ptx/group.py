"""The state of a group of blocks that run side by side: C blocks of T threads as C * T numpy lanes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault, Kind
from mmcompile.emulate.launch import Dim3, TensorMap
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.ptx.program import Program
from mmcompile.emulate.ptx.special import make_special
from mmcompile.emulate.ptx.synchronisation import Order

Mask = npt.NDArray[np.bool_] | None
Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

WARP = 32
_FILL = 0xCD
_SHARED_ALIGNMENT = 1024


@dataclass
class LaunchState:
    """What all groups of one launch share.

    Attributes:
        parameters: the kernel's parameter bytes. tensor_maps: descriptors among the parameters, by offset, and those
            made on the device, by global address. global_addresses: of the module's variables. order: happens-before
            edges for the race check, None without it. late: asynchronous operations complete as late as they may.
            partly_unknown: some bytes of ``memory`` are not initialised.
            undefined: registers whose definedness is followed.
    """

    program: Program
    memory: DeviceMemory
    grid: Dim3
    threads: int
    shared_bytes: int
    parameters: bytes
    tensor_maps: dict[int, TensorMap] = field(default_factory=dict)
    global_addresses: dict[str, np.uint64] = field(default_factory=dict)
    order: Order | None = None
    late: bool = False
    partly_unknown: bool = False
    undefined: frozenset[int] = frozenset()


class Group:
    """Registers, memories and position of the lanes of some blocks.

    Attributes:
        blocks: number of blocks. threads: of a block. lanes: blocks * threads. registers: one array per register.
        shared: shared memory of all blocks, ``shared_stride`` bytes apart, of which ``shared_bytes`` exist;
        async_shared: the same as the asynchronous proxy sees it (the same array unless ``late``).
        shared_known: bytes that were written. line: of the text, of the instruction being executed. spun: the running
        block of instructions polled memory. live: lanes that have not exited. agents: warp number of each lane in the
        launch. queues: commit groups of asynchronous operations, by name. carry: the condition code register.
    """

    def __init__(self, launch: LaunchState, blocks: list[Dim3], first_block: int) -> None:
        self.launch, self.program, self.memory = launch, launch.program, launch.memory
        self.late, self.order = launch.late, launch.order
        self.blocks, self.threads = len(blocks), launch.threads
        self.lanes = self.blocks * self.threads
        self.grid, self.block_ids = launch.grid, np.array(blocks, np.uint32).reshape(-1, 3)
        zeros = {width: np.zeros(self.lanes, f"uint{8 * width}") for width in (1, 2, 4, 8)}
        self.registers: list[Any] = [
            zeros[width] if width else np.zeros(self.lanes, np.bool_) for width in self.program.register_widths
        ]
        self._create_shared()
        self._create_local()
        warps = first_block * (self.threads // WARP) + np.arange(self.lanes // WARP)
        self.agents: Index = np.repeat(warps, WARP)
        if self.order:
            self.order.create_shared(self)
        self.global_addresses = launch.global_addresses
        self.live = np.ones(self.lanes, np.bool_)
        self.everyone = np.ones(self.lanes, np.bool_)
        self.carry = np.zeros(self.lanes, np.uint64)
        nowhere = np.zeros(self.lanes, np.bool_)
        # By register, and by (register, part) for those that are packed from parts.
        self.defined: dict[Any, Array] = defaultdict(lambda: nowhere, dict.fromkeys(launch.undefined, nowhere))
        self.queues: dict[str, Any] = {}
        self.line, self.spun, self.executed = 0, False, 0
        self._special: dict[str, Array] = {}
        self._kept: dict[tuple[str, bytes], Array] = {}
        self._views: dict[tuple[str, int, int], Array] = {}
        self._parameters: dict[tuple[int, int], Array] = {}

    def _create_shared(self) -> None:
        static = self.program.module.static_shared_bytes
        self.dynamic_base = -(-static // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT
        self.shared_bytes = self.dynamic_base + self.launch.shared_bytes
        self.shared_stride = -(-self.shared_bytes // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT + _SHARED_ALIGNMENT
        self.shared: Bytes = np.full(self.blocks * self.shared_stride, _FILL, np.uint8)
        self.async_shared: Bytes = self.shared.copy() if self.late else self.shared
        self.shared_known = np.zeros(len(self.shared), np.bool_)
        self.shared_base: Index = np.repeat(np.arange(self.blocks) * self.shared_stride, self.threads)

    def _create_local(self) -> None:
        self.local_stride = -(-self.program.local_bytes // WARP) * WARP
        self.local: Bytes = np.full(self.lanes * self.local_stride, _FILL, np.uint8)

    # ------------------------------------------------------------------ helpers

    def fault(self, kind: Kind, what: str) -> EmulationFault:
        """A fault at the present line, to be raised."""
        text = self.program.lines[self.line - 1].strip() if self.line else ""
        return EmulationFault(kind, what, self.line, text)

    def full(self, value: Any) -> Array:
        """``value`` in every lane."""
        return np.full(self.lanes, value)

    def keep(self, key: tuple[str, bytes], value: Array) -> Array:
        """The constant ``value``, which ``key`` stands for, in every lane."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = np.full(self.lanes, value)
        return found

    def active(self, mask: Mask) -> npt.NDArray[np.bool_]:
        """The mask as an array [lanes]; None means all lanes."""
        return self.everyone if mask is None else mask

    def active_lanes(self, mask: Mask) -> Index:
        """Indices of the active lanes."""
        return np.arange(self.lanes) if mask is None else np.flatnonzero(mask)

    def active_warps(self, mask: Mask) -> Index:
        """Indices of the warps (in the group) with active lanes. Raises EmulationFault if one is not whole."""
        lanes = self.active(mask).reshape(-1, WARP)
        some = lanes.any(axis=1)
        if not lanes[some].all():
            raise self.fault("divergent barrier", "a warp-wide instruction with inactive lanes")
        return np.flatnonzero(some)

    def special(self, name: str) -> Array:
        """A special register in every lane."""
        found = self._special.get(name)
        if found is None:
            found, constant = make_special(self, name)
            if constant:
                self._special[name] = found
        return found

    def parameter(self, offset: int, width: int) -> Array:
        """``width`` bytes of the kernel's parameters in every lane."""
        found = self._parameters.get((offset, width))
        if found is None:
            raw = np.frombuffer(self.launch.parameters[offset : offset + width], f"uint{8 * width}")
            found = self._parameters[offset, width] = np.full(self.lanes, raw[0])
        return found

    def shared_address(self, name: str) -> np.uint32:
        """Address of a variable in shared memory."""
        start = self.program.module.shared[name]
        return np.uint32(self.dynamic_base if start is None else start)

    def check_defined(self, defined: dict[Any, Array], registers: list[int], what: str, mask: Mask) -> None:
        """Raise EmulationFault("uninitialised") if one of the registers is undefined in an active lane."""
        for register in registers:
            if register in defined:
                wrong = ~defined[register] if mask is None else mask & ~defined[register]
                if wrong.any():
                    name = self.program.register_names[register]
                    lane = int(np.argmax(wrong)) % self.threads
                    raise self.fault("uninitialised", f"register {name} of thread {lane} becomes {what}")

    # ------------------------------------------------------------------ memory

    def view_shared(self, width: int, count: int) -> Array:
        """Shared memory of all blocks as rows of ``count`` unsigned integers of ``width`` bytes."""
        return self._view("shared", self.shared, width, count)

    def view_known(self, width: int, count: int) -> Array:
        """Which bytes of shared memory were written, as unsigned integers (0x01 for each known byte)."""
        return self._view("known", self.shared_known, width, count)

    def view_local(self, width: int, count: int) -> Array:
        """Local memory of all lanes, ``local_stride`` bytes apart."""
        return self._view("local", self.local, width, count)

    def view_global(self, width: int, count: int) -> Array:
        """The arena of global memory."""
        return self._view("global", self.memory.data, width, count)

    def _view(self, name: str, memory: Array, width: int, count: int) -> Array:
        found = self._views.get((name, width, count))
        if found is None:
            usable = len(memory) // (width * count) * (width * count)
            found = memory[:usable].view(f"uint{8 * width}").reshape(-1, count)
            self._views[name, width, count] = found
        return found

    def global_index(self, addresses: Array, size: int, lanes: Index | None, *, write: bool) -> Index:
        """Checked places in ``memory.data`` of accesses of ``size`` bytes. Raises EmulationFault with the line."""
        try:
            return self.memory.locate(addresses.astype(np.uint64, copy=False), size, write=write)
        except EmulationFault as fault:
            raise self.fault(fault.kind, fault.what) from None

    def shared_index(self, addresses: Array, size: int, lanes: Index | None) -> Index:
        """Checked places in ``shared`` of accesses of ``size`` bytes at 32-bit addresses of their blocks."""
        index = addresses.astype(np.int64)
        if int(index.max(initial=0)) + size > self.shared_bytes:
            raise self.fault(
                "out of bounds",
                f"shared memory access of {size} bytes at {int(index.max())}, the block has {self.shared_bytes} bytes",
            )
        if size > 1 and (index & (size - 1)).any():
            place = int(index[(index & (size - 1)) != 0][0])
            raise self.fault("misaligned", f"shared memory access of {size} bytes at {place}")
        if self.blocks == 1:
            return index
        return index + (self.shared_base if lanes is None else self.shared_base[lanes])

    def local_index(self, addresses: Array, size: int, lanes: Index | None, window: int) -> Index:
        """Checked places in ``local`` of accesses of ``size`` bytes."""
        index = addresses.astype(np.int64) - window
        if int(index.min(initial=0)) < 0 or int(index.max(initial=0)) + size > self.program.local_bytes:
            raise self.fault("out of bounds", f"local memory has {self.program.local_bytes} bytes")
        if size > 1 and (index & (size - 1)).any():
            raise self.fault("misaligned", f"local memory access of {size} bytes")
        return index + (np.arange(self.lanes) if lanes is None else lanes) * self.local_stride

    # ------------------------------------------------------------------ initialisation and races

    def note_shared_read(self, index: Index, size: int, lanes: Index | None) -> None:
        """``lanes`` read bytes [index, index + size) of ``shared``: they must be known, and ordered."""
        known = self.shared_known
        if not (known[index] & known[index + (size - 1)]).all():
            place = int(index[~(known[index] & known[index + (size - 1)])][0])
            where = f"byte {place % self.shared_stride} of shared memory ({size} bytes)"
            raise self.fault("uninitialised", f"read of {where}, which nobody wrote")
        if self.order:
            self.order.read_shared(self, index, size, lanes)

    def note_shared_write(self, index: Index, size: int, lanes: Index | None, values: Bytes | None = None) -> None:
        """``lanes`` are about to write bytes [index, index + size) of ``shared``.

        Args:
            values: the bytes [lanes, size], for the race check: writing what is there already is no race.
        """
        if self.order:
            self.order.write_shared(self, index, size, lanes, values)
        if size in (1, 2, 4, 8):
            self.view_known(size, 1)[index // size] = 0x0101010101010101 & ((1 << 8 * size) - 1)
        else:
            self.shared_known[index[:, None] + np.arange(size)] = True

    def note_global_read(self, index: Index, size: int, lanes: Index | None) -> None:
        """``lanes`` read bytes [index, index + size) of ``memory.data``."""
        if self.order:
            self.order.read_global(self, index, size, lanes)

    def note_global_write(self, index: Index, size: int, lanes: Index | None, values: Bytes | None = None) -> None:
        """``lanes`` are about to write bytes [index, index + size) of ``memory.data``: known from here on."""
        if self.order:
            self.order.write_global(self, index, size, lanes, values)
        if self.launch.partly_unknown:
            self.memory.known[index[:, None] + np.arange(size)] = True
