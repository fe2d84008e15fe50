"""Operations on NVFP4 caches: schemas and fakes in every layout, values of the decoded pages, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmcompile.core.errors import UsageError
from mmcompile.core.formats import cache_pages, nvfp4_cache
from mmcompile.core.ops import OPS

PAGE, TABLE = 128, torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
LENGTHS, STARTS = torch.tensor([130, 4], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
SLOTS = torch.tensor([1, 129, -1, 0, 400, 130])
PAIRS = [
    (nvfp4_cache.LINEAR, nvfp4_cache.INDEX),
    (nvfp4_cache.TOKEN_QUAD, nvfp4_cache.INDEX),
    (nvfp4_cache.SM90, nvfp4_cache.SM90_INDEX),
]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_caches(pair: tuple[str, str], d: int = 128, heads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """KV and index cache of four full pages."""
    width = nvfp4_cache.row_bytes(d)
    kv = torch.zeros(4, 2 * heads, PAGE, width, dtype=torch.uint8)
    index = torch.zeros(4, PAGE, width, dtype=torch.uint8)
    slots = torch.arange(4 * PAGE)
    cache_pages.insert_kv(kv, pair[0], noise(len(slots), heads, d), noise(len(slots), heads, d, seed=1), slots)
    cache_pages.insert_index(index, pair[1], noise(len(slots), d, seed=2), slots)
    return kv, index


def plain_of(pair: tuple[str, str], kv: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same pages as plain rows."""
    pages = torch.arange(len(kv))
    rows = torch.cat(cache_pages.read_kv(kv, pair[0], pages), dim=-1)
    keys = cache_pages.read_index(index, pair[1], pages)
    plain = rows.view(len(kv), PAGE, rows.shape[1], rows.shape[2]).transpose(1, 2).contiguous()
    return plain, keys.view(len(kv), PAGE, -1)


def arguments_of(name: str, pair: tuple[str, str], kv: torch.Tensor, index: torch.Tensor) -> tuple[Any, ...]:
    q = noise(6, 2, 128, seed=5)
    angle = torch.rand(256, 32, generator=torch.Generator().manual_seed(3)) * 6
    table = torch.cat([angle.cos(), angle.sin()], 1)
    norms, positions = [noise(128, seed=i) for i in range(6, 10)], torch.tensor([128, 129, 0, 1, 2, 3])
    return {
        "insert_kv": (noise(6, 1, 128), noise(6, 1, 128, seed=1), kv, SLOTS, pair[0]),
        "insert_index": (noise(6, 128), index, SLOTS, pair[1]),
        "paged_attention": (q, kv, TABLE, LENGTHS, STARTS, 0.1, 0, pair[0]),
        "paged_index_score": (q, index, TABLE, LENGTHS, STARTS, pair[1]),
        "paged_block_sparse_attention": (
            q, kv, torch.tensor([[[0, 1]]] * 2 + [[[0, -1]]] * 4), TABLE, LENGTHS, STARTS, 0.1, pair[0],
        ),
        "qk_norm_rope_insert": (
            noise(6, 512), None, norms[0], positions, table, kv, SLOTS, 2, 1, 128, 1e-6, 0.0, True, pair[0],
        ),
        "qk_norm_rope_insert_index": (
            noise(6, 896), *norms, positions, table, kv, index, SLOTS, 2, 1, 2, 128, 1e-6, 1.0, False, *pair,
        ),
    }[name]  # fmt: skip


NAMES = ("insert_kv", "insert_index", "paged_attention", "paged_index_score", "paged_block_sparse_attention",
         "qk_norm_rope_insert", "qk_norm_rope_insert_index")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_fakes_and_schemas_take_the_layout(name):
    torch.library.opcheck(OPS[name].handle, arguments_of(name, PAIRS[1], *make_caches(PAIRS[1])))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
@pytest.mark.parametrize("name", [name for name in NAMES if "insert" not in name])
def test_readers_see_the_decoded_pages(name, pair):
    caches = make_caches(pair)
    have = OPS[name].reference(*arguments_of(name, pair, *caches))
    plain = arguments_of(name, ("linear", "linear"), *plain_of(pair, *caches))
    want = OPS[name].reference(*plain)
    assert torch.equal(have, want)
    other = OPS[name].reference(*arguments_of(name, pair, *make_caches(pair)))
    assert torch.equal(have, other)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
@pytest.mark.parametrize("name", [name for name in NAMES if "insert" in name])
def test_writers_store_what_the_quantizer_says(name, pair):
    """The plain form's rows, quantized and decoded, are the rows of the NVFP4 form; nothing else changes."""
    kv, index = make_caches(pair)
    before = plain_of(pair, kv, index)
    plain = [cache.clone() for cache in before]
    OPS[name].reference(*arguments_of(name, ("linear", "linear"), *plain))
    OPS[name].reference(*arguments_of(name, pair, kv, index))
    for old, written, have in zip(before, plain, plain_of(pair, kv, index), strict=True):
        d = 128
        rows = written.reshape(-1, d)
        decoded = nvfp4_cache.dequantize_rows(*nvfp4_cache.quantize_rows(rows)).view_as(written)
        assert torch.equal(have, torch.where(old == written, old, decoded))
    assert any(not torch.equal(o, w) for o, w in zip(before, plain, strict=True))


@pytest.mark.parametrize(
    ("layout", "shape", "dtype", "error", "message"),
    [
        ("nvfp4", (4, 2, 128, 72), torch.uint8, UsageError, "unknown cache layout 'nvfp4'"),
        ("linear", (4, 2, 128, 72), torch.uint8, ValueError, "layout 'linear' has rows of 256 floats"),
        (nvfp4_cache.LINEAR, (4, 1, 128, 256), torch.bfloat16, ValueError, "rows of 72 bytes and two runs a head"),
        (nvfp4_cache.LINEAR, (4, 2, 128, 36), torch.uint8, ValueError, "rows of 72 bytes"),
        (nvfp4_cache.LINEAR, (4, 3, 128, 72), torch.uint8, ValueError, "two runs a head"),
        (nvfp4_cache.INDEX, (4, 2, 128, 72), torch.uint8, ValueError, "not one of a KV cache"),
        (nvfp4_cache.SM90, (4, 2, 64, 72), torch.uint8, ValueError, "no pages of 64 tokens of heads of 128"),
    ],
)
def test_another_cache_is_refused(layout, shape, dtype, error, message):
    cache = torch.zeros(shape, dtype=dtype)
    for mode in (torch.device("cpu"), torch.device("meta")):
        arguments = (noise(6, 2, 128).to(mode), cache.to(mode), TABLE.to(mode), LENGTHS.to(mode), STARTS.to(mode))
        with pytest.raises(error, match=message):
            OPS["paged_attention"].handle(*arguments, 0.1, 0, layout)


def test_the_first_fitting_layout_is_chosen():
    quad = (nvfp4_cache.SM90, nvfp4_cache.SM90_INDEX, nvfp4_cache.TOKEN_QUAD)
    choose = nvfp4_cache.choose_layout
    assert choose(nvfp4_cache.LINEAR, quad, 128, 128) == nvfp4_cache.SM90
    assert choose(nvfp4_cache.LINEAR, quad, 64, 128) == nvfp4_cache.TOKEN_QUAD
    assert choose(nvfp4_cache.LINEAR, quad, 16, 16) == nvfp4_cache.LINEAR
    assert choose(nvfp4_cache.INDEX, quad, 128, 128) == nvfp4_cache.SM90_INDEX
    assert choose(nvfp4_cache.INDEX, quad, 64, 128) == nvfp4_cache.INDEX
    assert choose(nvfp4_cache.INDEX, (), 128, 128) == nvfp4_cache.INDEX
