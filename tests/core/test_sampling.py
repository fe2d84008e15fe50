"""mm::sample: greedy, top-k, top-p, the distribution, and independence of the batch around a sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.ops.sampling import philox_uniform

MM = torch.ops.mm


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, seed=0, positions=None):
    """Sample every row of ``logits``, one position after the other."""
    rows = logits.shape[0]
    positions = torch.arange(rows, dtype=torch.int32) if positions is None else positions
    return MM.sample(
        logits, torch.full((rows,), temperature), torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p), torch.full((rows,), seed), positions,
    )  # fmt: skip


def philox_words(counter, key):
    """Philox-4x32-10 on Python integers (Salmon et al. 2011)."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0], second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1], first & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_philox_known_answer():
    assert philox_words([0] * 4, [0, 0])[0] == 0x6627E8D5  # the authors' kat_vectors
    zero = torch.tensor(0)
    assert float(philox_uniform(zero, zero, zero)) == ((0x6627E8D5 >> 9) + 0.5) / 2**23


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31 - 1), lane=st.integers(0, 300_000))
@settings(max_examples=50, deadline=None)
def test_philox_agrees_with_python_integers(seed, position, lane):
    want = philox_words([lane, position, 0, 0], [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF])[0]
    have = philox_uniform(torch.tensor(seed), torch.tensor(position), torch.tensor(lane))
    assert have.dtype == torch.float32
    assert 0.0 < float(have) == ((want >> 9) + 0.5) / 2**23 < 1.0


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    have = draw(logits, temperature=0.0, top_k=2, top_p=0.1)
    assert have.dtype == torch.int32 and have.tolist() == [1, 0]


def test_top_k_keeps_the_k_largest_and_ties_with_the_last():
    logits = torch.tensor([[1.0, 4.0, 3.0, 3.0, 0.0]]).expand(400, -1)
    assert set(draw(logits, temperature=5.0, top_k=1).tolist()) == {1}
    assert set(draw(logits, temperature=5.0, top_k=2).tolist()) == {1, 2, 3}
    assert set(draw(logits, temperature=5.0, top_k=99).tolist()) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    probabilities = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
    logits = probabilities.log().expand(600, -1)
    assert set(draw(logits, top_p=0.0).tolist()) == {1}
    assert set(draw(logits, top_p=0.45).tolist()) == {1}
    assert set(draw(logits, top_p=0.7).tolist()) == {1, 2}
    assert set(draw(logits, top_p=0.85).tolist()) == {1, 2, 3}
    assert set(draw(logits, top_p=1.0).tolist()) == {0, 1, 2, 3}


def test_top_p_counts_mass_after_top_k():
    logits = torch.tensor([[0.3, 0.3001, 0.2, 0.1999]]).log().expand(300, -1)
    assert set(draw(logits, top_k=2, top_p=0.49).tolist()) == {1}  # 0.3001 / 0.6001 of what top-k left
    assert set(draw(logits, top_k=2, top_p=0.6).tolist()) == {0, 1}


@pytest.mark.parametrize(
    "temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow), pytest.param(2.0, marks=pytest.mark.slow)]
)
def test_frequencies_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = torch.bincount(draw(logits.expand(4000, -1), temperature=temperature).long(), minlength=4)
    torch.testing.assert_close(counts / 4000, torch.softmax(logits / temperature, 0), rtol=0, atol=0.03)


@given(seed=st.integers(0, 2**40), rows=st.integers(1, 6), row=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_sequence_does_not_see_the_batch_around_it(seed, rows, row):
    row %= rows
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 33, generator=generator)
    arguments = [
        logits, torch.rand(rows, generator=generator), torch.randint(0, 9, (rows,), generator=generator).int(),
        torch.rand(rows, generator=generator), torch.randint(0, 99, (rows,), generator=generator),
        torch.randint(0, 99, (rows,), generator=generator).int(),
    ]  # fmt: skip
    alone = MM.sample(*(a[row : row + 1] for a in arguments))
    assert int(alone) == int(MM.sample(*arguments)[row])


def test_seed_and_position_change_the_draw():
    logits = torch.zeros(64, 1000)
    base = draw(logits, seed=1)
    assert torch.equal(base, draw(logits, seed=1))
    assert not torch.equal(base, draw(logits, seed=2))
    assert not torch.equal(base, draw(logits, seed=1 + 2**32))
    assert len(set(base.tolist())) > 50
