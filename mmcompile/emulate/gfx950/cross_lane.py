"""Between lanes: DPP, SDWA, v_readlane and relatives, v_permlane*_swap, ds_bpermute, ds_swizzle, v_mbcnt.

AMD Instinct CDNA4 ISA, "SDWA and DPP Vector Instructions" and "Vector ALU Operations".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.decoded import Decoded, Source, Unknowns, collapse, make_source, read_unknown
from mmcompile.emulate.gfx950.operands import Operand, modify, parse_operand, read_bits, read_scalar
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import SCALAR, Waves
from mmcompile.emulate.gfx950.waits import issue

Array = npt.NDArray[Any]
LANE = np.arange(64)
ROW, IN_ROW = LANE // 16, LANE % 16

DPP_MODIFIERS = {"quad_perm", "row_shl", "row_shr", "row_ror", "row_bcast", "row_mirror", "row_half_mirror",
                 "row_newbcast", "wave_shl", "wave_shr", "wave_rol", "wave_ror", "row_mask", "bank_mask",
                 "bound_ctrl"}  # fmt: skip


@dataclass(frozen=True)
class Dpp:
    """A DPP control: lane i reads lane ``source[i]`` if ``valid[i]``; ``written`` by row_mask and bank_mask."""

    source: Array
    valid: Array
    written: Array
    zero: bool

    def find_valid(self, w: Waves) -> Array:
        """Lanes [waves, 64] whose source exists and is active."""
        valid: Array = w.executing[:, self.source] & self.valid
        return valid

    def find_enabled(self, w: Waves) -> Array:
        """Lanes [waves, 64] that are written: without bound_ctrl only those with a valid source."""
        return np.broadcast_to(self.written, w.active.shape) if self.zero else self.find_valid(w) & self.written


def _find_dpp_lanes(name: str, value: str) -> tuple[Array, Array]:
    """Source lane and validity of every lane."""
    everywhere = np.ones(64, np.bool_)
    if name == "quad_perm":
        return (LANE & ~3) + np.array([int(v) for v in value.strip("[]").split(",")])[LANE & 3], everywhere
    if name == "row_mirror":
        return ROW * 16 + 15 - IN_ROW, everywhere
    if name == "row_half_mirror":
        return (LANE & ~7) + 7 - (LANE & 7), everywhere
    count = int(value, 0)
    if name == "row_newbcast":
        return ROW * 16 + count, everywhere
    if name == "row_bcast":
        return (ROW * 16 - 1, ROW > 0) if count == 15 else (np.full(64, 31), LANE >= 32)
    if name == "row_shr":
        return LANE - count, count <= IN_ROW
    if name == "row_shl":
        return LANE + count, IN_ROW + count < 16
    if name == "row_ror":
        return ROW * 16 + (IN_ROW - count) % 16, everywhere
    if name in ("wave_rol", "wave_ror"):
        return (LANE + (count if name == "wave_rol" else -count)) % 64, everywhere
    moved = LANE + (count if name == "wave_shl" else -count)
    return moved, (moved >= 0) & (moved < 64)


def parse_dpp(i: Instruction) -> Dpp:
    """The control of a DPP instruction. LLVM prints ``bound_ctrl:1`` where reads of invalid lanes give zero."""
    names = [name for name in i.modifiers if name in DPP_MODIFIERS - {"row_mask", "bank_mask", "bound_ctrl"}]
    source, valid = (LANE, np.ones(64, np.bool_)) if not names else _find_dpp_lanes(names[0], i.modifiers[names[0]])
    rows, banks = (int(i.modifiers.get(name, "0xf"), 0) for name in ("row_mask", "bank_mask"))
    written = ((rows >> ROW) & (banks >> (IN_ROW // 4)) & 1).astype(np.bool_)
    return Dpp(np.clip(source, 0, 63), valid, written, "bound_ctrl" in i.modifiers)


def make_dpp_source(i: Instruction, operand: Operand, kind: str) -> Source:
    """A source read through DPP; invalid lanes read zero."""
    control, plain = parse_dpp(i), make_source(operand, kind)
    modified, unknown = modify(operand, read_bits(operand)), read_unknown(operand)
    dtype = {"u": np.uint32, "b": np.uint32, "i": np.int32, "f": np.float32}[kind]

    def read(w: Waves) -> Array:
        return np.where(control.find_valid(w), modified(w)[:, control.source], np.uint32(0)).view(dtype)

    def read_mask(w: Waves) -> Array:
        return np.where(control.find_valid(w), unknown(w)[:, control.source], np.uint32(0))

    return Source(read, read_mask, plain.registers)


# ---------------------------------------------------------------------- SDWA

_SELECT = {"BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8), "WORD_0": (0, 16),
           "WORD_1": (16, 16), "DWORD": (0, 32)}  # fmt: skip


def select_bits(values: Array, name: str, signed: bool = False) -> Array:
    """A byte or word of uint32 values."""
    shift, width = _SELECT[name]
    if width == 32:
        return values
    field = (values >> np.uint32(shift)) & np.uint32((1 << width) - 1)
    if signed:
        return (field.view(np.int32) << (32 - width) >> (32 - width)).view(np.uint32)
    return field


def make_sdwa_source(operand: Operand, kind: str, select: str) -> Source:
    """A source of which SDWA selects a byte or word; 16-bit floats keep their modifiers in their own sign bit."""
    plain = make_source(operand, kind)
    bits, unknown = read_bits(operand), read_unknown(operand)
    if kind == "f" and select == "DWORD":
        bits = modify(operand, bits)
    dtype = {"u": np.uint32, "b": np.uint32, "i": np.int32, "f": np.float32}[kind]
    return Source(
        lambda w: select_bits(bits(w), select, operand.extend).view(dtype),
        lambda w: select_bits(unknown(w), select),
        plain.registers,
    )


def place_sdwa(
    i: Instruction, target: Operand, run: Callable[..., Any], sources: list[Source], reads: list[int]
) -> Decoded | None:
    """The result goes to a byte or word of the target; the rest is zero (UNUSED_PAD) or stays (UNUSED_PRESERVE)."""
    shift, width = _SELECT[i.modifiers["dst_sel"]]
    unused = i.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE") or width == 32:
        return None
    field = np.uint32(((1 << width) - 1) << shift)
    rest = np.uint32(0 if unused == "UNUSED_PAD" else ~int(field) & 0xFFFFFFFF)
    index, amount = target.index, np.uint32(shift)

    def step(w: Waves) -> None:
        bits = np.asarray(run(*[source.read(w) for source in sources]))
        bits = bits.view(np.uint32) if bits.dtype.itemsize == 4 else bits.astype(np.uint32)
        w.put(index, ((bits << amount) & field) | (w.vector[index, w.rows] & rest))

    def taint(w: Waves) -> Unknowns:
        mask = collapse([source.unknown(w) for source in sources])
        return [(index, (mask & field) | (w.vector_unknown[index, w.rows] & rest))]

    old = target.list_registers() if rest else []
    return Decoded(step, [*reads, *old], target.list_registers(), taint)


# ---------------------------------------------------------------------- lanes to scalars and back


def build_read_lane(i: Instruction, first: bool) -> Decoded:
    """v_readfirstlane_b32 (the lowest active lane, lane 0 if none) and v_readlane_b32 (any lane, active or not)."""
    target, source, *rest = (parse_operand(text) for text in i.operands)
    read, unknown = read_bits(source), read_unknown(source)
    read_lane = read_scalar(rest[0]) if rest else None
    index = target.index

    def pick(w: Waves, values: Array) -> Array:
        values = np.broadcast_to(values, w.active.shape)
        lane = w.active.argmax(axis=1) if read_lane is None else read_lane(w).astype(np.int64) & 63
        picked: Array = values[np.arange(len(values)), lane]
        return picked

    def step(w: Waves) -> None:
        w.scalar[w.rows, index] = pick(w, read(w))

    reads = [*source.list_registers(), *(rest[0].list_registers() if rest else [])]
    demands = [] if first else rest[0].list_registers()
    return Decoded(
        step, reads, target.list_registers(), lambda w: [(SCALAR + index, pick(w, unknown(w)))], demands=demands
    )


def build_write_lane(i: Instruction) -> Decoded:
    """v_writelane_b32: one lane, active or not."""
    target, source, lane = (parse_operand(text) for text in i.operands)
    read, read_lane, index = read_scalar(source), read_scalar(lane), target.index

    def step(w: Waves) -> None:
        lanes = read_lane(w).astype(np.int64) & 63
        w.vector[index, w.waves, lanes] = read(w)
        unknown = w.scalar_unknown[w.rows, source.index] if source.kind == "scalar" else 0
        w.set_unknown(index, unknown, (w.waves, lanes))

    registers = [*source.list_registers(), *lane.list_registers()]
    return Decoded(step, registers, target.list_registers(), keeps_unknown=True, demands=lane.list_registers())


def build_swap(i: Instruction, width: int) -> Decoded:
    """v_permlane32_swap_b32, v_permlane16_swap_b32: the odd blocks of ``width`` lanes of the first register are
    exchanged with the even blocks of the second."""
    first, second = (parse_operand(text).index for text in i.operands)
    odd = (LANE // width) % 2 == 1
    source = np.where(odd, LANE - width, LANE + width)

    def exchange(a: Array, b: Array) -> tuple[Array, Array]:
        return np.where(odd, b[:, source], a), np.where(odd, b, a[:, source])

    def step(w: Waves) -> None:
        new = exchange(w.vector[first, w.rows], w.vector[second, w.rows])
        w.put(first, new[0])
        w.put(second, new[1])

    def taint(w: Waves) -> Unknowns:
        new = exchange(w.vector_unknown[first, w.rows], w.vector_unknown[second, w.rows])
        return [(first, new[0]), (second, new[1])]

    return Decoded(step, [first, second], [first, second], taint)


def build_plain_swap(i: Instruction) -> Decoded:
    """v_swap_b32."""
    first, second = (parse_operand(text).index for text in i.operands)

    def step(w: Waves) -> None:
        a, b = w.vector[first, w.rows].copy(), w.vector[second, w.rows].copy()
        w.put(first, b)
        w.put(second, a)

    def taint(w: Waves) -> Unknowns:
        return [(first, w.vector_unknown[second, w.rows].copy()), (second, w.vector_unknown[first, w.rows].copy())]

    return Decoded(step, [first, second], [first, second], taint)


def build_permute(i: Instruction, backward: bool) -> Decoded:
    """ds_bpermute_b32 (lane i reads lane address/4; inactive lanes give 0) and ds_permute_b32 (lane i sends)."""
    target, address, data = (parse_operand(text) for text in i.operands)
    read_address, read, unknown = read_bits(address), read_bits(data), read_unknown(data)
    offset, index = np.uint32(int(i.modifiers.get("offset", "0"), 0)), target.index

    def move(w: Waves, values: Array) -> Array:
        lanes = ((read_address(w) + offset) >> np.uint32(2)).astype(np.int64) & 63
        lanes = np.broadcast_to(lanes, w.active.shape)
        present = np.where(w.active, np.broadcast_to(values, w.active.shape), np.uint32(0))
        if backward:
            taken: Array = np.take_along_axis(present, lanes, axis=1)
            return taken
        result = np.zeros_like(present)
        rows, columns = np.nonzero(w.active)
        result[rows, lanes[rows, columns]] = present[rows, columns]
        return result

    def step(w: Waves) -> None:
        w.put(index, move(w, read(w)))
        issue(w, w.lgkm, [index])

    reads = [*address.list_registers(), *data.list_registers()]
    return Decoded(
        step,
        reads,
        [index],
        lambda w: [(index, move(w, unknown(w)))],
        demands=address.list_registers(),
        queue="lgkm",
    )


def find_swizzle(pattern: str) -> Any:
    """Source lanes of ds_swizzle_b32: swizzle(QUAD_PERM,..), swizzle(BITMASK_PERM,"..") or the 16-bit code."""
    match = re.match(r"^swizzle\((\w+),(.*)\)$", pattern.replace(" ", ""))
    if match and match[1] == "QUAD_PERM":
        return (LANE & ~3) + np.array([int(v) for v in match[2].split(",")])[LANE & 3]
    if match and match[1] == "SWAP":
        return LANE ^ int(match[2])
    if match and match[1] == "REVERSE":
        return LANE ^ (int(match[2]) - 1)
    if match and match[1] == "BITMASK_PERM":
        within = LANE & 31
        for bit, letter in enumerate(reversed(match[2].strip('"'))):
            keep, flip, one = within & ~(1 << bit), within ^ (1 << bit), within | (1 << bit)
            within = {"0": keep, "1": one, "i": flip, "p": within}[letter]
        return (LANE & 32) + within
    code = int(pattern, 0)
    if code & 0x8000:
        return (LANE & ~3) + np.array([code >> (2 * k) & 3 for k in range(4)])[LANE & 3]
    return (LANE & 32) + ((((LANE & 31) & (code & 31)) | (code >> 5 & 31)) ^ (code >> 10 & 31))


def build_swizzle(i: Instruction) -> Decoded:
    """ds_swizzle_b32."""
    target, data = (parse_operand(text) for text in i.operands)
    source, index, read, unknown = find_swizzle(i.modifiers["offset"]), target.index, read_bits(data), None
    unknown = read_unknown(data)

    def step(w: Waves) -> None:
        w.put(index, np.where(w.active, read(w), np.uint32(0))[:, source])
        issue(w, w.lgkm, [index])

    return Decoded(step, data.list_registers(), [index], lambda w: [(index, unknown(w)[:, source])], queue="lgkm")


def build_mbcnt(i: Instruction, high: bool) -> Decoded:
    """v_mbcnt_lo_u32_b32, v_mbcnt_hi_u32_b32: bits of the mask below this lane, plus the second source."""
    target, mask, addend = (parse_operand(text) for text in i.operands)
    sources = [make_source(mask, "u"), make_source(addend, "u")]
    below = [(1 << lane) - 1 for lane in range(64)]
    bits = np.array([(b >> 32 if high else b) & 0xFFFFFFFF for b in below], np.uint32)
    index = target.index

    def step(w: Waves) -> None:
        w.put(index, np.bitwise_count(sources[0].read(w) & bits).astype(np.uint32) + sources[1].read(w))

    reads = [register for source in sources for register in source.registers]
    return Decoded(step, reads, [index], lambda w: [(index, collapse([s.unknown(w) for s in sources]))])


_BUILDERS: dict[str, Callable[[Instruction], Decoded]] = {
    "v_readfirstlane_b32": lambda i: build_read_lane(i, True),
    "v_readlane_b32": lambda i: build_read_lane(i, False),
    "v_writelane_b32": build_write_lane,
    "v_permlane32_swap_b32": lambda i: build_swap(i, 32),
    "v_permlane16_swap_b32": lambda i: build_swap(i, 16),
    "v_swap_b32": build_plain_swap,
    "ds_bpermute_b32": lambda i: build_permute(i, True),
    "ds_permute_b32": lambda i: build_permute(i, False),
    "ds_swizzle_b32": build_swizzle,
    "v_mbcnt_lo_u32_b32": lambda i: build_mbcnt(i, False),
    "v_mbcnt_hi_u32_b32": lambda i: build_mbcnt(i, True),
}


def build(i: Instruction) -> Decoded | None:
    """Instructions between lanes; None for anything else."""
    name = re.sub(r"_e(32|64)$", "", i.op)
    if name not in _BUILDERS or set(i.modifiers) - {"offset"}:
        return None
    return _BUILDERS[name](i)
