"""MXFP8 linear kernels and their decoders: exactness over every code and scale, tails, epilogues, dtypes."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
import torch

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.formats import mxfp8
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._intrinsics import mxfp8_packed
from mmcompile.targets._intrinsics.mxfp8 import decode_mxfp8
from mmcompile.targets._kernels.common import language_dtype
from mmcompile.targets._kernels.linear_mxfp8 import TEMPLATES, mxfp8_intrinsics

SKINNY, WIDE_SKINNY, GEMM = TEMPLATES
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = {torch.bfloat16: 1e-3, torch.float16: 1.5e-4, torch.float32: 2e-6}
ROWS = {name: "tokens" for name in ("x", "residual", "result")}
TARGETS = [load_module("targets", name).TARGET for name in list_names("targets")]
PLACES = [(t.spec, a) for t in TARGETS if t.spec.backend for a in t.spec.architectures]
SPEC = load_module("targets", "sm90").TARGET.spec
ARCH = SPEC.architectures[0]
COMPILED = [
    pytest.param(t, a, id=a.name, marks=[pytest.mark.slow] if i else [])
    for t in TARGETS if t.spec.backend for i, a in enumerate(t.spec.architectures)
]
FINITE = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)


def make_tensors(normal, tokens, rows, k, activation, bias, residual, dtype):
    values, scale = mxfp8.encode(normal(rows, k, dtype=torch.float32, scale=k**-0.5))
    width = rows // 2 if activation == "swiglu" else rows
    return {
        "x": normal(tokens, k, dtype=dtype), "values": values, "scale": scale,
        "bias": normal(rows, dtype=dtype) if bias else None,
        "residual": normal(tokens, width, dtype=dtype) if residual else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("template", "case"), [
    # tokens, weight rows, k, activation, bias, residual
    (SKINNY, (1, 20, 576, "none", False, True)),
    (SKINNY, (3, 24, 32, "swiglu", False, False)),
    (SKINNY, (16, 44, 320, "none", True, True)),
    (WIDE_SKINNY, (17, 40, 96, "swiglu", True, True)),
    (GEMM, (33, 70, 96, "none", False, True)),
    (GEMM, (65, 32, 32, "swiglu", True, False)),
], ids=lambda v: getattr(v, "name", str(v)))
def test_matches_reference(runner, normal, template, case, dtype):
    tensors = make_tensors(normal, *case, dtype)
    for outcome in runner.run_everywhere(template, tensors, {"activation": case[3]}, rows=ROWS,
                                         symbols={"tokens": case[0]}):
        assert max(outcome.errors) <= BOUNDS[dtype]


def decode_source(dtype: torch.dtype, intrinsics: dict) -> KernelSource:
    """A kernel that decodes words [256, 64] with scales [256, 8] into out [256, 256], a program a row."""
    short = str(dtype).removeprefix("torch.")
    pointers = (("words", "*i32"), ("scale", "*u8"), ("out", "*bf16" if short == "bfloat16" else "*fp32"))
    return emit_kernel(
        name="decode", title="decode", tiles=[decode_mxfp8], constants={}, grid=("16", "1", "1"),
        parameters=[Parameter(name, kind, name) for name, kind in pointers], intrinsics=intrinsics,
        body=f"""
        row = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
        words = tl.load(words + row * 64 + tl.arange(0, 64)[None, :])
        scale = tl.load(scale + row * 8 + tl.arange(0, 8)[None, :])
        tl.store(out + row * 256 + tl.arange(0, 256)[None, :], decode_mxfp8(words, scale, {language_dtype(short)}))
        """,
    )


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """Values e4m3 [256, 256], in every row each finite code (the NaN codes as 0), and the row number as scale."""
    codes = torch.zeros(256, dtype=torch.uint8)
    codes[: len(FINITE)] = FINITE
    return codes.repeat(256, 1).view(torch.float8_e4m3fn), torch.arange(256).to(torch.uint8)[:, None].repeat(1, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("spec", "arch"), PLACES, ids=[a.name for _, a in PLACES])
def test_every_code_with_every_scale(interpreter, spec, arch, dtype):
    values, scale = every_code_and_scale()
    intrinsics, _ = mxfp8_intrinsics(arch, str(dtype).removeprefix("torch."))
    source = decode_source(dtype, intrinsics)
    out = interpreter.run(source, [values.view(torch.int32), scale, torch.empty(256, 256, dtype=dtype)], (16, 1, 1))[2]
    torch.testing.assert_close(out, mxfp8.decode(values, scale).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("target", "architecture"), COMPILED)
def test_assembly_decodes_every_code_with_every_scale(target, architecture):
    """In the emulator of the architecture: the packed, converting and scaling instructions themselves."""
    values, scale = every_code_and_scale()
    intrinsics, _ = mxfp8_intrinsics(architecture, "bfloat16")
    compiled = target.compile(decode_source(torch.bfloat16, intrinsics), architecture)
    memory, out = DeviceMemory(), np.zeros(256 * 256, np.uint16)
    inputs = [memory.register(t.view(torch.uint8).numpy().reshape(-1), "input") for t in (values, scale)]
    result = memory.register(out.view(np.uint8), "out", writable=True, known=False)
    made = compiled.metadata
    run_kernel(Launch(compiled.assembly, made["name"], (16, 1, 1), made["num_warps"] * made["warp_size"],
                      made["shared"], [*inputs, result, 0, 0], memory))
    got = torch.from_numpy(memory.contents(result).copy()).view(torch.bfloat16).view(256, 256)
    want = mxfp8.decode(values, scale).to(torch.bfloat16)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_bfloat16_holds_every_product_of_the_scales_in_use():
    """The claim of the decoders' contract: exact from scale code 3 up; below it the error is under 2^-133."""
    values, scale = every_code_and_scale()
    exact = mxfp8.decode(values, scale)
    rounded = exact.to(torch.bfloat16).float()
    assert torch.equal(rounded[3:255], exact[3:255])
    assert float((rounded[:3].double() - exact[:3].double()).abs().max()) <= 2.0**-134
    assert bool(rounded[255].isnan().all())


def run_assembly(function, words: torch.Tensor) -> list[torch.Tensor]:
    """The pair registers of the packed decoder before its multiplications, by evaluating its PTX text."""
    text = re.search(r'"""{ (.*?)}"""', inspect.getsource(function.fn), re.DOTALL).group(1)
    registers = {"$2": words}
    operations = {
        "and": lambda a, b: a & b, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
        "lop3": lambda a, b, c, table: a | (b & c), "mov": lambda a: torch.tensor(a),
    }
    for line in filter(None, (part.strip() for part in text.split(";"))):
        name, rest = line.split(" ", 1)
        if name == ".reg" or name.startswith("mul.rn"):
            continue
        target, *sources = rest.split(", ")
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        assert not name.startswith("lop3") or values[3] == 0xF8
        registers[target] = operations[name.split(".")[0]](*values) & 0xFFFFFFFF
    assert int(registers["unit"]) == 0x7B807B80
    return [registers["$0"], registers["$1"]]


def test_packed_assembly_is_exact():
    """Every code in every position beside other codes; its two multiplications with every scale."""
    byte = FINITE.long()
    word = byte | byte.flip(0) << 8 | byte.roll(7) << 16 | byte.roll(100) << 24
    unit = torch.tensor(0x7B80, dtype=torch.int16).view(torch.bfloat16)
    scales = mxfp8.decode_scale(torch.arange(256).to(torch.uint8))
    for j, pair in enumerate(run_assembly(mxfp8_packed.decode_pairs, word)):
        for half in range(2):
            value = (pair >> 16 * half & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16) * unit
            code = (word >> 8 * (j + 2 * half) & 255).to(torch.uint8).view(torch.float8_e4m3fn)
            assert torch.equal(value.float(), code.float())
            product = value[:, None] * scales.to(torch.bfloat16)[None, :]
            exact = (code.float()[:, None] * scales[None, :]).to(torch.bfloat16)
            torch.testing.assert_close(product, exact, rtol=0, atol=0, equal_nan=True)


def test_targets_take_their_own_decoder():
    def modules(name: str, dtype: str) -> set[str]:
        spec = load_module("targets", name).TARGET.spec
        return {mxfp8_intrinsics(a, dtype)[0]["decode_mxfp8"].fn.__module__.rsplit(".", 1)[1]
                for a in spec.architectures}

    assert modules("sm90", "bfloat16") == {"mxfp8_packed"}
    assert modules("sm100", "bfloat16") == modules("sm107", "bfloat16") == {"mxfp8_cvt"}
    assert modules("gfx950", "bfloat16") == {"mxfp8_scalef32"}
    assert modules("gfx950", "float32") == modules("sm100", "float16") == {"mxfp8"}
    bare = dataclasses.replace(ARCH, features=frozenset())
    assert mxfp8_intrinsics(bare, "bfloat16")[0]["decode_mxfp8"] is decode_mxfp8


@pytest.mark.parametrize(("change", "words"), [
    ({"x": torch.zeros(2, 48)}, "multiple of 32"),
    ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x is float64"),
    ({"x": torch.zeros(2, 64, dtype=torch.float8_e4m3fn)}, "x is float8_e4m3fn"),
    ({"scale": torch.zeros(32, 2, dtype=torch.float8_e4m3fn)}, "stored as float8_e4m3fn, float8_e4m3fn"),
    ({"values": torch.zeros(32, 64, dtype=torch.uint8)}, "stored as uint8, uint8"),
    ({"values": torch.zeros(32, 66, dtype=torch.float8_e4m3fn)[:, :64]}, "multiples of 4"),
    ({"scale": torch.zeros(32, 4, dtype=torch.uint8)[:, ::2]}, "last strides"),
    ({"bias": torch.zeros(32, dtype=torch.bfloat16)}, "bias is bfloat16"),
])
def test_refusals_say_why(call_of, change, words):
    tensors = {"x": torch.zeros(2, 64), "values": torch.zeros(32, 64, dtype=torch.float8_e4m3fn),
               "scale": torch.zeros(32, 2, dtype=torch.uint8), "bias": None, "residual": None} | change
    call = call_of("linear_mxfp8", tensors, {}, ROWS, [torch.zeros(2, 32)])
    for template in TEMPLATES:
        assert words in template.refuse(call, SPEC, ARCH)


@pytest.mark.parametrize(("target", "architecture"), COMPILED)
@pytest.mark.parametrize("template", [SKINNY, GEMM], ids=lambda t: t.name)
def test_compiles_within_the_limits(call_of, template, target, architecture):
    tensors = {"x": torch.empty(4, 6144, dtype=torch.bfloat16),
               "values": torch.empty(1024, 6144, dtype=torch.float8_e4m3fn),
               "scale": torch.empty(1024, 192, dtype=torch.uint8), "bias": None, "residual": None}
    call = call_of("linear_mxfp8", tensors, {"activation": "swiglu"}, ROWS, [torch.empty(4, 512, dtype=torch.bfloat16)])
    for source in template.emit(call, target.spec, architecture):
        compiled = target.compile(source, architecture)
        assert target.check(compiled) == [] and compiled.metadata["spills"] == 0
