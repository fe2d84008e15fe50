"""lookups in an embedding table become mm.embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.core.rewrite import Rewrite

DESCRIPTION = "embedding lookups become mm.embedding"
EFFECT = "bitwise"


def _embedding(weight: Tensor, ids: Tensor, padding_idx: int, scale_grad_by_freq: bool, sparse: bool) -> Tensor:
    return torch.ops.aten.embedding.default(weight, ids, padding_idx, scale_grad_by_freq, sparse)


def _replace(weight: Tensor, ids: Tensor) -> Tensor:
    return torch.ops.mm.embedding.default(ids, weight)


RULES = [
    Rewrite(
        "embedding",
        _embedding,
        _replace,
        irrelevant=(
            ("padding_idx", "affects gradients only"),
            ("scale_grad_by_freq", "affects gradients only"),
            ("sparse", "affects gradients only"),
        ),
    )
]
