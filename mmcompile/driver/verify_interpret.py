"""Run emitted kernel sources in Triton's interpreter, as a runner of verify."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mmcompile.core.kernel import KernelSource
from mmcompile.driver.verify_run import GUARD
from mmcompile.targets._interpret import Argument, Interpreter


class InterpreterRunner:
    """See :class:`mmcompile.driver.verify_run.Runner`. Portable intrinsics stand for a target's own."""

    proof = "interpreter"
    sampling = (24, 8)
    guard = GUARD

    def __init__(self) -> None:
        self._worker = Interpreter()

    def __enter__(self) -> InterpreterRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def run(
        self,
        source: KernelSource,
        arguments: Sequence[Argument],
        grid: tuple[int, int, int],
        programs: Sequence[tuple[int, int, int]] | None = None,
        *,
        written: Collection[int] = (),
    ) -> list[Argument]:
        """Interpret ``source``; writes to inputs are found afterwards, so ``written`` is not needed."""
        return self._worker.run(source, arguments, grid, programs)
