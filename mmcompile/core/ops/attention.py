"""Causal GQA attention: stateless over one sequence, and paged over a batch of sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.core.formats import cache_pages
from mmcompile.core.ops.define import define_op


def _causal_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Boolean [queries, keys]; the last query sees the last key; ``window`` keys at most when positive."""
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    mask = column <= row
    return mask & (column > row - window) if window > 0 else mask


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """q [t, h, d], k and v [s, hk, d] -> [t, h, d]; the queries are the last t of the s positions."""
    t, h, s = q.shape[0], q.shape[1], k.shape[0]
    if t == 1:
        return attend_one(q, k, v, scale) if not 0 < window < s else attend_one(q, k[-window:], v[-window:], scale)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
        attn_mask=_causal_mask(t, s, window, q.device), scale=scale, enable_gqa=h != k.shape[1],
    )  # fmt: skip
    return out[0].transpose(0, 1).contiguous()


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query [1, h, d] over all keys [s, hk, d], in fp32: two products, on a CPU twice as fast as torch's kernel."""
    heads, kv_heads, d = q.shape[1], k.shape[1], q.shape[2]
    grouped = q.reshape(kv_heads, heads // kv_heads, d).float() * scale
    weights = torch.softmax(grouped @ k.float().permute(1, 2, 0), dim=-1)
    return (weights @ v.float().transpose(0, 1)).reshape(1, heads, v.shape[2]).to(q.dtype)


def _fake_attention(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


@define_op(fake=_fake_attention)
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> Tensor:
    """Causal attention of one sequence over itself.

    Args:
        q: [tokens, heads, d]. k, v: [tokens, kv_heads, d], heads a multiple of kv_heads (GQA, head h reads
            kv head ``h // (heads / kv_heads)``). scale: multiplies q.k before the softmax.
        window: 0 = all earlier tokens; w > 0 = the last w tokens, the own one included (sliding window).

    Returns: [tokens, heads, d] in q's dtype.
    """
    return attend(q, k, v, scale, window)


def _fake_insert_kv(k: Tensor, kv_cache: Tensor, layout: str) -> None:
    cache_pages.check_cache(kv_cache, layout, k.shape[-1], sides=2)


@define_op(fake=_fake_insert_kv, mutates=("kv_cache",))
def insert_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, layout: str = "linear") -> None:
    """Write k and v [tokens, kv_heads, d] into the paged cache.

    kv_cache: in the layout ``layout`` of ``core.formats.cache_pages``: "linear" = [pages, kv_heads, page_size, 2 d], K
    then V in the last dimension, float or float8_e4m3fn (unit scale, saturating); NVFP4 = uint8 [pages, 2 kv_heads,
    page_size, d/2 + d/16]. slot_mapping: int64 [tokens], slot = page * page_size + offset; negative ones are skipped.
    Raises ValueError if the cache is not as the layout says.
    """
    cache_pages.insert_kv(kv_cache, layout, k, v, slot_mapping)


def _fake_paged_attention(q: Tensor, kv_cache: Tensor, layout: str) -> Tensor:
    cache_pages.check_cache(kv_cache, layout, q.shape[-1], sides=2)
    return q.new_empty(q.shape)


@define_op(fake=_fake_paged_attention)
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    layout: str = "linear",
) -> Tensor:
    """Causal attention of a batch of sequences over their pages of the cache.

    Args:
        q: [tokens, heads, d], sequences one after the other. kv_cache, layout: as in ``insert_kv``, new tokens already
            in it; fp8 and NVFP4 rows are decoded exactly.
        block_table: int32 [batch, max_blocks], page of each block of a sequence (those past its length are never read).
        seq_lens: int32 [batch], length with the new tokens. query_start: int32 [batch + 1], prefix sums of new tokens;
            the new tokens of a sequence are its last ones. seq_len 0 gives zeros.
        scale, window: as in ``attention``.

    Returns: [tokens, heads, d] in q's dtype.
    """
    cache_pages.check_cache(kv_cache, layout, q.shape[-1], sides=2)
    page_size = kv_cache.shape[2]
    out = torch.zeros_like(q)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for b, length in enumerate(lengths):
        begin, end = starts[b], starts[b + 1]
        if begin == end or length <= 0:
            continue
        pages = block_table[b, : -(-length // page_size)].long()
        k, v = (rows[:length].to(q.dtype) for rows in cache_pages.read_kv(kv_cache, layout, pages))
        out[begin:end] = attend(q[begin:end], k, v, scale, window)
    return out


def _fake_gather_last(x: Tensor, query_start: Tensor) -> Tensor:
    return x.new_empty((query_start.shape[0] - 1, *x.shape[1:]))


@define_op(fake=_fake_gather_last)
def gather_last(x: Tensor, query_start: Tensor) -> Tensor:
    """Rows of the last new token of every sequence: x [tokens, ...], query_start int32 [batch + 1] -> [batch, ...]."""
    return x[(query_start[1:] - 1).long()]
