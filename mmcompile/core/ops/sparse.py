"""Block-sparse causal GQA attention (MSA): block scores, block selection, index cache, attention over chosen blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.core.formats import cache_pages
from mmcompile.core.ops.attention import attend_one
from mmcompile.core.ops.define import define_op

_LOWEST, _HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_QUERIES_AT_ONCE = 256


def _score_blocks(q: Tensor, k: Tensor, block_size: int, blocks: int) -> Tensor:
    """q [t, h, d], k [s, d] -> fp32 [t, h, blocks]; the queries are the last t of the s positions."""
    t, s = q.shape[0], k.shape[0]
    out = q.new_full((t, q.shape[1], blocks), float("-inf"), dtype=torch.float32)
    column = torch.arange(s, device=q.device)
    for first in range(0, t, _QUERIES_AT_ONCE):
        part = q[first : first + _QUERIES_AT_ONCE].float()
        row = torch.arange(s - t + first, s - t + first + part.shape[0], device=q.device)
        scores = (part @ k.float().T).masked_fill(column > row[:, None, None], float("-inf"))
        scores = F.pad(scores, (0, -s % block_size), value=float("-inf"))
        best = scores.reshape(*scores.shape[:2], -1, block_size).amax(-1)
        out[first : first + part.shape[0], :, : best.shape[-1]] = best
    return out


def _fake_index_score(index_q: Tensor, index_k: Tensor, block_size: int) -> Tensor:
    blocks = (index_k.shape[0] + block_size - 1) // block_size
    return index_q.new_empty((index_q.shape[0], index_q.shape[1], blocks), dtype=torch.float32)


@define_op(fake=_fake_index_score)
def index_score(index_q: Tensor, index_k: Tensor, block_size: int) -> Tensor:
    """How much every query of one sequence wants each block of keys (MiniMax-M3's indexer, arXiv 2606.13392).

    Args:
        index_q: [tokens, index_heads, d]. index_k: [tokens, d], one key head that all index heads share.
        block_size: keys a block.

    ``score[t, h, b] = max over keys j <= t of block b of index_q[t, h] . index_k[j]``, products in fp32, unscaled since
    only the order counts; minus infinity where the block holds no such key; NaN if one of the products is NaN.

    Returns: fp32 [tokens, index_heads, ceil(tokens / block_size)].
    """
    blocks = -(-index_k.shape[0] // block_size)
    return _score_blocks(index_q, index_k, block_size, blocks)


def _fake_insert_index(index_k: Tensor, index_cache: Tensor, layout: str) -> None:
    cache_pages.check_cache(index_cache, layout, index_k.shape[-1], sides=1)


@define_op(fake=_fake_insert_index, mutates=("index_cache",))
def insert_index(index_k: Tensor, index_cache: Tensor, slot_mapping: Tensor, layout: str = "linear") -> None:
    """Write index keys [tokens, d] into the paged index cache.

    index_cache: in the layout ``layout`` of ``core.formats.cache_pages``: "linear" = [pages, page_size, d], float or
    float8_e4m3fn (unit scale, saturating); NVFP4 = uint8 [pages, page_size, d/2 + d/16]. slot_mapping: int64 [tokens],
    slot = page * page_size + offset; negative slots are skipped. Raises ValueError if the cache is not as the layout
    says.
    """
    cache_pages.insert_index(index_cache, layout, index_k, slot_mapping)


def _list_sequences(
    block_table: Tensor, seq_lens: Tensor, query_start: Tensor
) -> Iterator[tuple[int, int, int, Tensor]]:
    """(first row, row after the last, length, pages int64) of every sequence that has new tokens."""
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for b, length in enumerate(lengths):
        if starts[b] < starts[b + 1] and length > 0:
            yield starts[b], starts[b + 1], length, block_table[b].long()


def _fake_paged_index_score(index_q: Tensor, index_cache: Tensor, block_table: Tensor, layout: str) -> Tensor:
    cache_pages.check_cache(index_cache, layout, index_q.shape[-1], sides=1)
    return index_q.new_empty((index_q.shape[0], index_q.shape[1], block_table.shape[1]), dtype=torch.float32)


@define_op(fake=_fake_paged_index_score)
def paged_index_score(
    index_q: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    layout: str = "linear",
) -> Tensor:
    """``index_score`` of a batch of sequences over their pages of the index cache; a block is a page.

    Args:
        index_q: [tokens, index_heads, d], sequences one after the other. index_cache, layout: as in ``insert_index``,
            new tokens already in it. block_table, seq_lens, query_start: as in ``paged_attention``.

    Returns: fp32 [tokens, index_heads, max_blocks], max_blocks = columns of block_table; minus infinity in every block
    after the query's own, and everywhere for a sequence of length 0.
    """
    cache_pages.check_cache(index_cache, layout, index_q.shape[-1], sides=1)
    page_size = index_cache.shape[1]
    out = index_q.new_full((*index_q.shape[:2], block_table.shape[1]), float("-inf"), dtype=torch.float32)
    for begin, end, length, pages in _list_sequences(block_table, seq_lens, query_start):
        used = -(-length // page_size)
        keys = cache_pages.read_index(index_cache, layout, pages[:used])[:length].to(index_q.dtype)
        out[begin:end, :, :used] = _score_blocks(index_q[begin:end], keys, page_size, used)
    return out


def _check_top_k(top_k: int, local_blocks: int, initial_blocks: int) -> None:
    if min(local_blocks, initial_blocks) < 0 or top_k < max(1, local_blocks + initial_blocks):
        raise ValueError(
            f"top_k is {top_k}, it must be at least 1 and hold {local_blocks} local and {initial_blocks} initial blocks"
        )


def _fake_block_top_k(scores: Tensor, top_k: int, local_blocks: int, initial_blocks: int) -> Tensor:
    _check_top_k(top_k, local_blocks, initial_blocks)
    return scores.new_empty((scores.shape[0], scores.shape[1], top_k), dtype=torch.int32)


@define_op(fake=_fake_block_top_k)
def block_top_k(
    scores: Tensor, positions: Tensor, block_size: int, top_k: int, local_blocks: int = 1, initial_blocks: int = 0
) -> Tensor:
    """The blocks that every query attends to, chosen for each index head on its own.

    Args:
        scores: fp32 [tokens, index_heads, blocks]. Entries after the query's own block ``positions // block_size`` are
            never read as scores, whatever they hold. positions: int [tokens], place of the query in its sequence;
            negative for a row of padding, which chooses nothing.
        top_k: how many blocks at most. local_blocks: the last ones up to the own block are always chosen.
            initial_blocks: so are the first ones. Raises ValueError if top_k cannot hold both.

    The rest goes by score, the lower block id first among equal ones (minus zero equals zero); NaN counts as minus
    infinity.

    Returns: int32 [tokens, index_heads, top_k], ids in ascending order, then -1 for unused places: with
    ``local_blocks`` the own block is the last id, the only one that is not wholly in the past.
    """
    _check_top_k(top_k, local_blocks, initial_blocks)
    blocks = scores.shape[-1]
    ids = torch.arange(blocks, device=scores.device)
    own = torch.div(positions, block_size, rounding_mode="floor")[:, None, None]
    past = (ids <= own) & (positions >= 0)[:, None, None]
    forced = past & ((ids > own - local_blocks) | (ids < initial_blocks))
    keys = scores.nan_to_num(nan=_LOWEST, posinf=_HIGHEST, neginf=_LOWEST).masked_fill(forced, float("inf"))
    keys = keys.masked_fill(~past, float("-inf"))
    ranked = torch.sort(keys, dim=-1, descending=True, stable=True)
    chosen = ranked.indices.masked_fill(ranked.values == float("-inf"), blocks)[..., :top_k].sort(-1).values
    chosen = F.pad(chosen.masked_fill(chosen == blocks, -1), (0, max(0, top_k - blocks)), value=-1)
    return chosen.to(torch.int32)


Rows = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(kv head, block ids ascending) -> keys and values [rows of these blocks, d]; only the last block may be cut short."""


def _attend_selected(
    q: Tensor, blocks: Tensor, read: Rows, kv_heads: int, length: int, scale: float, size: int
) -> Tensor:
    """q [t, h, d], the last t of ``length`` positions; blocks [t, selections, k]; ``size`` keys a block."""
    t, group, per_selection = q.shape[0], q.shape[1] // kv_heads, kv_heads // blocks.shape[1]
    out = torch.zeros_like(q)
    row = torch.arange(length - t, length, device=q.device)[:, None]
    for head in range(kv_heads):
        chosen = blocks[:, head // per_selection].long()
        union = torch.unique(chosen[(chosen >= 0) & (chosen * size < length)])
        if union.numel() == 0:
            continue
        column = (union[:, None] * size + torch.arange(size, device=q.device)).flatten()
        column = column[column < length]
        member = (chosen[:, :, None] == union).any(1).repeat_interleave(size, dim=1)[:, : column.numel()]
        mine = slice(head * group, (head + 1) * group)
        out[:, mine] = _attend_masked(q[:, mine], *read(head, union), member & (column <= row), scale)
    return out


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [t, g, d] of one group, k and v [s, d], mask [t, s] true where seen; rows that see nothing give zeros."""
    if q.shape[0] == 1:
        seen = mask[0]
        return attend_one(q, k[seen][:, None], v[seen][:, None], scale) if bool(seen.any()) else torch.zeros_like(q)
    heads = q.transpose(0, 1)[None]
    keys, values = (x.expand(1, q.shape[1], *x.shape) for x in (k, v))
    out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, scale=scale)[0].transpose(0, 1)
    return torch.where(mask.any(1)[:, None, None], out, 0.0)


def _check_heads(heads: int, kv_heads: int, selections: int) -> None:
    if heads % kv_heads or kv_heads % selections:
        raise ValueError(
            f"{heads} query heads, {kv_heads} KV heads and {selections} selections: each must be a multiple of the next"
        )


def _fake_block_sparse_attention(q: Tensor, k: Tensor, blocks: Tensor) -> Tensor:
    _check_heads(q.shape[1], k.shape[1], blocks.shape[1])
    return q.new_empty(q.shape)


@define_op(fake=_fake_block_sparse_attention)
def block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, scale: float, block_size: int) -> Tensor:
    """Causal attention of one sequence over itself, every query over the blocks chosen for it.

    Args:
        q: [tokens, heads, d]. k, v: [tokens, kv_heads, d] (GQA as in ``attention``).
        blocks: int [tokens, selections, n], a set of block ids in any order, -1 = unused; KV head h reads selection
            ``h // (kv_heads / selections)``. Blocks after the query's own hold nothing that it may see.
        scale: multiplies q.k before the softmax. block_size: keys a block.

    Returns: [tokens, heads, d] in q's dtype; zeros where a query has no block. Raises ValueError if heads, kv_heads and
    selections do not divide one another.
    """
    kv_heads, length = k.shape[1], k.shape[0]
    _check_heads(q.shape[1], kv_heads, blocks.shape[1])

    def read(head: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = (ids[:, None] * block_size + torch.arange(block_size, device=ids.device)).flatten()
        rows = rows[rows < length]
        return k[rows, head], v[rows, head]

    return _attend_selected(q, blocks, read, kv_heads, length, scale, block_size)


def _fake_paged_block_sparse_attention(q: Tensor, kv_cache: Tensor, blocks: Tensor, layout: str) -> Tensor:
    cache_pages.check_cache(kv_cache, layout, q.shape[-1], sides=2)
    _check_heads(q.shape[1], cache_pages.count_kv_heads(kv_cache, layout), blocks.shape[1])
    return q.new_empty(q.shape)


@define_op(fake=_fake_paged_block_sparse_attention)
def paged_block_sparse_attention(
    q: Tensor,
    kv_cache: Tensor,
    blocks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    layout: str = "linear",
) -> Tensor:
    """``block_sparse_attention`` of a batch of sequences over their pages of the cache; a block is a page.

    Args:
        q: [tokens, heads, d], sequences one after the other, any number of new tokens each. kv_cache, block_table,
            seq_lens, query_start, scale, layout: as in ``paged_attention``. blocks: as in ``block_sparse_attention``;
            ids count the blocks of the sequence (logical pages). Pages of other blocks and rows past the length never
            decide a result.

    Returns: [tokens, heads, d] in q's dtype; zeros for sequences of length 0 and queries without blocks.
    """
    cache_pages.check_cache(kv_cache, layout, q.shape[-1], sides=2)
    kv_heads, page_size = cache_pages.count_kv_heads(kv_cache, layout), kv_cache.shape[2]
    runs = kv_cache.shape[1] // kv_heads
    _check_heads(q.shape[1], kv_heads, blocks.shape[1])
    out = torch.zeros_like(q)
    for begin, end, length, pages in _list_sequences(block_table, seq_lens, query_start):

        def read(head: int, ids: Tensor, pages: Tensor = pages, length: int = length) -> tuple[Tensor, Tensor]:
            count = int(torch.clamp(length - ids * page_size, max=page_size).sum())
            mine = kv_cache[pages[ids], head * runs : (head + 1) * runs]
            k, v = cache_pages.read_kv(mine, layout, torch.arange(len(ids), device=ids.device))
            return k[:count, 0].to(q.dtype), v[:count, 0].to(q.dtype)

        out[begin:end] = _attend_selected(q[begin:end], blocks[begin:end], read, kv_heads, length, scale, page_size)
    return out
