"""Read a Hugging Face checkpoint directory: config.json, safetensors shards, tokenizer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmcompile.capture.quantized import split_quantized
from mmcompile.capture.shards import INDEX_NAME, SINGLE_NAME, open_file
from mmcompile.capture.tensors import Checkpoint, LazyTensor, list_some, require_package
from mmcompile.core.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def open_huggingface(directory: Path) -> Checkpoint:
    """Open ``directory``. Tensors stay memory-mapped; only safetensors are read, never pickle.

    Raises CheckpointError for a missing or damaged file, an index that disagrees with its shards, or a quantization
    that is not supported.
    """
    config = _read_json(directory / "config.json")
    tensors = _open_shards(directory)
    quantization = config.get("quantization_config")
    if (directory / "hf_quant_config.json").exists():
        quantization = _read_json(directory / "hf_quant_config.json").get("quantization", quantization)
    split = split_quantized(tensors, quantization, str(directory))
    template, special = _read_text_settings(directory)
    return Checkpoint(
        where=str(directory),
        config=config,
        tensors=split.tensors,
        nvfp4=split.nvfp4,
        mxfp8=split.mxfp8,
        build_tokenizer=partial(_build_tokenizer, directory),
        chat_template=template,
        special_tokens=special,
    )


def holds_weights(directory: Path) -> bool:
    """Whether anything there looks like weights, be it complete, readable or neither."""
    return any(True for pattern in ("*.safetensors", INDEX_NAME, *PICKLE_PATTERNS) for _ in directory.glob(pattern))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path.name} is missing", where=str(path.parent))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not valid JSON: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise CheckpointError("expected a JSON object", where=str(path))
    return content


def _open_shards(directory: Path) -> dict[str, LazyTensor]:
    if (directory / INDEX_NAME).exists():
        return _open_indexed(directory)
    if (directory / SINGLE_NAME).exists():
        return open_file(directory / SINGLE_NAME)
    pickled = [path.name for pattern in PICKLE_PATTERNS for path in directory.glob(pattern)]
    if pickled:
        raise CheckpointError(
            f"only pickled weights found ({pickled[0]}), and loading a pickle can run arbitrary code",
            where=str(directory),
            fix="convert them with model.save_pretrained(directory), which writes safetensors",
        )
    raise CheckpointError(f"neither {SINGLE_NAME} nor {INDEX_NAME} found", where=str(directory))


def _open_indexed(directory: Path) -> dict[str, LazyTensor]:
    index = directory / INDEX_NAME
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map", where=str(index))
    by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        by_shard.setdefault(str(shard), set()).add(name)
    tensors: dict[str, LazyTensor] = {}
    for shard, names in sorted(by_shard.items()):
        if Path(shard).name != shard:
            raise CheckpointError(f"shard {shard!r} lies outside the checkpoint", where=str(index))
        if not (directory / shard).exists():
            raise CheckpointError(f"shard {shard} is missing", where=str(directory), fix="finish the download")
        found = open_file(directory / shard)
        if set(found) != names:
            wrong = list_some(set(found) ^ names)
            raise CheckpointError(f"index and shard disagree about {wrong}", where=str(directory / shard))
        tensors.update(found)
    return tensors


def _read_text_settings(directory: Path) -> tuple[str | None, dict[str, str]]:
    """Return (chat template or None, special tokens by role)."""
    path = directory / "tokenizer_config.json"
    settings = _read_json(path) if path.exists() else {}
    special = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special[role] = text
    file = directory / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    return (template if isinstance(template, str) else None), special


def _build_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError("tokenizer.json is missing", where=str(directory))
    try:
        return require_package("tokenizers", "hf").Tokenizer.from_file(str(path))
    except ValueError as error:
        raise CheckpointError(f"not a tokenizer: {error}", where=str(path)) from error
