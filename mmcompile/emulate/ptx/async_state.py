"""What a group of blocks has in flight: commit groups, mbarriers, tensor memory, tensor maps made on the device.

Created at the first asynchronous instruction of a group and kept in ``Group.queues``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.launch import TensorMap
from mmcompile.emulate.ptx.async_order import AsyncOrder
from mmcompile.emulate.ptx.async_queue import CommitGroups
from mmcompile.emulate.ptx.emitter import PARAMETER_WINDOW
from mmcompile.emulate.ptx.faults_at import faults_at_line
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.ptx.in_flight import InFlightRegisters
from mmcompile.emulate.ptx.mbarriers import Mbarriers
from mmcompile.emulate.ptx.program import Program
from mmcompile.emulate.ptx.tensor_memory import EXCLUSIVE_COLUMNS, LANES, TensorMemory

_NAME = "asynchronous"
_Result = TypeVar("_Result")


class AsyncState:
    """Asynchronous operations of a group.

    Attributes:
        copies: cp.async. stores: bulk stores (.bulk_group). wgmma: wgmma.mma_async. tensor_loads, tensor_stores:
            tcgen05.ld and st. mbarriers: the objects, and what completes through them. order: happens-before edges.
        map_fields: tensor maps being made in shared memory, by (block, address). registers: of wgmma in flight.
    """

    def __init__(self, g: Group) -> None:
        self.copies, self.stores, self.wgmma, self.tensor_loads, self.tensor_stores = (
            CommitGroups(g.lanes, g.late) for _ in range(5)
        )
        self.mbarriers = Mbarriers(g.late)
        self.order = AsyncOrder(g, g.blocks * LANES * EXCLUSIVE_COLUMNS)
        self.map_fields: dict[tuple[int, int], dict[tuple[str, int], int]] = {}
        self.registers = InFlightRegisters(g)
        self._blocks = g.blocks
        self._tensor_memory: TensorMemory | None = None

    @property
    def tensor_memory(self) -> TensorMemory:
        """Created at its first use."""
        if self._tensor_memory is None:
            self._tensor_memory = TensorMemory(self._blocks)
        return self._tensor_memory

    def finish(self, g: Group) -> None:
        """All blocks of the group have exited: check what a kernel must have waited for, or freed.

        Raises EmulationFault: in flight, or illegal (tensor memory that was not deallocated).
        """
        pending = [
            name
            for name, groups in (("cp.async", self.copies), ("bulk store", self.stores), ("wgmma", self.wgmma))
            if groups.find_pending().any()
        ]
        pending += self.mbarriers.list_pending()
        if pending:
            raise g.fault("in flight", f"the kernel ends with operations that nobody waited for: {', '.join(pending)}")
        if self._tensor_memory is not None and any(self._tensor_memory.allocations):
            raise g.fault("illegal", "the kernel ends without deallocating its tensor memory")


def get_state(g: Group) -> AsyncState:
    """The group's asynchronous state."""
    state = g.queues.get(_NAME)
    if state is None:
        state = g.queues[_NAME] = AsyncState(g)
    return cast(AsyncState, state)


def find_tensor_map(g: Group, address: int) -> TensorMap:
    """The tensor map at a generic address. Raises EmulationFault("illegal")."""
    maps = g.launch.tensor_maps
    found = maps.get(address - PARAMETER_WINDOW) or maps.get(address)
    if found is None:
        raise g.fault("illegal", f"there is no tensor map at address 0x{address:x}")
    return found


@functools.lru_cache(64)
def find_target(program: Program) -> str:
    """The .target of the text, e.g. "sm_103a"."""
    match = re.search(r"^\s*\.target\s+(sm_\w+)", program.module.text, re.M)
    return match[1] if match else ""


def at_line(g: Group, perform: Callable[..., _Result]) -> Callable[..., _Result]:
    """``perform``, to be called later: its faults carry the line of the instruction that is running now."""
    issued = g.line

    def run(*arguments: Any) -> _Result:
        waiting, g.line = g.line, issued
        with faults_at_line(g):
            result = perform(*arguments)
        g.line = waiting
        return result

    return run


def mark_written(g: Group, places: npt.NDArray[np.int64], values: npt.NDArray[np.uint8]) -> None:
    """The asynchronous proxy writes bytes of shared memory."""
    g.shared[places] = values
    if g.async_shared is not g.shared:
        g.async_shared[places] = values
    g.shared_known[places] = True
