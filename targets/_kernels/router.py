"""The expert router (scores, top-k, weights) and the clamped SwiGLU of its experts."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import (
    ceil_div,
    is_present,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    refuse_rows,
    row_stride,
    short_dtype,
)
from mmcompile.targets._kernels.sampling import pack_candidates, unpack_index

LARGEST_ROUTER = 1024
LARGEST_TOP_K = 32
MAX_BLOCK = 1024


@triton.jit
def tile_route_top_k(token, logits, bias, weights, experts, STRIDE: tl.constexpr, EXPERTS: tl.constexpr,
                     BLOCK: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
                     SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr):
    """The TOP_K experts of one token by biased score, lower ids first among equals, and their unbiased weights."""
    expert = tl.arange(0, BLOCK)
    valid = expert < EXPERTS
    logit = tl.load(logits + token.to(tl.int64) * STRIDE + expert, mask=valid, other=0.0).to(tl.float32)
    if SOFTMAX:
        logit = tl.where(valid, logit, -float("inf"))
        powers = tl.exp(logit - tl.max(logit, axis=0))
        scores = tl.div_rn(powers, tl.zeros([BLOCK], tl.float32) + tl.sum(powers, axis=0))
    else:
        scores = tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), 1.0 + tl.exp(-logit))
    ranking = scores
    if bias is not None:
        ranking += tl.load(bias + expert, mask=valid, other=0.0)
    keys = tl.where(valid, pack_candidates(ranking, expert), -0x8000000000000000)
    place = tl.arange(0, K)
    chosen = tl.zeros([K], tl.int32)
    kept = tl.zeros([K], tl.float32)
    for i in tl.static_range(TOP_K):
        best = unpack_index(tl.max(keys, axis=0))
        score = tl.sum(tl.where(expert == best, scores, 0.0), axis=0)
        chosen = tl.where(place == i, best, chosen)
        kept = tl.where(place == i, score, kept)
        keys = tl.where(expert == best, -0x8000000000000000, keys)
    if NORMALIZE:
        kept = tl.div_rn(kept, tl.zeros([K], tl.float32) + tl.sum(kept, axis=0))
    row = token.to(tl.int64) * TOP_K + place
    tl.store(weights + row, kept * SCALE, mask=place < TOP_K)
    tl.store(experts + row, chosen, mask=place < TOP_K)


@triton.jit
def swiglu_oai(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """``(u + 1) * (g * sigmoid(ALPHA * g))`` rounded to gate's dtype after every step, as mm::swiglu_oai.

    g is ``gate`` up to LIMIT, u is ``up`` within +-LIMIT; NaN stays NaN.
    """
    dtype: tl.constexpr = gate.dtype
    g, u = gate.to(tl.float32), up.to(tl.float32)
    g = tl.where(g > LIMIT, LIMIT, g).to(dtype).to(tl.float32)
    u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u)).to(dtype).to(tl.float32)
    steep = (g * ALPHA).to(dtype).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-steep))).to(dtype).to(tl.float32)
    gated = (g * opened).to(dtype).to(tl.float32)
    shifted = (u + 1.0).to(dtype).to(tl.float32)
    return (shifted * gated).to(dtype)


@triton.jit
def tile_swiglu_oai(row, block, gate, up, result, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
                    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The clamped SwiGLU of one block of columns of one row."""
    row = row.to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    g = tl.load(gate + row * GATE_STRIDE + column, mask=mask, other=0.0)
    u = tl.load(up + row * UP_STRIDE + column, mask=mask, other=0.0)
    tl.store(result + row * WIDTH + column, swiglu_oai(g, u, ALPHA, LIMIT), mask=mask)


def _refuse_route(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    reason = refuse_rows(call, "logits")
    if reason is not None:
        return reason
    experts, top_k = int(need(call, "logits").shape[1]), int(call.attributes["top_k"])
    if experts > LARGEST_ROUTER:
        return f"{experts} experts, above {LARGEST_ROUTER}"
    if not 1 <= top_k <= min(LARGEST_TOP_K, experts):
        return f"top_k is {top_k}, not from 1 to {min(LARGEST_TOP_K, experts)}"
    if call.attributes.get("scores", "sigmoid") not in ("sigmoid", "softmax"):
        return f"scores by {call.attributes['scores']}, not sigmoid or softmax"
    if is_present(call, "bias") and (need(call, "bias").dtype != "float32" or need(call, "bias").strides[0] != 1):
        return "bias must be contiguous fp32"
    return None


def _emit_route(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    logits, (weights, experts), top_k = need(call, "logits"), call.results, int(call.attributes["top_k"])
    count, biased = int(logits.shape[1]), is_present(call, "bias")
    constants = {"STRIDE": row_stride(logits), "EXPERTS": count, "BLOCK": next_power_of_two(count), "TOP_K": top_k,
                 "K": next_power_of_two(top_k), "SCALE": float(call.attributes["scale"]),
                 "SOFTMAX": call.attributes.get("scores", "sigmoid") == "softmax",
                 "NORMALIZE": bool(call.attributes.get("normalize", True))}
    given = [pointer("bias", need(call, "bias"))] if biased else []
    return (emit_kernel(
        name=kernel_name("route_top_k", short_dtype(logits.dtype), f"{top_k}of{count}", "bias" if biased else "",
                         "softmax" if constants["SOFTMAX"] else ""),
        title="The experts of one token and their weights.", tiles=[tile_route_top_k], constants=constants,
        parameters=[pointer("logits", logits), *given, pointer("weights", weights, "result"),
                    pointer("experts", experts, "result1")],
        body=f"""
            tile_route_top_k(tl.program_id(0), logits, {"bias" if biased else "None"}, weights, experts,
                             {", ".join(constants)})
        """,
        grid=(str(logits.shape[0]), "1", "1"), num_warps=1 if count <= 256 else 4,
    ),)


def _refuse_swiglu(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    if need(call, "gate").dtype != need(call, "up").dtype:
        return "gate and up must share one dtype"
    return refuse_rows(call, "gate", "up")


def _emit_swiglu(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    gate, up, (result,) = need(call, "gate"), need(call, "up"), call.results
    width = int(gate.shape[1])
    block = min(next_power_of_two(width), MAX_BLOCK)
    constants = {"GATE_STRIDE": row_stride(gate), "UP_STRIDE": row_stride(up), "WIDTH": width, "BLOCK": block,
                 "ALPHA": float(call.attributes["alpha"]), "LIMIT": float(call.attributes["limit"])}
    return (emit_kernel(
        name=kernel_name("swiglu_oai", short_dtype(gate.dtype), width),
        title="SwiGLU as gpt-oss clamps it.", tiles=[tile_swiglu_oai], constants=constants,
        parameters=[pointer("gate", gate), pointer("up", up), pointer("result", result)],
        body=f"tile_swiglu_oai(tl.program_id(0), tl.program_id(1), gate, up, result, {', '.join(constants)})",
        grid=(str(gate.shape[0]), str(ceil_div(width, block)), "1"), num_warps=4,
    ),)


TEMPLATES = (
    KernelTemplate("route_top_k", "route_top_k", _refuse_route, _emit_route),
    KernelTemplate("swiglu_oai", "swiglu_oai", _refuse_swiglu, _emit_swiglu),
)
