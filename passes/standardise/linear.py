"""Linear layers in every spelling become ``mm.linear``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmcompile.core.rewrite import Rewrite

DESCRIPTION = "linear layers become mm.linear"

aten = torch.ops.aten


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return aten.linear.default(x, weight, bias)


def _addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return aten.addmm.default(bias, x, aten.t.default(weight))


def _mm(x: Tensor, weight: Tensor) -> Tensor:
    return aten.mm.default(x, aten.t.default(weight))


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    return aten.matmul.default(x, aten.t.default(weight))


def _replace(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mm.linear.default(x, weight, bias)


def _replace_without_bias(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mm.linear.default(x, weight)


def _check(values: dict[str, Any]) -> str | None:
    weight, bias = values["weight"].meta["val"], values.get("bias")
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions, mm.linear needs 2"
    if weight.dtype != values["x"].meta["val"].dtype:
        return f"the weight is {weight.dtype}, the input {values['x'].meta['val'].dtype}"
    if bias is not None and bias.meta["val"].dim() != 1:
        return f"the bias has {bias.meta['val'].dim()} dimensions, mm.linear needs 1"
    return None


RULES = [
    Rewrite("linear", _linear, _replace, guard=_check),
    Rewrite("linear", _addmm, _replace, guard=_check),
    Rewrite("linear", _mm, _replace_without_bias, guard=_check),
    Rewrite("linear", _matmul, _replace_without_bias, guard=_check),
]
