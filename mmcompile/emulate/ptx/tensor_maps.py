"""TMA descriptors (tensor maps): which global bytes a box covers, where they lie in shared memory, tensormap.replace.

PTX ISA, "Tensors" (bounding box, out-of-boundary access, swizzling modes), "cp.async.bulk.tensor", "tensormap.replace".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import TensorMap
from mmcompile.emulate.ptx.descriptors import swizzle

Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Fields = Mapping[tuple[str, int], int]
"""Fields of a descriptor that a kernel writes, by name and ordinal (tensormap.replace)."""

SHARED_ALIGNMENT = 128
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, 11: 4, 12: 4}
"""tensormap.replace, field .elemtype: u8, u16, u32, s32, u64, s64, f16, f32, f32.ftz, f64, bf16, tf32, tf32.ftz."""
_SPANS = (0, 32, 64, 128)


@dataclass(frozen=True)
class Box:
    """The elements of one TMA access, in the order of shared memory.

    Attributes: addresses [elements]: device addresses (uint64), meaningless where not ``inside``. inside [elements]:
        within the tensor. offsets [elements]: bytes from the shared address, not swizzled. element_bytes: of one
        element. transferred_bytes: what complete_tx counts: the whole box, also elements outside of the tensor.
    """

    addresses: npt.NDArray[np.uint64]
    inside: Mask
    offsets: Index
    element_bytes: int

    @property
    def transferred_bytes(self) -> int:
        """Bytes that the mbarrier counts."""
        return len(self.offsets) * self.element_bytes


def locate_box(tensor: TensorMap, coordinates: Sequence[int], *, rows: bool = False) -> Box:
    """The box of ``tensor`` at ``coordinates`` (innermost first; elements).

    Args:
        rows: tile::gather4 and tile::scatter4: one column coordinate, then four row coordinates.

    Padded fp4: coordinates count 4-bit elements, the map counts bytes of two.
    """
    position = list(coordinates)
    if tensor.padded_fp4:
        position[0] //= 2
    rank = len(tensor.box)
    if rows:
        axes = [np.array(position[1:5]), position[0] + np.arange(tensor.box[1])]
    else:
        axes = [position[rank - 1 - axis] + np.arange(tensor.box[axis]) for axis in range(rank)]
    inside, offset = np.ones(1, np.bool_), np.zeros(1, np.int64)
    for axis, places in enumerate(axes):
        step = tensor.element_bytes if axis == rank - 1 else tensor.strides_bytes[axis]
        here = (places >= 0) & (places < tensor.shape[axis])
        inside = (inside[:, None] & here[None, :]).reshape(-1)
        offset = (offset[:, None] + (places * step)[None, :]).reshape(-1)
    addresses = (offset + tensor.address).astype(np.uint64)
    shared = np.arange(len(offset), dtype=np.int64) * tensor.element_bytes
    if tensor.padded_fp4:
        shared = shared // 8 * 16 + shared % 8
    return Box(addresses, inside, shared, tensor.element_bytes)


def place_box(tensor: TensorMap, box: Box, shared_address: int) -> Index:
    """Shared-memory addresses [elements] of a box at ``shared_address``.

    Raises EmulationFault: misaligned shared address, inner dimension longer than the swizzle pattern.
    """
    if shared_address % SHARED_ALIGNMENT:
        raise EmulationFault("misaligned", f"TMA shared address {shared_address} is not a multiple of 128")
    inner = tensor.box[-1] * tensor.element_bytes * (2 if tensor.padded_fp4 else 1)
    if tensor.swizzle and inner > tensor.swizzle:
        raise EmulationFault("illegal", f"TMA box of {inner} bytes is longer than its swizzle of {tensor.swizzle}")
    if inner % 16:
        raise EmulationFault("illegal", f"TMA box of {inner} bytes is not a multiple of 16 bytes")
    return swizzle(shared_address + box.offsets, tensor.swizzle)


def build_map(fields: Fields) -> TensorMap:
    """A descriptor made by tensormap.replace. Raises EmulationFault for a missing or unmodelled field."""
    missing = [name for name in ("rank", "global_address", "elemtype") if (name, 0) not in fields]
    if missing:
        raise EmulationFault("uninitialised", f"tensor map used before its field {missing[0]} was written")
    rank = fields["rank", 0] + 1
    element_bytes = _ELEMENT_BYTES.get(fields["elemtype", 0])
    if element_bytes is None:
        raise EmulationFault("illegal", f"tensor map element type {fields['elemtype', 0]}, not modelled")
    if fields.get(("interleave_layout", 0)):
        raise EmulationFault("illegal", "interleaved tensor map, not modelled")
    if any(fields.get(("element_stride", axis), 1) != 1 for axis in range(rank)):
        raise EmulationFault("illegal", "tensor map with element strides, not modelled")
    axes = range(rank - 1, -1, -1)
    try:
        shape = tuple(fields["global_dim", axis] for axis in axes)
        strides = tuple(fields["global_stride", axis - 1] if axis else element_bytes for axis in axes)
        box = tuple(fields["box_dim", axis] for axis in axes)
    except KeyError as missing_field:
        raise EmulationFault("uninitialised", f"tensor map without field {missing_field.args[0]}") from None
    span = fields.get(("swizzle_mode", 0), 0)
    if span >= len(_SPANS):
        raise EmulationFault("illegal", f"tensor map swizzle mode {span}, not modelled")
    return TensorMap(fields["global_address", 0], element_bytes, shape, strides, box, _SPANS[span])
