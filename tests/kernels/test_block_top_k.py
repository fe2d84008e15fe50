"""Block selection against the reference, bit for bit: ties, NaN, infinities, forced blocks, padding, many chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcompile.core.kernel import KernelTemplate
from mmcompile.targets._kernels import sparse_top_k
from tests.kernels.sparse_cases import ARCH, SPEC, complete

SPLIT, WHOLE = sparse_top_k.TEMPLATES
CHUNK = 16  # the interpreter takes seconds to sort the 256 of a real chunk


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 scores, merged by 32."""
    monkeypatch.setattr(sparse_top_k, "CHUNK", CHUNK)
    monkeypatch.setattr(sparse_top_k, "MERGED", 2 * CHUNK)


pytestmark = pytest.mark.usefixtures("small_chunks")


def select(runner: Any, template: KernelTemplate, scores: Tensor, positions: Tensor, **attributes: Any) -> Tensor:
    """Run the kernel, hold it against the reference, and return its ids."""
    attributes = {"block_size": 4, "top_k": 4, "local_blocks": 1, "initial_blocks": 0} | attributes
    tokens, _, blocks = scores.shape
    outcome = runner.run_op(
        complete(template, "decode"), {"scores": scores, "positions": positions}, attributes, SPEC, ARCH,
        rows={"scores": "tokens", "positions": "tokens", "result": "tokens"},
        symbols={"tokens": tokens, "max_blocks": blocks},
    )
    assert torch.equal(outcome.results[0], outcome.references[0])
    return outcome.results[0]


def scores_of(positions: list[int], heads: int, blocks: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Scores with many ties and NaN behind every query's own block; int32 positions."""
    generator = torch.Generator().manual_seed(blocks)
    scores = torch.randint(-4, 5, (len(positions), heads, blocks), generator=generator).float()
    where = torch.tensor(positions)
    own = torch.where(where >= 0, where // size, -1)
    scores[torch.arange(blocks) > own[:, None, None].expand(scores.shape)] = math.nan
    return scores, where.to(torch.int32)


@pytest.mark.parametrize("template", [SPLIT, WHOLE], ids=lambda t: t.name)
@pytest.mark.parametrize(("top_k", "local", "initial"), [(4, 1, 0), (1, 1, 0), (6, 2, 1), (16, 1, 0), (5, 0, 0)])
def test_ties_forced_blocks_and_padding(runner, template, top_k, local, initial):
    scores, positions = scores_of([0, 3, 4, -1, 47, 30, 16], 2, 12)
    ids = select(runner, template, scores, positions, top_k=top_k, local_blocks=local, initial_blocks=initial)
    assert bool((ids[3] == -1).all()), "a row of padding chooses nothing"
    assert ids[0, 0].tolist() == [0] + [-1] * (top_k - 1)


@pytest.mark.parametrize("template", [SPLIT, WHOLE], ids=lambda t: t.name)
def test_scores_that_are_no_numbers(runner, template):
    rows = [[math.nan, -math.inf, 1.0, math.inf, -0.0, 0.0, torch.finfo(torch.float32).min, 5.0]]
    scores = torch.tensor(rows)[None]
    for top_k in (1, 3, 6, 8):
        select(runner, template, scores, torch.tensor([31]), top_k=top_k, local_blocks=0)
    assert select(runner, template, torch.full((1, 1, 8), math.nan), torch.tensor([31]))[0, 0].tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize("template", [SPLIT, WHOLE], ids=lambda t: t.name)
@pytest.mark.parametrize("blocks", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_borders_of_chunks(runner, template, blocks):
    scores, positions = scores_of([4 * blocks - 1, 4 * CHUNK - 1, 4 * CHUNK, 5], 1, blocks)
    scores = scores + torch.arange(blocks) / 8  # the best ones lie in the last chunk
    select(runner, template, scores, positions.clamp(max=4 * blocks - 1), top_k=16)


def test_position_past_the_scores_takes_all_of_them(runner):
    scores, _ = scores_of([400, 400], 1, 9)
    for template in (SPLIT, WHOLE):
        select(runner, template, scores, torch.tensor([400, 35]), top_k=16)


@pytest.mark.slow
@pytest.mark.parametrize("template", [SPLIT, WHOLE], ids=lambda t: t.name)
def test_a_million_tokens(runner, template, monkeypatch):
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((2, 1, 8192), generator=generator)
    select(runner, template, scores, torch.tensor([2**20 - 1, 700000]), block_size=128, top_k=16)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_any_scores(runner, data):
    limits = {"tokens": 17, "heads": 4, "blocks": 40}
    tokens, heads, blocks = (data.draw(st.integers(1, limit), name) for name, limit in limits.items())
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 3e38])
    drawn = data.draw(st.lists(values, min_size=blocks, max_size=blocks), "row")
    generators = [torch.Generator().manual_seed(row) for row in range(tokens * heads)]
    order = torch.stack([torch.randperm(blocks, generator=generator) for generator in generators])
    scores = torch.tensor(drawn)[order].view(tokens, heads, blocks)
    place = st.integers(-1, 4 * blocks - 1)
    positions = torch.tensor(data.draw(st.lists(place, min_size=tokens, max_size=tokens), "positions"))
    local, initial = data.draw(st.integers(0, 2), "local"), data.draw(st.integers(0, 2), "initial")
    top_k = data.draw(st.integers(max(1, local + initial), 9), "top_k")
    template = data.draw(st.sampled_from([SPLIT, WHOLE]), "template")
    select(runner, template, scores, positions, top_k=top_k, local_blocks=local, initial_blocks=initial)


@pytest.mark.parametrize(("scores", "positions", "top_k", "reason"), [
    (torch.zeros((2, 1, 8), dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32), 4, "fp32"),
    (torch.zeros((2, 8, 1)).transpose(1, 2), torch.zeros(2, dtype=torch.int32), 4, None),
    (torch.zeros((2, 1, 16))[..., ::2], torch.zeros(2, dtype=torch.int32), 4, "last stride"),
    (torch.zeros((2, 1, 8)), torch.zeros(2), 4, "positions"),
    (torch.zeros((2, 1, 8)), torch.zeros(2, dtype=torch.int64), 129, "top_k is 129"),
])
def test_refusals_name_the_reason(call_of, scores, positions, top_k, reason):
    call = call_of("block_top_k", {"scores": scores, "positions": positions}, {"block_size": 4, "top_k": top_k}, {}, [])
    for template in (SPLIT, WHOLE):
        refusal = template.refuse(call, SPEC, ARCH)
        assert refusal is None if reason is None else reason in refusal
