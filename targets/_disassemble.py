"""Disassembly of compiled kernels and the instruction ledger: which instructions a binary really holds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from mmcompile.core.errors import LoweringError, ToolchainError
from mmcompile.core.kernel import CompiledKernel, KernelSource

_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[\w:]+)*)", re.MULTILINE)
_AMDGCN = re.compile(r"^\s+((?:v|s|ds|buffer|global|flat|scratch|tbuffer)_[a-z0-9_]+)\b(?!:)", re.MULTILINE)
_PTX = re.compile(r"^\s*\{?\s*(?:@!?%?\w+\s+)?([a-z][a-z0-9_]*(?:\.[\w:]+)*)(?=\s|$)")


@lru_cache
def find_disassemblers() -> tuple[Path, ...]:
    """The nvdisasm programs at hand: TRITON_NVDISASM_PATH if set, the nvidia-cuda-nvdisasm wheel, Triton's own.

    Triton 3.9 ships release 13.1, which cannot decode sm_107a; release 13.4 and newer can.
    """
    from triton import knobs

    found: list[Path] = []
    bundled = Path(knobs.nvidia.nvdisasm.path)
    if "TRITON_NVDISASM_PATH" in os.environ:
        found.append(bundled)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(Path(root).glob("cu*/bin/nvdisasm"), reverse=True)
    found.append(bundled)
    return tuple(dict.fromkeys(path for path in found if os.access(path, os.X_OK)))


def disassemble_cubin(binary: bytes) -> str | None:
    """SASS text of a cubin, or None if no nvdisasm at hand knows its architecture.

    Raises ToolchainError if the disassembler fails for another reason, e.g. on a damaged binary.
    """
    with tempfile.TemporaryDirectory(prefix="mmcompile-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        for tool in find_disassemblers():
            result = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stdout
            if "Cannot decode architecture" not in result.stderr + result.stdout:
                reason = (result.stderr or result.stdout).strip().replace(folder + os.sep, "")
                raise ToolchainError(f"nvdisasm fails: {reason}", fix="compile the kernel again")
    return None


def disassemble(compiled: CompiledKernel) -> str:
    """What the binary holds, as text: SASS for a cubin; for gfx950 the amdgcn text.

    Triton assembles the gfx950 binary from exactly that text, so it is the disassembly. Raises ToolchainError if no
    disassembler for the architecture is installed.
    """
    if compiled.architecture.startswith("gfx"):
        return compiled.assembly
    text = disassemble_cubin(compiled.binary)
    if text is None:
        raise ToolchainError(
            f"no nvdisasm here can decode {compiled.architecture}",
            where=compiled.source.name,
            fix="pip install 'nvidia-cuda-nvdisasm>=13.4'",
        )
    return text


def count_instructions(text: str, syntax: str) -> dict[str, int]:
    """Count the instructions of a listing by mnemonic with its modifiers, sorted by name.

    ``syntax`` is "cuda" (SASS), "hip" (amdgcn) or "ptx". Directives, labels, comments and guards do not count.
    """
    if syntax == "cuda":
        return dict(sorted(Counter(_SASS.findall(text)).items()))
    if syntax == "hip":
        return dict(sorted(Counter(_AMDGCN.findall(text)).items()))
    if syntax != "ptx":
        raise ValueError(f"unknown assembly syntax {syntax!r}")
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    found = (_PTX.match(part) for part in re.split(r"[;\n]", bare))
    return dict(sorted(Counter(match[1] for match in found if match).items()))


def build_ledger(assembly: str, binary: bytes, backend: str) -> tuple[dict[str, int], list[str]]:
    """The instruction ledger of a kernel: counts, and the listings they come from.

    On NVIDIA it joins PTX (lower case) and SASS (upper case); SASS is absent where no nvdisasm decodes the binary.
    """
    if backend == "hip":
        return count_instructions(assembly, "hip"), ["amdgcn"]
    counts = count_instructions(assembly, "ptx")
    listing = disassemble_cubin(binary)
    if listing is None:
        return counts, ["ptx"]
    return {**count_instructions(listing, "cuda"), **counts}, ["ptx", "sass"]


def check_ledger(source: KernelSource, counts: Mapping[str, int], listings: Sequence[str] = ("sass",)) -> list[str]:
    """Compare a ledger with what the source promises; raise LoweringError on the first broken promise.

    A promise is a substring of a mnemonic that must (True) or must not (False) occur. Upper-case ones speak of SASS: if
    "sass" is not among ``listings`` they cannot be judged, and each is returned as a warning.
    """
    warnings: list[str] = []
    for pattern, expected in source.ledger.items():
        hits = {name: count for name, count in counts.items() if pattern in name}
        if pattern[:1].isupper() and "sass" not in listings:
            warnings.append(f"{source.name}: {pattern!r} not checked, no nvdisasm here decodes this architecture")
        elif expected and not hits:
            raise LoweringError(
                f"the binary of {source.name!r} holds no {pattern!r} instruction, which its source promises",
                where=source.name,
                fix="read the disassembly; the compiler dropped or replaced the instruction",
            )
        elif hits and not expected:
            listed = ", ".join(f"{name} x{count}" for name, count in hits.items())
            raise LoweringError(
                f"the binary of {source.name!r} holds {listed}, which its source forbids ({pattern!r})",
                where=source.name,
                fix="read the disassembly; the kernel took a path that this target must not take",
            )
    return warnings
