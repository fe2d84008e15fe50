"""Open a checkpoint, whatever its container, and load exactly the tensors a model expects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmcompile.capture.gguf import open_gguf
from mmcompile.capture.huggingface import open_huggingface
from mmcompile.capture.tensors import Checkpoint, list_some
from mmcompile.core.errors import CheckpointError

__all__ = ["Checkpoint", "load_into", "open_checkpoint"]

DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory (safetensors) or a ``.gguf`` file. Nothing but metadata is read.

    Raises CheckpointError for anything malformed, ToolchainError if a ``.gguf`` needs a package that is missing.
    """
    path = Path(path)
    if path.is_dir():
        return open_huggingface(path)
    if not path.exists():
        raise CheckpointError("there is no such checkpoint", where=str(path))
    if path.suffix == ".gguf":
        return open_gguf(path)
    raise CheckpointError("a checkpoint is a Hugging Face directory or a .gguf file", where=str(path))


def load_into(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tied: Mapping[str, str],
) -> dict[str, Tensor]:
    """Load every expected tensor and nothing else, cast to the expected dtype.

    Args:
        expected: shape and dtype by name.
        tied: alias -> name of the tensor it shares, both in ``expected``. A checkpoint may store either or both;
            if both, they must be equal. The result holds the same tensor under both names.

    Raises CheckpointError for a missing, extra (rotary tables excepted), wrongly shaped, NaN or truncated tensor.
    """
    stored = set(checkpoint.names)
    present = stored | {alias for alias, source in tied.items() if source in stored}
    present |= {source for alias, source in tied.items() if alias in stored}
    missing = set(expected) - present
    if missing:
        packed = [name for name in missing if name.removesuffix(".weight") in checkpoint.nvfp4]
        raise CheckpointError(
            f"missing tensors: {list_some(missing)}",
            where=checkpoint.where,
            fix="some are stored as NVFP4, read them with load_nvfp4" if packed else "",
        )
    extra = {name for name in stored - set(expected) if not name.endswith(DERIVED_SUFFIXES)}
    if extra:
        raise CheckpointError(
            f"tensors that the model does not have: {list_some(extra)}",
            where=checkpoint.where,
            fix="check that config.json belongs to these weights",
        )
    _check_shapes(checkpoint, expected, stored)
    result = {name: checkpoint.load(name).to(dtype) for name, (_, dtype) in expected.items() if name in stored}
    for alias, source in tied.items():
        _share(checkpoint, result, alias, source)
    return result


def _check_shapes(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], stored: set[str]
) -> None:
    wrong = {
        f"{name}: {list(checkpoint.shape(name))} instead of {list(shape)}"
        for name, (shape, _) in expected.items()
        if name in stored and checkpoint.shape(name) != tuple(shape)
    }
    if wrong:
        raise CheckpointError(
            f"tensors of the wrong shape: {list_some(wrong)}",
            where=checkpoint.where,
            fix="check that config.json belongs to these weights",
        )


def _share(checkpoint: Checkpoint, result: dict[str, Tensor], alias: str, source: str) -> None:
    if alias in result and source in result and not torch.equal(result[alias], result[source]):
        raise CheckpointError(
            f"{alias!r} and {source!r} are tied but differ",
            where=checkpoint.where,
            fix="set tie_word_embeddings to false in config.json if they are meant to differ",
        )
    result[alias] = result[source] = result[source] if source in result else result[alias]
