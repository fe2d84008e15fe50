"""Device memory: global_*, flat_*, buffer_* with their bounds, loads into local memory, scalar loads, scratch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.gfx950.decoded import Decoded
from mmcompile.emulate.gfx950.lds import Half, extend, locate_lds
from mmcompile.emulate.gfx950.operands import Operand, parse_operand, read_bits, read_scalar, read_wide
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import M0, SCALAR, Waves
from mmcompile.emulate.gfx950.transfer import (
    flatten,
    gather,
    list_lanes,
    mark_unknown,
    read_registers,
    read_unknown_registers,
    scatter,
    write_registers,
)
from mmcompile.emulate.gfx950.waits import defer, issue, submit

Array = npt.NDArray[Any]
Addresses = Callable[[Waves], tuple[Array, Array | None]]
"""Device addresses of the active lanes (uint64, flat), and which dwords [lanes, n] are in the buffer (None: all)."""

LOADS = {"dword": (4, None, ""), "dwordx2": (8, None, ""), "dwordx3": (12, None, ""), "dwordx4": (16, None, ""),
         "ubyte": (1, None, ""), "sbyte": (1, None, "i8"), "ushort": (2, None, ""), "sshort": (2, None, "i16"),
         "ubyte_d16": (1, 0, ""), "ubyte_d16_hi": (1, 16, ""), "sbyte_d16": (1, 0, "i8"),
         "sbyte_d16_hi": (1, 16, "i8"), "short_d16": (2, 0, ""), "short_d16_hi": (2, 16, "")}  # fmt: skip
"""X_load_Y: bytes, first bit of a half register or None, sign extension."""
STORES = {"dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0), "byte": (1, 0), "short": (2, 0),
          "byte_d16_hi": (1, 16), "short_d16_hi": (2, 16)}  # fmt: skip
"""X_store_Y: bytes and the first bit."""
TO_LDS = {"dword": 4, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "ushort": 2}
SCALAR_LOADS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}
CACHE_BITS = {"sc0", "sc1", "nt"}


def is_synchronising(i: Instruction) -> bool:
    """Accesses past the cache of a compute die (sc1: agent or system scope) are taken as relaxed atomics."""
    return "sc1" in i.modifiers


def locate(w: Waves, addresses: Array, size: int, *, write: bool) -> Array:
    """Arena index of every access; the hardware allows any alignment. Raises EmulationFault at this line."""
    unit = size if size & (size - 1) == 0 else 4
    while unit > 1 and (addresses & np.uint64(unit - 1)).any():
        unit //= 2
    try:
        index = w.memory.locate(addresses, unit, write=write)
        for part in range(unit, size, unit):
            w.memory.locate(addresses + np.uint64(part), unit, write=write)
    except EmulationFault as fault:
        raise w.fault(fault.kind, fault.what) from fault
    return index


def make_global_address(address: Operand, base: Operand, offset: int) -> Addresses:
    """global_*: a 64-bit vector address, or scalar base plus 32-bit vector offset; plus the immediate."""
    step = np.uint64(offset & 0xFFFF_FFFF_FFFF_FFFF)
    if base.kind == "off":
        wide = read_wide(address)
        return lambda w: (flatten(w, wide(w)) + step, None)
    read, pair = read_bits(address), read_wide(base)
    return lambda w: (flatten(w, pair(w) + read(w).astype(np.uint64)) + step, None)


def make_buffer_address(i: Instruction, operands: list[Operand], size: int) -> Addresses:
    """buffer_*, raw buffers: base + scalar offset + (vector offset + immediate); a dword is inside if its end is
    within num_records (AMD Instinct CDNA4 ISA, "Buffer resource descriptor", range checking)."""
    offset = int(i.modifiers.get("offset", "0"), 0)
    vector, resource, scalar = operands
    read_offset = read_bits(vector) if "offen" in i.modifiers else None
    read_base, read_scalar_offset = read_wide(resource), read_bits(scalar)
    words = [read_bits(resource, part) for part in (1, 2, 3)]
    starts = np.arange(0, size, 4, dtype=np.int64)
    ends = starts + min(size, 4)

    def compute(w: Waves) -> tuple[Array, Array | None]:
        upper, records, flags = (word(w) for word in words)
        if (upper >> np.uint32(16)).any() or (flags & np.uint32(1 << 23)).any():
            raise w.fault("illegal", "only raw buffers (stride 0, no swizzle) are modelled")
        vector_offset = np.zeros((1, 1), np.int64) if read_offset is None else read_offset(w).astype(np.int64)
        within = flatten(w, vector_offset + offset)
        extra = read_scalar_offset(w).astype(np.int64)
        limit = flatten(w, records.astype(np.int64) - extra)
        base = flatten(w, (read_base(w) & np.uint64(0xFFFF_FFFF_FFFF)) + extra.astype(np.uint64))
        inside = within[:, None] + ends <= limit[:, None]
        return base + within.astype(np.uint64), (None if inside.all() else inside)

    return compute


def parse_access(i: Instruction, data_first: bool, size: int) -> tuple[Operand | None, Addresses, list[int]] | None:
    """Data operand, addresses and address registers of a global or buffer access; None if the form is unknown."""
    operands = [parse_operand(text) for text in i.operands]
    if i.op.startswith("buffer_"):
        known = {"offen", "offset", "lds", *CACHE_BITS}
        data = None if "lds" in i.modifiers else operands.pop(0)
        if "lds" in i.modifiers and "offen" not in i.modifiers and operands[0].kind != "off":
            operands.insert(0, Operand("off", count=0))
        if set(i.modifiers) - known or len(operands) != 3:
            return None
        registers = [r for operand in operands for r in operand.list_registers()]
        return data, make_buffer_address(i, operands, size), registers
    if set(i.modifiers) - {"offset", *CACHE_BITS}:
        return None
    if i.op.startswith("flat_"):
        operands.append(Operand("off", count=0))
    base = operands.pop()
    data = None
    if len(operands) == 2:
        data = operands.pop(0 if data_first else 1)
    registers = [*operands[0].list_registers(), *base.list_registers()]
    offset = int(i.modifiers.get("offset", "0"), 0)
    return data, make_global_address(operands[0], base, offset), registers


def fetch(w: Waves, addresses: Array, inside: Array | None, size: int) -> tuple[Array, Array]:
    """Arena index of every lane and which lanes touch memory at all; partly outside vectors go dword by dword."""
    if inside is None:
        return locate(w, addresses, size, write=False), np.ones(len(addresses), np.bool_)
    some = inside[:, 0]
    index = np.zeros(len(addresses), np.int64)
    if some.any():
        index[some] = locate(w, addresses[some], min(size, 4), write=False)
    for part in range(1, inside.shape[1]):
        chosen = inside[:, part]
        if chosen.any():
            locate(w, addresses[chosen] + np.uint64(4 * part), 4, write=False)
    return index, some


def read_memory(w: Waves, index: Array, inside: Array | None, size: int) -> Array:
    """uint32 [lanes, dwords]; zero outside a buffer."""
    values = gather(w.memory.data, index, size)
    return values if inside is None else np.where(inside, values, np.uint32(0))


def build_load(i: Instruction, name: str) -> Decoded | None:
    """global_load_*, flat_load_*, buffer_load_* into registers."""
    size, half_bit, sign = LOADS[name]
    access = parse_access(i, True, size)
    if access is None:
        return None
    data, compute, registers = access
    if data is None:
        return None
    first, count = data.index, max(size // 4, 1)
    targets, synchronising, flat = data.list_registers(), is_synchronising(i), i.op.startswith("flat_")

    def step(w: Waves) -> None:
        addresses, inside = compute(w)
        index, some = fetch(w, addresses, inside, size)
        lanes = list_lanes(w) if synchronising or w.late or w.races is not None else (index, index)
        half = None
        if half_bit is not None:
            old = read_registers(w, first, 1)
            half = Half(half_bit, old, read_unknown_registers(w, first, 1), lambda v: extend(v, sign))
        if w.races is not None:
            w.races.read_global(w, lanes[0][some], index[some], size, synchronising)
        if synchronising:
            w.count_polls(lanes[0], addresses)

        def perform(chosen: Array | None) -> None:
            pick = slice(None) if chosen is None else chosen
            values = read_memory(w, index[pick], None if inside is None else inside[pick], size)
            unknown = None
            if half is not None:
                values, unknown = half.merge(values, pick), half.merge_unknown(np.zeros_like(values), pick)
            elif sign:
                values = extend(values, sign)
            where = None if chosen is None else (lanes[0][chosen], lanes[1][chosen])
            write_registers(w, first, values, where)
            mark_unknown(w, targets, unknown if unknown is not None and unknown.any() else None, where)

        submit(w, w.vm, targets, lanes[0], perform)
        if flat:
            issue(w, w.lgkm, targets)

    if count != len(targets):
        return None
    reads = [*registers, *(targets if half_bit is not None else ())]
    return Decoded(step, reads, targets, keeps_unknown=True, demands=registers, queue="vm")


def build_store(i: Instruction, name: str) -> Decoded | None:
    """global_store_*, flat_store_*, buffer_store_*."""
    size, bit = STORES[name]
    access = parse_access(i, False, size)
    if access is None:
        return None
    data, compute, registers = access
    if data is None:
        return None
    first, count, synchronising = data.index, max(size // 4, 1), is_synchronising(i)

    def step(w: Waves) -> None:
        addresses, inside = compute(w)
        values = read_registers(w, first, count) >> np.uint32(bit)
        check_defined(w, first, count, size, bit)
        lanes = list_lanes(w)[0] if w.late or w.races is not None else np.zeros(0, np.int64)
        issue(w, w.vm, ())
        for part, chosen, width in split_store(inside, size):
            at = addresses[chosen] + np.uint64(4 * part)
            if len(at):
                index = locate(w, at, width, write=True)
                owners = lanes[chosen] if len(lanes) else lanes
                data_part = values[chosen][:, part : part + max(width // 4, 1)]
                write_memory(w, index, width, data_part, owners)
                if w.races is not None:
                    w.races.write_global(w, owners, index, data_part, width, synchronising)

    return Decoded(step, [*registers, *data.list_registers()], demands=registers, keeps_unknown=True)


def split_store(inside: Array | None, size: int) -> list[tuple[int, Any, int]]:
    """A store as pieces (first dword, lanes, bytes): whole, or dword by dword where lanes are partly outside."""
    if inside is None:
        return [(0, slice(None), size)]
    if (inside.all(axis=1) | ~inside.any(axis=1)).all():
        return [(0, inside[:, 0], size)]
    return [(part, inside[:, part], min(size, 4)) for part in range(inside.shape[1])]


def write_memory(w: Waves, index: Array, size: int, values: Array, owners: Array) -> None:
    """Store at arena indices, when the operation that was issued last is performed."""

    def perform(chosen: Array | None) -> None:
        pick = slice(None) if chosen is None else chosen
        scatter(w.memory.data, index[pick], size, values[pick])
        w.progress += 1
        if w.memory_partly_unknown:
            w.memory.known[index[pick][:, None] + np.arange(size)] = True

    if w.late:
        defer(w, w.vm, owners, perform)
    else:
        perform(None)


def check_defined(w: Waves, first: int, count: int, size: int, bit: int) -> None:
    """The stored bits must be defined."""
    unknown = read_unknown_registers(w, first, count)
    if unknown is not None:
        mask = np.uint32((1 << min(8 * size, 32)) - 1)
        if ((unknown >> np.uint32(bit)) & mask).any():
            raise w.fault("uninitialised", "an undefined value is stored to device memory")


def build_to_lds(i: Instruction, size: int) -> Decoded | None:
    """Loads that go straight to local memory: at M0 + immediate + lane * size."""
    access = parse_access(i, True, size)
    if access is None:
        return None
    _, compute, registers = access
    offset = int(i.modifiers.get("offset", "0"), 0)
    lane_offsets = np.arange(64, dtype=np.int64) * max(size, 4)

    def step(w: Waves) -> None:
        addresses, inside = compute(w)
        index, some = fetch(w, addresses, inside, size)
        start = w.scalar[w.rows, M0].astype(np.int64)[:, None] + offset
        places = locate_lds(w, flatten(w, start + lane_offsets), max(size, 4), "write")
        lanes = list_lanes(w)[0] if w.late or w.races is not None else np.zeros(0, np.int64)
        if w.races is not None:
            w.races.read_global(w, lanes[some], index[some], size, False)

        def perform(chosen: Array | None) -> None:
            pick = slice(None) if chosen is None else chosen
            values = read_memory(w, index[pick], None if inside is None else inside[pick], size)
            scatter(w.lds, places[pick], max(size, 4), values)
            scatter(w.lds_unknown, places[pick], max(size, 4), np.zeros_like(values))

        submit(w, w.vm, (), lanes, perform)
        if w.races is not None:
            written = read_memory(w, index, inside, size)
            w.races.write_local(w, w.vm, lanes, places, written, max(size, 4))

    needed = [*registers, SCALAR + M0]
    return Decoded(step, needed, demands=needed, keeps_unknown=True)


def build_scalar_load(i: Instruction, count: int) -> Decoded | None:
    """s_load_dword* (any buffer, or the kernel arguments) and s_buffer_load_dword* (zero outside num_records)."""
    if set(i.modifiers) - {"offset", "glc"}:
        return None
    target, base, offset = (parse_operand(text) for text in i.operands)
    immediate = int(i.modifiers.get("offset", "0"), 0)
    read_base, read_offset = read_scalar(base, 64), read_scalar(offset)
    first, buffered = target.index, i.op.startswith("s_buffer")
    records = base.index + 2

    def step(w: Waves) -> None:
        start = np.broadcast_to(read_offset(w).astype(np.int64) + immediate, (len(w.waves),))
        address = read_base(w) & np.uint64(0xFFFF_FFFF_FFFF) if buffered else read_base(w)
        address = (address + start.astype(np.uint64)) & np.uint64(0xFFFF_FFFF_FFFF_FFFC)
        for part in range(count):
            inside = np.ones(len(w.waves), np.bool_)
            if buffered:
                inside = start + 4 * part + 4 <= w.scalar[w.rows, records].astype(np.int64)
            w.scalar[w.rows, first + part] = read_scalar_memory(w, address + np.uint64(4 * part), inside)
        for register in targets:
            w.smem[register - SCALAR, w.rows] = True
            w.load_line[register] = w.line
        w.pending.update(targets)

    targets = target.list_registers()
    registers = [*base.list_registers(), *offset.list_registers()]
    return Decoded(step, registers, targets, demands=registers, queue="smem")


def read_scalar_memory(w: Waves, addresses: Array, inside: Array) -> Array:
    """One dword for every wave: kernel arguments or device memory; zero where not inside."""
    result = np.zeros(len(addresses), np.uint32)
    place = (addresses - np.uint64(w.kernarg_address)).astype(np.int64)
    own = inside & (place >= 0) & (place + 4 <= len(w.kernarg))
    result[own] = gather(w.kernarg, place[own], 4)[:, 0]
    other = inside & ~own
    if other.any():
        index = locate(w, addresses[other], 4, write=False)
        result[other] = gather(w.memory.data, index, 4)[:, 0]
        if w.races is not None:
            w.races.read_global(w, w.waves[other], index, 4, False)
    return result


def build_scratch(i: Instruction, kind: str, name: str) -> Decoded | None:
    """scratch_load_*, scratch_store_*: private memory of a lane at (vector or scalar offset) + immediate."""
    if set(i.modifiers) - {"offset", *CACHE_BITS}:
        return None
    operands = [parse_operand(text) for text in i.operands]
    base = operands.pop()
    data = operands.pop(0 if kind == "load" else 1)
    size, bit, sign = LOADS[name] if kind == "load" else (*STORES[name], "")
    if kind == "load" and bit is not None:
        return None
    offset, first, count = int(i.modifiers.get("offset", "0"), 0), data.index, max(size // 4, 1)
    reads = [read_bits(operand) for operand in (operands[0], base) if operand.kind != "off"]
    registers = [*operands[0].list_registers(), *base.list_registers()]

    def step(w: Waves) -> None:
        place = np.full((1, 1), offset, np.int64)
        for read in reads:
            place = place + read(w).view(np.int32)
        at, lanes = flatten(w, place), list_lanes(w)
        if ((at < 0) | (at + size > w.scratch.shape[2])).any():
            raise w.fault("out of bounds", f"scratch access of {size} bytes outside {w.scratch.shape[2]}")
        index = (lanes[0] * 64 + lanes[1]) * w.scratch.shape[2] + at
        if kind == "load":
            values = gather(w.scratch.reshape(-1), index, size)
            write_registers(w, first, extend(values, sign))
            unknown = gather(w.scratch_unknown.reshape(-1), index, size)
            mark_unknown(w, data.list_registers(), extend(unknown, sign) if unknown.any() else None, None)
            issue(w, w.vm, data.list_registers())
            return
        unknown_data = read_unknown_registers(w, first, count)
        values = read_registers(w, first, count) >> np.uint32(bit or 0)
        scatter(w.scratch.reshape(-1), index, size, values)
        masks = np.zeros_like(values) if unknown_data is None else unknown_data >> np.uint32(bit or 0)
        scatter(w.scratch_unknown.reshape(-1), index, size, masks)
        issue(w, w.vm, ())

    if kind == "load":
        return Decoded(step, registers, data.list_registers(), keeps_unknown=True, demands=registers, queue="vm")
    return Decoded(step, [*registers, *data.list_registers()], demands=registers, keeps_unknown=True)


def build(i: Instruction) -> Decoded | None:
    """Loads and stores; None for anything else."""
    match = re.match(r"^(?:s_load|s_buffer_load)_(\w+)$", i.op)
    if match:
        return build_scalar_load(i, SCALAR_LOADS[match[1]]) if match[1] in SCALAR_LOADS else None
    match = re.match(r"^(global|flat|buffer|scratch)_(load|store)_(lds_)?(\w+)$", i.op)
    if not match:
        return None
    space, kind, direct, name = match.groups()
    if direct or "lds" in i.modifiers:
        return build_to_lds(i, TO_LDS[name]) if name in TO_LDS and kind == "load" and space != "scratch" else None
    if name not in (LOADS if kind == "load" else STORES):
        return None
    if space == "scratch":
        return build_scratch(i, kind, name)
    return build_load(i, name) if kind == "load" else build_store(i, name)
