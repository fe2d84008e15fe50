"""Fused QKV kernels against their references: head sizes, partial rotary, norms, cache dtypes, empty slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.discover import load_module
from mmcompile.core.formats import mxfp8
from mmcompile.core.ops.linear import nvfp4_quantize
from mmcompile.targets._kernels import two_step
from mmcompile.targets._kernels.qkv import TEMPLATES

DENSE, WIDE_DENSE, NVFP4, WIDE_NVFP4, MXFP8, WIDE_MXFP8 = TEMPLATES
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# The sums run in another order, so a value may land on the other side of a rounding border (in float8: a large step).
BOUNDS = {BF16: 2e-3, F16: 3e-4, F32: 2e-6, F8: 4e-3}
ROWS = {name: "tokens" for name in ("x", "delta", "positions", "slot_mapping", "result")}
SPEC = load_module("targets", "sm90").TARGET.spec
ARCH = SPEC.architectures[0]
PAGES, PAGE_SIZE, MAX_POSITIONS = 5, 8, 50

CASES = [
    # heads, kv heads, head_dim, rotary, k, bias, q norm, k norm, dtype, cache dtype, position dtype
    (3, 1, 64, 64, 96, False, False, False, BF16, BF16, torch.int32),
    (2, 2, 64, 32, 64, True, True, True, BF16, F8, torch.int64),
    (4, 2, 20, 12, 112, True, True, False, F16, F16, torch.int32),
    (2, 1, 96, 96, 64, False, False, True, F32, F32, torch.int32),
    (2, 1, 16, 16, 64, False, True, True, F32, F8, torch.int32),
]


def make_tensors(case, tokens, *, packed=False, seed=0):
    heads, kv_heads, d, rotary, k, bias, q_norm, k_norm, dtype, cache_dtype, position_dtype = case
    g = torch.Generator().manual_seed(seed)
    rows = (heads + 2 * kv_heads) * d
    weight = torch.randn(rows, k, generator=g) * k**-0.5
    names = ("packed", "scale", "global_scale")
    angle = torch.rand(MAX_POSITIONS, rotary // 2, generator=g) * 6.28
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=g)[:tokens]
    slots[tokens // 2 : tokens // 2 + tokens // 3] = -1
    optional = {
        "bias": torch.randn(rows, generator=g).to(dtype) if bias else None,
        "q_weight": torch.randn(d, generator=g).to(dtype) if q_norm else None,
        "k_weight": torch.randn(d, generator=g).to(dtype) if k_norm else None,
    }
    return {
        "x": torch.randn(tokens, k, generator=g).to(dtype),
        **(dict(zip(names, nvfp4_quantize(weight), strict=True)) if packed else {"weight": weight.to(dtype)}),
        **optional,
        "positions": torch.randint(0, MAX_POSITIONS, (tokens,), generator=g).to(position_dtype),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1).to(dtype),
        "kv_cache": torch.randn(PAGES, kv_heads, PAGE_SIZE, 2 * d, generator=g).to(cache_dtype),
        "slot_mapping": slots,
    }


def make_attributes(case, **more):
    return {"num_heads": case[0], "num_kv_heads": case[1], "head_dim": case[2], "eps": 1e-5, **more}


def check(outcome, dtype, before):
    """q within its bound; in the cache the written slots within theirs, all others untouched bit for bit."""
    assert max(outcome.errors) <= BOUNDS[dtype]
    cache, expected = outcome.tensors["kv_cache"], outcome.reference_tensors["kv_cache"]
    slots = outcome.tensors["slot_mapping"]
    written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    written = written.reshape(PAGES, PAGE_SIZE)
    rows, expected_rows = (c.float().transpose(1, 2)[written] for c in (cache, expected))
    error = (rows - expected_rows).norm() / expected_rows.norm().clamp_min(1e-30)
    assert float(error) <= max(BOUNDS[dtype], BOUNDS[F8] if cache.dtype == F8 else 0.0)
    kept = cache.view(torch.uint8).transpose(1, 2)[~written]
    assert torch.equal(kept, before.view(torch.uint8).transpose(1, 2)[~written])


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_dense_matches_reference(runner, case, tokens):
    tensors = make_tensors(case, tokens)
    for outcome in runner.run_everywhere(DENSE, tensors, make_attributes(case), rows=ROWS, symbols={"tokens": tokens}):
        check(outcome, case[8], tensors["kv_cache"])


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3]], ids=lambda c: "-".join(map(str, c)))
def test_nvfp4_matches_reference(runner, case):
    tensors = make_tensors(case, 16, packed=True)
    for outcome in runner.run_everywhere(NVFP4, tensors, make_attributes(case), rows=ROWS, symbols={"tokens": 16}):
        check(outcome, case[8], tensors["kv_cache"])


def with_mxfp8(tensors):
    """The same operands with the weight in MXFP8."""
    tensors = dict(tensors)
    return tensors | dict(zip(("values", "scale"), mxfp8.encode(tensors.pop("weight").float()), strict=True))


@pytest.mark.parametrize(("template", "tokens", "case"), [
    (MXFP8, 5, CASES[1]), (MXFP8, 5, CASES[3]), (WIDE_MXFP8, 21, CASES[1]),
])
def test_mxfp8_matches_reference(runner, template, tokens, case):
    tensors = with_mxfp8(make_tensors(case, tokens))
    symbols = {"tokens": tokens}
    for outcome in runner.run_everywhere(template, tensors, make_attributes(case), rows=ROWS, symbols=symbols):
        check(outcome, case[8], tensors["kv_cache"])


@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=lambda c: "-".join(map(str, c)))
def test_delta_is_added_before_the_norms(runner, case):
    tensors = make_tensors(case, 5)
    without = runner.run_op(DENSE, tensors, make_attributes(case), SPEC, ARCH, rows=ROWS, symbols={"tokens": 5})
    wide = torch.randn(5, tensors["weight"].shape[0] + 8, generator=torch.Generator().manual_seed(8)).to(case[8])
    tensors["delta"] = wide[:, 8:]
    outcome = runner.run_op(DENSE, tensors, make_attributes(case), SPEC, ARCH, rows=ROWS, symbols={"tokens": 5})
    check(outcome, case[8], tensors["kv_cache"])
    assert not torch.equal(outcome.results[0], without.results[0])


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("packed", [False, True])
def test_takes_32_tokens(runner, case, packed):
    template = WIDE_NVFP4 if packed else WIDE_DENSE
    tensors = make_tensors(case, 29, packed=packed)
    for outcome in runner.run_everywhere(template, tensors, make_attributes(case), rows=ROWS, symbols={"tokens": 29}):
        check(outcome, case[8], tensors["kv_cache"])


@pytest.mark.parametrize("tokens", [3, 20, 40])
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=lambda c: "-".join(map(str, c)))
def test_two_steps_match_reference(runner, call_of, case, tokens):
    (template,) = (
        t for t in (*two_step.NARROW, *two_step.TEMPLATES)
        if t.op == "qkv_norm_rope_insert_nvfp4" and t.max_tokens == {3: 16, 20: 32, 40: None}[tokens]
    )  # fmt: skip
    tensors = make_tensors(case, tokens, packed=True)
    result = torch.empty(tokens, case[0], case[2], dtype=case[8])
    call = call_of(template.op, tensors, make_attributes(case), ROWS, [result])
    if case is CASES[0] and tokens <= 32:
        assert template.refuse(call, SPEC, ARCH) == "one launch is faster"
        return
    assert template.refuse(call, SPEC, ARCH) is None
    outcome = runner.run_op(template, tensors, make_attributes(case), SPEC, ARCH, rows=ROWS, symbols={"tokens": tokens})
    check(outcome, case[8], tensors["kv_cache"])


@pytest.mark.parametrize("early", [True, False])
def test_gemma_norms(runner, early):
    tensors = make_tensors(CASES[1], 5)
    attributes = make_attributes(CASES[1], weight_offset=1.0, round_before_scale=early)
    outcome = runner.run_op(DENSE, tensors, attributes, SPEC, ARCH, rows=ROWS, symbols={"tokens": 5})
    check(outcome, BF16, tensors["kv_cache"])


def test_float8_cache_saturates(runner):
    tensors = make_tensors(CASES[4], 4)
    tensors["k_weight"] = tensors["k_weight"] * 1000
    outcome = runner.run_op(DENSE, tensors, make_attributes(CASES[4]), SPEC, ARCH, rows=ROWS, symbols={"tokens": 4})
    check(outcome, F32, tensors["kv_cache"])
    assert outcome.tensors["kv_cache"].float().abs().max() == 448


def test_fp32_table_and_strided_rows(runner):
    tensors = make_tensors(CASES[0], 6)
    wide = torch.randn(6, 256, generator=torch.Generator().manual_seed(3)).to(BF16)
    tensors |= {"x": wide[:, 32:128], "cos_sin": tensors["cos_sin"].float()}
    outcome = runner.run_op(DENSE, tensors, make_attributes(CASES[0]), SPEC, ARCH, rows=ROWS, symbols={"tokens": 6})
    check(outcome, BF16, tensors["kv_cache"])


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_heads(runner, data):
    heads, d = data.draw(st.integers(1, 4)), 2 * data.draw(st.integers(1, 40))
    rotary = 2 * data.draw(st.integers(1, d // 2))
    flags = [data.draw(st.booleans()) for _ in range(3)]
    kv_heads, k = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 90))
    case = (heads, kv_heads, d, rotary, k, *flags, F32, F32, torch.int32)
    tokens = data.draw(st.integers(1, 16))
    tensors = make_tensors(case, tokens, seed=data.draw(st.integers(0, 99)))
    outcome = runner.run_op(DENSE, tensors, make_attributes(case), SPEC, ARCH, rows=ROWS, symbols={"tokens": tokens})
    check(outcome, F32, tensors["kv_cache"])


@pytest.mark.parametrize(("change", "attributes", "words"), [
    ({"cos_sin": torch.zeros(9, 130)}, {}, "rotary width 130"),
    ({}, {"head_dim": 63}, "head_dim 63 is odd"),
    ({"kv_cache": torch.zeros(2, 1, 8, 128, dtype=torch.int32)}, {}, "kv_cache is int32"),
    ({"kv_cache": torch.zeros(2, 1, 128, 8).transpose(2, 3)}, {}, "static page layout"),
    ({"q_weight": torch.zeros(64, dtype=torch.int32)}, {}, "q_weight must be contiguous floats"),
    ({"weight": torch.zeros(320, 96, dtype=BF16)}, {}, "weight is bfloat16 and x float32"),
    ({"slot_mapping": torch.zeros(8, dtype=torch.int64)[::2]}, {}, "must be contiguous"),
])
def test_refusals_say_why(call_of, change, attributes, words):
    tensors = make_tensors((3, 1, 64, 64, 96, False, True, True, F32, F32, torch.int32), 4) | change
    call = call_of(DENSE.op, tensors, make_attributes(CASES[0]) | attributes, ROWS, [torch.zeros(4, 3, 64)])
    assert words in DENSE.refuse(call, SPEC, ARCH)


def test_a_tile_that_would_spill_is_refused(call_of):
    tensors = make_tensors(CASES[3], 29)
    call = call_of(DENSE.op, tensors, make_attributes(CASES[3]), ROWS, [torch.zeros(29, 2, 96)])
    assert WIDE_DENSE.refuse(call, SPEC, ARCH) == "32 tokens by 128 columns do not fit the registers"
    assert DENSE.refuse(call, SPEC, ARCH) is None
