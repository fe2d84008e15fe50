"""Quantized weights of a checkpoint, as a model spells them: read in packed form, decoded, or streamed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mmcompile.capture.tensors import Checkpoint, list_some
from mmcompile.core.errors import CheckpointError
from mmcompile.core.ops.linear import nvfp4_dequantize
from mmcompile.core.ops.linear_mxfp8 import mxfp8_dequantize
from mmcompile.core.ops.moe_nvfp4 import nvfp4_dequantize_experts

Nvfp4 = tuple[Tensor, Tensor, Tensor]
Mxfp8 = tuple[Tensor, Tensor]


@dataclass
class PackedWeights:
    """What the checkpoint stores quantized, by module path; a stack of experts by the name of its parameter.

    Attributes:
        nvfp4: (packed, scale, global scale) of a weight [n, k] or of experts [experts, n, k]; the multiplier is fp32,
            one a row. mxfp8: (values, scale).
        left_out: tensors of a multimodal checkpoint that the text decoder does not need, by part.
    """

    nvfp4: dict[str, Nvfp4] = field(default_factory=dict)
    mxfp8: dict[str, Mxfp8] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """A clause on what was left out, "" if nothing was."""
        parts = ", ".join(f"{part} ({count} tensors)" for part, count in self.left_out.items())
        return f", left out: {parts}" if parts else ""

    def decode(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight of one module or the stack of that name, in ``dtype``."""
        if name in self.mxfp8:
            return mxfp8_dequantize(*self.mxfp8[name], dtype)
        parts = self.nvfp4[name]
        return (nvfp4_dequantize_experts if parts[0].ndim == 3 else nvfp4_dequantize)(*parts, dtype)

    def __iter__(self) -> Iterator[str]:
        yield from self.nvfp4
        yield from self.mxfp8


def load_packed(checkpoint: Checkpoint, parameters: Mapping[str, Tensor]) -> PackedWeights:
    """Read every quantized weight of a checkpoint whose experts are stacked.

    Raises CheckpointError if the model has no such module, if a shape differs from the parameter's, or for parts that
    are damaged.
    """
    stored = {**checkpoint.nvfp4, **checkpoint.mxfp8, **checkpoint.experts}
    names = {module: name_parameter(checkpoint, module) for module in stored}
    unknown = {module for module, name in names.items() if name not in parameters}
    if unknown:
        raise CheckpointError(
            f"the model has no module {min(unknown)!r}",
            where=checkpoint.where,
            fix="check that config.json belongs to these weights",
        )
    wrong = {
        f"{names[module]}: {list(parts.shape)} instead of {list(parameters[names[module]].shape)}"
        for module, parts in stored.items()
        if tuple(parts.shape) != tuple(parameters[names[module]].shape)
    }
    if wrong:
        raise CheckpointError(
            f"tensors of the wrong shape: {list_some(wrong)}",
            where=checkpoint.where,
            fix="finish the download, or check that config.json belongs to these weights",
        )
    return PackedWeights(
        {module: checkpoint.load_nvfp4(module) for module in checkpoint.nvfp4}
        | {name: experts.load() for name, experts in checkpoint.experts.items()},
        {module: checkpoint.load_mxfp8(module) for module in checkpoint.mxfp8},
        dict(checkpoint.left_out),
    )


def name_parameter(checkpoint: Checkpoint, module: str) -> str:
    """The parameter that a quantized module or a stack of experts is in the model."""
    return module if module in checkpoint.experts else f"{module}.weight"


@dataclass(frozen=True)
class StoredWeight:
    """One weight as the checkpoint stores it.

    ``name``: of the parameter. ``parts``: (tensor,) if "plain"; else as in PackedWeights.
    """

    name: str
    format: Literal["plain", "nvfp4", "mxfp8"]
    parts: tuple[Tensor, ...]


def stream_weights(checkpoint: Checkpoint) -> Iterator[StoredWeight]:
    """Read every weight once, in the order of their names with numbers counted, so layer by layer.

    A weight is read when it is asked for. A caller that drops each before the next holds one at a time: at most 2.6 GiB
    for MiniMax-M3.1, the gate and up matrices of one layer's experts. Raises CheckpointError as loading them does.
    """
    modules = {name_parameter(checkpoint, m): m for m in (*checkpoint.nvfp4, *checkpoint.mxfp8, *checkpoint.experts)}
    for name in sorted((*checkpoint.tensors, *modules), key=_count_numbers):
        module = modules.get(name, "")
        if module in checkpoint.experts:
            yield StoredWeight(name, "nvfp4", checkpoint.experts[module].load())
        elif module in checkpoint.nvfp4:
            yield StoredWeight(name, "nvfp4", checkpoint.load_nvfp4(module))
        elif module in checkpoint.mxfp8:
            yield StoredWeight(name, "mxfp8", checkpoint.load_mxfp8(module))
        else:
            yield StoredWeight(name, "plain", (checkpoint.load(name),))


def _count_numbers(name: str) -> list[tuple[bool, int, str]]:
    """Sort key: path components, numbers by value and before words."""
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")]
