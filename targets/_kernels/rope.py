"""Rotary embedding, insertion into the paged cache, and both fused with the per-head norms of q and k."""

from __future__ import annotations

import triton
import triton.language as tl

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.attention import CACHE_DTYPES
from mmcompile.targets._kernels.cache_insert import insertion_functions, refuse_pages, tile_insert_kv_nvfp4
from mmcompile.targets._kernels.cache_nvfp4 import cache_label, is_nvfp4
from mmcompile.targets._kernels.common import (
    FLOATS,
    ceil_div,
    is_present,
    kernel_name,
    need,
    next_power_of_two,
    pointer,
    row_stride,
    short_dtype,
)
from mmcompile.targets._kernels.norm import scale_normed

ELEMENTS_PER_PROGRAM = 1024


@triton.jit
def to_cache(values, dtype: tl.constexpr):
    """Convert to the cache's dtype: float8_e4m3fn saturates at 448, NaN stays NaN."""
    if dtype == tl.float8e4nv:
        values = values.to(tl.float32)
        values = tl.where(values > 448.0, 448.0, tl.where(values < -448.0, -448.0, values))
    return values.to(dtype)


@triton.jit
def rotate_halves(first, second, cos, sin):
    """NeoX rotation of fp32 halves; every product and sum is rounded to cos's dtype."""
    dtype: tl.constexpr = cos.dtype
    wide_cos, wide_sin = cos.to(tl.float32), sin.to(tl.float32)
    first_cos = (first * wide_cos).to(dtype).to(tl.float32)
    second_sin = (second * wide_sin).to(dtype).to(tl.float32)
    second_cos = (second * wide_cos).to(dtype).to(tl.float32)
    first_sin = (first * wide_sin).to(dtype).to(tl.float32)
    return (first_cos - second_sin).to(dtype), (second_cos + first_sin).to(dtype)


@triton.jit
def scale_columns(normed, weight, column, valid, OFFSET: tl.constexpr, ROUND: tl.constexpr,
                  dtype: tl.constexpr):
    """Normalised heads fp32 [heads, n] times the norm's weight at ``column``, rounded to ``dtype``; fp32."""
    scale = tl.load(weight + column, mask=valid, other=0.0)[None, :]
    return scale_normed(normed, scale, dtype, OFFSET, ROUND).to(tl.float32)


@triton.jit
def rotate_heads(source, target, head, in_heads, cos_row, weight, SOURCE_STRIDE: tl.constexpr,
                 TARGET_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                 HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
                 ROUND: tl.constexpr, NORM: tl.constexpr):
    """Norm (if NORM) and rotate the heads [n] of one row; write them to ``target`` in its dtype.

    Pointers are those of the row; heads are SOURCE_STRIDE and TARGET_STRIDE elements apart. REST_BLOCK 0 =
    full rotary.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    column = tl.arange(0, HALF_BLOCK)
    valid = column < HALF
    mask = in_heads[:, None] & valid[None, :]
    rows = source + head[:, None] * SOURCE_STRIDE + column[None, :]
    cos = tl.load(cos_row + column, mask=valid, other=0.0).to(dtype)[None, :]
    sin = tl.load(cos_row + HALF + column, mask=valid, other=0.0).to(dtype)[None, :]
    first = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(rows + HALF, mask=mask, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        rest_column = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_valid = rest_column < HEAD_DIM
        rest_mask = in_heads[:, None] & rest_valid[None, :]
        rest_rows = source + head[:, None] * SOURCE_STRIDE + rest_column[None, :]
        rest = tl.load(rest_rows, mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
        first = scale_columns(first * inverse, weight, column, valid, OFFSET, ROUND, dtype)
        second = scale_columns(second * inverse, weight, HALF + column, valid, OFFSET, ROUND, dtype)
        if REST_BLOCK > 0:
            rest = scale_columns(rest * inverse, weight, rest_column, rest_valid, OFFSET, ROUND, dtype)
    first, second = rotate_halves(first, second, cos, sin)
    out = target + head[:, None] * TARGET_STRIDE + column[None, :]
    tl.store(out, to_cache(first, target.dtype.element_ty), mask=mask)
    tl.store(out + HALF, to_cache(second, target.dtype.element_ty), mask=mask)
    if REST_BLOCK > 0:
        tl.store(target + head[:, None] * TARGET_STRIDE + rest_column[None, :],
                 to_cache(rest.to(dtype), target.dtype.element_ty), mask=rest_mask)


@triton.jit
def copy_heads(source, target, head, in_heads, SOURCE_STRIDE: tl.constexpr, TARGET_STRIDE: tl.constexpr,
               HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr):
    """Copy the heads [n] of one row to ``target``, converted to its dtype."""
    column = tl.arange(0, D_BLOCK)
    mask = in_heads[:, None] & (column < HEAD_DIM)[None, :]
    values = tl.load(source + head[:, None] * SOURCE_STRIDE + column[None, :], mask=mask, other=0.0)
    values = to_cache(values, target.dtype.element_ty)
    tl.store(target + head[:, None] * TARGET_STRIDE + column[None, :], values, mask=mask)


@triton.jit
def tile_rope(token, block, x, positions, cos_sin, result, HEADS: tl.constexpr, X_STRIDE: tl.constexpr,
              X_HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, COS_STRIDE: tl.constexpr,
              HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
              HEAD_BLOCK: tl.constexpr):
    """Rotate block ``block`` of HEAD_BLOCK heads of one token; ``result`` is contiguous."""
    head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    token = token.to(tl.int64)
    cos_row = cos_sin + tl.load(positions + token).to(tl.int64) * COS_STRIDE
    rotate_heads(x + token * X_STRIDE, result + token * HEADS * HEAD_DIM, head, head < HEADS, cos_row, None,
                 X_HEAD_STRIDE, HEAD_DIM, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, 0.0, 0.0, False, False)


@triton.jit
def tile_insert_kv(token, block, k, v, kv_cache, slot_mapping, KV_HEADS: tl.constexpr, K_STRIDE: tl.constexpr,
                   K_HEAD_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
                   PAGE_STRIDE: tl.constexpr, CACHE_HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                   PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                   HEAD_BLOCK: tl.constexpr):
    """Write HEAD_BLOCK KV heads of one token to its slot; a negative slot is skipped."""
    token = token.to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    in_heads = head < tl.where(slot >= 0, KV_HEADS, 0)
    row = kv_cache + slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * ROW_STRIDE
    copy_heads(k + token * K_STRIDE, row, head, in_heads, K_HEAD_STRIDE, CACHE_HEAD_STRIDE, HEAD_DIM, D_BLOCK)
    copy_heads(v + token * V_STRIDE, row + HEAD_DIM, head, in_heads, V_HEAD_STRIDE, CACHE_HEAD_STRIDE,
               HEAD_DIM, D_BLOCK)


@triton.jit
def insert_heads(row, slot, kv_cache, head, cos_row, k_weight, KV_HEADS: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                 CACHE_HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                 HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
                 REST_BLOCK: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
                 K_NORM: tl.constexpr):
    """Heads [n] of k (normed, rotated) and of v of the row [k | v] into its slot; a negative slot is skipped."""
    in_heads = head < tl.where(slot >= 0, KV_HEADS, 0)
    target = kv_cache + slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * ROW_STRIDE
    rotate_heads(row, target, head, in_heads, cos_row, k_weight, HEAD_DIM, CACHE_HEAD_STRIDE, HEAD_DIM, HALF,
                 HALF_BLOCK, REST_BLOCK, EPS, OFFSET, ROUND, K_NORM)
    copy_heads(row + KV_HEADS * HEAD_DIM, target + HEAD_DIM, head, in_heads, HEAD_DIM, CACHE_HEAD_STRIDE, HEAD_DIM,
               D_BLOCK)


@triton.jit
def tile_qk_norm_rope_insert(token, block, qkv, q_weight, k_weight, positions, cos_sin, kv_cache,
                             slot_mapping, result, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                             QKV_STRIDE: tl.constexpr, COS_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
                             CACHE_HEAD_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
                             PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
                             HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
                             HEAD_BLOCK: tl.constexpr, Q_BLOCKS: tl.constexpr, EPS: tl.constexpr,
                             OFFSET: tl.constexpr, ROUND: tl.constexpr, Q_NORM: tl.constexpr,
                             K_NORM: tl.constexpr):
    """One token: query heads for ``block`` < Q_BLOCKS, key and value heads after that."""
    token = token.to(tl.int64)
    row = qkv + token * QKV_STRIDE
    cos_row = cos_sin + tl.load(positions + token).to(tl.int64) * COS_STRIDE
    if block < Q_BLOCKS:
        head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        rotate_heads(row, result + token * HEADS * HEAD_DIM, head, head < HEADS, cos_row, q_weight,
                     HEAD_DIM, HEAD_DIM, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, EPS, OFFSET, ROUND, Q_NORM)
    else:
        head = (block - Q_BLOCKS) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        insert_heads(row + HEADS * HEAD_DIM, slot, kv_cache, head, cos_row, k_weight, KV_HEADS, PAGE_STRIDE,
                     CACHE_HEAD_STRIDE, ROW_STRIDE, PAGE_SIZE, HEAD_DIM, D_BLOCK, HALF, HALF_BLOCK, REST_BLOCK, EPS,
                     OFFSET, ROUND, K_NORM)


def _refuse_numbers(call: OpCall, *names: str) -> str | None:
    for name in names:
        operand = need(call, name)
        sizes = (*operand.shape[1:], *operand.strides)
        if not all(isinstance(n, int) for n in sizes) or operand.strides[-1] != 1:
            return f"{name} must have a static row layout with a last stride of 1"
    return None


def _refuse_values(call: OpCall, *names: str) -> str | None:
    """A reason if the named value operands are not floats of one dtype in rows."""
    dtypes = {need(call, name).dtype for name in names}
    if len(dtypes) != 1 or not dtypes <= set(FLOATS):
        return f"{' and '.join(names)} must share one dtype of {', '.join(FLOATS)}"
    return _refuse_numbers(call, *names)


def _refuse_rotary(call: OpCall, head_dim: int) -> str | None:
    table, positions = need(call, "cos_sin"), need(call, "positions")
    if table.dtype not in FLOATS or int(table.shape[1]) % 2 or int(table.shape[1]) > head_dim:
        return "cos_sin must be a float table of an even width of at most head_dim"
    if positions.dtype not in ("int32", "int64") or len(positions.shape) != 1 or positions.strides[0] != 1:
        return "positions must be contiguous int32 or int64 [tokens]"
    return _refuse_numbers(call, "cos_sin")


def refuse_cache(call: OpCall, name: str = "kv_cache") -> str | None:
    """The reason why the cache called ``name`` or the slots of its rows cannot be served, or None."""
    cache, slots = need(call, name), need(call, "slot_mapping")
    if cache.dtype not in CACHE_DTYPES and not is_nvfp4(call, name):
        return f"{name} is {cache.dtype}, not one of {', '.join(CACHE_DTYPES)}, or uint8 for NVFP4"
    if slots.dtype not in ("int32", "int64") or slots.strides[0] != 1:
        return "slot_mapping must be contiguous int32 or int64 [tokens]"
    return _refuse_numbers(call, name) or refuse_pages(call, name)


def _rotary_constants(call: OpCall, head_dim: int) -> dict[str, int]:
    table = need(call, "cos_sin")
    half = int(table.shape[1]) // 2
    rest = head_dim - 2 * half
    return {"HEAD_DIM": head_dim, "COS_STRIDE": row_stride(table), "HALF": half,
            "HALF_BLOCK": next_power_of_two(half), "REST_BLOCK": next_power_of_two(rest) if rest else 0}


def _cache_constants(call: OpCall) -> dict[str, int]:
    cache = need(call, "kv_cache")
    page_stride, head_stride, cache_row_stride, _ = (int(s) for s in cache.strides)
    return {"PAGE_STRIDE": page_stride, "CACHE_HEAD_STRIDE": head_stride, "ROW_STRIDE": cache_row_stride,
            "PAGE_SIZE": int(cache.shape[2])}


def _head_block(heads: int, head_dim: int) -> int:
    """Heads a program: a power of two for about ELEMENTS_PER_PROGRAM elements, no more than there are."""
    wanted = max(1, ELEMENTS_PER_PROGRAM // next_power_of_two(head_dim))
    return min(wanted, next_power_of_two(heads))


def _refuse_rope(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    return _refuse_values(call, "x") or _refuse_rotary(call, int(need(call, "x").shape[2]))


def _emit_rope(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    x, table, (result,) = need(call, "x"), need(call, "cos_sin"), call.results
    heads, head_dim = int(x.shape[1]), int(x.shape[2])
    block = _head_block(heads, head_dim)
    constants = {"HEADS": heads, "X_STRIDE": row_stride(x), "X_HEAD_STRIDE": x.strides[1],
                 **_rotary_constants(call, head_dim), "HEAD_BLOCK": block}
    parameters = [pointer("x", x), pointer("positions", need(call, "positions")), pointer("cos_sin", table),
                  pointer("result", result)]
    body = f"""
        tile_rope(tl.program_id(0), tl.program_id(1), x, positions, cos_sin, result, {", ".join(constants)})
    """
    return (emit_kernel(
        name=kernel_name("rope", short_dtype(x.dtype), f"{heads}x{head_dim}", f"r{table.shape[1]}"),
        title="Rotary embedding of a block of heads of one token.", tiles=[tile_rope], constants=constants,
        parameters=parameters, body=body, grid=(_rows(call, "x"), str(ceil_div(heads, block)), "1"),
        num_warps=4,
    ),)


def _rows(call: OpCall, name: str) -> str:
    """Grid expression of the first dimension of an operand."""
    return str(need(call, name).shape[0])


def _refuse_insert(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    return _refuse_values(call, "k", "v") or refuse_cache(call)


def _emit_insert(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    k, v, cache = need(call, "k"), need(call, "v"), need(call, "kv_cache")
    heads, head_dim, tile = int(k.shape[1]), int(k.shape[2]), tile_insert_kv
    block = _head_block(heads, head_dim)
    constants = {"KV_HEADS": heads, "K_STRIDE": row_stride(k), "K_HEAD_STRIDE": k.strides[1],
                 "V_STRIDE": row_stride(v), "V_HEAD_STRIDE": v.strides[1], **_cache_constants(call),
                 "HEAD_DIM": head_dim, "D_BLOCK": next_power_of_two(head_dim), "HEAD_BLOCK": block}
    if is_nvfp4(call, "kv_cache"):
        tile = tile_insert_kv_nvfp4
        constants = {name: value for name, value in constants.items() if name not in ("ROW_STRIDE", "D_BLOCK")}
    parameters = [pointer("k", k), pointer("v", v), pointer("kv_cache", cache),
                  pointer("slot_mapping", need(call, "slot_mapping"))]
    body = f"""
        {tile.fn.__name__}(tl.program_id(0), tl.program_id(1), k, v, kv_cache, slot_mapping, {', '.join(constants)})
    """
    return (emit_kernel(
        name=kernel_name("insert_kv", short_dtype(k.dtype), f"kv{cache_label(call, 'kv_cache')}",
                         f"{heads}x{head_dim}"),
        title="Insertion of the key and value heads of one token into the paged cache.",
        tiles=[tile], constants=constants, parameters=parameters, body=body,
        grid=(_rows(call, "k"), str(ceil_div(heads, block)), "1"), num_warps=4,
        intrinsics=insertion_functions(call, "kv_cache"),
    ),)


def refuse_fused(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    """The reason why a fused insertion cannot be served, or None."""
    weights = [name for name in ("q_weight", "k_weight") if is_present(call, name)]
    if any(need(call, name).dtype not in FLOATS for name in weights):
        return f"the norms' weights must be one of {', '.join(FLOATS)}"
    return (_refuse_values(call, "qkv") or _refuse_rotary(call, int(call.attributes["head_dim"]))
            or refuse_cache(call))


def fused_constants(call: OpCall) -> dict[str, int | float | bool]:
    """The constants of tile_qk_norm_rope_insert, but for Q_NORM and K_NORM, by name."""
    attributes = call.attributes
    heads, head_dim = int(attributes["num_heads"]), int(attributes["head_dim"])
    block = _head_block(heads, head_dim)
    return {
        "HEADS": heads, "KV_HEADS": int(attributes["num_kv_heads"]), "QKV_STRIDE": row_stride(need(call, "qkv")),
        **_cache_constants(call), **_rotary_constants(call, head_dim), "D_BLOCK": next_power_of_two(head_dim),
        "HEAD_BLOCK": block, "Q_BLOCKS": ceil_div(heads, block), "EPS": float(attributes["eps"]),
        "OFFSET": float(attributes.get("weight_offset", 0.0)),
        "ROUND": bool(attributes.get("round_before_scale", True)),
    }


def _emit_fused(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    qkv, cache = need(call, "qkv"), need(call, "kv_cache")
    weights = {name: is_present(call, name) for name in ("q_weight", "k_weight")}
    constants = fused_constants(call) | {"Q_NORM": weights["q_weight"], "K_NORM": weights["k_weight"]}
    heads, kv_heads, head_dim = (int(constants[name]) for name in ("HEADS", "KV_HEADS", "HEAD_DIM"))
    blocks = int(constants["Q_BLOCKS"]) + ceil_div(kv_heads, int(constants["HEAD_BLOCK"]))
    given = [pointer(name, need(call, name)) for name, present in weights.items() if present]
    parameters = [pointer("qkv", qkv), *given, pointer("positions", need(call, "positions")),
                  pointer("cos_sin", need(call, "cos_sin")), pointer("kv_cache", cache),
                  pointer("slot_mapping", need(call, "slot_mapping")), pointer("result", call.results[0])]
    passed = ", ".join(name if present else "None" for name, present in weights.items())
    named = ", ".join(f"{key}={key}" for key in constants)
    body = f"""
        tile_qk_norm_rope_insert(tl.program_id(0), tl.program_id(1), qkv, {passed}, positions, cos_sin,
                                 kv_cache, slot_mapping, result, {named})
    """
    norms = "".join(name[0] for name, present in weights.items() if present)
    return (emit_kernel(
        name=kernel_name("qk_norm_rope_insert", short_dtype(qkv.dtype), f"kv{cache_label(call, 'kv_cache')}",
                         f"{heads}x{kv_heads}x{head_dim}", norms and f"norm{norms}"),
        title="Per-head norms, rotary embedding and cache insertion of one token.",
        tiles=[tile_qk_norm_rope_insert], constants=constants, parameters=parameters, body=body,
        grid=(_rows(call, "qkv"), str(blocks), "1"), num_warps=4,
        intrinsics=insertion_functions(call, "kv_cache"),
    ),)


TEMPLATES = (
    KernelTemplate("rope", "rope", _refuse_rope, _emit_rope),
    KernelTemplate("insert_kv", "insert_kv", _refuse_insert, _emit_insert),
    KernelTemplate("qk_norm_rope_insert", "qk_norm_rope_insert", refuse_fused, _emit_fused),
)
