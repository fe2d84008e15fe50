"""Disassembly of compiled kernels and the instruction ledger: which instructions a binary really holds."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from mmcompile.core.errors import LoweringError, ToolchainError
from mmcompile.core.kernel import CompiledKernel, KernelSource

_SASS = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+\{?\s*(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_]*(?:\.[\w:]+)*)",
    re.MULTILINE,
)
_UNKNOWN_ARCHITECTURE = re.compile(r"Cannot decode architecture|is not defined for option")
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
    return _run_nvdisasm(binary, ["-c"])


def _run_nvdisasm(content: bytes, options: Sequence[str]) -> str | None:
    """What the first nvdisasm says that knows the architecture, None if none does."""
    with tempfile.TemporaryDirectory(prefix="mmcompile-") as folder:
        path = Path(folder) / "kernel"
        path.write_bytes(content)
        for tool in find_disassemblers():
            result = subprocess.run([str(tool), *options, str(path)], capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stdout
            if not _UNKNOWN_ARCHITECTURE.search(result.stderr + result.stdout):
                reason = (result.stderr or result.stdout).strip().replace(folder + os.sep, "").partition("\n")[0]
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
        return dict(sorted(Counter(match["name"] for match in _SASS.finditer(text)).items()))
    if syntax == "hip":
        return dict(sorted(Counter(_AMDGCN.findall(text)).items()))
    if syntax != "ptx":
        raise ValueError(f"unknown assembly syntax {syntax!r}")
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    found = (_PTX.match(part) for part in re.split(r"[;\n]", bare))
    return dict(sorted(Counter(match[1] for match in found if match).items()))


def build_ledgers(kernels: Sequence[tuple[str, bytes]], architecture: str) -> list[tuple[dict[str, int], list[str]]]:
    """The instruction ledgers of kernels (assembly, binary): counts, and the listings they come from.

    On NVIDIA they join PTX (lower case) and SASS (upper case); SASS is absent where no nvdisasm decodes the binary.
    """
    if architecture.startswith("gfx"):
        return [(count_instructions(assembly, "hip"), ["amdgcn"]) for assembly, _ in kernels]
    counts = [count_instructions(assembly, "ptx") for assembly, _ in kernels]
    sass = count_sass([binary for _, binary in kernels], architecture)
    if sass is None:
        return [(found, ["ptx"]) for found in counts]
    return [({**held, **found}, ["ptx", "sass"]) for held, found in zip(sass, counts, strict=True)]


def count_sass(binaries: Sequence[bytes], architecture: str) -> list[dict[str, int]] | None:
    """Instructions of every cubin by mnemonic, sorted by name; None if no nvdisasm at hand knows the architecture.

    nvdisasm works half a second before it reads anything, so the code of all cubins goes through it at once, without
    the ELF around it. Raises ToolchainError as ``disassemble_cubin`` does.
    """
    codes = [_read_code(binary) for binary in binaries]
    ends = list(accumulate(map(len, codes)))
    name = architecture.replace("sm_", "SM")
    listing = _run_nvdisasm(b"".join(codes), ["-b", name]) if ends and ends[-1] else ""
    if listing is None:
        return None
    counts: list[Counter[str]] = [Counter() for _ in binaries]
    for match in _SASS.finditer(listing):
        counts[bisect_right(ends, int(match["address"], 16))][match["name"]] += 1
    return [dict(sorted(found.items())) for found in counts]


def _read_code(binary: bytes) -> bytes:
    """The machine code in a cubin, a 64-bit little-endian ELF: its sections .text.*, one after the other."""
    try:
        if binary[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit ELF")
        (table,) = struct.unpack_from("<Q", binary, 40)
        size, count, names = struct.unpack_from("<HHH", binary, 58)
        sections = [struct.unpack_from("<IIQQQQ", binary, table + i * size) for i in range(count)]
        parts = []
        for name, _, _, _, offset, length in sections:
            start = sections[names][4] + name
            if binary[start : start + 6] == b".text.":
                parts.append(binary[offset : offset + length])
                if len(parts[-1]) != length:
                    raise ValueError("a section ends behind the file")
    except (struct.error, IndexError, ValueError) as error:
        raise ToolchainError(f"not a cubin: {error}", fix="compile the kernel again") from error
    return b"".join(parts)


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
