"""A small decoder written by hand whose decode phase becomes one launch, and kernels for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmcompile.core.kernel import KernelParts, KernelSource, Parameter
from mmcompile.core.plan import Binary, Buffer, Choice, Kernel, KernelLaunch, Launch, Phase, Plan, Schedule, View
from mmcompile.driver.summary import assign_layers
from mmcompile.driver.targets import load_target
from mmcompile.lower.merge import Scheduler, propose_merges
from mmcompile.lower.phase import Stages

TILES, PROGRAMS = 4, 3
SPEC = load_target("sm90").spec
NORM, LINEAR = "norm_kernel", "linear_kernel"


def view(buffer: Buffer) -> View:
    strides = (buffer.shape[1], 1) if len(buffer.shape) == 2 else (1,)
    return View(buffer=buffer.name, shape=buffer.shape, strides=strides)


class Model:
    """x, then layers of h = x + norm(x) @ proj.T, then out = h @ head.T and an operation without a kernel."""

    def __init__(self, layers: int, width: int = 8) -> None:
        self.width = width
        self.buffers: dict[str, Buffer] = {}
        self.launches: list[Launch] = []
        self.choices: list[tuple[Choice, ...]] = []
        rows = ("tokens", width)
        last = self.buffer("x", rows, "input")
        for i in range(layers):
            norm, proj = (
                self.buffer(f"layers.{i}.norm", (width,), "weight"),
                self.buffer(f"layers.{i}.proj", (width, width), "weight"),
            )
            normed, following = self.buffer(f"n{i}", rows, "temporary"), self.buffer(f"h{i}", rows, "temporary")
            self.launch("mm.rms_norm", {"x": last, "weight": norm}, normed, NORM, ("tokens", "1", "1"))
            inputs = {"x": normed, "weight": proj, "residual": last}
            self.launch("mm.linear", inputs, following, LINEAR, (str(TILES), "1", "1"))
            last = following
        head, out = self.buffer("head", (width, width), "weight"), self.buffer("out", rows, "output")
        inputs = {"x": last, "weight": head, "residual": last}
        self.launch("mm.linear", inputs, out, LINEAR, (str(TILES), "1", "1"))
        self.launch("mm.sample", {"logits": out}, self.buffer("next", rows, "output"), "", ())

    def buffer(self, name: str, shape: tuple, role: str) -> Buffer:
        offset = 8192 * len(self.buffers) if role in ("temporary", "output") else None
        self.buffers[name] = Buffer(name=name, shape=shape, dtype="float32", role=role, offset=offset)
        return self.buffers[name]

    def launch(self, op: str, inputs: dict[str, Buffer], output: Buffer, kernel: str, grid: tuple) -> None:
        views = {name: view(buffer) for name, buffer in inputs.items()}
        records = (KernelLaunch(kernel=kernel, grid=grid, arguments=(*views.values(), view(output))),) if kernel else ()
        choices = (Choice(max_tokens=None, template="t", kernels=records),) if kernel else ()
        self.launches.append(
            Launch(
                name=f"n{len(self.launches)}",
                op=op,
                inputs=views,
                outputs=(view(output),),
                attributes={},
                choices=choices,
            )
        )
        self.choices.append(choices)

    @property
    def stages(self) -> Stages:
        return Stages(16, self.choices, ["" if c else "it is drawn by the host" for c in self.choices], {})

    def plan(self, **changes: Any) -> Plan:
        phase = Phase(name="decode", inputs=("x",), outputs=("out",), launches=tuple(self.launches[:-1]),
                      after=tuple(() for _ in self.launches[:-1]), arena_bytes=8192 * len(self.buffers))  # fmt: skip
        phase = phase.model_copy(update=changes)
        return Plan(
            target="sm90",
            symbols={"tokens": 16, "batch": 16},
            buffers=self.buffers,
            phases={"decode": phase},
            kernels={},
        )

    def schedule(self, programs: int = PROGRAMS, which: int = 0) -> Schedule:
        plan = self.plan()
        merges, _ = propose_merges(
            plan.phases["decode"].model_copy(update={"launches": tuple(self.launches)}), self.stages
        )
        return scheduler(plan).make(merges[which], merges[which].name, programs, programs, "step")

    def merged_plan(self, architecture: str = "sm_90a", binary: Binary | None = None, **options: Any) -> Plan:
        """The plan with one schedule, whose kernel is ``binary``."""
        schedule = self.schedule(**options)
        own = ("table", "counters", "times", "first", "last", "tokens")
        kernel = Kernel(name=schedule.kernel, source="", parameters=tuple((n, "i32") for n in own), num_stages=1,
                        expectations={}, binaries={architecture: binary or make_binary(schedule.kernel)})  # fmt: skip
        return self.plan(schedules=(schedule,)).model_copy(update={"kernels": {schedule.kernel: kernel}})


def make_binary(symbol: str, **changes: Any) -> Binary:
    names = ("shared", "registers", "spills", "global_scratch_size", "global_scratch_align", "profile_scratch_size")
    fields = {"file": "", "assembly": "", "sha256": "", "symbol": symbol, "num_warps": 4, "warp_size": 32, "ledger": {}}
    return Binary(**(dict.fromkeys(names, 0) | fields | changes))


def scheduler(plan: Plan) -> Scheduler:
    phase = plan.phases["decode"]
    return Scheduler(plan, phase, {NORM}, SPEC, assign_layers(plan, phase))


def tamper(schedule: Schedule, index: int, **changes: Any) -> Schedule:
    stages = tuple(s.model_copy(update=changes) if i == index else s for i, s in enumerate(schedule.stages))
    return schedule.model_copy(update={"stages": stages})


def make_case(plan: Plan, tokens: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Random weights, an input and what comes out."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [b for b in plan.buffers.values() if b.role == "weight"]
    weights = {b.name: torch.randn(b.shape, generator=generator) * b.shape[-1] ** -0.5 for b in buffers}
    x = torch.randn(tokens, weights["head"].shape[0], generator=generator)
    h = x
    for i in range(sum(name.endswith(".proj") for name in weights)):
        normed = h / h.square().mean(-1, keepdim=True).sqrt() * weights[f"layers.{i}.norm"]
        h = h + normed @ weights[f"layers.{i}.proj"].T
    return weights, x, h + h @ weights["head"].T


_NORM_TILE = """@triton.jit
def norm_tile(x, weight, out, row, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    value = tl.load(x + row * WIDTH + column)
    mean = tl.sum(value * value) / WIDTH
    tl.store(out + row * WIDTH + column, value / tl.sqrt(mean) * tl.load(weight + column))"""
_LINEAR_TILE = """@triton.jit
def linear_tile(x, weight, residual, out, tokens, tile, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row, column = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    matrix = tl.load(weight + row[:, None] * WIDTH + column[None, :])
    for token in range(tokens):
        value = tl.load(x + token * WIDTH + column)
        place = token * WIDTH + row
        tl.store(out + place, tl.load(residual + place) + tl.sum(matrix * value[None, :], 1))"""


def make_sources(width: int) -> dict[str, KernelSource]:
    """The two kernels of the model, by name, as stages."""
    x, weight, residual, out = (Parameter(n, "*fp32", n) for n in ("x", "weight", "residual", "result"))
    constants = (("WIDTH", str(width)), ("TILE", str(width // TILES)))
    norm = KernelParts((("norm_tile", _NORM_TILE),), constants, "norm_tile(x, weight, result, tl.program_id(0), WIDTH)")
    body = "linear_tile(x, weight, residual, result, tokens, tl.program_id(0), WIDTH, TILE)"
    linear = KernelParts((("linear_tile", _LINEAR_TILE),), constants, body)
    tokens = Parameter("tokens", "i32", "tokens")
    return {
        NORM: KernelSource(NORM, "", (x, weight, out), ("tokens", "1", "1"), parts=norm),
        LINEAR: KernelSource(LINEAR, "", (x, weight, residual, out, tokens), (str(TILES), "1", "1"), parts=linear),
    }
