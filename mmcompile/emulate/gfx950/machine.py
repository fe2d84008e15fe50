"""The door of the gfx950 emulator: which instructions of a text are unknown, and running a launch."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.gfx950.decoder import Block, build_blocks, decode
from mmcompile.emulate.gfx950.parser import Kernel, parse_kernel
from mmcompile.emulate.gfx950.scheduler import Scheduler
from mmcompile.emulate.gfx950.state import EXEC, KERNARG, LANES, M0, SCALAR, Waves
from mmcompile.emulate.gfx950.synchronise import MOST_AGENTS, GlobalRaces, Races
from mmcompile.emulate.launch import Dim3, Launch, Report, UnknownInstruction

GROUP_WAVES = 128
"""Waves that run side by side in the schedule "program"."""
LDS_LIMIT = 160 * 1024
"""Bytes of local memory of a compute unit (AMD Instinct CDNA4 ISA, "Local Data Share")."""


def list_unknown(assembly: str, entry: str) -> list[UnknownInstruction]:
    """Instructions of the kernel and the functions it may call without semantics, by form, in the order of their first
    line."""
    kernel = parse_kernel(assembly, entry)
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    for i in kernel.instructions[kernel.start :]:
        if decode_or_none(i) is None:
            lines.setdefault(i.form, i.line)
            counts[i.form] = counts.get(i.form, 0) + 1
    return [UnknownInstruction(form, line, counts[form]) for form, line in lines.items()]


def decode_or_none(i: Any) -> Any:
    """Decoded, or None also where the operands of a known name have an unknown form."""
    if re.search(r"@rel32@", i.text):
        return i
    try:
        return decode(i)
    except EmulationFault:
        return None


@functools.lru_cache(maxsize=32)
def load_kernel(assembly: str, entry: str) -> tuple[Kernel, list[Block], dict[int, int]]:
    """Parsed and decoded once for all launches of a text."""
    kernel = parse_kernel(assembly, entry)
    return kernel, *build_blocks(kernel)


def run(launch: Launch) -> Report:
    """Run a launch; ``launch.memory`` holds the results. Raises EmulationFault."""
    kernel, blocks, block_of = load_kernel(launch.assembly, launch.entry)
    for block in blocks:
        block.covered = False
    report = Report(total=len({i.line for i in kernel.instructions[kernel.start :]}))
    per_program = -(-launch.threads // LANES)
    check_launch(launch, kernel)
    arguments = pack_arguments(launch, kernel)
    programs = launch.list_programs()
    shared = make_global_races(launch, per_program * len(programs), report)
    size = choose_group(launch, per_program, len(programs))
    for first in range(0, len(programs), size):
        chosen = programs[first : first + size]
        w = make_waves(launch, kernel, chosen, per_program, arguments)
        if launch.check_races:
            w.races = Races(w, shared, np.arange(w.count) + first * per_program)
        scheduler = Scheduler(w, (blocks, block_of), block_of[kernel.start], launch, report)
        with np.errstate(all="ignore"):
            scheduler.run()
    executed = [step for block in blocks if block.covered for step in block.steps]
    notes = {step.note for step in executed if step.note and (launch.check_races or step.control != "barrier")}
    report.unchecked += sorted(notes)
    return report


def check_launch(launch: Launch, kernel: Kernel) -> None:
    """Refuse what the hardware could not start."""
    if not 1 <= launch.threads <= 1024:
        raise EmulationFault("illegal", f"{launch.threads} threads in a program; the limit is 1024")
    local = launch.shared_bytes + kernel.describe("group_segment_fixed_size")
    if local > LDS_LIMIT:
        raise EmulationFault("illegal", f"{local} bytes of local memory; a compute unit has {LDS_LIMIT}")
    if launch.threads % LANES:
        raise EmulationFault("illegal", f"{launch.threads} threads: programs of partial waves are not modelled")


def choose_group(launch: Launch, per_program: int, programs: int) -> int:
    """Programs that are resident at the same time."""
    if launch.schedule == "interleaved":
        return programs
    return max(1, GROUP_WAVES // per_program)


def make_global_races(launch: Launch, agents: int, report: Report) -> GlobalRaces | None:
    """The race check of device memory, if the launch is small enough."""
    if not launch.check_races:
        return None
    if agents > MOST_AGENTS:
        report.unchecked.append(f"races on device memory: {agents} waves are more than {MOST_AGENTS}")
        return None
    return GlobalRaces(agents, launch.memory)


def pack_arguments(launch: Launch, kernel: Kernel) -> npt.NDArray[np.uint8]:
    """The kernel argument segment. Arguments that the launch leaves out at the end are Triton's scratch pointers, which
    are zero, or hidden ones, which the runtime fills in (LLVM, "User Guide for AMDGPU Backend", value_kind)."""
    size = max(kernel.describe("kernarg_size"), 4)
    segment = bytearray(size)
    if len(launch.arguments) > len(kernel.arguments):
        raise EmulationFault("illegal", f"{len(launch.arguments)} arguments for a kernel with {len(kernel.arguments)}")
    for value, argument in zip(launch.arguments, kernel.arguments, strict=False):
        if isinstance(value, int):
            raw = (value & ((1 << (8 * argument.size)) - 1)).to_bytes(argument.size, "little")
        elif isinstance(value, bytes):
            raw = value
        else:
            raise EmulationFault("illegal", "gfx950 has no tensor descriptors as arguments")
        if len(raw) != argument.size:
            raise EmulationFault("illegal", f"an argument of {len(raw)} bytes where the kernel has {argument.size}")
        segment[argument.offset : argument.offset + argument.size] = raw
    hidden = {"hidden_group_size_x": launch.threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
    hidden |= {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", launch.grid, strict=True)}
    hidden["hidden_grid_dims"] = 3
    for argument in kernel.arguments:
        if argument.kind in hidden:
            raw = hidden[argument.kind].to_bytes(argument.size, "little")
            segment[argument.offset : argument.offset + argument.size] = raw
    return np.frombuffer(bytes(segment) + bytes(-size % 16), np.uint8).copy()


def make_waves(
    launch: Launch, kernel: Kernel, programs: list[Dim3], per_program: int, arguments: npt.NDArray[np.uint8]
) -> Waves:
    """The waves of the programs as the hardware starts them (LLVM, "User Guide for AMDGPU Backend", initial state)."""
    count = len(programs) * per_program
    local = launch.shared_bytes + kernel.describe("group_segment_fixed_size")
    scratch = kernel.describe("private_segment_fixed_size")
    w = Waves(count, per_program, launch.memory, local, scratch)
    w.late, w.kernarg = launch.late, arguments
    set_scalar(w, EXEC, 0xFFFFFFFF)
    set_scalar(w, EXEC + 1, 0xFFFFFFFF)
    set_scalar(w, M0, 0xFFFFFFFF)
    next_register = set_user_registers(w, kernel, arguments)
    for axis, name in enumerate("xyz"):
        if kernel.describe(f"system_sgpr_workgroup_id_{name}", int(name == "x")):
            set_scalar(w, next_register, np.repeat([program[axis] for program in programs], per_program))
            next_register += 1
    thread = np.arange(LANES)[None, :] + LANES * (np.arange(count) % per_program)[:, None]
    w.vector[0] = thread
    w.vector_unknown[0] = 0
    w.unknown_in[0] = False
    w.select(slice(None))
    return w


def set_user_registers(w: Waves, kernel: Kernel, arguments: npt.NDArray[np.uint8]) -> int:
    """Enabled user registers in their order; returns the first system register."""
    place = 0
    for name, size in (("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2), ("dispatch_id", 2),
                       ("private_segment_size", 1)):  # fmt: skip
        if kernel.describe(f"user_sgpr_{name}"):
            if name == "kernarg_segment_ptr":
                set_scalar(w, place, KERNARG & 0xFFFFFFFF)
                set_scalar(w, place + 1, KERNARG >> 32)
            place += size
    words = arguments.view(np.uint32)
    offset = kernel.describe("user_sgpr_kernarg_preload_offset")
    for k in range(kernel.describe("user_sgpr_kernarg_preload_length")):
        set_scalar(w, place + k, int(words[offset + k]) if offset + k < len(words) else 0)
    return kernel.describe("user_sgpr_count", place)


def set_scalar(w: Waves, index: int, value: Any) -> None:
    """Define a scalar register of all waves."""
    w.scalar[:, index] = value
    w.scalar_unknown[:, index] = 0
    w.unknown_in[SCALAR + index] = False
