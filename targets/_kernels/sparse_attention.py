"""Block-sparse paged attention: token by token with split selections, or tiles of tokens over the union of theirs."""

from __future__ import annotations

import math
from functools import partial

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Parameter, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.attention import find_sequence, tile_combine_splits, update_softmax
from mmcompile.targets._kernels.cache_nvfp4 import cache_intrinsics, cache_label, count_kv_heads, decoded_factor
from mmcompile.targets._kernels.common import (
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    short_dtype,
    symbol_parameters,
)
from mmcompile.targets._kernels.sparse_common import (
    count_stages,
    find_owner,
    load_page_tile,
    load_span,
    refuse_paged,
    refuse_static,
)

SPLIT_TOKENS = (4, 16, 64)
OWNERS = 128
CHAIN = 3
"""Loads that wait for one another: block id, page number, rows."""
LARGEST_SELECTION = 64


@triton.jit
def tile_sparse_token(token, kv_head, split, q, kv_cache, blocks, block_table, table_stride, seq_lens, query_start,
                      batch, result, partial, stats, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                      PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                      PAGE_SIZE: tl.constexpr, CHOSEN_STRIDE: tl.constexpr, SELECTION_STRIDE: tl.constexpr,
                      COUNT: tl.constexpr, SHARING: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                      GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                      N_BLOCK: tl.constexpr, SPLITS: tl.constexpr, OWNERS: tl.constexpr, SCALE_LOG2: tl.constexpr,
                      V_SCALE: tl.constexpr):
    """Attention of one token, the heads of one KV head, over one of SPLITS equal parts of its COUNT chosen blocks.

    SHARING KV heads read one selection. With SPLITS == 1 the rows go to ``result``; else the unnormalised rows to
    ``partial`` [tokens, heads, SPLITS, d], and the maximum in base 2 and the total weight to ``stats`` [.., SPLITS, 2].
    """
    STEPS: tl.constexpr = (PAGE_SIZE + N_BLOCK - 1) // N_BLOCK
    PART: tl.constexpr = (COUNT + SPLITS - 1) // SPLITS
    sequence = find_owner(token, query_start, batch, OWNERS)
    owned = sequence < batch
    length = tl.load(seq_lens + sequence, mask=owned, other=0)
    end = tl.load(query_start + sequence + 1, mask=owned, other=0)
    own = tl.where(length > 0, length - end + token, -1)
    table = block_table + sequence.to(tl.int64) * table_stride
    chosen = blocks + token.to(tl.int64) * CHOSEN_STRIDE + kv_head // SHARING * SELECTION_STRIDE
    member, width = tl.arange(0, GROUP_BLOCK), tl.arange(0, D_BLOCK)
    in_group, in_width = member < GROUP, width < HEAD_DIM
    head = kv_head * GROUP + member
    query = tl.load(q + token.to(tl.int64) * Q_STRIDE + head[:, None] * Q_HEAD_STRIDE + width[None, :],
                    mask=in_group[:, None] & in_width[None, :], other=0.0)
    maximum = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    accumulator = tl.zeros([GROUP_BLOCK, D_BLOCK], tl.float32)
    for step in range(0, PART * STEPS):
        index = split * (PART * STEPS) + step
        place = index // STEPS
        block = tl.load(chosen + place, mask=place < COUNT, other=-1)
        used = (block >= 0) & (block * PAGE_SIZE <= own)
        page = tl.load(table + block, mask=used, other=0)
        key = index % STEPS * N_BLOCK + tl.arange(0, N_BLOCK)
        visible = key < tl.where(used, tl.minimum(own - block * PAGE_SIZE + 1, PAGE_SIZE), 0)
        keys = load_page_tile(kv_cache, page, kv_head, 0, key, visible, HEAD_DIM, D_BLOCK, PAGE_STRIDE, HEAD_STRIDE,
                              ROW_STRIDE, PAGE_SIZE, query.dtype)
        values = load_page_tile(kv_cache, page, kv_head, 1, key, visible, HEAD_DIM, D_BLOCK, PAGE_STRIDE, HEAD_STRIDE,
                                ROW_STRIDE, PAGE_SIZE, query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE_LOG2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        maximum, total, accumulator = update_softmax(scores, values, maximum, total, accumulator)
    row = token.to(tl.int64) * KV_HEADS * GROUP + head
    accumulator = accumulator * V_SCALE
    if SPLITS == 1:
        accumulator = accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(result + row[:, None] * HEAD_DIM + width[None, :], accumulator.to(result.dtype.element_ty),
                 mask=in_group[:, None] & in_width[None, :])
    else:
        row = row * SPLITS + split
        tl.store(stats + row * 2, maximum, mask=in_group)
        tl.store(stats + row * 2 + 1, total, mask=in_group)
        tl.store(partial + row[:, None] * HEAD_DIM + width[None, :], accumulator,
                 mask=in_group[:, None] & in_width[None, :])


@triton.jit
def load_chosen(rows, own, active, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, STRIDE: tl.constexpr,
                PAGE_SIZE: tl.constexpr):
    """Chosen ids of several tokens [t, COUNT_BLOCK]; the largest int32 for places that are unused or unseen."""
    place = tl.arange(0, COUNT_BLOCK)
    token = tl.arange(0, own.shape[0])
    ids = tl.load(rows + token[:, None] * STRIDE + place[None, :], mask=active[:, None] & (place < COUNT)[None, :],
                  other=-1)
    return tl.where((ids >= 0) & (ids * PAGE_SIZE <= own[:, None]), ids, 0x7FFFFFFF)


@triton.jit
def tile_sparse_tokens(index, kv_head, q, kv_cache, blocks, block_table, table_stride, seq_lens, query_start, batch,
                       tokens, result, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                       PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                       PAGE_SIZE: tl.constexpr, CHOSEN_STRIDE: tl.constexpr, SELECTION_STRIDE: tl.constexpr,
                       COUNT: tl.constexpr, SHARING: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                       GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                       N_BLOCK: tl.constexpr, COUNT_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
                       SCALE_LOG2: tl.constexpr, V_SCALE: tl.constexpr):
    """Attention of TOKENS consecutive new tokens of one sequence, the heads of one KV head, one row of the tile each.

    Walks over the union of the tokens' blocks in ascending order; a block's keys are read once for all of them, and
    masked for those that did not choose it. Slots ``index`` are as in ``find_sequence``.
    """
    sequence = find_sequence(index, query_start, batch + 1, TOKENS)
    begin, queries, length = load_span(sequence, query_start, seq_lens, batch, tokens)
    first = (index - (begin // TOKENS + sequence)) * TOKENS
    table = block_table + sequence.to(tl.int64) * table_stride
    local = first + tl.arange(0, TOKENS)
    own = tl.where((local < queries) & (length > 0), length - queries + local, -1)
    newest = tl.max(own, axis=0)
    rows = blocks + (begin + first).to(tl.int64) * CHOSEN_STRIDE + kv_head // SHARING * SELECTION_STRIDE
    ids = load_chosen(rows, own, local < queries, COUNT, COUNT_BLOCK, CHOSEN_STRIDE, PAGE_SIZE)
    row = tl.arange(0, TOKENS * GROUP_BLOCK)
    width = tl.arange(0, D_BLOCK)
    row_local, member = first + row // GROUP_BLOCK, row % GROUP_BLOCK
    row_own = length - queries + row_local
    active, in_width = (row_local < queries) & (member < GROUP), width < HEAD_DIM
    head = kv_head * GROUP + member
    token = (begin + row_local).to(tl.int64)
    query = tl.load(q + token[:, None] * Q_STRIDE + head[:, None] * Q_HEAD_STRIDE + width[None, :],
                    mask=active[:, None] & in_width[None, :], other=0.0)
    maximum = tl.full([TOKENS * GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * GROUP_BLOCK], tl.float32)
    accumulator = tl.zeros([TOKENS * GROUP_BLOCK, D_BLOCK], tl.float32)
    block = tl.min(tl.min(ids, axis=1), axis=0)
    while block < 0x7FFFFFFF:
        page = tl.load(table + block)
        chosen = tl.max((ids == block).to(tl.int32), axis=1)
        chosen = tl.reshape(tl.broadcast_to(chosen[:, None], (TOKENS, GROUP_BLOCK)), (TOKENS * GROUP_BLOCK,)) > 0
        for start in range(0, PAGE_SIZE, N_BLOCK):
            key = start + tl.arange(0, N_BLOCK)
            position = block * PAGE_SIZE + key
            visible = (key < PAGE_SIZE) & (position <= newest)
            keys = load_page_tile(kv_cache, page, kv_head, 0, key, visible, HEAD_DIM, D_BLOCK, PAGE_STRIDE,
                                  HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE, query.dtype)
            values = load_page_tile(kv_cache, page, kv_head, 1, key, visible, HEAD_DIM, D_BLOCK, PAGE_STRIDE,
                                    HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE, query.dtype)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE_LOG2
            seen = chosen[:, None] & visible[None, :] & (position[None, :] <= row_own[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            maximum, total, accumulator = update_softmax(scores, values, maximum, total, accumulator)
        block = tl.min(tl.min(tl.where(ids > block, ids, 0x7FFFFFFF), axis=1), axis=0)
    accumulator = accumulator * V_SCALE / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(result + (token * KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + width[None, :],
             accumulator.to(result.dtype.element_ty), mask=active[:, None] & in_width[None, :])


_PARTIALS = (Parameter("partial", "*fp32", "scratch:partial"), Parameter("stats", "*fp32", "scratch:stats"))


def _refuse(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    blocks = need(call, "blocks")
    if blocks.dtype != "int32":
        return f"blocks is {blocks.dtype}, not int32"
    reason = refuse_paged(call, "q", "kv_cache", 2) or refuse_static(call, "blocks")
    if reason is None and int(blocks.shape[2]) > LARGEST_SELECTION:
        return f"{blocks.shape[2]} blocks a selection, above {LARGEST_SELECTION}"
    return reason


def _refuse_phase(phase: str, call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    if call.attributes.get("phase", "decode") != phase:
        return f"for the {phase} phase"
    return _refuse(call, spec, architecture)


def _constants(call: OpCall) -> dict[str, int | float | bool | str]:
    """Constexprs that all kernels share, in the order of their parameters."""
    q, cache, blocks = need(call, "q"), need(call, "kv_cache"), need(call, "blocks")
    heads, head_dim, kv_heads = int(q.shape[1]), int(q.shape[2]), count_kv_heads(call)
    group = heads // kv_heads
    d_block = max(16, next_power_of_two(head_dim))
    keys = 64 if d_block * (4 if q.dtype == "float32" else 2) <= 256 else 32
    return {
        "Q_STRIDE": q.strides[0], "Q_HEAD_STRIDE": q.strides[1], "PAGE_STRIDE": cache.strides[0],
        "HEAD_STRIDE": cache.strides[1], "ROW_STRIDE": cache.strides[2], "PAGE_SIZE": int(cache.shape[2]),
        "CHOSEN_STRIDE": blocks.strides[0], "SELECTION_STRIDE": blocks.strides[1], "COUNT": int(blocks.shape[2]),
        "SHARING": kv_heads // int(blocks.shape[1]), "KV_HEADS": kv_heads, "GROUP": group,
        "GROUP_BLOCK": max(16, next_power_of_two(group)), "HEAD_DIM": head_dim, "D_BLOCK": d_block,
        "N_BLOCK": min(keys, max(16, next_power_of_two(int(cache.shape[2])))),
    }


def _scale(call: OpCall) -> dict[str, int | float | bool | str]:
    """What scores are multiplied by to be logarithms to base 2, and values: NVFP4 is decoded to a 256th."""
    factor = decoded_factor(call, "kv_cache")
    return {"SCALE_LOG2": float(call.attributes["scale"]) * math.log2(math.e) * factor, "V_SCALE": factor}


def _name(call: OpCall, kind: str, *parts: str) -> str:
    q, cache, blocks = need(call, "q"), need(call, "kv_cache"), need(call, "blocks")
    return kernel_name(f"block_sparse_attention_{kind}", short_dtype(q.dtype), f"kv{cache_label(call, 'kv_cache')}",
                       f"{q.shape[1]}x{count_kv_heads(call)}x{q.shape[2]}",
                       f"page{cache.shape[2]}x{blocks.shape[2]}", *parts)


def _inputs(call: OpCall) -> list[Parameter]:
    names = ("q", "kv_cache", "blocks", "block_table", "seq_lens", "query_start")
    return [pointer(name, need(call, name)) for name in names]


def count_splits(call: OpCall, spec: TargetSpec, tokens: int) -> int:
    """Parts of a selection, for up to ``tokens`` tokens: about two programs a unit at half that many tokens.

    A power of two from 2 to the number of chosen blocks rounded up to one.
    """
    programs = count_kv_heads(call) * max(tokens // 2, 1)
    wanted = 2 * max(spec.units, 1) // programs
    return max(2, min(next_power_of_two(int(need(call, "blocks").shape[2])), 1 << max(wanted, 2).bit_length() - 1))


def _emit_token(call: OpCall, splits: int, spec: TargetSpec, architecture: Architecture) -> KernelSource:
    q, table, (result,) = need(call, "q"), need(call, "block_table"), call.results
    constants = _constants(call) | {"SPLITS": splits, "OWNERS": OWNERS} | _scale(call)
    intrinsics, ledger = cache_intrinsics(call, "kv_cache", q.dtype, architecture)
    cache = need(call, "kv_cache")
    if cache.dtype == "float8_e4m3fn":  # as many bytes a step as with a two-byte cache
        constants["N_BLOCK"] = min(2 * int(constants["N_BLOCK"]), max(16, next_power_of_two(int(cache.shape[2]))))
    outputs = [pointer("result", result)] if splits == 1 else list(_PARTIALS)
    body = f"""
        tile_sparse_token(tl.program_id(0), tl.program_id(1), tl.program_id(2), q, kv_cache, blocks, block_table,
                          {table.strides[0]}, seq_lens, query_start, batch,
                          {"result, None, None" if splits == 1 else "None, partial, stats"}, {", ".join(constants)})
    """
    return emit_kernel(
        name=_name(call, "token", f"split{splits}"),
        title="Block-sparse attention: one part of the chosen blocks of one token and KV head.",
        tiles=[tile_sparse_token], constants=constants,
        parameters=[*_inputs(call), *outputs, *symbol_parameters("batch", table.strides[0])], body=body,
        grid=(str(q.shape[0]), str(constants["KV_HEADS"]), str(splits)), num_warps=4,
        num_stages=count_stages(spec, CHAIN), intrinsics=intrinsics, ledger=ledger,
    )


def _emit_combine(call: OpCall, splits: int) -> KernelSource:
    q, (result,) = need(call, "q"), call.results
    heads, head_dim = int(q.shape[1]), int(q.shape[2])
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "D_BLOCK": next_power_of_two(head_dim), "SPLITS": splits}
    return emit_kernel(
        name=kernel_name("block_sparse_attention_combine", short_dtype(q.dtype), f"{heads}x{head_dim}",
                         f"split{splits}"),
        title="Block-sparse attention: merge the parts of one token and head.",
        tiles=[tile_combine_splits], constants=constants, parameters=[*_PARTIALS, pointer("result", result)],
        body="""
            row = tl.program_id(0) * HEADS + tl.program_id(1)
            tile_combine_splits(row, partial, stats, result, HEAD_DIM, D_BLOCK, SPLITS)
        """,
        grid=(str(q.shape[0]), str(heads), "1"), num_warps=1,
    )


def _emit_split(tokens: int, call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    splits = count_splits(call, spec, tokens)
    return _emit_token(call, splits, spec, architecture), _emit_combine(call, splits)


def _split_scratch(tokens: int, call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    q, splits = need(call, "q"), count_splits(call, spec, tokens)
    rows = (q.shape[0], q.shape[1], splits)
    return Scratch("partial", (*rows, q.shape[2]), "float32"), Scratch("stats", (*rows, 2), "float32")


def _emit_single(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    return (_emit_token(call, 1, spec, architecture),)


def _emit_tokens(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    q, table, (result,) = need(call, "q"), need(call, "block_table"), call.results
    constants = _constants(call)
    together = max(1, 64 // int(constants["GROUP_BLOCK"]))
    constants |= {"COUNT_BLOCK": next_power_of_two(int(constants["COUNT"])), "TOKENS": together} | _scale(call)
    body = f"""
        tile_sparse_tokens(tl.program_id(0), tl.program_id(1), q, kv_cache, blocks, block_table, {table.strides[0]},
                           seq_lens, query_start, batch, {q.shape[0]}, result, {", ".join(constants)})
    """
    intrinsics, ledger = cache_intrinsics(call, "kv_cache", q.dtype, architecture)
    symbols = symbol_parameters("batch", q.shape[0], table.strides[0])
    return (emit_kernel(
        name=_name(call, "tokens"),
        title=f"Block-sparse attention: {together} new tokens of one sequence, one KV head.",
        tiles=[tile_sparse_tokens], constants=constants,
        parameters=[*_inputs(call), pointer("result", result), *symbols],
        body=body, grid=(f"cdiv({q.shape[0]}, {together}) + batch + 1", str(constants["KV_HEADS"]), "1"), num_warps=4,
        num_stages=2, intrinsics=intrinsics, ledger=ledger,
    ),)


TEMPLATES = (
    *(
        KernelTemplate(f"paged_block_sparse_attention_split{m}", "paged_block_sparse_attention", _refuse,
                       partial(_emit_split, m), partial(_split_scratch, m), max_tokens=m)
        for m in SPLIT_TOKENS
    ),
    KernelTemplate("paged_block_sparse_attention_token", "paged_block_sparse_attention",
                   partial(_refuse_phase, "decode"), _emit_single),
    KernelTemplate("paged_block_sparse_attention_tokens", "paged_block_sparse_attention",
                   partial(_refuse_phase, "prefill"), _emit_tokens),
)
