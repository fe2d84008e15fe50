"""Expert weights: checkpoints hold a matrix for each expert, transformers' modules one tensor for all of a layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from mmcompile.capture.tensors import Checkpoint, LazyTensor, PackedExperts, PackedLinear, ScaledLinear
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import mxfp8

Matrix = LazyTensor | PackedLinear | ScaledLinear

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
# Parameter of the module -> the matrices that it stacks, one below the other, in each spelling that checkpoints use.
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_GATES = re.compile(r"(?<=\.)(gate|up)_proj\.weight$")
_TEXT = "language_model."
# Names of checkpoints and what modules call the same: Mixtral and MiniMax, then transformers' MiniMax-M3.
_SPELLINGS = (
    (".block_sparse_moe.", ".mlp."),
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".self_attn.index_", ".self_attn.indexer."),
)
# Parts of a multimodal checkpoint beside its text decoder: vision, and drafts for speculative decoding.
_OTHER_PARTS = re.compile(
    r"(?:language_model\.)?(?:model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp|mtp|dspark)\."
)


def stack_experts(checkpoint: Checkpoint, parameters: Container[str]) -> Checkpoint:
    """The checkpoint as a model with these parameters and persistent buffers spells it.

    ``<layer>.experts.<i>.gate_proj`` and ``up_proj`` [n, k] become ``<layer>.experts.gate_up_proj`` [experts, 2n, k],
    and ``down_proj`` likewise, where the model has such a parameter; so do the two of a dense layer that the model
    holds as one ``gate_up_proj.weight``. ``block_sparse_moe`` (Mixtral, MiniMax) becomes ``mlp``. NVFP4 experts become
    a PackedExperts; MXFP8 experts are decoded to bf16, which holds them exactly. Of a multimodal checkpoint
    (``language_model.*``) the text decoder remains, and ``left_out`` counts the rest. A tensor is read only when it is
    loaded.

    Raises CheckpointError if an expert is missing, differs in shape, or is stored otherwise than the others.
    """
    spelled = _merge_gates(_choose_parts(checkpoint, parameters), parameters)
    kinds: tuple[Mapping[str, Matrix], ...] = (
        {name.removesuffix(".weight"): lazy for name, lazy in spelled.tensors.items() if name.endswith(".weight")},
        spelled.nvfp4,
        spelled.mxfp8,
    )
    found = {name: matrix for kind in kinds for name, matrix in kind.items() if _names_expert(name, parameters)}
    stacked: set[str] = set()
    plain: dict[str, LazyTensor] = {}
    packed: dict[str, PackedExperts] = {}
    for layer, numbers in sorted(_number_experts(found).items()):
        for parameter, spellings in _PARTS.items():
            name = f"{layer}.{parameter}"
            if name in parameters:
                names = _list_matrices(found, layer, numbers, spellings, checkpoint.where)
                stack = _stack([[found[n] for n in expert] for expert in names], names)
                stacked.update(chain(*names))
                if isinstance(stack, PackedExperts):
                    packed[name] = stack
                else:
                    plain[name] = stack
    return replace(
        spelled,
        tensors={n: lazy for n, lazy in spelled.tensors.items() if n.removesuffix(".weight") not in stacked} | plain,
        nvfp4={name: parts for name, parts in spelled.nvfp4.items() if name not in stacked},
        mxfp8={name: parts for name, parts in spelled.mxfp8.items() if name not in stacked},
        experts=packed,
    )


def _names_expert(module: str, parameters: Container[str]) -> bool:
    """Whether ``module`` is a matrix of one expert, of a layer that the model holds stacked."""
    match = _EXPERT.fullmatch(module)
    return match is not None and f"{match[1]}.down_proj" in parameters


def _choose_parts(checkpoint: Checkpoint, parameters: Container[str]) -> Checkpoint:
    """The checkpoint with names as the model spells them, without the parts that are not the text decoder."""
    kinds = (checkpoint.tensors, checkpoint.nvfp4, checkpoint.mxfp8)
    multimodal = any(name.startswith(_TEXT) for kind in kinds for name in kind)

    left_out: Counter[str] = Counter()

    def keep(name: str) -> bool:
        part = _OTHER_PARTS.match(name) if multimodal and name not in parameters else None
        if part is not None:
            left_out[part[1]] += 1
        return part is None

    def rename(module: str) -> str:
        return _rename(f"{module}.weight", parameters).removesuffix(".weight")

    tensors = {_rename(name, parameters): lazy for name, lazy in checkpoint.tensors.items() if keep(name)}
    packed = {rename(name): parts for name, parts in checkpoint.nvfp4.items() if keep(name)}
    scaled = {rename(name): parts for name, parts in checkpoint.mxfp8.items() if keep(name)}
    return replace(checkpoint, tensors=tensors, nvfp4=packed, mxfp8=scaled, left_out=dict(sorted(left_out.items())))


def _rename(name: str, parameters: Container[str]) -> str:
    """The name as the model spells it, perhaps without the prefix of a text decoder; as stored if it has no such."""
    for start in (name, name.removeprefix(_TEXT)):
        for spelled in accumulate(_SPELLINGS, lambda text, pair: text.replace(*pair), initial=start):
            if _GATES.sub("gate_up_proj.weight", spelled) in parameters or spelled in parameters:
                return spelled
            if _names_expert(spelled.removesuffix(".weight"), parameters):
                return spelled
    return name


def find_parameter(name: str, parameters: Container[str]) -> str:
    """The parameter that the stored tensor ``name`` is, or is a part of (an expert, a gate); "" if there is none."""
    spelled = _rename(name, parameters)
    module = spelled.removesuffix(".weight")
    match = _EXPERT.fullmatch(module)
    if match is not None and _names_expert(module, parameters):
        stacks = (p for p, spellings in _PARTS.items() if any(match[3] in parts for parts in spellings))
        return next((f"{match[1]}.{p}" for p in stacks), "")
    merged = _GATES.sub("gate_up_proj.weight", spelled)
    return next((found for found in (spelled, merged) if found in parameters), "")


def _merge_gates(checkpoint: Checkpoint, parameters: Container[str]) -> Checkpoint:
    """Gate and up of a dense layer as one, gate above, where the model has one matrix for both (transformers' M3)."""
    tensors, scaled = dict(checkpoint.tensors), dict(checkpoint.mxfp8)

    def find_up(gate: str, stored: Container[str]) -> str:
        parent, _, leaf = gate.rpartition("gate_proj")
        up = f"{parent}up_proj{leaf}"
        merged = leaf in ("", ".weight") and f"{parent}gate_up_proj.weight" in parameters
        return up if merged and gate not in parameters and up in stored else ""

    for gate, first in checkpoint.tensors.items():
        if up := find_up(gate, tensors):
            del tensors[gate]
            tensors[gate.replace("gate_proj", "gate_up_proj")] = _concatenate(first, tensors.pop(up))
    for gate, upper in checkpoint.mxfp8.items():
        if up := find_up(gate, scaled):
            del scaled[gate]
            lower = scaled.pop(up)
            parts = _concatenate(upper.values, lower.values), _concatenate(upper.scale, lower.scale)
            scaled[gate.replace("gate_proj", "gate_up_proj")] = ScaledLinear(*parts)
    return replace(checkpoint, tensors=tensors, mxfp8=scaled)


def _concatenate(first: LazyTensor, second: LazyTensor) -> LazyTensor:
    """One matrix of the rows of both, read when it is loaded."""
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])

    def read() -> Tensor:
        return torch.cat([first.read(), second.read()])

    return LazyTensor(shape, first.dtype, first.where, read)


def _number_experts(modules: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of the experts by layer."""
    numbers: dict[str, set[int]] = {}
    for module in modules:
        if match := _EXPERT.fullmatch(module):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return numbers


def _list_matrices(
    found: Mapping[str, Matrix], layer: str, numbers: set[int], spellings: tuple[tuple[str, ...], ...], where: str
) -> list[list[str]]:
    """Names of the matrices by expert. Raises CheckpointError if one is missing."""
    stored = (s for s in spellings for part in s if f"{layer}.{min(numbers)}.{part}" in found)
    parts = next(stored, spellings[0])
    names = [[f"{layer}.{i}.{part}" for part in parts] for i in range(len(numbers))]
    missing = [name for expert in names for name in expert if name not in found]
    if missing:
        raise CheckpointError(f"missing tensors: '{missing[0]}.weight'", where=where, fix="finish the download")
    return names


def _stack(experts: list[list[Matrix]], names: list[list[str]]) -> LazyTensor | PackedExperts:
    """One weight [experts, rows, columns] that stacks the matrices when it is read."""
    first = experts[0][0]
    where = _find_place(first)
    for name, part in zip(chain(*names), chain(*experts), strict=True):
        if type(part) is not type(first):
            what = f"{name} and {names[0][0]} are experts of one layer in different formats"
            raise CheckpointError(what, where=_find_place(part), fix="export the checkpoint again")
        if part.shape != first.shape or len(part.shape) != 2:
            what = f"tensors of the wrong shape: {name}.weight: {list(part.shape)}, {names[0][0]}: {list(first.shape)}"
            raise CheckpointError(what, where=_find_place(part), fix="check that the shards belong to one checkpoint")
    if isinstance(first, PackedLinear):
        return PackedExperts(
            tuple(
                tuple((name, part) for name, part in zip(n, e, strict=True) if isinstance(part, PackedLinear))
                for n, e in zip(names, experts, strict=True)
            )
        )
    dtype = first.dtype if isinstance(first, LazyTensor) else torch.bfloat16
    rows, columns = first.shape
    shape = (len(experts), rows * len(experts[0]), columns)

    def read() -> Tensor:
        result = torch.empty(shape, dtype=dtype)
        for i, (expert, paths) in enumerate(zip(experts, names, strict=True)):
            for j, (part, path) in enumerate(zip(expert, paths, strict=True)):
                result[i, j * rows : (j + 1) * rows] = _read_matrix(part, path)
        return result

    return LazyTensor(shape, dtype, where, read)


def _read_matrix(part: Matrix, path: str) -> Tensor:
    """A plain matrix as stored, an MXFP8 one decoded to fp32."""
    if isinstance(part, ScaledLinear):
        return mxfp8.decode(*part.load(f"{path} in {part.values.where}"))
    if isinstance(part, LazyTensor):
        return part.read()
    raise TypeError(f"{path} is {type(part).__name__}")


def _find_place(part: Matrix) -> str:
    """The file that a matrix lies in."""
    if isinstance(part, LazyTensor):
        return part.where
    return part.packed.where if isinstance(part, PackedLinear) else part.values.where
