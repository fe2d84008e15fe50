"""The GPU executor over a driver whose device is host memory: placement, arguments, padding, capture, fallbacks.

It shows that pointers, offsets and copies are right, not that CUDA or HIP are called rightly; that needs the hardware.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmcompile.core.errors import ArtifactError, RequestError
from mmcompile.core.plan import Binary, Choice, Kernel, KernelLaunch, Plan, View
from mmcompile.runtime import Engine, ModuleEngine, SamplingParams, load
from mmcompile.runtime.artifact import open_artifact
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.engine import decoder_limits
from mmcompile.runtime.selection import Selection

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.7, seed=2, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(20, 40)), [7]]


def floats(pointer: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer))


class HostDriver:
    """A Driver without a device. Kernels are Python functions of (grid, argument reader), by symbol."""

    kind, device_name, architecture = "host", "host memory", "9.0"

    def __init__(self, kernels: dict[str, Callable[..., None]] | None = None) -> None:
        self.kernels = kernels or {}
        self.memory: list[Any] = []
        self.recording: list[Callable[[], None]] | None = None
        self.launches = self.replays = self.early = 0
        self.closed = False

    def activate(self) -> None: ...

    def synchronize(self) -> None:
        assert self.recording is None, "synchronized while capturing"

    def allocate(self, size: int) -> int:
        assert size > 0 and self.recording is None
        self.memory.append(ctypes.create_string_buffer(b"\xff" * (size + 256), size + 256))
        return -(-ctypes.addressof(self.memory[-1]) // 256) * 256

    allocate_host = allocate

    def copy_to_device(self, pointer: int, address: int, size: int) -> None:
        self._queue(lambda: ctypes.memmove(pointer, address, size))

    def copy_to_host(self, address: int, pointer: int, size: int) -> None:
        self._queue(lambda: ctypes.memmove(address, pointer, size))

    def fill_zero(self, pointer: int, size: int) -> None:
        self._queue(lambda: ctypes.memset(pointer, 0, size))

    def free_memory(self) -> int:
        return 1 << 30

    def load_kernel(self, image: bytes, symbol: str, shared: int) -> Callable[..., None]:
        assert image == b"image of " + symbol.encode()
        return self.kernels[symbol]

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, parameters: int, early: bool = False
    ) -> None:
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        read: Callable[[int, Any], int] = lambda i, kind=ctypes.c_uint64: kind.from_address(pointers[i]).value  # noqa: E731
        self.launches += self.recording is None
        self.early += early
        self._queue(lambda: function(grid, read))

    def begin_capture(self) -> None:
        self.recording = []

    def end_capture(self) -> Any:
        graph, self.recording = self.recording, None
        return graph

    def replay(self, graph: Any) -> None:
        self.replays += 1
        for action in graph:
            action()

    def close(self) -> None:
        self.closed = True

    def _queue(self, action: Callable[[], None]) -> None:
        if self.recording is None:
            action()
        else:
            self.recording.append(action)


def make_binary(symbol: str, **changes: Any) -> Binary:
    fields = {
        "file": symbol,
        "assembly": "",
        "sha256": "",
        "symbol": symbol,
        "shared": 0,
        "num_warps": 4,
        "warp_size": 32,
    }
    fields |= {"registers": 0, "spills": 0, "global_scratch_size": 0, "global_scratch_align": 1}
    return Binary(**(fields | {"profile_scratch_size": 0, "ledger": {}} | changes))


def make_engine(plan: Plan, artifact: Path, driver: HostDriver, pages: int = 40) -> Engine:
    opened = open_artifact(artifact)
    weights = opened.read_weights(plan)
    executor = GpuExecutor(plan, weights, pages, driver, "sm_90a", lambda name, b: b"image of " + b.symbol.encode())
    limits = replace(decoder_limits(opened.manifest, plan, None), pages=pages)
    return Engine(opened, plan, Selection("sm90", "sm_90a", "exact"), executor, limits, 0)


@pytest.fixture
def plan(artifact: Path) -> Plan:
    return open_artifact(artifact).plan("cpu")


def test_a_plan_of_fallbacks_gives_the_same_tokens(plan: Plan, artifact: Path) -> None:
    """Decode batches of three are padded to four with rows that must change nothing."""
    driver = HostDriver()
    engine = make_engine(plan, artifact, driver)
    results = engine.generate(PROMPTS, PARAMS)
    assert [r.tokens for r in results] == [r.tokens for r in load(artifact, device="cpu").generate(PROMPTS, PARAMS)]
    facts = engine.describe()
    assert facts["graphs"] == [] and len(facts["fallbacks"]) == sum(facts["launches"].values())
    ids = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    torch.testing.assert_close(engine.score(ids), load(artifact, device="cpu").score(ids))
    engine.close()
    assert driver.closed


def test_decode_with_kernels_is_captured_and_replayed(plan: Plan, artifact: Path) -> None:
    """Every decode launch becomes a "kernel" that runs its reference on device pointers."""
    driver = HostDriver()
    engine = make_engine(_with_kernels(plan, driver), artifact, driver)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        expected = load(artifact, device="cpu").generate(prompts, PARAMS)
        assert [r.tokens for r in engine.generate(prompts, PARAMS)] == [r.tokens for r in expected]
    graphs = engine.describe()["graphs"]
    assert {(g["batch"], g["tokens"]) for g in graphs} == {(4, 4), (1, 1)}
    assert driver.replays == 3 * 7 - len(graphs), "all decode steps but the first of each size are replays"


def _with_kernels(plan: Plan, driver: HostDriver) -> Plan:
    """Give each launch of decode a kernel whose arguments are its input and output views, and the batch."""
    from mmcompile.runtime.reference import bind_call

    kernels, launches = {}, []
    for launch in plan.phases["decode"].launches:
        views = [v for v in launch.inputs.values() if v is not None]
        arguments = (*views, *launch.outputs, "batch", "max_blocks")
        types = tuple((f"p{i}", "i32" if isinstance(a, str) else "*u8") for i, a in enumerate(arguments))
        symbol = f"k_{launch.name}"
        fields = {"num_stages": 1, "expectations": {}, "binaries": {"sm_90a": make_binary(symbol)}}
        kernels[symbol] = Kernel(name=symbol, source="", parameters=types, **fields)
        driver.kernels[symbol] = _python_kernel(plan, launch, bind_call(launch))
        record = KernelLaunch(kernel=symbol, grid=("batch", 1, 1), arguments=arguments)
        launches.append(
            launch.model_copy(update={"choices": (Choice(max_tokens=None, template="t", kernels=(record,)),)})
        )
    decode = plan.phases["decode"].model_copy(update={"launches": tuple(launches)})
    return plan.model_copy(update={"kernels": kernels, "phases": plan.phases | {"decode": decode}})


def _python_kernel(plan: Plan, launch: Any, call: Any) -> Callable[..., None]:
    from mmcompile.core.expression import evaluate_shape

    names = [name for name, view in launch.inputs.items() if view is not None]

    def kernel(grid: tuple[int, int, int], read: Callable[..., int]) -> None:
        count = len(names) + len(launch.outputs)
        batch, blocks = read(count, ctypes.c_int32), read(count + 1, ctypes.c_int32)
        assert grid == (batch, 1, 1) and read(count + 2) == read(count + 3) == 0
        symbols = {"tokens": batch, "batch": batch, "max_blocks": blocks, "pages": 40}

        def tensor(view: View, index: int) -> torch.Tensor:
            shape, dtype = evaluate_shape(view.shape, symbols), getattr(torch, plan.buffers[view.buffer].dtype)
            size = torch.Size(shape).numel() * dtype.itemsize
            memory = (ctypes.c_uint8 * size).from_address(read(index))
            return torch.frombuffer(memory, dtype=dtype).view(shape)

        arguments = list(call.template)
        for position, name in call.slots:
            arguments[position] = tensor(launch.inputs[name], names.index(name))
        results = call.function(*arguments)
        for i, result in enumerate((results,) if isinstance(results, torch.Tensor) else results):
            tensor(launch.outputs[i], len(names) + i).copy_(result)

    return kernel


def twice(grid: tuple[int, int, int], read: Callable[..., int]) -> None:
    """out[i] = 2 x[i + 1]; arguments x + 1, out, rows - 1, scratch, scratch."""
    count = read(2, ctypes.c_int32)
    assert grid == (-(-count // 2), 1, 1)
    floats(read(3), 4 * grid[0])[:] = 1.0
    floats(read(1), count)[:] = 2 * floats(read(0), count)


def module_plan(b: Any, **binary: Any) -> Plan:
    b.symbols = {"rows": 8}
    b.buffer("x", ("rows",), "float32", "input")
    b.buffer("out", ("rows",), "float32", "output")
    b.buffer("y", ("rows - 1",), "float32", "output")
    tail = View(buffer="x", shape=("rows - 1",), strides=(1,), offset=1)
    b.launch("aten.add.Tensor", {"arg0": tail, "arg1": tail}, ["y"], args=[{"input": "arg0"}, {"input": "arg1"}])
    out = View(buffer="y", shape=("rows - 1",), strides=(1,))
    record = KernelLaunch(kernel="twice", grid=("cdiv(rows - 1, 2)", 1, 1), arguments=(tail, out, "rows - 1"))
    wrong = Choice(max_tokens=1, template="small", kernels=())
    b.launches[0] = b.launches[0].model_copy(
        update={"choices": (wrong, Choice(max_tokens=None, template="any", kernels=(record,)))}
    )
    b.launch("aten.neg.default", {"arg0": "x"}, ["out"], args=[{"input": "arg0"}])
    b.finish("forward", ("x",), ("out", "y"))
    parameters = (("x", "*fp32"), ("y", "*fp32"), ("n", "i32"))
    kernel = Kernel(
        name="twice",
        source="",
        parameters=parameters,
        num_stages=1,
        expectations={},
        binaries={"sm_90a": make_binary("twice", **binary)},
    )
    return b.plan("sm90").model_copy(update={"kernels": {"twice": kernel}})


def module_engine(plan: Plan, driver: HostDriver, architecture: str = "sm_90a") -> ModuleEngine:
    none: Iterator[Any] = iter(())
    executor = GpuExecutor(plan, none, 1, driver, architecture, lambda name, b: b"image of " + b.symbol.encode())
    return ModuleEngine(plan, Selection("sm90", architecture, "exact"), executor)


def test_kernel_and_fallback_side_by_side(builder: Any) -> None:
    driver = HostDriver({"twice": twice})
    engine = module_engine(module_plan(builder(), global_scratch_size=16), driver)
    for rows in (2, 8, 5, 2):
        x = torch.randn(rows)
        out = engine.forward(x=x)
        torch.testing.assert_close(out["y"], 2 * x[1:], rtol=0, atol=0)
        torch.testing.assert_close(out["out"], -x, rtol=0, atol=0)
    assert driver.launches == 4 and driver.early == 0
    assert [f["op"] for f in engine.describe()["fallbacks"]] == ["aten.neg.default"]


def test_what_waits_by_itself_is_launched_early(builder: Any) -> None:
    driver = HostDriver({"twice": twice})
    plan = module_plan(builder(), global_scratch_size=16, ledger={"griddepcontrol.wait": 1})
    module_engine(plan, driver).forward(x=torch.ones(4))
    assert (driver.launches, driver.early) == (1, 1)


def test_an_empty_grid_is_not_launched(builder: Any) -> None:
    driver = HostDriver({"twice": twice})
    assert module_engine(module_plan(builder()), driver).forward(x=torch.ones(1))["y"].shape == (0,)
    assert driver.launches == 0


def test_defects(builder: Any) -> None:
    plan = module_plan(builder())
    with pytest.raises(ArtifactError, match="no binary for sm_100a"):
        module_engine(plan, HostDriver({"twice": twice}), "sm_100a")
    short = plan.kernels["twice"].model_copy(update={"parameters": (("x", "*fp32"),)})
    with pytest.raises(ArtifactError, match="takes 1 arguments, not 3"):
        module_engine(plan.model_copy(update={"kernels": {"twice": short}}), HostDriver({"twice": twice})).forward(
            x=torch.ones(4)
        )
    with pytest.raises(RequestError, match="rows = 9 exceeds"):
        module_engine(plan, HostDriver({"twice": twice})).forward(x=torch.ones(9))
