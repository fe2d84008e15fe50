"""Compiler processes, and which kernels they can compile together."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from mmcompile.core.errors import MMError, ToolchainError
from mmcompile.core.kernel import CompiledKernel, KernelSource
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._compile_worker import receive, send

_MODULE_TEXT = re.compile(r'\A"""[^"]*"""')
_FUNCTION = "\n@triton.jit\n"  # the last one of a text is the entry point, whose parameters are the symbols
_NAMED_BY_MODULE = ("noinline", "assert")  # of which Triton puts the module's name, that is its digest, into the binary
# The compilers live by small allocations: with longer lists of free ones per thread they need a twelfth less time.
_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=60000"}

Compile = Callable[[KernelSource, Sequence[Architecture], TargetSpec], list[tuple[CompiledKernel, float]]]


@dataclass(frozen=True)
class Family:
    """Sources of which Triton makes the same, by the first of them, with the keys of each architecture."""

    source: KernelSource
    spec: TargetSpec
    keys: dict[Architecture, list[str]]

    def answer(self, made: Sequence[tuple[CompiledKernel, float]]) -> Iterator[tuple[str, CompiledKernel, float]]:
        """What was made for every architecture, by key; the seconds count for the first key of each."""
        for keys, (kernel, seconds) in zip(self.keys.values(), made, strict=True):
            for i, key in enumerate(keys):
                yield key, kernel, 0.0 if i else seconds


def group(jobs: Sequence[tuple[str, KernelSource, Architecture, TargetSpec]]) -> list[Family]:
    """Jobs (key and what to compile) of which Triton does the same; beside backend and warp size no target matters."""
    families: dict[tuple[str, str, int], Family] = {}
    for key, source, architecture, spec in jobs:
        family = families.setdefault((content_key(source), spec.backend, spec.warp_size), Family(source, spec, {}))
        family.keys.setdefault(architecture, []).append(key)
    return list(families.values())


def content_key(source: KernelSource) -> str:
    """What decides the binary: sources that differ in their title and in the names of their symbols alone share it."""
    symbols = {p.name: f"symbol{i}" for i, p in enumerate(source.parameters) if not p.type.startswith("*")}
    if any(word in source.text for word in (*symbols.values(), *_NAMED_BY_MODULE)):
        return source.digest
    before, mark, entry = _MODULE_TEXT.sub("", source.text).rpartition(_FUNCTION)
    if symbols:
        entry = re.sub(rf"\b({'|'.join(symbols)})\b", lambda found: symbols[found[0]], entry)
    text = before + mark + entry
    types = [p.type for p in source.parameters]
    rest = source.num_warps, source.num_stages, source.max_registers, source.private_shared, source.lanes
    return hashlib.sha256(repr((text, types, rest)).encode()).hexdigest()


def compile_all(
    families: Sequence[Family], workers: int, compile_family: Compile
) -> Iterator[tuple[str, CompiledKernel, float]]:
    """Compile each, by ``compile_family`` in this process or in worker processes; yield (key, kernel, seconds)."""
    if workers <= 1:
        for family in families:
            yield from family.answer(compile_family(family.source, list(family.keys), family.spec))
        return
    local = threading.local()
    started: list[subprocess.Popen[bytes]] = []

    def compile_remotely(family: Family) -> list[tuple[CompiledKernel, float]]:
        if not hasattr(local, "process"):
            command = [sys.executable, "-m", "mmcompile.targets._compile_worker"]
            environment = _MALLOC | dict(os.environ)
            local.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            started.append(local.process)
        return _ask(local.process, family)

    pool = ThreadPoolExecutor(workers)
    try:
        futures = {pool.submit(compile_remotely, family): family for family in families}
        for future in as_completed(futures):
            yield from futures[future].answer(future.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.kill()
        pool.shutdown(wait=True)
        for process in started:
            process.communicate()


def _ask(process: subprocess.Popen[bytes], family: Family) -> list[tuple[CompiledKernel, float]]:
    """Send one family to a worker and wait for its answer; raise the error it met."""
    assert process.stdin is not None and process.stdout is not None
    try:
        send(process.stdin, (family.source, list(family.keys), family.spec))
        result = receive(process.stdout)
    except (EOFError, OSError) as error:
        raise ToolchainError(
            "a compiler process died", where=family.source.name, fix="look for its last words above, or use --workers 1"
        ) from error
    if isinstance(result, MMError):
        raise result
    made: list[tuple[CompiledKernel, float]] = result
    return made
