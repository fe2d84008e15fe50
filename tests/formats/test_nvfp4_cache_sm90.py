"""The sm90 cache page, bit by bit as it is described, and equal in value to the other layouts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import ArtifactError
from mmcompile.core.formats import nvfp4, nvfp4_cache, nvfp4_cache_sm90

BITS = [(15, 9), (12, 6), (14, 3), (13, 0)]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read_code(page, side, token, d):
    """The code of one element by the words of the description, page a list of 18432 bytes."""
    tile, g8 = divmod(token, 8)
    if side == 0:
        u, rest = divmod(d, 64)
        t, rest = divmod(rest, 16)
        j, rest = divmod(rest, 8)
        q, h = divmod(rest, 2)
        word = tile * 128 + (4 * g8 + t) * 4 + 2 * u + j
    else:
        g, rest = divmod(d, 16)
        iq, q = divmod(rest, 4)
        h, t = token & 1, g8 // 2
        word = 2048 + tile * 128 + (4 * g + t) * 4 + iq
    value = int.from_bytes(bytes(page[4 * word : 4 * word + 4]), "little") >> (16 * h)
    sign, magnitude = BITS[q]
    return (value >> sign & 1) << 3 | (value >> magnitude & 7)


def read_scale(page, side, token, block, index):
    tile, place = divmod(token, 8)
    group, tau = divmod(tile, 8 if index else 4)
    base = (8192 if index else 16384) + group * 512
    if side == 0:
        u, t = divmod(block, 4)
        return page[base + (4 * place + t) * 16 + 2 * tau + u]
    return page[base + (4 * block + place // 2) * 16 + 8 + 2 * tau + (token & 1)]


@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_every_bit_is_where_the_description_says(data, seed):
    token = data.draw(st.integers(0, 255))
    k, v = noise(1, 2, 128, seed=seed), noise(1, 2, 128, seed=seed + 100)
    cache = torch.full((2, 4, 128, 72), 0xFF, dtype=torch.uint8)
    nvfp4_cache_sm90.insert_kv(cache, k, v, torch.tensor([token]))
    assert int((cache != 0xFF).sum()) <= 2 * 2 * 72
    for head in range(2):
        page = cache.view(2, 2, -1)[token // 128, head].tolist()
        for side, x in enumerate((k, v)):
            packed, scale = nvfp4_cache.quantize_rows(x[0, head])
            assert [read_code(page, side, token % 128, d) for d in range(128)] == nvfp4.unpack_codes(packed).tolist()
            have = [read_scale(page, side, token % 128, block, False) for block in range(8)]
            assert have == scale.view(torch.uint8).tolist()


def test_index_pages():
    keys = noise(256, 128)
    cache = torch.zeros(2, 128, 72, dtype=torch.uint8)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    nvfp4_cache_sm90.insert_index(cache, keys[order], order)
    for token in (0, 7, 8, 63, 64, 127):
        packed, scale = nvfp4_cache.quantize_rows(keys[128 + token])
        page = cache.view(2, -1)[1].tolist()
        assert [read_code(page, 0, token, d) for d in range(128)] == nvfp4.unpack_codes(packed).tolist()
        assert [read_scale(page, 0, token, b, True) for b in range(8)] == scale.view(torch.uint8).tolist()
    other = torch.zeros(2, 128, 72, dtype=torch.uint8)
    nvfp4_cache.insert_index(other, nvfp4_cache.INDEX, keys, torch.arange(256))
    pages = torch.tensor([1, 0])
    want = nvfp4_cache.read_index(other, nvfp4_cache.INDEX, pages)
    assert torch.equal(nvfp4_cache_sm90.read_index(cache, pages), want)


def test_values_are_those_of_the_other_layouts():
    k, v = noise(256, 4, 128), noise(256, 4, 128, seed=1)
    slots = torch.cat([torch.arange(255), torch.tensor([-1])])
    ours, linear = (torch.zeros(2, 8, 128, 72, dtype=torch.uint8) for _ in range(2))
    nvfp4_cache_sm90.insert_kv(ours, k, v, slots)
    nvfp4_cache.insert_kv(linear, nvfp4_cache.LINEAR, k, v, slots)
    pages = torch.tensor([1, 0])
    want = nvfp4_cache.read_kv(linear, nvfp4_cache.LINEAR, pages)
    for a, b in zip(nvfp4_cache_sm90.read_kv(ours, pages), want, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(ours, linear) and ours.shape == linear.shape


def test_halves_are_a_bijection():
    codes = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 4)
    halves = nvfp4_cache_sm90.pack_halves(codes)
    assert torch.equal(nvfp4_cache_sm90.unpack_halves(halves), codes)
    assert len({tuple(h) for h in halves.tolist()}) == 65536


def test_other_readers_and_shapes_are_refused():
    cache, rows = torch.zeros(1, 4, 128, 72, dtype=torch.uint8), torch.zeros(1, 2, 128)
    with pytest.raises(ArtifactError, match="layout 'nvfp4.sm90' and is read as 'nvfp4.token_quad'"):
        nvfp4_cache.check_layout(nvfp4_cache.SM90, nvfp4_cache.TOKEN_QUAD, "reader")
    with pytest.raises(ArtifactError, match="layout 'nvfp4.index' and is read as 'nvfp4.index_sm90'"):
        nvfp4_cache.check_layout(nvfp4_cache.INDEX, nvfp4_cache.SM90_INDEX, "reader")
    with pytest.raises(ValueError, match="'nvfp4.sm90' are read and written by core.formats.nvfp4_cache_sm90"):
        nvfp4_cache.insert_kv(cache, nvfp4_cache.SM90, rows, rows, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"must be contiguous uint8 \[..., 128, 72\]"):
        nvfp4_cache_sm90.insert_kv(torch.zeros(1, 4, 64, 72, dtype=torch.uint8), rows, rows, torch.tensor([0]))
    with pytest.raises(ValueError, match="do not fit the cache"):
        nvfp4_cache_sm90.insert_kv(cache, rows[:, :1], rows[:, :1], torch.tensor([0]))
    with pytest.raises(ValueError, match="two runs a head, got 3"):
        nvfp4_cache_sm90.read_kv(torch.zeros(1, 3, 128, 72, dtype=torch.uint8), torch.tensor([0]))
