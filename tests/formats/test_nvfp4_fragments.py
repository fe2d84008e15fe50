"""NVFP4 fragments: a permutation of the bits of row-major weights, element by element where the layout says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.formats import nvfp4_fragments as fragments
from mmcompile.core.formats.nvfp4 import unpack_codes

FLAVOURS = list(fragments.FLAVOURS)
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from(FLAVOURS), st.integers(0, 2**31))
WAVES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.just(fragments.WAVE), st.integers(0, 2**31))


def make_weight(tiles: int, steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, k = 16 * tiles, 256 * steps
    packed = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.int32).to(torch.uint8)
    scale = torch.randint(0, 256, (rows, k // 16), generator=generator, dtype=torch.int32).to(torch.uint8)
    return packed, scale.view(torch.float8_e4m3fn)


@settings(max_examples=15, deadline=None)
@given(st.one_of(SHAPES, WAVES))
def test_restore_undoes_arrange(case):
    tiles, steps, flavour, seed = case
    for tensor in make_weight(tiles, steps, seed):
        moved = fragments.arrange(tensor, flavour)
        assert (moved.shape, moved.dtype, moved.is_contiguous()) == (tensor.shape, tensor.dtype, True)
        back = fragments.restore(moved, flavour)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_more_tiles_than_are_taken_at_a_time():
    packed, scale = make_weight(fragments._TILES_AT_A_TIME + 1, 1, 3)
    assert torch.equal(fragments.restore(fragments.arrange(packed, "bfloat16"), "bfloat16"), packed)
    last = fragments.arrange(scale[-16:], "bfloat16")
    assert torch.equal(fragments.arrange(scale, "bfloat16")[-16:].view(torch.uint8), last.view(torch.uint8))


def test_experts_are_arranged_one_by_one():
    for tensor in make_weight(6, 2, 7):
        experts = tensor.view(3, 32, -1)
        moved = fragments.arrange(experts, "bfloat16")
        each = torch.stack([fragments.arrange(e, "bfloat16") for e in experts])
        assert torch.equal(moved.view(torch.uint8), each.view(torch.uint8))
        assert torch.equal(fragments.restore(moved, "bfloat16").view(torch.uint8), experts.view(torch.uint8))
    with pytest.raises(ValueError, match=r"\[8, 256\] is not made of tiles"):
        fragments.arrange(torch.zeros(4, 8, 128, dtype=torch.uint8), "bfloat16")


@settings(max_examples=15, deadline=None)
@given(SHAPES, st.data())
def test_every_element_is_where_the_layout_says(case, data):
    """Codes and scales are found by the formulas of the module's contract."""
    tiles, steps, flavour, seed = case
    packed, scale = make_weight(tiles, steps, seed)
    words = fragments.arrange(packed, flavour).view(torch.int32).flatten()
    scales = fragments.arrange(scale, flavour).view(torch.uint8).flatten()
    row, k = data.draw(st.integers(0, 16 * tiles - 1)), data.draw(st.integers(0, 256 * steps - 1))
    tile, h, g = row // 16, row % 16 // 8, row % 8
    step, u, t, j = k // 256, k % 256 // 64, k % 64 // 16, k % 16 // 4
    i, half, lane = k % 4 // 2, k % 2, 4 * g + t
    word = int(words[((tile * steps + step) * 4 + u) * 128 + lane * 4 + j]) >> (fragments.DISTANCES[flavour] * half)
    sign, magnitude = fragments.FLAVOURS[flavour][h + 2 * i]
    code = ((word >> sign) & 1) << 3 | (word >> magnitude) & 7
    assert code == int(unpack_codes(packed)[row, k])
    place = (tile * steps + step) * 256 + lane * 8 + u * 2 + h
    assert int(scales[place]) == int(scale.view(torch.uint8)[row, k // 16])


@settings(max_examples=15, deadline=None)
@given(WAVES, st.data())
def test_every_element_of_a_wave_is_where_the_layout_says(case, data):
    tiles, steps, flavour, seed = case
    packed, scale = make_weight(tiles, steps, seed)
    words = fragments.arrange(packed, flavour).view(torch.int32).flatten()
    scales = fragments.arrange(scale, flavour).view(torch.uint8).flatten()
    row, k = data.draw(st.integers(0, 16 * tiles - 1)), data.draw(st.integers(0, 256 * steps - 1))
    tile, r, step, u = row // 16, row % 16, k // 256, k % 256 // 128
    q, j, c, lane = k % 128 // 32, k % 32 // 8, k % 8, 16 * (k % 128 // 32) + r
    word = int(words[((tile * steps + step) * 2 + u) * 256 + lane * 4 + j])
    assert (word >> (4 * c)) & 15 == int(unpack_codes(packed)[row, k])
    place = (tile * steps + step) * 256 + lane * 4 + u * 2 + j // 2
    assert int(scales[place]) == int(scale.view(torch.uint8)[row, 16 * step + 8 * u + 2 * q + j // 2])


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_bits_of_a_flavour_do_not_overlap(flavour):
    first = [bit for sign, low in fragments.FLAVOURS[flavour] for bit in (sign, *range(low, low + 3))]
    assert sorted(bit + side * fragments.DISTANCES[flavour] for side in range(2) for bit in first) == list(range(32))


@pytest.mark.parametrize(("rows", "k"), [(8, 256), (24, 256), (16, 128), (16, 320)])
def test_other_shapes_are_refused(rows, k):
    assert fragments.refuse_shape(rows, k)
    with pytest.raises(ValueError, match="not made of tiles of 16 rows by 256"):
        fragments.arrange(torch.zeros(rows, k // 2, dtype=torch.uint8), "bfloat16")


def test_layouts_have_tags():
    packed, scale = make_weight(1, 1, 5)
    assert torch.equal(fragments.arrange_as(packed, "nvfp4_fragments_float16"), fragments.arrange(packed, "float16"))
    with pytest.raises(ValueError, match="no weight has the layout 'nvfp4_fragments'"):
        fragments.arrange_as(scale, "nvfp4_fragments")
