"""Block-sparse attention kernels against the reference: garbage, page borders, groups, selections, query lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcompile.core.kernel import KernelTemplate, OpCall
from mmcompile.targets._kernels import sparse_attention
from tests.kernels.sparse_cases import (
    ARCH,
    SPEC,
    WAVE_ARCH,
    WAVE_SPEC,
    complete,
    list_positions,
    make_pages,
    make_spans,
    symbols_of,
)

NARROW, _, WIDE, TOKEN, TOKENS = sparse_attention.TEMPLATES
BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BOUND = {BF16: 1e-2, F16: 2e-3, F32: 2e-6}


def choose_blocks(positions: list[int], selections: int, count: int, page: int, seed: int) -> Tensor:
    """Selections in random order, -1 anywhere among them: some past blocks, the own one, one of the future."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.full((len(positions), selections, count), -1, dtype=torch.int32)
    for row, position in enumerate(positions):
        if position < 0:
            continue
        own = position // page
        for s in range(selections):
            kept = torch.randperm(own, generator=generator)[: count - 2].tolist() if count > 2 else []
            ids = [*kept, own, own + 1][:count]
            places = torch.randperm(count, generator=generator)[: len(ids)]
            blocks[row, s, places] = torch.tensor(ids, dtype=torch.int32)
    return blocks


def make_case(lengths: list[int], new: list[int], *, heads: int = 4, kv_heads: int = 1, d: int = 32, page: int = 16,
              count: int = 4, selections: int | None = None, dtype=BF16, cache_dtype=BF16, unowned: int = 0,
              ) -> dict[str, Any]:
    cache, table = make_pages(lengths, (kv_heads, 2 * d), page, cache_dtype, sum(lengths) + heads)
    table = torch.cat([table, table[:, -1:]], 1)
    generator = torch.Generator().manual_seed(heads)
    tokens = sum(new) + unowned
    q = torch.randn((tokens, heads + 1, d), generator=generator).to(dtype)[:, :heads]
    positions = list_positions(lengths, new) + [-1] * unowned
    blocks = choose_blocks(positions, selections or kv_heads, count, page, tokens)
    if unowned:
        blocks[-unowned:] = 0
    return {"q": q, "kv_cache": cache, "blocks": blocks, "block_table": table, **make_spans(lengths, new)}


def run(runner: Any, template: KernelTemplate, tensors: dict[str, Any], place: Any = (SPEC, ARCH)) -> Any:
    phase = "prefill" if template is TOKENS else "decode"
    rows = dict.fromkeys(("q", "blocks", "result"), "tokens")
    return runner.run_op(complete(template, phase), tensors, {"scale": tensors["q"].shape[2] ** -0.5}, *place,
                         rows=rows, symbols=symbols_of(tensors, tensors["q"].shape[0]))


def check(outcome: Any) -> None:
    (result,), (reference,) = outcome.results, outcome.references
    assert outcome.errors[0] < BOUND[result.dtype], outcome.errors
    empty = (reference == 0).all(-1)
    assert bool((result[empty] == 0).all())


CASES = [
    # heads, kv_heads, head_dim, page size, blocks, selections, dtype, cache dtype
    (32, 2, 128, 128, 4, 2, BF16, BF16),
    (16, 1, 64, 128, 3, 1, BF16, F8),
    (6, 2, 80, 24, 4, 1, F32, F32),
    (8, 1, 64, 16, 16, 1, F16, F8),
    (4, 4, 32, 8, 5, 2, BF16, BF16),
    (20, 1, 48, 64, 2, 1, F16, F16),
]


@pytest.mark.parametrize(("heads", "kv_heads", "d", "page", "count", "selections", "dtype", "cache_dtype"), CASES)
def test_tokens_match_reference(runner, heads, kv_heads, d, page, count, selections, dtype, cache_dtype):
    tensors = make_case([1, 0, 2 * page, 3 * page + 1], [1, 0, 1, 1], heads=heads, kv_heads=kv_heads, d=d, page=page,
                        count=count, selections=selections, dtype=dtype, cache_dtype=cache_dtype)
    for template in (NARROW, WIDE, TOKEN):
        check(run(runner, template, tensors))


@pytest.mark.parametrize(("heads", "kv_heads", "d", "page", "count", "selections", "dtype", "cache_dtype"), CASES)
def test_tiles_match_reference(runner, heads, kv_heads, d, page, count, selections, dtype, cache_dtype):
    tensors = make_case([2 * page + 5, 3, 0, page + 1], [7, 1, 2, 2], heads=heads, kv_heads=kv_heads, d=d, page=page,
                        count=count, selections=selections, dtype=dtype, cache_dtype=cache_dtype)
    check(run(runner, TOKENS, tensors))


@pytest.mark.parametrize("template", [NARROW, TOKENS], ids=lambda t: t.name)
@pytest.mark.parametrize("new", [3, 8])
@pytest.mark.slow
def test_several_new_tokens_a_sequence(runner, template, new):
    check(run(runner, template, make_case([new, 16 + new, 40, 17], [new] * 4)))


def test_seventeen_sequences(runner):
    lengths = [(b * 37) % 60 for b in range(17)]
    check(run(runner, NARROW, make_case(lengths, [min(1, n) for n in lengths], page=16, count=3)))


@pytest.mark.parametrize("template", [NARROW, TOKEN, TOKENS], ids=lambda t: t.name)
def test_padding_gives_zeros(runner, template):
    """Sequences of length 0, rows that nobody owns, and queries that chose nothing."""
    tensors = make_case([20, 0, 9], [2, 1, 1], unowned=3)
    tensors["blocks"][1] = -1
    outcome = run(runner, template, tensors)
    check(outcome)
    assert not outcome.results[0][[1, 2, 4, 5, 6]].any()
    assert bool(outcome.results[0][[0, 3]].any())


@pytest.mark.parametrize("template", [NARROW, TOKENS], ids=lambda t: t.name)
def test_pages_that_nobody_chose_are_not_read(runner, template):
    tensors = make_case([60], [3], count=2)
    tensors["blocks"][:] = torch.tensor([3, 1], dtype=torch.int32)
    tensors["kv_cache"][tensors["block_table"][0, [0, 2]].long()] = torch.nan
    check(run(runner, template, tensors))


@pytest.mark.parametrize("template", [NARROW, TOKENS], ids=lambda t: t.name)
@pytest.mark.slow
def test_all_blocks_give_dense_attention(runner, template):
    tensors = make_case([61, 30], [2, 1], heads=4, kv_heads=2, dtype=F32, cache_dtype=F32)
    tensors["blocks"] = torch.tensor([3, 0, 2, 1], dtype=torch.int32).expand(3, 2, 4).contiguous()
    (result,) = run(runner, template, tensors).results
    names = ("q", "kv_cache", "block_table", "seq_lens", "query_start")
    dense = torch.ops.mm.paged_attention(*(tensors[name] for name in names), 32**-0.5)
    torch.testing.assert_close(result, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("template", [NARROW, TOKENS], ids=lambda t: t.name)
def test_two_runs_give_the_same_bits(runner, template):
    tensors = make_case([60, 33], [1, 2])
    first, second = (run(runner, template, tensors).results[0] for _ in range(2))
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


@pytest.mark.slow
def test_waves_of_sixty_four(runner):
    tensors = make_case([33, 0, 16], [1, 0, 1], heads=8, kv_heads=2)
    for template in (NARROW, TOKENS):
        check(run(runner, template, tensors, (WAVE_SPEC, WAVE_ARCH)))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_any_batch(runner, data):
    batch = data.draw(st.integers(1, 4), "batch")
    new = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch), "new")
    new[-1] += not any(new)
    past = data.draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch), "past")
    lengths = [n + m for n, m in zip(new, past, strict=True)]
    template = data.draw(st.sampled_from([TOKEN, TOKENS]), "template")
    check(run(runner, template, make_case(lengths, new, heads=2, d=16, page=8, count=5, dtype=F32, cache_dtype=F32)))


def make_call(call_of: Any, phase: str, **changes: Any) -> OpCall:
    tensors = make_case([40], [1], **{k: v for k, v in changes.items() if not isinstance(v, Tensor)})
    tensors |= {k: v for k, v in changes.items() if isinstance(v, Tensor)}
    return call_of("paged_block_sparse_attention", tensors, {"phase": phase, "scale": 1.0}, {}, [tensors["q"]])


@pytest.mark.parametrize(("template", "phase", "changes", "reason"), [
    (TOKEN, "prefill", {}, "for the decode phase"),
    (TOKENS, "decode", {}, "for the prefill phase"),
    (NARROW, "decode", {"page": 4}, "page_size is 4"),
    (NARROW, "decode", {"d": 512}, "head_dim is 512"),
    (NARROW, "decode", {"count": 65}, "65 blocks a selection"),
    (NARROW, "decode", {"blocks": torch.zeros((1, 1, 4), dtype=torch.int64)}, "blocks is int64"),
    (NARROW, "decode", {"kv_cache": torch.zeros((2, 2, 16, 36), dtype=torch.uint8)}, "layout 'linear'"),
])
def test_refusals_name_the_reason(call_of, template, phase, changes, reason):
    assert reason in template.refuse(make_call(call_of, phase, **changes), SPEC, ARCH)


def test_few_tokens_are_split_in_prefill_too(call_of):
    assert NARROW.refuse(make_call(call_of, "prefill"), SPEC, ARCH) is None


def test_splits_depend_on_units_tokens_and_blocks(call_of):
    call = make_call(call_of, "decode", kv_heads=4, count=16)
    spec = dataclasses.replace(SPEC, units=132)
    assert [sparse_attention.count_splits(call, spec, n) for n in sparse_attention.SPLIT_TOKENS] == [16, 8, 2]
    assert sparse_attention.count_splits(make_call(call_of, "decode", count=3), spec, 4) == 4
