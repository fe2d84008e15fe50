"""Tuned block-sparse attention over plain pages in the PTX emulator against the reference: garbage, selection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmcompile.core.kernel import KernelTemplate
from mmcompile.lower.select import Selector
from mmcompile.targets._tuned import sparse_index_plain, sparse_plain
from tests.kernels.lanes_cases import ARCH, PAGE, SPEC, TARGET, choose, describe, normal, run
from tests.kernels.sparse_cases import make_pages, make_spans

D, SCALE = 128, 128**-0.5
ATTENTION = {"scale": SCALE, "layout": "linear"}
DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}


def make_attention(dtype: torch.dtype, lengths: list[int], new: list[int], kv_heads: int, count: int,
                   ) -> tuple[dict[str, Tensor], Tensor]:
    """Operands whose unused rows and pages are NaN, and the expected rows in fp32."""
    cache, table = make_pages(lengths, (kv_heads, 2 * D), PAGE, dtype, 1)
    operands = {"q": normal(sum(new), 16 * kv_heads, D, seed=4).bfloat16(), "kv_cache": cache,
                "blocks": choose(lengths, new, kv_heads, count), "block_table": table, **make_spans(lengths, new)}
    wide = operands | {"q": operands["q"].float(), "kv_cache": cache.float()}
    return operands, torch.ops.mm.paged_block_sparse_attention(**wide, scale=SCALE)


def check(template: KernelTemplate, lengths: list[int], new: list[int], kv_heads: int, count: int) -> None:
    dtype = DTYPES["fp8" if "fp8" in template.name else "bf16"]
    operands, want = make_attention(dtype, lengths, new, kv_heads, count)
    have = run(template, operands, want.bfloat16(), ATTENTION)
    error = (have.float() - want).norm() / want.norm()
    # parts and results are rounded to bf16, by at most 2^-9 each; so are the weights where the pages are bf16
    assert float(error) < math.sqrt(2 if dtype == torch.float8_e4m3fn else 3) * 2**-9, float(error)
    assert not have[(want == 0).all(-1)].any(), "queries that see nothing give zeros"


@pytest.mark.parametrize("name", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_one_head(name: str):
    template = [t for t in sparse_plain.TEMPLATES if name in t.name][-1]
    check(template, [130, 0, 1], [1, 1, 2], 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("template", sparse_plain.TEMPLATES, ids=lambda t: t.name)
def test_every_configuration(template: KernelTemplate):
    check(template, [300, 0, 2, 2100], [1, 1, 4, 8], 2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
def test_lengths_at_the_borders_of_pages(name: str):
    template = [t for t in sparse_plain.TEMPLATES if name in t.name][-1]
    check(template, [128, 129, 127, 2048, 2049, 256], [4, 1, 1, 1, 2, 8], 1, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
def test_any_order_of_warps_gives_the_same_bits(name: str):
    operands, want = make_attention(DTYPES[name], [300, 700], [1, 2], 1, 6)
    template = [t for t in sparse_plain.TEMPLATES if name in t.name][-1]
    runs = [run(template, operands, want.bfloat16(), ATTENTION, seed=seed) for seed in (1, 2, 3)]
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_a_page_size_and_a_layout_that_do_not_fit_are_refused():
    operands, want = make_attention(torch.bfloat16, [200], [1], 1, 2)
    template, other = sparse_plain.TEMPLATES[-1], sparse_plain.TEMPLATES[0]
    call = describe("paged_block_sparse_attention", operands, want, ATTENTION)
    assert template.refuse(call, SPEC, ARCH) is None
    assert "elements of float8_e4m3fn" in str(other.refuse(call, SPEC, ARCH))
    pages = torch.zeros(2, 1, 128, 260).bfloat16()[..., :256]
    for cache, reason in ((pages[:, :, :64], "not 128 rows of 256"), (pages, "multiples of 16 bytes")):
        changed = describe("paged_block_sparse_attention", operands | {"kv_cache": cache}, want, ATTENTION)
        assert reason in str(template.refuse(changed, SPEC, ARCH))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("portable", [False, True])
def test_selection_takes_tuned_kernels_unless_told_not_to(name: str, portable: bool):
    operands, want = make_attention(DTYPES[name], [200], [1], 1, 2)
    call = describe("paged_block_sparse_attention", operands, want, ATTENTION)
    chosen, reason = Selector(SPEC, TARGET.kernels, portable).select(call, 512)
    assert chosen, reason
    assert all((f"lanes_{name}" in choice.template) is not portable for choice in chosen)


(SCORES,) = sparse_index_plain.TEMPLATES


def make_scores(lengths: list[int], new: list[int], heads: int) -> tuple[dict[str, Tensor], Tensor]:
    """Operands of fp8 index scores whose unused rows and pages are NaN, and the expected scores in fp32."""
    cache, table = make_pages(lengths, (D,), PAGE, torch.float8_e4m3fn, 5)
    operands = {"index_q": normal(sum(new), heads, D, seed=7).bfloat16(), "index_cache": cache, "block_table": table,
                **make_spans(lengths, new)}
    wide = operands | {"index_q": operands["index_q"].float(), "index_cache": cache.float()}
    return operands, torch.ops.mm.paged_index_score(**wide)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "new", "heads"), [
    ([300, 0, 2, 1100], [1, 1, 3, 8], 4), ([257, 130], [9, 2], 1), ([2049, 128], [1, 1], 4),
])
def test_scores_over_fp8(lengths: list[int], new: list[int], heads: int):
    operands, want = make_scores(lengths, new, heads)
    have, finite = run(SCORES, operands, want, {"layout": "linear"}), want.isfinite()
    assert torch.equal(have.isfinite(), finite) and torch.equal(have == -math.inf, want == -math.inf)
    torch.testing.assert_close(have[finite], want[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("portable", [False, True])
def test_selection_of_scores_over_fp8(portable: bool):
    operands, want = make_scores([200], [1], 4)
    call = describe("paged_index_score", operands, want, {"layout": "linear"})
    chosen, reason = Selector(SPEC, TARGET.kernels, portable).select(call, 512)
    assert chosen, reason
    assert all(("lanes_fp8" in choice.template) is not portable for choice in chosen)
    other = describe("paged_index_score", operands | {"index_cache": operands["index_cache"].bfloat16()}, want, {})
    assert "elements of float8_e4m3fn" in str(SCORES.refuse(other, SPEC, ARCH))
