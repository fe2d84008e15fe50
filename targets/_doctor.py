"""What ``mmcompile targets`` lists and what ``mmcompile doctor`` checks: by doing, not by version strings."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.errors import MMError, ToolchainError
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.core.spec import Architecture
from mmcompile.targets._assemble import ptx_version, ptxas_version
from mmcompile.targets._cache import default_cache_dir
from mmcompile.targets._disassemble import find_disassemblers
from mmcompile.targets._target import Target, has_library, has_package

_MINIMUM_FREE_BYTES = 5 * 10**9
_TINY_KERNEL = '''"""Adds two vectors of 256 elements."""
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, result):
    i = tl.arange(0, 256)
    tl.store(result + i, tl.load(x + i) + tl.load(y + i))
'''


def list_targets() -> list[Target]:
    """Every target, by name."""
    return [load_module("targets", name).TARGET for name in list_names("targets")]


def describe_targets() -> list[dict[str, Any]]:
    """One record per target: name, description, architectures, needs, executed_on, missing.

    ``architectures`` maps each binary flavour to the devices that load it; ``needs`` names assembler, lowest PTX
    version and driver; ``executed_on`` is the hardware that generated code has really run on; ``missing`` is what this
    machine lacks, each with advice.
    """
    return [
        {
            "name": target.spec.name,
            "description": target.spec.description,
            "architectures": {a.name: list(a.runs_on) for a in target.spec.architectures},
            "needs": _describe_needs(target),
            "executed_on": target.spec.executed_on,
            "missing": target.missing(),
        }
        for target in list_targets()
    ]


def _describe_needs(target: Target) -> dict[str, str]:
    if not target.spec.backend:
        return {"toolchain": "none", "ptx": "", "driver": "none"}
    versions = {a.name: a.minimum_ptx for a in target.spec.architectures if a.minimum_ptx}
    return {
        "toolchain": "Triton's ptxas" if target.spec.backend == "cuda" else "Triton's LLVM and lld",
        "ptx": ", ".join(f"{name}: {version}" for name, version in versions.items()),
        "driver": target.spec.driver,
    }


def run_doctor() -> list[dict[str, Any]]:
    """Check this machine. Each record: check, ok, detail, advice ("" where ok). A real compilation per architecture.

    What is only needed to run on a GPU, and optional packages, are marked as such in ``advice``.
    """
    return [*_check_packages(), *_check_tools(), *_check_compilers(), *_check_drivers(), *_check_disk()]


def _record(check: str, ok: bool, detail: str, advice: str) -> dict[str, Any]:
    return {"check": check, "ok": ok, "detail": detail, "advice": "" if ok else advice}


def _check_packages() -> Iterator[dict[str, Any]]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield _record("python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer")
    for package, advice in (
        ("torch", "pip install 'torch>=2.13'"),
        ("triton", "pip install 'triton>=3.9'"),
        ("transformers", "optional, to load checkpoints: pip install 'mmcompile[hf]'"),
        ("tokenizers", "optional, to read text: pip install 'mmcompile[hf]'"),
        ("gguf", "optional, to read GGUF files: pip install 'mmcompile[gguf]'"),
    ):
        try:
            yield _record(package, True, importlib.metadata.version(package), advice)
        except importlib.metadata.PackageNotFoundError:
            yield _record(package, False, "not installed", advice)


def _attempt(check: str, action: Callable[[], str], advice: str) -> dict[str, Any]:
    """Record what ``action`` returns, or the error it raises."""
    try:
        return _record(check, True, action(), advice)
    except MMError as error:
        return _record(check, False, error.what, error.fix or advice)
    except (ImportError, OSError, RuntimeError) as error:
        return _record(check, False, f"{type(error).__name__}: {error}", advice)


def _check_tools() -> Iterator[dict[str, Any]]:
    yield _attempt(
        "ptxas", lambda: f"release {ptxas_version()}, PTX {ptx_version()}", "pip install --force-reinstall triton"
    )
    yield _attempt("nvdisasm", _find_nvdisasm, "pip install 'nvidia-cuda-nvdisasm>=13.4'")


def _find_nvdisasm() -> str:
    tools = find_disassemblers()
    if not tools:
        raise ToolchainError("no nvdisasm found")
    return str(tools[0])


def _check_compilers() -> Iterator[dict[str, Any]]:
    for target in list_targets():
        for architecture in target.spec.architectures:
            advice = "pip install --force-reinstall 'triton>=3.9'"
            yield _attempt(f"compile {architecture.name}", lambda t=target, a=architecture: _compile_tiny(t, a), advice)


def _compile_tiny(target: Target, architecture: Architecture) -> str:
    """Compile the tiny kernel, hold it against the limits, and say what came out; raises MMError."""
    parameters = tuple(Parameter(name, "*fp32", name) for name in ("x", "y", "result"))
    compiled = target.compile(KernelSource("doctor", _TINY_KERNEL, parameters, ("1", "1", "1")), architecture)
    target.check(compiled)
    facts = compiled.metadata
    listings = " and ".join(facts["ledger_from"])
    return f"{len(compiled.binary)} bytes, {facts['registers']} registers, instructions read from {listings}"


def _check_drivers() -> Iterator[dict[str, Any]]:
    for check, library, advice in (
        ("NVIDIA driver", "libcuda.so.1", "only to run on an NVIDIA GPU: install driver 580 or newer"),
        ("HIP runtime", "libamdhip64.so", "only to run on an AMD GPU: install ROCm"),
    ):
        ok = has_library(library)
        yield _record(check, ok, library if ok else f"{library} not found", advice)
    ok = has_package("cuda-bindings")
    advice = "only to run on an NVIDIA GPU: pip install 'mmcompile[nvidia]'"
    yield _record("cuda-bindings", ok, "installed" if ok else "not installed", advice)


def _check_disk() -> Iterator[dict[str, Any]]:
    folder = default_cache_dir()
    yield _attempt("cache folder", lambda: _write_probe(folder), "set MMCOMPILE_CACHE to a writable folder")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 1e9:.1f} GB free at {existing}"
    yield _record("disk space", free >= _MINIMUM_FREE_BYTES, detail, "free 5 GB or set MMCOMPILE_CACHE elsewhere")


def _write_probe(folder: Path) -> str:
    """Create the folder if need be and write a file into it; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(16))
    return str(folder)
