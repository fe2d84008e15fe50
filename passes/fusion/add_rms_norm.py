"""rms_norm(x + residual)  ->  add_rms_norm(x, residual)     one read of both instead of a write and two reads."""

from __future__ import annotations

from typing import Any

import torch

from mmcompile.core.rewrite import Rewrite

_MM = torch.ops.mm
_ATEN = torch.ops.aten


def pattern(x: Any, residual: Any, weight: Any, eps: Any, weight_offset: Any, round_before_scale: Any) -> Any:
    total = _ATEN.add.Tensor(x, residual)
    return _MM.rms_norm.default(total, weight, eps, weight_offset, round_before_scale), total


def replacement(x: Any, residual: Any, weight: Any, eps: Any, weight_offset: Any, round_before_scale: Any) -> Any:
    both = _MM.add_rms_norm.default(x, residual, weight, eps, weight_offset, round_before_scale)
    return both[0], both[1]


def guard(values: dict[str, Any]) -> str | None:
    x, residual = values["x"], values["residual"]
    if not all(isinstance(v, torch.fx.Node) for v in (x, residual)):
        return "a constant is added, not a residual"
    a, b = x.meta["val"], residual.meta["val"]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"the summands differ: {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
    return None


RULES = [Rewrite("add_rms_norm", pattern, replacement, guard, enough=1)]
