"""Asynchronous warpgroup matrix multiply-accumulate of sm_90a: wgmma.mma_async, fence, commit_group, wait_group.

PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". Each warp of a warpgroup computes its 16 of the 64 rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx import fragments
from mmcompile.emulate.ptx.async_state import at_line, get_state
from mmcompile.emulate.ptx.descriptors import MatrixDescriptor, parse_wgmma_descriptor
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.faults_at import faults_at_line
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.ptx.instructions.matrix import NOTE_SUMS, gather_a, multiply
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.operands import CHUNK, check_published, find_operand, list_chunks, read_operand
from mmcompile.emulate.ptx.parser import Instruction, Operand

Lanes = npt.NDArray[np.bool_]
Mask = Lanes | None
WARP, ROWS, WARPGROUP = 32, 64, 4

_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")
_DEPTHS = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
_ACCUMULATORS = {"f16": ("f32", "f16"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f32", "f16"),
                 "e5m2": ("f32", "f16"), "s8": ("s32",), "u8": ("s32",)}  # fmt: skip


@dataclass(frozen=True)
class WgmmaForm:
    """One wgmma.mma_async: types, shape, registers by number, modifiers.

    Attributes: a: registers of the A fragment, empty if A is in shared memory. a_sign, b_sign: imm-scale. a_transposed,
        b_transposed: MN-major operands.
    """

    columns: int
    depth: int
    d_type: str
    a_type: str
    b_type: str
    d: tuple[int, ...]
    a: tuple[int, ...]
    a_sign: int
    b_sign: int
    a_transposed: bool
    b_transposed: bool
    saturate: bool


@translates("wgmma")
def translate_wgmma(emitter: Emitter, instruction: Instruction) -> None:
    """wgmma.mma_async, wgmma.fence, wgmma.commit_group, wgmma.wait_group."""
    action = instruction.modifiers[0]
    if action == "fence":
        # Orders accesses of registers and shared memory with wgmma; registers are checked until the wait, and
        # the proxy fence for shared memory is an instruction of its own.
        emitter.append(f"g.active_warps({emitter.mask})")
    elif action == "commit_group":
        emitter.append(f"commit_wgmma(g, {emitter.mask})")
    elif action == "wait_group":
        emitter.append(f"wait_wgmma(g, {instruction.operands[0].integer}, {emitter.mask})")
    elif action == "mma_async":
        _translate_multiply(emitter, instruction)
    else:
        emitter.refuse()


def _translate_multiply(emitter: Emitter, instruction: Instruction) -> None:
    if "sp" in instruction.modifiers:
        emitter.refuse("sparse operands are not modelled")
    modifiers = [m for m in instruction.modifiers if m != "satfinite"]
    shape = _SHAPE.match(modifiers[3])
    if not shape or len(modifiers) != 7:
        emitter.refuse("shape")
    columns, depth = int(shape[1]), int(shape[2])
    d_type, a_type, b_type = modifiers[4:]
    eight = {"e4m3", "e5m2"}, {"s8", "u8"}
    if a_type not in _DEPTHS or not (a_type == b_type or any({a_type, b_type} <= pair for pair in eight)):
        emitter.refuse("types")
    if depth != _DEPTHS[a_type] or d_type not in _ACCUMULATORS[a_type] or columns % 8 or not 8 <= columns <= 256:
        emitter.refuse("shape or accumulator type")
    d, a, b, use_d, *immediates = instruction.operands
    signs, transposed = _split_immediates(emitter, [x.integer for x in immediates], a.kind == "vector", a_type)
    d_registers = _list_registers(emitter, d)
    a_registers = _list_registers(emitter, a) if a.kind == "vector" else ()
    saturate = "satfinite" in instruction.modifiers
    form = WgmmaForm(
        columns, depth, d_type, a_type, b_type, d_registers, a_registers, *signs, *transposed, saturate
    )
    if len(form.d) != columns // (4 if d_type == "f16" else 2) or (form.a and len(form.a) != 4):
        emitter.refuse("number of registers")
    if d_type != "s32":
        emitter.notes.add(NOTE_SUMS)
    a_source = "None" if form.a else emitter.full_source(a, "b64")
    emitter.append(
        f"issue_wgmma(g, {emitter.constant(form)}, {a_source}, {emitter.full_source(b, 'b64')}, "
        f"{emitter.full_source(use_d, 'pred')}, {emitter.mask})"
    )


def _list_registers(emitter: Emitter, operand: Operand) -> tuple[int, ...]:
    """Numbers of the registers: they are read and written when the operation is performed."""
    if any(part.kind != "register" or part.width != 4 for part in operand.elements()):
        emitter.refuse("32-bit registers are needed")
    return tuple(part.index for part in operand.elements())


def _split_immediates(
    emitter: Emitter, values: list[int], a_in_registers: bool, a_type: str
) -> tuple[tuple[int, int], tuple[bool, bool]]:
    """imm-scale-a, imm-scale-b, and imm-trans-a, imm-trans-b, which only 16-bit types have."""
    if a_type in ("s8", "u8"):
        signs, rest = [1, 1], values
    else:
        signs, rest = values[:2], values[2:]
    transposed = [0, *rest] if a_in_registers and rest else rest or [0, 0]
    plain = len(signs) == 2 and len(transposed) == 2 and set(signs) <= {1, -1} and set(transposed) <= {0, 1}
    if not plain or (rest and a_type not in ("f16", "bf16")):
        emitter.refuse("immediate operands")
    return (signs[0], signs[1]), (bool(transposed[0]), bool(transposed[1]))


@runtime
def commit_wgmma(g: Group, mask: Mask) -> None:
    """wgmma.commit_group."""
    g.active_warps(mask)
    get_state(g).wgmma.commit(g.active(mask))


@runtime
def wait_wgmma(g: Group, pending: int, mask: Mask) -> None:
    """wgmma.wait_group."""
    g.active_warps(mask)
    get_state(g).wgmma.wait(g.active(mask), pending)


@runtime
def issue_wgmma(g: Group, form: WgmmaForm, a: Any, b: Any, use_d: Lanes, mask: Mask) -> None:
    """Perform the operation now, or in late mode when it is waited for."""
    lanes = g.active(mask)
    g.active_warps(mask)
    state = get_state(g)
    before = [g.registers[register] for register in form.a]
    if g.late and lanes.any():
        _check_published(g, form, a, b, lanes)
        state.registers.begin(form.d, lanes)

    def perform(now: Lanes) -> None:
        state.registers.check_unchanged(form.a, before, now)
        _perform(g, form, a, b, use_d, now)

    state.wgmma.add(lanes, at_line(g, perform))


def _check_published(g: Group, form: WgmmaForm, a: Any, b: Any, lanes: Lanes) -> None:
    """The operands in shared memory are published to the asynchronous proxy."""
    operands = [(b, form.columns, form.b_type, form.b_transposed)]
    if a is not None:
        operands.append((a, ROWS, form.a_type, form.a_transposed))
    for warp in np.flatnonzero(lanes.reshape(-1, WARP).any(axis=1)):
        for bits, rows, element_type, transposed in operands:
            descriptor = parse_wgmma_descriptor(int(bits[warp * WARP]))
            with faults_at_line(g):
                places = find_operand(g, descriptor, rows, form.depth, element_type, transposed)
            base = int(warp) * WARP // g.threads * g.shared_stride
            check_published(g, list_chunks(places, element_type, transposed) + base, CHUNK)


def _perform(g: Group, form: WgmmaForm, a: Any, b: Any, use_d: Lanes, lanes: Lanes) -> None:
    """Compute and write the accumulators of the warps of ``lanes``; warps with the same descriptors go together."""
    warps = np.flatnonzero(lanes.reshape(-1, WARP).any(axis=1))
    first = warps * WARP
    keys = np.stack([b[first], b[first] * 0 if a is None else a[first]], axis=1)
    registers = get_state(g).registers
    words = np.array(registers.accumulate(form.d).T, order="C").reshape(-1, WARP, len(form.d))
    for key in keys[:1] if (keys == keys[0]).all() else np.unique(keys, axis=0):
        members = warps[(keys == key).all(axis=1)]
        a_descriptor = None if a is None else parse_wgmma_descriptor(int(key[1]))
        product = _multiply(g, form, a_descriptor, parse_wgmma_descriptor(int(key[0])), members)
        kept = use_d[members * WARP]
        if kept.any():
            d = fragments.gather_accumulator(words[members], form.columns, form.d_type)
            product = product + np.where(kept[:, None, None], d, 0)
        if form.saturate and form.d_type == "s32":
            product = np.clip(product, -(2**31), 2**31 - 1)
        words[members] = fragments.scatter_accumulator(product, form.d_type)
    registers.finish(form.d, lanes, np.ascontiguousarray(words.reshape(g.lanes, -1).T))


def _multiply(
    g: Group, form: WgmmaForm, a_descriptor: MatrixDescriptor | None, b_descriptor: MatrixDescriptor, warps: Any
) -> Any:
    """Products [warps, 16, columns] of warps whose operands have the same descriptors."""
    blocks, inverse = np.unique(warps * WARP // g.threads, return_inverse=True)
    places = find_operand(g, b_descriptor, form.columns, form.depth, form.b_type, form.b_transposed)
    b = read_operand(g, blocks, places, form.b_type)[inverse]
    _note_reads(g, warps, list_chunks(places, form.b_type, form.b_transposed))
    if a_descriptor is None:
        words = np.stack([g.registers[register] for register in form.a], axis=-1)
        a = gather_a(words.reshape(-1, WARP, len(form.a))[warps], form.a_type)
    else:
        quarter = warps % (g.threads // WARP) % WARPGROUP
        places = find_operand(g, a_descriptor, ROWS, form.depth, form.a_type, form.a_transposed)
        rows = np.arange(16) + 16 * quarter[:, None]
        a = read_operand(g, blocks, places, form.a_type)[inverse[:, None], rows]
        for warp, part in zip(warps, quarter, strict=True):
            here = places[16 * part : 16 * part + 16]
            _note_reads(g, np.array([warp]), list_chunks(here, form.a_type, form.a_transposed))
    sign = form.a_sign * form.b_sign
    return multiply(a, b.swapaxes(1, 2)) * sign


def _note_reads(g: Group, warps: Any, chunks: npt.NDArray[np.int64]) -> None:
    """Every warp reads the 16-byte chunks of its block: they must be known, and ordered."""
    base = warps * WARP // g.threads * g.shared_stride
    index = (chunks[None, :] + base[:, None]).reshape(-1)
    g.note_shared_read(index, 16, np.repeat(warps * WARP, len(chunks)))
