"""The 32-bit instruction descriptor of tcgen05.mma: shape, types, transposition, scale factors.

PTX ISA, "Instruction descriptor" and "Matrix shape" of tcgen05.mma. K is 32 bytes of elements unless a bit says more:
K=64 of 8-bit and K=128 of 4-bit elements on sm_107, K=96 of 4-bit elements on sm_103a and sm_107a.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NoReturn

from mmcompile.emulate.faults import EmulationFault

_SMALL_FLOATS = {0: "e4m3", 1: "e5m2", 3: "e2m3 padded", 4: "e3m2 padded", 5: "e2m1 padded"}
_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _SMALL_FLOATS,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _SMALL_FLOATS,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
"""Element types of each .kind by their code. Padded: see ``descriptors.ELEMENT_BITS``."""
_ACCUMULATORS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
_DEPTHS = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
_SCALE_IDENTIFIERS = {1: (0, 1, 2, 3), 2: (0, 2), 3: (0, 1, 2, 3), 4: (0,), 6: (0, 2), 8: (0,)}
"""Valid scale factor IDs by the number of scale factors of a row ("Scale Factor A ID")."""


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one tcgen05.mma computes: D [rows, columns] = A [rows, depth] B [columns, depth]^T (+ D).

    Attributes:
        a_type, b_type: keys of ``descriptors.ELEMENT_BITS``. d_type: f16, f32 or s32. a_sign, b_sign: -1 if negated.
        a_transposed, b_transposed: MN-major. saturate: of s32. scale_type: "ue8m0", "ue4m3", or "" without block
        scaling. scale_block: elements of a row for each scale factor. a_scale, b_scale: scale factor IDs.
    """

    rows: int
    columns: int
    depth: int
    a_type: str
    b_type: str
    d_type: str
    a_sign: int = 1
    b_sign: int = 1
    a_transposed: bool = False
    b_transposed: bool = False
    saturate: bool = False
    scale_type: str = ""
    scale_block: int = 0
    a_scale: int = 0
    b_scale: int = 0

    @property
    def scales(self) -> int:
        """Scale factors of a row."""
        return self.depth // self.scale_block


@functools.lru_cache(256)
def parse_instruction_descriptor(bits: int, kind: str, scale_block: int, target: str) -> InstructionDescriptor:
    """Decode.

    Args:
        kind: of .kind::. scale_block: 16 or 32 with block scaling, else 0. target: e.g. "sm_103a".

    Raises EmulationFault("illegal"): reserved bits, sparsity, or a shape or type that the kind or target lacks.
    """
    fields = _Fields(bits)
    if fields.take(0, 3):
        fields.refuse("asks for sparsity")
    scaled = kind in BLOCK_SCALED
    types = _TYPES[kind]
    a_type, b_type = types.get(fields.take(7, 3)), types.get(fields.take(10, 2 if kind.startswith("mxf4") else 3))
    if a_type is None or b_type is None:
        fields.refuse(f"has element types that .kind::{kind} lacks")
    depth = _find_depth(fields, kind, target)
    columns = fields.take(17, 6) * 8
    rows = fields.take(27, 2) * 128 if scaled else fields.take(24, 5) * 16
    smallest = 16 if rows == 128 and not scaled else 8
    if rows not in ((128,) if scaled else (64, 128)) or not smallest <= columns <= 256 or columns % smallest:
        fields.refuse(f"has the shape M={rows}, N={columns}")
    if kind == "i8" and columns > 32 and columns % 16:
        fields.refuse(f"has the shape M={rows}, N={columns} of integers")
    signs = (-1 if fields.take(13, 1) else 1, -1 if fields.take(14, 1) else 1)
    transposed = (bool(fields.take(15, 1)), bool(fields.take(16, 1)))
    if any(t and _is_packed(name) for t, name in zip(transposed, (a_type, b_type), strict=True)):
        fields.refuse("transposes 4 or 6-bit elements")
    if scaled:
        if depth == 64 and kind == "mxf8f6f4":
            a_type, b_type = a_type.split()[0], b_type.split()[0]
        return _with_scales(
            fields, kind, InstructionDescriptor(rows, columns, depth, a_type, b_type, "f32", *signs, *transposed),
            scale_block,
        )  # fmt: skip
    d_type = _ACCUMULATORS[kind].get(fields.take(4, 2))
    if d_type is None or fields.take(6, 1) or fields.take(23, 1) or fields.take(30, 2):
        fields.refuse("has an accumulator type that the kind lacks, or reserved bits")
    if kind == "i8" and target != "sm_100a":
        fields.refuse(f"asks for .kind::i8, which {target} lacks")
    saturate = bool(fields.take(3, 1))
    if saturate and kind != "i8":
        fields.refuse("saturates floats")
    return InstructionDescriptor(rows, columns, depth, a_type, b_type, d_type, *signs, *transposed, saturate)


class _Fields:
    """The bit fields of a descriptor."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def take(self, first: int, count: int) -> int:
        """``count`` bits from bit ``first`` on."""
        return self._bits >> first & ((1 << count) - 1)

    def refuse(self, why: str) -> NoReturn:
        """Raise EmulationFault("illegal")."""
        raise EmulationFault("illegal", f"instruction descriptor 0x{self._bits:08x} {why}")


def _is_packed(element_type: str) -> bool:
    return element_type == "e2m1" or element_type.endswith("padded")


def _find_depth(fields: _Fields, kind: str, target: str) -> int:
    depth = _DEPTHS[kind]
    doubled = {"f8f6f4": 29, "mxf8f6f4": 31, "mxf4": 3, "mxf4nvf4": 3}.get(kind)
    if doubled is not None and fields.take(doubled, 1):
        if not target.startswith("sm_107"):
            fields.refuse(f"asks for K={2 * depth}, which {target} lacks")
        return 2 * depth
    if kind.startswith("mxf4") and fields.take(31, 1):
        if target not in ("sm_103a", "sm_107a"):
            fields.refuse(f"asks for K=96, which {target} lacks")
        return 96
    if kind in ("f16", "tf32", "i8") and fields.take(29, 1):
        fields.refuse("has reserved bit 29 set")
    return depth


def _with_scales(
    fields: _Fields, kind: str, plain: InstructionDescriptor, scale_block: int
) -> InstructionDescriptor:
    if fields.take(6, 1) or fields.take(24, 3) or (kind == "mxf8f6f4" and fields.take(3, 1)):
        fields.refuse("has reserved bits")
    scale_type = "ue8m0" if fields.take(23, 1) else "ue4m3"
    if scale_block not in ((16, 32) if kind == "mxf4nvf4" else (32,)):
        fields.refuse(f"is of .kind::{kind}, which has no scale blocks of {scale_block}")
    if scale_type == "ue4m3" and kind != "mxf4nvf4":
        fields.refuse(f"has ue4m3 scale factors, which .kind::{kind} lacks")
    a_scale, b_scale = fields.take(29, 2), fields.take(4, 2)
    valid = _SCALE_IDENTIFIERS[plain.depth // scale_block]
    if a_scale not in valid or b_scale not in valid:
        fields.refuse(f"has scale factor IDs {a_scale} and {b_scale}, valid are {valid}")
    values = {**plain.__dict__, "scale_type": scale_type, "scale_block": scale_block}
    return InstructionDescriptor(**{**values, "a_scale": a_scale, "b_scale": b_scale})
