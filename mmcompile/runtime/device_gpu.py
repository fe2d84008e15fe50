"""A GPU behind a driver (CUDA or HIP): memory, kernel launches in order on one stream, graphs of decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError, RequestError
from mmcompile.core.plan import Binary, Choice, Kernel, Launch, Phase, Plan, Schedule, View
from mmcompile.core.stream import arrange_part
from mmcompile.runtime.device_driver import ALIGNMENT, Driver, PackedArguments, align, wrap_memory
from mmcompile.runtime.executor import (
    Evaluation,
    Symbols,
    check_inputs,
    check_symbols,
    count_bytes,
    list_fallbacks,
    memory_by_role,
    torch_dtype,
)
from mmcompile.runtime.layouts import find_parts
from mmcompile.runtime.mono import Merged, MergedMemory, Streamed, bind_schedule, bind_stream, find_schedule
from mmcompile.runtime.reference import bind_call

_PROGRAMS_KEPT = 64
_REBUILD = "rebuild the artifact with this mmcompile"


@dataclass
class _Program:
    """A phase bound for one set of symbol values. ``inputs``: (name, offset in the staging block, bytes)."""

    inputs: list[tuple[str, int, int]] = field(default_factory=list)
    input_bytes: int = 0
    steps: list[Callable[[], None]] = field(default_factory=list)
    outputs: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    merged: Merged | Streamed | None = None
    graph: Any = None


class GpuExecutor:
    """Runs a plan's kernels through a driver.

    Args:
        weights: (buffer name, tensor) pairs of every buffer of role "weight". pages: value of the symbol "pages".
        architecture: key of ``Kernel.binaries``. read_binary: bytes of a binary of the named kernel.
        mono: "auto" (the mode that each schedule names), or "off", "layer", "step" where there is a schedule; may be
            changed between steps.
    """

    pads_decode = True

    def __init__(
        self,
        plan: Plan,
        weights: Iterator[tuple[str, Tensor]],
        pages: int,
        driver: Driver,
        architecture: str,
        read_binary: Callable[[str, Binary], bytes],
        mono: str = "auto",
    ) -> None:
        self.plan, self._driver, self._architecture = plan, driver, architecture
        self._fixed_symbols = {"pages": pages}
        self.mono, self._merged_memory = mono, MergedMemory(plan, driver)
        self._programs: dict[tuple[str, str, bool, tuple[tuple[str, int], ...]], _Program] = {}
        self._latest: _Program | None = None
        self._graphable = {
            name for name, phase in plan.phases.items() if name == "decode" and all(n.choices for n in phase.launches)
        }
        driver.activate()
        self._binaries = {name: self._binary(kernel) for name, kernel in plan.kernels.items()}
        self._functions = {
            name: driver.load_kernel(read_binary(name, binary), binary.symbol, binary.shared)
            for name, binary in self._binaries.items()
        }
        self._persistent = self._place_persistent()
        self._copy_weights(weights)
        self._arena = driver.allocate(max(max((p.arena_bytes for p in plan.phases.values()), default=0), ALIGNMENT))
        self._place_staging()
        self._returned: tuple[int, Tensor] = (0, torch.empty(0, dtype=torch.uint8))
        self._scratch: dict[str, tuple[int, int]] = {}
        if "load" in plan.phases:
            self.run("load", {}, {}, ())

    def _binary(self, kernel: Kernel) -> Binary:
        if self._architecture not in kernel.binaries:
            raise ArtifactError(
                f"kernel {kernel.name} has no binary for {self._architecture}", where=self.plan.target, fix=_REBUILD
            )
        return kernel.binaries[self._architecture]

    def _place_persistent(self) -> dict[str, int]:
        """Device pointers of weights, derived buffers and zeroed state: one allocation for each role."""
        pointers: dict[str, int] = {}
        for role in ("weight", "derived", "state"):
            sizes = {
                b.name: align(count_bytes(b, self._fixed_symbols)) for b in self.plan.buffers.values() if b.role == role
            }
            if not sizes:
                continue
            total = sum(sizes.values())
            position = self._driver.allocate(max(total, ALIGNMENT))
            if role == "state":
                self._driver.fill_zero(position, total)
            for name, size in sizes.items():
                pointers[name] = position
                position += size
        return pointers

    def _copy_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Every weight to its buffer, and arranged anew to the derived buffers that it is a part of."""
        parts = find_parts(self.plan)

        def copy(pointer: int, tensor: Tensor) -> None:
            self._driver.copy_to_device(pointer, tensor.data_ptr(), tensor.nbytes)
            self._driver.synchronize()

        for name, tensor in weights:
            source = tensor.contiguous()
            copy(self._persistent[name], source)
            for buffer, part in parts.get(name, ()):
                copy(self._persistent[buffer] + part.offset, arrange_part(source, part.layout))

    def _place_staging(self) -> None:
        """One block for all inputs of a phase, on the host and on the device, so that a step makes one copy."""
        limits = {**self.plan.symbols, **self._fixed_symbols}
        sizes = (
            sum(align(count_bytes(self.plan.buffers[name], limits)) for name in phase.inputs)
            for phase in self.plan.phases.values()
        )
        size = max(max(sizes, default=0), ALIGNMENT)
        self._staging = self._driver.allocate(size)
        self._staging_address = self._driver.allocate_host(size)
        self._staging_host = wrap_memory(self._staging_address, size)

    def run(
        self, phase: str, inputs: Mapping[str, Tensor], symbols: Symbols, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """See :class:`Executor`."""
        self._driver.activate()
        program = self._program(phase, inputs, {**symbols, **self._fixed_symbols})
        for name, offset, size in program.inputs:
            self._staging_host[offset : offset + size].copy_(inputs[name].view(-1).view(torch.uint8))
        if program.input_bytes:
            self._driver.copy_to_device(self._staging, self._staging_address, program.input_bytes)
        if program.merged is not None:
            program.merged.prepare()
        if program.graph is not None:
            self._driver.replay(program.graph)
        else:
            for step in program.steps:
                step()
        results = self._return_outputs(program, outputs)
        if program.graph is None and phase in self._graphable:
            program.graph = self._capture(program)
        self._latest = program if phase == "decode" else self._latest
        return results

    def _return_outputs(self, program: _Program, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """Copy outputs to page-locked memory and wait for the stream."""
        sizes = {
            name: torch.Size(program.outputs[name][1]).numel() * program.outputs[name][2].itemsize for name in outputs
        }
        needed = sum(map(align, sizes.values())) + ALIGNMENT
        if needed > self._returned[1].numel():
            address = self._driver.allocate_host(needed)
            self._returned = address, wrap_memory(address, needed)
        results, position = {}, 0
        for name, size in sizes.items():
            pointer, shape, dtype = program.outputs[name]
            if size:
                self._driver.copy_to_host(self._returned[0] + position, pointer, size)
            results[name] = self._returned[1][position : position + size].view(dtype).view(shape)
            position += align(size)
        fault = self._returned[1][position : position + 8].view(torch.int32)
        if program.merged is not None:
            self._driver.copy_to_host(self._returned[0] + position, program.merged.fault, 8)
        self._driver.synchronize()
        if program.merged is not None and int(fault[0]):
            program.merged.recover()
            raise program.merged.explain(int(fault[0]), int(fault[1]))
        return results

    def _capture(self, program: _Program) -> Any:
        self._driver.begin_capture()
        try:
            for step in program.steps:
                step()
        finally:
            graph = self._driver.end_capture()
        return graph

    def read_state(self) -> dict[str, Tensor]:
        """Contents of the caches, by buffer."""
        self._driver.activate()
        states = {b.name: b for b in self.plan.buffers.values() if b.role == "state"}
        sizes = Evaluation(self.plan, self._fixed_symbols)
        found = {name: torch.empty(sizes.shape(name), dtype=torch_dtype(b)) for name, b in states.items()}
        for name, tensor in found.items():
            self._driver.copy_to_host(tensor.data_ptr(), self._persistent[name], tensor.nbytes)
        self._driver.synchronize()
        return found

    def record_stages(self, wanted: bool) -> None:
        """Whether merged launches that are bound from now on record when their programs start and end each stage."""
        self._merged_memory.records = wanted

    def read_stages(self) -> tuple[Schedule, Tensor]:
        """The schedule of the decode step that ran last, and its times: int64 nanoseconds [stages, programs, 3].

        A program's events of a stage are its start, the end of its waits and the end of its tiles; 0 where it has no
        tiles. RequestError if nothing was recorded.
        """
        merged = None if self._latest is None else self._latest.merged
        if merged is None or not merged.times:
            raise RequestError("no times of stages were recorded", fix="record_stages(True) before the first step")
        times = torch.empty((len(merged.schedule.stages), merged.schedule.programs, 3), dtype=torch.int64)
        self._driver.copy_to_host(times.data_ptr(), merged.times, times.nbytes)
        self._driver.synchronize()
        return merged.schedule, times

    def time_graph(self, repeats: int) -> float:
        """Seconds per replay of the decode graph that ran last, without the host's share. RequestError if none did."""
        graph = None if self._latest is None else self._latest.graph
        if self._latest is None or graph is None:
            raise RequestError("no decode graph was captured yet", fix="run a few decode steps first")
        self._driver.activate()
        self._driver.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            self._driver.replay(graph)
        self._driver.synchronize()
        seconds = (time.perf_counter() - started) / repeats
        if self._latest.merged is not None:
            self._latest.merged.recover()  # replays that nobody counted
        return seconds

    def _program(self, phase: str, inputs: Mapping[str, Tensor], symbols: Symbols) -> _Program:
        key = (phase, self.mono, self._merged_memory.records, tuple(sorted(symbols.items())))
        if key not in self._programs:
            check_symbols(self.plan, phase, symbols)
            check_inputs(self.plan, self.plan.phases[phase], inputs, symbols)
            evictable = [k for k, program in self._programs.items() if program.graph is None]
            if len(evictable) >= _PROGRAMS_KEPT:
                del self._programs[evictable[0]]
            self._programs[key] = self._bind(self.plan.phases[phase], Evaluation(self.plan, symbols))
        return self._programs[key]

    def _bind(self, phase: Phase, sizes: Evaluation) -> _Program:
        program, pointers = _Program(), dict(self._persistent)
        for name in phase.inputs:
            pointers[name] = self._staging + program.input_bytes
            size = count_bytes(self.plan.buffers[name], sizes.symbols)
            program.inputs.append((name, program.input_bytes, size))
            program.input_bytes += align(size)
        for buffer in self.plan.buffers.values():
            if buffer.offset is not None:
                pointers[buffer.name] = self._arena + buffer.offset
        schedule = find_schedule(phase, sizes.symbols, self.mono)
        if schedule is not None:
            program.merged = self._bind_merged(schedule, phase, sizes, lambda v: self._locate(v, sizes, pointers))
        for index, launch in enumerate(phase.launches):
            if program.merged is not None and index in program.merged.launches:
                program.steps += program.merged.steps if index == program.merged.launches[0] else ()
            elif launch.choices:
                program.steps += self._bind_kernels(launch, _choose(launch, sizes.symbols), sizes, pointers)
            else:
                program.steps.append(self._bind_fallback(launch, sizes, pointers))
        for name in phase.outputs:
            dtype = torch_dtype(self.plan.buffers[name])
            program.outputs[name] = (_find_pointer(pointers, name), sizes.shape(name), dtype)
        return program

    def _bind_merged(
        self, schedule: Schedule, phase: Phase, sizes: Evaluation, locate: Callable[[View], int]
    ) -> Merged | Streamed:
        """The launches of a schedule in its mode."""
        stream = schedule.stream if schedule.mode == "stream" else None
        kernel = schedule.kernel if stream is None else stream.record.kernel
        function, binary = self._functions[kernel], self._binaries[kernel]
        if stream is None:
            return bind_schedule(self._merged_memory, schedule, phase, sizes, locate, function, binary)
        return bind_stream(self._merged_memory, schedule, stream, sizes, locate, function, binary)

    def _bind_kernels(
        self, launch: Launch, choice: Choice, sizes: Evaluation, pointers: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        for record in choice.kernels:
            binary, parameters = self._binaries[record.kernel], self.plan.kernels[record.kernel].parameters
            if len(parameters) != len(record.arguments):
                raise ArtifactError(
                    f"kernel {record.kernel} takes {len(parameters)} arguments, not {len(record.arguments)}",
                    where=f"launch {launch.name}",
                    fix=_REBUILD,
                )
            grid = (sizes.number(record.grid[0]), sizes.number(record.grid[1]), sizes.number(record.grid[2]))
            programs = grid[0] * grid[1] * grid[2]
            if programs == 0:
                continue
            values = [self._argument(argument, sizes, pointers) for argument in record.arguments]
            values.append(self._scratch_for("global", programs * binary.global_scratch_size))
            values.append(self._scratch_for("profile", programs * binary.profile_scratch_size))
            yield self._bind_kernel(record.kernel, binary, grid, PackedArguments(values))

    def _bind_kernel(
        self, name: str, binary: Binary, grid: tuple[int, int, int], arguments: PackedArguments
    ) -> Callable[[], None]:
        launch, function = self._driver.launch, self._functions[name]
        threads, shared, early = binary.num_warps * binary.warp_size, binary.shared, binary.early
        return lambda: launch(function, grid, threads, shared, arguments.address, early=early)

    def _argument(self, argument: View | str, sizes: Evaluation, pointers: Mapping[str, int]) -> int:
        return sizes.number(argument) if isinstance(argument, str) else self._locate(argument, sizes, pointers)

    def _locate(self, view: View, sizes: Evaluation, pointers: Mapping[str, int]) -> int:
        itemsize = torch_dtype(self.plan.buffers[view.buffer]).itemsize
        return _find_pointer(pointers, view.buffer) + sizes.number(view.offset) * itemsize

    def _scratch_for(self, kind: str, size: int) -> int:
        """Scratch memory that the launches share, as they run one after the other; 0 if none is needed."""
        if size == 0:
            return 0
        if self._scratch.get(kind, (0, 0))[1] < size:
            self._scratch[kind] = self._driver.allocate(size), size
        return self._scratch[kind][0]

    def _bind_fallback(self, launch: Launch, sizes: Evaluation, pointers: Mapping[str, int]) -> Callable[[], None]:
        """Run a launch that has no kernel on the host: buffers go over, what was written comes back."""
        call = bind_call(launch)
        views = {name: view for name, view in launch.inputs.items() if view is not None}
        written = {v.buffer for v in launch.outputs} | {views[name].buffer for name in call.mutated}
        involved = {v.buffer for v in (*views.values(), *launch.outputs)}
        places = {
            name: (_find_pointer(pointers, name), sizes.shape(name), torch_dtype(self.plan.buffers[name]))
            for name in sorted(involved)
        }

        def step() -> None:
            hosts: dict[str, Tensor] = {}
            for name, (pointer, shape, dtype) in places.items():
                hosts[name] = torch.empty(shape, dtype=dtype)
                if hosts[name].numel():
                    self._driver.copy_to_host(hosts[name].data_ptr(), pointer, hosts[name].nbytes)
            self._driver.synchronize()
            arguments = list(call.template)
            for position, name in call.slots:
                arguments[position] = hosts[views[name].buffer].as_strided(*sizes.view(views[name]))
            with torch.inference_mode():
                results = call.function(*arguments)
            returned = (results,) if isinstance(results, Tensor) else results
            for view, result in zip(launch.outputs, returned or (), strict=False):
                hosts[view.buffer].as_strided(*sizes.view(view)).copy_(result)
            for name in sorted(written):
                if hosts[name].numel():
                    self._driver.copy_to_device(places[name][0], hosts[name].data_ptr(), hosts[name].nbytes)
            self._driver.synchronize()

        return step

    def describe(self) -> dict[str, Any]:
        """See :class:`Executor`."""
        return {
            "device": f"{self._driver.kind} {self._driver.device_name} ({self._driver.architecture})",
            "kernels": len(self._functions),
            "launches": {name: len(phase.launches) for name, phase in self.plan.phases.items()},
            "fallbacks": list_fallbacks(self.plan),
            "memory": memory_by_role(self.plan, self._fixed_symbols),
            "graphs": [{"phase": k[0], **dict(k[3])} for k, program in self._programs.items() if program.graph],
        }

    def close(self) -> None:
        """See :class:`Executor`."""
        self._programs.clear()
        self._latest = None
        self._driver.activate()
        self._driver.close()


def _find_pointer(pointers: Mapping[str, int], name: str) -> int:
    if name not in pointers:
        raise ArtifactError(f"buffer {name!r} has no place in the arena", fix=_REBUILD)
    return pointers[name]


def _choose(launch: Launch, symbols: Symbols) -> Choice:
    """The choice for the token count; where there are no tokens, the first without a limit."""
    choice = launch.choose(symbols.get("tokens"))
    if choice is None:
        raise ArtifactError(
            f"no kernel admits {symbols.get('tokens')} tokens", where=f"launch {launch.name}", fix=_REBUILD
        )
    return choice
