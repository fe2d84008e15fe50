"""Which layers of a model may be equal: same classes, attributes and parameter shapes all the way down."""

from __future__ import annotations

import enum
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FEWEST = 3
"""Equal layers from which repeating pays: two of them are traced."""

_CONTAINERS = ("_parameters", "_buffers", "_modules")
_LITERALS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout)
_IDENTITIES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_MISSING = object()


@dataclass(frozen=True)
class Layer:
    """A member of a ModuleList: its path in the model, and its ``kind`` (equal layers have the same)."""

    path: str
    module: nn.Module
    kind: int


def find_equal_layers(model: nn.Module) -> tuple[list[Layer], set[tuple[type, str]]]:
    """Layers of the outermost ModuleLists that have at least FEWEST - 1 equals, and the attributes that number them.

    Two layers are equal if their modules have the same classes, hooks (none), parameters and buffers (names, shapes,
    strides, dtypes; values may differ) and attributes. Attributes are compared by value if they are literals or
    containers of literals, else by identity. The one exception is an integer that in every layer of the list is the
    layer's own index: it is returned as (class, name) and must not be read while a layer runs.
    """
    counts = Counter(id(t) for _, t in _named_tensors(model))
    found: list[Layer] = []
    indices: set[tuple[type, str]] = set()
    for path, members in _outermost_lists(model):
        numbering = _find_indices(members)
        kinds: dict[Any, list[int]] = {}
        for i, layer in enumerate(members):
            if all(counts[id(t)] == 1 for _, t in _named_tensors(layer)):
                kinds.setdefault(_describe(layer, numbering), []).append(i)
        for equal in kinds.values():
            if len(equal) >= FEWEST and kinds.get(None) is not equal:
                kind = len({layer.kind for layer in found})
                found += [Layer(f"{path}.{i}" if path else str(i), members[i], kind) for i in equal]
                indices |= {(type(members[i].get_submodule(m)), name) for i in equal for m, name in numbering
                            if name in _attributes_at(members[i], m)}  # fmt: skip
    return found, indices


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _outermost_lists(model: nn.Module, path: str = "") -> Iterator[tuple[str, list[nn.Module]]]:
    for name, child in model.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield inner, list(child)
        else:
            yield from _outermost_lists(child, inner)


def _attributes_at(layer: nn.Module, path: str) -> dict[str, Any]:
    """Plain attributes of a submodule, none if the layer has no such submodule."""
    try:
        return layer.get_submodule(path).__dict__
    except AttributeError:
        return {}


def _find_indices(members: list[nn.Module]) -> set[tuple[str, str]]:
    """(submodule, attribute) pairs that hold, in every layer that has them, the index of the layer."""
    seen: dict[tuple[str, str], list[bool]] = {}
    for i, layer in enumerate(members):
        for path, module in layer.named_modules(remove_duplicate=False):
            for name, value in module.__dict__.items():
                if type(value) is int:
                    seen.setdefault((path, name), []).append(value == i)
    return {key for key, fits in seen.items() if len(fits) > 1 and all(fits)}


def _describe(layer: nn.Module, numbering: set[tuple[str, str]]) -> Any:
    """Hashable description; None if the layer has hooks, which may do anything."""
    paths = {id(module): path for path, module in layer.named_modules(remove_duplicate=False)}
    parts: list[Any] = []
    for path, module in layer.named_modules(remove_duplicate=False):
        parts.append((path, type(module)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            parts.append((name, None if tensor is None else _describe_tensor(tensor)))
        for name, value in module.__dict__.items():
            if name.endswith("_hooks") and value:
                return None
            if name not in _CONTAINERS:
                parts.append((name, "index" if (path, name) in numbering else freeze(value, paths)))
    return tuple(parts)


def _describe_tensor(tensor: torch.Tensor) -> Any:
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def freeze(value: Any, paths: dict[int, str]) -> Any:
    """Hashable form of an attribute: literals by type and value, modules of the layer by path, the rest by identity."""
    if isinstance(value, _LITERALS):
        return type(value), repr(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(freeze(v, paths) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((freeze(k, paths), freeze(v, paths)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(freeze(v, paths) for v in value)
    if isinstance(value, functools.partial):
        return functools.partial, freeze((value.func, value.args, value.keywords), paths)
    if isinstance(value, types.MethodType):
        return types.MethodType, id(value.__func__), freeze(value.__self__, paths)
    if not isinstance(value, _IDENTITIES) and id(value) in paths:
        return "module", paths[id(value)]
    return "identity", id(value)


class _Watch:
    """A data descriptor that tells when an attribute kept in the instance is read."""

    def __init__(self, owner: type, name: str, tell: Callable[[str], None]) -> None:
        self.name, self.text, self.tell = name, f"{owner.__name__}.{name}", tell
        self.default = getattr(owner, name, _MISSING)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            self.tell(self.text)
            if self.name in instance.__dict__:
                return instance.__dict__[self.name]
        if self.default is _MISSING:
            raise AttributeError(self.text)
        return self.default

    def __set__(self, instance: Any, value: Any) -> None:
        self.tell(self.text)
        instance.__dict__[self.name] = value


@contextmanager
def patched(changes: list[tuple[type, str, Any]]) -> Iterator[None]:
    """Set attributes of classes for a while."""
    before = [(owner, name, owner.__dict__.get(name, _MISSING)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def watch(attributes: set[tuple[type, str]], tell: Callable[[str], None]) -> Any:
    """A context in which every access to one of ``attributes`` (class, name) calls ``tell("Class.name")``."""
    ordered = sorted(attributes, key=lambda entry: (entry[0].__name__, entry[1]))
    return patched([(owner, name, _Watch(owner, name, tell)) for owner, name in ordered])
