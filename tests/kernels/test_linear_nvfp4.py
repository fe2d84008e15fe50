"""NVFP4 linear kernels and their decoders: exactness over every code and scale, tails, epilogues, dtypes."""

import dataclasses
import inspect
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.formats import nvfp4
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.core.ops.linear import nvfp4_quantize
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._intrinsics import nvfp4_packed
from mmcompile.targets._intrinsics.nvfp4 import decode_nvfp4
from mmcompile.targets._kernels.common import language_dtype
from mmcompile.targets._kernels.linear_nvfp4 import TEMPLATES, nvfp4_intrinsics

SKINNY, WIDE_SKINNY, GEMM = TEMPLATES
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = {torch.bfloat16: 1e-3, torch.float16: 1.5e-4, torch.float32: 2e-6}
ROWS = {name: "tokens" for name in ("x", "residual", "result")}
SPECS = [load_module("targets", name).TARGET.spec for name in list_names("targets")]
PLACES = [(s, a) for s in SPECS if s.backend for a in s.architectures]
SPEC = load_module("targets", "sm90").TARGET.spec
ARCH = SPEC.architectures[0]

CASES = [
    # tokens, weight rows, k, activation, bias, residual
    (1, 20, 576, "none", False, True),
    (16, 44, 320, "none", True, True),
    (5, 48, 64, "swiglu", True, True),
    (7, 24, 16, "swiglu", False, False),
]


def make_tensors(normal, tokens, rows, k, activation, bias, residual, dtype):
    packed, scale, global_scale = nvfp4_quantize(normal(rows, k, dtype=torch.float32, scale=k**-0.5))
    width = rows // 2 if activation == "swiglu" else rows
    return {
        "x": normal(tokens, k, dtype=dtype),
        "packed": packed,
        "scale": scale,
        "global_scale": global_scale * (1 + torch.arange(rows) % 3),
        "bias": normal(rows, dtype=dtype) if bias else None,
        "residual": normal(tokens, width, dtype=dtype) if residual else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_skinny_matches_reference(runner, normal, case, dtype):
    tensors = make_tensors(normal, *case, dtype)
    for outcome in runner.run_everywhere(SKINNY, tensors, {"activation": case[3]}, rows=ROWS,
                                         symbols={"tokens": case[0]}):
        assert max(outcome.errors) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [17, 32])
def test_skinny_takes_32_tokens(runner, normal, tokens, dtype):
    tensors = make_tensors(normal, tokens, 40, 80, "swiglu", True, True, dtype)
    for outcome in runner.run_everywhere(WIDE_SKINNY, tensors, {"activation": "swiglu"}, rows=ROWS,
                                         symbols={"tokens": tokens}):
        assert max(outcome.errors) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES[2:], (33, 70, 96, "none", False, True), (65, 30, 48, "none", True, False)],
                         ids=str)
def test_gemm_matches_reference(runner, normal, case, dtype):
    tensors = make_tensors(normal, *case, dtype)
    for outcome in runner.run_everywhere(GEMM, tensors, {"activation": case[3]}, rows=ROWS,
                                         symbols={"tokens": case[0]}):
        assert max(outcome.errors) <= BOUNDS[dtype]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_bytes(runner, data):
    """Arbitrary codes and finite scales, not only those that an encoder writes."""
    tokens, rows, blocks = (data.draw(st.integers(1, top)) for top in (16, 40, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scale = torch.randint(0, 0x7F, (rows, blocks), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    tensors = {
        "x": torch.randn(tokens, 16 * blocks, generator=generator), "scale": scale,
        "packed": torch.randint(0, 256, (rows, 8 * blocks), generator=generator).to(torch.uint8),
        "global_scale": torch.rand(rows, generator=generator), "bias": None, "residual": None,
    }
    outcome = runner.run_op(SKINNY, tensors, {}, SPEC, ARCH, rows=ROWS, symbols={"tokens": tokens})
    assert max(outcome.errors) <= BOUNDS[torch.float32]


def decode_source(dtype: torch.dtype, intrinsics: dict) -> KernelSource:
    """A kernel that decodes words [127, 2] with scales [127, 1] into out [127, 16]."""
    short = str(dtype).removeprefix("torch.")
    pointers = (("words", "*i32"), ("scale", "*fp8e4nv"), ("out", "*bf16"))
    return emit_kernel(
        name="decode", title="decode", tiles=[decode_nvfp4], constants={}, grid=("1", "1", "1"),
        parameters=[Parameter(name, kind, name) for name, kind in pointers], intrinsics=intrinsics,
        body=f"""
        row = tl.arange(0, 128)[:, None]
        words = tl.load(words + row * 2 + tl.arange(0, 2)[None, :])
        scale = tl.load(scale + row + tl.arange(0, 1)[None, :])
        tl.store(out + row * 16 + tl.arange(0, 16)[None, :], decode_nvfp4(words, scale, {language_dtype(short)}))
        """,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("spec", "arch"), PLACES, ids=[a.name for _, a in PLACES])
def test_every_code_with_every_scale_is_exact(interpreter, spec, arch, dtype):
    codes = torch.arange(16)
    row = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)
    packed = row.repeat(128, 1)
    scale = torch.arange(128, dtype=torch.uint8).clamp_max(0x7E).view(torch.float8_e4m3fn)[:, None]
    intrinsics, _ = nvfp4_intrinsics(arch, str(dtype).removeprefix("torch."))
    source = decode_source(dtype, intrinsics)
    out = interpreter.run(source, [packed.view(torch.int32), scale, torch.empty(128, 16, dtype=dtype)], (1, 1, 1))[2]
    assert torch.equal(out.double() * 256, nvfp4.decode_blocks(packed, scale).double())


def run_assembly(function, words: torch.Tensor) -> list[torch.Tensor]:
    """The four pair registers of a packed decoder before its final multiplications, by evaluating its PTX text."""
    text = re.search(r'"""{ (.*?)}"""', inspect.getsource(function.fn), re.DOTALL).group(1)
    registers = {"$4": words}
    operations = {
        "and": lambda a, b: a & b, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "mul": lambda a, b: a * b,
        "lop3": lambda a, b, c, table: (a & b) | c,
    }
    for line in filter(None, (part.strip() for part in text.split(";"))):
        name, rest = line.split(" ", 1)
        if name == ".reg" or name.startswith("mul.rn"):
            continue
        target, *sources = rest.split(", ")
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        assert not name.startswith("lop3") or values[3] == 0xEA
        registers[target] = operations[name.split(".")[0]](*values) & 0xFFFFFFFF
    return [registers[f"${j}"] for j in range(4)]


@pytest.mark.parametrize(("function", "dtype", "unit"), [
    (nvfp4_packed.decode_pairs_bf16, torch.bfloat16, 2.0**118),
    (nvfp4_packed.decode_pairs_f16, torch.float16, 2.0**6),
], ids=["bf16", "f16"])
def test_packed_assembly_is_exact(function, dtype, unit):
    """Every code in every position beside other codes, with every scale."""
    byte = torch.arange(256)
    word = byte | (byte ^ 0x5A) << 8 | (255 - byte) << 16 | (byte ^ 0xC3) << 24
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for j, pair in enumerate(run_assembly(function, word)):
        for half in range(2):
            value = (pair >> 16 * half & 0xFFFF).to(torch.int16).view(dtype)
            product = value[:, None] * (scales * unit).to(dtype)[None, :]
            code = (word >> 4 * (j + 4 * half) & 15).to(torch.uint8)
            exact = nvfp4.decode_e2m1(code).double()[:, None] * scales[None, :]
            assert torch.equal(product.double() * 256, exact)


def test_targets_take_their_own_decoder():
    def modules(name: str, dtype: str) -> set[str]:
        spec = load_module("targets", name).TARGET.spec
        return {nvfp4_intrinsics(a, dtype)[0]["decode_nvfp4"].fn.__module__.rsplit(".", 1)[1]
                for a in spec.architectures}

    assert modules("sm90", "bfloat16") == {"nvfp4_packed"}
    assert modules("sm100", "float16") == modules("sm107", "bfloat16") == {"nvfp4_cvt"}
    assert modules("gfx950", "bfloat16") == {"nvfp4_scalef32"}
    assert modules("gfx950", "float32") == modules("sm100", "float32") == {"nvfp4"}


def test_an_architecture_without_features_decodes_portably():
    bare = dataclasses.replace(ARCH, features=frozenset())
    assert nvfp4_intrinsics(bare, "bfloat16")[0]["decode_nvfp4"] is decode_nvfp4


@pytest.mark.parametrize(("change", "words"), [
    ({"x": torch.zeros(2, 24)}, "multiple of 16"),
    ({"scale": torch.zeros(32, 4, dtype=torch.uint8)}, "stored as uint8, uint8, float32"),
    ({"packed": torch.zeros(32, 66, dtype=torch.uint8)[:, 1:33].as_strided((32, 32), (66, 1))}, "multiples of 4"),
    ({"global_scale": torch.zeros(64)[::2]}, "last strides"),
])
def test_refusals_say_why(call_of, change, words):
    tensors = {"x": torch.zeros(2, 64), "packed": torch.zeros(32, 32, dtype=torch.uint8),
               "scale": torch.zeros(32, 4, dtype=torch.float8_e4m3fn), "global_scale": torch.ones(32),
               "bias": None, "residual": None} | change
    call = call_of("linear_nvfp4", tensors, {}, ROWS, [torch.zeros(2, 32)])
    for template in TEMPLATES:
        assert words in template.refuse(call, SPEC, ARCH)
