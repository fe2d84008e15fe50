"""Index cache and block scores against the references: page borders, garbage, NaN, spans, page sizes, cache dtypes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmcompile.core.kernel import KernelTemplate, OpCall
from mmcompile.targets._kernels import sparse_index
from tests.kernels.sparse_cases import ARCH, SPEC, WAVE_ARCH, WAVE_SPEC, complete, make_pages, make_spans, symbols_of

INSERT, NARROW, _, WIDE, PREFILL = sparse_index.TEMPLATES
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BOUND = 3e-6  # products of two 16-bit numbers are exact in fp32; d of them are added in another order


def run(runner: Any, template: KernelTemplate, tensors: dict[str, Any], place: Any = (SPEC, ARCH)) -> Any:
    phase = "prefill" if template is PREFILL else "decode"
    symbols = symbols_of(tensors, tensors["index_q"].shape[0])
    return runner.run_op(complete(template, phase), tensors, {}, *place, rows={"index_q": "tokens", "result": "tokens"},
                         symbols=symbols)


def make_case(lengths: list[int], new: list[int], *, heads: int = 4, d: int = 32, page: int = 16, dtype=BF16,
              cache_dtype=BF16, unowned: int = 0) -> dict[str, Any]:
    """``unowned``: rows behind those of every sequence."""
    cache, table = make_pages(lengths, (d,), page, cache_dtype, sum(lengths) + d)
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn((sum(new) + unowned, heads + 1, d), generator=generator).to(dtype)[:, :heads]
    return {"index_q": q, "index_cache": cache, "block_table": table, **make_spans(lengths, new)}


def check(outcome: Any) -> None:
    """Infinities in the same places, all else equal but for the order of additions."""
    (result,), (reference,) = outcome.results, outcome.references
    finite = reference.isfinite()
    assert torch.equal(result.isfinite(), finite)
    assert torch.equal(result[~finite], reference[~finite])
    largest = reference[finite].abs().max() if bool(finite.any()) else torch.tensor(1.0)
    assert bool(((result - reference)[finite].abs() <= BOUND * largest).all())


CASES = [
    # heads, d, page size, dtype, cache dtype
    (4, 128, 128, BF16, BF16),
    (4, 128, 128, BF16, F8),
    (1, 64, 16, F16, F16),
    (3, 80, 24, F32, F32),
    (8, 32, 64, BF16, F8),
]


@pytest.mark.parametrize(("heads", "d", "page", "dtype", "cache_dtype"), CASES)
def test_decode_matches_reference(runner, heads, d, page, dtype, cache_dtype):
    tensors = make_case([1, 0, page, page + 1, 3 * page - 1], [1] * 5, heads=heads, d=d, page=page, dtype=dtype,
                        cache_dtype=cache_dtype)
    tensors["query_start"] = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    for template in (NARROW, WIDE):
        check(run(runner, template, tensors))


@pytest.mark.parametrize(("heads", "d", "page", "dtype", "cache_dtype"), CASES)
def test_prefill_matches_reference(runner, heads, d, page, dtype, cache_dtype):
    tensors = make_case([2 * page + 3, 5, 0, page + 9], [min(2 * page + 3, 40), 1, 2, 9], heads=heads, d=d, page=page,
                        dtype=dtype, cache_dtype=cache_dtype)
    check(run(runner, PREFILL, tensors))


@pytest.mark.parametrize("new", [1, 4, 5, 8])
def test_verification_of_several_new_tokens(runner, new):
    tensors = make_case([new, 16 + new, 40], [new] * 3)
    check(run(runner, NARROW, tensors))


def test_seventeen_sequences(runner):
    lengths = [(b * 37) % 60 for b in range(17)]
    check(run(runner, WIDE, make_case(lengths, [1] * 17)))


def test_rows_that_nobody_owns_score_nothing(runner):
    for template in (NARROW, PREFILL):
        outcome = run(runner, template, make_case([20, 3], [2, 1], unowned=9))
        check(outcome)
        assert bool((outcome.results[0][3:] == -math.inf).all())


def test_waves_of_sixty_four(runner):
    check(run(runner, NARROW, make_case([33, 0, 16], [1, 0, 1]), (WAVE_SPEC, WAVE_ARCH)))


def test_a_nan_product_gives_nan(runner):
    tensors = make_case([40], [1])
    page = int(tensors["block_table"][0, 1])
    tensors["index_cache"][page, 3] = math.nan
    for template in (NARROW, PREFILL):
        (result,) = run(runner, template, tensors).results
        assert bool(result[0, :, 1].isnan().all())
        assert bool(result[0, :, [0, 2]].isfinite().all())


def test_two_runs_give_the_same_bits(runner):
    tensors = make_case([40, 17], [1, 1])
    first, second = (run(runner, NARROW, tensors).results[0] for _ in range(2))
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prefill_of_any_batch(runner, data):
    batch = data.draw(st.integers(1, 5), "batch")
    new = data.draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch), "new")
    new[-1] += not any(new)
    past = data.draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch), "past")
    lengths = [n + m for n, m in zip(new, past, strict=True)]
    check(run(runner, PREFILL, make_case(lengths, new, heads=2, d=16, page=8, dtype=F32, cache_dtype=F32)))


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, BF16), (BF16, F8), (F32, F32)])
def test_insertion_matches_reference(runner, normal, dtype, cache_dtype):
    keys = normal(19, 2, 48, dtype=dtype, scale=300.0)[:, 1]
    cache = torch.zeros((5, 16, 48)).to(cache_dtype)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(1))[:19]
    slots[[2, 18]] = -1
    tensors = {"index_k": keys, "index_cache": cache, "slot_mapping": slots}
    outcome = runner.run_op(INSERT, tensors, {}, SPEC, ARCH, rows={"index_k": "tokens", "slot_mapping": "tokens"},
                            symbols={"tokens": 19})
    have, want = outcome.tensors["index_cache"], outcome.reference_tensors["index_cache"]
    assert torch.equal(have.view(torch.uint8), want.view(torch.uint8))
    assert bool((want.float() != 0).any())


def make_call(call_of: Any, phase: str, **changes: Any) -> OpCall:
    tensors = make_case([40], [1], **{k: v for k, v in changes.items() if not isinstance(v, torch.Tensor)})
    tensors |= {k: v for k, v in changes.items() if isinstance(v, torch.Tensor)}
    result = torch.empty((1, tensors["index_q"].shape[1], 3))
    return call_of("paged_index_score", tensors, {"phase": phase}, {}, [result])


@pytest.mark.parametrize(("template", "phase", "changes", "reason"), [
    (NARROW, "prefill", {}, "for the decode phase"),
    (PREFILL, "decode", {}, "for the prefill phase"),
    (NARROW, "decode", {"page": 4}, "page_size is 4"),
    (NARROW, "decode", {"page": 512}, "page_size is 512"),
    (NARROW, "decode", {"heads": 17}, "17 index heads"),
    (NARROW, "decode", {"d": 512}, "head_dim is 512"),
    (NARROW, "decode", {"page": 256, "d": 256}, "three pages of 131072 bytes"),
    (NARROW, "decode", {"seq_lens": torch.zeros(1, dtype=torch.int64)}, "seq_lens must be int32"),
    (NARROW, "decode", {"index_cache": torch.zeros((2, 16, 36), dtype=torch.uint8)}, "layout 'linear'"),
])
def test_refusals_name_the_reason(call_of, template, phase, changes, reason):
    assert reason in template.refuse(make_call(call_of, phase, **changes), SPEC, ARCH)
