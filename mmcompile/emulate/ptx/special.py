"""Special registers in every lane (PTX ISA, Special Registers)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mmcompile.emulate.ptx.group import Group

_MULTIPROCESSORS = 132


def make_special(group: Group, name: str) -> tuple[npt.NDArray[Any], bool]:
    """The register ``name`` in every lane, and whether it stays as it is."""
    thread = np.tile(np.arange(group.threads, dtype=np.uint32), group.blocks)
    if name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
        # Time is the number of instructions that a warp has executed, in whatever unit the register counts.
        kind = np.uint32 if name in ("%clock", "%globaltimer_lo") else np.uint64
        return np.full(group.lanes, group.executed // 32).astype(kind), False
    if name == "%laneid":
        return thread % np.uint32(32), True
    if name == "%warpid":
        return thread // np.uint32(32), True
    if name.startswith("%lanemask"):
        return _make_lane_mask(thread % np.uint32(32), name[-2:]), True
    if name[-2:-1] == "." and name[-1] in "xyz":
        return _make_position(group, thread, name[1:-2], "xyz".index(name[-1])), True
    constants = {
        "%nsmid": _MULTIPROCESSORS, "%cluster_nctarank": 1, "%cluster_ctarank": 0, "%locality_domain_id": 0,
        "%dynamic_smem_size": group.launch.shared_bytes, "%total_smem_size": group.shared_bytes,
    }  # fmt: skip
    if name == "%smid":
        return np.repeat(group.block_ids[:, 0] % np.uint32(_MULTIPROCESSORS), group.threads), True
    if name not in constants:
        raise group.fault("unknown instruction", f"special register {name}")
    return np.full(group.lanes, constants[name], np.uint32), True


def _make_lane_mask(lane: npt.NDArray[np.uint32], relation: str) -> npt.NDArray[Any]:
    below = (np.uint32(1) << lane) - np.uint32(1)
    here = np.uint32(1) << lane
    masks = {"lt": below, "le": below | here, "eq": here, "gt": ~(below | here), "ge": ~below}
    return masks[relation]


def _make_position(group: Group, thread: npt.NDArray[np.uint32], name: str, axis: int) -> npt.NDArray[Any]:
    """Thread and block coordinates; threads lie along x, every cluster has one block."""
    if name == "tid":
        return thread if axis == 0 else np.zeros_like(thread)
    if name in ("ctaid", "clusterid"):
        return np.repeat(group.block_ids[:, axis], group.threads)
    values = {
        "ntid": group.threads if axis == 0 else 1, "nctaid": group.grid[axis], "nclusterid": group.grid[axis],
        "cluster_ctaid": 0, "cluster_nctaid": 1,
    }  # fmt: skip
    return np.full(group.lanes, values[name], np.uint32)
