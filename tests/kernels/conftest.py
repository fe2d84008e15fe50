"""Harness of the kernel tests: run an emitted template in the interpreter against the operation's reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand
from mmcompile.core.ops.define import get_op
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._interpret import Interpreter

Tensors = dict[str, Tensor | None]
RowSymbols = dict[str, str]

_GUARD_ROWS = 2


def list_architectures() -> list[tuple[TargetSpec, Architecture]]:
    """Every architecture of every target that compiles kernels."""
    specs = [load_module("targets", name).TARGET.spec for name in list_names("targets")]
    return [(spec, architecture) for spec in specs if spec.backend for architecture in spec.architectures]


def make_operand(tensor: Tensor, rows: str | None = None) -> Operand:
    """The Operand of a tensor; ``rows`` is the symbol of its first dimension, None if that is fixed."""
    shape: tuple[int | str, ...] = tuple(tensor.shape)
    shape = shape if rows is None else (rows, *shape[1:])
    return Operand(shape, tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


def make_call(op: str, tensors: Tensors, attributes: dict[str, Any], rows: RowSymbols,
              results: list[Tensor]) -> OpCall:
    """The OpCall of real tensors; ``rows``: operand name or "result" -> symbol of its first dimension."""
    operands = {name: None if t is None else make_operand(t, rows.get(name)) for name, t in tensors.items()}
    return OpCall(op, operands, tuple(make_operand(r, rows.get("result")) for r in results), attributes)


def evaluate(expression: int | str, symbols: dict[str, int]) -> int:
    """The value of a grid or shape expression."""
    names = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max, **symbols}
    return int(eval(str(expression), {"__builtins__": {}}, names))


def poisoned_like(tensor: Tensor) -> Tensor:
    """An output buffer of NaN (floats) or 0x7f (integers), with guard rows behind it in the same storage."""
    value = math.nan if tensor.dtype.is_floating_point else 0x7F
    shape = (tensor.shape[0] + _GUARD_ROWS, *tensor.shape[1:])
    return torch.full(shape, value).to(tensor.dtype)[: tensor.shape[0]]


def guard_is_intact(after: Tensor) -> bool:
    """True if nothing was written behind a buffer of ``poisoned_like``."""
    guard = after.as_strided((_GUARD_ROWS, *after.shape[1:]), after.stride(), after.numel())
    return bool(guard.isnan().all()) if after.dtype.is_floating_point else bool((guard == 0x7F).all())


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; infinite if ``out`` holds a NaN."""
    wide, expected = out.double(), reference.double()
    if out.shape != reference.shape or out.dtype != reference.dtype or bool(wide.isnan().any()):
        return math.inf
    return float((wide - expected).norm() / expected.norm().clamp_min(1e-30))


@dataclass
class Outcome:
    """What a kernel and the reference made of the same operands."""

    results: list[Tensor]
    references: list[Tensor]
    tensors: Tensors
    reference_tensors: Tensors
    sources: tuple[KernelSource, ...]

    @property
    def errors(self) -> list[float]:
        """Relative error of every result."""
        return [relative_error(a, b) for a, b in zip(self.results, self.references, strict=True)]


@dataclass
class Runner:
    """Emits templates, interprets them, and evaluates the references beside them."""

    interpreter: Interpreter

    def run_op(self, template: KernelTemplate, tensors: Tensors, attributes: dict[str, Any], spec: TargetSpec,
               arch: Architecture, *, rows: RowSymbols, symbols: dict[str, int]) -> Outcome:
        """Run for one architecture; the reference runs on clones (same dtypes, so the same rounding points).

        Args:
            rows: operand name (or "result") -> symbol of its first dimension.
            symbols: value of every symbol.
        """
        return self._run(template, tensors, attributes, [(spec, arch)], rows, symbols)[0]

    def run_everywhere(self, template: KernelTemplate, tensors: Tensors, attributes: dict[str, Any], *,
                       rows: RowSymbols, symbols: dict[str, int]) -> list[Outcome]:
        """As ``run_op`` for every architecture, each distinct source once."""
        return self._run(template, tensors, attributes, list_architectures(), rows, symbols)

    def _run(self, template: KernelTemplate, tensors: Tensors, attributes: dict[str, Any],
             places: list[tuple[TargetSpec, Architecture]], rows: RowSymbols, symbols: dict[str, int],
             ) -> list[Outcome]:
        expected = {name: None if t is None else t.clone() for name, t in tensors.items()}
        returned = get_op(template.op).reference(**expected, **attributes)
        references = [returned] if isinstance(returned, Tensor) else list(returned or ())
        outcomes, seen = [], set()
        for spec, architecture in places:
            results = [poisoned_like(r) for r in references]
            call = make_call(template.op, tensors, attributes, rows, results)
            reason = template.refuse(call, spec, architecture)
            assert reason is None, f"{template.name} refuses: {reason}"
            sources = template.emit(call, spec, architecture)
            digests = tuple(source.digest for source in sources)
            if digests in seen:
                continue
            seen.add(digests)
            pool: dict[str, Any] = {name: t for name, t in tensors.items() if t is not None} | symbols
            pool |= {f"result{i or ''}": r for i, r in enumerate(results)}
            for scratch in template.scratch(call, spec):
                shape = [evaluate(n, symbols) for n in scratch.shape]
                pool[f"scratch:{scratch.name}"] = poisoned_like(torch.empty(shape, dtype=getattr(torch, scratch.dtype)))
            self._launch(sources, pool, symbols)
            outputs = [pool[f"result{i or ''}"] for i in range(len(results))]
            assert all(guard_is_intact(out) for out in outputs), f"{template.name} writes out of bounds"
            kept = {name: None if t is None else pool[name] for name, t in tensors.items()}
            outcomes.append(Outcome(outputs, references, kept, expected, sources))
        return outcomes

    def _launch(self, sources: tuple[KernelSource, ...], pool: dict[str, Any], symbols: dict[str, int]) -> None:
        """Run the sources in order; ``pool`` holds the arguments by what the launch passes, and is updated."""
        for source in sources:
            values = [parameter.value for parameter in source.parameters]
            x, y, z = (evaluate(expression, symbols) for expression in source.grid)
            after = self.interpreter.run(source, [pool[value] for value in values], (x, y, z))
            pool |= dict(zip(values, after, strict=True))


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """One interpreter process for the whole session."""
    with Interpreter(timeout=120) as worker:
        yield worker


@pytest.fixture(scope="session")
def runner(interpreter: Interpreter) -> Runner:
    """The harness around the session's interpreter."""
    return Runner(interpreter)


@pytest.fixture(scope="session")
def normal() -> Callable[..., Tensor]:
    """``normal(*shape, dtype=..., scale=...)``: seeded normal values."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    return make


@pytest.fixture(scope="session")
def call_of() -> Callable[..., OpCall]:
    """``make_call``, for tests that only emit or compile."""
    return make_call
