"""The disk cache of compiled kernels: one checksummed file per key, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mmcompile.core.errors import ToolchainError
from mmcompile.core.kernel import CompiledKernel, KernelSource
from mmcompile.core.spec import Architecture
from mmcompile.targets._assemble import ptxas_version
from mmcompile.targets._capability import code_capability
from mmcompile.targets._disassemble import find_disassemblers

_FORMAT = 1


def default_cache_dir() -> Path:
    """MMCOMPILE_CACHE if set, else ``mmcompile/kernels`` under the user's XDG cache folder."""
    if explicit := os.environ.get("MMCOMPILE_CACHE"):
        return Path(explicit)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mmcompile" / "kernels"


@lru_cache
def _toolchain_key(environment: tuple[tuple[str, str], ...]) -> str:
    """Everything outside a source that decides its binary and ledger."""
    import triton

    listers = [f"{path}:{path.stat().st_size}" for path in find_disassemblers()]
    return repr((_FORMAT, triton.__version__, ptxas_version(), listers, environment))


def cache_key(source: KernelSource, architecture: Architecture) -> str:
    """Name of a kernel's cache entry: hash of source, architecture, Triton, ptxas and Triton's settings."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    toolchain = _toolchain_key(tuple(sorted(get_cache_invalidating_env_vars().items())))
    text = repr((source.digest, architecture.name, code_capability(source, architecture), toolchain))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class KernelCache:
    """Compiled kernels under ``folder``. Several processes may share it."""

    folder: Path

    def load(self, key: str, source: KernelSource) -> CompiledKernel | None:
        """The entry of ``key``, or None if there is none or its checksum fails (it is then built anew)."""
        try:
            checksum, payload = (self.folder / f"{key}.kernel").read_bytes().split(b"\n", 1)
        except (OSError, ValueError):
            return None
        if hashlib.sha256(payload).hexdigest().encode() != checksum:
            return None
        record = json.loads(payload)
        binary = base64.b64decode(record["binary"])
        return CompiledKernel(source, record["architecture"], record["assembly"], binary, record["metadata"])

    def store(self, key: str, compiled: CompiledKernel) -> None:
        """Write an entry and rename it into place. Raises ToolchainError if the folder is not writable."""
        record = {
            "architecture": compiled.architecture,
            "assembly": compiled.assembly,
            "binary": base64.b64encode(compiled.binary).decode(),
            "metadata": compiled.metadata,
        }
        payload = json.dumps(record, sort_keys=True).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=f".{key}.") as folder:
                written = Path(folder) / key
                written.write_bytes(hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
                os.replace(written, self.folder / f"{key}.kernel")
        except OSError as error:
            raise ToolchainError(
                f"the kernel cache cannot be written: {error.strerror}",
                where=str(self.folder),
                fix="free space there or set MMCOMPILE_CACHE to a writable folder",
            ) from error
