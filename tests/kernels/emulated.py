"""Run emitted sources in the PTX emulator: for kernels that count on lanes, which Triton's interpreter cannot run."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from mmcompile.core.kernel import CompiledKernel, KernelSource
from mmcompile.core.plan import Binary
from mmcompile.driver.verify_emulate import Assembly, EmulatorRunner
from mmcompile.targets._target import Target
from tests.kernels.conftest import evaluate


@functools.cache
def _compile(target: Target, digest: str, source: tuple[KernelSource]) -> CompiledKernel:
    compiled = target.compile(source[0], target.spec.architectures[0])
    assert target.check(compiled) == []
    return compiled


class _Once(tuple):
    """A source that is equal to every other of the same digest, as kernel sources cannot be hashed."""

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once)


def run_emulated(
    target: Target, sources: tuple[KernelSource, ...], pool: dict[str, Any], symbols: dict[str, int],
    written: set[str], seed: int | None = None,
) -> None:
    """Launch the sources in order; ``pool``: arguments by what the launch passes, updated; ``written``: may change.

    Compiles for the first architecture, holds limits and ledger, and checks races. seed: every warp on its own, in an
    order that follows from it.
    """  # fmt: skip
    for source in sources:
        compiled = _compile(target, source.digest, _Once((source,)))
        facts = compiled.metadata
        sizes = {key: int(facts.get(key) or 0) for key in (
            "shared", "num_warps", "warp_size", "registers", "spills", "global_scratch_size", "global_scratch_align",
            "profile_scratch_size")}  # fmt: skip
        binary = Binary(file="", assembly="", sha256="", symbol=facts["name"], ledger={}, **sizes)
        runner = EmulatorRunner({source.name: Assembly(compiled.assembly, binary)}, seed)
        values = [parameter.value for parameter in source.parameters]
        x, y, z = (evaluate(expression, symbols) for expression in source.grid)
        places = [i for i, value in enumerate(values) if value in written or value.startswith("scratch:")]
        after = runner.run(source, [pool[value] for value in values], (x, y, z), written=places)
        pool |= {value: result for value, result in zip(values, after, strict=True) if isinstance(result, Tensor)}
