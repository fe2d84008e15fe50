"""The projection in front of the fused QKV kernels, by weight format: in their tile, or as an operation of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mmcompile.core.kernel import KernelTemplate, OpCall, Operand
from mmcompile.core.spec import Architecture
from mmcompile.targets._kernels import linear, linear_mxfp8, linear_nvfp4
from mmcompile.targets._kernels.common import ELEMENT_SIZES, need
from mmcompile.targets._kernels.linear import Blocks

_PROJECTED = ("x", "weight", "packed", "values", "scale", "global_scale", "bias")
Intrinsics = Callable[[Architecture, str], tuple[dict[str, Any], dict[str, bool]]]


@dataclass(frozen=True)
class WeightFormat:
    """How a projection's weight is stored.

    Attributes:
        weights: the weight's operands, its values first. templates: kernels of the linear layer.
        intrinsics: of an architecture and x's dtype, the functions that make a tile read the weight, and its ledger.
        block: elements of K that share a scale. wide_float16: float16 activations are multiplied in fp32.
    """

    weights: tuple[str, ...]
    templates: tuple[KernelTemplate, ...]
    intrinsics: Intrinsics
    block: int = 1
    wide_float16: bool = False

    def multiplied_dtype(self, dtype: str) -> str:
        """What the matrix instructions take for activations of ``dtype``."""
        return "float32" if self.wide_float16 and dtype == "float16" else dtype

    def fit_blocks(self, blocks: Blocks) -> Blocks:
        """At least one scale's elements of K in a slice."""
        return replace(blocks, k=max(blocks.k, self.block))


def _plain(arch: Architecture, dtype: str) -> tuple[dict[str, Any], dict[str, bool]]:
    return {}, {}


FORMATS = {
    "": WeightFormat(("weight",), linear.TEMPLATES, _plain),
    "_nvfp4": WeightFormat(
        linear_nvfp4.WEIGHTS, linear_nvfp4.TEMPLATES, linear_nvfp4.nvfp4_intrinsics, linear_nvfp4.BLOCK
    ),
    "_mxfp8": WeightFormat(
        linear_mxfp8.WEIGHTS, linear_mxfp8.TEMPLATES, linear_mxfp8.mxfp8_intrinsics, linear_mxfp8.BLOCK, True
    ),
}
"""By the suffix of an operation's name."""


def find_format(call: OpCall) -> WeightFormat:
    """The format that the name of the operation ends in."""
    return next(FORMATS[suffix] for suffix in ("_nvfp4", "_mxfp8", "") if call.op.endswith(suffix))


def count_rows(call: OpCall) -> int:
    """Rows of the projection's weight."""
    return int(need(call, find_format(call).weights[0]).shape[0])


def element_size(call: OpCall) -> int:
    """Bytes of an activation as the matrix instructions take it."""
    return ELEMENT_SIZES[find_format(call).multiplied_dtype(need(call, "x").dtype)]


def _projected(call: OpCall) -> Operand:
    """The projection's result, [tokens, rows of the weight] in x's dtype."""
    x, width = need(call, "x"), count_rows(call)
    return Operand((x.shape[0], width), (width, 1), x.dtype)


def take_projection(call: OpCall) -> OpCall:
    """The linear layer inside a fused operation; delta is its residual."""
    operands = {k: v for k, v in call.operands.items() if k in _PROJECTED} | {"residual": call.operands.get("delta")}
    attributes = {"activation": "none", "phase": call.attributes.get("phase", "decode")}
    return OpCall(find_format(call).templates[0].op, operands, (_projected(call),), attributes)


def take_insertion(call: OpCall, op: str) -> OpCall:
    """What follows the projection inside a fused operation, as operation ``op``."""
    others = {k: v for k, v in call.operands.items() if k not in (*_PROJECTED, "delta")}
    return OpCall(op, {"qkv": _projected(call)} | others, call.results, dict(call.attributes))
