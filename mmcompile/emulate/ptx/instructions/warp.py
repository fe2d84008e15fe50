"""Exchange between the lanes of a warp: shfl, vote, redux, match, elect and activemask (PTX ISA)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mmcompile.emulate.ptx.data_types import is_integer
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.group import WARP, Array, Group, Mask
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction


@translates("shfl")
def translate_shfl(emitter: Emitter, instruction: Instruction) -> None:
    """shfl.sync: a value of another lane, and whether that lane is in range."""
    target, operand, lane, clamp = instruction.operands[:4]
    mode = instruction.modifiers[1]
    places = emitter.new_name()
    if lane.kind == clamp.kind == "immediate":
        call = f"shuffle_constant(g.lanes, {mode!r}, {lane.integer}, {clamp.integer})"
    else:
        b, c = emitter.full_source(lane, "b32"), emitter.full_source(clamp, "b32")
        call = f"shuffle_places(g.lanes, {mode!r}, {b}, {c})"
    emitter.append(f"{places}, {places}_valid = {call}")
    value = emitter.new_name()
    emitter.append(f"{value} = {emitter.full_source(operand, 'b32')}[{places}]")
    if emitter.mask:
        emitter.append(f"check_shuffle(g, {places}, {emitter.mask})")
    emitter.moved_from = places
    parts = target.parts if target.kind == "pair" else (target,)
    emitter.put(parts[0], value, "b32", packed=True)
    if len(parts) > 1:
        emitter.put(parts[1], f"{places}_valid", "pred")


@runtime
@lru_cache(512)
def shuffle_constant(lanes: int, mode: str, lane: int, clamp: int) -> tuple[Array, Array]:
    """``shuffle_places`` for the same operands in all lanes."""
    return shuffle_places(lanes, mode, np.full(lanes, lane, np.uint32), np.full(lanes, clamp, np.uint32))


@runtime
def shuffle_places(lanes: int, mode: str, lane: Array, clamp: Array) -> tuple[Array, Array]:
    """Source lane of each lane, and whether it is in range (PTX ISA, shfl.sync: the pseudo-code)."""
    number = np.arange(lanes)
    own = number & 31
    b, c = lane.astype(np.int64) & 31, clamp.astype(np.int64)
    segment, limit = (c >> 8) & 31, c & 31
    lowest = own & segment
    highest = lowest | (limit & ~segment)
    source = {"up": own - b, "down": own + b, "bfly": own ^ b, "idx": lowest | (b & ~segment)}[mode]
    valid = source >= highest if mode == "up" else source <= highest
    return number - own + np.where(valid, source, own), valid


@runtime
def check_shuffle(group: Group, places: Array, mask: Array) -> None:
    """A value of an inactive lane is undefined."""
    wrong = mask & ~mask[places]
    if wrong.any():
        lane = int(np.argmax(wrong))
        raise group.fault(
            "uninitialised", f"lane {lane % WARP} takes a value of the inactive lane {int(places[lane]) % WARP}"
        )


@translates("vote")
def translate_vote(emitter: Emitter, instruction: Instruction) -> None:
    """vote.sync: ballot, any, all, uni over the active lanes of a warp."""
    mode, target = instruction.modifiers[1], instruction.operands[0]
    predicate = emitter.full_source(instruction.operands[1], "pred")
    if mode == "ballot":
        emitter.put(target, f"ballot(g, {predicate}, {emitter.mask})", "b32", packed=True)
    else:
        emitter.put(target, f"vote(g, {mode!r}, {predicate}, {emitter.mask})", "pred")


@translates("activemask")
def translate_activemask(emitter: Emitter, instruction: Instruction) -> None:
    """activemask: the lanes that are here."""
    emitter.put(instruction.operands[0], f"ballot(g, g.everyone, {emitter.mask})", "b32", packed=True)


@runtime
def ballot(group: Group, predicate: Array, mask: Mask) -> Array:
    """In every lane the bits of its warp's active lanes in which ``predicate`` holds."""
    bits = predicate & group.active(mask)
    words = np.packbits(bits.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32).ravel()
    return np.repeat(words, WARP)


@runtime
def vote(group: Group, mode: str, predicate: Array, mask: Mask) -> Array:
    """any, all or uni of a warp's active lanes."""
    active, holds = group.active(mask).reshape(-1, WARP), predicate.reshape(-1, WARP)
    some, every = (holds & active).any(axis=1), (holds | ~active).all(axis=1)
    return np.repeat({"any": some, "all": every, "uni": every | ~some}[mode], WARP)


@translates("redux")
def translate_redux(emitter: Emitter, instruction: Instruction) -> None:
    """redux.sync: a reduction over whole warps."""
    kind, modifiers = instruction.type, instruction.modifiers
    if not is_integer(kind) and kind != "f32":
        emitter.refuse("type")
    x = emitter.full_source(instruction.operands[1], kind)
    if "abs" in modifiers:
        x = f"np.abs({x})"
    call = f"reduce_warps(g, {modifiers[1]!r}, {x}, {emitter.mask}, {'NaN' in modifiers})"
    emitter.put(instruction.operands[0], call, kind)


@runtime
def reduce_warps(group: Group, operation: str, values: Array, mask: Mask, propagate_nan: bool) -> Array:
    """add, min, max, and, or, xor over the lanes of each active warp, in every lane."""
    group.active_warps(mask)
    rows = values.reshape(-1, WARP)
    if operation == "add":
        return np.repeat(rows.sum(axis=1, dtype=rows.dtype), WARP)
    extremes = ("fmin", "fmax") if values.dtype.kind == "f" and not propagate_nan else ("minimum", "maximum")
    functions: dict[str, Any] = {
        "min": getattr(np, extremes[0]), "max": getattr(np, extremes[1]), "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    return np.repeat(functions[operation].reduce(rows, axis=1), WARP)


@translates("elect")
def translate_elect(emitter: Emitter, instruction: Instruction) -> None:
    """elect.sync: the lowest active lane of a warp is the leader."""
    lane, predicate = instruction.operands[0].parts
    name = emitter.new_name()
    emitter.append(f"{name} = elect(g, {emitter.mask})")
    emitter.put(predicate, f"{name}[1]", "pred")
    emitter.put(lane, f"{name}[0]", "b32", packed=True)


@runtime
def elect(group: Group, mask: Mask) -> tuple[Array, Array]:
    """The leader's number, and whether a lane is it."""
    active = group.active(mask).reshape(-1, WARP)
    leader = np.argmax(active, axis=1)
    chosen = np.zeros(active.shape, np.bool_)
    chosen[np.arange(len(active)), leader] = True
    return np.repeat(leader.astype(np.uint32), WARP), (chosen & active).ravel()


@translates("match")
def translate_match(emitter: Emitter, instruction: Instruction) -> None:
    """match.any: the lanes with the same value; match.all: all lanes if they agree, and whether they do."""
    target, operand = instruction.operands[:2]
    x = emitter.full_source(operand, instruction.type)
    name = emitter.new_name()
    emitter.append(f"{name} = match(g, {instruction.modifiers[0]!r}, {x}, {emitter.mask})")
    parts = target.parts if target.kind == "pair" else (target,)
    emitter.put(parts[0], f"{name}[0]", "b32", packed=True)
    if len(parts) > 1:
        emitter.put(parts[1], f"{name}[1]", "pred")


@runtime
def match(group: Group, mode: str, values: Array, mask: Mask) -> tuple[Array, Array]:
    """Masks of the active lanes with equal values, and whether all agree."""
    active, rows = group.active(mask).reshape(-1, WARP), values.reshape(-1, WARP)
    equal = (rows[:, :, None] == rows[:, None, :]) & active[:, None, :]
    agree = np.repeat((equal | ~active[:, None, :]).all(axis=(1, 2), where=active[:, :, None]), WARP)
    words = np.packbits(equal, axis=2, bitorder="little").view(np.uint32).ravel()
    if mode == "all":
        words = np.where(agree, ballot(group, group.everyone, mask), np.uint32(0))
    return words, agree
