"""Tensor core instructions of sm_100 and later: tcgen05.alloc, ld, st, cp, mma, commit, wait.

PTX ISA, "TensorCore 5th Generation Family Instructions". Only .cta_group::1.
"""

from __future__ import annotations

import re

from mmcompile.emulate.ptx.async_state import find_target
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.instruction_descriptor import BLOCK_SCALED
from mmcompile.emulate.ptx.instructions import tcgen05_multiply as _m  # noqa: F401  (registers what is called)
from mmcompile.emulate.ptx.instructions import tcgen05_transfer as _t  # noqa: F401
from mmcompile.emulate.ptx.instructions.matrix import NOTE_SUMS
from mmcompile.emulate.ptx.instructions.table import translates
from mmcompile.emulate.ptx.instructions.tcgen05_transfer import Reduction
from mmcompile.emulate.ptx.parser import Instruction, Operand
from mmcompile.emulate.ptx.tensor_memory import COLUMNS, EXCLUSIVE_COLUMNS, REGISTERS

_NOTHING = ("fence::before_thread_sync", "fence::after_thread_sync")
_KINDS = ("f16", "tf32", "f8f6f4", "i8", *BLOCK_SCALED)
_SCALE_BLOCKS = {"block16": 16, "block32": 32, "scale_vec::1X": 32, "scale_vec::2X": 32, "scale_vec::4X": 16}
_COPIES = {"32x128b": (32, 16, True), "128x128b": (128, 16, False), "128x256b": (128, 32, False)}
"""Rows, bytes of a row, and whether the rows go to all four partitions."""
_HAS_REDUCTION = ("sm_103", "sm_107")


@translates("tcgen05")
def translate_tcgen05(emitter: Emitter, instruction: Instruction) -> None:
    """All tcgen05 instructions but shift, .cta_group::2, .ws, .sp and multicast."""
    action, modifiers, operands = instruction.modifiers[0], instruction.modifiers, instruction.operands
    if any(m == "cta_group::2" or m.startswith("multicast") for m in modifiers):
        emitter.refuse("pairs and clusters of blocks are not modelled")
    if action in _NOTHING:
        emitter.append("pass")
    elif action == "relinquish_alloc_permit":
        emitter.append(f"relinquish_tensor_memory(g, {emitter.mask})")
    elif action in ("wait::ld", "wait::st"):
        emitter.append(f"wait_tensor_access(g, {action == 'wait::ld'}, {emitter.mask})")
    elif action == "alloc":
        _translate_allocation(emitter, instruction)
    elif action == "dealloc":
        first, columns = (emitter.full_source(x, "b32") for x in operands)
        emitter.append(f"free_tensor_memory(g, {first}, {columns}, {emitter.mask})")
    elif action == "commit":
        emitter.append(f"commit_tensor_core(g, {emitter.address(operands[0])}, {emitter.mask})")
    elif action == "ld":
        _translate_load(emitter, instruction)
    elif action == "st":
        _translate_store(emitter, instruction)
    elif action == "cp":
        _translate_copy(emitter, instruction)
    elif action == "mma":
        _translate_multiply(emitter, instruction)
    else:
        emitter.refuse()


def _split_access(emitter: Emitter, instruction: Instruction) -> tuple[str, int, list[str]]:
    """Shape, repetitions, and what follows them in ``ld{.red}.sync.aligned.shape.xN...``."""
    modifiers = [m for m in instruction.modifiers[1:] if m not in ("red", "sync", "aligned")]
    repeat = re.fullmatch(r"x(\d+)", modifiers[1])
    if modifiers[0] not in REGISTERS or not repeat:
        emitter.refuse("data movement shape")
    return modifiers[0], int(repeat[1]), modifiers[2:]


def _translate_allocation(emitter: Emitter, instruction: Instruction) -> None:
    address, columns = instruction.operands
    largest = EXCLUSIVE_COLUMNS if find_target(emitter.program).startswith("sm_107") else COLUMNS
    emitter.append(
        f"allocate_tensor_memory(g, {emitter.address(address)}, {emitter.full_source(columns, 'b32')}, "
        f"{'exclusive' in instruction.modifiers}, {largest}, {emitter.mask})"
    )


def _translate_store(emitter: Emitter, instruction: Instruction) -> None:
    operands = instruction.operands
    shape, repeat, rest = _split_access(emitter, instruction)
    half = operands[1].integer if shape == "16x32bx2" else 0
    if rest != ["b32"] or len(operands[-1].elements()) != repeat * REGISTERS[shape]:
        emitter.refuse("form of the store")
    emitter.append(
        f"store_tensor_memory(g, {emitter.address(operands[0])}, {shape!r}, {repeat}, {half}, "
        f"{emitter.registers(operands[-1])}, {emitter.mask})"
    )


def _translate_load(emitter: Emitter, instruction: Instruction) -> None:
    operands, reduces = instruction.operands, "red" in instruction.modifiers
    shape, repeat, rest = _split_access(emitter, instruction)
    reduction = None
    if reduces:
        if not find_target(emitter.program).startswith(_HAS_REDUCTION) or shape not in ("32x32b", "16x32bx2"):
            emitter.refuse("the target or the shape has no reduction")
        if rest[0] not in ("min", "max") or rest[-1] not in ("f32", "u32", "s32"):
            emitter.refuse("reduction")
        if not set(rest[1:-1]) <= {"abs", "NaN"} or (rest[1:-1] and rest[-1] != "f32"):
            emitter.refuse("reduction")
        reduction = Reduction(rest[0], rest[-1], "abs" in rest, "NaN" in rest)
    elif rest != ["b32"]:
        emitter.refuse("packing is not modelled")
    address = operands[2 if reduces else 1]
    half = operands[-1].integer if shape == "16x32bx2" else 0
    registers = _list_registers(emitter, [*operands[0].elements(), *(operands[1].elements() if reduces else ())])
    if len(registers) != repeat * REGISTERS[shape] + reduces:
        emitter.refuse("number of registers")
    emitter.append(
        f"load_tensor_memory(g, {registers}, {emitter.address(address)}, {shape!r}, {repeat}, {half}, "
        f"{emitter.constant(reduction)}, {emitter.mask})"
    )


def _list_registers(emitter: Emitter, operands: list[Operand]) -> list[int]:
    if any(operand.kind != "register" or operand.width != 4 for operand in operands):
        emitter.refuse("32-bit registers are needed")
    return [operand.index for operand in operands]


def _translate_copy(emitter: Emitter, instruction: Instruction) -> None:
    """tcgen05.cp.cta_group::1.shape{.warpx4} [tensor memory], descriptor;"""
    modifiers = [m for m in instruction.modifiers[1:] if m != "cta_group::1"]
    shapes = [m for m in modifiers if m in _COPIES]
    others = [m for m in modifiers if m not in _COPIES]
    if len(shapes) != 1 or others != (["warpx4"] if _COPIES[shapes[0]][2] else []):
        emitter.refuse("shape")
    target, descriptor = instruction.operands
    emitter.append(
        f"copy_to_tensor_memory(g, {emitter.address(target)}, {emitter.full_source(descriptor, 'b64')}, "
        f"{_COPIES[shapes[0]]}, {emitter.mask})"
    )


def _translate_multiply(emitter: Emitter, instruction: Instruction) -> None:
    """tcgen05.mma.cta_group::1.kind{.block_scale.block} [d], a, b, idesc{, [scales of a], [scales of b]}
    {, disabled lanes}, use d{, scale of d};"""
    kinds = [m[6:] for m in instruction.modifiers if m.startswith("kind::")]
    known = ("mma", "cta_group::1", "block_scale", "collector::a::discard", *_SCALE_BLOCKS)
    others = [m for m in instruction.modifiers if m not in known and not m.startswith("kind::")]
    if len(kinds) != 1 or kinds[0] not in _KINDS or others:
        emitter.refuse("of this form only dense products without collectors are modelled")
    kind, scaled = kinds[0], kinds[0] in BLOCK_SCALED
    if scaled != ("block_scale" in instruction.modifiers):
        emitter.refuse("block scaling and kind do not fit")
    blocks = [_SCALE_BLOCKS[m] for m in instruction.modifiers if m in _SCALE_BLOCKS]
    if scaled and not blocks and kind == "mxf4nvf4":
        emitter.refuse("the size of the scale blocks is missing")
    scale_block = (blocks or [32])[0] if scaled else 0
    d, a, b, descriptor, *rest = instruction.operands
    scales = [emitter.address(rest.pop(0)) for _ in range(2)] if scaled else ["None", "None"]
    disabled = emitter.registers(rest.pop(0)) if rest[0].kind == "vector" else "None"
    use_d = emitter.full_source(rest.pop(0), "pred")
    shift = rest.pop(0).integer if rest else 0
    if kind != "i8":
        emitter.notes.add(NOTE_SUMS)
    in_tensor_memory = a.kind == "memory"
    a_source = emitter.address(a) if in_tensor_memory else emitter.full_source(a, "b64")
    emitter.append(
        f"issue_tensor_core(g, {kind!r}, {scale_block}, {find_target(emitter.program)!r}, {emitter.address(d)}, "
        f"{a_source}, {in_tensor_memory}, {emitter.full_source(b, 'b64')}, {emitter.full_source(descriptor, 'b32')}, "
        f"{scales[0]}, {scales[1]}, {disabled}, {use_d}, {shift}, {emitter.mask})"
    )
