"""atom and red on global and shared memory, scalar and vector (PTX ISA, Parallel Synchronization: atom, red)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmcompile.emulate import formats
from mmcompile.emulate.ptx.data_types import WIDTH, element
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.group import Array, Group, Index, Mask
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction

_ORDERINGS = ("relaxed", "acquire", "release", "acq_rel")
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")


@translates("atom", "red")
def translate_atomic(emitter: Emitter, instruction: Instruction) -> None:
    """atom returns the old values, red does not; both may be polling."""
    modifiers, kind = instruction.modifiers, instruction.type
    operation = next((m for m in modifiers if m in _OPERATIONS), "")
    space = instruction.space
    if not operation or "async" in modifiers or "shared::cluster" in modifiers or WIDTH[kind] > 8:
        emitter.refuse()
    if space not in ("global", "shared", "generic"):
        emitter.refuse("address space")
    ordering = next((m for m in modifiers if m in _ORDERINGS), "relaxed")
    operands = instruction.operands[1:] if instruction.op == "atom" else instruction.operands
    bits = f"b{8 * WIDTH[kind]}"
    has_float = any(part.kind == "float" for part in operands[1].elements())
    values = emitter.registers(operands[1], kind if has_float and kind in ("f32", "f64") else bits)
    replacement = emitter.full_source(operands[2], bits) if operation == "cas" else None
    emitter.append("g.spun = True")
    where = "shared" if space == "shared" else "global"
    call = (
        f"perform_atomic(g, {operation!r}, {kind!r}, {where!r}, {emitter.address(operands[0])}, {values}, "
        f"{replacement}, {emitter.mask}, {ordering!r})"
    )
    if instruction.op == "red" or instruction.operands[0].kind == "sink":
        emitter.append(call)
    else:
        emitter.put_all(instruction.operands[0].elements(), call, bits)


@runtime
def perform_atomic(
    group: Group,
    operation: str,
    kind: str,
    space: str,
    addresses: Array,
    values: list[Array],
    replacement: Array | None,
    mask: Mask,
    ordering: str,
) -> Array:
    """Old values [elements, lanes]. Lanes with the same address go one after the other, the lowest first."""
    width, count = WIDTH[kind], len(values)
    number = np.dtype(f"uint{8 * width}")
    old = np.zeros((count, group.lanes), number)
    lanes = group.active_lanes(mask)
    if not len(lanes):
        return old
    size = width * count
    if space == "global":
        index, view = group.global_index(addresses[lanes], size, lanes, write=True), group.view_global(width, count)
    else:
        index, view = group.shared_index(addresses[lanes], size, lanes), group.view_shared(width, count)
    if space == "shared" and not group.shared_known[index].all():
        raise group.fault("uninitialised", "atomic on shared memory that nobody wrote")
    if group.order:
        group.order.modify(group, space, index, size, lanes, ordering)
    combine = _find_operation(operation, kind)
    rows = index // size
    for turn in _list_turns(rows):
        here, who = rows[turn], lanes[turn]
        before = view[here].copy()
        old[:, who] = before.T
        given = np.stack([value[who].view(number) for value in values], 1)
        if operation == "cas":
            assert replacement is not None
            view[here] = np.where(before == given, replacement[who].view(number)[:, None], before)
        else:
            view[here] = combine(before, given)
    return old


def _list_turns(rows: Index) -> list[Index]:
    """Positions in rounds, such that no round holds a row twice, and each row's positions come in order."""
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    if len(first) == len(rows):
        return [np.arange(len(rows))]
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(first)))
    rank = np.empty(len(rows), np.int64)
    rank[order] = np.arange(len(rows)) - starts[inverse[order]]
    return [np.flatnonzero(rank == turn) for turn in range(int(rank.max()) + 1)]


def _find_operation(operation: str, kind: str) -> Callable[[Array, Array], Array]:
    """(old, given) [lanes, elements] to new, all as unsigned integers of the type's width."""
    if operation in ("and", "or", "xor"):
        function: Callable[[Array, Array], Array] = getattr(np, f"bitwise_{operation}")
        return function
    simple: dict[str, Callable[[Array, Array], Array]] = {
        "exch": lambda old, given: given,
        "inc": lambda old, given: np.where(old >= given, 0, old + 1).astype(old.dtype),
        "dec": lambda old, given: np.where((old == 0) | (old > given), given, old - 1).astype(old.dtype),
        "cas": lambda old, given: given,
    }
    if operation in simple:
        return simple[operation]
    numeric: dict[str, Callable[[Array, Array], Array]] = {"add": np.add, "min": np.minimum, "max": np.maximum}
    floats: dict[str, Callable[[Array, Array], Array]] = {"add": np.add, "min": np.fmin, "max": np.fmax}
    compute = (floats if kind in _HALVES or kind in ("f32", "f64") else numeric)[operation]
    if kind in _HALVES:
        return lambda old, given: _compute_halves(compute, kind.removesuffix("x2"), old, given)
    number = np.dtype(element(kind))

    def apply(old: Array, given: Array) -> Array:
        return np.ascontiguousarray(compute(old.view(number), given.view(number))).view(old.dtype)

    return apply


def _compute_halves(compute: Callable[[Array, Array], Array], half: str, old: Array, given: Array) -> Array:
    """f16 and bf16, one or two in an element."""
    decode = formats.decode_f16 if half == "f16" else formats.decode_bf16
    encode = formats.encode_f16 if half == "f16" else formats.encode_bf16
    result = encode(compute(decode(old.view(np.uint16)), decode(given.view(np.uint16))))
    return np.ascontiguousarray(result).view(old.dtype)
