"""Block-sparse attention: every operation against loops over scalars in float64, and the promises of its docstring."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcompile.core.ops  # noqa: F401

MM = torch.ops.mm
INF, NAN = float("inf"), float("nan")
SHAPES = settings(max_examples=25, deadline=None)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def score_plainly(index_q, index_k, size, blocks, first=0):
    """Scores [t, h, blocks] of queries at positions first, first + 1, ..."""
    out = torch.full((index_q.shape[0], index_q.shape[1], blocks), -INF, dtype=torch.float64)
    for t in range(index_q.shape[0]):
        for h in range(index_q.shape[1]):
            for j in range(first + t + 1):
                product = float(index_q[t, h].double() @ index_k[j].double())
                out[t, h, j // size] = max(out[t, h, j // size], product)
    return out


def choose_plainly(row, position, size, top_k, local, initial):
    """Ids of one row of scores, by the rule as the docstring words it."""
    row = [-INF if math.isnan(s) else s for s in row]
    if position < 0:
        return [-1] * top_k
    own = position // size
    valid = list(range(min(own + 1, len(row))))
    forced = [b for b in valid if b > own - local or b < initial]
    rest = [b for b in valid if b not in forced]
    rest.sort(key=lambda b: (-row[b], b))
    chosen = sorted(forced + rest[: max(0, top_k - len(forced))])
    return chosen + [-1] * (top_k - len(chosen))


def attend_plainly(q, k, v, blocks, scale, size, first=0):
    """q [t, h, d] at positions first, ...; k, v [s, hk, d]; blocks [t, selections, n]."""
    heads, kv_heads, selections = q.shape[1], k.shape[1], blocks.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            ids = set(blocks[t, kv // (kv_heads // selections)].tolist())
            seen = [j for j in range(first + t + 1) if j // size in ids]
            if seen:
                weights = torch.softmax(k[seen, kv].double() @ q[t, h].double() * scale, 0)
                out[t, h] = weights @ v[seen, kv].double()
    return out


def make_pages(rows, sequences, size, *, garbage, dtype=torch.float32):
    """Pages [n, size, ...] holding the sequences in shuffled order, all else garbage; and the block table."""
    used = [-(-len(s) // size) for s in sequences]
    order = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(3))
    pages = torch.full((len(order), size, *rows), garbage, dtype=dtype)
    table = torch.full((len(sequences), max(used) + 1), int(order[-1]), dtype=torch.int32)
    for b, sequence in enumerate(sequences):
        for i, start in enumerate(range(0, len(sequence), size)):
            part = sequence[start : start + size]
            page = int(order[sum(used[:b]) + i])
            table[b, i] = page
            pages[page, : len(part)] = part.to(dtype)
    return pages, table


def describe(lengths, new):
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    return torch.tensor(lengths, dtype=torch.int32), starts


@SHAPES
@given(tokens=st.integers(1, 23), heads=st.sampled_from([1, 2, 4]), size=st.integers(1, 8))
def test_index_score(tokens, heads, size):
    index_q, index_k = noise(tokens, heads, 8), noise(tokens, 8, seed=1)
    have = MM.index_score(index_q, index_k, size)
    want = score_plainly(index_q, index_k, size, -(-tokens // size))
    assert have.shape == want.shape and have.dtype == torch.float32
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)


def test_index_score_in_parts_of_a_long_prompt():
    index_q, index_k = noise(600, 1, 4), noise(600, 4, seed=1)
    have = MM.index_score(index_q, index_k, 128)
    last = MM.paged_index_score(
        index_q[-3:], torch.cat([index_k, torch.full((40, 4), NAN)]).reshape(5, 128, 4),
        torch.arange(5)[None], torch.tensor([600]), torch.tensor([0, 3]),
    )  # fmt: skip
    torch.testing.assert_close(have[-3:], last, rtol=1e-6, atol=1e-6)
    assert bool((have[255, 0, 2:] == -INF).all()) and bool(have[256, 0, 2] > -INF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_paged_index_score_reads_what_insert_index_wrote(dtype):
    size, lengths, new = 4, [9, 0, 4, 17], [9, 1, 1, 8]
    keys = [noise(n, 8, seed=i) * 3 for i, n in enumerate(lengths)]
    cache, table = make_pages((8,), [torch.zeros(n, 8) for n in lengths], size, garbage=NAN, dtype=dtype)
    for i, sequence in enumerate(keys):
        slots = table[i].long()[torch.arange(len(sequence)) // size] * size + torch.arange(len(sequence)) % size
        MM.insert_index(torch.cat([sequence, noise(1, 8)]), cache, torch.cat([slots, torch.tensor([-1])]))
    index_q = noise(sum(new), 2, 8, seed=9)
    seq_lens, starts = describe(lengths, new)
    have = MM.paged_index_score(index_q, cache, table, seq_lens, starts)
    assert have.shape == (19, 2, table.shape[1])
    for i, n in enumerate(lengths):
        begin, end = int(starts[i]), int(starts[i + 1])
        stored = keys[i].to(dtype).float()
        want = score_plainly(index_q[begin:end], stored, size, table.shape[1], n - new[i])
        torch.testing.assert_close(have[begin:end].double(), want, rtol=1e-5, atol=1e-4)


def test_insert_index_saturates_fp8():
    cache = torch.zeros(2, 2, 2, dtype=torch.float8_e4m3fn)
    MM.insert_index(torch.tensor([[1000.0, -1000.0]]), cache, torch.tensor([3]))
    assert cache.float()[1, 1].tolist() == [448.0, -448.0] and int((cache.float() != 0).sum()) == 2


SCORES = st.sampled_from([-INF, -2.0, -0.0, 0.0, 1.0, 1.5, INF, NAN])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_block_top_k(data):
    blocks, size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    local, initial = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    top_k = data.draw(st.integers(max(1, local + initial), 14))
    positions = data.draw(st.lists(st.integers(-2, blocks * size - 1), min_size=1, max_size=4))
    rows = [[data.draw(st.lists(SCORES, min_size=blocks, max_size=blocks)) for _ in range(2)] for _ in positions]
    have = MM.block_top_k(torch.tensor(rows), torch.tensor(positions, dtype=torch.int32), size, top_k, local, initial)
    want = [[choose_plainly(row, p, size, top_k, local, initial) for row in pair]
            for pair, p in zip(rows, positions, strict=True)]  # fmt: skip
    assert have.dtype == torch.int32 and have.tolist() == want


def test_ties_go_to_the_lower_block():
    scores = torch.tensor([[[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]]])
    choose = lambda top_k: MM.block_top_k(scores, torch.tensor([11]), 2, top_k, 1, 0)[0, 0].tolist()  # noqa: E731
    assert choose(2) == [1, 5] and choose(3) == [1, 3, 5] and choose(4) == [0, 1, 3, 5]
    assert choose(8) == [0, 1, 2, 3, 4, 5, -1, -1]


def test_scores_after_the_own_block_are_not_read():
    scores = torch.tensor([[[0.0, 1.0, NAN, INF]]]).expand(3, 1, 4)
    chosen = MM.block_top_k(scores, torch.tensor([0, 7, -1]), 4, 2, 1, 0)
    assert chosen[:, 0].tolist() == [[0, -1], [0, 1], [-1, -1]]


def test_each_head_chooses_for_itself():
    scores = torch.tensor([[[3.0, 1.0, 0.0], [1.0, 3.0, 0.0]]])
    assert MM.block_top_k(scores, torch.tensor([5]), 2, 2, 1, 0)[0].tolist() == [[0, 2], [1, 2]]


@pytest.mark.parametrize(("top_k", "local", "initial"), [(0, 0, 0), (2, 2, 1), (1, 0, 2), (4, -1, 0)])
def test_block_top_k_refuses_more_forced_blocks_than_places(top_k, local, initial):
    with pytest.raises(ValueError, match="top_k is"):
        MM.block_top_k(torch.zeros(1, 1, 4), torch.tensor([3]), 1, top_k, local, initial)


def draw_blocks(draw, rows, selections, count, width):
    """A set of block ids for every row and selection, in any order among -1."""
    ids = [[draw(st.permutations([*draw(st.sets(st.integers(0, count - 1), max_size=width)), *[-1] * width]))[:width]
            for _ in range(selections)] for _ in range(rows)]  # fmt: skip
    return torch.tensor(ids, dtype=torch.int32).reshape(rows, selections, width)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_block_sparse_attention(data):
    selections, per_selection, group = (data.draw(st.sampled_from([1, 2])) for _ in range(3))
    tokens, size, width = (data.draw(st.integers(1, n)) for n in (14, 5, 4))
    kv_heads = selections * per_selection
    q, k, v = noise(tokens, kv_heads * group, 8), noise(tokens, kv_heads, 8, seed=1), noise(tokens, kv_heads, 8, seed=2)
    blocks = draw_blocks(data.draw, tokens, selections, -(-tokens // size) + 1, width)
    have = MM.block_sparse_attention(q, k, v, blocks, 0.3, size)
    want = attend_plainly(q, k, v, blocks, 0.3, size)
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_paged_block_sparse_attention(data):
    """Decode, verification of up to 8 tokens and prefill in one batch, NaN in every place that may not be read."""
    selections, size, width = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(1, 5)), 3
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    new = [data.draw(st.integers(1, max(1, min(n, data.draw(st.sampled_from([1, 8, 20])))))) for n in lengths]
    sequences = [noise(n, 2, 16, seed=i) for i, n in enumerate(lengths)]
    cache, table = make_pages((2, 16), sequences, size, garbage=NAN)
    cache = cache.transpose(1, 2).contiguous()
    seq_lens, starts = describe(lengths, new)
    q = noise(sum(new), 4, 8, seed=7)
    blocks = draw_blocks(data.draw, sum(new), selections, table.shape[1], width)
    have = MM.paged_block_sparse_attention(q, cache, blocks, table, seq_lens, starts, 0.3)
    for i, rows in enumerate(sequences):
        mine = slice(int(starts[i]), int(starts[i + 1]))
        want = attend_plainly(q[mine], rows[..., :8], rows[..., 8:], blocks[mine], 0.3, size, lengths[i] - new[i])
        torch.testing.assert_close(have[mine].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("new", [1, 2, 8, 33])
def test_all_blocks_chosen_is_dense_attention_to_the_bit(new):
    lengths, size = [33, 40], 8
    sequences = [noise(n, 2, 32, seed=i, dtype=torch.bfloat16) for i, n in enumerate(lengths)]
    cache, table = make_pages((2, 32), sequences, size, garbage=0.0, dtype=torch.bfloat16)
    cache = cache.transpose(1, 2).contiguous()
    seq_lens, starts = describe(lengths, [new, new])
    q, index_q = noise(2 * new, 8, 16, dtype=torch.bfloat16), noise(2 * new, 2, 8)
    index_cache = noise(cache.shape[0], size, 8)
    positions = torch.cat([torch.arange(n - new, n) for n in lengths])
    scores = MM.paged_index_score(index_q, index_cache, table, seq_lens, starts)
    blocks = MM.block_top_k(scores, positions, size, 5, 1, 0)
    sparse = MM.paged_block_sparse_attention(q, cache, blocks, table, seq_lens, starts, 0.25)
    assert torch.equal(sparse, MM.paged_attention(q, cache, table, seq_lens, starts, 0.25))
    fewer = MM.block_top_k(scores, positions, size, 4, 1, 0)
    assert not torch.equal(sparse, MM.paged_block_sparse_attention(q, cache, fewer, table, seq_lens, starts, 0.25))


def test_heads_must_divide():
    q, k = noise(2, 6, 4), noise(2, 4, 4)
    with pytest.raises(ValueError, match="each must be a multiple of the next"):
        MM.block_sparse_attention(q, k, k, torch.zeros(2, 2, 1, dtype=torch.int32), 1.0, 2)
    with pytest.raises(ValueError, match="3 selections"):
        MM.block_sparse_attention(noise(2, 8, 4), k, k, torch.zeros(2, 3, 1, dtype=torch.int32), 1.0, 2)
