"""Run one choice of a launch on poisoned memory and compare it with the launch's reference."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmcompile.core.errors import VerificationError
from mmcompile.core.expression import evaluate, evaluate_shape
from mmcompile.core.formats import nvfp4_fragments
from mmcompile.core.formats.cache_pages import PLAIN
from mmcompile.core.kernel import KernelSource
from mmcompile.core.plan import Buffer, Choice, KernelLaunch, Launch, View
from mmcompile.driver import verify_caches
from mmcompile.driver.verify_inputs import Case, fill_operands
from mmcompile.runtime.executor import contiguous_strides
from mmcompile.runtime.reference import bind_call
from mmcompile.targets._interpret import Argument

EXACT_OPS = {"mm.embedding", "mm.gather_last", "mm.nvfp4_quantize_activations", "mm.sample"}
BOUNDS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-15, "float8_e4m3fn": 2.0**-4}
"""Largest norm of the error over the norm of the reference, by the dtype of the result; 0 for integers."""
ELEMENT_FACTOR = 8.0
"""An element may be off by this many bounds of its magnitude plus the reference's root mean square."""
GUARD = 512
"""Elements before and after every buffer in which a faulty kernel writes unharmed and is found out."""
POISON = {True: 0xFF, False: 0x81}
"""Byte that fills buffers of floats and of NVFP4 pages (True: NaN) and of integers (False: far out of range)."""

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Runner(Protocol):
    """What runs a kernel: Triton's interpreter, an emulator of the assembly, or a GPU.

    ``proof``: what a kernel that agrees has passed. ``sampling``: grids of more programs than the first number are
    run in part, so many of their programs as the second says; None to run all. ``guard``: elements around buffers.
    """

    proof: str
    sampling: tuple[int, int] | None
    guard: int

    def run(
        self,
        source: KernelSource,
        arguments: Sequence[Argument],
        grid: tuple[int, int, int],
        programs: Sequence[tuple[int, int, int]] | None = None,
        *,
        written: Collection[int] = (),
    ) -> list[Argument]:
        """Launch and return the arguments as they are after the run; ``written``: positions of those it may write."""


@dataclass
class Outcome:
    """Errors of one or more cases, worst of each; ``failure`` is empty if all are within their bounds."""

    cases: int = 0
    max_error: float = 0.0
    relative_error: float = 0.0
    bound: float = 0.0
    coverage: str = ""
    failure: str = ""

    def add(self, max_error: float, relative_error: float, bound: float) -> None:
        """Take in the errors of one result."""
        self.max_error = max(self.max_error, max_error)
        self.relative_error = max(self.relative_error, relative_error)
        self.bound = max(self.bound, bound)


@dataclass
class Memory:
    """Buffers of a launch, each poisoned (NaN; integers far out of range) and between guards of ``guard`` elements."""

    buffers: Mapping[str, Buffer]
    symbols: Mapping[str, int]
    guard: int = GUARD
    storages: dict[str, Tensor] = field(default_factory=dict)

    def view(self, view: View) -> Tensor:
        """The tensor behind a view; its buffer is made on first use."""
        if view.buffer not in self.storages:
            self.storages[view.buffer] = self._make(self.buffers[view.buffer])
        shape = evaluate_shape(view.shape, self.symbols)
        strides = evaluate_shape(view.strides, self.symbols) if view.strides else contiguous_strides(shape)
        offset = self.guard + evaluate(view.offset, self.symbols)
        return self.storages[view.buffer].as_strided(shape, strides, offset)

    def _make(self, buffer: Buffer) -> Tensor:
        dtype = getattr(torch, buffer.dtype)
        count = math.prod(evaluate_shape(buffer.shape, self.symbols)) + 2 * self.guard
        poison = POISON[dtype.is_floating_point or verify_caches.holds_pages(buffer)]
        return torch.full((count * dtype.itemsize,), poison, dtype=torch.uint8).view(dtype)

    def snapshot(self) -> dict[str, Tensor]:
        """The bits of every buffer, guards included."""
        return {name: as_bits(storage).clone() for name, storage in self.storages.items()}

    def interior(self, name: str) -> slice:
        """Where a buffer lies between its guards."""
        return slice(self.guard, len(self.storages[name]) - self.guard)


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


@dataclass(frozen=True)
class Check:
    """One choice of one launch with all that decides its outcome."""

    launch: Launch
    choice: Choice
    buffers: Mapping[str, Buffer]
    sources: Mapping[str, KernelSource]
    cases: tuple[Case, ...]

    @property
    def mutated(self) -> tuple[str, ...]:
        """Inputs that the operation writes."""
        return bind_call(self.launch).mutated

    @property
    def buffer_names(self) -> list[str]:
        """Buffers that the launch or its kernels name, sorted."""
        arguments = (a for k in self.choice.kernels for a in k.arguments)
        views = (*self.launch.inputs.values(), *self.launch.outputs, *arguments)
        return sorted({view.buffer for view in views if isinstance(view, View)})

    @property
    def read_only(self) -> set[str]:
        """Buffers that no kernel of the choice may write."""
        views = {name: view for name, view in self.launch.inputs.items() if view is not None}
        written = {v.buffer for v in self.launch.outputs} | {views[n].buffer for n in self.mutated if n in views}
        return {v.buffer for v in views.values()} - written


def run_check(check: Check, runner: Runner) -> Outcome:
    """Run every case, up to the first that fails."""
    outcome = Outcome()
    for seed, case in enumerate(check.cases):
        outcome.cases += 1
        try:
            _run_case(check, case, seed, runner, outcome)
        except VerificationError as error:
            outcome.failure = f"case {case.name}: {error.what}"
            break
    return outcome


def _run_case(check: Check, case: Case, seed: int, runner: Runner, outcome: Outcome) -> None:
    launch = check.launch
    memory = Memory(check.buffers, case.symbols, runner.guard)
    inputs = {name: memory.view(view) for name, view in launch.inputs.items() if view is not None}
    fill_operands(launch, inputs, case, seed)
    expected, expected_states = _evaluate_reference(launch, inputs)
    for name, tensor in inputs.items():
        layout = check.buffers[launch.inputs[name].buffer].layout  # type: ignore[union-attr]
        if layout in nvfp4_fragments.LAYOUTS.values():
            tensor.copy_(nvfp4_fragments.arrange_as(tensor, layout))
    for view in (*launch.outputs, *(a for k in check.choice.kernels for a in k.arguments if isinstance(a, View))):
        memory.view(view)
    before = memory.snapshot()
    sampled = 0
    for kernel in check.choice.kernels:
        programs = _sample_programs(check, kernel, case, outcome, runner.sampling)
        sampled = len(programs or ())
        _run_kernel(check, kernel, memory, runner, programs)
    _check_untouched(check, memory, before)
    exact = launch.op in EXACT_OPS
    for view, reference in zip(launch.outputs, expected, strict=True):
        result = memory.view(view)
        written = None
        if sampled > 0:
            written = as_bits(result) != _same_view(before[view.buffer], result)
            _check_share(written, case, sampled, check.choice.kernels[0])
        _compare(view.buffer, result, reference, outcome, exact, written)
    for name, reference in expected_states.items():
        state = launch.inputs[name]
        assert state is not None
        original = _same_view(before[state.buffer], memory.view(state))
        layout = verify_caches.find_layout(launch, name)
        if layout == PLAIN:
            _compare_state(name, memory.view(state), reference, original, outcome)
        else:
            _compare_pages(launch, name, memory.view(state), reference, original, outcome, inputs, layout)


def _same_view(flat: Tensor, like: Tensor) -> Tensor:
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())


def _evaluate_reference(launch: Launch, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """(results, written inputs by name); floats one precision up, but for exact operations and regions."""
    call = bind_call(launch)
    widen = launch.op.startswith("mm.") and launch.op not in EXACT_OPS
    arguments = list(call.template)
    states = {}
    for place, name in call.slots:
        tensor = inputs[name].clone()
        if name in call.mutated:
            states[name] = tensor
        elif widen:
            tensor = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
        arguments[place] = tensor
    returned = call.function(*arguments)
    results = () if returned is None else (returned,) if isinstance(returned, Tensor) else tuple(returned)
    return results, states


def _sample_programs(
    check: Check, kernel: KernelLaunch, case: Case, outcome: Outcome, sampling: tuple[int, int] | None
) -> list[tuple[int, int, int]] | None:
    """The first two, the last two and seeded other pairs of neighbours of a large grid; None to run all.

    Neighbours, as a grid with a full and a partial tile of tokens alternates between them: both are taken alike.
    Only a choice of one kernel that writes nothing but its results is sampled, as what the others left out must not
    be read by anybody; and only where every program has the same share, unlike tiles of sequences.
    """
    x, y, z = evaluate_shape(kernel.grid, case.symbols)
    total = x * y * z
    uneven = "query_start" in check.launch.inputs
    if sampling is None or total <= sampling[0] or len(check.choice.kernels) > 1 or check.mutated or uneven:
        return None
    starts = {0, total - 2, *random.Random(total).sample(range(2, total - 3, 2), sampling[1] // 2 - 2)}
    chosen = sorted(start + i for start in starts for i in range(2))
    outcome.coverage = f"programs {len(chosen)} of {total}"
    return [(i // (y * z), i // z % y, i % z) for i in chosen]


def _run_kernel(
    check: Check,
    kernel: KernelLaunch,
    memory: Memory,
    runner: Runner,
    programs: list[tuple[int, int, int]] | None,
) -> None:
    """Launch and take over the memory as the kernel left it."""
    source = check.sources[kernel.kernel]
    arguments: list[Argument] = [
        memory.view(a) if isinstance(a, View) else evaluate(a, memory.symbols) for a in kernel.arguments
    ]
    x, y, z = evaluate_shape(kernel.grid, memory.symbols)
    if min(x, y, z) < 1:
        raise VerificationError(f"kernel {kernel.kernel} has the empty grid ({x}, {y}, {z})")
    inputs = check.read_only
    written = [i for i, a in enumerate(kernel.arguments) if isinstance(a, View) and a.buffer not in inputs]
    after = runner.run(source, arguments, (x, y, z), programs, written=written)
    for argument, tensor in zip(kernel.arguments, after, strict=True):
        if isinstance(argument, View) and isinstance(tensor, Tensor):
            flat = torch.empty(0, dtype=tensor.dtype)
            memory.storages[argument.buffer] = flat.set_(tensor.untyped_storage())


def _check_untouched(check: Check, memory: Memory, before: Mapping[str, Tensor]) -> None:
    """Nothing but results, scratch and written inputs may have changed; guards never."""
    named = {v.buffer for v in check.launch.inputs.values() if v is not None}
    results = {v.buffer for v in check.launch.outputs}
    written = {v.buffer for n in check.mutated if (v := check.launch.inputs[n]) is not None}
    for name, bits in before.items():
        allowed = torch.zeros(len(bits), dtype=torch.bool)
        if name in written or name not in named | results:
            allowed[memory.interior(name)] = True
        for view in check.launch.outputs:
            if view.buffer == name:
                like = memory.view(view)
                _same_view(allowed, like).fill_(True)
        changed = ((as_bits(memory.storages[name]) != bits) & ~allowed).nonzero()
        if len(changed):
            place = int(changed[0]) - memory.guard
            raise VerificationError(f"{_names(check.choice)} writes element {place} of {name}, which it must not")


def _names(choice: Choice) -> str:
    return " + ".join(k.kernel for k in choice.kernels)


def _check_share(written: Tensor, case: Case, sampled: int, kernel: KernelLaunch) -> None:
    """Sampled programs must have written their share, and the first and the last the corners of the result."""
    total = math.prod(evaluate_shape(kernel.grid, case.symbols))
    count, flat = int(written.sum()), written.flatten()
    if not (flat[0] and flat[-1]) or count * total < (sampled - 1) * flat.numel():
        raise VerificationError(
            f"{sampled} of {total} programs of {kernel.kernel} leave results unwritten: {count} of {flat.numel()}"
        )


def _compare(
    name: str,
    result: Tensor,
    reference: Tensor,
    outcome: Outcome,
    exact: bool,
    written: Tensor | None,
    bounds: Mapping[str, float] = BOUNDS,
) -> None:
    """Hold a result against its reference, only where ``written`` if given. Raises VerificationError."""
    if result.shape != reference.shape:
        raise VerificationError(f"{name} has shape {list(result.shape)}, its reference {list(reference.shape)}")
    dtype = str(result.dtype).removeprefix("torch.")
    bound = 0.0 if exact else bounds.get(dtype, 0.0)
    wide, want = result.double(), reference.double()
    same = (wide == want) | (wide.isnan() & want.isnan())
    if written is not None:
        same |= ~written
    error = torch.where(same, 0.0, (wide - want).abs()).nan_to_num(math.inf, math.inf)
    finite = torch.where(want.isfinite() if written is None else want.isfinite() & written, want, 0.0)
    norm, count = float(finite.norm()), finite.numel() if written is None else int(written.sum())
    rms = norm / math.sqrt(max(count, 1))
    relative = float(error.norm()) / norm if norm else float(error.max()) if error.numel() else 0.0
    outcome.add(float(error.max()) if error.numel() else 0.0, relative, bound)
    wrong = error > ELEMENT_FACTOR * bound * (finite.abs() + rms)
    if relative > bound or bool(wrong.any()):
        index = wrong.nonzero()[0].tolist() if bool(wrong.any()) else _argmax(error)
        got, expected = float(wide[tuple(index)]), float(want[tuple(index)])
        raise VerificationError(
            f"{name}{index} is {got:g}, the reference {expected:g}; relative error {relative:.2g}, bound {bound:.2g}"
        )


def _argmax(error: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]


def _compare_state(name: str, state: Tensor, reference: Tensor, original: Tensor, outcome: Outcome) -> None:
    """A written input: what the reference leaves alone must keep its bits, the rest is compared."""
    stray = (as_bits(reference) == original) & (as_bits(state) != original)
    if bool(stray.any()):
        raise VerificationError(f"{name}{stray.nonzero()[0].tolist()} is overwritten, the reference leaves it alone")
    _compare(name, state, reference, outcome, False, None)


def _compare_pages(
    launch: Launch,
    name: str,
    state: Tensor,
    reference: Tensor,
    original: Tensor,
    outcome: Outcome,
    inputs: Mapping[str, Tensor],
    layout: str,
) -> None:
    """A written NVFP4 cache: bytes of no row of the launch must be as before, its rows are compared decoded."""
    slots = verify_caches.kept_slots(inputs)
    written = verify_caches.find_written(state, layout, slots)
    stray = (as_bits(state) != original) & ~written
    if bool(stray.any()):
        raise VerificationError(f"{name}{stray.nonzero()[0].tolist()} is overwritten, it is no byte of the new rows")
    exact = launch.op in verify_caches.INSERTIONS
    if exact and not torch.equal(state[written], reference[written]):
        place = ((state != reference) & written).nonzero()[0].tolist()
        raise VerificationError(f"{name}{place} is not the byte that the quantizer stores")
    have, want = (verify_caches.read_rows(cache, layout, slots) for cache in (state, reference))
    _compare(name, have, want, outcome, exact, None, {"float32": verify_caches.BOUND})
