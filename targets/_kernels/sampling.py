"""Choosing the next token: a chunked arg-max, then top-k, top-p and a seeded Gumbel draw where asked for."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Parameter, Scratch
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    FLOATS,
    ceil_div,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    row_stride,
    short_dtype,
)

CHUNK = 2048
SCAN_BLOCK = 8192


@triton.jit
def order_key(values):
    """int32 keys that order as the fp32 ``values`` do: both zeros equal, NaN above everything."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def order_value(key):
    """The fp32 value behind a key of ``order_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_candidates(values, index):
    """int64 whose maximum is the largest value, and of equal ones the lowest index."""
    return (order_key(values).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack_index(packed):
    """The index that ``pack_candidates`` put in, int32."""
    return (0x7FFFFFFF - (packed & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def tile_argmax_chunk(row, chunk, logits, candidates, STRIDE: tl.constexpr, VOCABULARY: tl.constexpr,
                      CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Best candidate of one chunk of one row of logits."""
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * STRIDE + index, mask=index < VOCABULARY, other=float("-inf"))
    packed = pack_candidates(values.to(tl.float32), tl.where(index < VOCABULARY, index, 0x7FFFFFFF))
    tl.store(candidates + row * CHUNKS + chunk, tl.max(packed, axis=0))


@triton.jit
def measure_kept(row_logits, threshold, top, sharpness, MASS: tl.constexpr, VOCABULARY: tl.constexpr,
                 BLOCK: tl.constexpr):
    """Count, or sum of ``exp2((logit - top) * sharpness)``, of the logits whose key is >= ``threshold``; fp32."""
    kept = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        index = start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + index, mask=index < VOCABULARY, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((values - top) * sharpness) if MASS else 1.0
        kept += tl.where((order_key(values) >= threshold) & (index < VOCABULARY), weight, 0.0)
    return tl.sum(kept, axis=0)


@triton.jit
def find_threshold(row_logits, floor, top, sharpness, wanted, MASS: tl.constexpr, VOCABULARY: tl.constexpr,
                   BLOCK: tl.constexpr):
    """Largest int32 key t such that the logits with a key >= max(t, floor) still measure ``wanted``, bit by bit.

    It is the key of a logit, or the lowest int32, which keeps everything from ``floor`` on, if none reaches that.
    """
    threshold = tl.full([], -0x80000000, tl.int64)
    step = tl.full([], 0x80000000, tl.int64)
    for _ in range(32):
        candidate = threshold + step
        limit = tl.maximum(candidate, floor.to(tl.int64)).to(tl.int32)
        reached = measure_kept(row_logits, limit, top, sharpness, MASS, VOCABULARY, BLOCK) >= wanted
        threshold = tl.where(reached, candidate, threshold)
        step = step >> 1
    return threshold.to(tl.int32)


@triton.jit
def uniform_noise(seed, position, lane):
    """``mmcompile``'s philox_uniform: the first word of Philox-4x32-10 of counter (lane, position, 0, 0), in (0, 1)."""
    zero = lane * 0
    word, _, _, _ = tl.philox(seed, lane, zero + position, zero, zero)
    return ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def draw_token(row_logits, temperature, threshold, seed, position, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Gumbel-max draw among the scores (logit over temperature) >= ``threshold``; returns the packed candidate."""
    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    heat = tl.zeros([BLOCK], tl.float32) + temperature
    for start in range(0, VOCABULARY, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < VOCABULARY
        values = tl.load(row_logits + index, mask=inside, other=float("-inf")).to(tl.float32)
        scores = tl.div_rn(values, heat)
        noisy = scores - tl.log(-tl.log(uniform_noise(seed, position, index)))
        noisy = tl.where(scores >= threshold, noisy, float("-inf"))
        best = tl.maximum(best, pack_candidates(noisy, tl.where(inside, index, 0x7FFFFFFF)))
    return tl.max(best, axis=0)


@triton.jit
def tile_choose_token(row, logits, candidates, temperature, top_k, top_p, seed, positions, result,
                      STRIDE: tl.constexpr, VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr,
                      CHUNKS_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """The token of one row: the best candidate if its temperature is 0, else a draw after top-k and top-p.

    Thresholds are found on the integer order of the logits, so they are exact, ties included; dividing by the
    temperature keeps the order.
    """
    chunk = tl.arange(0, CHUNKS_BLOCK)
    packed = tl.load(candidates + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=-0x8000000000000000)
    best = tl.max(packed, axis=0)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        row_logits = logits + row.to(tl.int64) * STRIDE
        top = tl.load(row_logits + unpack_index(best)).to(tl.float32)
        sharpness = 1.4426950408889634 / heat
        lowest = tl.full([], -0x80000000, tl.int64).to(tl.int32)
        key = lowest
        count = tl.minimum(tl.load(top_k + row), VOCABULARY)
        if count > 0:
            key = find_threshold(row_logits, key, top, sharpness, count.to(tl.float32), False, VOCABULARY, BLOCK)
        mass = tl.load(top_p + row)
        if mass < 1.0:
            mass *= measure_kept(row_logits, key, top, sharpness, True, VOCABULARY, BLOCK)
            nucleus = find_threshold(row_logits, key, top, sharpness, mass, True, VOCABULARY, BLOCK)
            key = tl.maximum(key, tl.minimum(nucleus, order_key(top)))
        threshold = tl.where(key == lowest, float("-inf"), tl.div_rn(order_value(key), heat))
        best = draw_token(row_logits, heat, threshold, tl.load(seed + row), tl.load(positions + row), VOCABULARY,
                          BLOCK)
    tl.store(result + row, unpack_index(best))


_DTYPES = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "seed": "int64", "positions": "int32"}


def _refuse(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    logits = need(call, "logits")
    if logits.dtype not in FLOATS:
        return f"logits is {logits.dtype}, not one of {', '.join(FLOATS)}"
    if not isinstance(logits.shape[1], int) or not isinstance(logits.strides[0], int) or logits.strides[1] != 1:
        return "logits must be rows with a static width and stride"
    if logits.shape[1] > 1 << 24:
        return f"a vocabulary of {logits.shape[1]} cannot be counted exactly in fp32"
    for name, dtype in _DTYPES.items():
        if need(call, name).dtype != dtype:
            return f"{name} is {need(call, name).dtype}, not {dtype}"
    return None


def _count_chunks(call: OpCall) -> int:
    return ceil_div(int(need(call, "logits").shape[1]), CHUNK)


def _scratch(call: OpCall, spec: TargetSpec) -> tuple[Scratch, ...]:
    return (Scratch("candidates", (need(call, "logits").shape[0], _count_chunks(call)), "int64"),)


def _emit(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    logits, chunks = need(call, "logits"), _count_chunks(call)
    vocabulary, rows = int(logits.shape[1]), str(logits.shape[0])
    shared = {"STRIDE": row_stride(logits), "VOCABULARY": vocabulary, "CHUNKS": chunks}
    candidates = Parameter("candidates", "*i64", "scratch:candidates")
    argmax = emit_kernel(
        name=kernel_name("sample_argmax", short_dtype(logits.dtype), vocabulary),
        title="Best logit of one chunk of one row.", tiles=[tile_argmax_chunk],
        constants=shared | {"BLOCK": CHUNK}, parameters=[pointer("logits", logits), candidates],
        body="tile_argmax_chunk(tl.program_id(0), tl.program_id(1), logits, candidates, STRIDE, VOCABULARY, "
             "CHUNKS, BLOCK)",
        grid=(rows, str(chunks), "1"), num_warps=4,
    )
    settings = [pointer(name, need(call, name)) for name in _DTYPES]
    block = min(SCAN_BLOCK, next_power_of_two(vocabulary))
    choose = emit_kernel(
        name=kernel_name("sample_choose", short_dtype(logits.dtype), vocabulary),
        title="The token of one row: greedy, or top-k, top-p and a Gumbel draw.", tiles=[tile_choose_token],
        constants=shared | {"CHUNKS_BLOCK": next_power_of_two(chunks), "BLOCK": block},
        parameters=[pointer("logits", logits), candidates, *settings, pointer("result", call.results[0])],
        body=f"tile_choose_token(tl.program_id(0), logits, candidates, {', '.join(_DTYPES)}, result,\n"
             "                  STRIDE, VOCABULARY, CHUNKS, CHUNKS_BLOCK, BLOCK)",
        grid=(rows, "1", "1"), num_warps=16,
    )
    return argmax, choose


TEMPLATES = (KernelTemplate("sample", "sample", _refuse, _emit, _scratch),)
