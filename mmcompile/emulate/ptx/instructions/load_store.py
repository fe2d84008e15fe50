"""ld and st in every address space, with their memory ordering (PTX ISA, Data Movement: ld, ldu, st)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.data_types import WIDTH
from mmcompile.emulate.ptx.emitter import LOCAL_WINDOW, Emitter
from mmcompile.emulate.ptx.group import Array, Group, Index, Mask
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction, Operand

_LOADS = {
    "global": "load_global", "const": "load_global", "shared": "load_shared", "local": "load_local",
    "generic": "load_generic",
}  # fmt: skip
_ORDERED = ("relaxed", "volatile", "mmio", "acquire", "release")
_UNMODELLED = ("multimem", "async")


def find_ordering(emitter: Emitter, instruction: Instruction) -> str:
    """Memory semantics of an instruction: "" for plain accesses, "relaxed" (also volatile), "acquire" ..."""
    modifiers = instruction.modifiers
    if any(m in _UNMODELLED for m in modifiers) or "shared::cluster" in modifiers:
        emitter.refuse("address space")
    found = next((m for m in modifiers if m in _ORDERED), "")
    return "relaxed" if found in ("volatile", "mmio") else found


@translates("ld", "ldu")
def translate_ld(emitter: Emitter, instruction: Instruction) -> None:
    """ld: one value or a vector; ordered loads may be polling."""
    kind, space, (target, place) = instruction.type, instruction.space, instruction.operands[:2]
    width, targets = WIDTH[kind], target.elements()
    kind = kind if kind[0] == "s" else f"b{8 * width}"
    if width > 8:
        emitter.refuse("128 bits")
    if space == "param":
        _load_parameter(emitter, place, targets, kind)
        return
    ordering = find_ordering(emitter, instruction)
    if ordering:
        emitter.append("g.spun = True")
    if ordering and space == "local":
        emitter.refuse("ordering of local memory")
    call = f"{_LOADS[space]}(g, {emitter.address(place)}, {width}, {len(targets)}, {emitter.mask}"
    emitter.put_all(targets, f"{call}{f', {ordering!r}' if ordering else ''})", kind)


def _load_parameter(emitter: Emitter, place: Operand, targets: tuple[Operand, ...], kind: str) -> None:
    """Parameters of the kernel, or of an inlined function (registers)."""
    base, width = place.base, WIDTH[kind]
    if base is None or base.kind not in ("slots", "parameter"):
        emitter.refuse("ld.param of something that is not a parameter")
    for number, target in enumerate(targets):
        offset = place.offset + number * width
        if base.kind == "slots":
            if offset not in base.slots:
                emitter.refuse(f"nothing was stored at offset {offset} of the parameter")
            emitter.put(target, emitter.source(base.slots[offset], f"b{8 * width}"), kind, packed=True)
        else:
            emitter.put(target, f"g.parameter({base.offset + offset}, {width})", kind, packed=True)


@translates("st")
def translate_st(emitter: Emitter, instruction: Instruction) -> None:
    """st: one value or a vector."""
    kind, space, (place, value) = instruction.type, instruction.space, instruction.operands[:2]
    width = WIDTH[kind]
    if width > 8:
        emitter.refuse("128 bits")
    if space == "param":
        base = place.base
        assert base is not None
        for number, part in enumerate(value.elements()):
            target = base.slots[place.offset + number * width]
            emitter.put(target, emitter.full_source(part, f"b{8 * width}"), f"b{8 * width}")
        return
    ordering = find_ordering(emitter, instruction)
    if ordering and space == "local":
        emitter.refuse("ordering of local memory")
    has_float = any(part.kind == "float" for part in value.elements())
    values = emitter.registers(value, kind if has_float else f"b{8 * width}")
    name = "store_generic" if space == "generic" else f"store_{space}"
    call = f"{name}(g, {emitter.address(place)}, {width}, {values}, {emitter.mask}"
    emitter.append(f"{call}{f', {ordering!r}' if ordering else ''})")


# ---------------------------------------------------------------------- runtime

View = Callable[[int, int], Array]


def _load(group: Group, view: Array, index: Index, size: int, count: int, lanes: Index | None) -> Array:
    """Rows [count, lanes] of values at byte places."""
    rows = view[index // size] if size > 1 else view[index]
    if lanes is None:
        return rows.reshape(1, -1) if count == 1 else np.ascontiguousarray(rows.T)
    out = np.zeros((count, group.lanes), rows.dtype)
    out[:, lanes] = rows.T
    return out


def _store(view: Array, index: Index, size: int, values: list[Array], lanes: Index | None) -> None:
    kind = view.dtype
    if lanes is not None:
        values = [value[lanes] for value in values]
    place = index // size if size > 1 else index
    if len(values) == 1:
        view[place, 0] = values[0].view(kind)
    else:
        view[place] = np.stack([value.view(kind) for value in values], 1)


def _as_bytes(values: list[Array], lanes: Index | None) -> npt.NDArray[np.uint8]:
    """The bytes [lanes, size] that are stored."""
    rows = np.stack([value if lanes is None else value[lanes] for value in values], 1)
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def _select(mask: Mask, addresses: Array) -> tuple[Index | None, Array]:
    """Active lanes (None: all) and their addresses."""
    if mask is None:
        return None, addresses
    lanes = np.flatnonzero(mask)
    return lanes, addresses[lanes]


@runtime
def load_global(
    group: Group, addresses: Array, width: int, count: int, mask: Mask, ordering: str = ""
) -> npt.NDArray[Any]:
    """[count, lanes] values of ``width`` bytes from global memory."""
    lanes, selected = _select(mask, addresses)
    if not len(selected):
        return np.zeros((count, group.lanes), f"uint{8 * width}")
    index = group.global_index(selected, width * count, lanes, write=False)
    if group.order and ordering:
        group.order.load_ordered(group, "global", index, width * count, lanes, ordering)
    else:
        group.note_global_read(index, width * count, lanes)
    return _load(group, group.view_global(width, count), index, width * count, count, lanes)


@runtime
def load_shared(
    group: Group, addresses: Array, width: int, count: int, mask: Mask, ordering: str = ""
) -> npt.NDArray[Any]:
    """[count, lanes] values of ``width`` bytes from shared memory."""
    lanes, selected = _select(mask, addresses)
    if not len(selected):
        return np.zeros((count, group.lanes), f"uint{8 * width}")
    index = group.shared_index(selected, width * count, lanes)
    if group.order and ordering:
        group.order.load_ordered(group, "shared", index, width * count, lanes, ordering)
    else:
        group.note_shared_read(index, width * count, lanes)
    return _load(group, group.view_shared(width, count), index, width * count, count, lanes)


@runtime
def load_local(group: Group, addresses: Array, width: int, count: int, mask: Mask) -> npt.NDArray[Any]:
    """[count, lanes] values of ``width`` bytes from the lanes' own memory."""
    lanes, selected = _select(mask, addresses)
    index = group.local_index(selected, width * count, lanes, LOCAL_WINDOW)
    return _load(group, group.view_local(width, count), index, width * count, count, lanes)


@runtime
def load_generic(
    group: Group, addresses: Array, width: int, count: int, mask: Mask, ordering: str = ""
) -> npt.NDArray[Any]:
    """A load by generic addresses: all of local, or all of global memory."""
    if _is_local(addresses, mask):
        return load_local(group, addresses, width, count, mask)
    return load_global(group, addresses, width, count, mask, ordering)


def _is_local(addresses: Array, mask: Mask) -> bool:
    selected = addresses if mask is None else addresses[mask]
    return bool(len(selected)) and int(selected[0]) >> 24 == LOCAL_WINDOW >> 24


@runtime
def store_global(
    group: Group, addresses: Array, width: int, values: list[Array], mask: Mask, ordering: str = ""
) -> None:
    """Store a value, or a vector of them, per lane to global memory."""
    lanes, selected = _select(mask, addresses)
    if not len(selected):
        return
    size = width * len(values)
    index = group.global_index(selected, size, lanes, write=True)
    if group.order and ordering:
        group.order.store_ordered(group, "global", index, size, lanes, ordering)
    else:
        group.note_global_write(index, size, lanes, _as_bytes(values, lanes) if group.order else None)
    _store(group.view_global(width, len(values)), index, size, values, lanes)


@runtime
def store_shared(
    group: Group, addresses: Array, width: int, values: list[Array], mask: Mask, ordering: str = ""
) -> None:
    """Store a value, or a vector of them, per lane to shared memory."""
    lanes, selected = _select(mask, addresses)
    if not len(selected):
        return
    size = width * len(values)
    index = group.shared_index(selected, size, lanes)
    if group.order and ordering:
        group.order.store_ordered(group, "shared", index, size, lanes, ordering)
    else:
        group.note_shared_write(index, size, lanes, _as_bytes(values, lanes) if group.order else None)
    _store(group.view_shared(width, len(values)), index, size, values, lanes)


@runtime
def store_local(group: Group, addresses: Array, width: int, values: list[Array], mask: Mask) -> None:
    """Store a value, or a vector of them, per lane to the lane's own memory."""
    lanes, selected = _select(mask, addresses)
    size = width * len(values)
    index = group.local_index(selected, size, lanes, LOCAL_WINDOW)
    _store(group.view_local(width, len(values)), index, size, values, lanes)


@runtime
def store_generic(
    group: Group, addresses: Array, width: int, values: list[Array], mask: Mask, ordering: str = ""
) -> None:
    """A store by generic addresses: all to local, or all to global memory."""
    if _is_local(addresses, mask):
        store_local(group, addresses, width, values, mask)
    else:
        store_global(group, addresses, width, values, mask, ordering)
