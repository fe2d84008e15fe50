"""Kernels over NVFP4 pages against the references on the decoded pages: both layouts, poisoned tails, insertion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.formats import nvfp4_cache
from mmcompile.core.kernel import KernelTemplate
from mmcompile.targets import gfx950, sm90, sm100
from mmcompile.targets._kernels import sparse_attention, sparse_index
from tests.kernels.sparse_cases import ARCH, SPEC, complete, make_spans

INSERT, SCORE, _, _, PREFILL = sparse_index.TEMPLATES
SPLIT, _, _, _, TOKENS = sparse_attention.TEMPLATES
PAGE, D, GARBAGE = 16, 64, 0x7F
LENGTHS, NEW = [33, 0, 16, 5], [2, 1, 1, 1]
PLACES = [pytest.param((target.TARGET.spec, target.TARGET.spec.architectures[0]), id=target.TARGET.spec.name)
          for target in (sm90, sm100, gfx950)]


def launch(runner: Any, call_of: Any, template: KernelTemplate, tensors: dict[str, Any], attributes: dict[str, Any],
           result: Tensor | None, place: Any = (SPEC, ARCH)) -> dict[str, Any]:
    """Interpret a template and return all buffers; its operation itself has no NVFP4 cache, so no reference runs."""
    phase = "prefill" if template in (PREFILL, TOKENS) else "decode"
    rows = dict.fromkeys(("q", "index_q", "index_k", "blocks", "slot_mapping", "result"), "tokens")
    call = call_of(template.op, tensors, attributes, rows, [] if result is None else [result])
    template = complete(template, phase)
    assert template.refuse(call, *place) is None
    tokens = next(t.shape[0] for name, t in tensors.items() if name in rows)
    symbols = {"tokens": tokens, "batch": len(LENGTHS)}
    if "block_table" in tensors:
        symbols["max_blocks"] = tensors["block_table"].shape[1]
    pool = tensors | symbols | {"result": result}
    for scratch in template.scratch(call, place[0]):
        shape = [symbols.get(n, n) for n in scratch.shape]
        pool[f"scratch:{scratch.name}"] = torch.full(shape, torch.nan)
    runner._launch(template.emit(call, *place), pool, symbols)
    return pool


def fill_pages(sides: int, seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Random rows of every sequence by side, and block table, slots and page count for them."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // PAGE) for n in LENGTHS]
    order = torch.randperm(sum(counts) + 1, generator=generator)
    table = torch.full((len(LENGTHS), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    slots = []
    for b, length in enumerate(LENGTHS):
        table[b, : counts[b]] = order[sum(counts[:b]) : sum(counts[: b + 1])].int()
        place = torch.arange(length)
        slots.append(table[b].long()[place // PAGE] * PAGE + place % PAGE)
    rows = [torch.randn((sum(LENGTHS), sides, D), generator=generator) * 3 for _ in range(2)]
    return {"block_table": table, "slots": torch.cat(slots), "pages": torch.arange(len(order))}, rows


def make_index(seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Operands of the score over NVFP4 pages, and the same pages decoded: fp32, NaN where no row is."""
    layout, (keys, _) = fill_pages(1, seed)
    cache = torch.full((len(layout["pages"]), PAGE, D // 2 + D // 16), GARBAGE, dtype=torch.uint8)
    nvfp4_cache.insert_index(cache, nvfp4_cache.INDEX, keys[:, 0], layout["slots"])
    decoded = nvfp4_cache.read_index(cache, nvfp4_cache.INDEX, layout["pages"])
    plain = torch.full_like(decoded, torch.nan)
    plain[layout["slots"]] = decoded[layout["slots"]]
    q = torch.randn((sum(NEW), 4, D), generator=torch.Generator().manual_seed(1)).bfloat16()
    operands = {"index_q": q, "index_cache": cache, "block_table": layout["block_table"], **make_spans(LENGTHS, NEW)}
    return operands, plain.view(-1, PAGE, D)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("template", [SCORE, PREFILL], ids=lambda t: t.name)
def test_scores_are_of_the_exact_keys(runner, call_of, template, place):
    operands, plain = make_index()
    want = torch.ops.mm.paged_index_score(**operands | {"index_cache": plain})
    result = torch.full_like(want, torch.nan)
    have = launch(runner, call_of, template, operands, {"layout": nvfp4_cache.INDEX}, result, place)["result"]
    finite = want.isfinite()
    assert torch.equal(have.isfinite(), finite)
    torch.testing.assert_close(have[finite], want[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tag", [nvfp4_cache.LINEAR, nvfp4_cache.TOKEN_QUAD])
@pytest.mark.parametrize("template", [SPLIT, TOKENS], ids=lambda t: t.name)
@pytest.mark.slow
def test_attention_reads_both_layouts(runner, call_of, template, tag):
    layout, (keys, values) = fill_pages(2, 3)
    cache = torch.full((len(layout["pages"]), 4, PAGE, D // 2 + D // 16), GARBAGE, dtype=torch.uint8)
    nvfp4_cache.insert_kv(cache, tag, keys, values, layout["slots"])
    sides = nvfp4_cache.read_kv(cache, tag, layout["pages"])
    plain = torch.full((len(layout["pages"]) * PAGE, 2, 2 * D), torch.nan)
    plain[layout["slots"]] = torch.cat(sides, -1)[layout["slots"]]
    plain = plain.view(-1, PAGE, 2, 2 * D).transpose(1, 2).contiguous()
    blocks = torch.tensor([[2, -1, 0], [1, 2, -1], [0, -1, -1], [0, -1, -1], [-1, 0, 1]], dtype=torch.int32)
    blocks = blocks[:, None].expand(-1, 2, -1).contiguous()
    q = torch.randn((sum(NEW), 8, D), generator=torch.Generator().manual_seed(1)).bfloat16()
    operands = {"q": q, "kv_cache": cache, "blocks": blocks, "block_table": layout["block_table"],
                **make_spans(LENGTHS, NEW)}
    want = torch.ops.mm.paged_block_sparse_attention(**operands | {"kv_cache": plain}, scale=D**-0.5)
    have = launch(runner, call_of, template, operands, {"layout": tag, "scale": D**-0.5},
                  torch.full_like(want, torch.nan))["result"]
    error = (have.float() - want.float()).norm() / want.float().norm()
    assert float(error) < 1e-2
    assert not have[2].any(), "a sequence of length 0 gives zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inserted_bytes_are_the_quantizers(runner, call_of, dtype):
    layout, (keys, _) = fill_pages(1, 5)
    keys = keys[:, 0]
    keys[0], keys[1], keys[2, ::3] = 0.0, 1e5, -1e-3
    keys = keys.to(dtype)
    slots = layout["slots"].clone()
    slots[[3, 40]] = -1
    want = torch.full((len(layout["pages"]), PAGE, D // 2 + D // 16), GARBAGE, dtype=torch.uint8)
    tensors = {"index_k": keys, "index_cache": want.clone(), "slot_mapping": slots}
    nvfp4_cache.insert_index(want, nvfp4_cache.INDEX, keys, slots)
    have = launch(runner, call_of, INSERT, tensors, {"layout": nvfp4_cache.INDEX}, None)["index_cache"]
    assert torch.equal(have, want)


@pytest.mark.parametrize(("tag", "changes", "reason"), [
    ("", {}, "none of its NVFP4 layouts"),
    (nvfp4_cache.LINEAR, {}, "none of its NVFP4 layouts"),
    (nvfp4_cache.INDEX, {"index_cache": torch.zeros((2, 16, 40), dtype=torch.uint8)}, "the 36 bytes"),
    (nvfp4_cache.INDEX, {"index_cache": torch.zeros((2, 18, 36), dtype=torch.uint8)}, "no pages of 18 tokens"),
    (nvfp4_cache.INDEX, {"index_q": torch.zeros((5, 4, 48), dtype=torch.bfloat16)}, "head_dim is 48"),
    (nvfp4_cache.SM90_INDEX, {}, "no pages of 16 tokens of heads of 64"),
])
def test_refusals_name_the_reason(call_of, tag, changes, reason):
    operands = make_index()[0] | changes
    call = call_of(SCORE.op, operands, {"layout": tag, "phase": "decode"}, {}, [torch.empty(5, 4, 4)])
    assert reason in SCORE.refuse(call, SPEC, ARCH)
