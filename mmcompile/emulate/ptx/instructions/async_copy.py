"""Asynchronous copies: cp.async, cp.async.bulk, cp.async.bulk.tensor (TMA), and tensormap instructions.

PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy", "Tensor copy", "tensormap.replace". Bulk copies
run in the asynchronous proxy, cp.async in the generic one.
"""

from __future__ import annotations

from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.instructions import async_copy_runtime as _  # noqa: F401  (registers what is called)
from mmcompile.emulate.ptx.instructions.table import translates
from mmcompile.emulate.ptx.parser import Instruction

_SIZES = {"ca": (4, 8, 16), "cg": (16,)}
_NOT_MODELLED = ("multicast", "im2col", "cta_group::2", "cp_mask", "override", "ignore_oob")


@translates("cp")
def translate_copy(emitter: Emitter, instruction: Instruction) -> None:
    """cp.async and cp.async.bulk in all forms but reductions, multicast, im2col and copies between blocks."""
    modifiers = instruction.modifiers
    if modifiers[0] != "async" or any(m.startswith(_NOT_MODELLED) for m in modifiers):
        emitter.refuse("reductions, multicast, im2col and masks are not modelled")
    if modifiers[1] == "bulk":
        _translate_bulk(emitter, instruction)
    elif modifiers[1] in _SIZES:
        _translate_small(emitter, instruction)
    elif modifiers[1] == "mbarrier":
        if not any(m.startswith("shared") for m in modifiers):
            emitter.refuse("a generic address")
        address = emitter.address(instruction.operands[0])
        emitter.append(f"arrive_after_copies(g, {address}, {'noinc' in modifiers}, {emitter.mask})")
    elif modifiers[1] == "commit_group":
        emitter.append(f"commit_copies(g, {emitter.mask})")
    elif modifiers[1] == "wait_group":
        emitter.append(f"wait_copies(g, {instruction.operands[0].integer}, {emitter.mask})")
    elif modifiers[1] == "wait_all":
        emitter.append(f"wait_copies(g, None, {emitter.mask})")
    else:
        emitter.refuse()


def _translate_small(emitter: Emitter, instruction: Instruction) -> None:
    """cp.async.{ca,cg}.shared.global [destination], [source], size{, source size}{, cache policy};"""
    operands = list(instruction.operands)
    if any("cache_hint" in m for m in instruction.modifiers):
        operands.pop()
    destination, source, size, *rest = operands
    if size.integer not in _SIZES[instruction.modifiers[1]] or len(rest) > 1:
        emitter.refuse("copy size")
    given = "None"
    if rest:
        if rest[0].kind == "register" and rest[0].width == 0:
            emitter.refuse("ignore-src is not modelled")
        given = emitter.full_source(rest[0], "b32")
    emitter.append(
        f"copy_small(g, {emitter.address(destination)}, {emitter.address(source)}, {size.integer}, {given}, "
        f"{emitter.mask})"
    )


def _translate_bulk(emitter: Emitter, instruction: Instruction) -> None:
    modifiers, operands = instruction.modifiers, instruction.operands
    action = modifiers[2]
    if action == "commit_group":
        emitter.append(f"commit_stores(g, {emitter.mask})")
    elif action == "wait_group":
        emitter.append(f"wait_stores(g, {operands[0].integer}, {emitter.mask})")
    elif action == "prefetch":
        emitter.append("pass")
    elif action == "tensor":
        _translate_tensor(emitter, instruction)
    elif action.startswith("shared") and modifiers[3] == "global":
        destination, source, size, barrier = operands[:4]
        emitter.append(
            f"load_bulk(g, {emitter.address(destination)}, {emitter.address(source)}, "
            f"{emitter.full_source(size, 'b32')}, {emitter.address(barrier)}, {emitter.mask})"
        )
    elif action == "global" and modifiers[3].startswith("shared"):
        destination, source, size = operands[:3]
        emitter.append(
            f"store_bulk(g, {emitter.address(destination)}, {emitter.address(source)}, "
            f"{emitter.full_source(size, 'b32')}, {emitter.mask})"
        )
    else:
        emitter.refuse("copies between blocks of a cluster are not modelled")


def _translate_tensor(emitter: Emitter, instruction: Instruction) -> None:
    """cp.async.bulk.tensor.dim.destination.source ..."""
    modifiers, operands = instruction.modifiers, instruction.operands
    rows = any(m in ("tile::gather4", "tile::scatter4") for m in modifiers)
    spaces = [m for m in modifiers if m == "global" or m.startswith("shared")]
    rank = next(int(m[0]) for m in modifiers if m in ("1d", "2d", "3d", "4d", "5d"))
    load = spaces[0] != "global"
    tensor = operands[1] if load else operands[0]
    coordinates = tensor.parts[0]
    if len(coordinates.elements()) != (5 if rows else rank):
        emitter.refuse("number of coordinates")
    where = f"{emitter.address(tensor)}, {emitter.registers(coordinates)}, {rows}"
    if load:
        emitter.append(
            f"load_tensor(g, {emitter.address(operands[0])}, {where}, {emitter.address(operands[2])}, {emitter.mask})"
        )
    else:
        emitter.append(f"store_tensor(g, {where}, {emitter.address(operands[1])}, {emitter.mask})")


@translates("tensormap")
def translate_tensor_map(emitter: Emitter, instruction: Instruction) -> None:
    """tensormap.replace in shared memory, and tensormap.cp_fenceproxy to global memory."""
    modifiers, operands = instruction.modifiers, instruction.operands
    if modifiers[:2] == ("replace", "tile") and "shared::cta" in modifiers:
        ordinal = operands[1].integer if len(operands) == 3 else 0
        emitter.append(
            f"replace_field(g, {emitter.address(operands[0])}, {modifiers[2]!r}, {ordinal}, "
            f"{emitter.full_source(operands[-1], instruction.type)}, {emitter.mask})"
        )
    elif modifiers[:3] == ("cp_fenceproxy", "global", "shared::cta"):
        emitter.append(
            f"publish_tensor_map(g, {emitter.address(operands[0])}, {emitter.address(operands[1])}, {emitter.mask})"
        )
    else:
        emitter.refuse("only descriptors in shared memory are modified")
