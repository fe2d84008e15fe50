"""Safetensors files: read and written one tensor at a time, so that memory holds no more than one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmcompile.capture.tensors import LazyTensor
from mmcompile.core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES, _ALIGNMENT = 8, 8


def open_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file. The header is checked against the size of the file; nothing else is read.

    Each ``read`` maps the bytes of its tensor alone, copy on write, and the mapping goes with the tensor: a process
    holds the tensors that it keeps, however large the file is. Raises CheckpointError for a damaged or truncated file
    and for an unknown dtype.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"not a complete safetensors file: {error}", where=str(path), fix="download it again"
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        kind, shape = entry["dtype"], tuple(entry["shape"])
        if kind not in DTYPES:
            raise CheckpointError(f"tensor {name!r} has the unsupported dtype {kind}", where=str(path))
        begin = _LENGTH_BYTES + length + entry["data_offsets"][0]
        tensors[name] = LazyTensor(shape, DTYPES[kind], str(path), partial(_map, path, begin, shape, DTYPES[kind]))
    return tensors


def _map(path: Path, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    size = count * dtype.itemsize
    try:
        raw = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=begin, shape=(size,)))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the file changed while it was read: {error}", where=str(path), fix="download it again"
        ) from error
    if begin % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def write_shards(directory: Path, tensors: Mapping[str, LazyTensor], shard_bytes: int = 5_000_000_000) -> list[Path]:
    """Write ``tensors`` in their order as one ``model.safetensors``, or as shards with an index.

    A shard is closed before the tensor that would make its data exceed ``shard_bytes``. Tensors are read, written and
    dropped one by one. Raises CheckpointError if one reads differently than it is described.

    Returns: the files, without the index.
    """
    shards = list(_split(tensors, shard_bytes))
    count = len(shards)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard)
    if count > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(_size(lazy) for lazy in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [directory / name for name in names]


def _split(tensors: Mapping[str, LazyTensor], shard_bytes: int) -> Iterator[dict[str, LazyTensor]]:
    shard: dict[str, LazyTensor] = {}
    used = 0
    for name, lazy in tensors.items():
        if shard and used + _size(lazy) > shard_bytes:
            yield shard
            shard, used = {}, 0
        shard[name] = lazy
        used += _size(lazy)
    yield shard


def _size(lazy: LazyTensor) -> int:
    return math.prod(lazy.shape) * lazy.dtype.itemsize


def write_file(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write one safetensors file, in the order of ``tensors``; a tensor is in memory only while it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, lazy in tensors.items():
        begin, end = end, end + _size(lazy)
        header[name] = {"dtype": _NAMES[lazy.dtype], "shape": list(lazy.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for name, lazy in tensors.items():
            tensor = lazy.read()
            if tuple(tensor.shape) != lazy.shape or tensor.dtype != lazy.dtype:
                what = f"{name!r} is {tensor.dtype} {list(tensor.shape)} instead of {lazy.dtype} {list(lazy.shape)}"
                raise CheckpointError(what, where=lazy.where)
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is read
