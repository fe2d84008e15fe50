"""Tuned index scores of block-sparse attention over plain pages of float8_e4m3fn, for Hopper: a page a warp.

The tile is that of sparse_index with these functions in place of its own.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from mmcompile.core.formats.cache_pages import PLAIN
from mmcompile.core.kernel import KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._kernels.common import need
from mmcompile.targets._tuned import sparse_plain_ptx as ptx
from mmcompile.targets._tuned.sparse_index import HEAD_DIM, PAGE_SIZE, Form, emit_scores, refuse_operands


@triton.jit
def start_page(pages, page, lane, register, PAGE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr):
    """The lane's first words of its page: 16 bytes of row lane // 4."""
    place = (lane // 4 * ROW_WORDS + lane % 4 * 4)[:, None] + register[None, :]
    return pages + page.to(tl.int64)[:, None] * PAGE_WORDS + place


@triton.jit
def score_pair(a, b, c, d, query, best, visible, GROUPS: tl.constexpr, PTX: tl.constexpr, CHOICE: tl.constexpr):
    """The largest scores after 16 more tokens: two loads of each of two tiles."""
    if GROUPS == 1:
        best = tl.inline_asm_elementwise(
            PTX[2 * CHOICE], PTX[2 * CHOICE + 1],
            [a, b, c, d, query[0], query[1], query[2], query[3], best, visible], tl.float32, True, 4)
    else:
        best = tl.inline_asm_elementwise(
            PTX[2 * CHOICE], PTX[2 * CHOICE + 1],
            [a, b, c, d, query[0], query[1], query[2], query[3], query[4], query[5], query[6], query[7], best, visible],
            tl.float32, True, 4)
    return best


@triton.jit
def score_page(words, query, visible, ROW_WORDS: tl.constexpr, GROUPS: tl.constexpr, HOLD: tl.constexpr,
               SCORE: tl.constexpr):
    """The lane's largest score of each column in the page at ``words``, of its first ``visible`` tokens."""
    best = tl.full(words.shape, float("-inf"), tl.float32)
    for part in tl.static_range(4):
        loads = ()
        for i in tl.static_range(8):
            place = (part * 4 + i // 2) * 8 * ROW_WORDS + i % 2 * 16
            loads = loads + (tl.load(words + place, eviction_policy="evict_first"),)
        tl.inline_asm_elementwise(HOLD[0], HOLD[1], [], tl.int32, False, 1)
        for pair in tl.static_range(2):
            best = score_pair(loads[4 * pair], loads[4 * pair + 1], loads[4 * pair + 2], loads[4 * pair + 3], query,
                              best, visible, GROUPS, SCORE, 2 * part + pair)
    return best


def _refuse(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    cache = need(call, "index_cache")
    if call.attributes.get("layout", PLAIN) != PLAIN or cache.dtype != "float8_e4m3fn":
        return f"the cache is not in the layout {PLAIN!r} with elements of float8_e4m3fn"
    reason = refuse_operands(call, architecture)
    if reason is None and tuple(cache.shape[1:]) != (PAGE_SIZE, HEAD_DIM):
        reason = f"pages of the cache are not {PAGE_SIZE} rows of {HEAD_DIM}"
    if reason is None and (cache.strides[2] != 1 or any(int(stride) % 16 for stride in cache.strides[:2])):
        reason = "rows of the cache do not begin at multiples of 16 bytes"
    return reason


FORM = Form("fp8", "plain pages of fp8", ptx.score_keys, 1.0, False, (start_page, score_page))
TEMPLATES = (
    KernelTemplate("paged_index_score_lanes_fp8", "paged_index_score", _refuse, partial(emit_scores, FORM),
                   grade="tuned"),
)  # fmt: skip
