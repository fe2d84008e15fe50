"""The door of the PTX emulator: what is unknown of a kernel, and running a launch of it."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Argument, Dim3, Launch, Report, TensorMap, UnknownInstruction
from mmcompile.emulate.ptx.dataflow import Flow
from mmcompile.emulate.ptx.group import WARP, Group, LaunchState
from mmcompile.emulate.ptx.program import Program, load_program
from mmcompile.emulate.ptx.scheduler import Scheduler
from mmcompile.emulate.ptx.synchronisation import Order
from mmcompile.emulate.ptx.translator import Translator, list_refused, load_translator

_LANES_TOGETHER = 8192
"""Lanes of the blocks that run side by side: enough to hide the cost of a numpy call, within the caches."""
_QUANTUM = 64
"""Basic blocks that an interleaved program runs before another gets its turn, at most."""
_BUSY = 256
"""Basic blocks without polling that count as progress."""
_SPIN_LIMIT = 500
"""Rounds of nothing but polling, for each resident group, after which a launch counts as deadlocked."""
_LOOP_LIMIT = 100
"""The same for rounds in which a fragment ran for very long without polling or waiting."""


@lru_cache(32)
def _list_unknown(assembly: str, entry: str) -> tuple[UnknownInstruction, ...]:
    return tuple(list_refused(load_program(assembly, entry)))


def list_unknown(assembly: str, entry: str) -> list[UnknownInstruction]:
    """Instructions of the kernel without semantics, by form, in the order of their first line."""
    return list(_list_unknown(assembly, entry))


def run(launch: Launch) -> Report:
    """Run a launch; its memory holds the results. Raises EmulationFault."""
    if launch.threads <= 0 or launch.threads % WARP:
        raise EmulationFault("illegal", f"{launch.threads} threads in a block, a multiple of {WARP} is needed")
    translator = load_translator(launch.assembly, launch.entry)
    state = _prepare(launch, translator.program, translator.flow)
    together = max(1, _LANES_TOGETHER // launch.threads)
    if launch.schedule != "program" or launch.check_races:
        together = 1
    programs = launch.list_programs()
    waiting = [(start, programs[start : start + together]) for start in range(0, len(programs), together)]
    entered: set[int] = set()
    report = Report(total=translator.program.total)
    with np.errstate(all="ignore"):
        _Resident(launch, state, translator, entered, report).run(waiting)
    instructions = [i for block in entered for i in translator.program.block_instructions(block)]
    report.covered = {instruction.line for instruction in instructions if instruction.line}
    report.unchecked = sorted(translator.notes)
    return report


class _Resident:
    """The groups that are under way: one after the other, or all of them taking turns."""

    def __init__(
        self, launch: Launch, state: LaunchState, translator: Translator, entered: set[int], report: Report
    ) -> None:
        self.launch, self.state, self.translator = launch, state, translator
        self.entered, self.report = entered, report
        self.random = random.Random(launch.seed)
        self.interleaved = launch.schedule == "interleaved"
        self.schedulers: list[Scheduler] = []

    def run(self, waiting: list[tuple[int, list[Dim3]]]) -> None:
        """Run all groups of blocks (number of the first block, blocks)."""
        waiting, idle = waiting[::-1], 0
        while waiting or self.schedulers:
            while waiting and (self.interleaved or not self.schedulers):
                self._start(*waiting.pop())
            scheduler = self.random.choice(self.schedulers) if self.interleaved else self.schedulers[0]
            outcome = self._advance(scheduler)
            if outcome in ("spinning", "looping"):
                idle += 1 if outcome == "spinning" else _SPIN_LIMIT // _LOOP_LIMIT
            elif outcome == "done" or scheduler.since_poll > _BUSY:
                idle = 0
            if idle > _SPIN_LIMIT * len(self.schedulers):
                raise scheduler.group.fault("deadlock", f"only polling is left: {scheduler.describe()}")
            if outcome == "done":
                self._finish(scheduler)

    def _start(self, first: int, blocks: list[Dim3]) -> None:
        group = Group(self.state, blocks, first)
        seed = self.random.randrange(1 << 30) if self.launch.schedule == "warp" else None
        self.schedulers.append(Scheduler(group, self.translator, seed))

    def _advance(self, scheduler: Scheduler) -> str:
        try:
            if self.interleaved:
                return scheduler.run(self.random.randint(1, _QUANTUM))
            return scheduler.run()
        except EmulationFault as fault:
            if fault.line:
                raise
            raise scheduler.group.fault(fault.kind, fault.what) from fault

    def _finish(self, scheduler: Scheduler) -> None:
        self.schedulers.remove(scheduler)
        self.entered |= scheduler.entered
        self.report.instructions += scheduler.group.executed
        if self.state.order:
            self.state.order.drop_shared(scheduler.group)


def _prepare(launch: Launch, program: Program, flow: Flow) -> LaunchState:
    """Parameters as bytes, module variables in global memory, the race check."""
    parameters, maps = _pack_parameters(program, launch.arguments)
    addresses = {
        name: np.uint64(launch.memory.register(np.frombuffer(contents, np.uint8), name))
        for name, contents in program.module.globals.items()
    }
    memory = launch.memory
    state = LaunchState(
        program, memory, launch.grid, launch.threads, launch.shared_bytes, parameters, maps, addresses, late=launch.late
    )
    state.undefined = flow.tracked
    state.partly_unknown = memory.partly_unknown
    if launch.check_races:
        warps = len(launch.list_programs()) * (launch.threads // WARP)
        state.order = Order(warps, memory)
    return state


def _pack_parameters(program: Program, arguments: Sequence[Argument]) -> tuple[bytes, dict[int, TensorMap]]:
    """The parameter bytes, and the TMA descriptors among them by offset. Missing arguments are zero."""
    if len(arguments) > len(program.parameters):
        names = ", ".join(program.parameters)
        raise EmulationFault("illegal", f"{len(arguments)} arguments for {len(program.parameters)} parameters: {names}")
    packed, maps = bytearray(program.parameter_bytes), dict[int, TensorMap]()
    for (name, (offset, size)), value in zip(program.parameters.items(), arguments, strict=False):
        if isinstance(value, TensorMap):
            maps[offset] = value
            continue
        if isinstance(value, float):
            value = struct.pack({4: "<f", 8: "<d"}[size], value)
        raw = value if isinstance(value, bytes) else (int(value) % (1 << 8 * size)).to_bytes(size, "little")
        if len(raw) != size:
            raise EmulationFault("illegal", f"{len(raw)} bytes for parameter {name} of {size} bytes")
        packed[offset : offset + size] = raw
    return bytes(packed), maps
