"""NVFP4 pages of the KV cache and of the index-key cache: the quantizer, the byte layouts and their tags.

A row of one token and one head, d elements (d a multiple of 16), is d/2 bytes of E2M1 codes (even element in the low
nibble) and d/16 positive E4M3 scales: 72 bytes for d = 128. A *run* holds the page_size rows of one head and one side:
first the codes of all its tokens [page_size, d/2], then their scales [page_size, d/16]. Caches are uint8,

* KV cache [pages, 2 * kv_heads, page_size, 72]: run ``2 * head`` is K, run ``2 * head + 1`` is V,
* index-key cache [pages, page_size, 72]: one run, no global scale.

The last two dimensions only count bytes: a row of the tensor is not a token. Where the scale of (token, group) lies in
a run is its order, and a layout names the order of both sides:

=================  =======  ===========  ==========================================================
layout             K        V            readers
=================  =======  ===========  ==========================================================
nvfp4.linear       linear   linear       portable; sm_120; a graph before it is lowered
nvfp4.token_quad   linear   token quad   sm_100, sm_103, sm_107 (trtllm-gen and MSA); d a multiple of 64
nvfp4.index        linear   -            index keys
nvfp4.sm90         lanes    lanes        sm_90; see core/formats/nvfp4_cache_sm90.py; d = page_size = 128
nvfp4.index_sm90   lanes    -            index keys, sm_90; likewise
=================  =======  ===========  ==========================================================

Source: vLLM's fused_minimax_m3_qknorm_rope_kv_insert and MSA's Q8KV4 indexer. The tag must travel with the buffer: the
bytes of two layouts have the same size and look alike (vllm issue 50084).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError, unknown_name
from mmcompile.core.formats import nvfp4

QUANTIZER = "minimax-m3.1"
LINEAR, TOKEN_QUAD, INDEX = "nvfp4.linear", "nvfp4.token_quad", "nvfp4.index"
SM90, SM90_INDEX = "nvfp4.sm90", "nvfp4.index_sm90"
QUAD = 4
SMALLEST_AMAX = 1e-12
LARGEST_QUOTIENT = 4096.0


@dataclass(frozen=True)
class Layout:
    """Byte layout of a page.

    Attributes:
        tag: its name. sides: 2 for K and V, 1 for index keys.
        quads: for each side (K, then V) whether scales are in token quads; () where bytes are arranged for lanes.
        head_dim: elements of a head are a multiple of it. exact: (head_dim, page_size) if it takes no other.
    """

    tag: str
    sides: int
    quads: tuple[bool, ...]
    head_dim: int = nvfp4.BLOCK
    exact: tuple[int, int] | None = None

    def fits(self, head_dim: int, page_size: int) -> bool:
        """True if pages of ``page_size`` tokens of heads of ``head_dim`` can have this layout."""
        if head_dim < 1 or head_dim % self.head_dim or page_size < 1 or page_size % QUAD:
            return False
        return self.exact is None or self.exact == (head_dim, page_size)


LAYOUTS = {
    layout.tag: layout
    for layout in (
        Layout(LINEAR, 2, (False, False)),
        Layout(TOKEN_QUAD, 2, (False, True), head_dim=QUAD * nvfp4.BLOCK),
        Layout(INDEX, 1, (False,)),
        Layout(SM90, 2, (), exact=(128, 128)),
        Layout(SM90_INDEX, 1, (), exact=(128, 128)),
    )
}


def get_layout(tag: str) -> Layout:
    """The layout called ``tag``; UsageError with the closest name if there is none."""
    if tag not in LAYOUTS:
        raise unknown_name("cache layout", tag, LAYOUTS)
    return LAYOUTS[tag]


def choose_layout(tag: str, preferred: Sequence[str], head_dim: int, page_size: int) -> str:
    """The tag of the first layout of ``preferred`` that can stand for ``tag``: of as many sides, and pages that fit.

    ``tag`` itself if there is none. Raises UsageError for a tag that names no layout.
    """
    sides = get_layout(tag).sides
    fitting = (t for t in preferred if get_layout(t).sides == sides and get_layout(t).fits(head_dim, page_size))
    return next(fitting, tag)


def check_layout(have: str, wanted: str, where: str) -> None:
    """Raise ArtifactError if a buffer that was written as ``have`` is to be read as ``wanted``.

    ``where``: the reader, for the message. Raises UsageError for a tag that names no layout.
    """
    if get_layout(have) != get_layout(wanted):
        raise ArtifactError(
            f"the cache was written in the layout {have!r} and is read as {wanted!r}",
            where=where,
            fix="use a writer and a reader of one layout",
        )


def row_bytes(head_dim: int) -> int:
    """Bytes of one token of one head and side: 72 for 128. Raises ValueError unless a multiple of 16."""
    if head_dim <= 0 or head_dim % nvfp4.BLOCK:
        raise ValueError(f"an NVFP4 cache needs head_dim a multiple of {nvfp4.BLOCK}, got {head_dim}")
    return head_dim // 2 + head_dim // nvfp4.BLOCK


def head_dim_of_width(width: int) -> int:
    """Elements of a head whose rows are ``width`` = d/2 + d/16 bytes."""
    return width * nvfp4.BLOCK // (nvfp4.BLOCK // 2 + 1)


def head_dim_of(cache: Tensor) -> int:
    """Elements of a head of an NVFP4 cache."""
    return head_dim_of_width(int(cache.shape[-1]))


def quantize_rows(x: Tensor, global_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The quantizer ``minimax-m3.1``, exact: what vLLM's M3.1 cache writer stores, bit for bit.

    Args:
        x: [..., d], d a multiple of 16. It is rounded to bf16 first, as the writer sees it.
        global_scale: fp32 dequantization multiplier of the side; 1.0 in M3.1, always 1.0 for index keys.

    With ``r = RN(1 / global_scale)`` and ``a`` the largest magnitude of 16 values: ``scale = e4m3(max(r * (max(a,
    1e-12) / 6), 2^-9))`` saturating at 448, ``code = e2m1(clamp(r * x, +-4096) / scale)``, a true division, ties to the
    even code, saturating at 6; a magnitude that rounds to zero is stored as +0. Other writers differ in these bytes
    (a reciprocal multiply, no floor, -0), hence the name.

    Returns: packed uint8 [..., d/2], scale float8_e4m3fn [..., d/16]. NaN and infinity in ``x`` are the caller's fault
    and give unspecified but finite bytes.
    """
    groups = _split(torch.nan_to_num(x.bfloat16().float()), nvfp4.BLOCK)
    factor = 1.0 / torch.tensor(global_scale, dtype=torch.float32, device=x.device)
    amax = groups.abs().amax(-1).clamp(min=SMALLEST_AMAX)
    raw = (factor * (amax / nvfp4.E2M1_MAX)).clamp(nvfp4.E4M3_SMALLEST, nvfp4.E4M3_MAX)
    scale = raw.to(torch.float8_e4m3fn)
    scaled = (groups * factor).clamp(-LARGEST_QUOTIENT, LARGEST_QUOTIENT)
    codes = nvfp4.encode_e2m1(scaled / scale.float()[..., None])
    codes = torch.where(codes == 8, 0, codes)
    return nvfp4.pack_codes(codes.flatten(-2)), scale


def dequantize_rows(packed: Tensor, scale: Tensor, global_scale: float = 1.0) -> Tensor:
    """fp32 values [..., d] = e2m1 * scale * global_scale of packed uint8 [..., d/2] and scale e4m3 [..., d/16]."""
    values = _split(nvfp4.decode_e2m1(nvfp4.unpack_codes(packed)), nvfp4.BLOCK)
    return (values * scale.float()[..., None]).flatten(-2) * global_scale


def dequantize_index(packed: Tensor, scale: Tensor) -> Tensor:
    """Index keys as SM100's and MI355X's score kernels see them: ``e4m3(e2m1 * scale)``, nearest even, saturating.

    Arguments as in :func:`dequantize_rows`, result float8_e4m3fn [..., d]. The queries are ``e4m3(bf16(q))`` at unit
    scale (:func:`quantize_index_query`), products are summed in fp32. Hopper's kernel does not round the key.
    """
    values = dequantize_rows(packed, scale)
    return values.clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_index_query(q: Tensor) -> Tensor:
    """Index queries [..., d] as float8_e4m3fn at unit scale, rounded to bf16 before, saturating at 448."""
    return q.bfloat16().float().clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)


def locate_scales(tokens: Tensor, groups: int, quad: bool) -> Tensor:
    """Offset of every scale in the scale part of a run, int64 [..., groups].

    Args:
        tokens: int64 [...], the place of each token in its page. groups: scales a token (d / 16). quad: token-quad
            order, else linear.

    Linear: ``t * groups + g``. Token quad (trtllm-gen): four tokens share their ``4 * groups`` bytes as ``groups``
    columns of four, ``t' = t // 4 * 4 + g // (groups / 4)``, ``g' = g % (groups / 4) * 4 + t % 4``.
    """
    t, g = tokens[..., None], torch.arange(groups, device=tokens.device)
    if not quad:
        return t * groups + g
    share = groups // QUAD
    return (t // QUAD * QUAD + g // share) * groups + g % share * QUAD + t % QUAD


def insert_kv(
    cache: Tensor,
    tag: str,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Quantize new tokens into their pages.

    Args:
        cache: uint8 [pages, 2 * kv_heads, page_size, 72], written in place, in the layout ``tag``.
        k, v: [tokens, kv_heads, d]. slot_mapping: int64 [tokens], ``page * page_size + place``; negative ones (padding)
            are skipped. k_scale, v_scale: global scales of the sides.

    Raises ValueError for shapes that do not belong together, a layout without V, or a page size that is no multiple of
    4; UsageError for an unknown layout.
    """
    layout = _check_cache(cache, tag, k.shape[-1], sides=2)
    if k.shape != v.shape or cache.shape[1] != 2 * k.shape[1]:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} do not fit the cache {list(cache.shape)}")
    kept = slot_mapping >= 0
    for side, (rows, factor) in enumerate(((k, k_scale), (v, v_scale))):
        runs = cache.view(cache.shape[0], k.shape[1], 2, -1)[:, :, side]
        _write_rows(runs, cache.shape[2], layout.quads[side], rows[kept], slot_mapping[kept], factor)


def read_kv(
    cache: Tensor, tag: str, pages: Tensor, *, k_scale: float = 1.0, v_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Decode whole pages.

    Args:
        cache, tag, k_scale, v_scale: as in :func:`insert_kv`. pages: int64 [n].

    Returns: k, v fp32 [n * page_size, kv_heads, d]. Rows that were never written decode to whatever their bytes say.
    """
    layout = _check_cache(cache, tag, head_dim_of(cache), sides=2)
    heads = cache.shape[1] // 2
    taken = cache[pages].view(len(pages), heads, 2, -1)
    sides = [
        _read_rows(taken[:, :, side], cache.shape[2], layout.quads[side], factor)
        for side, factor in enumerate((k_scale, v_scale))
    ]
    return sides[0], sides[1]


def insert_index(cache: Tensor, tag: str, index_k: Tensor, slot_mapping: Tensor) -> None:
    """Quantize new index keys [tokens, d] into the cache uint8 [pages, page_size, 72]; as :func:`insert_kv`."""
    layout = _check_cache(cache, tag, index_k.shape[-1], sides=1)
    kept = slot_mapping >= 0
    runs = cache.view(cache.shape[0], 1, -1)
    _write_rows(runs, cache.shape[1], layout.quads[0], index_k[kept, None], slot_mapping[kept], 1.0)


def read_index(cache: Tensor, tag: str, pages: Tensor) -> Tensor:
    """Decode whole pages of the index cache exactly: fp32 [n * page_size, d]."""
    layout = _check_cache(cache, tag, head_dim_of(cache), sides=1)
    taken = cache[pages].view(len(pages), 1, -1)
    return _read_rows(taken, cache.shape[1], layout.quads[0], 1.0)[:, 0]


def change_layout(cache: Tensor, have: str, wanted: str) -> Tensor:
    """A KV cache rewritten from the layout ``have`` to ``wanted``, bytes only, nothing is rounded."""
    source, target = (_check_cache(cache, tag, head_dim_of(cache), sides=2) for tag in (have, wanted))
    page_size, groups = cache.shape[2], head_dim_of(cache) // nvfp4.BLOCK
    result = cache.clone()
    tokens = torch.arange(page_size, device=cache.device)
    for side in range(2):
        old = cache.view(cache.shape[0], -1, 2, page_size * cache.shape[3])[:, :, side, -page_size * groups :]
        new = result.view(cache.shape[0], -1, 2, page_size * cache.shape[3])[:, :, side, -page_size * groups :]
        to, origin = (locate_scales(tokens, groups, x.quads[side]).flatten() for x in (target, source))
        new[..., to] = old[..., origin]
    return result


def _split(x: Tensor, size: int) -> Tensor:
    """View [..., n * size] as [..., n, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _check_cache(cache: Tensor, tag: str, head_dim: int, sides: int) -> Layout:
    layout = get_layout(tag)
    if layout.sides != sides:
        raise ValueError(f"the layout {tag!r} is not one of {'a KV' if sides == 2 else 'an index-key'} cache")
    if not layout.quads:
        raise ValueError(f"pages of the layout {tag!r} are read and written by core.formats.nvfp4_cache_sm90")
    if head_dim % layout.head_dim:
        raise ValueError(f"the layout {tag!r} needs head_dim a multiple of {layout.head_dim}, got {head_dim}")
    width = row_bytes(head_dim)
    if cache.dtype != torch.uint8 or cache.ndim != sides + 2 or cache.shape[-1] != width or not cache.is_contiguous():
        shape = f"[pages, {'2 * kv_heads, ' if sides == 2 else ''}page_size, {width}]"
        raise ValueError(f"cache must be contiguous uint8 {shape}, got {cache.dtype} {list(cache.shape)}")
    if cache.shape[-2] % QUAD:
        raise ValueError(f"page_size must be a multiple of {QUAD}, got {cache.shape[-2]}")
    return layout


def _write_rows(runs: Tensor, page_size: int, quad: bool, rows: Tensor, slots: Tensor, global_scale: float) -> None:
    """Write rows [tokens, heads, d] into runs uint8 [pages, heads, page_size * row_bytes], a view of the cache."""
    packed, scale = quantize_rows(rows, global_scale)
    half, groups = packed.shape[-1], scale.shape[-1]
    page, place = slots // page_size, slots % page_size
    heads = torch.arange(runs.shape[1], device=runs.device)
    where = (page[:, None, None], heads[None, :, None])
    data = place[:, None] * half + torch.arange(half, device=runs.device)
    runs[(*where, data[:, None])] = packed
    scales = page_size * half + locate_scales(place, groups, quad)
    runs[(*where, scales[:, None])] = scale.view(torch.uint8)


def _read_rows(runs: Tensor, page_size: int, quad: bool, global_scale: float) -> Tensor:
    """Decode runs uint8 [pages, heads, page_size * row_bytes] to fp32 [pages * page_size, heads, d]."""
    groups = runs.shape[-1] // page_size // (nvfp4.BLOCK // 2 + 1)
    half = groups * nvfp4.BLOCK // 2
    packed = _split(runs[..., : page_size * half], half)
    places = locate_scales(torch.arange(page_size, device=runs.device), groups, quad)
    scale = runs[..., page_size * half :][..., places].view(torch.float8_e4m3fn)
    return dequantize_rows(packed, scale, global_scale).transpose(1, 2).flatten(0, 1)
