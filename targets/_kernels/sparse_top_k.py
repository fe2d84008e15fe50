"""Selection of blocks: an exact top-k of scores, deterministic, by integers that hold score and block id."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand, Parameter, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    ceil_div,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    symbol_parameters,
)
from mmcompile.targets._kernels.sampling import pack_candidates, unpack_index

CHUNK = 256
MERGED = 256
SPLIT_TOKENS = 64
LARGEST_TOP_K = 128


@triton.jit
def load_ranked(scores, start, own, blocks, LOCAL: tl.constexpr, INITIAL: tl.constexpr, BLOCK: tl.constexpr):
    """int64 keys of BLOCK blocks from ``start`` on, larger = chosen earlier; the lowest int64 for later blocks.

    NaN and minus infinity rank as the lowest finite score, forced blocks above every score.
    """
    block = start + tl.arange(0, BLOCK)
    past = (block <= own) & (block < blocks)
    values = tl.load(scores + block, mask=past, other=0.0)
    bounded = tl.minimum(tl.maximum(values, -3.4028234663852886e38), 3.4028234663852886e38)
    values = tl.where(values != values, -3.4028234663852886e38, bounded)
    forced = (block > own - LOCAL) | (block < INITIAL)
    keys = pack_candidates(tl.where(forced, float("inf"), values), block)
    return tl.where(past, keys, -0x8000000000000000)


@triton.jit
def store_chosen(best, result, TOP_K: tl.constexpr, K: tl.constexpr):
    """Write the ids of the keys ``best`` [K], which fall, in ascending order, then -1."""
    rank = tl.arange(0, K)
    chosen = (best != -0x8000000000000000) & (rank < TOP_K)
    ids = tl.sort(tl.where(chosen, unpack_index(best), 0x7FFFFFFF))
    tl.store(result + rank, tl.where(ids == 0x7FFFFFFF, -1, ids), mask=rank < TOP_K)


@triton.jit
def find_own(token, positions, BLOCK_SIZE: tl.constexpr):
    """The block of the query ``token``; -1 for a row of padding, which has a negative position."""
    position = tl.load(positions + token).to(tl.int32)
    return tl.where(position >= 0, position // BLOCK_SIZE, -1)


@triton.jit
def merge_best(best, keys, K: tl.constexpr):
    """The K largest of ``best`` [K] and ``keys`` [n >= K], falling."""
    return tl.topk(tl.reshape(tl.join(best, tl.topk(keys, K)), (2 * K,)), K)


@triton.jit
def tile_top_k(token, head, scores, positions, result, blocks, token_stride, head_stride, HEADS: tl.constexpr,
               BLOCK_SIZE: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, LOCAL: tl.constexpr,
               INITIAL: tl.constexpr, CHUNK: tl.constexpr):
    """The chosen blocks of one (token, head): CHUNK scores after the other.

    The first chunk goes through the loop too: one selection in the text compiles in half the time of two.
    """
    own = find_own(token, positions, BLOCK_SIZE)
    row = scores + token.to(tl.int64) * token_stride + head * head_stride
    best = tl.full([K], -0x8000000000000000, tl.int64)
    for start in range(0, own + 1, CHUNK):
        best = merge_best(best, load_ranked(row, start, own, blocks, LOCAL, INITIAL, CHUNK), K)
    store_chosen(best, result + (token.to(tl.int64) * HEADS + head) * TOP_K, TOP_K, K)


@triton.jit
def tile_top_k_chunk(token, head, chunk, scores, positions, candidates, result, blocks, token_stride, head_stride,
                     HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr,
                     LOCAL: tl.constexpr, INITIAL: tl.constexpr, CHUNK: tl.constexpr):
    """The K best keys of one chunk of scores; where there is only one chunk, the result itself."""
    own = find_own(token, positions, BLOCK_SIZE)
    line = token.to(tl.int64) * HEADS + head
    if (chunk * CHUNK <= own) | (chunk == 0):
        row = scores + token.to(tl.int64) * token_stride + head * head_stride
        best = tl.topk(load_ranked(row, chunk * CHUNK, own, blocks, LOCAL, INITIAL, CHUNK), K)
        if own < CHUNK:
            store_chosen(best, result + line * TOP_K, TOP_K, K)
        else:
            place = candidates + (line * tl.cdiv(blocks, CHUNK) + chunk) * K
            tl.store(place + tl.arange(0, K), best)


@triton.jit
def tile_top_k_merge(token, head, positions, candidates, result, blocks, HEADS: tl.constexpr,
                     BLOCK_SIZE: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
                     MERGED: tl.constexpr):
    """The chosen blocks of one (token, head) from the best of its chunks, where there are several."""
    own = find_own(token, positions, BLOCK_SIZE)
    if own >= CHUNK:
        line = token.to(tl.int64) * HEADS + head
        row = candidates + line * tl.cdiv(blocks, CHUNK) * K
        count = tl.cdiv(tl.minimum(own + 1, blocks), CHUNK) * K
        best = tl.full([K], -0x8000000000000000, tl.int64)
        for start in range(0, count, MERGED):
            place = start + tl.arange(0, MERGED)
            best = merge_best(best, tl.load(row + place, mask=place < count, other=-0x8000000000000000), K)
        store_chosen(best, result + line * TOP_K, TOP_K, K)


def _refuse(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    scores, positions, top_k = need(call, "scores"), need(call, "positions"), int(call.attributes["top_k"])
    if scores.dtype != "float32" or scores.strides[2] != 1 or not isinstance(scores.shape[1], int):
        return "scores must be fp32 [tokens, heads, blocks] with a fixed number of heads and a last stride of 1"
    if positions.dtype not in ("int32", "int64") or positions.strides[0] != 1:
        return "positions must be contiguous int32 or int64 [tokens]"
    return None if top_k <= LARGEST_TOP_K else f"top_k is {top_k}, above {LARGEST_TOP_K}"


def _constants(call: OpCall) -> dict[str, int | float | bool | str]:
    attributes, top_k = call.attributes, int(call.attributes["top_k"])
    return {
        "HEADS": int(need(call, "scores").shape[1]), "BLOCK_SIZE": int(attributes["block_size"]), "TOP_K": top_k,
        "K": max(2, next_power_of_two(top_k)), "LOCAL": int(attributes.get("local_blocks", 1)),
        "INITIAL": int(attributes.get("initial_blocks", 0)), "CHUNK": CHUNK,
    }


def _name(call: OpCall, what: str) -> str:
    constants = _constants(call)
    parts = [constants[key] for key in ("HEADS", "BLOCK_SIZE", "TOP_K", "LOCAL", "INITIAL")]
    return kernel_name(f"block_top_k{what}", "x".join(map(str, parts)))


def _row_arguments(scores: Operand) -> tuple[str, list[Parameter]]:
    """The text of (blocks, token stride, head stride) and the symbols in it."""
    sizes = (scores.shape[2], scores.strides[0], scores.strides[1])
    return ", ".join(map(str, sizes)), symbol_parameters(*sizes)


def _emit(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    scores, (result,), constants = need(call, "scores"), call.results, _constants(call)
    sizes, symbols = _row_arguments(scores)
    return (emit_kernel(
        name=_name(call, ""), title="The chosen blocks of one query and index head.", tiles=[tile_top_k],
        constants=constants,
        parameters=[pointer("scores", scores), pointer("positions", need(call, "positions")),
                    pointer("result", result), *symbols],
        body=f"""
            tile_top_k(tl.program_id(0), tl.program_id(1), scores, positions, result, {sizes}, {", ".join(constants)})
        """,
        grid=(str(scores.shape[0]), str(scores.shape[1]), "1"), num_warps=4, early=architecture,
    ),)


def _emit_split(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    scores, (result,), constants = need(call, "scores"), call.results, _constants(call)
    sizes, symbols = _row_arguments(scores)
    positions = pointer("positions", need(call, "positions"))
    candidates = Parameter("candidates", "*i64", "scratch:candidates")
    rows = (str(scores.shape[0]), str(scores.shape[1]))
    chunk = emit_kernel(
        name=_name(call, "_chunk"), title="The best blocks of one chunk of scores of one query and index head.",
        tiles=[tile_top_k_chunk], constants=constants,
        parameters=[pointer("scores", scores), positions, candidates, pointer("result", result), *symbols],
        body=f"""
            tile_top_k_chunk(tl.program_id(0), tl.program_id(1), tl.program_id(2), scores, positions, candidates,
                             result, {sizes}, {", ".join(constants)})
        """,
        grid=(*rows, str(_count_chunks(scores))), num_warps=4, early=architecture,
    )
    kept = {key: value for key, value in constants.items() if key not in ("LOCAL", "INITIAL")} | {"MERGED": MERGED}
    merge = emit_kernel(
        name=_name(call, "_merge"), title="The chosen blocks of one query and index head from the best of its chunks.",
        tiles=[tile_top_k_merge], constants=kept,
        parameters=[positions, candidates, pointer("result", result), *symbol_parameters(scores.shape[2])],
        body=f"""
            tile_top_k_merge(tl.program_id(0), tl.program_id(1), positions, candidates, result, {scores.shape[2]},
                             {", ".join(kept)})
        """,
        grid=(*rows, "1"), num_warps=4, early=architecture,
    )
    return chunk, merge


def _count_chunks(scores: Operand) -> int | str:
    blocks = scores.shape[2]
    return ceil_div(blocks, CHUNK) if isinstance(blocks, int) else f"cdiv({blocks}, {CHUNK})"


def _split_scratch(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    scores = need(call, "scores")
    shape = (scores.shape[0], scores.shape[1], _count_chunks(scores), int(_constants(call)["K"]))
    return (Scratch("candidates", shape, "int64"),)


TEMPLATES = (
    KernelTemplate("block_top_k_split", "block_top_k", _refuse, _emit_split, _split_scratch, max_tokens=SPLIT_TOKENS),
    KernelTemplate("block_top_k", "block_top_k", _refuse, _emit),
)
