"""Shape and dtype inference that is done once for equal calls on equal inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LITERALS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class InferenceMemo:
    """Fake values by operation and arguments, for graphs over one fake mode (and so over one set of symbols).

    What a fake implementation returns is decided by shapes, strides, dtypes and literals, which are the key. Calls that
    write an argument, that make new symbols (a size that depends on data) or that take anything else are not kept.
    """

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}
        self._keys: dict[int, tuple[torch.Tensor, Any]] = {}  # holds the tensor, so that its id stays its own
        self._parameters: dict[Any, Any] = {}

    def infer_parameter(self, mode: FakeTensorMode, tensor: torch.Tensor) -> Any:
        """Fake value of a weight; weights of equal shape, strides and dtype share it."""
        key = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, type(tensor)
        if key not in self._parameters:
            self._parameters[key] = mode.from_tensor(tensor, static_shapes=True)
        return self._parameters[key]

    def infer_call(self, mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
        """Fake result of ``target(*args, **kwargs)`` for fake arguments."""
        is_pure = not (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)
        key = (target, self._freeze(args), self._freeze(tuple(kwargs.items()))) if is_pure else None
        if key is None or None in key:
            with mode:
                return target(*args, **kwargs)
        if key in self._results:
            return self._results[key]
        with mode:
            value = target(*args, **kwargs)
        if not free_unbacked_symbols(value):
            self._results[key] = value
        return value

    def remember(self, function: Any, inputs: Any, compute: Callable[[], Any]) -> Any:
        """``compute()``, done once for each ``inputs`` (values as above) if they and ``function`` decide the result."""
        key = function, self._freeze(inputs)
        if key[1] is None:
            return compute()
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    def _freeze(self, value: Any) -> Any:
        """Hashable form that tells 1, 1.0 and True apart; None for what has none."""
        if isinstance(value, FakeTensor):
            return self._freeze_tensor(value)
        if isinstance(value, list | tuple):
            parts = tuple(self._freeze(v) for v in value)
            return None if None in parts else (type(value), parts)
        if isinstance(value, _SYMBOLIC):
            return type(value), value.node.expr
        return (type(value), repr(value)) if isinstance(value, _LITERALS) else None

    def _freeze_tensor(self, value: torch.Tensor) -> Any:
        if id(value) not in self._keys:
            sizes = self._freeze(tuple(value.shape)), self._freeze(value.stride()), self._freeze(value.storage_offset())
            rest = value.dtype, value.device, value.layout, value.requires_grad
            self._keys[id(value)] = value, (torch.Tensor, *sizes, *rest)
        return self._keys[id(value)][1]
