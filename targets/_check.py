"""Compare a compiled kernel with its target's limits and its own assumptions, neither of which Triton checks."""

from __future__ import annotations

import re

from mmcompile.core.errors import LoweringError, ToolchainError, unknown_name
from mmcompile.core.kernel import CompiledKernel, KernelSource
from mmcompile.core.spec import Architecture, TargetSpec

MAX_THREADS_PER_BLOCK = 1024
MAX_SPILL_BYTES = 256
"""Spilled bytes per thread above which a kernel is refused; below, it is only reported."""

_DEFAULT_SHARED_MEMORY = 227 * 1024
_SHARED_TENSOR_MEMORY_COLUMNS = 512


def find_architecture(spec: TargetSpec, name: str) -> Architecture:
    """The architecture of ``spec`` called ``name``; raises UsageError with the closest name."""
    for architecture in spec.architectures:
        if architecture.name == name:
            return architecture
    raise unknown_name(f"architecture of {spec.name}", name, (a.name for a in spec.architectures))


def shared_memory_limit(spec: TargetSpec, architecture: Architecture) -> int:
    """Bytes of shared memory one block may use: above 227 KB only where the launch can opt in to more."""
    if "shared_memory_oversized" in architecture.features:
        return spec.shared_memory_per_block
    return min(spec.shared_memory_per_block, _DEFAULT_SHARED_MEMORY)


def check_limits(compiled: CompiledKernel, spec: TargetSpec) -> list[str]:
    """Return warnings about a kernel that fits; raise LoweringError naming limit, value and remedy if it does not.

    Checked: shared memory, registers, threads per block, tensor-memory columns (above 512 only with an exclusive
    allocation), and spills (an error above MAX_SPILL_BYTES per thread).
    """
    facts = compiled.metadata
    architecture = find_architecture(spec, compiled.architecture)
    columns = spec.tensor_memory_columns
    if "tcgen05.alloc" in compiled.assembly and ".exclusive" not in compiled.assembly:
        columns = min(columns, _SHARED_TENSOR_MEMORY_COLUMNS)
    threads = facts["num_warps"] * facts["warp_size"]
    shared = facts["shared"] + facts.get("static_shared", 0)
    limits = (
        ("bytes of shared memory", shared, shared_memory_limit(spec, architecture), "lower num_stages or the tile"),
        ("registers per thread", facts["registers"], spec.registers_per_thread, "lower the tile or raise num_warps"),
        ("threads per block", threads, min(MAX_THREADS_PER_BLOCK, spec.threads_per_unit), "lower num_warps"),
        ("tensor-memory columns", facts["tmem_size"], columns, "lower the accumulator tile"),
        ("spilled bytes per thread", facts["spills"], MAX_SPILL_BYTES, "lower the tile or raise num_warps"),
    )
    for what, value, limit, remedy in limits:
        if value > limit:
            raise LoweringError(
                f"{compiled.source.name!r} for {compiled.architecture} uses {value} {what}, the limit is {limit}",
                where=compiled.source.name,
                fix=remedy,
            )
    if facts["spills"]:
        return [f"{compiled.source.name} ({compiled.architecture}): spills {facts['spills']} bytes per thread"]
    return []


def reserve_shared(shared: int, source: KernelSource) -> int:
    """Shared memory of the launch in bytes, where the compiler's own is ``shared``; ToolchainError if they overlap."""
    if source.private_shared is None:
        return shared
    first, end = source.private_shared
    if shared > first:
        raise ToolchainError(
            f"Triton took {shared} bytes of shared memory of {source.name!r}, whose assembly starts its own at {first}",
            where=source.name,
            fix="let the assembly's shared memory start later",
        )
    return end


def check_lanes(ttgir: str, source: KernelSource) -> None:
    """Hold the layouts of all operands and results of inline assembly against what ``KernelSource.lanes`` promises.

    ttgir: the module after Triton has chosen layouts. Raises ToolchainError naming the tensor and its layout.
    """
    threads, warps = 32 * source.num_warps, source.num_warps
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(.*)$", ttgir, re.MULTILINE))
    matrix = rf"\[1, 4\], threadsPerWarp = \[32, 1\], warpsPerCTA = \[{warps}, 1\]"
    vector = rf"\[1\], threadsPerWarp = \[32\], warpsPerCTA = \[{warps}\]"
    row = re.compile(r"#ttg\.slice<\{dim = 1, parent = (#\w+)\}>")
    for line in re.findall(r"elementwise_inline_asm.*", ttgir):
        for shape, layout in re.findall(rf"tensor<({threads}(?:x4)?)x[a-z!][^,]*, ([^()]*?)>(?=[,) ]|$)", line):
            parent = row.fullmatch(layout)
            chosen = layouts[parent[1] if parent else layout]
            wanted = matrix.replace("4", r"\d+") if parent else vector if shape == str(threads) else matrix
            if not re.match(r"blocked<\{sizePerThread = " + wanted, chosen):
                raise ToolchainError(
                    f"Triton gave a tensor [{shape}] of {source.name!r} the layout {layout} = {chosen}; its assembly "
                    "needs one row a thread",
                    where=source.name,
                    fix="keep pointers 16-byte aligned and loads contiguous along the last dimension",
                )
