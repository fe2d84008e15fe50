"""The door: parameters, reports, and Triton's own kernels for three architectures against numpy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from snippets import THREADS, make_module, run_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.ptx.machine import list_unknown
from mmcompile.emulate.run import run_kernel


@triton.jit
def add(a, b, c, n, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    m = r < n
    tl.store(c + r, tl.load(a + r, mask=m) + tl.load(b + r, mask=m), mask=m)


@triton.jit
def softmax(x, y, n, B: tl.constexpr):
    p = tl.program_id(0)
    r = tl.arange(0, B)
    v = tl.load(x + p * n + r, mask=r < n, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(y + p * n + r, v / tl.sum(v, 0), mask=r < n)


@lru_cache
def compile_kernel(function: Any, signature: str, architecture: int, block: int) -> Any:
    types = dict(part.split(":") for part in signature.split())
    source = ASTSource(function, signature={**types, "B": "constexpr"}, constexprs={"B": block})
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32))


def launch(kernel: Any, grid: int, arguments: list[Any], **options: Any) -> list[np.ndarray]:
    memory = DeviceMemory()
    values = [memory.register(a, str(i)) if isinstance(a, np.ndarray) else a for i, a in enumerate(arguments)]
    run_kernel(Launch(kernel.asm["ptx"], kernel.metadata.name, (grid, 1, 1), 32 * kernel.metadata.num_warps,
                      kernel.metadata.shared, values, memory, **options))  # fmt: skip
    return [
        memory.contents(v).view(a.dtype).reshape(a.shape)
        for a, v in zip(arguments, values, strict=True)
        if isinstance(a, np.ndarray)
    ]


MODES = [{}, {"schedule": "warp", "seed": 1}, {"schedule": "interleaved"}, {"check_races": True}, {"late": True}]


@pytest.mark.parametrize("architecture", [90, 100, 107])
def test_triton_kernels(architecture: int) -> None:
    generator = np.random.default_rng(0)
    a, b, x = (generator.standard_normal(s).astype(np.float32) for s in (1000, 1000, (3, 300)))
    expected = np.exp(x.astype(np.float64))
    expected /= expected.sum(axis=1, keepdims=True)
    kernel = compile_kernel(add, "a:*fp32 b:*fp32 c:*fp32 n:i32", architecture, 256)
    other = compile_kernel(softmax, "x:*fp32 y:*fp32 n:i32", architecture, 512)
    assert list_unknown(kernel.asm["ptx"], "add") == []
    for mode in MODES:
        np.testing.assert_array_equal(launch(kernel, 4, [a, b, np.zeros_like(a), 1000], **mode)[2], a + b)
        np.testing.assert_allclose(launch(other, 3, [x, np.zeros_like(x), 300], **mode)[1], expected, rtol=1e-5)
    with pytest.raises(EmulationFault, match="bytes at byte 4000 of buffer '1'"):
        launch(kernel, 4, [np.zeros(1024, np.float32), b, np.zeros(1024, np.float32), 1024])


def test_report() -> None:
    body = "mov.b32 %r, 1; setp.eq.u32 %p, %t, 999; @%p bra L; ex2.approx.f32 %x, %a; bra E;\n L: not.b32 %r, %r;\n E:"
    text = make_module(body)
    report = run_module(text, [np.zeros(THREADS, np.uint32) for _ in range(4)])
    assert report.instructions == 20 * THREADS
    assert 0 < report.coverage < 1
    assert any("approximations" in sentence for sentence in report.unchecked)


NOTED = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%x, %y, %z, %r}, {%a, %a, %a, %a}, {%a, %a}, "
    "{%x, %y, %z, %r};": "order and width of sums",
    "fence.proxy.async.shared::cta;": "fence.proxy.async",
    "add.u32 %r, %a, %b;": "",
}


@pytest.mark.parametrize("body,sentence", NOTED.items(), ids=["mma", "fence", "add"])
def test_unchecked_names_what_the_kernel_uses(body: str, sentence: str) -> None:
    text = make_module("mov.b32 %r, 0; mov.b32 %x, 0; mov.b32 %y, 0; mov.b32 %z, 0; " + body)
    report = run_module(text, [np.zeros(THREADS, np.uint32) for _ in range(4)])
    assert [sentence in found for found in report.unchecked] == [True] * bool(sentence)


def test_unknown_forms_are_listed_once_with_their_count() -> None:
    text = make_module("odd.b32 %r, %a;\n odd.b32 %r, %b;\n mov.b32 %r, 0;")
    (unknown,) = list_unknown(text, "k")
    assert (unknown.form, unknown.count) == ("odd.b32", 2)


def test_arguments_must_fit() -> None:
    text, memory = make_module("mov.b32 %r, 0;"), DeviceMemory()
    with pytest.raises(EmulationFault, match="5 arguments for 4 parameters"):
        run_kernel(Launch(text, "k", (1, 1, 1), THREADS, 0, [0] * 5, memory))
    with pytest.raises(EmulationFault, match="a multiple of 32"):
        run_kernel(Launch(text, "k", (1, 1, 1), 33, 0, [0] * 4, memory))
