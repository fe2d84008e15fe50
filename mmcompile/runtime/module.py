"""The engine of a module artifact: one phase "forward" with named inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmcompile.core.errors import ArtifactError, RequestError
from mmcompile.core.plan import Plan
from mmcompile.runtime.executor import Executor, check_inputs, describe_weights
from mmcompile.runtime.selection import Selection


class ModuleEngine:
    """Runs a module artifact on one device. Made by :func:`mmcompile.runtime.load`."""

    def __init__(self, plan: Plan, selection: Selection, executor: Executor, random_weights: int | None = None) -> None:
        if "forward" not in plan.phases:
            raise ArtifactError(
                'a module needs a phase "forward"', where=f"plan of {plan.target}", fix="rebuild the artifact"
            )
        self._plan, self._selection, self._executor = plan, selection, executor
        self._random_weights = random_weights
        self._phase = plan.phases["forward"]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in the module's order."""
        return self._phase.inputs

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Run the module on CPU tensors; symbols take their values from the shapes. Returns the outputs by name.

        Raises RequestError if an input is missing, unknown, too large, or has another dtype or shape.
        """
        inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}
        symbols = self._find_symbols(inputs)
        check_inputs(self._plan, self._phase, inputs, {**symbols, "pages": 1})
        results = self._executor.run("forward", inputs, symbols, self._phase.outputs)
        return {name: tensor.clone() for name, tensor in results.items()}

    def _find_symbols(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """Values of the symbols that stand alone as a dimension of some input."""
        symbols: dict[str, int] = {}
        for name in self._phase.inputs:
            if name not in inputs:
                raise RequestError(f"input {name!r} is missing", fix=f"pass {', '.join(self._phase.inputs)}")
            shape = self._plan.buffers[name].shape
            if inputs[name].dim() != len(shape):
                raise RequestError(
                    f"input {name!r} has {inputs[name].dim()} dimensions, needed: {len(shape)}", fix="reshape it"
                )
            for expression, size in zip(shape, inputs[name].shape, strict=True):
                if isinstance(expression, str) and expression.isidentifier():
                    symbols.setdefault(expression, size)
        return symbols

    def describe(self) -> dict[str, Any]:
        """Target, device, weights, kernels, launches, fallbacks, memory by role in bytes, graphs."""
        return {
            "target": self._selection.target,
            "architecture": self._selection.architecture,
            "match": self._selection.match,
            "weights": describe_weights(self._random_weights),
            **self._executor.describe(),
        }

    def close(self) -> None:
        """Free the device's memory."""
        self._executor.close()
