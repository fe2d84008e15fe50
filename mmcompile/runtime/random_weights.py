"""Random weights for a plan that was built without any: sane for their format, the same for a seed on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError
from mmcompile.core.plan import Buffer, Launch, Plan
from mmcompile.runtime.executor import torch_dtype

# Elements of the block that all weights are cut from. A prime, so that no row length divides it: rows do not repeat.
_PERIOD = 4_194_301
_DEVIATION = 0.02
_NORM_DEVIATION = 0.1
# NVFP4: codes have a root mean square of 2.9 and block scales one of 1.2, so that products have one near _DEVIATION.
_GLOBAL_SCALES = (0.004, 0.008)
_E4M3_HALF = 0x30  # the code of 0.5; the 16 codes from it on go up to 1.875
# MXFP8: all finite e4m3 codes have a root mean square of 96, and 2^(114 - 127) or 2^(115 - 127) brings it near 0.02.
_E8M0_LOW = 114

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_NORM_WEIGHTS = ("q_weight", "k_weight", "index_q_weight", "index_k_weight")
_QUANTIZERS = ("nvfp4_quantize", "nvfp4_quantize_experts", "mxfp8_quantize")
_MATRIX_OPS = ("linear", "embedding", "qkv_norm_rope_insert", "qkv_norm_rope_insert_index", *_QUANTIZERS)
_COPY = "aten.contiguous.default"
# What a parameter of an operation means by its name and dtype, where that says it for every operation.
_PARTS = {
    ("packed", "uint8"): "nvfp4 codes",
    ("gate_up_packed", "uint8"): "nvfp4 codes",
    ("down_packed", "uint8"): "nvfp4 codes",
    ("scale", "float8_e4m3fn"): "nvfp4 scale",
    ("gate_up_scale", "float8_e4m3fn"): "nvfp4 scale",
    ("down_scale", "float8_e4m3fn"): "nvfp4 scale",
    ("global_scale", "float32"): "nvfp4 global scale",
    ("gate_up_global_scale", "float32"): "nvfp4 global scale",
    ("down_global_scale", "float32"): "nvfp4 global scale",
    ("values", "float8_e4m3fn"): "mxfp8 values",
    ("scale", "uint8"): "mxfp8 scale",
}


@dataclass(frozen=True)
class Meaning:
    """What a weight is to its readers: "matrix", "bias", "norm" or a part of a quantized matrix.

    ``center``: the mean of "norm", 1 less what the operation adds to the weight.
    """

    kind: str
    center: float = 0.0


class RandomWeights:
    """The weights of one plan.

    A matrix or bias is normal with deviation 0.02, a norm's weight lies near what multiplies by one, all of them values
    of bf16, so that a build in float32 has the very same weights. Codes are uniform and scales positive, so that a
    quantized matrix has a deviation near 0.02 too. Everything is cut from blocks of
    _PERIOD elements, at a place that the seed and the buffer's name decide: that is as fast as copying.
    """

    def __init__(self, plan: Plan, seed: int) -> None:
        self.seed = seed
        self._plan = plan
        self._blocks: dict[tuple[Meaning, torch.dtype], Tensor] = {}

    def generate(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the named buffers, one at a time.

        Raises ArtifactError before the first one if the readers of any do not tell what it is.
        """
        buffers = [self._plan.buffers[name] for name in names]
        meanings = find_meanings(self._plan, buffers)
        return ((buffer.name, self._make(buffer, meanings[buffer.name])) for buffer in buffers)

    def _make(self, buffer: Buffer, meaning: Meaning) -> Tensor:
        dtype = torch_dtype(buffer)
        block = self._blocks.get((meaning, dtype))
        if block is None:
            block = self._blocks[meaning, dtype] = make_block(meaning, dtype, self.seed)
        tensor = torch.empty(tuple(map(int, buffer.shape)), dtype=dtype)
        digest = hashlib.sha256(f"{self.seed}:{buffer.name}".encode()).digest()
        _tile(tensor.view(-1), block, int.from_bytes(digest[:8], "little") % _PERIOD)
        return tensor


def _tile(target: Tensor, block: Tensor, offset: int) -> None:
    """Fill ``target`` with the block from ``offset`` on, over and over."""
    # One byte types are copied as bytes: torch has no fast copy of float8.
    if target.dtype.itemsize == 1:
        target, block = target.view(torch.uint8), block.view(torch.uint8)
    position = 0
    while position < target.numel():
        count = min(block.numel() - offset, target.numel() - position)
        target[position : position + count].copy_(block[offset : offset + count])
        position, offset = position + count, 0


def make_block(meaning: Meaning, dtype: torch.dtype, seed: int) -> Tensor:
    """_PERIOD values of a kind."""
    generator = torch.Generator().manual_seed(seed)
    if meaning.kind in ("matrix", "bias", "norm"):
        deviation = _NORM_DEVIATION if meaning.kind == "norm" else _DEVIATION
        values = torch.randn(_PERIOD, generator=generator).mul_(deviation).add_(meaning.center)
        return values.to(torch.bfloat16).to(dtype)
    if meaning.kind == "nvfp4 global scale":
        low, high = _GLOBAL_SCALES
        return torch.rand(_PERIOD, generator=generator).mul_(high - low).add_(low).to(dtype)
    codes = torch.randint(256, (_PERIOD,), generator=generator, dtype=torch.uint8)
    if meaning.kind == "nvfp4 scale":
        codes = _E4M3_HALF + codes % 16
    elif meaning.kind == "mxfp8 values":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    elif meaning.kind == "mxfp8 scale":
        codes = _E8M0_LOW + codes % 2
    return codes.view(dtype)


def find_meanings(plan: Plan, buffers: Sequence[Buffer]) -> dict[str, Meaning]:
    """What each buffer is, from the operations that read it. ArtifactError if they do not say, or disagree."""
    meanings: dict[str, Meaning] = {}
    wanted = {buffer.name: buffer for buffer in buffers}
    copies = _find_copies(plan)
    for phase in plan.phases.values():
        for launch in phase.launches:
            for parameter, view in launch.inputs.items():
                name = "" if view is None else copies.get(view.buffer, view.buffer)
                if name not in wanted or launch.op == _COPY:
                    continue
                found = _read_meaning(launch, parameter, wanted[name])
                if meanings.setdefault(name, found) != found:
                    raise _unclear(name, launch, f"is {found.kind} here and {meanings[name].kind} before")
    unread = sorted(wanted.keys() - meanings.keys())
    if unread:
        raise ArtifactError(f"no operation reads the weight {unread[0]!r}", fix="rebuild the artifact")
    return meanings


def _find_copies(plan: Plan) -> dict[str, str]:
    """Derived buffers that hold a weight in another order, with the weight: they are read in its place."""
    launches = plan.phases["load"].launches if "load" in plan.phases else ()
    sources = {launch.outputs[0].buffer: launch.inputs["arg0"] for launch in launches if launch.op == _COPY}
    return {name: view.buffer for name, view in sources.items() if view is not None}


def _read_meaning(launch: Launch, parameter: str, buffer: Buffer) -> Meaning:
    family, _, op = launch.op.partition(".")
    attributes: Mapping[str, Any] = launch.attributes
    if family == "mm" and buffer.dtype in _FLOATS:
        if parameter in _NORM_WEIGHTS or (op in ("rms_norm", "add_rms_norm") and parameter == "weight"):
            return Meaning("norm", 1.0 - float(attributes.get("weight_offset", 0.0)))
        if (op in _MATRIX_OPS and parameter == "weight") or (op == "moe" and parameter in ("gate_up", "down")):
            return Meaning("matrix")
        if parameter == "bias":
            return Meaning("bias")
    if family == "mm" and (parameter, buffer.dtype) in _PARTS:
        return Meaning(_PARTS[parameter, buffer.dtype])
    raise _unclear(buffer.name, launch, f"is {parameter!r} ({buffer.dtype}) of {launch.op}")


def _unclear(name: str, launch: Launch, what: str) -> ArtifactError:
    return ArtifactError(
        f"random values would have no meaning for the weight {name!r}, which {what}",
        where=f"launch {launch.name}",
        fix="build the artifact with --weights random, or with a checkpoint",
    )
