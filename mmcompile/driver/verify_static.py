"""Static checks of an artifact's kernels: recorded binaries, limits of the target, ledgers of instructions."""

from __future__ import annotations

import re
from typing import Any

from mmcompile.core.errors import LoweringError
from mmcompile.core.kernel import CompiledKernel, KernelSource, Parameter
from mmcompile.core.plan import Binary, Plan
from mmcompile.runtime.artifact import Artifact
from mmcompile.targets._disassemble import count_instructions
from mmcompile.targets._target import Target


def read_source(artifact: Artifact, plan: Plan, name: str) -> KernelSource:
    """The source of a kernel of an artifact, with what was promised of it."""
    kernel = plan.kernels[name]
    parameters = tuple(Parameter(p, kind, "") for p, kind in kernel.parameters)
    warps = next((b.num_warps for b in kernel.binaries.values()), 4)
    text = (artifact.root / kernel.source).read_text()
    expectations = dict(kernel.expectations)
    return KernelSource(
        name, text, parameters, ("1", "1", "1"), warps, kernel.num_stages, expectations, lanes=kernel.lanes
    )  # fmt: skip


def check_kernel(artifact: Artifact, plan: Plan, target: Target, source: KernelSource) -> str:
    """Hash, limits, ledger of every binary of a kernel; the first objection, or ""."""
    kernel = plan.kernels[source.name]
    missing = [a.name for a in target.spec.architectures if a.name not in kernel.binaries]
    if missing:
        return f"{source.name} has no binary for {missing[0]}"
    for architecture, binary in kernel.binaries.items():
        data = artifact.read_binary(source.name, binary)
        assembly = (artifact.root / binary.assembly).read_text()
        compiled = CompiledKernel(source, architecture, assembly, data, _describe_binary(binary, assembly))
        counted = count_instructions(assembly, "hip" if target.spec.backend == "hip" else "ptx")
        recorded = {k: n for k, n in binary.ledger.items() if not k[:1].isupper()}
        if counted != recorded:
            return f"{source.name} ({architecture}): the recorded ledger is not that of {binary.assembly}"
        try:
            target.check(compiled)
        except LoweringError as error:
            return error.what
    return ""


def _describe_binary(binary: Binary, assembly: str) -> dict[str, Any]:
    """The metadata that Target.check reads."""
    columns = [int(n) for n in re.findall(r"tcgen05\.alloc[^;]*,\s*(\d+);", assembly)]
    listings = ["ptx", "sass"] if any(k[:1].isupper() for k in binary.ledger) else ["ptx"]
    return binary.model_dump() | {"tmem_size": max(columns, default=0), "ledger_from": listings}
