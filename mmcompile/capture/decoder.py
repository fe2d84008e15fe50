"""Capture of decoders: transformers' modeling code from a Hugging Face directory, a config.json or a GGUF file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mmcompile.capture.checkpoint import Checkpoint, load_into, open_checkpoint
from mmcompile.capture.experts import stack_experts
from mmcompile.capture.export import Captured, capture_module, without_weights
from mmcompile.capture.huggingface import holds_weights
from mmcompile.capture.packed import PackedWeights, load_packed, name_parameter
from mmcompile.capture.stand_ins import stand_in
from mmcompile.capture.tensors import require_package
from mmcompile.core.errors import CaptureError, CheckpointError

Weights = Literal["auto", "real", "random", "none"]


def capture_decoder(
    build: Callable[[], nn.Module],
    *,
    dtype: torch.dtype,
    max_positions: int,
    checkpoint: Checkpoint | None = None,
    weights: Weights = "auto",
    seed: int = 0,
    batched: bool = False,
    source: str = "",
) -> Captured:
    """Capture a stateless decoder.

    Args:
        build: makes the module. Its ``forward`` takes ``input_ids`` and ``positions`` [tokens], or with ``batched``
            transformers' ``input_ids`` and ``position_ids`` [1, tokens], and returns the logits of every token.
        weights: "real" from ``checkpoint``, "random" from ``seed``, "none" (meta tensors), or "auto": real if there is
            a checkpoint, else random.

    Returns: a Captured of kind "decoder" with the placeholders ``input_ids`` and ``positions``, int64.
    """
    if weights == "auto":
        weights = "real" if checkpoint is not None else "random"
    if weights == "real" and checkpoint is None:
        raise CheckpointError("there are no weights", where=source, fix="ask for random weights or none")
    module, packed = _build(build, dtype, checkpoint if weights == "real" else None, weights, seed)
    stand_in(module)
    position_name = "position_ids" if batched else "positions"
    example = torch.arange(11)[None] if batched else torch.arange(11)
    axis = {int(batched): "tokens"}
    captured = capture_module(
        module,
        {"input_ids": torch.zeros_like(example), position_name: example},
        dynamic={"input_ids": axis, position_name: axis},
        symbols={"tokens": (2, max_positions)},
        constants={"use_cache": False} if batched else None,
        kind="decoder",
        source=f"{source}, weights {weights}{f' (seed {seed})' if weights == 'random' else ''}{packed.describe()}",
    )
    _name_positions(captured, position_name)
    captured.nvfp4, captured.mxfp8 = packed.nvfp4, packed.mxfp8
    captured.config = {"max_positions": max_positions, "dtype": str(dtype).removeprefix("torch.")}
    if checkpoint is not None:
        captured.chat_template = checkpoint.chat_template
        captured.tokenizer = _read_tokenizer(checkpoint)
    return captured


def _build(
    build: Callable[[], nn.Module], dtype: torch.dtype, checkpoint: Checkpoint | None, weights: Weights, seed: int
) -> tuple[nn.Module, PackedWeights]:
    if weights == "random":
        torch.manual_seed(seed)
        module = build()
        return _cast_parameters(module, dtype), PackedWeights()
    with without_weights():
        module = _cast_parameters(build(), dtype)
    return module, (load_weights(module, checkpoint) if checkpoint is not None else PackedWeights())


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters only: RoPE frequencies, a router's selection bias and other buffers keep their precision.

    Parameters that the model wants in fp32 get that (see :func:`_keeps_float32`).
    """
    kept = _keeps_float32(module, dtype)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if any(p.search(name) for p in kept) else dtype)
    return module.eval()


def _keeps_float32(module: nn.Module, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Patterns of the parameters that stay fp32 whatever the model's dtype, as transformers loads a checkpoint.

    Models say so in ``_keep_in_fp32_modules_strict`` and, for fp16 only, ``_keep_in_fp32_modules``: parts of names with
    ``*`` for anything. MiniMax-M3 of transformers 5.24 names none, so its router runs in the model's dtype there; ours
    names its router.
    """
    names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return [re.compile(name.replace("*", ".*")) for name in sorted(names)]


def load_weights(module: nn.Module, checkpoint: Checkpoint) -> PackedWeights:
    """Give every parameter and every persistent buffer its tensor of the checkpoint, decoding quantized ones.

    Returns: those in packed form too, and what was left out of a multimodal checkpoint. Raises CheckpointError for a
    tensor that is missing, that nothing takes, or that is damaged.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if n in module.state_dict()}
    tensors = parameters | buffers
    checkpoint = stack_experts(checkpoint, tensors)
    packed = load_packed(checkpoint, parameters)
    quantized = {name_parameter(checkpoint, name): name for name in packed}
    ordinary = {n: p for n, p in tensors.items() if n not in quantized}
    first: dict[int, str] = {}
    tied = {n: first[id(p)] for n, p in ordinary.items() if first.setdefault(id(p), n) != n}
    loaded = load_into(checkpoint, {n: (tuple(p.shape), p.dtype) for n, p in ordinary.items()}, tied)
    for name, stored in quantized.items():
        loaded[name] = packed.decode(stored, parameters[name].dtype)
    shared = {id(t): nn.Parameter(t, requires_grad=False) for n, t in loaded.items() if n in parameters}
    for name, tensor in loaded.items():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, shared[id(tensor)] if name in parameters else tensor)
    return packed


def _name_positions(captured: Captured, given: str) -> None:
    """Call the position input ``positions`` whatever the model calls it."""
    if given == "positions":
        return
    (node,) = (n for n in captured.graph_module.graph.find_nodes(op="placeholder") if n.target == given)
    node.target = "positions"
    node._rename("positions")
    captured.graph_module.recompile()
    captured.inputs = tuple(replace(i, name="positions") if i.name == given else i for i in captured.inputs)


def _read_tokenizer(checkpoint: Checkpoint) -> bytes | None:
    try:
        return checkpoint.tokenizer.to_str().encode()
    except CheckpointError:
        return None


def capture_gguf(
    path: Path, *, dtype: torch.dtype, weights: Weights = "auto", seed: int = 0, attention: str = "sdpa"
) -> Captured:
    """Capture a ``.gguf`` file of the architecture "llama" with transformers' modeling code."""
    checkpoint = open_checkpoint(path)
    return _capture_transformers(checkpoint.config, checkpoint, path, dtype, weights, seed, attention)


def capture_huggingface(
    path: Path, *, dtype: torch.dtype, weights: Weights = "auto", seed: int = 0, attention: str = "sdpa"
) -> Captured:
    """Capture a Hugging Face directory, or a bare config.json (which has no real weights).

    With ``weights`` "auto" a directory that holds weights in any form must hold them complete and readable; only one
    without any gets random ones. ``attention``: "sdpa" or "eager", transformers' two spellings. Modeling code is
    transformers' own, unmodified; code that comes with a checkpoint is never run.
    """
    found = open_directory(path, weights)
    captured = _capture_transformers(found.fields, found.checkpoint, Path(path), dtype, weights, seed, attention)
    captured.config["eos_token_ids"] = found.eos_token_ids or captured.config["eos_token_ids"]
    return captured


@dataclass(frozen=True)
class Directory:
    """A Hugging Face directory: the fields of config.json, the checkpoint if weights are to be read, and the tokens at
    which transformers' generate stops (generation_config.json), [] if it does not say."""

    fields: dict[str, Any]
    checkpoint: Checkpoint | None
    eos_token_ids: list[int]


def open_directory(path: Path, weights: Weights = "auto") -> Directory:
    """Open a directory or a bare config.json; weights that are there must be complete if they may be read.

    Raises CaptureError if there is no readable config.json, CheckpointError for damaged weights.
    """
    path = Path(path)
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.is_file():
        raise CaptureError("there is no config.json", where=str(path), fix="name a Hugging Face directory")
    fields = read_json(config_path)
    stored = holds_weights(path) if weights in ("auto", "real") else any(path.glob("*.safetensors"))
    checkpoint = open_checkpoint(path) if path.is_dir() and stored else None
    generation = config_path.with_name("generation_config.json")
    named = read_json(generation).get("eos_token_id") if path.is_dir() and generation.is_file() else None
    return Directory(fields, checkpoint, _list_ids(named))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CaptureError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CaptureError(f"not a JSON file: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        raise CaptureError("not a JSON object", where=str(path))
    return content


def _list_ids(token: int | list[int] | None) -> list[int]:
    """Token ids as a list, whether there is none, one or several."""
    return [] if token is None else [token] if isinstance(token, int) else list(token)


def _capture_transformers(
    fields: dict[str, Any],
    checkpoint: Checkpoint | None,
    path: Path,
    dtype: torch.dtype,
    weights: Weights,
    seed: int,
    attention: str,
) -> Captured:
    config, model_class = _read_config(fields, str(path))
    if attention == "sdpa" and not model_class._supports_sdpa:
        raise CaptureError(
            f"{model_class.__name__} has no sdpa attention", where=str(path), fix='use attention "eager"'
        )
    config._attn_implementation = attention
    config._experts_implementation = "batched_mm"
    text = config.get_text_config()
    max_positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_positions, int):
        raise CaptureError("the config has no max_position_embeddings", where=str(path), fix="add it to config.json")
    captured = capture_decoder(
        partial(_explain_failure, model_class, str(path), config),
        dtype=dtype,
        max_positions=max_positions,
        checkpoint=checkpoint,
        weights=weights,
        seed=seed,
        batched=True,
        source=f"{path.name} ({model_class.__name__} of transformers)",
    )
    captured.config |= _describe(text)
    return captured


def _read_config(fields: dict[str, Any], where: str) -> tuple[Any, Any]:
    """(config, model class) of transformers; of a multimodal model those of its text decoder.

    Raises CaptureError if there is no such model or a field is wrong.
    """
    transformers = require_package("transformers", "hf")
    fields = {k: v for k, v in fields.items() if k not in ("quantization_config", "torch_dtype", "dtype")}
    model_type = fields.pop("model_type", None)
    known, causal = transformers.CONFIG_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    config = _explain_failure(known[model_type], where, **fields) if model_type in known else None
    if config is not None and type(config) not in causal:
        config = config.get_text_config(decoder=True)
    if type(config) not in causal:
        raise CaptureError(
            f"transformers {transformers.__version__} has no causal language model of type {model_type!r}",
            where=where,
            fix="upgrade transformers, or write the model as one file in models/",
        )
    return config, causal[type(config)]


def _explain_failure(make: Any, where: str, *args: Any, **fields: Any) -> Any:
    """Call a class of transformers; whatever it raises at the fields of config.json becomes one sentence."""
    try:
        return make(*args, **fields)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise CaptureError(
            f"the config makes no {make.__name__}: {reason}", where=where, fix="correct that field of config.json"
        ) from error


def _describe(config: Any) -> dict[str, Any]:
    """Facts of a transformers config under the names that models/ use; eos_token_ids is always a list."""
    heads = config.num_attention_heads
    block = getattr(config, "index_block_size", None)  # of MiniMax-M3
    return ({"block_size": block} if block else {}) | {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": _list_ids(config.eos_token_id),
    }
