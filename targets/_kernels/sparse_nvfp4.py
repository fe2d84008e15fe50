"""NVFP4 pages of the KV and index caches inside a kernel: decoding of rows, and insertion of index keys.

The bytes are those of ``mmcompile.core.formats.nvfp4_cache``; both sides have unit global scales.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mmcompile.core.formats.nvfp4_cache import INDEX, LAYOUTS, TOKEN_QUAD
from mmcompile.core.kernel import OpCall
from mmcompile.core.spec import Architecture
from mmcompile.targets._intrinsics.nvfp4 import decode_nvfp4
from mmcompile.targets._kernels import sparse_nvfp4_quad
from mmcompile.targets._kernels.common import need
from mmcompile.targets._kernels.linear_nvfp4 import nvfp4_intrinsics
from mmcompile.targets._kernels.linear_w4a4 import encode_e2m1

DECODED = 256.0
"""What decoded values have to be multiplied by (see ``decode_nvfp4``)."""


@triton.jit
def locate_scales(key, group, SIDE: tl.constexpr, GROUPS: tl.constexpr):
    """Offsets of the scales of rows ``key`` [n, 1] and groups ``group`` [1, g] of a run, in token order."""
    return key * GROUPS + group


@triton.jit
def load_page_tile(cache, page, head, SIDE: tl.constexpr, key, visible, HEAD_DIM: tl.constexpr,
                   D_BLOCK: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
                   ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, dtype: tl.constexpr):
    """Rows ``key`` [n] of one run of a page -> dtype [n, HEAD_DIM], divided by 256; invisible rows are 0, not read."""
    GROUPS: tl.constexpr = HEAD_DIM // 16
    run = cache + page.to(tl.int64) * PAGE_STRIDE + (2 * head + SIDE) * HEAD_STRIDE
    word = key[:, None] * (HEAD_DIM // 8) + tl.arange(0, HEAD_DIM // 8)[None, :]
    words = tl.load(run.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=visible[:, None], other=0)
    scales = (run + PAGE_SIZE * (HEAD_DIM // 2)).to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    place = locate_scales(key[:, None], tl.arange(0, GROUPS)[None, :], SIDE, GROUPS)
    return decode_nvfp4(words, tl.load(scales + place, mask=visible[:, None], other=0.0), dtype)


@triton.jit
def tile_insert_index_nvfp4(block, index_k, index_cache, slot_mapping, tokens, K_STRIDE: tl.constexpr,
                            PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr,
                            TOKENS: tl.constexpr):
    """Quantize the index keys of TOKENS tokens into their slots as ``quantize_rows`` does; skip negative slots."""
    GROUPS: tl.constexpr = DIM // 16
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    kept = (slot >= 0)[:, None]
    keys = tl.load(index_k + token[:, None] * K_STRIDE + tl.arange(0, DIM)[None, :], mask=kept, other=0.0)
    values = tl.reshape(keys.to(tl.bfloat16).to(tl.float32), (TOKENS * GROUPS, 16))
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12)
    raw = tl.div_rn(largest, tl.zeros_like(largest) + 6.0)
    scale = tl.minimum(tl.maximum(raw, 0.001953125), 448.0).to(tl.float8e4nv)
    divisor = tl.broadcast_to(scale.to(tl.float32)[:, None], (TOKENS * GROUPS, 16))
    codes = encode_e2m1(tl.div_rn(tl.minimum(tl.maximum(values, -4096.0), 4096.0), divisor))
    codes = tl.where(codes == 8, 0, codes)
    even, odd = tl.split(tl.reshape(codes, (TOKENS, DIM // 2, 2)))
    run = index_cache + (slot // PAGE_SIZE * PAGE_STRIDE)[:, None]
    place = (slot % PAGE_SIZE)[:, None]
    tl.store(run + place * (DIM // 2) + tl.arange(0, DIM // 2)[None, :], (even | (odd << 4)).to(tl.uint8), mask=kept)
    row = run + PAGE_SIZE * (DIM // 2) + place * GROUPS + tl.arange(0, GROUPS)[None, :]
    tl.store(row, tl.reshape(scale.to(tl.uint8, bitcast=True), (TOKENS, GROUPS)), mask=kept)


def is_nvfp4(call: OpCall, cache: str) -> bool:
    """True if the cache operand holds NVFP4 pages."""
    return need(call, cache).dtype == "uint8"


def refuse_nvfp4(call: OpCall, cache: str, head_dim: int) -> str | None:
    """A reason if NVFP4 pages are not as the kernels read them: the tag, the row width, the alignment.

    The tag of the pages' layout is the attribute ``layout`` of the call.
    """
    pages, tag = need(call, cache), call.attributes.get("layout", "")
    sides = len(pages.shape) - 2
    if tag not in LAYOUTS or not LAYOUTS[tag].quads or LAYOUTS[tag].sides != sides:
        return f"{cache} is uint8 in the layout {tag!r}, which is none of its NVFP4 layouts"
    if head_dim not in (64, 128, 256):
        return f"head_dim is {head_dim}, not 64, 128 or 256, in an NVFP4 cache"
    if pages.shape[-1] != head_dim // 2 + head_dim // 16 or pages.strides[-2] != pages.shape[-1]:
        return f"the rows of {cache} are not the {head_dim // 2 + head_dim // 16} bytes of NVFP4 one after the other"
    return f"page_size is {pages.shape[-2]}, not a multiple of 4" if int(pages.shape[-2]) % 4 else None


def cache_intrinsics(
    call: OpCall, cache: str, dtype: str, arch: Architecture
) -> tuple[dict[str, Any], dict[str, bool]]:
    """What makes a tile read the cache's pages, by function name, and the instructions that the decoder promises."""
    if not is_nvfp4(call, cache):
        return {}, {}
    functions, ledger = nvfp4_intrinsics(arch, dtype)
    readers = {"load_page_tile": load_page_tile, "decode_nvfp4": functions["decode_nvfp4"]}
    if call.attributes["layout"] == TOKEN_QUAD:
        readers["locate_scales"] = sparse_nvfp4_quad.locate_scales
    return readers, ledger


def decoded_factor(call: OpCall, cache: str) -> float:
    """What values that ``load_page_tile`` gives have to be multiplied by."""
    return DECODED if is_nvfp4(call, cache) else 1.0


def refuse_insertion(call: OpCall) -> str | None:
    """A reason if index keys cannot be quantized into ``index_cache``."""
    keys, tag = need(call, "index_k"), call.attributes.get("layout", "")
    if tag != INDEX:
        return f"index_cache is uint8 in the layout {tag!r}, not {INDEX!r}"
    return refuse_nvfp4(call, "index_cache", int(keys.shape[1]))
