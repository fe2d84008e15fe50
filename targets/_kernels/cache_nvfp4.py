"""NVFP4 pages of the KV and index caches inside a kernel: reading and writing of rows, in the linear layouts.

The bytes are those of ``mmcompile.core.formats.nvfp4_cache`` with global scales of 1. Other layouts replace
``locate_scales``, ``load_words`` and ``store_codes`` (files beside this one). ``base`` is always where the runs of a
page and head begin: one pointer, or one for each row [n, 1]. SIDE: 0 = keys, 1 = values, 2 = index keys.

QMUL4 (feature qmul4, sm_100a and sm_103a) is not used: it rounds e2m1 * scale to e4m3, which loses 275 of the 1016
pairs of magnitudes and saturates at 448 of 2688, while the operations mean the exact product. bf16 and fp16 hold it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mmcompile.core.formats.nvfp4_cache import LAYOUTS, SM90, SM90_INDEX, TOKEN_QUAD
from mmcompile.core.kernel import OpCall
from mmcompile.core.spec import Architecture
from mmcompile.targets._intrinsics.nvfp4 import decode_nvfp4
from mmcompile.targets._kernels import cache_nvfp4_quad, cache_nvfp4_sm90
from mmcompile.targets._kernels.common import need, short_dtype
from mmcompile.targets._kernels.linear_nvfp4 import nvfp4_intrinsics
from mmcompile.targets._kernels.linear_w4a4 import encode_e2m1

DECODED = 256.0
"""What decoded values have to be multiplied by (see ``decode_nvfp4``)."""
HEAD_DIMS = (16, 32, 64, 128, 256)
_LANES = (cache_nvfp4_sm90.locate_scales, cache_nvfp4_sm90.load_words, cache_nvfp4_sm90.store_codes)
_LAYOUT_FUNCTIONS = {TOKEN_QUAD: (cache_nvfp4_quad.locate_scales,), SM90: _LANES, SM90_INDEX: _LANES}
"""By layout, what replaces the functions of the same name here."""


@triton.jit
def locate_scales(key, group, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Bytes from ``base`` to the scales of rows ``key`` [n, 1] and groups ``group`` [1, g]."""
    GROUPS: tl.constexpr = HEAD_DIM // 16
    CODES: tl.constexpr = PAGE_SIZE * (HEAD_DIM // 2)
    return key * GROUPS + group + (SIDE % 2 * (CODES + PAGE_SIZE * GROUPS) + CODES)


@triton.jit
def load_words(base, key, visible, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Codes of rows ``key`` [n], eight to an int32 [n, HEAD_DIM / 8], the first in the low nibble; 0 if invisible."""
    WORDS: tl.constexpr = HEAD_DIM // 8
    place = (key[:, None] * WORDS + tl.arange(0, WORDS)[None, :]) * 4 + SIDE % 2 * (PAGE_SIZE * (HEAD_DIM // 16 * 9))
    return tl.load((base + place).to(tl.pointer_type(tl.int32), bitcast=True), mask=visible[:, None], other=0)


@triton.jit
def store_codes(base, key, kept, codes, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Write int32 codes [n, HEAD_DIM / 8, 8] of rows ``key`` [n] where ``kept``."""
    WORDS: tl.constexpr = HEAD_DIM // 8
    words = tl.sum(codes << (tl.arange(0, 8) * 4)[None, None, :], axis=2)
    place = (key[:, None] * WORDS + tl.arange(0, WORDS)[None, :]) * 4 + SIDE % 2 * (PAGE_SIZE * (HEAD_DIM // 16 * 9))
    tl.store((base + place).to(tl.pointer_type(tl.int32), bitcast=True), words, mask=kept[:, None])


@triton.jit
def load_rows(base, key, visible, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
              dtype: tl.constexpr):
    """Rows ``key`` [n] of one side -> dtype [n, HEAD_DIM], divided by 256; invisible rows are 0 and not read."""
    words = load_words(base, key, visible, SIDE, HEAD_DIM, PAGE_SIZE)
    group = tl.arange(0, HEAD_DIM // 16)
    place = base + locate_scales(key[:, None], group[None, :], SIDE, HEAD_DIM, PAGE_SIZE)
    scales = tl.load(place.to(tl.pointer_type(tl.float8e4nv), bitcast=True), mask=visible[:, None], other=0.0)
    return decode_nvfp4(words, scales, dtype)


@triton.jit
def store_rows(base, key, kept, values, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Quantize values [n, HEAD_DIM] as ``quantize_rows`` does, and write them to rows ``key`` [n] where ``kept``."""
    ROWS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = HEAD_DIM // 16
    wide = tl.reshape(values.to(tl.bfloat16).to(tl.float32), (ROWS * GROUPS, 16))
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-12)
    raw = tl.div_rn(largest, tl.zeros_like(largest) + 6.0)
    scale = tl.minimum(tl.maximum(raw, 0.001953125), 448.0).to(tl.float8e4nv)
    divisor = tl.broadcast_to(scale.to(tl.float32)[:, None], (ROWS * GROUPS, 16))
    codes = encode_e2m1(tl.div_rn(tl.minimum(tl.maximum(wide, -4096.0), 4096.0), divisor))
    codes = tl.reshape(tl.where(codes == 8, 0, codes), (ROWS, HEAD_DIM // 8, 8))
    store_codes(base, key, kept, codes, SIDE, HEAD_DIM, PAGE_SIZE)
    place = locate_scales(key[:, None], tl.arange(0, GROUPS)[None, :], SIDE, HEAD_DIM, PAGE_SIZE)
    tl.store(base + place, tl.reshape(scale.to(tl.uint8, bitcast=True), (ROWS, GROUPS)), mask=kept[:, None])


@triton.jit
def load_page_tile(cache, page, head, SIDE: tl.constexpr, key, visible, HEAD_DIM: tl.constexpr,
                   D_BLOCK: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
                   ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, dtype: tl.constexpr):
    """Rows ``key`` [n] of one page and head -> dtype [n, HEAD_DIM], divided by 256; as in sparse_common."""
    base = cache + page.to(tl.int64) * PAGE_STRIDE + 2 * head * HEAD_STRIDE
    return load_rows(base, key, visible, SIDE, HEAD_DIM, PAGE_SIZE, dtype)


@triton.jit
def load_page_rows(cache, block_table, position, end, head, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
                   D_BLOCK: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
                   ROW_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, dtype: tl.constexpr):
    """Rows at ``position`` [n] of a sequence -> dtype [n, HEAD_DIM], divided by 256; as in attention."""
    inside = position < end
    page = tl.load(block_table + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    base = cache + (page * PAGE_STRIDE + 2 * head * HEAD_STRIDE)[:, None]
    return load_rows(base, position % PAGE_SIZE, inside, SIDE, HEAD_DIM, PAGE_SIZE, dtype)


def is_nvfp4(call: OpCall, cache: str) -> bool:
    """True if the cache operand holds NVFP4 pages."""
    return need(call, cache).dtype == "uint8"


def layout_of(call: OpCall, cache: str) -> str:
    """The tag of a cache's layout: the attribute ``index_layout`` where the call has one for its index cache."""
    name = "index_layout" if cache == "index_cache" and "index_layout" in call.attributes else "layout"
    return str(call.attributes.get(name, "linear"))


def count_kv_heads(call: OpCall) -> int:
    """KV heads of the cache: an NVFP4 page has two runs a head."""
    runs = int(need(call, "kv_cache").shape[1])
    return runs // 2 if is_nvfp4(call, "kv_cache") else runs


def cache_label(call: OpCall, cache: str) -> str:
    """The cache's format in a kernel name: "bf16", "fp8e4nv", "nvfp4linear", "nvfp4token_quad", "nvfp4index"."""
    if is_nvfp4(call, cache):
        return layout_of(call, cache).replace(".", "")
    return short_dtype(need(call, cache).dtype)


def refuse_nvfp4(call: OpCall, cache: str, head_dim: int) -> str | None:
    """A reason if NVFP4 pages are not as the kernels take them: the tag, the width of a row, the size of a page."""
    pages, tag = need(call, cache), layout_of(call, cache)
    sides = len(pages.shape) - 2
    if tag not in LAYOUTS or LAYOUTS[tag].sides != sides:
        return f"{cache} is uint8 in the layout {tag!r}, which is none of its NVFP4 layouts"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, not one of {', '.join(map(str, HEAD_DIMS))}, in an NVFP4 cache"
    width = head_dim // 2 + head_dim // 16
    page_size = int(pages.shape[-2])
    run = page_size * width
    if pages.shape[-1] != width or pages.strides[-2:] != (width, 1) or pages.strides[-3] != run:
        return f"the rows of {cache} are not the {width} bytes of NVFP4 one after the other"
    if not LAYOUTS[tag].fits(head_dim, page_size):
        return f"the layout {tag!r} of {cache} has no pages of {page_size} tokens of heads of {head_dim}"
    return None


def layout_functions(call: OpCall, cache: str) -> dict[str, Any]:
    """What makes a tile read and write the layout of an NVFP4 cache, by function name."""
    return {f.fn.__name__: f for f in _LAYOUT_FUNCTIONS.get(layout_of(call, cache), ())}


def cache_intrinsics(
    call: OpCall, cache: str, dtype: str, arch: Architecture
) -> tuple[dict[str, Any], dict[str, bool]]:
    """What makes a tile read the cache's pages, by function name, and the instructions that the decoder promises."""
    if not is_nvfp4(call, cache):
        return {}, {}
    functions, ledger = nvfp4_intrinsics(arch, dtype)
    readers = {"load_page_tile": load_page_tile, "load_page_rows": load_page_rows}
    return readers | {"decode_nvfp4": functions["decode_nvfp4"]} | layout_functions(call, cache), ledger


def decoded_factor(call: OpCall, cache: str) -> float:
    """What values that a reader gives have to be multiplied by."""
    return DECODED if is_nvfp4(call, cache) else 1.0
