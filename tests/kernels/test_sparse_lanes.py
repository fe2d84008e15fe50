"""Tuned block-sparse kernels in the PTX emulator against the references: garbage, empty sequences, refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.formats import nvfp4_cache, nvfp4_cache_sm90
from mmcompile.core.kernel import KernelTemplate, Operand
from mmcompile.targets._tuned import sparse_attention, sparse_index
from tests.kernels.lanes_cases import ARCH, PAGE, SPEC, choose, describe, lay_out, normal, run
from tests.kernels.sparse_cases import make_spans

(SCORES,) = sparse_index.TEMPLATES
D, SCALE, NAN_BYTE = 128, 128**-0.5, 0x7F


def make_attention(lengths: list[int], new: list[int], kv_heads: int, count: int, size: float = 1.0,
                   larger: float = 1.0) -> tuple[dict[str, Tensor], Tensor]:
    """Operands with an NVFP4 cache of values of a size, whose unused rows are NaN scales, and the expected rows.

    Queries are ``larger`` by that factor and keys smaller.
    """
    table, slots, pages = lay_out(lengths, seed=1)
    k, v = (normal(len(slots), kv_heads, D, seed=s) for s in (2, 3))
    cache = torch.full((pages, 2 * kv_heads, PAGE, 72), NAN_BYTE, dtype=torch.uint8)
    nvfp4_cache_sm90.insert_kv(cache, k / larger, size * v, slots)
    sides = nvfp4_cache_sm90.read_kv(cache, torch.arange(pages))
    plain = torch.full((pages * PAGE, kv_heads, 2 * D), torch.nan)
    plain[slots] = torch.cat(sides, -1)[slots]
    plain = plain.view(pages, PAGE, kv_heads, 2 * D).transpose(1, 2).contiguous()
    q = larger * normal(sum(new), 16 * kv_heads, D, seed=4)
    operands = {"q": q.bfloat16(), "kv_cache": cache,
                "blocks": choose(lengths, new, kv_heads, count), "block_table": table, **make_spans(lengths, new)}
    wide = operands | {"q": operands["q"].float(), "kv_cache": plain}
    return operands, torch.ops.mm.paged_block_sparse_attention(**wide, scale=SCALE)


def make_scores(lengths: list[int], new: list[int], unowned: int = 0, heads: int = 4,
                ) -> tuple[dict[str, Tensor], Tensor]:
    """The same for index scores; the last ``unowned`` queries belong to no sequence."""
    table, slots, pages = lay_out(lengths, seed=5)
    cache = torch.full((pages, PAGE, 72), NAN_BYTE, dtype=torch.uint8)
    nvfp4_cache_sm90.insert_index(cache, normal(len(slots), D, seed=6), slots)
    plain = torch.full((pages * PAGE, D), torch.nan)
    plain[slots] = nvfp4_cache_sm90.read_index(cache, torch.arange(pages))[slots]
    operands = {"index_q": normal(sum(new) + unowned, heads, D, seed=7).bfloat16(), "index_cache": cache,
                "block_table": table, **make_spans(lengths, new)}
    wide = operands | {"index_q": operands["index_q"].float(), "index_cache": plain.view(pages, PAGE, D)}
    return operands, torch.ops.mm.paged_index_score(**wide)


def check_attention(template: KernelTemplate, lengths: list[int], new: list[int], kv_heads: int, count: int) -> None:
    operands, want = make_attention(lengths, new, kv_heads, count)
    have = run(template, operands, want.bfloat16(), {"scale": SCALE, "layout": nvfp4_cache.SM90})
    error = (have.float() - want).norm() / want.norm()
    assert float(error) < 2.5e-3, float(error)
    assert not have[(want == 0).all(-1)].any(), "queries that see nothing give zeros"


def test_attention_of_one_head():
    check_attention(sparse_attention.TEMPLATES[-1], [200, 0, 1], [1, 1, 2], 1, 2)


def test_large_queries_fit_f16():
    """Of magnitude 4000, which times the scale and 2^8, what keys are decoded without, would be beyond f16."""
    operands, want = make_attention([200], [1], 1, 2, larger=1000.0)
    assert float(operands["q"].abs().max()) * SCALE > 1.5 * 177
    have = run(sparse_attention.TEMPLATES[-1], operands, want.bfloat16(), {"scale": SCALE, "layout": nvfp4_cache.SM90})
    assert float((have.float() - want).norm() / want.norm()) < 2.5e-3


@pytest.mark.slow
@pytest.mark.parametrize("template", sparse_attention.TEMPLATES, ids=lambda t: t.name)
def test_attention_of_every_configuration(template: KernelTemplate):
    check_attention(template, [300, 0, 2, 2100], [1, 1, 3, 8], 2, 16)


def check_scores(lengths: list[int], new: list[int], unowned: int, heads: int = 4, spec: Any = SPEC) -> None:
    operands, want = make_scores(lengths, new, unowned, heads)
    have = run(SCORES, operands, want, {"layout": nvfp4_cache.SM90_INDEX}, spec)
    finite = want.isfinite()
    assert torch.equal(have.isfinite(), finite) and torch.equal(have == -math.inf, want == -math.inf)
    torch.testing.assert_close(have[finite], want[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "new", "unowned", "heads"), [
    ([300, 0, 2, 1100], [1, 1, 3, 8], 0, 4), ([300, 700], [1, 2], 1, 4), ([257, 130], [9, 2], 0, 1),
])
def test_scores(lengths: list[int], new: list[int], unowned: int, heads: int):
    check_scores(lengths, new, unowned, heads)


@pytest.mark.slow
@pytest.mark.parametrize("waves", [1, 16])
def test_scores_of_more_blocks_than_warps(monkeypatch: pytest.MonkeyPatch, waves: int):
    monkeypatch.setattr(sparse_index, "WAVES", waves)
    check_scores([300, 16389], [1, 2], 0, 4, dataclasses.replace(SPEC, units=1))


@pytest.mark.slow
def test_a_product_that_is_nan_is_not_lost():
    operands, want = make_scores([300], [1])
    operands["index_q"][0, 1, 5] = math.nan
    have = run(SCORES, operands, want, {"layout": nvfp4_cache.SM90_INDEX})
    assert have[0, 1, :3].isnan().all() and have[0, [0, 2, 3], :3].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-2, 1e2])
def test_values_of_any_size_keep_their_precision(factor: float):
    operands, want = make_attention([600], [1], 1, 4, factor)
    have = run(sparse_attention.TEMPLATES[-1], operands, want.bfloat16(), {"scale": SCALE, "layout": nvfp4_cache.SM90})
    error = (have.float() - want).norm() / want.norm()
    assert float(error) < 4e-3, float(error)


ATTENTION = {"scale": SCALE, "layout": nvfp4_cache.SM90}


@pytest.mark.parametrize(("changes", "attributes", "reason"), [
    ({}, {"layout": nvfp4_cache.LINEAR}, "not in the layout"),
    ({}, {"phase": "prefill"}, "for the decode phase"),
    ({"q": torch.zeros(4, 16, D)}, {}, "q is float32"),
    ({"q": torch.zeros(4, 8, D, dtype=torch.bfloat16)}, {}, "q has 8 heads"),
    ({"q": torch.zeros(4, 16, D + 4, dtype=torch.bfloat16)[:, :, :D]}, {}, "multiples of 16 bytes"),
    ({"kv_cache": torch.zeros(2, 2, 64, 72, dtype=torch.uint8)}, {}, "pages of the cache"),
    ({"blocks": torch.zeros(4, 1, 17, dtype=torch.int32)}, {}, "17 blocks"),
    ({"seq_lens": torch.zeros(3, dtype=torch.int64)}, {}, "must be int32"),
])
def test_refusals_of_attention(changes: dict[str, Tensor], attributes: dict[str, Any], reason: str):
    operands, want = make_attention([200, 0, 1], [1, 1, 2], 1, 2)
    call = describe("paged_block_sparse_attention", operands | changes, want, ATTENTION | attributes)
    assert reason in str(sparse_attention.TEMPLATES[0].refuse(call, SPEC, ARCH))


def test_what_an_architecture_lacks_is_named():
    operands, want = make_attention([200, 0, 1], [1, 1, 2], 1, 2)
    call = describe("paged_block_sparse_attention", operands, want, ATTENTION)
    bare = dataclasses.replace(ARCH, features=ARCH.features - {"cvt_e4m3_f16x2"})
    assert sparse_attention.TEMPLATES[0].refuse(call, SPEC, ARCH) is None
    assert "lacks cvt_e4m3_f16x2" in str(sparse_attention.TEMPLATES[0].refuse(call, SPEC, bare))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"layout": nvfp4_cache.INDEX}, "not in the layout"), ({"phase": "prefill"}, "for the decode phase"),
])
def test_refusals_of_scores(changes: dict[str, Any], reason: str):
    operands, want = make_scores([200], [1])
    call = describe("paged_index_score", operands, want, {"layout": nvfp4_cache.SM90_INDEX} | changes)
    assert reason in str(SCORES.refuse(call, SPEC, ARCH))
    three = Operand(("tokens", 3, D), (3 * D, D, 1), "bfloat16")
    attributes = {"phase": "decode", "layout": nvfp4_cache.SM90_INDEX}
    odd = dataclasses.replace(call, operands=call.operands | {"index_q": three}, attributes=attributes)
    assert "3 heads" in str(SCORES.refuse(odd, SPEC, ARCH))


@pytest.mark.slow
def test_any_order_of_warps_gives_the_same_scores():
    operands, want = make_scores([300, 700], [8, 1])
    first, second = (run(SCORES, operands, want, {"layout": nvfp4_cache.SM90_INDEX}, seed=seed) for seed in (1, 2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first[want.isfinite()], want[want.isfinite()], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_scores_as_a_stage_of_a_merged_launch():
    operands, want = make_scores([300, 1100], [1, 8])
    have = run(SCORES, operands, want, {"layout": nvfp4_cache.SM90_INDEX, "warps": 4})
    torch.testing.assert_close(have[want.isfinite()], want[want.isfinite()], rtol=1e-5, atol=1e-4)
