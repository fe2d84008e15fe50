"""Tensor memory allocation and transfers: what tcgen05.alloc, dealloc, ld, st, cp, commit and wait do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.async_order import TENSOR_CORE
from mmcompile.emulate.ptx.async_state import AsyncState, at_line, get_state
from mmcompile.emulate.ptx.descriptors import parse_tcgen05_descriptor
from mmcompile.emulate.ptx.faults_at import faults_at_line
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.ptx.instructions.table import runtime
from mmcompile.emulate.ptx.operands import CHUNK, check_published, find_operand, list_chunks
from mmcompile.emulate.ptx.tensor_memory import EXCLUSIVE_COLUMNS, LANES, locate_access

Lanes = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Mask = Lanes | None
WARP = 32


@dataclass(frozen=True)
class Reduction:
    """tcgen05.ld.red: minimum or maximum over the columns that a lane loads."""

    name: str
    data_type: str
    absolute: bool
    propagates_nan: bool

    def apply(self, words: Words) -> Words:
        """One word for each lane of words [registers, lanes]."""
        values: Any = words.view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[self.data_type])
        if self.absolute:
            values = np.abs(values)
        plain = {"min": np.minimum, "max": np.maximum}[self.name]
        skipping = {"min": np.fmin, "max": np.fmax}[self.name]
        result: Words = (plain if self.propagates_nan or self.data_type != "f32" else skipping).reduce(values).view(
            np.uint32
        )
        return result


def find_cells(block: Any, rows: Any, columns: Any) -> Index:
    """Numbers of tensor memory cells of a group, for the race check."""
    cells: Index = np.asarray((block * LANES + rows) * EXCLUSIVE_COLUMNS + columns, np.int64)
    return cells


# ---------------------------------------------------------------------- allocation


@runtime
def allocate_tensor_memory(
    g: Group, addresses: Any, columns: Any, exclusive: bool, largest: int, mask: Mask
) -> None:
    """tcgen05.alloc: the address of the first column goes to shared memory."""
    memory = get_state(g).tensor_memory
    for warp in g.active_warps(mask):
        lane = np.array([warp * WARP])
        with faults_at_line(g):
            block = int(lane[0]) // g.threads
            start = memory.allocate(block, int(columns[lane[0]]), exclusive=exclusive, largest=largest)
        index = g.shared_index(addresses[lane], 4, lane)
        g.note_shared_write(index, 4, lane)
        g.view_shared(4, 1)[index // 4, 0] = start


@runtime
def free_tensor_memory(g: Group, first: Any, columns: Any, mask: Mask) -> None:
    """tcgen05.dealloc. Raises EmulationFault("in flight") while operations of the block are pending."""
    state = get_state(g)
    for warp in g.active_warps(mask):
        lane = int(warp) * WARP
        block = lane // g.threads
        mine = slice(block * g.threads, (block + 1) * g.threads)
        pending = state.tensor_loads.find_pending()[mine].any() or state.tensor_stores.find_pending()[mine].any()
        if pending or state.mbarriers.has_pipeline_work(block):
            raise g.fault("in flight", "tensor memory is freed while tcgen05 operations are pending")
        start, count = int(first[lane]) & 0xFFFF, int(columns[lane])
        with faults_at_line(g):
            state.tensor_memory.free(block, start, count)
        if state.order.enabled:
            cells = find_cells(block, np.arange(LANES)[:, None], np.arange(start, start + count))
            state.order.access_tensor_memory(int(g.agents[lane]), cells, write=True)


@runtime
def relinquish_tensor_memory(g: Group, mask: Mask) -> None:
    """tcgen05.relinquish_alloc_permit."""
    get_state(g).tensor_memory.relinquished[g.active_warps(mask) * WARP // g.threads] = True


# ---------------------------------------------------------------------- ld, st, wait


class _Access:
    """The cells that the warps of some lanes load or store: rows and columns [warps, 32, registers]."""

    def __init__(self, g: Group, addresses: Any, shape: str, repeat: int, half: int, lanes: Lanes) -> None:
        self.warps = np.flatnonzero(lanes.reshape(-1, WARP).any(axis=1))
        row, column = locate_access(shape, repeat, half)
        base = addresses[self.warps * WARP].astype(np.int64)
        own = addresses.reshape(-1, WARP)[self.warps]
        if (own != own[:, :1]).any():
            raise g.fault("illegal", "the lanes of a warp name different tensor memory addresses")
        self.rows = (base >> 16)[:, None, None] + row[None]
        self.columns = (base & 0xFFFF)[:, None, None] + column[None]
        self.blocks = self.warps * WARP // g.threads
        partition = self.warps % (g.threads // WARP) % 4
        if (self.rows // 32 != partition[:, None, None]).any():
            raise g.fault("illegal", "a warp accesses tensor memory lanes of another warp's partition")
        self.cells = find_cells(self.blocks[:, None, None], self.rows, self.columns)
        self.agents = np.broadcast_to(g.agents[self.warps * WARP][:, None, None], self.cells.shape).reshape(-1)


@runtime
def load_tensor_memory(
    g: Group,
    registers: list[int],
    addresses: Any,
    shape: str,
    repeat: int,
    half: int,
    reduction: Reduction | None,
    mask: Mask,
) -> None:
    """tcgen05.ld{.red}: the registers are valid at once, the cells are read until tcgen05.wait::ld (late mode).

    The PTX ISA wants tcgen05.wait::ld before the registers are used, but Triton 3.9 itself emits uses before it (ptxas
    tracks the registers), so that only overwriting and freeing the cells too early is a fault.
    """
    lanes, state = g.active(mask), get_state(g)
    g.active_warps(mask)
    if not lanes.any():
        return
    memory, access = state.tensor_memory, _Access(g, addresses, shape, repeat, half, lanes)
    words = np.empty(access.rows.shape, np.uint32)
    with faults_at_line(g):
        for number, block in enumerate(access.blocks):
            words[number] = memory.read(int(block), access.rows[number], access.columns[number], poison=True)
    state.order.access_tensor_memory(access.agents, access.cells, write=False)
    results = np.zeros((len(registers), g.lanes // WARP, WARP), np.uint32)
    results[: words.shape[-1], access.warps] = words.transpose(2, 0, 1)
    flat = results.reshape(len(registers), g.lanes)
    if reduction:
        flat[-1] = reduction.apply(flat[:-1])
    for register, values in zip(registers, flat, strict=True):
        g.registers[register] = values if mask is None else np.where(lanes, values, g.registers[register])
    if g.late:
        memory.busy[access.blocks[:, None, None], access.rows, access.columns] = True

    def finish(now: Lanes) -> None:
        access = _Access(g, addresses, shape, repeat, half, now)
        memory.busy[access.blocks[:, None, None], access.rows, access.columns] = False
        state.order.access_tensor_memory(access.agents, access.cells, write=False)

    if g.late:
        state.tensor_loads.add(lanes, at_line(g, finish))


@runtime
def store_tensor_memory(
    g: Group, addresses: Any, shape: str, repeat: int, half: int, sources: list[Words], mask: Mask
) -> None:
    """tcgen05.st: in late mode performed in tcgen05.wait::st."""
    lanes, state = g.active(mask), get_state(g)
    g.active_warps(mask)

    def perform(now: Lanes) -> None:
        access = _Access(g, addresses, shape, repeat, half, now)
        words = np.stack(sources, axis=-1).reshape(-1, WARP, len(sources))[access.warps]
        state.order.access_tensor_memory(access.agents, access.cells, write=True)
        for number, block in enumerate(access.blocks):
            state.tensor_memory.write(int(block), access.rows[number], access.columns[number], words[number])

    state.tensor_stores.add(lanes, at_line(g, perform))


@runtime
def wait_tensor_access(g: Group, loads: bool, mask: Mask) -> None:
    """tcgen05.wait::ld and tcgen05.wait::st."""
    g.active_warps(mask)
    state = get_state(g)
    (state.tensor_loads if loads else state.tensor_stores).wait_all(g.active(mask))


# ---------------------------------------------------------------------- cp, commit


@runtime
def copy_to_tensor_memory(
    g: Group, addresses: Any, descriptors: Any, form: tuple[int, int, bool], mask: Mask
) -> None:
    """tcgen05.cp: rows of 16 or 32 bytes from shared memory; ``form``: rows, bytes, to all four partitions."""
    rows, size, everywhere = form
    for lane in g.active_lanes(mask):
        block, target = int(lane) // g.threads, int(addresses[lane])
        with faults_at_line(g):
            descriptor = parse_tcgen05_descriptor(int(descriptors[lane]))
            places = find_operand(g, descriptor, rows, size, "u8", False)
        if target >> 16:
            raise g.fault("illegal", f"tcgen05.cp to tensor memory lane {target >> 16}")

        check_published(g, list_chunks(places, "u8", False) + block * g.shared_stride, CHUNK)

        def perform(agent: int, block: int = block, target: int = target, places: Index = places) -> None:
            read_by_tensor_core(g, agent, block, list_chunks(places, "u8", False))
            words = np.ascontiguousarray(g.async_shared[places + block * g.shared_stride]).view(np.uint32)
            words = np.tile(words, (4, 1)) if everywhere else words
            lanes, columns = np.arange(LANES)[:, None], target + np.arange(size // 4)[None, :]
            get_state(g).order.access_tensor_memory(agent, find_cells(block, lanes, columns), write=True)
            get_state(g).tensor_memory.write(block, lanes, columns, words)

        enqueue(g, get_state(g), int(lane), perform)


@runtime
def commit_tensor_core(g: Group, addresses: Any, mask: Mask) -> None:
    """tcgen05.commit: an arrival when all earlier tensor core operations are complete."""
    state = get_state(g)
    for lane in g.active_lanes(mask):
        key = (int(lane) // g.threads, int(addresses[lane]))

        def perform(agent: int, key: tuple[int, int] = key) -> None:
            state.order.publish(agent, *key)
            state.mbarriers.arrive(key)

        enqueue(g, state, int(lane), perform, key)


def enqueue(g: Group, state: AsyncState, lane: int, perform: Any, key: tuple[int, int] | None = None) -> None:
    """Issue an operation of the tensor core's pipeline; ``perform`` takes the agent that does it."""
    block, seen = lane // g.threads, state.order.issue(lane)
    run = at_line(g, lambda: perform(state.order.start(block, TENSOR_CORE, seen)))
    with faults_at_line(g):
        state.mbarriers.enqueue(block, run, key)


def read_by_tensor_core(g: Group, agent: int, block: int, chunks: Index, size: int = CHUNK) -> None:
    """The tensor core reads the first ``size`` bytes of chunks of shared memory: they must be known, and ordered."""
    index = chunks + block * g.shared_stride
    known = g.shared_known[index] & g.shared_known[index + size - 1]
    if not known.all():
        raise g.fault("uninitialised", f"the tensor core reads byte {int(chunks[~known][0])} of shared memory")
    get_state(g).order.read_shared(agent, index, size)


