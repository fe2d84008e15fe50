"""Sampling kernels give the reference's tokens (ties, top-k, top-p, seeds); Philox against its known answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcompile.core.kernel import Parameter
from mmcompile.core.ops.sampling import philox_uniform
from mmcompile.targets import sm90
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels import sampling

SPEC, ARCH = sm90.TARGET.spec, sm90.TARGET.spec.architectures[0]
(SAMPLE,) = sampling.TEMPLATES


def run(runner: Any, logits: Tensor, **settings: list[float]) -> tuple[list[int], list[int]]:
    """Tokens of the kernel and of the reference; settings default to greedy with a seed for every row."""
    batch = logits.shape[0]
    values = {"temperature": [0.0], "top_k": [0], "top_p": [1.0], "seed": [1234567890123], "positions": [7]} | settings
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "seed": torch.int64,
              "positions": torch.int32}
    tensors = {n: torch.tensor((v * batch)[:batch], dtype=dtypes[n]) for n, v in values.items()}
    names = ("logits", *dtypes, "result")
    outcome = runner.run_op(SAMPLE, {"logits": logits} | tensors, {}, SPEC, ARCH, rows=dict.fromkeys(names, "batch"),
                            symbols={"batch": batch})
    return outcome.results[0].tolist(), outcome.references[0].tolist()


def test_uniforms_are_philox_bit_for_bit(interpreter):
    source = emit_kernel(
        name="noise", title="Noise.", tiles=[sampling.uniform_noise], constants={},
        parameters=[Parameter("seed", "*i64", "seed"), Parameter("position", "*i32", "position"),
                    Parameter("out", "*fp32", "out")],
        body="lane = tl.arange(0, 1024)\n"
             "tl.store(out + lane, uniform_noise(tl.load(seed), tl.load(position), lane))",
        grid=("1", "1", "1"),
    )
    for seed, position in [(0, 0), (0x1234_5678_9ABC_DEF0, 77), (-3, 2**31 - 1)]:
        key, place = torch.tensor([seed]), torch.tensor([position], dtype=torch.int32)
        *_, out = interpreter.run(source, [key, place, torch.zeros(1024)], (1, 1, 1))
        assert torch.equal(out, philox_uniform(key[0], place[0], torch.arange(1024)))


def test_reference_philox_has_the_published_known_answer():
    zero = torch.tensor(0)
    assert float(philox_uniform(zero, zero, zero)) == ((0x6627E8D5 >> 9) + 0.5) / 2**23


def test_uniforms_never_reach_one():
    assert torch.tensor((2**23 - 1) + 0.5, dtype=torch.float32) * 2.0**-23 < 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_takes_the_lowest_index_of_a_tie(runner, dtype):
    logits = torch.full((5, 4500), -3.0, dtype=dtype)
    logits[0, [4499, 2100, 2050]] = 5.0
    logits[1, [0, 4499]] = -1.0
    logits[2] = -math.inf
    logits[3, 17], logits[3, 2500] = -0.0, 0.0
    logits[4, 4499] = math.inf
    out, reference = run(runner, logits)
    assert out == reference == [2050, 0, 0, 17, 4499]


@pytest.mark.parametrize("case", [
    {"temperature": [1.0, 0.0, 0.3, 2.0]},
    {"temperature": [1.0], "top_k": [1, 5, 40, 100000]},
    {"temperature": [0.7], "top_p": [0.0, 0.3, 0.9, 0.999]},
    {"temperature": [1.5], "top_k": [20, 0, 3, 50], "top_p": [0.8, 0.5, 1.0, 0.95], "seed": [1, 2, -3, 2**62]},
])
def test_draws_equal_the_reference(runner, normal, case):
    logits = normal(4, 1000, dtype=torch.bfloat16, scale=2.0)
    out, reference = run(runner, logits, positions=[3, 4, 5, 6], **case)
    assert out == reference


def test_ties_at_the_thresholds_are_kept(runner):
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0, -5.0] * 20])
    drawn = set()
    for position in range(7):
        out, reference = run(runner, logits, temperature=[1.0], top_k=[2], positions=[position])
        assert out == reference
        drawn.add(out[0])
    assert all(token % 6 in (1, 2, 3) for token in drawn) and len(drawn) > 4


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(1, 70), levels=st.integers(1, 6), temperature=st.floats(0.1, 3.0), top_k=st.integers(0, 80),
       top_p=st.sampled_from([0.1, 0.5, 0.77, 1.0]), seed=st.integers(-(2**63), 2**63 - 1))
def test_any_setting_gives_the_reference_token(runner, width, levels, temperature, top_k, top_p, seed):
    steps = torch.randint(levels, (1, width), generator=torch.Generator().manual_seed(width))
    logits = steps.float() * 0.731 - 1.0
    out, reference = run(runner, logits, temperature=[temperature], top_k=[top_k], top_p=[top_p], seed=[seed])
    assert out == reference


def test_a_row_does_not_depend_on_the_batch(runner, normal):
    logits = normal(3, 300, dtype=torch.float32)
    together, _ = run(runner, logits, temperature=[1.0], seed=[5, 6, 7])
    alone = [run(runner, logits[b : b + 1], temperature=[1.0], seed=[5 + b])[0][0] for b in range(3)]
    assert together == alone
