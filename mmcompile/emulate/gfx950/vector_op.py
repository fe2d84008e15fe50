"""The common form of lane-wise vector instructions: sources, DPP, SDWA, clamp, writing, undefined bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.cross_lane import DPP_MODIFIERS, make_dpp_source, make_sdwa_source, parse_dpp, place_sdwa
from mmcompile.emulate.gfx950.decoded import Decoded, Source, Step, Taint, Unknowns, collapse, make_source
from mmcompile.emulate.gfx950.operands import Operand, parse_operand
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import SCALAR, VCC, Waves, pack_lanes

Array = npt.NDArray[Any]

SDWA_MODIFIERS = {"dst_sel", "dst_unused", "src0_sel", "src1_sel"}


@dataclass(frozen=True)
class VectorOp:
    """``run(*sources)`` for all lanes at once.

    Attributes:
        sources: a kind for each, see ``decoded.make_source``. result: "u" one register (any 4-byte type), "q" two
            registers (any 8-byte type), "c" a lane mask (bool), "k" (values, carry lanes).
        accumulates: the old target is the last source. masked: the last source is a lane mask (vcc if not written).
        precise: undefined bits of the result from (undefined bits, values) of the sources; default: all or nothing.
        half: the result has 16 bits, and the upper half of the register becomes zero.
        saturated: what an integer operation with clamp runs instead: the result at the ends of its type's range.
    """

    run: Callable[..., Any]
    sources: str
    result: str = "u"
    accumulates: bool = False
    precise: Callable[[Sequence[Array], Sequence[Array]], Array] | None = None
    saturated: Callable[..., Any] | None = None


def strip_encoding(op: str) -> tuple[str, str]:
    """``v_add_u32_e32`` to ("add_u32", "e32"); the encoding is "" where the name has none."""
    name = op[2:]
    for encoding in ("e64_dpp", "e32", "e64", "dpp", "sdwa"):
        if name.endswith("_" + encoding):
            return name[: -len(encoding) - 1], encoding
    return name, ""


def make_sources(i: Instruction, operands: Sequence[Operand], kinds: str, encoding: str) -> list[Source]:
    """The sources in their kinds; the first is permuted by DPP, the first two selected by SDWA."""
    sources = [make_source(operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
    if encoding.endswith("dpp"):
        sources[0] = make_dpp_source(i, operands[0], kinds[0])
    elif encoding == "sdwa":
        for position in range(min(2, len(kinds))):
            if kinds[position] != "m":
                select = i.modifiers.get(f"src{position}_sel", "DWORD")
                sources[position] = make_sdwa_source(operands[position], kinds[position], select)
    return sources


def finish_float(i: Instruction, values: Array) -> Array:
    """Output modifiers of float results: omod (mul:2, mul:4, div:2), then clamp to 0..1 (NaN becomes 0)."""
    if "mul" in i.modifiers:
        values = values * np.float32(int(i.modifiers["mul"]))
    if "div" in i.modifiers:
        values = values / np.float32(2)
    if "clamp" in i.modifiers:
        values = np.where(np.isnan(values), np.float32(0), np.clip(values, np.float32(0), np.float32(1)))
    return values


def wrap_result(i: Instruction, op: VectorOp, floating: bool) -> Callable[..., Any] | None:
    """What ``op`` runs, with the output modifiers; None if they mean something that is not modelled."""
    run, given = op.run, {"mul", "div", "clamp"} & set(i.modifiers)
    if not given:
        return run
    if not floating:
        return op.saturated if given == {"clamp"} else None
    return lambda *values: finish_float(i, run(*values))


def allowed_modifiers(encoding: str) -> set[str]:
    """Modifiers that this module knows for an encoding."""
    allowed = {"mul", "div", "clamp"}
    if encoding.endswith("dpp"):
        return allowed | DPP_MODIFIERS
    return allowed | (SDWA_MODIFIERS if encoding == "sdwa" else set())


def split_operands(op: VectorOp, operands: list[Operand]) -> tuple[Operand, Operand | None, list[Operand]]:
    """Target, second target (carry) or None, and sources with the implied ones added."""
    target, *given = operands
    carry = None
    if op.result == "k":
        carry = given.pop(0)
    if op.accumulates:
        given.append(target)
    return target, carry, given


def build_vector(i: Instruction, op: VectorOp, encoding: str, floating: bool) -> Decoded | None:
    """Decode an instruction of a table."""
    run = wrap_result(i, op, floating)
    if run is None or set(i.modifiers) - allowed_modifiers(encoding):
        return None
    operands = [parse_operand(text) for text in i.operands]
    if op.result == "c" and encoding in ("e32", "sdwa", "dpp") and len(operands) == len(op.sources):
        operands.insert(0, Operand("scalar", VCC, 2))
    target, carry, given = split_operands(op, operands)
    if len(given) != len(op.sources):
        return None
    modified = "fd" if encoding == "sdwa" else "fdb"
    if any((o.negate or o.absolute) and kind not in modified for o, kind in zip(given, op.sources, strict=True)):
        return None
    sources = make_sources(i, given, op.sources, encoding)
    step = make_step(op, run, target, carry, sources)
    taint = make_taint(op, target, carry, sources)
    writes = [*target.list_registers(), *(carry.list_registers() if carry else [])]
    if op.result == "q":
        writes = target.list_registers(count=2)
    reads = [register for source in sources for register in source.registers]
    if encoding.endswith("dpp"):
        step, taint = narrow_by_dpp(i, step, taint)
        reads += writes
    elif encoding == "sdwa" and i.modifiers.get("dst_sel", "DWORD") != "DWORD":
        return place_sdwa(i, target, run, sources, reads)
    return Decoded(step, reads, writes, taint)


def make_step(
    op: VectorOp, run: Callable[..., Any], target: Operand, carry: Operand | None, sources: list[Source]
) -> Step:
    """The step that computes and writes."""
    reads, index = [source.read for source in sources], target.index
    if op.result == "c":

        def compare(w: Waves) -> None:
            lanes = run(*[read(w) for read in reads]) & w.active
            w.put_lanes(index, lanes)

        return compare
    if op.result == "k":
        assert carry is not None
        carry_index = carry.index

        def add(w: Waves) -> None:
            values, lanes = run(*[read(w) for read in reads])
            w.put(index, values)
            w.put_lanes(carry_index, lanes & w.active)

        return add
    if op.result == "q":
        return lambda w: w.put_wide(index, run(*[read(w) for read in reads]))
    if len(reads) == 1:
        only = reads[0]
        return lambda w: w.put(index, run(only(w)))
    if len(reads) == 2:
        first, second = reads
        return lambda w: w.put(index, run(first(w), second(w)))
    return lambda w: w.put(index, run(*[read(w) for read in reads]))


def make_taint(op: VectorOp, target: Operand, carry: Operand | None, sources: list[Source]) -> Taint:
    """Undefined bits of the written registers."""

    def taint(w: Waves) -> Unknowns:
        masks = [source.unknown(w) for source in sources]
        if op.precise is not None:
            result = op.precise(masks, [source.read(w) for source in sources])
        else:
            result = collapse(masks) if masks else np.zeros((1, 1), np.uint32)
        lanes = np.broadcast_to(result != 0, w.active.shape) & w.active
        if op.result == "c":
            return list_lane_unknowns(target, lanes)
        found: Unknowns = [(register, result) for register in target.list_registers()]
        return found + (list_lane_unknowns(carry, lanes) if carry else [])

    return taint


def list_lane_unknowns(target: Operand, lanes: Array) -> Unknowns:
    """Undefined lanes of a lane mask that is written to a scalar pair."""
    words = pack_lanes(np.ascontiguousarray(lanes))
    return [(SCALAR + target.index + part, words[:, part]) for part in range(2)]


def narrow_by_dpp(i: Instruction, step: Step, taint: Taint) -> tuple[Step, Taint]:
    """Write only the rows and banks of the masks, and only lanes with a valid source unless bound_ctrl is set."""
    control = parse_dpp(i)

    def narrow_step(w: Waves) -> None:
        active, full = w.active, w.full
        w.active = active & control.find_enabled(w)
        w.full = bool(w.active.all())
        step(w)
        w.active, w.full = active, full

    def narrow_taint(w: Waves) -> Unknowns:
        enabled = control.find_enabled(w)
        return [
            (register, np.where(enabled, mask, w.vector_unknown[register, w.rows]) if register < SCALAR else mask)
            for register, mask in taint(w)
        ]

    return narrow_step, narrow_taint
