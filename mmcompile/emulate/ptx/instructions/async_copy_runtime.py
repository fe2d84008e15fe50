"""What the asynchronous copies do: called from generated code (see ``async_copy``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.async_state import at_line, find_tensor_map, get_state, mark_written
from mmcompile.emulate.ptx.faults_at import faults_at_line
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.ptx.instructions.table import runtime
from mmcompile.emulate.ptx.mbarriers import Key
from mmcompile.emulate.ptx.operands import check_published
from mmcompile.emulate.ptx.tensor_maps import Box, build_map, locate_box, place_box

Lanes = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]
Mask = Lanes | None
WARP = 32
_MAP_BYTES = 128


# ---------------------------------------------------------------------- cp.async


@runtime
def copy_small(g: Group, destinations: Any, sources: Any, size: int, given: Any, mask: Mask) -> None:
    """``size`` bytes from global to shared memory; ``given``: bytes to read, the rest is zero (None: all)."""

    def perform(now: Lanes) -> None:
        lanes = np.flatnonzero(now)
        width, count = min(size, 8), max(1, size // 8)
        target = g.shared_index(destinations[lanes], size, lanes)
        if given is None or (given[lanes] == size).all():
            origin = g.global_index(sources[lanes], size, lanes, write=False)
            g.note_global_read(origin, size, lanes)
            g.note_shared_write(target, size, lanes, g.memory.read(origin, size) if g.order else None)
            g.view_shared(width, count)[target // size] = g.view_global(width, count)[origin // size]
            return
        values = np.zeros((len(lanes), size), np.uint8)
        for part in np.unique(given[lanes]):
            if part > size:
                raise g.fault("illegal", f"cp.async of {size} bytes with a source size of {part}")
            if part:
                chosen = np.flatnonzero(given[lanes] == part)
                values[chosen, :part] = _read_bytes(g, sources[lanes[chosen]], int(part), lanes[chosen])
        g.note_shared_write(target, size, lanes, values)
        g.shared[target[:, None] + np.arange(size)] = values

    get_state(g).copies.add(g.active(mask), at_line(g, perform))


def _read_bytes(g: Group, addresses: Any, size: int, lanes: Index) -> npt.NDArray[np.uint8]:
    """Bytes [lanes, size] of global memory, of any alignment."""
    every = (addresses.astype(np.uint64)[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1)
    owners = np.repeat(lanes, size)
    index = g.global_index(every, 1, owners, write=False)
    g.note_global_read(index, 1, owners)
    values: npt.NDArray[np.uint8] = g.memory.data[index].reshape(len(lanes), size)
    return values


@runtime
def commit_copies(g: Group, mask: Mask) -> None:
    """cp.async.commit_group."""
    get_state(g).copies.commit(g.active(mask))


@runtime
def wait_copies(g: Group, pending: int | None, mask: Mask) -> None:
    """cp.async.wait_group, or wait_all (None)."""
    copies = get_state(g).copies
    if pending is None:
        copies.wait_all(g.active(mask))
    else:
        copies.wait(g.active(mask), pending)


@runtime
def arrive_after_copies(g: Group, addresses: Any, counted: bool, mask: Mask) -> None:
    """cp.async.mbarrier.arrive: an arrival when all earlier cp.async of the thread are complete.

    Args:
        counted: .noinc: the arrival is one of those that the mbarrier expects; else it expects one more.
    """
    state, lanes = get_state(g), g.active_lanes(mask)
    taken = state.copies.take_all(g.active(mask))
    for lane in lanes:
        key: Key = (int(lane) // g.threads, int(addresses[lane]))

        def arrive(lane: int = int(lane), key: Key = key) -> None:
            only = np.zeros(g.lanes, np.bool_)
            only[lane] = True
            for mine, perform in taken:
                if mine[lane]:
                    perform(only)
            state.order.arrive(lane, key[1])
            state.mbarriers.arrive(key)

        with faults_at_line(g):
            if not counted:
                state.mbarriers.add_pending(key)
            state.mbarriers.track(key, at_line(g, arrive))


# ---------------------------------------------------------------------- bulk copies


@runtime
def commit_stores(g: Group, mask: Mask) -> None:
    """cp.async.bulk.commit_group."""
    get_state(g).stores.commit(g.active(mask))


@runtime
def wait_stores(g: Group, pending: int, mask: Mask) -> None:
    """cp.async.bulk.wait_group{.read}; the two are not told apart."""
    get_state(g).stores.wait(g.active(mask), pending)


@runtime
def load_bulk(g: Group, destinations: Any, sources: Any, sizes: Any, barriers: Any, mask: Mask) -> None:
    """cp.async.bulk.shared.global: bytes of a contiguous range, counted at an mbarrier."""
    for lane in g.active_lanes(mask):
        size = _check_bulk_size(g, int(sizes[lane]), int(destinations[lane]), int(sources[lane]))
        addresses = sources[lane].astype(np.uint64) + np.arange(size, dtype=np.uint64)
        places = int(destinations[lane]) + np.arange(size)
        _load(g, int(lane), addresses, places, 1, size, int(barriers[lane]))


@runtime
def store_bulk(g: Group, destinations: Any, sources: Any, sizes: Any, mask: Mask) -> None:
    """cp.async.bulk.global.shared::cta."""
    for lane in g.active_lanes(mask) if g.late else ():
        first = int(lane) // g.threads * g.shared_stride + int(sources[lane])
        check_published(g, first + np.arange(int(sizes[lane])), 1)

    def perform(now: Lanes) -> None:
        for lane in np.flatnonzero(now):
            size = _check_bulk_size(g, int(sizes[lane]), int(sources[lane]), int(destinations[lane]))
            addresses = destinations[lane].astype(np.uint64) + np.arange(size, dtype=np.uint64)
            _store(g, int(lane), addresses, int(sources[lane]) + np.arange(size), 1)

    get_state(g).stores.add(g.active(mask), at_line(g, perform))


def _check_bulk_size(g: Group, size: int, shared: int, other: int) -> int:
    if size % 16 or shared % 16 or other % 16 or not size:
        where = f"{size} bytes at {shared} and 0x{other:x}"
        raise g.fault("misaligned", f"bulk copy of {where}: all must be multiples of 16")
    return size


@runtime
def load_tensor(
    g: Group, destinations: Any, maps: Any, coordinates: list[Any], rows: bool, barriers: Any, mask: Mask
) -> None:
    """cp.async.bulk.tensor to shared memory: what lies outside of the tensor is zero."""
    for lane in g.active_lanes(mask):
        with faults_at_line(g):
            box, places = _locate(g, int(lane), maps, coordinates, rows, int(destinations[lane]))
        address = int(barriers[lane])
        outside = places[~box.inside]
        size = box.transferred_bytes
        _load(g, int(lane), box.addresses[box.inside], places[box.inside], box.element_bytes, size, address, outside)


@runtime
def store_tensor(g: Group, maps: Any, coordinates: list[Any], rows: bool, sources: Any, mask: Mask) -> None:
    """cp.async.bulk.tensor to global memory: what lies outside of the tensor is not written."""
    for lane in g.active_lanes(mask) if g.late else ():
        with faults_at_line(g):
            box, places = _locate(g, int(lane), maps, coordinates, rows, int(sources[lane]))
        inside = places[box.inside] + int(lane) // g.threads * g.shared_stride
        check_published(g, inside, box.element_bytes)

    def perform(now: Lanes) -> None:
        for lane in np.flatnonzero(now):
            box, places = _locate(g, int(lane), maps, coordinates, rows, int(sources[lane]))
            _store(g, int(lane), box.addresses[box.inside], places[box.inside], box.element_bytes)

    get_state(g).stores.add(g.active(mask), at_line(g, perform))


def _locate(g: Group, lane: int, maps: Any, coordinates: list[Any], rows: bool, shared: int) -> tuple[Box, Index]:
    """The box that a lane asks for, and its places in the shared memory of the lane's block."""
    tensor = find_tensor_map(g, int(maps[lane]))
    box = locate_box(tensor, [int(c.view(np.int32)[lane]) for c in coordinates], rows=rows)
    return box, place_box(tensor, box, shared)


def _load(
    g: Group,
    lane: int,
    addresses: Any,
    places: Index,
    width: int,
    size: int,
    barrier: int,
    outside: Index | None = None,
) -> None:
    """Copy elements of ``width`` bytes to shared ``places``, zero those ``outside``, and count ``size`` bytes."""
    state, block = get_state(g), lane // g.threads
    every = places if outside is None else np.concatenate([places, outside])
    if int(every.max()) + width > g.shared_bytes:
        raise g.fault("out of bounds", f"a bulk copy reaches beyond the {g.shared_bytes} bytes of shared memory")
    seen = state.order.issue(lane)

    def perform() -> None:
        agent = state.order.start(block, barrier, seen)
        base = block * g.shared_stride
        if len(places):
            index = g.global_index(addresses, width, None, write=False)
            state.order.read_global(agent, index, width)
            target = (places + base)[:, None] + np.arange(width)
            state.order.write_shared(agent, places + base, width)
            mark_written(g, target, g.memory.read(index, width))
        if outside is not None and len(outside):
            target = (outside + base)[:, None] + np.arange(width)
            state.order.write_shared(agent, outside + base, width)
            mark_written(g, target, np.zeros(target.shape, np.uint8))
        state.order.publish(agent, block, barrier)
        state.mbarriers.complete((block, barrier), size)

    with faults_at_line(g):
        state.mbarriers.track((block, barrier), at_line(g, perform))


def _store(g: Group, lane: int, addresses: Any, places: Index, width: int) -> None:
    """Copy elements of ``width`` bytes from shared ``places``, as the asynchronous proxy sees them."""
    if not len(places):
        return
    owners = np.full(len(places), lane)
    index = g.global_index(addresses, width, owners, write=True)
    if int(places.max()) + width > g.shared_bytes:
        raise g.fault("out of bounds", f"a bulk copy reaches beyond the {g.shared_bytes} bytes of shared memory")
    source = places + lane // g.threads * g.shared_stride
    g.note_shared_read(source, width, owners)
    g.note_global_write(index, width, owners)
    g.memory.write(index, g.async_shared[source[:, None] + np.arange(width)])


# ---------------------------------------------------------------------- tensor maps made on the device


@runtime
def replace_field(g: Group, addresses: Any, field: str, ordinal: int, values: Any, mask: Mask) -> None:
    """tensormap.replace: fields are kept by block and shared address of the descriptor."""
    fields = get_state(g).map_fields
    for lane in g.active_lanes(mask):
        fields.setdefault((int(lane) // g.threads, int(addresses[lane])), {})[field, ordinal] = int(values[lane])


@runtime
def publish_tensor_map(g: Group, targets: Any, sources: Any, mask: Mask) -> None:
    """tensormap.cp_fenceproxy: the descriptor becomes usable at its global address."""
    fields = get_state(g).map_fields
    for warp in g.active_warps(mask):
        lane = int(warp) * WARP
        found = fields.get((lane // g.threads, int(sources[lane])))
        if found is None:
            raise g.fault("uninitialised", f"no tensor map was made at shared address {int(sources[lane])}")
        every = targets[lane].astype(np.uint64) + np.arange(_MAP_BYTES, dtype=np.uint64)
        index = g.global_index(every, 1, None, write=True)
        g.note_global_write(index, 1, np.full(_MAP_BYTES, lane))
        with faults_at_line(g):
            g.launch.tensor_maps[int(targets[lane])] = build_map(found)
