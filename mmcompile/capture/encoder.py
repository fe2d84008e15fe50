"""Quantize a checkpoint while it is written: every matrix is read, encoded and dropped by itself, in strips of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from mmcompile.capture.tensors import Checkpoint, LazyTensor, PackedLinear, ScaledLinear
from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import mxfp8, nvfp4

_STRIP = 1 << 24  # elements that are encoded at once; in fp32 and with what encoding needs beside them 0.5 GiB
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
Report = Callable[[str, str], None]
"""Told the step ("measure" for the largest magnitude, "quantize") and the name of a weight that is read for it."""

_FUSED = {"w1": "w3", "w3": "w1", "gate_proj": "up_proj", "up_proj": "gate_proj"}


@dataclass(frozen=True)
class Encoding:
    """How matrices are encoded: ``method`` and ``convention`` of nvfp4.encode, ``rule`` of mxfp8.encode."""

    method: str = "max6"
    rule: str = "modelopt"
    convention: nvfp4.Convention = "modelopt"


def encode_checkpoint(
    checkpoint: Checkpoint, formats: Mapping[str, str], encoding: Encoding, report: Report
) -> Checkpoint:
    """The checkpoint with some of its plain weights in NVFP4 or MXFP8, encoded when they are read.

    Args:
        formats: "nvfp4" or "mxfp8" by name of the stored tensor: a matrix, or a stack of experts [experts, n, k],
            which becomes the matrices of each expert. Gate and up of one expert get the global scale of both.

    What is quantized already is taken over as it is. Reading raises CheckpointError for NaN and infinity, for damaged
    scales and for global scales that are meant the other way.
    """
    checked = {name: _check_plain(name, lazy, report) for name, lazy in checkpoint.tensors.items()}
    matrices: dict[str, tuple[LazyTensor, str]] = {}

    @cache
    def measure(module: str) -> Tensor:
        report("measure", module)
        return _find_top(module, matrices[module][0])

    for name, form in formats.items():
        lazy = checkpoint.tensors[name]
        split = _split_stack(name, lazy) if len(lazy.shape) == 3 else {name.removesuffix(".weight"): lazy}
        matrices |= {module: (matrix, form) for module, matrix in split.items()}
    packed = {
        m: _encode_nvfp4(m, matrices, encoding, report, measure) for m, (_, form) in matrices.items() if form == "nvfp4"
    }
    scaled = {m: _encode_mxfp8(m, lazy, encoding, report) for m, (lazy, form) in matrices.items() if form == "mxfp8"}
    return replace(
        checkpoint,
        tensors={name: lazy for name, lazy in checked.items() if name not in formats},
        nvfp4={name: _check_nvfp4(name, parts, report) for name, parts in checkpoint.nvfp4.items()} | packed,
        mxfp8={name: _check_mxfp8(name, parts, report) for name, parts in checkpoint.mxfp8.items()} | scaled,
    )


def _split_stack(name: str, lazy: LazyTensor) -> dict[str, LazyTensor]:
    """The matrices of a stack of experts by module."""
    match = _STACK.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{name!r} is a stack of matrices, but not of experts", where=lazy.where)
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    experts, rows, columns = lazy.shape
    height = rows // len(parts)

    def read(expert: int, part: int) -> Tensor:
        return lazy.read()[expert, part * height : (part + 1) * height]

    return {
        f"{match[1]}.{i}.{part}": LazyTensor((height, columns), lazy.dtype, lazy.where, partial(read, i, j))
        for i in range(experts)
        for j, part in enumerate(parts)
    }


def _encode_nvfp4(
    module: str,
    matrices: Mapping[str, tuple[LazyTensor, str]],
    encoding: Encoding,
    report: Report,
    measure: Callable[[str], Tensor],
) -> PackedLinear:
    lazy = matrices[module][0]
    rows, columns = lazy.shape
    together = [m for m in (module, _find_partner(module)) if m in matrices]

    @cache
    def find_multiplier() -> Tensor:
        single = torch.zeros(1, nvfp4.BLOCK)
        single[0, 0] = torch.stack([measure(m) for m in together]).max()
        return nvfp4.encode(single, convention=encoding.convention)[2]

    def encode() -> tuple[Tensor, ...]:
        report("quantize", module)
        multiplier, strips = find_multiplier(), _list_strips(rows, columns)
        matrix = lazy.read()
        made = [
            nvfp4.encode(
                matrix[strip], method=encoding.method, global_scale=multiplier, convention=encoding.convention
            )[:2]
            for strip in strips
        ]
        return tuple(torch.cat(parts) for parts in zip(*made, strict=True))

    packed, scale = _read_together(
        encode, lazy.where, ((rows, columns // 2), torch.uint8),
        ((rows, columns // nvfp4.BLOCK), torch.float8_e4m3fn),
    )  # fmt: skip
    plain = encoding.convention == "modelopt"
    stored = LazyTensor(
        () if plain else (1,), torch.float32, lazy.where,
        lambda: find_multiplier().reshape(()) if plain else 1.0 / find_multiplier().reshape(1),
    )  # fmt: skip
    return PackedLinear(packed, scale, stored, encoding.convention)


def _find_partner(module: str) -> str:
    """The matrix of the same expert that engines multiply together with this one; "" if it is no expert's."""
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_FUSED[leaf]}" if ".experts." in module and leaf in _FUSED else ""


def _encode_mxfp8(module: str, lazy: LazyTensor, encoding: Encoding, report: Report) -> ScaledLinear:
    rows, columns = lazy.shape

    def encode() -> tuple[Tensor, ...]:
        report("quantize", module)
        matrix = lazy.read()
        _find_top(module, lazy)
        made = [mxfp8.encode(matrix[strip], rule=encoding.rule) for strip in _list_strips(rows, columns)]
        return tuple(torch.cat(parts) for parts in zip(*made, strict=True))

    values, scale = _read_together(
        encode, lazy.where, ((rows, columns), torch.float8_e4m3fn), ((rows, columns // mxfp8.BLOCK), torch.uint8)
    )
    return ScaledLinear(values, scale)


def _read_together(
    make: Callable[[], tuple[Tensor, ...]], where: str, *described: tuple[tuple[int, ...], torch.dtype]
) -> list[LazyTensor]:
    """Stored parts of a weight that are made at once: kept from the first part that is read until all were."""
    kept: dict[int, Tensor] = {}

    def read(index: int) -> Tensor:
        if index not in kept:
            kept.update(enumerate(make()))
        return kept.pop(index)

    return [LazyTensor(shape, dtype, where, partial(read, i)) for i, (shape, dtype) in enumerate(described)]


def _list_strips(rows: int, columns: int) -> list[slice]:
    step = max(_STRIP // max(columns, 1), 1)
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def _find_top(name: str, lazy: LazyTensor) -> Tensor:
    """The largest magnitude, fp32. Raises CheckpointError for NaN and infinity."""
    flat = lazy.read().reshape(-1)
    tops = [flat[begin : begin + _STRIP].float().abs().amax() for begin in range(0, flat.numel(), _STRIP)]
    top = torch.stack(tops).max() if tops else torch.zeros(())
    if not bool(top.isfinite()):
        raise CheckpointError(
            f"tensor {name!r} holds NaN or infinity", where=lazy.where, fix="download or export the checkpoint again"
        )
    return top


def _check_plain(name: str, lazy: LazyTensor, report: Report) -> LazyTensor:
    def read() -> Tensor:
        report("quantize", name)
        if lazy.dtype.is_floating_point:
            _find_top(name, lazy)
        return lazy.read()

    return replace(lazy, read=read)


def _check_nvfp4(module: str, parts: PackedLinear, report: Report) -> PackedLinear:
    def read() -> Tensor:
        report("quantize", module)
        return parts.load(f"{module} in {parts.packed.where}")[0]

    return replace(parts, packed=replace(parts.packed, read=read))


def _check_mxfp8(module: str, parts: ScaledLinear, report: Report) -> ScaledLinear:
    def read() -> Tensor:
        report("quantize", module)
        return parts.load(f"{module} in {parts.values.where}")[0]

    return replace(parts, values=replace(parts.values, read=read))
