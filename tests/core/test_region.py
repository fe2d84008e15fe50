"""Regions: what is checked when one is built, the JSON form, the evaluator's dtype check."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.region import POINTWISE_OPS, REDUCTION_OPS, Region, Step, evaluate_program


def region(*steps: Step, outputs: tuple[str, ...] = ("a",)) -> Region:
    return Region(("in0", "in1"), steps, outputs)


@pytest.mark.parametrize(("steps", "outputs", "message"), [
    ([Step("a", "conv2d", ("in0",), "float32")], ["a"], "not an operation"),
    ([Step("a", "add", ("in0", "b"), "float32")], ["a"], "not defined before"),
    ([Step("in0", "neg", ("in0",), "float32")], ["in0"], "taken"),
    ([Step("a b", "neg", ("in0",), "float32")], ["a b"], "identifier"),
    ([Step("a", "neg", ("in0", "in1"), "float32")], ["a"], "takes 1 arguments"),
    ([Step("a", "mul", ("in0", "in1"), "float32", {"alpha": 2})], ["a"], "no option alpha"),
    ([Step("a", "add", (1, 2.0), "float32")], ["a"], "needs a tensor"),
    ([Step("a", "pow", ("in0", "in1"), "float32")], ["a"], "scalar exponent"),
    ([Step("a", "add", ("in0", None), "float32")], ["a"], "only clamp"),
    ([Step("a", "full", ("in0",), "float32")], ["a"], "takes a scalar"),
    ([Step("a", "neg", ("in0",), "float32")], ["b"], "outputs"),
    ([Step("a", "neg", ("in0",), "float32")], ["in0"], "outputs"),
    ([Step("a", "neg", ("in0",), "float32")], [], "outputs"),
])
def test_malformed_regions_are_refused(steps, outputs, message):
    with pytest.raises(ValueError, match=message):
        Region(("in0", "in1"), tuple(steps), tuple(outputs))


def test_inputs_must_be_unique():
    with pytest.raises(ValueError, match="unique"):
        Region(("in0", "in0"), (Step("a", "neg", ("in0",), "float32"),), ("a",))


def test_kind_follows_the_steps():
    assert region(Step("a", "add", ("in0", "in1"), "float32")).kind == "pointwise"
    assert region(Step("a", "softmax", ("in0",), "float32")).kind == "reduction"
    assert not POINTWISE_OPS & REDUCTION_OPS


scalars = st.one_of(st.integers(-9, 9), st.floats(allow_nan=False), st.booleans(), st.sampled_from(["in0", "in1"]))


@settings(max_examples=50, deadline=None)
@given(args=st.lists(scalars, min_size=1, max_size=6), keepdim=st.booleans())
def test_json_round_trip(args: list[Any], keepdim: bool):
    steps = [Step(f"s{i}", "add", ("in0", a), "float32", {"alpha": 2}) for i, a in enumerate(args)]
    steps.append(Step("a", "amax", ("s0",), "float32", {"keepdim": keepdim}))
    original = region(*steps)
    text = json.dumps(original.to_json(), allow_nan=False)
    assert Region.from_json(json.loads(text)) == original


def test_evaluator_gives_torchs_values():
    program = region(
        Step("m", "amax", ("in0",), "bfloat16", {"keepdim": True}), Step("s", "sub", ("in0", "m"), "bfloat16"),
        Step("w", "where", ("in1", "s", -math.inf), "bfloat16"), Step("a", "softmax", ("w",), "bfloat16"),
        Step("f", "full", (2.0,), "float32"), Step("g", "mul", ("a", "f"), "float32"), outputs=("a", "g"),
    )
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = torch.arange(5) < 4
    a, g = evaluate_program(program, [x, mask])
    expected = torch.where(mask, x - x.amax(-1, keepdim=True), -math.inf).float().softmax(-1).bfloat16()
    assert torch.equal(a, expected) and torch.equal(g, expected.float() * 2)


def test_evaluator_refuses_a_wrong_dtype_and_a_wrong_count():
    program = region(Step("a", "add", ("in0", "in1"), "bfloat16"))
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        evaluate_program(program, [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match="takes 2 inputs"):
        evaluate_program(program, [torch.zeros(2)])
