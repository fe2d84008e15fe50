"""The doors: what the user names becomes a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mmcompile.capture.checkpoint import Checkpoint, open_checkpoint
from mmcompile.capture.decoder import capture_decoder, capture_gguf, capture_huggingface, open_directory, read_json
from mmcompile.capture.export import Captured
from mmcompile.capture.module import capture_file
from mmcompile.capture.tensors import require_package
from mmcompile.core.discover import list_names, load_module
from mmcompile.core.errors import CheckpointError, UsageError, unknown_name
from mmcompile.driver.options import BuildOptions


def list_models() -> dict[str, ModuleType]:
    """Every configuration name of every file in models/, with its module."""
    modules = [load_module("models", name) for name in list_names("models")]
    return {config: module for module in modules for config in module.MODELS}


def open_door(model: str, options: BuildOptions) -> Captured:
    """Capture ``model``.

    A name in models/; ``file.py:factory``; a ``.gguf`` file; an ``.onnx`` file; a Hugging Face directory or its
    config.json, of a ``model_type`` that a file in models/ claims or of one that transformers has.
    Raises UsageError with the closest name if it is none of these.
    """
    dtype = getattr(torch, options.dtype)
    rest: dict[str, Any] = {"dtype": dtype, "weights": options.weights, "seed": options.seed}
    named = list_models()
    base, slicing, layers = model.partition("-slice:")
    if base in named:
        config = named[base].MODELS[base]
        if slicing:
            config = _slice(named[base], base, config, layers)
        return _capture_named(model, named[base], config, options)
    path = Path(model)
    if ".py:" in model:
        return capture_file(model, seed=options.seed)
    if path.suffix == ".onnx":
        require_package("onnx", "onnx")
        from mmcompile.capture.onnx.door import capture_onnx

        return capture_onnx(path, fixed=options.fixed)
    if path.suffix == ".gguf" and path.is_file():
        return capture_gguf(path, attention=options.attention, **rest)
    if path.is_dir() or (path.is_file() and path.name.endswith(".json")):
        if (module := _find_reader(path)) is not None:
            return _capture_directory(path, module, options)
        return capture_huggingface(path, attention=options.attention, **rest)
    unknown = unknown_name("model", model, named)
    kinds = "a directory, a .gguf file, an .onnx file or file.py:factory"
    raise UsageError(unknown.what, fix=f"{unknown.fix}, or name {kinds}")


def _slice(module: ModuleType, name: str, config: Any, layers: str) -> Any:
    """The config of the first layers of a model, for names such as ``minimax-m3-slice:4``."""
    if not hasattr(module, "slice_layers") or not layers.isdecimal():
        raise UsageError(f"{name!r} cannot be cut to {layers!r} layers", fix="write minimax-m3-slice:4, for example")
    return module.slice_layers(config, int(layers))


def _find_reader(path: Path) -> ModuleType | None:
    """The file in models/ that reads the checkpoints of this model_type, None if none does."""
    config = path / "config.json" if path.is_dir() else path
    kind = read_json(config).get("model_type") if config.is_file() else None
    modules = (load_module("models", name) for name in list_names("models"))
    return next((module for module in modules if kind in getattr(module, "MODEL_TYPES", ())), None)


def _capture_directory(path: Path, module: ModuleType, options: BuildOptions) -> Captured:
    """Capture a Hugging Face directory with the model of ours that reads it."""
    found = open_directory(path, options.weights)
    config = module.read_config(found.fields)
    captured = _capture(f"{path.name} ({Path(str(module.__file__)).stem})", module, config, found.checkpoint, options)
    captured.config["eos_token_ids"] = found.eos_token_ids or captured.config["eos_token_ids"]
    return captured


def _capture_named(name: str, module: ModuleType, config: Any, options: BuildOptions) -> Captured:
    found = module.find_weights(name)
    if found is None and options.weights == "real":
        raise CheckpointError(f"there are no weights for {name!r} on this machine", fix=module.WEIGHTS_ADVICE)
    checkpoint = open_checkpoint(found) if found is not None and options.weights in ("auto", "real") else None
    captured = _capture(name, module, config, checkpoint, options)
    if hasattr(module, "count_beside"):
        shapes = {key: tuple(p.shape) for key, p in captured.graph_module.named_parameters()}
        captured.config["beside"] = module.count_beside(name)
        captured.config["published"] = module.count_published(name, shapes)
    return captured


def _capture(
    source: str, module: ModuleType, config: Any, checkpoint: Checkpoint | None, options: BuildOptions
) -> Captured:
    """Capture a model of models/ and note the facts of its config."""
    build: Callable[[], torch.nn.Module] = lambda: module.build(config)  # noqa: E731
    captured = capture_decoder(
        build, dtype=getattr(torch, options.dtype), max_positions=config.max_positions, checkpoint=checkpoint,
        weights=options.weights, seed=options.seed, source=source,
    )  # fmt: skip
    captured.config |= {"vocab_size": config.vocab_size, "eos_token_ids": list(config.eos_token_ids)}
    if hasattr(config, "block_size"):
        captured.config["block_size"] = config.block_size
    return captured
