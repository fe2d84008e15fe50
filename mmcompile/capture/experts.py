"""Expert weights: checkpoints hold a matrix for each expert, transformers' modules one tensor for all of a layer."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from mmcompile.capture.tensors import Checkpoint, LazyTensor
from mmcompile.core.errors import CheckpointError

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# Parameter of the module -> the matrices that it stacks, one below the other, in each spelling that checkpoints use.
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_OLD_LAYER, _NEW_LAYER = ".block_sparse_moe.", ".mlp."


def stack_experts(checkpoint: Checkpoint, parameters: Container[str]) -> Checkpoint:
    """The checkpoint as a model with these parameters spells it.

    ``<layer>.experts.<i>.gate_proj`` and ``up_proj`` [n, k] become ``<layer>.experts.gate_up_proj`` [experts, 2n, k],
    and ``down_proj`` likewise, where the model has such a parameter; Mixtral's ``block_sparse_moe`` becomes ``mlp``.
    A tensor is read only when it is loaded. Raises CheckpointError if an expert is missing, differs in shape or is
    stored in NVFP4.
    """
    _refuse_nvfp4(checkpoint, parameters)
    tensors = {_rename(name, parameters): lazy for name, lazy in checkpoint.tensors.items()}
    for layer in sorted({match[1] for name in tensors if (match := _EXPERT.fullmatch(name))}):
        for parameter, spellings in _PARTS.items():
            if f"{layer}.{parameter}" in parameters:
                names = _list_matrices(tensors, layer, spellings, checkpoint.where)
                stacked = _stack([[tensors.pop(name) for name in expert] for expert in names], names)
                tensors[f"{layer}.{parameter}"] = stacked
    return replace(checkpoint, tensors=tensors)


def _refuse_nvfp4(checkpoint: Checkpoint, parameters: Container[str]) -> None:
    for module in checkpoint.nvfp4:
        match = _EXPERT.fullmatch(f"{module.replace(_OLD_LAYER, _NEW_LAYER)}.weight")
        if match and f"{match[1]}.down_proj" in parameters:
            raise CheckpointError(
                f"the expert {module!r} is stored in NVFP4, which is read for dense layers only",
                where=checkpoint.where,
                fix="use the unquantized checkpoint; --quant nvfp4 quantizes its dense layers",
            )


def _rename(name: str, parameters: Container[str]) -> str:
    """The name with Mixtral's old name of a layer replaced, if the model has what it then names."""
    new = name.replace(_OLD_LAYER, _NEW_LAYER)
    expert = _EXPERT.fullmatch(new)
    return new if (f"{expert[1]}.down_proj" if expert else new) in parameters else name


def _list_matrices(
    tensors: dict[str, LazyTensor], layer: str, spellings: tuple[tuple[str, ...], ...], where: str
) -> list[list[str]]:
    """Names of the matrices by expert. Raises CheckpointError if one is missing."""
    numbers = {int(match[2]) for name in tensors if (match := _EXPERT.fullmatch(name)) and match[1] == layer}
    stored = (s for s in spellings for part in s if f"{layer}.{min(numbers)}.{part}.weight" in tensors)
    parts = next(stored, spellings[0])
    names = [[f"{layer}.{i}.{part}.weight" for part in parts] for i in range(len(numbers))]
    missing = [name for expert in names for name in expert if name not in tensors]
    if missing:
        raise CheckpointError(f"missing tensors: {missing[0]!r}", where=where, fix="finish the download")
    return names


def _stack(experts: list[list[LazyTensor]], names: list[list[str]]) -> LazyTensor:
    """One tensor [experts, rows, columns] that stacks the matrices when it is read."""
    first = experts[0][0]
    for name, part in zip(chain(*names), chain(*experts), strict=True):
        if part.shape != first.shape or len(part.shape) != 2:
            what = f"tensors of the wrong shape: {name}: {list(part.shape)}, {names[0][0]}: {list(first.shape)}"
            raise CheckpointError(what, where=part.where, fix="check that the shards belong to one checkpoint")

    def read() -> Tensor:
        return torch.stack([torch.cat([part.read() for part in expert]) for expert in experts])

    rows, columns = first.shape
    return LazyTensor((len(experts), rows * len(experts[0]), columns), first.dtype, first.where, read)
