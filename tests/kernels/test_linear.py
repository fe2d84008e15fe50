"""Dense linear kernels against their references: tails, strides, epilogues, token counts, dtypes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.discover import load_module
from mmcompile.targets._kernels.linear import SKINNY_TOKENS, TEMPLATES

SKINNY, WIDE_SKINNY, GEMM = TEMPLATES
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Accumulation in another order moves few values across a rounding border; fp32 sums differ in their last bits.
BOUNDS = {torch.bfloat16: 1e-3, torch.float16: 1.5e-4, torch.float32: 2e-6}
ROWS = {name: "tokens" for name in ("x", "residual", "result")}
SPEC = load_module("targets", "sm90").TARGET.spec
ARCH = SPEC.architectures[0]

CASES = [
    # tokens, weight rows, k, activation, bias, residual
    (1, 72, 576, "none", False, True),
    (16, 100, 320, "none", True, True),
    (5, 96, 64, "swiglu", True, True),
    (7, 88, 100, "swiglu", False, False),
]


def make_tensors(normal, tokens, rows, k, activation, bias, residual, dtype):
    width = rows // 2 if activation == "swiglu" else rows
    return {
        "x": normal(tokens, k, dtype=dtype),
        "weight": normal(rows, k, dtype=dtype, scale=k**-0.5),
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
    tensors = make_tensors(normal, tokens, 40, 72, "swiglu", True, True, dtype)
    for outcome in runner.run_everywhere(WIDE_SKINNY, tensors, {"activation": "swiglu"}, rows=ROWS,
                                         symbols={"tokens": tokens}):
        assert max(outcome.errors) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES[1:], (33, 130, 96, "none", False, True), (150, 70, 48, "none", True, False)],
                         ids=str)
def test_gemm_matches_reference(runner, normal, case, dtype):
    tensors = make_tensors(normal, *case, dtype)
    for outcome in runner.run_everywhere(GEMM, tensors, {"activation": case[3]}, rows=ROWS,
                                         symbols={"tokens": case[0]}):
        assert max(outcome.errors) <= BOUNDS[dtype]


@pytest.mark.parametrize("tokens", range(1, SKINNY_TOKENS[0] + 1))
def test_every_decode_batch(runner, normal, tokens):
    tensors = make_tensors(normal, tokens, 12, 64, "none", False, False, torch.bfloat16)
    outcome = runner.run_op(SKINNY, tensors, {}, SPEC, ARCH, rows=ROWS, symbols={"tokens": tokens})
    assert max(outcome.errors) <= BOUNDS[torch.bfloat16]


def test_rows_of_tokens_do_not_depend_on_the_batch(runner, normal):
    tensors = make_tensors(normal, 9, 40, 96, "none", False, False, torch.bfloat16)
    many = runner.run_op(SKINNY, tensors, {}, SPEC, ARCH, rows=ROWS, symbols={"tokens": 9})
    one = runner.run_op(SKINNY, tensors | {"x": tensors["x"][:1]}, {}, SPEC, ARCH, rows=ROWS, symbols={"tokens": 1})
    assert torch.equal(many.results[0][:1], one.results[0])


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_rows_of_wider_buffers(runner, normal, template):
    wide = normal(6, 256)
    tensors = {"x": wide[:, 64:160], "weight": normal(48, 128, scale=0.1)[:, 16:112], "bias": None,
               "residual": wide[:, 160:208]}
    outcome = runner.run_op(template, tensors, {}, SPEC, ARCH, rows=ROWS, symbols={"tokens": 6})
    assert max(outcome.errors) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_a_fixed_number_of_rows_needs_no_symbol(runner, normal, template):
    tensors = make_tensors(normal, 4, 40, 64, "none", False, False, torch.bfloat16)
    outcome = runner.run_op(template, tensors, {}, SPEC, ARCH, rows={}, symbols={})
    assert [p.type for p in outcome.sources[0].parameters] == ["*bf16"] * 3
    assert max(outcome.errors) <= BOUNDS[torch.bfloat16]


def test_against_float64(runner, normal):
    """Absolute accuracy, whatever the reference rounds: half a unit in the last place of bfloat16 on average."""
    tensors = make_tensors(normal, 8, 64, 576, "none", False, False, torch.bfloat16)
    outcome = runner.run_op(SKINNY, tensors, {}, SPEC, ARCH, rows=ROWS, symbols={"tokens": 8})
    exact = tensors["x"].double() @ tensors["weight"].double().T
    assert float((outcome.results[0].double() - exact).norm() / exact.norm()) < 2**-9


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_shape(runner, data):
    tokens, rows, k = (data.draw(st.integers(1, top)) for top in (16, 80, 200))
    template = data.draw(st.sampled_from(TEMPLATES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = {"x": torch.randn(tokens, k, generator=generator), "weight": torch.randn(rows, k, generator=generator),
               "bias": torch.randn(rows, generator=generator), "residual": None}
    outcome = runner.run_op(template, tensors, {}, SPEC, ARCH, rows=ROWS, symbols={"tokens": tokens})
    assert max(outcome.errors) <= BOUNDS[torch.float32]


def test_a_head_over_the_batch_is_emitted_for_its_symbol(call_of):
    x, y = torch.zeros(4, 64), torch.zeros(4, 32)
    tensors = {"x": x, "weight": torch.zeros(32, 64), "bias": None, "residual": None}
    call = call_of("linear", tensors, {}, {"x": "batch", "result": "batch"}, [y])
    (source,) = GEMM.emit(call, SPEC, ARCH)
    assert source.grid[0].startswith("cdiv(batch, ")
    assert source.parameters[-1].value == "batch"


@pytest.mark.parametrize(("change", "words"), [
    ({"weight": torch.zeros(32, 64, dtype=torch.bfloat16)}, "weight is bfloat16 and x float32"),
    ({"weight": torch.zeros(64, 32).t()}, "last stride of weight"),
    ({"bias": torch.zeros(32, dtype=torch.float16)}, "bias is float16"),
    ({"x": torch.zeros(2, 2, 64)}, "3 dimensions"),
])
def test_refusals_say_why(call_of, change, words):
    tensors = {"x": torch.zeros(2, 64), "weight": torch.zeros(32, 64), "bias": None, "residual": None} | change
    call = call_of("linear", tensors, {}, ROWS, [torch.zeros(2, 32)])
    for template in TEMPLATES:
        assert words in template.refuse(call, SPEC, ARCH)
