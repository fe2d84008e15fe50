"""The CPU: every launch is a call of its reference; a temporary is simply the tensor that the reference returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError
from mmcompile.core.expression import evaluate_shape
from mmcompile.core.plan import Buffer, Launch, Phase, Plan, View
from mmcompile.runtime.executor import (
    Evaluation,
    Geometry,
    Symbols,
    check_inputs,
    check_symbols,
    count_bytes,
    covers,
    list_fallbacks,
    memory_by_role,
    torch_dtype,
)
from mmcompile.runtime.reference import Call, bind_call

_PROGRAMS_KEPT = 64

Values = dict[str, Tensor]
Step = Callable[[Values], None]
Store = Callable[[Values, Tensor], None]


class CpuExecutor:
    """Runs a plan with the references of its operations.

    Args:
        weights: (buffer name, tensor) pairs of every buffer of role "weight".
        pages: value of the symbol "pages", which sizes the state buffers.
    """

    pads_decode = False

    def __init__(self, plan: Plan, weights: Iterator[tuple[str, Tensor]], pages: int) -> None:
        self._plan = plan
        self._fixed_symbols = {"pages": pages}
        self._persistent: Values = dict(weights)
        for buffer in plan.buffers.values():
            if buffer.role == "state":
                self._persistent[buffer.name] = _allocate_zeros(buffer, self._fixed_symbols)
        self._calls: dict[str, list[Call]] = {
            name: [bind_call(launch) for launch in phase.launches] for name, phase in plan.phases.items()
        }
        self._programs: dict[tuple[str, tuple[tuple[str, int], ...]], _Program] = {}
        if "load" in plan.phases:
            self._fill_derived(plan.phases["load"])

    def _fill_derived(self, phase: Phase) -> None:
        with torch.inference_mode():
            values = self._program(phase, self._fixed_symbols, {}).run({})
        self._persistent.update({n: t for n, t in values.items() if self._plan.buffers[n].role == "derived"})
        self._programs.clear()

    def _program(self, phase: Phase, symbols: Symbols, inputs: Mapping[str, Tensor]) -> _Program:
        key = (phase.name, tuple(sorted(symbols.items())))
        program = self._programs.get(key)
        if program is None:
            check_symbols(self._plan, phase.name, symbols)
            check_inputs(self._plan, phase, inputs, symbols)
            if len(self._programs) >= _PROGRAMS_KEPT:
                self._programs.pop(next(iter(self._programs)))
            program = _Program(self._plan, phase, self._calls[phase.name], self._persistent, dict(symbols))
            self._programs[key] = program
        return program

    def run(
        self, phase: str, inputs: Mapping[str, Tensor], symbols: Symbols, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """See :class:`Executor`."""
        record, symbols = self._plan.phases[phase], {**symbols, **self._fixed_symbols}
        with torch.inference_mode():
            values = self._program(record, symbols, inputs).run(dict(inputs))
        return {name: values[name] for name in outputs}

    def describe(self) -> dict[str, Any]:
        """See :class:`Executor`."""
        return {
            "device": f"cpu ({torch.get_num_threads()} threads)",
            "kernels": 0,
            "launches": {name: len(phase.launches) for name, phase in self._plan.phases.items()},
            "fallbacks": list_fallbacks(self._plan),
            "memory": memory_by_role(self._plan, self._fixed_symbols),
            "graphs": [],
        }

    def close(self) -> None:
        """See :class:`Executor`."""
        self._programs.clear()
        self._persistent.clear()


def _allocate_zeros(buffer: Buffer, symbols: Symbols) -> Tensor:
    """Zeros that take physical memory only where they are touched (calloc, where torch.zeros would write them)."""
    memory = torch.from_numpy(np.zeros(count_bytes(buffer, symbols), dtype=np.uint8))
    return memory.view(torch_dtype(buffer)).view(evaluate_shape(buffer.shape, symbols))


class _Program:
    """One phase for one set of symbol values, as a list of closures over a dict from buffer name to tensor."""

    def __init__(
        self, plan: Plan, phase: Phase, calls: list[Call], persistent: Values, symbols: dict[str, int]
    ) -> None:
        self._buffers, self._phase, self._persistent = plan.buffers, phase, persistent
        self._sizes = Evaluation(plan, symbols)
        self._pieced = self._find_pieced()
        self._steps = [self._bind(launch, call) for launch, call in zip(phase.launches, calls, strict=True)]
        self._drops = self._find_drops()
        self._checked = False

    def run(self, values: Values) -> Values:
        """Run on the inputs in ``values``; returns ``values`` with outputs and derived buffers added."""
        for name in self._pieced:
            values[name] = torch.empty(self._sizes.shape(name), dtype=torch_dtype(self._buffers[name]))
        if not self._checked:
            return self._run_checked(values)
        for step, drops in zip(self._steps, self._drops, strict=True):
            step(values)
            for name in drops:
                del values[name]
        return values

    def _run_checked(self, values: Values) -> Values:
        """First run: compare what each reference returns with the plan's shapes and dtypes."""
        for launch, step, drops in zip(self._phase.launches, self._steps, self._drops, strict=True):
            step(values)
            for view in launch.outputs:
                tensor = values.get(view.buffer)
                if tensor is not None:
                    self._check_result(launch, self._buffers[view.buffer], tensor)
            for name in drops:
                del values[name]
        self._checked = True
        return values

    def _check_result(self, launch: Launch, buffer: Buffer, tensor: Tensor) -> None:
        shape = self._sizes.shape(buffer.name)
        if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(buffer):
            raise ArtifactError(
                f"{launch.op} gave {tensor.dtype} {list(tensor.shape)} for {buffer.name!r}, "
                f"the plan says {buffer.dtype} {list(shape)}",
                where=f"phase {self._phase.name}, launch {launch.name}",
                fix="rebuild the artifact with this mmcompile",
            )

    def _find_pieced(self) -> tuple[str, ...]:
        """Temporaries and outputs that some launch fills only in part: these need memory of their own."""
        views = [v for launch in self._phase.launches for v in launch.outputs if v.buffer not in self._persistent]
        names = {v.buffer for v in views if not covers(self._sizes.view(v), self._sizes.shape(v.buffer))}
        return tuple(sorted(names))

    def _find_drops(self) -> list[tuple[str, ...]]:
        """Temporaries that are dead after each launch."""
        last: dict[str, int] = {}
        for index, launch in enumerate(self._phase.launches):
            for view in (*launch.inputs.values(), *launch.outputs):
                if view is not None and self._buffers[view.buffer].role == "temporary":
                    last[view.buffer] = index
        drops: list[list[str]] = [[] for _ in self._phase.launches]
        for name, index in last.items():
            drops[index].append(name)
        return [tuple(names) for names in drops]

    def _bind(self, launch: Launch, call: Call) -> Step:
        template, whole, strided = list(call.template), [], []
        for position, name in call.slots:
            view = launch.inputs[name]
            assert view is not None
            if view.buffer in self._persistent:
                template[position] = self._view(self._persistent[view.buffer], view)
            elif self._sizes.is_whole(view):
                whole.append((position, view.buffer))
            else:
                strided.append((position, view.buffer, *self._sizes.view(view)))
        invoke = _bind_arguments(call.function, template, whole, strided)
        stores = [self._bind_store(view, call.aliases) for view in launch.outputs]
        if len(stores) == 1:
            return _bind_single(invoke, stores[0])
        return _bind_several(invoke, stores, launch)

    def _view(self, tensor: Tensor, view: View) -> Tensor:
        return tensor if self._sizes.is_whole(view) else tensor.as_strided(*self._sizes.view(view))

    def _bind_store(self, view: View, aliases: bool) -> Store:
        """How a result gets into its output view: by rebinding the buffer where possible, else by a copy."""
        name = view.buffer
        if name in self._persistent:
            return _store_into(self._view(self._persistent[name], view))
        if name in self._pieced:
            return _store_piece(name, self._sizes.view(view))
        return _store_whole(name, self._sizes.shape(name), aliases)


def _store_into(target: Tensor) -> Store:
    def store(values: Values, result: Tensor) -> None:
        target.copy_(result)

    return store


def _store_piece(name: str, geometry: Geometry) -> Store:
    def store(values: Values, result: Tensor) -> None:
        values[name].as_strided(*geometry).copy_(result)

    return store


def _store_whole(name: str, shape: tuple[int, ...], aliases: bool) -> Store:
    def store(values: Values, result: Tensor) -> None:
        if aliases:
            result = result.clone(memory_format=torch.contiguous_format)
        values[name] = result.reshape(shape) if result.shape != shape else result.contiguous()

    return store


def _bind_arguments(
    function: Callable[..., Any],
    template: list[Any],
    whole: list[tuple[int, str]],
    strided: list[tuple[Any, ...]],
) -> Callable[[Values], Any]:
    """Put tensors into the template and call."""
    if not strided:

        def invoke(values: Values) -> Any:
            arguments = template.copy()
            for position, name in whole:
                arguments[position] = values[name]
            return function(*arguments)

        return invoke

    def invoke_strided(values: Values) -> Any:
        arguments = template.copy()
        for position, name in whole:
            arguments[position] = values[name]
        for position, name, shape, strides, offset in strided:
            arguments[position] = values[name].as_strided(shape, strides, offset)
        return function(*arguments)

    return invoke_strided


def _bind_single(invoke: Callable[[Values], Any], store: Store) -> Step:
    def step(values: Values) -> None:
        result = invoke(values)
        store(values, result if isinstance(result, Tensor) else result[0])

    return step


def _bind_several(invoke: Callable[[Values], Any], stores: list[Store], launch: Launch) -> Step:
    def step(values: Values) -> None:
        results = invoke(values)
        if not stores:
            return
        if len(results) < len(stores):
            raise ArtifactError(
                f"{launch.op} gave {len(results)} results, the plan has {len(stores)}", where=launch.name
            )
        for store, result in zip(stores, results, strict=False):
            store(values, result)

    return step
