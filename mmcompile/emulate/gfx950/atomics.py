"""Atomics on device and local memory (AMD Instinct CDNA4 ISA, "Flat memory instructions", "Data Share Operations").

Lanes are performed one after the other, in the order of waves and lanes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.formats import decode_bf16, encode_bf16
from mmcompile.emulate.gfx950.decoded import Decoded
from mmcompile.emulate.gfx950.lds import locate_lds, make_address
from mmcompile.emulate.gfx950.memory_global import CACHE_BITS, locate, make_buffer_address, make_global_address
from mmcompile.emulate.gfx950.operands import parse_operand
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import Counter, Waves
from mmcompile.emulate.gfx950.transfer import list_lanes, mark_unknown, read_registers, write_registers
from mmcompile.emulate.gfx950.waits import submit

Array = npt.NDArray[Any]
Combine = Callable[[Any, Any], Any]
"""(old, operand) to new; of numpy scalars."""


def _add_halves(decode: Callable[[Array], Array], encode: Callable[[Array], Array]) -> Combine:
    def combine(old: Any, value: Any) -> Any:
        pair = [np.array([v], np.uint32).view(np.uint16) for v in (old, value)]
        return encode(decode(pair[0]) + decode(pair[1])).astype(np.uint16).view(np.uint32)[0]

    return combine


def _increment(old: Any, limit: Any) -> Any:
    return old.dtype.type(0) if old >= limit else old + old.dtype.type(1)


def _decrement(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - old.dtype.type(1)


COMBINE: dict[str, tuple[str, Combine]] = {
    "add": ("u", lambda old, value: old + value),
    "sub": ("u", lambda old, value: old - value),
    "and": ("u", lambda old, value: old & value),
    "or": ("u", lambda old, value: old | value),
    "xor": ("u", lambda old, value: old ^ value),
    "swap": ("u", lambda old, value: value),
    "inc": ("u", _increment),
    "dec": ("u", _decrement),
    "umin": ("u", min),
    "umax": ("u", max),
    "smin": ("i", min),
    "smax": ("i", max),
    "add_f32": ("f", lambda old, value: old + value),
    "add_f64": ("f", lambda old, value: old + value),
    "min_f64": ("f", np.fmin),
    "max_f64": ("f", np.fmax),
    "pk_add_bf16": ("u", _add_halves(decode_bf16, encode_bf16)),
    "pk_add_f16": ("u", _add_halves(lambda x: x.view(np.float16), lambda x: x.view(np.uint16))),
}
"""Operation to the type of its operands (u, i, f) and what it does."""

_LDS_NAMES = {"min_u": "umin", "max_u": "umax", "min_i": "smin", "max_i": "smax", "wrxchg": "swap"}


def apply_atomics(data: Array, index: Array, values: Array, name: str, wide: bool, compare: Array | None) -> Array:
    """Combine ``values`` uint32 [lanes, dwords] into uint8 ``data``; returns the old values of the same shape."""
    unsigned, size = (np.uint64, 8) if wide else (np.uint32, 4)
    old = np.zeros(len(index), unsigned)
    operand = np.ascontiguousarray(values).view(unsigned)[:, 0]
    words = data[: len(data) // size * size].view(unsigned)
    if compare is not None:
        expected = np.ascontiguousarray(compare).view(unsigned)[:, 0]
        for lane, place in enumerate(index // size):
            old[lane] = words[place]
            if old[lane] == expected[lane]:
                words[place] = operand[lane]
        return old.view(np.uint32).reshape(len(index), -1)
    kind, combine = COMBINE[name]
    dtype = {"u": unsigned, "i": np.int64 if wide else np.int32, "f": np.float64 if wide else np.float32}[kind]
    typed, typed_words, typed_old = operand.view(dtype), words.view(dtype), old.view(dtype)
    with np.errstate(over="ignore"):
        for lane, place in enumerate(index // size):
            typed_old[lane] = typed_words[place]
            typed_words[place] = combine(typed_old[lane], typed[lane])
    return old.view(np.uint32).reshape(len(index), -1)


def perform_atomic(
    w: Waves, counter: Counter, target: int | None, data: Array, run: Callable[[Array, Any], Array], index: Array
) -> None:
    """Submit an atomic on ``index`` (flat); its old values go to registers from ``target`` on."""
    lanes = list_lanes(w)
    width = data.shape[1]

    def perform(chosen: Array | None) -> None:
        pick = slice(None) if chosen is None else chosen
        old = run(index[pick], pick)
        if target is not None:
            where = (lanes[0][pick], lanes[1][pick])
            write_registers(w, target, old, where)
            mark_unknown(w, range(target, target + width), None, where)

    submit(w, counter, () if target is None else range(target, target + width), lanes[0], perform)


def build_global(i: Instruction) -> Decoded | None:
    """global_atomic_*, flat_atomic_*, buffer_atomic_*; sc0 returns the old value."""
    match = re.match(r"^(global|flat|buffer)_atomic_(\w+?)(_x2)?$", i.op)
    if not match or set(i.modifiers) - {"offset", "offen", *CACHE_BITS}:
        return None
    space, name = match[1], match[2]
    wide = bool(match[3]) or name.endswith("f64")
    if name not in COMBINE and name != "cmpswap":
        return None
    operands, returns, width = [parse_operand(text) for text in i.operands], "sc0" in i.modifiers, 2 if wide else 1
    if space == "buffer":
        data = operands.pop(0)
        compute = make_buffer_address(i, operands, 4 * width)
        target = data.index if returns else None
    else:
        target = operands.pop(0).index if returns else None
        base = parse_operand("off") if space == "flat" else operands.pop()
        data = operands.pop(1)
        compute = make_global_address(operands[0], base, int(i.modifiers.get("offset", "0"), 0))
        operands.append(base)
    registers = [*data.list_registers(), *(r for operand in operands for r in operand.list_registers())]

    def step(w: Waves) -> None:
        addresses, inside = compute(w)
        if inside is not None:
            raise w.fault("illegal", "an atomic outside num_records of its buffer is not modelled")
        if (addresses & np.uint64(4 * width - 1)).any():
            raise w.fault("misaligned", "an atomic at an address that is not a multiple of its size")
        index = locate(w, addresses, 4 * width, write=True)
        values = read_registers(w, data.index, width)
        compare = read_registers(w, data.index + width, width) if name == "cmpswap" else None
        owners = list_lanes(w)[0]
        w.count_polls(owners, addresses)
        if w.races is not None:
            w.races.atomic_global(w, owners, index, 4 * width)

        def run(places: Array, pick: Any) -> Array:
            old = apply_atomics(
                w.memory.data, places, values[pick], name, wide, None if compare is None else compare[pick]
            )
            changed = w.memory.data.view(np.uint32)[places >> 2] != old[:, 0]
            w.progress += bool(changed.any())
            return old

        perform_atomic(w, w.vm, target, values, run, index)

    writes = [] if target is None else list(range(target, target + width))
    return Decoded(step, registers, writes, keeps_unknown=True, demands=registers, queue="vm")


def build_local(i: Instruction) -> Decoded | None:
    """ds_add_u32 and the like; ``_rtn_`` returns the old value; ds_cmpst_b32 addr, expected, new."""
    match = re.match(r"^ds_(\w+?)_(rtn_)?([ubif])(32|64)$", i.op)
    if not match or set(i.modifiers) - {"offset"}:
        return None
    name, letter, wide = match[1], match[3], match[4] == "64"
    name = _LDS_NAMES.get(f"{name}_{letter}", _LDS_NAMES.get(name, name))
    name = f"{name}_f{match[4]}" if letter == "f" else name
    if name not in COMBINE and name != "cmpst":
        return None
    operands, width = [parse_operand(text) for text in i.operands], 2 if wide else 1
    target = operands.pop(0).index if match[2] else None
    read_address = make_address(operands[0], int(i.modifiers.get("offset", "0"), 0))
    data = operands[-1]
    registers = [r for operand in operands for r in operand.list_registers()]

    def step(w: Waves) -> None:
        index = locate_lds(w, read_address(w), 4 * width, "atomic")
        values = read_registers(w, data.index, width)
        compare = read_registers(w, operands[1].index, width) if name == "cmpst" else None
        if w.races is not None:
            w.races.atomic_local(w, list_lanes(w)[0], index, 4 * width)
        if (w.lds_unknown[index] != 0).any() and name != "swap":
            raise w.fault("uninitialised", "an atomic on local memory that nobody wrote")

        def run(places: Array, pick: Any) -> Array:
            return apply_atomics(w.lds, places, values[pick], name, wide, None if compare is None else compare[pick])

        perform_atomic(w, w.lgkm, target, values, run, index)

    writes = [] if target is None else list(range(target, target + width))
    return Decoded(step, registers, writes, keeps_unknown=True, demands=registers, queue="lgkm")


def build(i: Instruction) -> Decoded | None:
    """Atomics; None for anything else."""
    return build_local(i) if i.op.startswith("ds_") else build_global(i)
