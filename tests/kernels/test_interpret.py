"""The interpreter process: aliasing, strides, repaired arithmetic, failures that name the kernel."""

import time

import pytest
import torch

from mmcompile.core.errors import VerificationError
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.targets._interpret import Interpreter

HEADER = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"


def make_source(body: str, **types: str) -> KernelSource:
    text = f"{HEADER}def kernel({', '.join(types)}):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return KernelSource("probe", text, tuple(Parameter(n, t, n) for n, t in types.items()), ("1", "1", "1"))


BINARY = """i = tl.arange(0, 1024)
a = tl.load(x + i)
b = tl.load(y + i)
tl.store(out + i, {expression})"""


@pytest.mark.parametrize("expression", ["a * b", "a + b", "a - b", "tl.where(a < b, a, b)"])
def test_bf16_arithmetic_is_the_hardwares(interpreter, expression):
    x, y = torch.randn(2, 1024, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    source = make_source(BINARY.format(expression=expression), x="*bf16", y="*bf16", out="*bf16")
    out = interpreter.run(source, [x, y, torch.zeros_like(x)], (1, 1, 1))[2]
    expected = eval(expression, {"a": x, "b": y, "tl": torch})
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_conversions_round_to_nearest_even(interpreter, dtype):
    """Ties and near ties of every kind, subnormals included."""
    base = torch.arange(0, 0x7C if dtype == torch.float8_e4m3fn else 0x4000, dtype=torch.int32)
    base = base.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).float()
    middle = (base[:-1] + base[1:]) / 2
    x = torch.cat([middle, torch.nextafter(middle, middle * 2), -middle])
    x = torch.cat([x, x.new_zeros(1 << 16)])[: 1 << 16].contiguous()
    source = make_source("i = tl.arange(0, 65536)\ntl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))",
                         x="*fp32", out="*bf16")
    out = interpreter.run(source, [x, torch.zeros(1 << 16).to(dtype)], (1, 1, 1))[1]
    assert torch.equal(out.float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dots_accumulate_in_fp32(interpreter, dtype):
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    body = """i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
tl.store(out + i, tl.dot(tl.load(a + i), tl.load(b + i)))"""
    source = make_source(body, a="*bf16", b="*bf16", out="*fp32")
    out = interpreter.run(source, [a, b, torch.zeros(16, 16)], (1, 1, 1))[2]
    assert torch.allclose(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)


def test_views_of_one_storage_stay_views(interpreter):
    storage = torch.zeros(8, 4)
    left, right = storage[:, :1], storage[2:, 3:]
    source = make_source("tl.store(x + 4, 5.0)\ntl.store(y, n)", x="*fp32", y="*fp32", n="i32")
    x, y, n = interpreter.run(source, [left, right, 7], (1, 1, 1))
    assert x[1, 0] == 5 and y[0, 0] == 7 and n == 7
    assert x.stride() == left.stride() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert not storage.any(), "the caller's tensors must not change"


def test_a_failing_kernel_is_named_and_the_worker_goes_on(interpreter):
    bad = make_source("tl.store(x, missing_name)", x="*fp32")
    with pytest.raises(VerificationError, match="probe failed in the interpreter: .*missing_name"):
        interpreter.run(bad, [torch.zeros(1)], (1, 1, 1))
    good = make_source("tl.store(x, 3.0)", x="*fp32")
    assert interpreter.run(good, [torch.zeros(1)], (1, 1, 1))[0] == 3


def test_a_wrong_number_of_arguments(interpreter):
    with pytest.raises(VerificationError, match=r"takes 1 arguments \(x\), got 0"):
        interpreter.run(make_source("tl.store(x, 3.0)", x="*fp32"), [], (1, 1, 1))


def test_a_hanging_kernel_is_stopped():
    source = make_source("while tl.load(x) == 0.0:\n    pass", x="*fp32")
    with Interpreter(timeout=20) as worker:
        worker.run(make_source("tl.store(x, 1.0)", x="*fp32"), [torch.zeros(1)], (1, 1, 1))
        worker._timeout = 0.5
        start = time.monotonic()
        with pytest.raises(VerificationError, match="did not finish within 0.5 s"):
            worker.run(source, [torch.zeros(1)], (1, 1, 1))
        assert time.monotonic() - start < 10
