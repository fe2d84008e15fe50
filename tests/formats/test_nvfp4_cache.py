"""The NVFP4 cache: the quantizer against exact arithmetic, layouts byte for byte, readers of another layout."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import ArtifactError, UsageError
from mmcompile.core.formats import nvfp4
from mmcompile.core.formats import nvfp4_cache as cache_format

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
TAGS = [cache_format.LINEAR, cache_format.TOKEN_QUAD]


def round_code(value: Fraction, table) -> int:
    """Code of the nearest entry, ties to the even code, saturating."""
    return min(range(len(table)), key=lambda c: (abs(Fraction(table[c]) - value), c % 2))


def quantize_group(values: list[float], global_scale: float) -> tuple[list[int], int]:
    """The published quantizer on 16 bf16 values, each rounding done by hand."""
    factor = np.float32(1.0) / np.float32(global_scale)
    amax = np.float32(max(1e-12, *map(abs, values)))
    raw = max(np.float32(factor * np.float32(amax / np.float32(6.0))), np.float32(2.0**-9))
    code = round_code(Fraction(float(raw)), E4M3)
    codes = []
    for value in values:
        scaled = np.float32(np.clip(np.float32(np.float32(value) * factor), -4096, 4096))
        quotient = np.float32(scaled / np.float32(E4M3[code]))
        magnitude = round_code(abs(Fraction(float(quotient))), E2M1)
        codes.append(magnitude | 8 if magnitude and value < 0 else magnitude)
    return codes, code


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.floats(-3e4, 3e4, width=16), min_size=16, max_size=16),
    global_scale=st.sampled_from([1.0, 0.5, 0.0123, 7.0]),
)
def test_quantizer_is_the_published_one(values, global_scale):
    x = torch.tensor(values).bfloat16()
    packed, scale = cache_format.quantize_rows(x[None], global_scale)
    codes, code = quantize_group(x.float().tolist(), global_scale)
    assert nvfp4.unpack_codes(packed).tolist() == [codes]
    assert scale.view(torch.uint8).tolist() == [[code]]


def test_the_unit_path_of_the_writer_multiplies_by_a_sixth_and_gives_the_same_scale():
    """vLLM computes amax * RN(1/6) at unit scale: equal to amax / 6 for every bf16 maximum."""
    every = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    _, scale = cache_format.quantize_rows(every[:, None].repeat(1, 16))
    product = (every.float() * torch.tensor(1.0 / 6.0)).clamp(2.0**-9, 448.0)
    assert torch.equal(scale[:, 0].view(torch.uint8), product.to(torch.float8_e4m3fn).view(torch.uint8))


def test_ties_zeros_saturation_and_garbage():
    row = torch.tensor([6.0, 0.25, 0.75, -0.25, -0.0, 1.25, 1.75, -2.5, 3.5, 5.0, -5.0, 0.0, 0.1, -0.1, 2.0, 4.0])
    packed, scale = cache_format.quantize_rows(row[None])
    assert scale.float().item() == 1.0
    assert nvfp4.unpack_codes(packed).tolist() == [[7, 0, 2, 0, 0, 2, 4, 12, 6, 6, 14, 0, 0, 0, 4, 6]]
    huge = torch.full((1, 16), 3e38)
    huge[0, 0] = float("-inf")
    packed, scale = cache_format.quantize_rows(huge)
    assert scale.float().item() == 448.0 and nvfp4.unpack_codes(packed)[0].tolist() == [15] + [7] * 15
    packed, scale = cache_format.quantize_rows(torch.full((1, 16), float("nan")))
    assert bool(cache_format.dequantize_rows(packed, scale).isfinite().all())
    packed, scale = cache_format.quantize_rows(torch.zeros(1, 16))
    assert scale.float().item() == 2.0**-9 and not packed.any()


def test_rows_are_rounded_to_bf16_first():
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    for have, want in zip(cache_format.quantize_rows(x), cache_format.quantize_rows(x.bfloat16()), strict=True):
        assert torch.equal(have.view(torch.uint8), want.view(torch.uint8))


def locate_by_hand(t: int, g: int, groups: int, quad: bool) -> int:
    if not quad:
        return t * groups + g
    share = groups // 4
    return (t // 4 * 4 + g // share) * groups + (g % share) * 4 + t % 4


def read_byte_by_byte(cache, page, place, head, side, page_size, d, quad):
    """One row decoded from the raw bytes of a page, as the layout is published."""
    run_bytes = page_size * (d // 2 + d // 16)
    raw = cache.flatten().tolist()
    start = (page * cache.shape[1] + 2 * head + side) * run_bytes
    row = []
    for i in range(d):
        byte = raw[start + place * (d // 2) + i // 2]
        code = byte >> 4 if i % 2 else byte & 15
        scale = raw[start + page_size * (d // 2) + locate_by_hand(place, i // 16, d // 16, quad)]
        row.append(E2M1[code & 7] * (-1 if code & 8 else 1) * E4M3[scale])
    return row


@settings(max_examples=25, deadline=None)
@given(
    tag=st.sampled_from(TAGS), heads=st.integers(1, 3), d=st.sampled_from([64, 128, 256]),
    page_size=st.sampled_from([4, 8, 12]), data=st.data(),
)  # fmt: skip
def test_insert_writes_the_published_bytes(tag, heads, d, page_size, data):
    pages = 3
    slots = data.draw(st.lists(st.integers(0, pages * page_size - 1), unique=True, max_size=6).map(lambda s: [*s, -1]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    k, v = (torch.randn(len(slots), heads, d, generator=generator) for _ in range(2))
    cache = torch.full((pages, 2 * heads, page_size, d // 2 + d // 16), 0xFF, dtype=torch.uint8)
    before = cache.clone()
    cache_format.insert_kv(cache, tag, k, v, torch.tensor(slots))
    assert int((cache != before).sum()) <= (len(slots) - 1) * 2 * heads * cache.shape[-1]
    for row, slot in enumerate(slots[:-1]):
        for head in range(heads):
            for side, x in enumerate((k, v)):
                have = read_byte_by_byte(
                    cache, slot // page_size, slot % page_size, head, side, page_size, d,
                    tag == cache_format.TOKEN_QUAD and side == 1,
                )  # fmt: skip
                want = cache_format.dequantize_rows(*cache_format.quantize_rows(x[row, head]))
                assert have == want.tolist()


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.03, 0.5)])
def test_read_gives_back_what_was_written(tag, scales):
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(24, 4, 128, generator=generator) for _ in range(2))
    cache = torch.zeros(4, 8, 8, 72, dtype=torch.uint8)
    pages = torch.tensor([3, 0, 2])
    slots = (pages[:, None] * 8 + torch.arange(8)).flatten()
    cache_format.insert_kv(cache, tag, k, v, slots, k_scale=scales[0], v_scale=scales[1])
    for have, x, factor in zip(
        cache_format.read_kv(cache, tag, pages, k_scale=scales[0], v_scale=scales[1]), (k, v), scales, strict=True
    ):
        assert torch.equal(have, cache_format.dequantize_rows(*cache_format.quantize_rows(x, factor), factor))
        assert float((have - x).norm() / x.norm()) < 0.11


def test_tokens_may_be_written_one_at_a_time():
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn(8, 2, 64, generator=generator) for _ in range(2))
    slots = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    together, single = (torch.zeros(1, 4, 8, 36, dtype=torch.uint8) for _ in range(2))
    cache_format.insert_kv(together, cache_format.TOKEN_QUAD, k, v, slots)
    for i in range(8):
        cache_format.insert_kv(single, cache_format.TOKEN_QUAD, k[i : i + 1], v[i : i + 1], slots[i : i + 1])
    assert torch.equal(together, single)


def test_a_reader_of_another_layout_gets_wrong_values_and_is_refused():
    """vllm issue 50084: V read linearly on a page with token quads, with a different magnitude in each group."""
    v = torch.arange(1, 9).repeat_interleave(16).expand(8, 1, 128) * torch.arange(1, 9)[:, None, None].float()
    cache = torch.zeros(1, 2, 8, 72, dtype=torch.uint8)
    cache_format.insert_kv(cache, cache_format.TOKEN_QUAD, v, v, torch.arange(8))
    right = cache_format.read_kv(cache, cache_format.TOKEN_QUAD, torch.tensor([0]))[1]
    wrong_k, wrong_v = cache_format.read_kv(cache, cache_format.LINEAR, torch.tensor([0]))
    assert float((right - v).norm() / v.norm()) < 0.1 < 0.3 < float((wrong_v - v).norm() / v.norm())
    assert torch.equal(wrong_k, right)
    cache_format.check_layout(cache_format.TOKEN_QUAD, cache_format.TOKEN_QUAD, "reader")
    with pytest.raises(ArtifactError, match="layout 'nvfp4.token_quad' and is read as 'nvfp4.linear' .at sm90 kernel"):
        cache_format.check_layout(cache_format.TOKEN_QUAD, cache_format.LINEAR, "sm90 kernel")
    with pytest.raises(UsageError, match="unknown cache layout 'nvfp4.tokenquad'; did you mean 'nvfp4.token_quad'"):
        cache_format.check_layout("nvfp4.tokenquad", cache_format.LINEAR, "reader")


def test_change_layout_moves_bytes_only():
    k, v = (torch.randn(16, 2, 128, generator=torch.Generator().manual_seed(i)) for i in range(2))
    caches = {tag: torch.zeros(2, 4, 8, 72, dtype=torch.uint8) for tag in TAGS}
    for tag, cache in caches.items():
        cache_format.insert_kv(cache, tag, k, v, torch.arange(16))
    for have in TAGS:
        for wanted in TAGS:
            assert torch.equal(cache_format.change_layout(caches[have], have, wanted), caches[wanted])


def test_index_cache_holds_codes_then_scales():
    keys = torch.randn(5, 128, generator=torch.Generator().manual_seed(6))
    cache = torch.zeros(2, 8, 72, dtype=torch.uint8)
    slots = torch.tensor([3, 15, -1, 8, 0])
    cache_format.insert_index(cache, cache_format.INDEX, keys, slots)
    raw = cache.view(2, -1)
    packed, scale = cache_format.quantize_rows(keys)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = divmod(slot, 8)
            assert torch.equal(raw[page, place * 64 : place * 64 + 64], packed[row])
            assert torch.equal(raw[page, 512 + place * 8 : 520 + place * 8], scale[row].view(torch.uint8))
    read = cache_format.read_index(cache, cache_format.INDEX, torch.tensor([1, 0]))
    assert torch.equal(read[7], cache_format.dequantize_rows(packed[1], scale[1]))
    assert torch.equal(read[8], cache_format.dequantize_rows(packed[4], scale[4]))


def test_index_keys_as_the_score_kernels_round_them():
    packed, scale = cache_format.quantize_rows(torch.full((1, 16), 2000.0))
    assert scale.float().item() == 320.0  # 2000 / 6 rounded to e4m3
    assert cache_format.dequantize_index(packed, scale).float().unique().item() == 448.0
    packed, scale = cache_format.quantize_rows(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))
    exact = cache_format.dequantize_rows(packed, scale)
    rounded = cache_format.dequantize_index(packed, scale).float()
    table = torch.tensor(E4M3)
    nearest = (exact.abs()[..., None] - table).abs().amin(-1)
    assert torch.equal((rounded.abs() - exact.abs()).abs(), nearest)
    q = torch.tensor([1.0, 1.0624, 1.0626, 500.0, -1e4])
    assert cache_format.quantize_index_query(q).float().tolist() == [1.0, 1.0, 1.0, 448.0, -448.0]


@pytest.mark.parametrize(
    ("shape", "tag", "message"),
    [
        ((2, 4, 8, 72), cache_format.INDEX, "is not one of a KV cache"),
        ((2, 6, 8, 72), cache_format.LINEAR, "do not fit the cache"),
        ((2, 4, 6, 72), cache_format.LINEAR, "page_size must be a multiple of 4, got 6"),
        ((2, 4, 8, 64), cache_format.LINEAR, r"cache must be contiguous uint8 \[pages, 2 \* kv_heads, page_size, 72\]"),
    ],
)
def test_wrong_caches(shape, tag, message):
    rows = torch.zeros(1, 2, 128)
    with pytest.raises(ValueError, match=message):
        cache_format.insert_kv(torch.zeros(shape, dtype=torch.uint8), tag, rows, rows, torch.tensor([0]))


def test_wrong_index_cache_head_size_and_dtype():
    with pytest.raises(ValueError, match="is not one of an index-key cache"):
        cache_format.read_index(torch.zeros(1, 8, 72, dtype=torch.uint8), cache_format.LINEAR, torch.tensor([0]))
    with pytest.raises(ValueError, match="head_dim a multiple of 16, got 72"):
        cache_format.row_bytes(72)
    rows = torch.zeros(1, 1, 80)
    with pytest.raises(ValueError, match="needs head_dim a multiple of 64, got 80"):
        cache = torch.zeros(1, 2, 8, 45, dtype=torch.uint8)
        cache_format.insert_kv(cache, cache_format.TOKEN_QUAD, rows, rows, torch.tensor([0]))
    with pytest.raises(ValueError, match="got torch.int8"):
        cache_format.read_index(torch.zeros(1, 8, 72, dtype=torch.int8), cache_format.INDEX, torch.tensor([0]))
    assert cache_format.row_bytes(128) == 72


def test_products_of_codes_and_scales_are_exact_in_bf16_and_fp16_but_not_in_e4m3():
    """Why no kernel of an exact operation decodes with QMUL4, whose results are e4m3 (see targets/_kernels)."""
    magnitudes = nvfp4.decode_e2m1(torch.arange(8, dtype=torch.uint8))
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = (magnitudes[:, None] * scales).flatten()
    assert torch.equal(products.bfloat16().float(), products) and torch.equal(products.half().float(), products)
    rounded = products.clamp(max=448.0).to(torch.float8_e4m3fn).float()
    assert int((rounded == products).sum()) == 741 and len(products) == 1016
    below = products <= 448.0
    error = (rounded - products).abs()[below & (products > 0)] / products[below & (products > 0)]
    assert float(error.max()) > 2.0**-5 and float(products.max()) == 2688.0
