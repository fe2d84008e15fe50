"""Capture of any nn.Module through a factory function in a Python file: ``path/to/file.py:factory``."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmcompile.capture.canonical import shorten_path
from mmcompile.capture.export import Captured, capture_module
from mmcompile.core.errors import CaptureError, unknown_name


def capture_file(spec: str, *, seed: int = 0) -> Captured:
    """Capture what ``file.py:factory`` returns: ``(module, example_args)`` or ``(module, example_args, dynamic)``.

    ``example_args`` is a tuple by position or a mapping by parameter name. ``dynamic`` maps a parameter name to
    {axis: symbol} or {axis: (symbol, smallest, largest)}; sizes of one symbol agree. The file is executed, so name only
    files you trust. ``seed`` is set before the factory runs.
    """
    file, _, name = spec.rpartition(":")
    factory = _load_factory(Path(file), name, spec)
    torch.manual_seed(seed)
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise CaptureError(
            f"{name}() returned {type(made).__name__}", where=file, fix="return (module, example_args[, dynamic])"
        )
    module, arguments = made[0], made[1]
    inputs = _name_arguments(module, arguments, spec)
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    constants = {k: v for k, v in inputs.items() if not isinstance(v, torch.Tensor)}
    dynamic, symbols = _read_dynamic(made[2] if len(made) == 3 else {}, tensors, spec)
    source = f"{shorten_path(str(Path(file).resolve()))}:{name}"
    return capture_module(module, tensors, dynamic=dynamic, symbols=symbols, constants=constants, source=source)


def _load_factory(path: Path, name: str, spec: str) -> Callable[[], Any]:
    if path.suffix != ".py" or not name:
        raise CaptureError(f"{spec!r} does not name a factory", fix="write path/to/file.py:function")
    if not path.is_file():
        raise CaptureError("there is no such file", where=str(path))
    loader = importlib.util.spec_from_file_location(f"_mmcompile_user_{path.stem}", path)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        raise CaptureError(f"the file failed with {type(error).__name__}: {error}", where=str(path)) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise unknown_name("factory", name, functions, where=str(path))
    return factory


def _name_arguments(module: nn.Module, arguments: Any, spec: str) -> dict[str, Any]:
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, Sequence):
        raise CaptureError("the example arguments are neither a tuple nor a mapping", where=spec)
    try:
        return dict(inspect.signature(module.forward).bind(*arguments).arguments)
    except TypeError as error:
        what = f"the example arguments do not fit {type(module).__name__}.forward: {error}"
        raise CaptureError(what, where=spec) from None


def _read_dynamic(
    given: Mapping[str, Mapping[int, Any]], tensors: Mapping[str, torch.Tensor], spec: str
) -> tuple[dict[str, dict[int, str]], dict[str, tuple[int, int]]]:
    """Split the factory's description into axes and the range of each symbol (2 to 65536 unless it says otherwise)."""
    axes: dict[str, dict[int, str]] = {}
    symbols: dict[str, tuple[int, int]] = {}
    for name, entry in given.items():
        if name not in tensors:
            raise unknown_name("input", name, tensors, where=spec)
        for axis, value in entry.items():
            symbol, low, high = (value, 2, 65536) if isinstance(value, str) else value
            if symbols.setdefault(symbol, (low, high)) != (low, high):
                raise CaptureError(f"the symbol {symbol!r} has two ranges", where=spec)
            axes.setdefault(name, {})[axis] = symbol
    return axes, symbols
