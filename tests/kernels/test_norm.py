"""RMSNorm kernels against their references: widths with tails, strides, offsets, rounding points."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.discover import load_module
from mmcompile.targets._kernels.norm import TEMPLATES

RMS_NORM, ADD_RMS_NORM = TEMPLATES
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A different order of summation may move a value across a rounding border of its dtype, rarely.
BOUNDS = {torch.bfloat16: 4e-4, torch.float16: 5e-5, torch.float32: 5e-7}
ROWS = {name: "tokens" for name in ("x", "residual", "result")}
SPEC = load_module("targets", "sm90").TARGET.spec
ARCH = SPEC.architectures[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "n"), [(1, 576), (3, 100), (17, 64)])
@pytest.mark.parametrize(("offset", "early"), [(0.0, True), (1.0, False), (1.0, True)])
def test_rms_norm_matches_reference(runner, normal, dtype, tokens, n, offset, early):
    tensors = {"x": normal(tokens, n, dtype=dtype, scale=3.0), "weight": normal(n, dtype=dtype)}
    attributes = {"eps": 1e-5, "weight_offset": offset, "round_before_scale": early}
    for outcome in runner.run_everywhere(RMS_NORM, tensors, attributes, rows=ROWS, symbols={"tokens": tokens}):
        assert max(outcome.errors) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "n"), [(1, 1536), (5, 100)])
def test_add_rms_norm_matches_reference(runner, normal, dtype, tokens, n):
    tensors = {"x": normal(tokens, n, dtype=dtype), "residual": normal(tokens, n, dtype=dtype),
               "weight": normal(n, dtype=dtype)}
    for outcome in runner.run_everywhere(ADD_RMS_NORM, tensors, {"eps": 1e-6}, rows=ROWS, symbols={"tokens": tokens}):
        assert torch.equal(outcome.results[1], outcome.references[1])
        assert max(outcome.errors) <= BOUNDS[dtype]


def test_rows_of_a_wider_buffer(runner, normal):
    wide = normal(4, 256)
    tensors = {"x": wide[:, 64:164], "residual": wide[:, :100], "weight": normal(100)}
    outcome = runner.run_op(ADD_RMS_NORM, tensors, {"eps": 1e-5}, SPEC, ARCH, rows=ROWS, symbols={"tokens": 4})
    assert max(outcome.errors) <= BOUNDS[torch.bfloat16]


def test_fp32_weight_with_bf16_rows(runner, normal):
    tensors = {"x": normal(3, 96), "weight": normal(96, dtype=torch.float32)}
    outcome = runner.run_op(RMS_NORM, tensors, {"eps": 1e-5}, SPEC, ARCH, rows=ROWS, symbols={"tokens": 3})
    assert max(outcome.errors) <= BOUNDS[torch.bfloat16]


def test_the_rounding_point_shows(runner, normal):
    """The bound is tight enough to tell the two rounding orders apart."""
    tensors = {"x": normal(8, 512), "weight": normal(512)}
    early, late = (
        runner.run_op(RMS_NORM, tensors, {"eps": 1e-5, "round_before_scale": flag}, SPEC, ARCH, rows=ROWS,
                      symbols={"tokens": 8})
        for flag in (True, False)
    )
    difference = (early.results[0].double() - late.references[0].double()).norm() / late.references[0].double().norm()
    assert float(difference) > 2 * BOUNDS[torch.bfloat16]


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_width(runner, data):
    n, tokens = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = {"x": torch.randn(tokens, n, generator=generator), "weight": torch.randn(n, generator=generator)}
    outcome = runner.run_op(RMS_NORM, tensors, {"eps": 1e-5}, SPEC, ARCH, rows=ROWS, symbols={"tokens": tokens})
    assert max(outcome.errors) <= BOUNDS[torch.float32]


@pytest.mark.parametrize(("change", "words"), [
    ({"x": torch.zeros(4, 8).t()}, "last stride"),
    ({"x": torch.zeros(2, 3, 8)}, "3 dimensions"),
    ({"x": torch.zeros(2, 8, dtype=torch.int32)}, "int32"),
    ({"weight": torch.zeros(8, dtype=torch.uint8)}, "weight is uint8"),
    ({"x": torch.empty(1, 1 << 17, device="meta")}, "do not fit"),
])
def test_refusals_say_why(call_of, change: dict[str, Any], words):
    tensors = {"x": torch.zeros(2, 8), "weight": torch.zeros(8)} | change
    call = call_of("rms_norm", tensors, {"eps": 1e-5}, ROWS, [tensors["x"]])
    assert words in RMS_NORM.refuse(call, SPEC, ARCH)
