"""What the kernels of block-sparse attention share: who owns a token, and the refusals of paged operands."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import OpCall
from mmcompile.core.spec import TargetSpec
from mmcompile.targets._kernels.cache_nvfp4 import is_nvfp4, refuse_nvfp4
from mmcompile.targets._kernels.common import FLOATS, need

CACHE_DTYPES = (*FLOATS, "float8_e4m3fn")
LARGEST_PAGE = 256
LARGEST_HEAD_DIM = 256


@triton.jit
def find_owner(token, query_start, batch, BLOCK: tl.constexpr):
    """The sequence whose new tokens hold ``token``; ``batch`` if it is behind those of every sequence.

    Counts the sequences that end before it, BLOCK with one load, so that no load waits for another.
    """
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch, BLOCK):
        index = start + tl.arange(0, BLOCK)
        end = tl.load(query_start + 1 + index, mask=index < batch, other=0x7FFFFFFF)
        count += (end <= token).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def load_span(sequence, query_start, seq_lens, batch, tokens):
    """(first token, new tokens, length) of ``sequence``; number ``batch`` stands for the rows that nobody owns."""
    owned = sequence < batch
    begin = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1, mask=owned, other=0)
    length = tl.load(seq_lens + sequence, mask=owned, other=0)
    return begin, tl.where(owned, end, tokens) - begin, length


@triton.jit
def load_page_tile(cache, page, head, SIDE: tl.constexpr, key, visible, HEAD_DIM: tl.constexpr,
                   D_BLOCK: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
                   ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, dtype: tl.constexpr):
    """Rows ``key`` [n] of one page and head -> dtype [n, D_BLOCK]; invisible rows are 0 and not read.

    SIDE: 0 and 2 = the first HEAD_DIM elements of a row (keys, index keys), 1 = the next ones (values).
    """
    width = tl.arange(0, D_BLOCK)
    rows = cache + page.to(tl.int64) * PAGE_STRIDE + head * HEAD_STRIDE + key[:, None] * ROW_STRIDE
    mask = visible[:, None] & (width < HEAD_DIM)[None, :]
    return tl.load(rows + (width + SIDE % 2 * HEAD_DIM)[None, :], mask=mask, other=0.0).to(dtype)


def count_stages(spec: TargetSpec, chain: int) -> int:
    """num_stages of a loop with ``chain`` loads that wait for one another, for two tiles of the last one under way.

    On NVIDIA Triton shares the stages out among the loads of a chain; on AMD every stage is a tile in local memory.
    """
    return 2 * chain + 1 if spec.backend == "cuda" else 3


def refuse_static(call: OpCall, *names: str) -> str | None:
    """A reason if an operand has a symbolic size or stride behind its first dimension, or a last stride that is not 1.

    The first stride may not be symbolic either.
    """
    for name in names:
        operand = need(call, name)
        if not all(isinstance(n, int) for n in (*operand.shape[1:], *operand.strides)):
            return f"the sizes and strides of {name} must be numbers"
        if operand.strides[-1] != 1:
            return f"the last stride of {name} is {operand.strides[-1]}, not 1"
    return None


def refuse_paged(call: OpCall, query: str, cache: str, page_dimension: int) -> str | None:
    """A reason if the query rows, the cache or the tables of a paged operation are not as the kernels read them.

    query: name of the operand [tokens, heads, d]; cache: of the pages, whose rows are counted by ``page_dimension``.
    """
    q, pages, table = need(call, query), need(call, cache), need(call, "block_table")
    if q.dtype not in FLOATS:
        return f"{query} is {q.dtype}, not one of {', '.join(FLOATS)}"
    if pages.dtype not in CACHE_DTYPES and not is_nvfp4(call, cache):
        return f"{cache} is {pages.dtype}, not one of {', '.join(CACHE_DTYPES)}, or uint8 for NVFP4"
    for name in ("block_table", "seq_lens", "query_start"):
        if need(call, name).dtype != "int32" or need(call, name).strides[-1] != 1:
            return f"{name} must be int32 with a last stride of 1"
    reason = refuse_static(call, query, cache)
    if reason is not None:
        return reason
    page_size, head_dim = int(pages.shape[page_dimension]), int(q.shape[2])
    if not 8 <= page_size <= LARGEST_PAGE:
        return f"page_size is {page_size}, not from 8 to {LARGEST_PAGE}"
    if head_dim > LARGEST_HEAD_DIM:
        return f"head_dim is {head_dim}, above {LARGEST_HEAD_DIM}"
    if len(table.shape) != 2:
        return "block_table must have two dimensions"
    return refuse_nvfp4(call, cache, head_dim) if is_nvfp4(call, cache) else None
