"""swiglu(split(linear(x, [gate; up])))  ->  linear(x, [gate; up], activation="swiglu")     saves a round trip."""

from __future__ import annotations

import operator
from typing import Any

import torch

from mmcompile.core.rewrite import Rewrite

_MM = torch.ops.mm
_SPLIT = torch.ops.aten.split_with_sizes.default


def _activate(wide: Any, sizes: Any) -> Any:
    parts = _SPLIT(wide, sizes, -1)
    return _MM.swiglu.default(operator.getitem(parts, 0), operator.getitem(parts, 1))


def pattern(x: Any, weight: Any, bias: Any, sizes: Any) -> Any:
    return _activate(_MM.linear.default(x, weight, bias, None, "none"), sizes)


def replacement(x: Any, weight: Any, bias: Any) -> Any:
    return _MM.linear.default(x, weight, bias, None, "swiglu")


def pattern_nvfp4(x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any, sizes: Any) -> Any:
    return _activate(_MM.linear_nvfp4.default(x, packed, scale, global_scale, bias, None, "none"), sizes)


def replacement_nvfp4(x: Any, packed: Any, scale: Any, global_scale: Any, bias: Any) -> Any:
    return _MM.linear_nvfp4.default(x, packed, scale, global_scale, bias, None, "swiglu")


def pattern_mxfp8(x: Any, values: Any, scale: Any, bias: Any, sizes: Any) -> Any:
    return _activate(_MM.linear_mxfp8.default(x, values, scale, bias, None, "none"), sizes)


def replacement_mxfp8(x: Any, values: Any, scale: Any, bias: Any) -> Any:
    return _MM.linear_mxfp8.default(x, values, scale, bias, None, "swiglu")


def guard(values: dict[str, Any]) -> str | None:
    sizes = values["sizes"]
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        return f"the projection is split into {sizes}, not into equal gate and up halves"
    return None


_IRRELEVANT = (("sizes", "the guard demands two equal halves, which is what the activation means"),)
RULES = [
    Rewrite("linear_swiglu", pattern, replacement, guard, _IRRELEVANT),
    Rewrite("linear_nvfp4_swiglu", pattern_nvfp4, replacement_nvfp4, guard, _IRRELEVANT),
    Rewrite("linear_mxfp8_swiglu", pattern_mxfp8, replacement_mxfp8, guard, _IRRELEVANT),
]
