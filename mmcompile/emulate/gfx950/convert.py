"""Conversions between number formats, among them the scaled fp8 and fp4 ones of gfx950 (v_cvt_scalef32_*).

AMD Instinct CDNA4 ISA, "Vector ALU Operations". Of the scale of v_cvt_scalef32_* only the exponent counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.formats import decode, decode_bf16, decode_f16, encode, encode_bf16, encode_f16, unpack_nibbles
from mmcompile.emulate.gfx950.decoded import Decoded, Unknowns, collapse, make_source
from mmcompile.emulate.gfx950.operands import parse_operand
from mmcompile.emulate.gfx950.parser import Instruction
from mmcompile.emulate.gfx950.state import Waves
from mmcompile.emulate.gfx950.vector_op import VectorOp, build_vector, strip_encoding

Array = npt.NDArray[Any]
_LOW = np.uint32(0xFFFF)
FORMATS = {"fp8": "e4m3", "bf8": "e5m2", "fp4": "e2m1"}
"""AMD's names of the formats (OCP encodings on gfx950)."""


def _to_integer(low: float, high: float, dtype: Any) -> Callable[[Array], Array]:
    """Toward zero, clamped; NaN gives 0."""

    def run(a: Array) -> Array:
        values = np.trunc(a.astype(np.float64))
        return np.where(np.isnan(values), 0, np.clip(values, low, high)).astype(np.int64).astype(dtype)

    return run


def _pack(low: Array, high: Array) -> Array:
    packed: Array = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
    return packed


def _round_to_zero_half(a: Array) -> Array:
    """fp32 to fp16 bits toward zero."""
    nearest = encode_f16(a)
    above = np.abs(decode_f16(nearest)) > np.abs(a)
    return np.where(above & np.isfinite(a), nearest - np.uint16(1), nearest)


def _make_bytes() -> dict[str, VectorOp]:
    def take(k: int) -> Callable[[Array], Array]:
        return lambda a: ((a >> np.uint32(8 * k)) & np.uint32(255)).astype(np.float32)

    return {f"cvt_f32_ubyte{k}": VectorOp(take(k), "u") for k in range(4)}


def _make_normal(low: float, high: float) -> Callable[[Array, Array], Array]:
    def convert(a: Array) -> Array:
        values = np.clip(np.where(np.isnan(a), 0, a), low, 1.0)
        return np.rint(values * high).astype(np.int64).astype(np.uint32) & _LOW

    return lambda a, b: _pack(convert(a), convert(b))


OPERATIONS: dict[str, VectorOp] = {
    **_make_bytes(),
    "cvt_f32_i32": VectorOp(lambda a: a.astype(np.float32), "i"),
    "cvt_f32_u32": VectorOp(lambda a: a.astype(np.float32), "u"),
    "cvt_i32_f32": VectorOp(_to_integer(-(2.0**31), 2.0**31 - 1, np.int32), "f"),
    "cvt_u32_f32": VectorOp(_to_integer(0, 2.0**32 - 1, np.uint32), "f"),
    "cvt_rpi_i32_f32": VectorOp(
        lambda a: _to_integer(-(2.0**31), 2.0**31 - 1, np.int32)(np.floor(a.astype(np.float64) + 0.5)), "f"
    ),
    "cvt_flr_i32_f32": VectorOp(
        lambda a: _to_integer(-(2.0**31), 2.0**31 - 1, np.int32)(np.floor(a.astype(np.float64))), "f"
    ),
    "cvt_f16_f32": VectorOp(lambda a: encode_f16(a).astype(np.uint32), "f"),
    "cvt_f32_f16": VectorOp(lambda a: decode_f16(a & _LOW), "u"),
    "cvt_f32_bf16": VectorOp(lambda a: decode_bf16(a & _LOW), "u"),
    "cvt_f64_f32": VectorOp(lambda a: a.astype(np.float64), "f", "q"),
    "cvt_f64_i32": VectorOp(lambda a: a.astype(np.float64), "i", "q"),
    "cvt_f64_u32": VectorOp(lambda a: a.astype(np.float64), "u", "q"),
    "cvt_f32_f64": VectorOp(lambda a: a.astype(np.float32), "d"),
    "cvt_i32_f64": VectorOp(_to_integer(-(2.0**31), 2.0**31 - 1, np.int32), "d"),
    "cvt_u32_f64": VectorOp(_to_integer(0, 2.0**32 - 1, np.uint32), "d"),
    "cvt_pk_bf16_f32": VectorOp(lambda a, b: _pack(encode_bf16(a), encode_bf16(b)), "ff"),
    "cvt_pk_f16_f32": VectorOp(lambda a, b: _pack(encode_f16(a), encode_f16(b)), "ff"),
    "cvt_pkrtz_f16_f32": VectorOp(lambda a, b: _pack(_round_to_zero_half(a), _round_to_zero_half(b)), "ff"),
    "cvt_pknorm_i16_f32": VectorOp(_make_normal(-1.0, 32767), "ff"),
    "cvt_pknorm_u16_f32": VectorOp(_make_normal(0.0, 65535), "ff"),
    "pack_b32_f16": VectorOp(lambda a, b: _pack(a & _LOW, b & _LOW), "uu"),
}
"""v_NAME, lane by lane."""


def find_scale(scale: Array) -> Array:
    """2 to the (unbiased) exponent of an fp32, as float64: what v_cvt_scalef32_* uses of its scale."""
    exponent = ((scale >> np.uint32(23)) & np.uint32(255)).astype(np.int32)
    return np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 127))


def unpack_source(name: str, word: Array, selection: tuple[int, ...]) -> tuple[Array, Array]:
    """The two values, float64, that op_sel takes of a source dword in fp4 (a byte), fp8 or bf8 (a word)."""
    if name == "fp4":
        byte = (word >> np.uint32(8 * (selection[0] + 2 * selection[1]))) & np.uint32(255)
        values = decode("e2m1", unpack_nibbles(byte[..., None]))
        return values[..., 0].astype(np.float64), values[..., 1].astype(np.float64)
    half = (word >> np.uint32(16 * selection[0])) & _LOW
    low, high = (decode(FORMATS[name], part & np.uint32(255)) for part in (half, half >> np.uint32(8)))
    return low.astype(np.float64), high.astype(np.float64)


def unpack_floats(name: str, word: Array) -> tuple[Array, Array]:
    """Two bf16 or f16 of a dword as float64."""
    read = decode_bf16 if name == "bf16" else decode_f16
    return read(word & _LOW).astype(np.float64), read(word >> np.uint32(16)).astype(np.float64)


def encode_pair(name: str, low: Array, high: Array) -> Array:
    """Two float64 to packed codes: 8 bits for fp4, 16 for fp8 and bf8; to nearest even, saturating."""
    first, second = encode(FORMATS[name], low).astype(np.uint32), encode(FORMATS[name], high).astype(np.uint32)
    packed: Array = first | (second << np.uint32(4 if name == "fp4" else 8))
    return packed


def _finish(
    i: Instruction, step: Callable[[Waves], None], texts: tuple[str, ...], targets: list[int], keep: bool
) -> Decoded:
    """Reads, writes and undefined bits of a conversion."""
    sources = [make_source(parse_operand(text), "u") for text in texts]
    sources += [make_source(parse_operand(i.operands[0]), "u")] if keep else []

    def taint(w: Waves) -> Unknowns:
        mask = collapse([source.unknown(w) for source in sources])
        return [(target, mask) for target in targets]

    return Decoded(step, [r for source in sources for r in source.registers], targets, taint)


def build_widen(i: Instruction, to: str, name: str, scaled: bool) -> Decoded | None:
    """v_cvt_scalef32_pk_{f32,bf16,f16}_{fp8,bf8,fp4} and v_cvt_pk_f32_{fp8,bf8}."""
    if set(i.modifiers) - {"op_sel", "src0_sel"}:
        return None
    target = parse_operand(i.operands[0])
    source = make_source(parse_operand(i.operands[1]), "u")
    scale = make_source(parse_operand(i.operands[2]), "u") if scaled else None
    selection = i.list_modifier("op_sel", (0, 0, 0))
    if "src0_sel" in i.modifiers:
        selection = ({"WORD_0": 0, "WORD_1": 1}[i.modifiers["src0_sel"]], 0, 0)
    index = target.index

    def step(w: Waves) -> None:
        factor = 1.0 if scale is None else find_scale(scale.read(w))
        low, high = (value * factor for value in unpack_source(name, source.read(w), selection))
        if to == "f32":
            w.put(index, low.astype(np.float32))
            w.put(index + 1, high.astype(np.float32))
        elif to == "bf16":
            w.put(index, _pack(encode_bf16(low.astype(np.float32)), encode_bf16(high.astype(np.float32))))
        else:
            w.put(index, _pack(encode_f16(low), encode_f16(high)))

    return _finish(i, step, i.operands[1:], target.list_registers(), False)


def build_single(i: Instruction, name: str, scaled: bool) -> Decoded | None:
    """v_cvt_scalef32_f32_{fp8,bf8} (byte by op_sel) and v_cvt_f32_{fp8,bf8} (byte by SDWA)."""
    if set(i.modifiers) - {"op_sel", "src0_sel"}:
        return None
    target = parse_operand(i.operands[0])
    source = make_source(parse_operand(i.operands[1]), "u")
    scale = make_source(parse_operand(i.operands[2]), "u") if scaled else None
    select = i.list_modifier("op_sel", (0, 0, 0))
    byte = select[0] + 2 * select[1]
    if "src0_sel" in i.modifiers:
        byte = int(i.modifiers["src0_sel"][-1])
    index = target.index

    def step(w: Waves) -> None:
        factor = 1.0 if scale is None else find_scale(scale.read(w))
        code = (source.read(w) >> np.uint32(8 * byte)) & np.uint32(255)
        w.put(index, (decode(FORMATS[name], code).astype(np.float64) * factor).astype(np.float32))

    return _finish(i, step, i.operands[1:], target.list_registers(), False)


def build_narrow(i: Instruction, to: str, source: str, scaled: bool) -> Decoded | None:
    """v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,bf16,f16} (values divided by the scale) and v_cvt_pk_{fp8,bf8}_f32; the rest
    of the target register stays."""
    if set(i.modifiers) - {"op_sel"}:
        return None
    target, *given = (parse_operand(text) for text in i.operands)
    values = given[: 2 if source == "f32" else 1]
    readers = [make_source(operand, "f" if source == "f32" else "u") for operand in values]
    scale = make_source(given[-1], "u") if scaled else None
    selection = i.list_modifier("op_sel", (0, 0, 0, 0))
    if to == "fp4":
        place, width = 8 * (selection[2] + 2 * selection[3]), 8
    else:
        place, width = 16 * selection[2 if len(i.modifiers.get("op_sel", "")) <= 7 else 3], 16
    field, index = np.uint32(((1 << width) - 1) << place), target.index

    def step(w: Waves) -> None:
        factor = 1.0 if scale is None else find_scale(scale.read(w))
        if source == "f32":
            low, high = (reader.read(w).astype(np.float64) for reader in readers)
        else:
            low, high = unpack_floats(source, readers[0].read(w))
        packed = encode_pair(to, low / factor, high / factor) << np.uint32(place)
        w.put(index, packed | (w.vector[index, w.rows] & ~field))

    def taint(w: Waves) -> Unknowns:
        sources = [*readers, scale] if scale else readers
        mask = collapse([source.unknown(w) for source in sources])
        return [(index, (mask & field) | (w.vector_unknown[index, w.rows] & ~field))]

    reads = [r for s in ([*readers, scale] if scale else readers) for r in s.registers]
    return Decoded(step, [*reads, index], [index], taint)


def build(i: Instruction) -> Decoded | None:
    """Conversions; None for anything else."""
    if not i.op.startswith(("v_cvt_", "v_pack_")):
        return None
    name, encoding = strip_encoding(i.op)
    if name in OPERATIONS:
        return build_vector(i, OPERATIONS[name], encoding, True)
    match = re.match(r"^cvt_(scalef32_)?pk_(f32|bf16|f16)_(fp8|bf8|fp4)$", name)
    if match and (match[1] or (match[2] == "f32" and match[3] != "fp4")):
        return build_widen(i, match[2], match[3], bool(match[1]))
    match = re.match(r"^cvt_(scalef32_)?f32_(fp8|bf8)$", name)
    if match:
        return build_single(i, match[2], bool(match[1]))
    match = re.match(r"^cvt_(scalef32_)?pk_(fp8|bf8|fp4)_(f32|bf16|f16)$", name)
    if match and (match[1] or (match[3] == "f32" and match[2] != "fp4")):
        return build_narrow(i, match[2], match[3], bool(match[1]))
    return None
