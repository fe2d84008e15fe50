"""Kernels that read NVFP4 pages, against the references: every layout, NaN in all that no sequence owns, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.formats import cache_pages, nvfp4_cache
from mmcompile.core.kernel import KernelTemplate
from mmcompile.targets import gfx950, sm90, sm100
from mmcompile.targets._kernels import attention, sparse_attention, sparse_index
from tests.kernels.sparse_cases import ARCH, GARBAGE_PAGES, SPEC, complete, make_spans, symbols_of

_, SCORE, _, _, SCORE_PREFILL = sparse_index.TEMPLATES
SPARSE, _, _, _, SPARSE_PREFILL = sparse_attention.TEMPLATES
DENSE, _, _, DENSE_SINGLE, DENSE_PREFILL = attention.TEMPLATES
PREFILLS = (SCORE_PREFILL, SPARSE_PREFILL, DENSE_PREFILL)
# Bytes of rows that nobody wrote: as scales they are NaN.
GARBAGE = 0x7F
KV = [nvfp4_cache.LINEAR, nvfp4_cache.TOKEN_QUAD, nvfp4_cache.SM90]
INDEX = [nvfp4_cache.INDEX, nvfp4_cache.SM90_INDEX]
PLACES = [pytest.param((target.TARGET.spec, target.TARGET.spec.architectures[0]), id=target.TARGET.spec.name)
          for target in (sm90, sm100, gfx950)]


def sizes_of(tag: str) -> tuple[int, int]:
    """(page size, head_dim) to test a layout with."""
    return (128, 128) if tag in (nvfp4_cache.SM90, nvfp4_cache.SM90_INDEX) else (16, 64)


def make_pages(tag: str, lengths: list[int], kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A cache with random rows of every sequence and garbage everywhere else, and its block table."""
    page, d = sizes_of(tag)
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 1, generator=generator)
    table = torch.tensor(GARBAGE_PAGES, dtype=torch.int32).repeat(len(lengths), max(counts))[:, : max(counts) + 1]
    shape = (len(order), *((2 * kv_heads,) if tag in KV else ()), page, d // 2 + d // 16)
    cache = torch.full(shape, GARBAGE, dtype=torch.uint8)
    for b, length in enumerate(lengths):
        table[b, : counts[b]] = order[sum(counts[:b]) : sum(counts[: b + 1])].int()
        place = torch.arange(length)
        slots = table[b].long()[place // page] * page + place % page
        rows = torch.randn((2, length, kv_heads, d), generator=generator) * 3
        if tag in KV:
            cache_pages.insert_kv(cache, tag, rows[0], rows[1], slots)
        else:
            cache_pages.insert_index(cache, tag, rows[0, :, 0], slots)
    return cache, table.contiguous()


def run(runner: Any, template: KernelTemplate, tensors: dict[str, Any], attributes: dict[str, Any],
        place: Any = (SPEC, ARCH)) -> Any:
    phase = "prefill" if template in PREFILLS else "decode"
    tokens = next(tensors[name] for name in ("q", "index_q") if name in tensors).shape[0]
    rows = {name: "tokens" for name in ("q", "index_q", "blocks", "result")}
    return runner.run_op(complete(template, phase), tensors, attributes, *place, rows=rows,
                         symbols=symbols_of(tensors, tokens))


def make_query(tokens: int, heads: int, d: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn((tokens, heads, d), generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("place", [PLACES[0], *(pytest.param(*p.values, id=p.id, marks=pytest.mark.slow)
                                               for p in PLACES[1:])])
@pytest.mark.parametrize("template", [SCORE, SCORE_PREFILL], ids=lambda t: t.name)
def test_scores_are_of_the_exact_keys(runner, template, place):
    check_scores(runner, template, nvfp4_cache.INDEX, [33, 0, 16, 5], [2, 1, 1, 1], place)


@pytest.mark.slow
@pytest.mark.parametrize("template", [SCORE, SCORE_PREFILL], ids=lambda t: t.name)
def test_scores_of_keys_arranged_for_lanes(runner, template):
    check_scores(runner, template, nvfp4_cache.SM90_INDEX, [133, 0, 128, 5], [2, 1, 1, 1], (SPEC, ARCH))


def check_scores(runner, template, tag, lengths, new, place):
    cache, table = make_pages(tag, lengths, 1)
    q = make_query(sum(new), 4, sizes_of(tag)[1])
    tensors = {"index_q": q, "index_cache": cache, "block_table": table, **make_spans(lengths, new)}
    outcome = run(runner, template, tensors, {"layout": tag}, place)
    (have,), (want,) = outcome.results, outcome.references
    finite = want.isfinite()
    assert finite.any() and torch.equal(have.isfinite(), finite)
    torch.testing.assert_close(have[finite], want[finite], rtol=1e-2, atol=1e-1)
    exact = torch.ops.mm.paged_index_score(**tensors | {"index_q": q.float()}, layout=tag)
    torch.testing.assert_close(have[finite], exact[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tag", [nvfp4_cache.TOKEN_QUAD,
                                 *(pytest.param(t, marks=pytest.mark.slow) for t in (KV[0], KV[2]))])
@pytest.mark.parametrize("template", [pytest.param(SPARSE, marks=pytest.mark.slow), SPARSE_PREFILL],
                         ids=lambda t: t.name)
def test_block_sparse_attention_reads_the_layout(runner, template, tag):
    page, d = sizes_of(tag)
    lengths, new = [2 * page + 1, 0, page, 5], [2, 1, 1, 1]
    cache, table = make_pages(tag, lengths, 2, 3)
    blocks = torch.tensor([[2, -1, 0], [1, 2, -1], [0, -1, -1], [0, -1, -1], [-1, 0, 1]], dtype=torch.int32)
    blocks = blocks[:, None].expand(-1, 2, -1).contiguous()
    tensors = {"q": make_query(5, 8, d), "kv_cache": cache, "blocks": blocks, "block_table": table,
               **make_spans(lengths, new)}
    outcome = run(runner, template, tensors, {"layout": tag, "scale": d**-0.5})
    assert outcome.errors[0] < 1e-2
    assert not outcome.results[0][2].any(), "a sequence of length 0 gives zeros"


@pytest.mark.parametrize("tag", [nvfp4_cache.TOKEN_QUAD,
                                 *(pytest.param(t, marks=pytest.mark.slow) for t in (KV[0], KV[2]))])
@pytest.mark.parametrize("template", [pytest.param(DENSE, marks=pytest.mark.slow), DENSE_SINGLE, DENSE_PREFILL],
                         ids=lambda t: t.name)
def test_dense_attention_reads_the_layout(runner, template, tag):
    page, d = sizes_of(tag)
    prefill = template is DENSE_PREFILL
    lengths, new = [2 * page + 1, 0, page, 5], [20, 0, 1, 3] if prefill else [1, 1, 1, 1]
    cache, table = make_pages(tag, lengths, 2, 4)
    tensors = {"q": make_query(sum(new), 4, d), "kv_cache": cache, "block_table": table, **make_spans(lengths, new)}
    for window in (0, page + 3) if prefill else (0,):
        outcome = run(runner, template, tensors, {"layout": tag, "scale": d**-0.5, "window": window})
        assert outcome.errors[0] < 1e-2


@pytest.mark.parametrize(("d", "dtype"), [(16, torch.float32), (32, torch.float16), (256, torch.bfloat16)])
@pytest.mark.slow
def test_dense_attention_of_other_heads(runner, d, dtype):
    cache = torch.full((3, 2, 8, d // 2 + d // 16), GARBAGE, dtype=torch.uint8)
    rows = torch.randn((2, 11, 1, d), generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[2, 0, -1]], dtype=torch.int32)
    slots = torch.cat([torch.arange(16, 24), torch.arange(3)])
    cache_pages.insert_kv(cache, nvfp4_cache.LINEAR, rows[0], rows[1], slots)
    tensors = {"q": make_query(1, 3, d, dtype), "kv_cache": cache, "block_table": table, **make_spans([11], [1])}
    outcome = run(runner, DENSE_SINGLE, tensors, {"layout": nvfp4_cache.LINEAR, "scale": d**-0.5})
    assert outcome.errors[0] < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("tag", "changes", "reason"), [
    ("linear", {}, "none of its NVFP4 layouts"),
    (nvfp4_cache.LINEAR, {}, "none of its NVFP4 layouts"),
    (nvfp4_cache.INDEX, {"index_cache": torch.zeros((2, 16, 40), dtype=torch.uint8)}, "the 36 bytes"),
    (nvfp4_cache.INDEX, {"index_cache": torch.zeros((2, 18, 36), dtype=torch.uint8)}, "no pages of 18 tokens"),
    (nvfp4_cache.INDEX, {"index_q": torch.zeros((5, 4, 48), dtype=torch.bfloat16)}, "head_dim is 48"),
    (nvfp4_cache.SM90_INDEX, {}, "no pages of 16 tokens of heads of 64"),
])
def test_refusals_name_the_reason(call_of, tag, changes, reason):
    lengths = [33, 5]
    cache, table = make_pages(nvfp4_cache.INDEX, lengths, 1)
    operands = {"index_q": make_query(5, 4, 64), "index_cache": cache, "block_table": table,
                **make_spans(lengths, [4, 1])} | changes
    call = call_of(SCORE.op, operands, {"layout": tag, "phase": "decode"}, {}, [torch.empty(5, 4, 4)])
    assert reason in SCORE.refuse(call, SPEC, ARCH)


def test_dense_attention_refuses_another_layout(call_of):
    cache, table = make_pages(nvfp4_cache.LINEAR, [20], 2)
    operands = {"q": make_query(1, 4, 64), "kv_cache": cache, "block_table": table, **make_spans([20], [1])}
    call = call_of("paged_attention", operands, {"layout": nvfp4_cache.INDEX, "phase": "decode", "scale": 1.0}, {},
                   [operands["q"]])
    assert "none of its NVFP4 layouts" in DENSE.refuse(call, SPEC, ARCH)
    plain = dataclasses.replace(call, attributes={"phase": "decode", "scale": 1.0})
    assert "in the layout 'linear'" in DENSE.refuse(plain, SPEC, ARCH)
