"""Local data share: ds_read*, ds_write*, the transposing reads (AMD Instinct CDNA4 ISA, "Data Share Operations")."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.decoded import Decoded
from mmcompile.emulate.gfx950.operands import Operand, parse_operand, read_bits
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import Waves
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
from mmcompile.emulate.gfx950.waits import submit

Array = npt.NDArray[Any]

READS = {"b32": (4, 1), "b64": (8, 2), "b96": (12, 3), "b128": (16, 4), "u8": (1, 1), "i8": (1, 1), "u16": (2, 1),
         "i16": (2, 1)}  # fmt: skip
"""ds_read_X: bytes and registers."""
HALF_READS = {"u8_d16": (1, 0), "u8_d16_hi": (1, 16), "i8_d16": (1, 0), "i8_d16_hi": (1, 16), "u16_d16": (2, 0),
              "u16_d16_hi": (2, 16)}  # fmt: skip
"""ds_read_X into half of a register: bytes, and the first bit written."""
WRITES = {"b8": (1, 0), "b16": (2, 0), "b32": (4, 0), "b64": (8, 0), "b96": (12, 0), "b128": (16, 0),
          "b8_d16_hi": (1, 16), "b16_d16_hi": (2, 16)}  # fmt: skip
"""ds_write_X: bytes, and the first bit read."""
TRANSPOSED = {"b64_tr_b16": 16, "b64_tr_b8": 8, "b64_tr_b4": 4}
"""ds_read_X: bits of an element."""


def locate_lds(w: Waves, addresses: Array, size: int, what: str) -> Array:
    """Byte offsets of the active lanes (int64, flat) to places in ``w.lds``. Raises EmulationFault."""
    wrong = (addresses < 0) | (addresses + size > w.lds_limit)
    if wrong.any():
        place = int(addresses[wrong][0])
        raise w.fault(
            "out of bounds",
            f"local {what} of {size} bytes at byte {place} of {w.lds_limit}, {int(wrong.sum())} lanes",
        )
    if w.lds_bytes == 0 or w.count == w.per_program:
        return addresses
    base = np.broadcast_to(w.lds_base[w.rows][:, None], w.active.shape)
    return addresses + flatten(w, base)


def extend(values: Array, name: str) -> Array:
    """Sign-extend the bytes or shorts of i8 and i16 reads."""
    if name.startswith("i8"):
        return values.astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
    if name.startswith("i16"):
        return values.astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32)
    return values


def make_address(operand: Operand, offset: int) -> Callable[[Waves], Array]:
    """Reader of the byte addresses of the active lanes, int64."""
    read = read_bits(operand)
    return lambda w: flatten(w, read(w)).astype(np.int64) + offset


@dataclass
class Half:
    """A load into 16 bits of a register from bit ``shift`` on; the others stay: ``old`` and ``old_unknown`` [lanes, 1].

    ``convert`` extends the loaded value.
    """

    shift: int
    old: Array
    old_unknown: Array | None
    convert: Callable[[Array], Array]

    def merge(self, values: Array, pick: Any) -> Array:
        """The register afterwards."""
        loaded: Array = (self.convert(values) & np.uint32(0xFFFF)) << np.uint32(self.shift)
        kept: Array = self.old[pick] & np.uint32(0xFFFF0000 >> self.shift)
        return loaded | kept

    def merge_unknown(self, unknown: Array, pick: Any) -> Array:
        """The undefined bits afterwards."""
        loaded: Array = (unknown & np.uint32(0xFFFF)) << np.uint32(self.shift)
        if self.old_unknown is None:
            return loaded
        kept: Array = self.old_unknown[pick] & np.uint32(0xFFFF0000 >> self.shift)
        return loaded | kept


def load_lds(
    w: Waves, parts: list[tuple[Array, int, int]], convert: Callable[[Array], Array], half: Half | None = None
) -> None:
    """Read parts (places, bytes, first register) into registers through ``convert`` (uint32 [lanes, dwords])."""
    lanes = list_lanes(w) if w.late else None
    owners = list_lanes(w)[0] if w.late or w.races is not None else np.zeros(0, np.int64)
    if w.races is not None:
        for places, size, _ in parts:
            w.races.read_local(w, owners, places, size)
    registers = [r for _, size, first in parts for r in range(first, first + max(size // 4, 1))]

    def perform(chosen: Array | None) -> None:
        where = None if chosen is None or lanes is None else (lanes[0][chosen], lanes[1][chosen])
        for places, size, first in parts:
            pick = slice(None) if chosen is None else chosen
            values, unknown = gather(w.lds, places[pick], size), gather(w.lds_unknown, places[pick], size)
            if half is not None:
                values, unknown = half.merge(values, pick), half.merge_unknown(unknown, pick)
            else:
                values, unknown = convert(values), convert(unknown)
            write_registers(w, first, values, where)
            mark_unknown(w, range(first, first + values.shape[1]), unknown if unknown.any() else None, where)

    submit(w, w.lgkm, registers, owners, perform)


def store_lds(w: Waves, parts: list[tuple[Array, int, Array, Array | None]]) -> None:
    """Write parts (places, bytes, values, undefined bits or None; uint32 [lanes, dwords])."""
    owners = list_lanes(w)[0] if w.late or w.races is not None else np.zeros(0, np.int64)

    def perform(chosen: Array | None) -> None:
        for places, size, values, unknown in parts:
            pick = slice(None) if chosen is None else chosen
            scatter(w.lds, places[pick], size, values[pick])
            masks = np.zeros_like(values) if unknown is None else unknown
            scatter(w.lds_unknown, places[pick], size, masks[pick])

    submit(w, w.lgkm, (), owners, perform)
    if w.races is not None:
        for places, size, values, _ in parts:
            w.races.write_local(w, w.lgkm, owners, places, values, size)


def build_read(i: Instruction, name: str) -> Decoded:
    """ds_read_b32 and the like, and the reads into half a register."""
    target, address = parse_operand(i.operands[0]), parse_operand(i.operands[1])
    read_address = make_address(address, int(i.modifiers.get("offset", "0"), 0))
    half = name in HALF_READS
    size = HALF_READS[name][0] if half else READS[name][0]
    first = target.index
    shift = HALF_READS[name][1] if half else 0

    def step(w: Waves) -> None:
        places = locate_lds(w, read_address(w), size, "read")
        merge = None
        if half:
            old = read_registers(w, first, 1)
            merge = Half(shift, old, read_unknown_registers(w, first, 1), lambda v: extend(v, name))
        load_lds(w, [(places, size, first)], lambda v: extend(v, name), merge)

    registers = target.list_registers()
    reads = [*address.list_registers(), *(registers if half else ())]
    return Decoded(step, reads, registers, keeps_unknown=True, demands=address.list_registers(), queue="lgkm")


def build_read_two(i: Instruction, name: str) -> Decoded:
    """ds_read2_b32, ds_read2_b64, and with st64: two reads at offsets in units of (64 times) their size."""
    target, address = parse_operand(i.operands[0]), parse_operand(i.operands[1])
    size, unit = _find_pair(name)
    reads = [make_address(address, int(i.modifiers.get(f"offset{k}", "0"), 0) * unit) for k in (0, 1)]
    first = target.index

    def step(w: Waves) -> None:
        places = [locate_lds(w, read(w), size, "read") for read in reads]
        load_lds(w, [(places[k], size, first + k * size // 4) for k in (0, 1)], lambda v: v)

    return Decoded(
        step,
        address.list_registers(),
        target.list_registers(),
        keeps_unknown=True,
        demands=address.list_registers(),
        queue="lgkm",
    )


def _find_pair(name: str) -> tuple[int, int]:
    """Bytes of each access and unit of the offsets of ds_read2 and ds_write2."""
    size = 8 if name.endswith("b64") else 4
    return size, size * (64 if "st64" in name else 1)


def build_write(i: Instruction, name: str) -> Decoded:
    """ds_write_b32 and the like."""
    address, data = parse_operand(i.operands[0]), parse_operand(i.operands[1])
    read_address = make_address(address, int(i.modifiers.get("offset", "0"), 0))
    size, bit = WRITES[name]
    first, count, shift = data.index, max(size // 4, 1), np.uint32(bit)

    def step(w: Waves) -> None:
        places = locate_lds(w, read_address(w), size, "write")
        unknown = read_unknown_registers(w, first, count)
        values = read_registers(w, first, count) >> shift
        store_lds(w, [(places, size, values, None if unknown is None else unknown >> shift)])

    return Decoded(
        step, [*address.list_registers(), *data.list_registers()], keeps_unknown=True, demands=address.list_registers()
    )


def build_write_two(i: Instruction, name: str) -> Decoded:
    """ds_write2_b32, ds_write2_b64, and with st64."""
    address, *data = (parse_operand(text) for text in i.operands)
    size, unit = _find_pair(name)
    reads = [make_address(address, int(i.modifiers.get(f"offset{k}", "0"), 0) * unit) for k in (0, 1)]

    def step(w: Waves) -> None:
        parts = []
        for read, operand in zip(reads, data, strict=True):
            places = locate_lds(w, read(w), size, "write")
            values = read_registers(w, operand.index, size // 4)
            parts.append((places, size, values, read_unknown_registers(w, operand.index, size // 4)))
        store_lds(w, parts)

    registers = [r for operand in data for r in operand.list_registers()]
    return Decoded(step, [*address.list_registers(), *registers], keeps_unknown=True, demands=address.list_registers())


def transpose_elements(values: Array, bits: int) -> Array:
    """Transpose in groups of 16 lanes: 64 bits of each lane, uint32 [lanes, 2].

    The 16 lanes hold a matrix of 64/bits rows with 16 elements, row by row; lane c receives column c.
    """
    raw = np.ascontiguousarray(values).view(np.uint8)
    if bits == 4:
        raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), 16)
    elements = raw.view(np.uint16) if bits == 16 else raw
    rows = elements.shape[1]
    columns: Array = elements.reshape(-1, rows, 16).transpose(0, 2, 1).reshape(-1, rows)
    if bits == 4:
        columns = columns[:, 0::2] | (columns[:, 1::2] << 4)
    return np.ascontiguousarray(columns).view(np.uint32)


def build_transposed(i: Instruction, name: str) -> Decoded:
    """ds_read_b64_tr_b16, _b8, _b4. All lanes must be active."""
    target, address = parse_operand(i.operands[0]), parse_operand(i.operands[1])
    read_address = make_address(address, int(i.modifiers.get("offset", "0"), 0))
    bits, first = TRANSPOSED[name], target.index

    def step(w: Waves) -> None:
        if not w.full:
            if w.lanes == 0:
                submit(w, w.lgkm, target.list_registers(), np.zeros(0, np.int64), lambda chosen: None)
                return
            raise w.fault("illegal", "a transposing read with inactive lanes is not modelled")
        places = locate_lds(w, read_address(w), 8, "read")
        load_lds(w, [(places, 8, first)], lambda v: transpose_elements(v, bits))

    return Decoded(
        step,
        address.list_registers(),
        target.list_registers(),
        keeps_unknown=True,
        demands=address.list_registers(),
        queue="lgkm",
    )


def build(i: Instruction) -> Decoded | None:
    """ds_read*, ds_write*; None for anything else."""
    if set(i.modifiers) - {"offset", "offset0", "offset1"}:
        return None
    match = re.match(r"^ds_(read2st64|read2|read|write2st64|write2|write)_(\w+)$", i.op)
    if not match:
        return None
    kind, name = match[1], match[2]
    if kind == "read" and name in TRANSPOSED:
        return build_transposed(i, name)
    if kind == "read" and (name in READS or name in HALF_READS):
        return build_read(i, name)
    if kind == "write" and name in WRITES:
        return build_write(i, name)
    if name not in ("b32", "b64") or kind in ("read", "write"):
        return None
    return (build_read_two if kind.startswith("read") else build_write_two)(i, f"{kind}_{name}")
