"""Execute an artifact's emitted assembly in the emulators, as a runner of verify."""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcompile.core.errors import VerificationError
from mmcompile.core.kernel import KernelSource
from mmcompile.core.plan import Binary
from mmcompile.driver.progress import Progress
from mmcompile.driver.verify_run import POISON, Check, Outcome, run_check
from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Launch, Report
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel
from mmcompile.runtime.artifact import Artifact
from mmcompile.targets._interpret import Argument

# What differs between the texts for two architectures without a difference in the program.
_HEADER = re.compile(r"^\s*(//.*|\.version .*|\.target .*|\.file\b.*|\.loc\b.*)$", re.MULTILINE)
_DEBUG = re.compile(r"^\s*\.section\s+\.debug.*?(?=^\s*\.section\s+(?!\.debug)|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Assembly:
    """The emitted text of one kernel for one architecture, and its launch record."""

    text: str
    binary: Binary

    @cached_property
    def program(self) -> str:
        """The text without what names the architecture or serves debugging: equal texts run alike."""
        return _HEADER.sub("", _DEBUG.sub("", self.text))


@dataclass
class Emulation:
    """Outcome of a check in an emulator; ``reports`` by kernel."""

    outcome: Outcome
    reports: dict[str, Report] = field(default_factory=dict)

    @property
    def instructions(self) -> int:
        """Executed, one for each active thread."""
        return sum(report.instructions for report in self.reports.values())

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What the emulator could not check, each sentence once."""
        return tuple(dict.fromkeys(s for report in self.reports.values() for s in report.unchecked))

    @property
    def coverage(self) -> float:
        """Share of the instructions of the kernels' texts that were executed."""
        total = sum(report.total for report in self.reports.values())
        return sum(len(report.covered) for report in self.reports.values()) / total if total else 0.0


@dataclass(frozen=True)
class Job:
    """One check with the assembly of one architecture, and all (target, unit, architecture) that it answers for."""

    check: Check
    assemblies: Mapping[str, Assembly]
    answers: list[tuple[str, str, str]] = field(default_factory=list)


def list_jobs(artifact: Artifact, units: Sequence[tuple[str, str, Check]]) -> list[Job]:
    """The different jobs of ``units`` (target, key of the check, check): equal programs run once for all targets."""
    jobs: dict[str, Job] = {}
    known: dict[str, Assembly] = {}

    def read(binary: Binary) -> Assembly:
        if binary.assembly not in known:
            known[binary.assembly] = Assembly((artifact.root / binary.assembly).read_text(), binary)
        return known[binary.assembly]

    for target, key, check in units:
        kernels = artifact.plan(target).kernels
        for architecture in kernels[next(iter(check.sources))].binaries:
            assemblies = {name: read(kernels[name].binaries[architecture]) for name in check.sources}
            programs = [(a.program, a.binary.shared, a.binary.num_warps) for a in assemblies.values()]
            identity = hashlib.sha256(repr([key, programs]).encode()).hexdigest()
            used = {name: check.buffers[name] for name in check.buffer_names}
            job = jobs.setdefault(identity, Job(replace(check, buffers=used), assemblies))
            job.answers.append((target, key, architecture))
    return list(jobs.values())


Emulations = dict[tuple[str, str], dict[str, tuple[Emulation, float]]]


def run_jobs(jobs: Sequence[Job], workers: int, progress: Progress) -> Emulations:
    """Emulation and seconds by (target, unit) and architecture; every job runs in a worker process."""
    results: Emulations = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, workers), mp_context=context) as pool:
        futures = {pool.submit(_run_job, job.check, job.assemblies): job for job in jobs}
        for done, future in enumerate(as_completed(futures), 1):
            job, result = futures[future], future.result()
            for target, key, architecture in job.answers:
                results.setdefault((target, key), {})[architecture] = result
            progress("emulate", " + ".join(job.assemblies), done, len(jobs))
    return {unit: dict(sorted(found.items())) for unit, found in results.items()}


def _run_job(check: Check, assemblies: Mapping[str, Assembly]) -> tuple[Emulation, float]:
    torch.set_num_threads(1)
    start = time.perf_counter()
    runner = EmulatorRunner(assemblies)
    emulation = Emulation(run_check(check, runner), runner.reports)
    return emulation, time.perf_counter() - start


class EmulatorRunner:
    """See :class:`mmcompile.driver.verify_run.Runner`.

    Buffers have no guards: the emulator itself faults at the first byte outside of them. Elements that still hold
    their poison count as never written, but for single bytes, whose every value is possible. The runs alternate
    between the latest and the earliest legal completion of asynchronous operations.
    """

    proof = "emulator"
    sampling = (64, 12)
    guard = 0

    def __init__(self, assemblies: Mapping[str, Assembly], seed: int | None = None) -> None:
        """seed: every warp runs on its own, in an order that follows from it."""
        self._assemblies = assemblies
        self._seed = seed
        self._runs = 0
        self.reports: dict[str, Report] = {}

    def run(
        self,
        source: KernelSource,
        arguments: Sequence[Argument],
        grid: tuple[int, int, int],
        programs: Sequence[tuple[int, int, int]] | None = None,
        *,
        written: Collection[int] = (),
    ) -> list[Argument]:
        """Execute the kernel's assembly over the grid. Raises VerificationError with the emulator's fault."""
        assembly = self._assemblies[source.name]
        binary, memory = assembly.binary, DeviceMemory()
        addresses = _register(memory, source, arguments, written)
        values = [
            addresses[a.untyped_storage().data_ptr()] + a.storage_offset() * a.element_size()
            if isinstance(a, Tensor)
            else int(a)
            for a in arguments
        ]
        count = grid[0] * grid[1] * grid[2]
        for name, size in (("global", binary.global_scratch_size), ("profile", binary.profile_scratch_size)):
            empty = np.zeros(count * size, np.uint8)
            values.append(memory.register(empty, f"{name} scratch", known=False) if size else 0)
        launch = Launch(
            assembly.text, binary.symbol, grid, binary.num_warps * binary.warp_size, binary.shared, values, memory,
            programs, schedule="program" if self._seed is None else "warp", late=self._runs % 2 == 0,
            check_races=True, seed=self._runs if self._seed is None else self._seed,
        )  # fmt: skip
        self._runs += 1
        try:
            report = run_kernel(launch)
        except EmulationFault as fault:
            raise VerificationError(f"{source.name}: {fault.message}") from fault
        self._add(source.name, report)
        return [_read_back(memory, a, addresses) if isinstance(a, Tensor) else a for a in arguments]

    def _add(self, name: str, report: Report) -> None:
        """Take a run into the kernel's report."""
        before = self.reports.setdefault(name, Report(total=report.total))
        before.instructions += report.instructions
        before.covered |= report.covered
        before.unchecked += [sentence for sentence in report.unchecked if sentence not in before.unchecked]


def _register(
    memory: DeviceMemory, source: KernelSource, arguments: Sequence[Argument], written: Collection[int]
) -> dict[int, int]:
    """Device address of each storage, by its host address."""
    addresses: dict[int, int] = {}
    storages = [a.untyped_storage().data_ptr() if isinstance(a, Tensor) else 0 for a in arguments]
    writable = {storages[i] for i in written}
    for argument, parameter, key in zip(arguments, source.parameters, storages, strict=True):
        if isinstance(argument, Tensor) and key not in addresses:
            raw = _as_bytes(argument)
            known = _find_known(raw, argument.dtype)
            addresses[key] = memory.register(raw, parameter.name, writable=key in writable, known=known)
    return addresses


def _as_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The whole storage behind a tensor."""
    flat: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return flat


def _find_known(raw: npt.NDArray[np.uint8], dtype: torch.dtype) -> npt.NDArray[np.bool_] | bool:
    """Which bytes are not poison any more: one bool, or one for each byte."""
    size = dtype.itemsize
    if size == 1 and not dtype.is_floating_point:
        return True
    poison = int.from_bytes(bytes([POISON[dtype.is_floating_point]]) * size, "little")
    elements = raw.view(f"u{size}") != poison
    return True if elements.all() else np.repeat(elements, size)


def _read_back(memory: DeviceMemory, tensor: Tensor, addresses: Mapping[int, int]) -> Tensor:
    """The tensor's view of its storage as the kernel left it."""
    address = addresses[tensor.untyped_storage().data_ptr()]
    flat = torch.from_numpy(memory.contents(address)).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
