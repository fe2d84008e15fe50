"""Mono-decode at run time: a schedule's table, counters and private copies on the device, and its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mmcompile.core.errors import ToolchainError
from mmcompile.core.plan import Binary, Phase, Plan, Schedule, Stream, View
from mmcompile.core.schedule import (
    COUNTER_STRIDE,
    FAULT,
    OWN_PARAMETERS,
    Placed,
    build_table,
    list_targets,
    place_stages,
)
from mmcompile.core.stream import FAULT_WORD, STAGES
from mmcompile.runtime.device_driver import Driver, PackedArguments
from mmcompile.runtime.executor import Evaluation

_CODE_STAGE = 1 << 16


@dataclass(frozen=True)
class Merged:
    """The bound launches of a schedule: what they cover of the phase, their steps, and where their watchdog reports."""

    launches: range
    steps: tuple[Callable[[], None], ...]
    schedule: Schedule
    placed: tuple[Placed, ...]
    fault: int
    times: int

    def explain(self, code: int, found: int) -> ToolchainError:
        """The error for what the watchdog found: the code of a wait in vain and the value of its counter."""
        stage, program = code % _CODE_STAGE - 1, code // _CODE_STAGE
        waits = self.schedule.stages[stage].waits
        targets = list_targets(self.placed, self.schedule.stages)
        awaited = ", ".join(f"{self.placed[w].name} ({targets[w]} arrivals)" for w in waits)
        return ToolchainError(
            f"a merged decode launch hangs: program {program} waited in vain before stage {stage} "
            f"({self.placed[stage].name}) for {awaited}; it saw {found}",
            fix="load the artifact with mono='off', and report the schedule",
        )

    def prepare(self) -> None:
        """Nothing: the last program of a launch leaves the counters as the next one wants them."""

    def recover(self) -> None:
        """Nothing: a launch with a fault runs to its end, where the last program sets the counters back to zero."""


@dataclass
class Workspace:
    """Memory of a streamed step on the device: zero at first, and again after every ``period`` launches."""

    driver: Driver
    address: int
    size: int
    period: int
    launches: int = 0

    def clear(self) -> None:
        """Make it zero, in stream order."""
        self.driver.fill_zero(self.address, self.size)
        self.launches = 0

    def count(self) -> None:
        """One more launch is about to be queued."""
        if self.launches >= self.period:
            self.clear()
        self.launches += 1


@dataclass(frozen=True)
class Streamed:
    """The bound launch of a streamed step, as ``Merged``."""

    launches: range
    steps: tuple[Callable[[], None], ...]
    schedule: Schedule
    workspace: Workspace
    times: int = 0

    @property
    def fault(self) -> int:
        """Where the watchdog reports: a code and a program."""
        return self.workspace.address + 4 * FAULT_WORD

    def explain(self, code: int, found: int) -> ToolchainError:
        """The error for a wait in vain, from the code of the fault record and the program that it names."""
        layer, stage = divmod(code - 1, len(STAGES))
        return ToolchainError(
            f"a streamed decode step hangs: program {found} waited in vain for {STAGES[stage]!r} of layer {layer}",
            fix="load the artifact with mono='off', and report the schedule",
        )

    def prepare(self) -> None:
        """Before every launch, replayed ones too: the tags of its mailboxes must not come round."""
        self.workspace.count()

    def recover(self) -> None:
        """Make the launch fit to run after a fault: the mailboxes hold words of a step that never ended."""
        self.workspace.clear()


def find_schedule(phase: Phase, symbols: Mapping[str, int], mono: str) -> Schedule | None:
    """The schedule to run a phase by: of the artifact's own choice ("auto") or the named mode; None if not merged.

    "stream" is the artifact's choice where there is no streamed step for so many tokens.
    """
    tokens = symbols.get("tokens", 0)
    for schedule in phase.schedules:
        if schedule.low <= tokens <= schedule.high:
            mode = schedule.mode if mono == "auto" or (mono == "stream" and schedule.stream is None) else mono
            return None if mode in ("off", "standalone") else schedule.model_copy(update={"mode": mode})
    return None


@dataclass
class MergedMemory:
    """Device memory of the schedules of an executor; launches run one after the other, so each has one set.

    records: launches bound from now on write when their programs start, may start and end each stage.
    """

    plan: Plan
    driver: Driver
    records: bool = False
    _counters: dict[str, int] = field(default_factory=dict)
    _private: dict[int, int] = field(default_factory=dict)
    _workspaces: dict[str, Workspace] = field(default_factory=dict)
    _tables: dict[bytes, int] = field(default_factory=dict)

    def counters(self, schedule: Schedule) -> int:
        """Zeroed counters; the last program of a launch leaves them zeroed again."""
        key = f"{schedule.kernel} {schedule.low}"
        if key not in self._counters:
            size = 4 * COUNTER_STRIDE * (len(schedule.stages) + 1)
            self._counters[key] = self.driver.allocate(size)
            self.driver.fill_zero(self._counters[key], size)
        return self._counters[key]

    def workspace(self, stream: Stream) -> Workspace:
        """The workspace of a streamed step: one for each kernel, whatever its launches are bound to."""
        name = stream.record.kernel
        if name not in self._workspaces:
            address = self.driver.allocate(stream.workspace_bytes)
            self._workspaces[name] = Workspace(self.driver, address, stream.workspace_bytes, stream.period)
            self._workspaces[name].clear()
        return self._workspaces[name]

    def private(self, schedule: Schedule) -> int:
        """The programs' parts, one after the other."""
        size = schedule.programs * schedule.private_bytes
        if size and size not in self._private:
            self._private[size] = self.driver.allocate(size)
        return self._private.get(size, 0)

    def times(self, schedule: Schedule) -> int:
        """Room for the times of a schedule, int64 [stages, programs, 3]; 0 if they are not recorded."""
        return self.driver.allocate(24 * len(schedule.stages) * schedule.programs) if self.records else 0

    def table(self, data: bytes) -> int:
        """A copy of ``data`` on the device."""
        if data not in self._tables:
            host = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._tables[data] = self.driver.allocate(len(data))
            self.driver.copy_to_device(self._tables[data], host.data_ptr(), len(data))
            self.driver.synchronize()
        return self._tables[data]


def bind_schedule(
    memory: MergedMemory,
    schedule: Schedule,
    phase: Phase,
    sizes: Evaluation,
    locate: Callable[[View], int],
    function: object,
    binary: Binary,
) -> Merged:
    """Fill the table for these symbol values and make the launches of the schedule's mode.

    locate: device address of a view.
    """
    records = [stage.record for stage in schedule.stages]
    names = [phase.launches[stage.launch].name for stage in schedule.stages]
    placed = place_stages(schedule.stages, names, [r.grid for r in records], sizes.symbols, schedule.programs)
    base = memory.private(schedule)

    def bind(view: View) -> tuple[int, int]:
        if view.buffer not in schedule.private:
            return locate(view), 0
        itemsize = getattr(torch, memory.plan.buffers[view.buffer].dtype).itemsize
        return base + schedule.private[view.buffer] + sizes.number(view.offset) * itemsize, schedule.private_bytes

    arguments = [[bind(a) for a in record.arguments if isinstance(a, View)] for record in records]
    table = memory.table(build_table(placed, schedule.stages, arguments).tobytes())
    counters, times = memory.counters(schedule), memory.times(schedule)
    ranges = schedule.layers if schedule.mode == "layer" else ((0, len(schedule.stages)),)
    symbols = memory.plan.kernels[schedule.kernel].parameters[len(OWN_PARAMETERS) :]
    values = [sizes.number(name) for name, _ in symbols]
    threads, driver = binary.num_warps * binary.warp_size, memory.driver
    packed = [PackedArguments([table, counters, times, first, last, *values, 0, 0]) for first, last in ranges]
    grid = (schedule.programs, 1, 1)
    steps = tuple(
        lambda a=a.address, keep=a: driver.launch(function, grid, threads, binary.shared, a, cooperative=True)
        for a in packed
    )
    covered = range(schedule.stages[0].launch, schedule.stages[-1].launch + 1)
    return Merged(covered, steps, schedule, tuple(placed), counters + 4 * FAULT, times)


def bind_stream(
    memory: MergedMemory,
    schedule: Schedule,
    stream: Stream,
    sizes: Evaluation,
    locate: Callable[[View], int],
    function: object,
    binary: Binary,
) -> Streamed:
    """Make the launch of a streamed step; see ``bind_schedule``."""
    workspace, driver = memory.workspace(stream), memory.driver
    symbols = {"workspace": workspace.address}
    values = [locate(a) if isinstance(a, View) else symbols.get(a) or sizes.number(a) for a in stream.record.arguments]
    packed = PackedArguments([*values, 0, 0])
    grid, threads = (stream.programs, 1, 1), binary.num_warps * binary.warp_size
    return Streamed(
        range(stream.last + 1),
        (lambda: driver.launch(function, grid, threads, binary.shared, packed.address, cooperative=True),),
        schedule,
        workspace,
    )
