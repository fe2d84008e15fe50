"""Compile emitted kernels without a GPU: Triton source to PTX and cubin, or to amdgcn and hsaco."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmcompile.core.errors import MMError, ToolchainError
from mmcompile.core.kernel import CompiledKernel, KernelSource
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._assemble import assemble_ptx, capture_stderr, error_lines, ptxas_version
from mmcompile.targets._cache import KernelCache, cache_key, default_cache_dir
from mmcompile.targets._capability import code_capability
from mmcompile.targets._check import check_lanes, reserve_shared
from mmcompile.targets._compile_pool import compile_all, group
from mmcompile.targets._disassemble import build_ledgers

ENABLE_FP_FUSION = True
_LEDGERS_AT_ONCE = 128
_POINTER_ALIGNMENT = 16
_COPIED = (
    "name",
    "shared",
    "num_warps",
    "warp_size",
    "num_ctas",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "profile_scratch_align",
    "tmem_size",
)


@dataclass(frozen=True)
class CompileJob:
    """One kernel to compile for one architecture of a target."""

    source: KernelSource
    architecture: Architecture
    spec: TargetSpec


@dataclass(frozen=True)
class JobReport:
    """What became of one job: ``index`` among the jobs, ``seconds`` of compilation (0.0 on a cache hit)."""

    index: int
    name: str
    architecture: str
    seconds: float
    cache_hit: bool


@dataclass(frozen=True)
class Translation:
    """What Triton made of a source for one capability: text, binary, the log of ptxas, and launch facts."""

    capability: int | str
    assembly: str
    binary: bytes
    log: str
    facts: dict[str, Any]


def compile_kernel(source: KernelSource, architecture: Architecture, spec: TargetSpec) -> CompiledKernel:
    """Compile one source for one architecture. Needs no GPU and no driver; the same input gives the same bytes.

    Every pointer parameter is compiled as 16-byte aligned, so the runtime must align what it passes. ``metadata`` holds
    Triton's launch facts (name, shared, num_warps in total, warp_size, num_ctas, scratch sizes and alignments in bytes,
    tmem_size in columns), registers per thread, spills and stack in bytes per thread, ptx_version, fp_fusion, the
    versions of triton and ptxas, the instruction ledger and the listings it counts.

    Raises ToolchainError with the compiler's words, also where LLVM reports an error and goes on.
    """
    ((kernel, _),) = compile_family(source, (architecture,), spec)
    (kernel,) = add_ledgers([kernel])
    return kernel


def compile_family(
    source: KernelSource, architectures: Sequence[Architecture], spec: TargetSpec
) -> list[tuple[CompiledKernel, float]]:
    """Compile one source for several architectures: (kernel, seconds) of each, without ledgers.

    It is translated once for every capability that is needed (see targets._capability) and assembled for each
    architecture; the seconds of a translation count for the first one.
    """
    if not spec.backend:
        raise ToolchainError(
            f"target {spec.name!r} makes no binaries",
            where=source.name,
            fix="compile for sm90, sm100, sm107 or gfx950",
        )
    translations: dict[int | str, Translation] = {}
    kernels = []
    for architecture in architectures:
        started = time.perf_counter()
        capability = code_capability(source, architecture)
        if capability not in translations:
            translations[capability] = _translate(source, capability, architecture, spec)
        kernel = _assemble(source, translations[capability], architecture, spec)
        kernels.append((kernel, time.perf_counter() - started))
    return kernels


def _translate(
    source: KernelSource, capability: int | str, architecture: Architecture, spec: TargetSpec
) -> Translation:
    """Run Triton; ``architecture`` is named in errors."""
    outputs, log = _run_triton(source, capability, architecture, spec)
    if source.lanes:
        check_lanes(outputs.asm["ttgir"], source)
    text, binary = ("amdgcn", "hsaco") if spec.backend == "hip" else ("ptx", "cubin")
    facts = {key: getattr(outputs.metadata, key, 0) or 0 for key in _COPIED}
    facts["shared"] = reserve_shared(facts["shared"], source)
    return Translation(capability, outputs.asm[text], outputs.asm[binary], log, facts)


def _assemble(source: KernelSource, made: Translation, architecture: Architecture, spec: TargetSpec) -> CompiledKernel:
    """The kernel for one architecture, which need not be the one that Triton assembled it for."""
    assembly, binary, log = made.assembly, made.binary, made.log
    if spec.backend == "hip":
        usage = _read_amd_usage(assembly)
    else:
        if architecture.name != f"sm_{made.capability}a":
            assembly = re.sub(r"^\.target \w+", f".target {architecture.name}", assembly, flags=re.MULTILINE)
            binary, log = assemble_ptx(assembly, architecture.name, name=source.name)
        usage = _read_ptxas_usage(log)
    metadata = made.facts | usage | _describe_toolchain(assembly, spec)
    return CompiledKernel(source, architecture.name, assembly, binary, metadata)


def add_ledgers(kernels: Sequence[CompiledKernel]) -> list[CompiledKernel]:
    """The kernels, in their order, with ``ledger`` and ``ledger_from`` in their metadata."""
    made: dict[int, CompiledKernel] = {}
    for name in dict.fromkeys(kernel.architecture for kernel in kernels):
        indices = [i for i, kernel in enumerate(kernels) if kernel.architecture == name]
        ledgers = build_ledgers([(kernels[i].assembly, kernels[i].binary) for i in indices], name)
        for i, (ledger, listings) in zip(indices, ledgers, strict=True):
            metadata = kernels[i].metadata | {"ledger": ledger, "ledger_from": listings}
            made[i] = replace(kernels[i], metadata=metadata)
    return [made[i] for i in range(len(kernels))]


def _describe_toolchain(assembly: str, spec: TargetSpec) -> dict[str, Any]:
    import triton

    version = re.search(r"^\.version (\d+\.\d+)", assembly, flags=re.MULTILINE)
    return {
        "ptx_version": version[1] if version else "",
        "fp_fusion": ENABLE_FP_FUSION,
        "triton": triton.__version__,
        "ptxas": ptxas_version() if spec.backend == "cuda" else "",
    }


@contextlib.contextmanager
def _clean_triton(folder: Path) -> Iterator[None]:
    """Triton's settings for one compilation: nothing read from its own cache, no source paths in the output."""
    from triton import knobs

    if knobs.runtime.interpret:
        raise ToolchainError(
            "Triton is in interpreter mode and cannot compile", fix="unset TRITON_INTERPRET in this process"
        )
    with knobs.compilation.scope(), knobs.cache.scope(), knobs.nvidia.scope():
        knobs.compilation.always_compile = True
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True
        knobs.cache.dir = str(folder / "triton")
        yield


def _run_triton(
    source: KernelSource, capability: int | str, architecture: Architecture, spec: TargetSpec
) -> tuple[Any, str]:
    """Triton's compiled object and what it printed (the log of ptxas)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    printed, failure, outputs = io.StringIO(), None, None
    with tempfile.TemporaryDirectory(prefix="mmcompile-") as name, _clean_triton(Path(name)):
        target = GPUTarget(spec.backend, capability, spec.warp_size)
        options = {
            "num_warps": source.num_warps,
            "num_stages": source.num_stages,
            "enable_fp_fusion": ENABLE_FP_FUSION,
        }
        if source.max_registers is not None:
            options["maxnreg"] = source.max_registers
        with capture_stderr() as captured, contextlib.redirect_stdout(printed):
            try:
                kernel = _import_kernel(source, Path(name))
                aligned = [["tt.divisibility", _POINTER_ALIGNMENT]]
                pointers = [i for i, p in enumerate(source.parameters) if p.type.startswith("*")]
                signature = {p.name: p.type for p in source.parameters}
                ast = ASTSource(kernel, signature, {}, {(i,): aligned for i in pointers})
                outputs = triton.compile(ast, target=target, options=options)
            except MMError:
                raise
            except Exception as error:  # Triton raises many kinds, assertions among them
                failure = error
    errors = error_lines(captured[0])
    if failure is None and not errors:
        sys.stderr.write(captured[0])
        return outputs, printed.getvalue()
    raise ToolchainError(
        f"{source.name!r} does not compile for {architecture.name}: {_summarise(failure, errors)}",
        where=source.name,
        fix="correct the tile function or the intrinsic that emitted it",
    ) from failure


def _summarise(failure: Exception | None, errors: list[str]) -> str:
    """What a compiler objected to: its first three error lines, else the exception's own text."""
    text = str(failure or "")
    lines = [re.sub(r"/\S+/", "", line) for line in errors + error_lines(text) if "PTXAS error" not in line]
    return "; ".join(list(dict.fromkeys(lines))[:3]) or f"{type(failure).__name__}: {text.strip()}"


def _import_kernel(source: KernelSource, folder: Path) -> Any:
    """Import the emitted text under a name that its content decides (Triton puts module names into symbols)."""
    module_name = f"mmcompile_kernel_{source.digest}"
    path = folder / f"{module_name}.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    kernel = getattr(module, "kernel", None)
    names = [p.name for p in source.parameters]
    if list(getattr(kernel, "arg_names", [])) != names:
        raise ToolchainError(
            f"the text of {source.name!r} has no @triton.jit function kernel({', '.join(names)})",
            where=source.name,
            fix="make the entry point's parameters those of the KernelSource, in order",
        )
    return kernel


def _read_ptxas_usage(log: str) -> dict[str, int]:
    """Registers, spills and stack from the log of ``ptxas -v``; device functions add their spills."""
    registers = [int(value) for value in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise ToolchainError("ptxas printed no resource usage", fix="use the ptxas that Triton ships")
    spills = [int(a) for a in re.findall(r"(\d+) bytes spill stores", log)]
    stacks = [int(a) for a in re.findall(r"(\d+) bytes stack frame", log)]
    return {"registers": max(registers), "spills": sum(spills), "stack": max(stacks, default=0)}


def _read_amd_usage(assembly: str) -> dict[str, int]:
    """The same from the code object's metadata; ``registers`` counts VGPRs with accumulation VGPRs."""
    notes = assembly.partition(".amdgpu_metadata")[2]
    field = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)$", notes, flags=re.MULTILINE)}
    return {
        "registers": field["vgpr_count"],
        "accumulation_registers": field["agpr_count"],
        "scalar_registers": field["sgpr_count"],
        "spills": 4 * field["vgpr_spill_count"],
        "stack": field["private_segment_fixed_size"],
        "static_shared": field["group_segment_fixed_size"],
    }


def compile_many(
    jobs: Sequence[CompileJob],
    workers: int | None = None,
    cache_dir: Path | None = None,
    progress: Callable[[JobReport], None] | None = None,
) -> list[CompiledKernel]:
    """Compile many kernels through the disk cache; the results come in the order of the jobs.

    Args:
        workers: processes to use, by default one per CPU; with one, all is compiled in this process.
        cache_dir: where compiled kernels are kept, by default ``default_cache_dir()``.
        progress: called in this process once per job, in order of completion.

    Equal jobs compile once, and what architectures share is done once. Raises the first failing job's ToolchainError.
    """
    cache = KernelCache(cache_dir or default_cache_dir())
    keys = [cache_key(job.source, job.architecture) for job in jobs]
    report = progress or (lambda _: None)
    done: dict[str, CompiledKernel] = {}
    todo: dict[str, CompileJob] = {}
    for key, job in zip(keys, jobs, strict=True):
        if key in done or key in todo:
            continue
        if (hit := cache.load(key, job.source)) is not None:
            done[key] = hit
        else:
            todo[key] = job
    for index, (key, job) in enumerate(zip(keys, jobs, strict=True)):
        if key in done:
            report(JobReport(index, job.source.name, job.architecture.name, 0.0, True))
    families = group([(key, job.source, job.architecture, job.spec) for key, job in todo.items()])
    count = min(workers or os.cpu_count() or 1, len(families))
    waiting: dict[str, CompiledKernel] = {}
    for key, compiled, seconds in compile_all(families, count, compile_family):
        waiting[key] = compiled
        for index in (i for i, other in enumerate(keys) if other == key):
            report(JobReport(index, jobs[index].source.name, compiled.architecture, seconds, False))
        if len(waiting) == _LEDGERS_AT_ONCE:
            done |= _finish(waiting, cache)
            waiting = {}
    done |= _finish(waiting, cache)
    return [replace(done[key], source=job.source) for job, key in zip(jobs, keys, strict=True)]


def _finish(compiled: dict[str, CompiledKernel], cache: KernelCache) -> dict[str, CompiledKernel]:
    """Add the ledgers and put the kernels, by key, into the cache."""
    whole = dict(zip(compiled, add_ledgers(list(compiled.values())), strict=True))
    for key, kernel in whole.items():
        cache.store(key, kernel)
    return whole
