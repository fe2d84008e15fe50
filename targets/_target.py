"""A target: its facts, the kernels it offers, and what it takes to build and to run them."""

from __future__ import annotations

import ctypes
import importlib.metadata
from dataclasses import dataclass
from functools import cached_property

from mmcompile.core.errors import ToolchainError
from mmcompile.core.kernel import CompiledKernel, KernelSource, KernelTemplate
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets import _check, _disassemble, _toolchain
from mmcompile.targets._assemble import probe_instruction

_DRIVERS = {
    "cuda": ("libcuda.so.1", "an NVIDIA driver", "install the driver"),
    "hip": ("libamdhip64.so", "the HIP runtime", "install ROCm"),
}


def has_library(name: str) -> bool:
    """True if the dynamic loader finds the shared library ``name``."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def has_package(name: str) -> bool:
    """True if the distribution ``name`` is installed."""
    return next(importlib.metadata.distributions(name=name), None) is not None


@dataclass(frozen=True, eq=False)
class Target:
    """One target, exported as ``TARGET`` by its file in ``mmcompile/targets``."""

    spec: TargetSpec

    @cached_property
    def kernels(self) -> tuple[KernelTemplate, ...]:
        """The templates on offer, in order of preference (tuned before portable); none where no binary is made."""
        if not self.spec.backend:
            return ()
        from mmcompile.targets._kernels.catalogue import list_kernels

        return tuple(list_kernels(self.spec))

    def find_architecture(self, name: str) -> Architecture:
        """The binary flavour called ``name``; raises UsageError with the closest name."""
        return _check.find_architecture(self.spec, name)

    def compile(self, source: KernelSource, architecture: Architecture) -> CompiledKernel:
        """Compile one kernel, without the disk cache (``_toolchain.compile_many`` has it). Raises ToolchainError."""
        return _toolchain.compile_kernel(source, architecture, self.spec)

    def check(self, compiled: CompiledKernel) -> list[str]:
        """Hold a kernel against the limits and its instruction ledger; raise LoweringError, or return warnings."""
        counts, listings = compiled.metadata["ledger"], compiled.metadata["ledger_from"]
        return _check.check_limits(compiled, self.spec) + _disassemble.check_ledger(compiled.source, counts, listings)

    def disassemble(self, compiled: CompiledKernel) -> str:
        """What the binary holds, as text. Raises ToolchainError if no disassembler here knows the architecture."""
        return _disassemble.disassemble(compiled)

    def missing(self) -> list[str]:
        """What this machine lacks to build for the target or to run it, each with advice; empty if nothing."""
        if not self.spec.backend:
            return []
        found = _missing_to_build(self.spec)
        library, what, advice = _DRIVERS[self.spec.backend]
        if not has_library(library):
            found.append(f"run: {what} ({library}); {advice}")
        if self.spec.backend == "cuda" and not has_package("cuda-bindings"):
            found.append("run: cuda-bindings; pip install 'mmcompile[nvidia]'")
        return found


def _missing_to_build(spec: TargetSpec) -> list[str]:
    """Assemble one instruction per architecture at its lowest PTX version, and disassemble it again."""
    found = []
    probe = "s_nop 0" if spec.backend == "hip" else "mov.b32 r0, r1;"
    for architecture in spec.architectures:
        name = architecture.name
        try:
            binary = probe_instruction(probe, architecture, version=architecture.minimum_ptx)
        except ToolchainError as error:
            found.append(f"build: an assembler for {name} ({error.what}); pip install 'triton>=3.9'")
            continue
        if spec.backend == "cuda" and _disassemble.disassemble_cubin(binary) is None:
            advice = "pip install 'nvidia-cuda-nvdisasm>=13.4'"
            found.append(f"build: an nvdisasm that decodes {name}, to check ledgers; {advice}")
    return found
