"""Tuned decode linears: emulated assembly against the reference, decoding bit for bit, GEMM, and what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mmcompile.core.discover import load_module
from mmcompile.core.formats import nvfp4, nvfp4_fragments
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.core.ops.linear import linear, linear_nvfp4
from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel
from mmcompile.lower.select import Selector
from mmcompile.targets._kernels.catalogue import list_kernels
from mmcompile.targets._kernels.linear import Blocks
from mmcompile.targets._tuned.fragments_gemm import emit_fragments_gemm
from mmcompile.targets._tuned.linear_configs import Config, choose_fragments
from mmcompile.targets._tuned.linear_fragments import FRAGMENTS, emit_fragments, emit_rows, want_fragments
from mmcompile.targets._tuned.linear_ptx import decode_word
from tests.kernels.conftest import make_call, poisoned_like, relative_error
from tests.kernels.emulated import run_emulated

TARGET = load_module("targets", "sm90").TARGET
SPEC, ARCH = TARGET.spec, TARGET.spec.architectures[0]
BF16, F16 = torch.bfloat16, torch.float16
# A rounding is off by 1.6e-3 (bf16) or 2e-4 of a value in the root mean square, and SwiGLU with bias and residual has
# five, that of the gate amplified by the slope of silu.
BOUNDS = {BF16: 4e-3, F16: 2.0**-10}
ROWS = {name: "tokens" for name in ("x", "residual", "result")}

CASES = {
    # tokens, weight rows, k, activation, bias, residual, dtype, config
    "one token": (1, 32, 512, "none", False, False, BF16, Config(2, hold=True)),
    "warps without work": (8, 32, 768, "none", False, True, BF16, Config(2, slices=1)),
    "gate and up": (11, 64, 512, "swiglu", True, True, BF16, Config(2, hold=True)),
    "32 rows": (16, 64, 512, "none", True, False, BF16, Config(1, paired=True)),
    "float16": (3, 32, 512, "none", False, False, F16, Config(2, hold=True)),
}
ROW_CASES = CASES | {
    "tail of k and of rows": (7, 72, 584, "none", False, True, BF16, Config(4)),
    "tail of 32 rows": (9, 40, 64, "none", True, False, BF16, Config(2, paired=True, slices=1)),
}


def mark_slow(cases, fast):
    """Cases as parameters, all but the ``fast`` ones for the nightly run."""
    return [pytest.param(c, id=n, marks=[] if n in fast else pytest.mark.slow) for n, c in cases.items()]


def make_tensors(tokens, rows, k, activation, bias, residual, dtype, *, quantized, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {"x": normal(tokens, k)}
    if quantized:
        tensors["packed"] = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.int32).byte()
        scale = torch.randint(1, 127, (rows, k // 16), generator=generator, dtype=torch.int32).byte()
        tensors["scale"] = scale.view(torch.float8_e4m3fn)
        tensors["global_scale"] = torch.rand(rows, generator=generator) * 1e-4
    else:
        tensors["weight"] = normal(rows, k) * k**-0.5
    tensors["bias"] = normal(rows) if bias else None
    tensors["residual"] = normal(tokens, rows // 2 if activation == "swiglu" else rows) if residual else None
    return tensors


def describe(tensors, activation, layout="linear"):
    op = "linear" if "weight" in tensors else "linear_nvfp4"
    rows = (tensors["weight"] if op == "linear" else tensors["packed"]).shape[0]
    result = tensors["x"].new_empty(len(tensors["x"]), rows // 2 if activation == "swiglu" else rows)
    call = make_call(op, tensors, {"activation": activation, "phase": "decode"}, ROWS, [result])
    for name in {"packed", "scale"} & tensors.keys():
        call.operands[name] = dataclasses.replace(call.operands[name], layout=layout)
    return call, result


def arranged(tensors, flavour=None):
    flavour = flavour or str(tensors["x"].dtype).removeprefix("torch.")
    return tensors | {name: nvfp4_fragments.arrange(tensors[name], flavour) for name in ("packed", "scale")}


def reference(tensors, activation):
    """In fp32: its only roundings are those of the inputs."""
    wide = {name: t.float() if t is not None and t.dtype in (BF16, F16) else t for name, t in tensors.items()}
    return (linear if "weight" in tensors else linear_nvfp4)(**wide, activation=activation)


def error_of(source, tensors, result, want, target=TARGET):
    pool = {**tensors, "result": poisoned_like(result), "tokens": len(tensors["x"])}
    run_emulated(target, (source,), pool, {"tokens": len(tensors["x"])}, {"result"})
    return relative_error(pool["result"], want.to(result.dtype))


@pytest.mark.parametrize("case", mark_slow(CASES, {"gate and up"}))
def test_fragments_match_reference(case):
    *shape, config = case
    tensors = make_tensors(*shape, quantized=True)
    call, result = describe(tensors, shape[3])
    (source,) = emit_fragments(call, 1 if shape[0] <= 8 else 2, config)
    assert error_of(source, arranged(tensors), result, reference(tensors, shape[3])) <= BOUNDS[shape[6]]


def test_parts_of_the_tokens():
    """35 tokens are 16, 16 and 3, with every operand that has a row a token."""
    tensors = make_tensors(35, 32, 256, "none", True, True, BF16, quantized=True)
    call, result = describe(tensors, "none")
    (source,) = emit_fragments(call, 2, Config(1), parts=True)
    assert error_of(source, arranged(tensors), result, reference(tensors, "none")) <= BOUNDS[BF16]


@pytest.mark.parametrize(
    ("rows", "k", "groups", "swiglu", "expected"),
    [
        (512, 256, 1, False, Config(1, hold=True)),
        (1024, 1024, 1, False, Config(4, hold=True)),
        (5120, 5120, 1, False, Config(8, hold=True)),
        (12288, 4096, 1, False, Config(8)),
        (12288, 4096, 2, True, Config(8, paired=True)),
        (32768, 4096, 1, False, Config(4)),
        (32768, 4096, 2, False, Config(4, paired=True)),
        (9856, 6144, 2, False, Config(8)),
        (32784, 4096, 2, False, Config(4)),
    ],
)
def test_configurations_of_other_shapes_follow_a_rule(rows, k, groups, swiglu, expected):
    assert choose_fragments(rows, k, groups, swiglu, 132) == expected


@pytest.mark.parametrize("case", mark_slow(ROW_CASES, {"tail of k and of rows"}))
def test_rows_match_reference(case):
    *shape, config = case
    tensors = make_tensors(*shape, quantized=False)
    call, result = describe(tensors, shape[3])
    (source,) = emit_rows(call, 1 if shape[0] <= 8 else 2, config)
    assert error_of(source, tensors, result, reference(tensors, shape[3])) <= BOUNDS[shape[6]]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2.0**80, 2.0**-80])
def test_bfloat16_activations_beyond_the_range_of_float16(size):
    tensors = make_tensors(2, 16, 256, "none", False, False, BF16, quantized=True)
    tensors["x"] = tensors["x"] * size
    call, result = describe(tensors, "none")
    (source,) = emit_fragments(call, 1, Config(1))
    assert error_of(source, arranged(tensors), result, reference(tensors, "none")) <= BOUNDS[BF16]


DECODE = '''
import triton
import triton.language as tl


@triton.jit
def kernel(words, scales, out):
    place = tl.program_id(0) * 512 + tl.arange(0, 512)
    pairs = tl.inline_asm_elementwise({text!r}, "=&r,=&r,=&r,=&r,r,r",
                                      [tl.load(words + place), tl.load(scales + place)],
                                      (tl.int32, tl.int32, tl.int32, tl.int32), True, 1)
    for i in tl.static_range(4):
        tl.store(out + place * 4 + i, pairs[i])
'''


def decode_everything(target, dtype, flavour, text):
    """What ``text``, as of ``decode_word``, makes of every code with every scale in every place, and the truth."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = nvfp4.pack_codes(torch.stack([codes.roll(n) for n in range(16)]).repeat(1, 16))  # [16, 256]
    words = nvfp4_fragments.arrange(packed, flavour).view(torch.int32).flatten()
    scales = torch.arange(1, 127).repeat_interleave(512) * 0x101
    pool = [words.repeat(126), scales.to(torch.int32)]
    parameters = tuple(Parameter(n, "*i32", n) for n in ("words", "scales", "out"))
    source = KernelSource("decode", DECODE.format(text=text), parameters, ("126", "1", "1"))
    compiled = target.compile(source, target.spec.architectures[0])
    memory, out = DeviceMemory(), np.zeros(126 * 512 * 16, np.uint8)
    inputs = [memory.register(t.numpy().view(np.uint8), "input") for t in pool]
    place = memory.register(out, "out", writable=True, known=False)
    run_kernel(Launch(compiled.assembly, compiled.metadata["name"], (126, 1, 1), 128, compiled.metadata["shared"],
                      [*inputs, place, 0, 0], memory))  # fmt: skip
    got = torch.from_numpy(memory.contents(place).copy()).view(dtype).view(126, 4, 8, 4, 4, 2, 2, 2)  # u g t j i h l
    got = got.permute(0, 6, 2, 1, 3, 4, 5, 7).reshape(126, 16, 256)
    factors = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return got.double(), nvfp4.decode_e2m1(nvfp4.unpack_codes(packed)).double() * factors[:, None, None] / 256


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_code_with_every_scale_is_exact(dtype):
    """The assembly that decode and prefill share."""
    name = str(dtype).removeprefix("torch.")
    assert torch.equal(*decode_everything(TARGET, dtype, name, decode_word(name)))


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((9, 96, 256, "swiglu", True, True, BF16), Blocks(32, 64, 64, 4, 2)),
        pytest.param((35, 80, 512, "none", False, True, BF16), Blocks(32, 64, 64, 4, 3), marks=pytest.mark.slow),
        pytest.param((9, 128, 256, "swiglu", False, False, F16), Blocks(64, 128, 64, 4, 3), marks=pytest.mark.slow),
    ],
)
def test_gemm_reads_fragments(interpreter, shape, blocks):
    tensors = make_tensors(*shape, quantized=True)
    call, result = describe(tensors, shape[3])
    (source,) = emit_fragments_gemm(call, blocks, {})
    want, moved = reference(tensors, shape[3]), arranged(tensors)
    values = {**moved, "result": poisoned_like(result), "tokens": shape[0]}
    columns = -(-tensors["packed"].shape[0] // blocks.n)
    arguments = [values[p.value] for p in source.parameters]
    after = interpreter.run(source, arguments, (-(-shape[0] // blocks.m) * columns, 1, 1))
    out = after[[p.value for p in source.parameters].index("result")]
    assert relative_error(out, want.to(result.dtype)) <= BOUNDS[shape[6]]
    if shape[0] > 32:
        assert error_of(source, moved, result, want) <= BOUNDS[BF16]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 24, 256, "none", False, False, BF16), "not made of tiles"),
        ((4, 32, 320, "none", False, False, BF16), "not made of tiles"),
        ((4, 48, 256, "swiglu", False, False, BF16), "gate rows are not made of tiles"),
        ((4, 32, 256, "none", False, False, torch.float32), "x is torch.float32"),
    ],
)
def test_near_misses_stay_row_major(shape, reason):
    call, _ = describe(make_tensors(*shape, quantized=True), shape[3])
    assert want_fragments(call, SPEC, ARCH) == {}
    call, _ = describe(make_tensors(*shape, quantized=True), shape[3], "nvfp4_fragments_bfloat16")
    assert reason.replace("torch.", "") in FRAGMENTS[0].refuse(call, SPEC, ARCH)


def test_the_layout_decides_which_kernels_serve():
    """Row-major weights go to the portable kernels, fragments to these, those of another flavour to none."""
    tensors = make_tensors(4, 32, 512, "none", False, False, BF16, quantized=True)
    chosen = {}
    for layout in ("linear", "nvfp4_fragments_bfloat16", "nvfp4_fragments_float16"):
        call, _ = describe(tensors, "none", layout)
        found, reason = Selector(SPEC, list_kernels(SPEC)).select(call, 512)
        chosen[layout] = [f.template for f in found]
    assert chosen["linear"][0] == "linear_nvfp4_skinny16"
    assert chosen["nvfp4_fragments_bfloat16"] == [f"linear_nvfp4_fragments{n}" for n in (8, 16, 32, "")]
    assert chosen["nvfp4_fragments_float16"] == [] and "has the layout nvfp4_fragments_float16" in reason
    call, _ = describe(tensors, "none")
    assert want_fragments(call, SPEC, ARCH) == dict.fromkeys(("packed", "scale"), "nvfp4_fragments_bfloat16")
    assert Selector(SPEC, list_kernels(SPEC), portable=True).propose_layouts(call) == {}
