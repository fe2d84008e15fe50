"""Paged attention: split-K decode (one new token a sequence) and variable-length causal prefill."""

from __future__ import annotations

import math
from functools import partial

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Parameter, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.cache_nvfp4 import (
    cache_intrinsics,
    cache_label,
    count_kv_heads,
    decoded_factor,
    is_nvfp4,
    refuse_nvfp4,
)
from mmcompile.targets._kernels.common import (
    FLOATS,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    short_dtype,
    symbol_parameters,
)

CACHE_DTYPES = (*FLOATS, "float8_e4m3fn")
MAX_SPLITS = 32
SPLIT_TOKENS = (4, 16, 64)


@triton.jit
def load_page_rows(cache, block_table, position, end, head, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
                   D_BLOCK: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
                   ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, dtype: tl.constexpr):
    """Rows at ``position`` [n] of a sequence -> dtype [n, D_BLOCK]; those from ``end`` on are 0 and not read.

    SIDE: 0 = the first HEAD_DIM elements of a row (keys), 1 = the next ones (values).
    """
    width = tl.arange(0, D_BLOCK)
    inside = position < end
    page = tl.load(block_table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    row = page * PAGE_STRIDE + head * HEAD_STRIDE + (position % PAGE_SIZE) * ROW_STRIDE
    mask = inside[:, None] & (width < HEAD_DIM)[None, :]
    return tl.load(cache + row[:, None] + (width + SIDE * HEAD_DIM)[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def update_softmax(scores, values, maximum, total, accumulator):
    """One online-softmax step in base 2: scores fp32 [m, n] (-inf = masked), values [n, d]; returns the
    new state."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    anchor = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(maximum - anchor)
    total = total * decay + tl.sum(weights, axis=1)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision="ieee")
    return new_maximum, total, accumulator


@triton.jit
def tile_decode_split(sequence, kv_head, split, q, kv_cache, block_table, table_stride, seq_lens, result,
                      partial, stats, Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr,
                      PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                      PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                      GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                      N_BLOCK: tl.constexpr, SPLITS: tl.constexpr, SCALE_LOG2: tl.constexpr,
                      V_SCALE: tl.constexpr, WINDOW: tl.constexpr):
    """Attention of one sequence's new token, the heads of one KV head, over one of SPLITS contiguous
    chunks of keys.

    With SPLITS == 1 the rows go to ``result``; else the unnormalised rows to ``partial`` [batch, heads,
    SPLITS, d] and (maximum in base 2, total weight) to ``stats`` [batch, heads, SPLITS, 2]; an empty chunk
    writes (-inf, 0).
    """
    length = tl.load(seq_lens + sequence)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    chunk = tl.cdiv(tl.cdiv(length - begin, N_BLOCK), SPLITS) * N_BLOCK
    first = begin + split * chunk
    last = tl.minimum(first + chunk, length)
    member = tl.arange(0, GROUP_BLOCK)
    width = tl.arange(0, D_BLOCK)
    in_group, in_width = member < GROUP, width < HEAD_DIM
    head = kv_head * GROUP + member
    q_rows = q + sequence.to(tl.int64) * Q_STRIDE + head[:, None] * Q_HEAD_STRIDE
    query = tl.load(q_rows + width[None, :], mask=in_group[:, None] & in_width[None, :], other=0.0)
    maximum = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    accumulator = tl.zeros([GROUP_BLOCK, D_BLOCK], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_stride
    for start in range(first, last, N_BLOCK):
        position = start + tl.arange(0, N_BLOCK)
        keys = load_page_rows(kv_cache, table, position, last, kv_head, 0, HEAD_DIM, D_BLOCK, PAGE_STRIDE,
                              HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE, query.dtype)
        values = load_page_rows(kv_cache, table, position, last, kv_head, 1, HEAD_DIM, D_BLOCK, PAGE_STRIDE,
                                HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE, query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE_LOG2
        scores = tl.where((position < last)[None, :], scores, float("-inf"))
        maximum, total, accumulator = update_softmax(scores, values, maximum, total, accumulator)
    row = sequence.to(tl.int64) * KV_HEADS * GROUP + head
    accumulator = accumulator * V_SCALE
    if SPLITS == 1:
        accumulator = accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(result + row[:, None] * HEAD_DIM + width[None, :], accumulator.to(result.dtype.element_ty),
                 mask=in_group[:, None] & in_width[None, :])
    else:
        row = row * SPLITS + split
        tl.store(stats + row * 2, maximum, mask=in_group)
        tl.store(stats + row * 2 + 1, total, mask=in_group)
        if first < last:
            tl.store(partial + row[:, None] * HEAD_DIM + width[None, :], accumulator,
                     mask=in_group[:, None] & in_width[None, :])


@triton.jit
def tile_combine_splits(row, partial, stats, result, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                        SPLITS: tl.constexpr):
    """Merge the chunks of one (sequence, head) ``row`` in a fixed order; a row without keys gives zeros."""
    split = row.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)
    width = tl.arange(0, D_BLOCK)
    maximum = tl.load(stats + split * 2)
    total = tl.load(stats + split * 2 + 1)
    overall = tl.max(maximum, axis=0)
    weight = tl.where(total > 0.0, tl.exp2(maximum - tl.where(total > 0.0, overall, 0.0)), 0.0)
    rows = tl.load(partial + split[:, None] * HEAD_DIM + width[None, :],
                   mask=(total > 0.0)[:, None] & (width < HEAD_DIM)[None, :], other=0.0)
    mass = tl.sum(weight * total, axis=0)
    merged = tl.sum(rows * weight[:, None], axis=0) / tl.where(mass > 0.0, mass, 1.0)
    tl.store(result + row.to(tl.int64) * HEAD_DIM + width, merged.to(result.dtype.element_ty), mask=width < HEAD_DIM)


@triton.jit
def find_sequence(index, query_start, batch, M_BLOCK: tl.constexpr):
    """The sequence that owns query block ``index`` where sequence b's blocks begin at ``query_start[b] //
    M_BLOCK + b``."""
    low, high = 0, batch
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // M_BLOCK + middle <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def tile_prefill(index, head, q, kv_cache, block_table, table_stride, seq_lens, query_start, batch, result,
                 Q_STRIDE: tl.constexpr, Q_HEAD_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                 HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                 HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                 M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, SCALE_LOG2: tl.constexpr,
                 V_SCALE: tl.constexpr, WINDOW: tl.constexpr):
    """Causal attention of up to M_BLOCK consecutive new tokens of one sequence, one query head.

    ``index`` runs over ``tokens // M_BLOCK + batch`` block slots (see ``find_sequence``); slots without
    rows write nothing.
    """
    sequence = find_sequence(index, query_start, batch, M_BLOCK)
    begin = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - begin
    length = tl.load(seq_lens + sequence)
    local = (index - (begin // M_BLOCK + sequence)) * M_BLOCK + tl.arange(0, M_BLOCK)
    first_row = (index - (begin // M_BLOCK + sequence)) * M_BLOCK
    width = tl.arange(0, D_BLOCK)
    in_rows, in_width = local < queries, width < HEAD_DIM
    row = (begin + local).to(tl.int64)
    query = tl.load(q + row[:, None] * Q_STRIDE + head * Q_HEAD_STRIDE + width[None, :],
                    mask=in_rows[:, None] & in_width[None, :], other=0.0)
    offset = length - queries
    last = tl.minimum(length, offset + first_row + M_BLOCK)
    last = tl.where(first_row < queries, last, 0)
    first = tl.maximum(offset + first_row - WINDOW + 1, 0) // N_BLOCK * N_BLOCK if WINDOW > 0 else 0
    maximum = tl.full([M_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([M_BLOCK], tl.float32)
    accumulator = tl.zeros([M_BLOCK, D_BLOCK], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_stride
    kv_head = head // GROUP
    for start in range(first, last, N_BLOCK):
        position = start + tl.arange(0, N_BLOCK)
        keys = load_page_rows(kv_cache, table, position, last, kv_head, 0, HEAD_DIM, D_BLOCK, PAGE_STRIDE,
                              HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE, query.dtype)
        values = load_page_rows(kv_cache, table, position, last, kv_head, 1, HEAD_DIM, D_BLOCK, PAGE_STRIDE,
                                HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE, query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE_LOG2
        seen = (position[None, :] <= offset + local[:, None]) & (position < last)[None, :]
        if WINDOW > 0:
            seen = seen & (position[None, :] > offset + local[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        maximum, total, accumulator = update_softmax(scores, values, maximum, total, accumulator)
    accumulator = accumulator * V_SCALE / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(result + (row[:, None] * HEADS + head) * HEAD_DIM + width[None, :],
             accumulator.to(result.dtype.element_ty), mask=in_rows[:, None] & in_width[None, :])


_PARTIALS = (Parameter("partial", "*fp32", "scratch:partial"), Parameter("stats", "*fp32", "scratch:stats"))
_CACHE_ARGUMENTS = "Q_STRIDE, Q_HEAD_STRIDE, PAGE_STRIDE, HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE"


def _refuse(phase: str, call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    q, cache, table = need(call, "q"), need(call, "kv_cache"), need(call, "block_table")
    if call.attributes.get("phase") != phase:
        return f"it serves the {phase} phase, the call is for {call.attributes.get('phase')!r}"
    if q.dtype not in FLOATS:
        return f"q is {q.dtype}, not one of {', '.join(FLOATS)}"
    if cache.dtype not in CACHE_DTYPES and not is_nvfp4(call, "kv_cache"):
        return f"kv_cache is {cache.dtype}, not one of {', '.join(CACHE_DTYPES)}, or uint8 for NVFP4"
    if not all(isinstance(n, int) for n in (*q.shape[1:], *q.strides, *cache.shape[1:], *cache.strides)):
        return "heads, head_dim, page_size and the strides of q and kv_cache must be numbers"
    if q.strides[2] != 1 or cache.strides[3] != 1 or table.strides[1] != 1:
        return "the last strides of q, kv_cache and block_table must be 1"
    if int(cache.shape[2]) < 8:
        return f"page_size is {cache.shape[2]}, below 8"
    if int(q.shape[2]) > 256:
        return f"head_dim is {q.shape[2]}, above 256"
    if any(need(call, name).dtype != "int32" for name in ("block_table", "seq_lens", "query_start")):
        return "block_table, seq_lens and query_start must be int32"
    return refuse_nvfp4(call, "kv_cache", int(q.shape[2])) if is_nvfp4(call, "kv_cache") else None


def _constants(call: OpCall) -> dict[str, int | float | str]:
    """Constexprs that both phases share."""
    q, cache = need(call, "q"), need(call, "kv_cache")
    head_dim = int(q.shape[2])
    return {
        "Q_STRIDE": q.strides[0], "Q_HEAD_STRIDE": q.strides[1],
        "PAGE_STRIDE": cache.strides[0], "HEAD_STRIDE": cache.strides[1], "ROW_STRIDE": cache.strides[2],
        "PAGE_SIZE": cache.shape[2], "GROUP": int(q.shape[1]) // count_kv_heads(call), "HEAD_DIM": head_dim,
        "D_BLOCK": max(16, next_power_of_two(head_dim)),
        "SCALE_LOG2": float(call.attributes["scale"]) * math.log2(math.e) * decoded_factor(call, "kv_cache"),
        "V_SCALE": decoded_factor(call, "kv_cache"),
        "WINDOW": max(int(call.attributes.get("window", 0)), 0),
    }


def _name_parts(call: OpCall) -> tuple[str | int, ...]:
    q, cache = need(call, "q"), need(call, "kv_cache")
    window = int(call.attributes.get("window", 0))
    return (short_dtype(q.dtype), f"kv{cache_label(call, 'kv_cache')}",
            f"{q.shape[1]}x{count_kv_heads(call)}x{q.shape[2]}", f"page{cache.shape[2]}",
            f"window{window}" if window > 0 else "")


def _key_block(call: OpCall) -> int:
    """Keys a step: 64 for 2-byte heads of up to 128, fewer for wider rows, so that the stages fit on chip."""
    q = need(call, "q")
    row_bytes = next_power_of_two(int(q.shape[2])) * (4 if q.dtype == "float32" else 2)
    return 64 if row_bytes <= 256 else 32


def count_splits(call: OpCall, spec: TargetSpec, tokens: int) -> int:
    """Chunks of keys a sequence, for up to ``tokens`` sequences: about two programs a unit at half that batch.

    A power of two from 2 to 32; on an H200 more chunks than that cost more in short chunks than they win.
    """
    programs = count_kv_heads(call) * max(tokens // 2, 1)
    wanted = 2 * max(spec.units, 1) // programs
    return min(MAX_SPLITS, 1 << max(wanted, 2).bit_length() - 1)


def _emit_split(call: OpCall, splits: int, architecture: Architecture) -> KernelSource:
    q, cache, table = need(call, "q"), need(call, "kv_cache"), need(call, "block_table")
    kv_heads, (result,) = count_kv_heads(call), call.results
    parameters = [pointer("q", q), pointer("kv_cache", cache), pointer("block_table", table),
                  *symbol_parameters(table.strides[0]), pointer("seq_lens", need(call, "seq_lens"))]
    if splits == 1:
        parameters.append(pointer("result", result))
        outputs = "result, None, None"
    else:
        parameters += _PARTIALS
        outputs = "None, partial, stats"
    constants = _constants(call)
    group_block = max(16, next_power_of_two(int(constants["GROUP"])))
    constants |= {"KV_HEADS": kv_heads, "GROUP_BLOCK": group_block, "N_BLOCK": _key_block(call), "SPLITS": splits}
    body = f"""
        tile_decode_split(tl.program_id(0), tl.program_id(1), tl.program_id(2), q, kv_cache, block_table,
                          {table.strides[0]}, seq_lens, {outputs}, {_CACHE_ARGUMENTS}, KV_HEADS, GROUP,
                          GROUP_BLOCK, HEAD_DIM, D_BLOCK, N_BLOCK, SPLITS, SCALE_LOG2, V_SCALE, WINDOW)
    """
    intrinsics, ledger = cache_intrinsics(call, "kv_cache", q.dtype, architecture)
    return emit_kernel(
        name=kernel_name("paged_attention_decode", *_name_parts(call), f"split{splits}"),
        title="Paged attention, decode: one chunk of keys of one sequence and KV head.",
        tiles=[tile_decode_split], constants=constants, parameters=parameters, body=body,
        grid=(str(q.shape[0]), str(kv_heads), str(splits)), num_warps=4, num_stages=3,
        intrinsics=intrinsics, ledger=ledger,
    )


def _emit_combine(call: OpCall, splits: int) -> KernelSource:
    q, (result,) = need(call, "q"), call.results
    heads, head_dim = int(q.shape[1]), int(q.shape[2])
    parameters = [*_PARTIALS, pointer("result", result)]
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "D_BLOCK": next_power_of_two(head_dim), "SPLITS": splits}
    body = """
        row = tl.program_id(0) * HEADS + tl.program_id(1)
        tile_combine_splits(row, partial, stats, result, HEAD_DIM, D_BLOCK, SPLITS)
    """
    return emit_kernel(
        name=kernel_name("paged_attention_combine", short_dtype(q.dtype), f"{heads}x{head_dim}", f"split{splits}"),
        title="Paged attention, decode: merge the chunks of one sequence and head.",
        tiles=[tile_combine_splits], constants=constants, parameters=parameters, body=body,
        grid=(str(q.shape[0]), str(heads), "1"), num_warps=1,
    )


def _emit_decode(
    tokens: int, call: OpCall, spec: TargetSpec, architecture: Architecture
) -> tuple[KernelSource, ...]:
    splits = count_splits(call, spec, tokens)
    return _emit_split(call, splits, architecture), _emit_combine(call, splits)


def _decode_scratch(tokens: int, call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    q, splits = need(call, "q"), count_splits(call, spec, tokens)
    rows = (q.shape[0], q.shape[1], splits)
    return Scratch("partial", (*rows, q.shape[2]), "float32"), Scratch("stats", (*rows, 2), "float32")


def _emit_decode_single(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    return (_emit_split(call, 1, architecture),)


def _emit_prefill(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    q, cache, table = need(call, "q"), need(call, "kv_cache"), need(call, "block_table")
    heads, (result,) = int(q.shape[1]), call.results
    query_block = 64 if q.dtype != "float32" and int(q.shape[2]) <= 128 else 32
    parameters = [pointer("q", q), pointer("kv_cache", cache), pointer("block_table", table),
                  *symbol_parameters("batch", table.strides[0]), pointer("seq_lens", need(call, "seq_lens")),
                  pointer("query_start", need(call, "query_start")), pointer("result", result)]
    constants = _constants(call) | {"HEADS": heads, "M_BLOCK": query_block, "N_BLOCK": _key_block(call)}
    body = f"""
        tile_prefill(tl.program_id(0), tl.program_id(1), q, kv_cache, block_table, {table.strides[0]},
                     seq_lens, query_start, batch, result, {_CACHE_ARGUMENTS}, HEADS, GROUP, HEAD_DIM,
                     D_BLOCK, M_BLOCK, N_BLOCK, SCALE_LOG2, V_SCALE, WINDOW)
    """
    intrinsics, ledger = cache_intrinsics(call, "kv_cache", q.dtype, architecture)
    return (emit_kernel(
        name=kernel_name("paged_attention_prefill", *_name_parts(call)),
        title="Paged attention, prefill: one block of new tokens of one sequence, one head.",
        tiles=[tile_prefill], constants=constants, parameters=parameters, body=body,
        grid=(f"cdiv({q.shape[0]}, {query_block}) + batch", str(heads), "1"), num_warps=4, num_stages=2,
        intrinsics=intrinsics, ledger=ledger,
    ),)


TEMPLATES = (
    *(
        KernelTemplate(f"paged_attention_decode_split{m}", "paged_attention", partial(_refuse, "decode"),
                       partial(_emit_decode, m), partial(_decode_scratch, m), max_tokens=m)
        for m in SPLIT_TOKENS
    ),
    KernelTemplate("paged_attention_decode", "paged_attention", partial(_refuse, "decode"), _emit_decode_single),
    KernelTemplate("paged_attention_prefill", "paged_attention", partial(_refuse, "prefill"), _emit_prefill),
)
