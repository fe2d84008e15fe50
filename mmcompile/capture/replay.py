"""What a layer really runs, operation by operation: on meta tensors, so that it costs no arithmetic."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_LITERALS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Recorder(TorchDispatchMode):
    """Writes down every call with its literals and with tensors by where they came from."""

    def __init__(self, known: dict[int, tuple[Any, Any]]) -> None:
        super().__init__()
        self.known = known  # id -> (tensor, label); holds the tensor, so that its id stays its own
        self.steps: list[Any] = []
        self.foreign = {_storage(tensor) for tensor, _ in known.values()}
        self.shares = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            if _storage(tensor) in self.foreign or id(tensor) not in self.known:
                self.shares = f"writes into a tensor that is not its own, by {func}"
        step = (func, self.label(args), self.label(tuple(kwargs.items())))
        result = func(*args, **kwargs)
        for i, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self.known.setdefault(id(leaf), (leaf, (len(self.steps), i)))
        self.steps.append((*step, self.label(result), _describe_leaves(result)))
        return result

    def label(self, value: Any) -> Any:
        """Comparable form: tensors by origin, literals by type and value, containers by content."""
        if isinstance(value, torch.Tensor):
            return self.known.setdefault(id(value), (value, ("outside", id(value))))[1]
        if isinstance(value, list | tuple):
            return type(value), tuple(self.label(v) for v in value)
        if isinstance(value, dict):
            return dict, tuple((k, self.label(v)) for k, v in value.items())
        return (type(value), repr(value)) if isinstance(value, _LITERALS) else ("identity", id(value))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call writes, by the annotations of its schema."""
    written: list[torch.Tensor] = []
    for i, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(parameter.name)
            written += [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return written


@dataclass(frozen=True)
class Trace:
    """Everything that a layer did, to compare with another layer's.

    ``shares``: how it writes into or returns memory of others, "" if it does neither (an input as it came is fine).
    """

    steps: list[Any]
    results: list[Any]
    structure: Any
    shares: str
    tensors: list[weakref.ref[torch.Tensor]] = field(compare=False)

    def kept(self) -> bool:
        """True if a tensor of the run is still alive, so that somebody else must hold it."""
        if any(ref() is not None for ref in self.tensors):
            gc.collect()
        return any(ref() is not None for ref in self.tensors)


def _describe_leaves(value: Any) -> Any:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)


def make_meta(value: Any) -> Any:
    """A meta tensor for a (fake) tensor and an int for a symbolic one, at the example's size; the rest unchanged."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_hint(s) for s in part] for part in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return _hint(value) if isinstance(value, torch.SymInt) else value


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def replay(layer: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> Trace:
    """Run ``layer`` on meta tensors and return all that it did.

    ``leaves`` and ``spec``: the flattened (args, kwargs). Raises whatever the layer raises, for example where it needs
    the value of a tensor.
    """
    metas = {id(t): make_meta(t) for t in leaves if isinstance(t, torch.Tensor)}
    leaves = [metas[id(v)] if isinstance(v, torch.Tensor) else make_meta(v) for v in leaves]
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    state = {name: make_meta(tensor) for name, tensor in tensors}
    known = {id(tensor): (tensor, name) for name, tensor in state.items()}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            known.setdefault(id(leaf), (leaf, ("input", i)))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    known_before = list(known.values())
    recorder = _Recorder(known)
    with torch.no_grad(), torch.device("meta"), recorder:
        result = torch.func.functional_call(layer, state, args, kwargs)
    flat, structure = pytree.tree_flatten(result)
    given = {id(t) for t, _ in known_before}
    fresh = list({id(t): t for t in flat if isinstance(t, torch.Tensor) and id(t) not in given}.values())
    storages = [_storage(t) for t in fresh]
    if len(set(storages)) < len(storages) or not recorder.foreign.isdisjoint(storages):
        recorder.shares = recorder.shares or "returns a view of another tensor"
    results = [recorder.label(leaf) for leaf in flat]
    tensors = [weakref.ref(tensor) for tensor, label in recorder.known.values() if label[0] != "outside"]
    return Trace(recorder.steps, results, structure, recorder.shares, tensors)
