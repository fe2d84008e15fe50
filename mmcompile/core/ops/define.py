"""Define an ``mm::`` operation from its eager reference: schema, fake implementation, mutation, registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mmcompile.core.errors import unknown_name

Reference = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Op:
    """One operation: its name, its meaning (``reference``) and which tensor arguments it writes.

    ``row_wise`` says that row i of the result depends only on row i of the first input (and on weights), so that
    gathering rows before or after the operation gives the same result.
    """

    name: str
    reference: Reference
    mutates: tuple[str, ...]
    row_wise: bool
    handle: Any

    @property
    def parameters(self) -> list[str]:
        """Argument names in order."""
        return list(inspect.signature(self.reference).parameters)


OPS: dict[str, Op] = {}


def define_op(
    *, fake: Reference, mutates: tuple[str, ...] = (), row_wise: bool = False
) -> Callable[[Function], Function]:
    """Register the decorated reference as ``mm::<function name>``.

    The function must be pure but for the arguments in ``mutates``, and must return fresh tensors. ``fake`` takes those
    of its arguments, by name, that decide shapes and dtypes, and returns empty tensors of them. Returns the reference
    unchanged, so that calling it directly skips torch's dispatcher.
    """

    def register(reference: Function) -> Function:
        name = reference.__name__
        if name in OPS:
            raise AssertionError(f"mm::{name} is defined twice")
        custom = torch.library.custom_op(f"mm::{name}", reference, mutates_args=mutates)
        custom.register_fake(_pick_arguments(reference, fake))
        handle = getattr(torch.ops.mm, name).default
        OPS[name] = Op(name, reference, mutates, row_wise, handle)
        return reference

    return register


def _pick_arguments(reference: Reference, fake: Reference) -> Reference:
    """``fake`` as a function of all arguments of ``reference``."""
    signature, names = inspect.signature(reference), list(inspect.signature(fake).parameters)
    unknown = [name for name in names if name not in signature.parameters]
    if unknown:
        raise AssertionError(f"the fake of mm::{reference.__name__} takes {unknown[0]}, which the operation does not")

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return fake(*(bound.arguments[name] for name in names))

    return run


def find_op(target: Any) -> Op | None:
    """Return the Op behind an FX call target such as ``torch.ops.mm.rms_norm.default``, or None."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "mm":
        return OPS[target._opname]
    return None


def get_op(name: str) -> Op:
    """Return the Op called ``name``; raise UsageError if there is none."""
    if name not in OPS:
        raise unknown_name("op", name, OPS)
    return OPS[name]
