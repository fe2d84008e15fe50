"""NVFP4 against ModelOpt's formula, the compressed-tensors package and hand-computed layouts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import nvfp4

POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_code(x: float) -> int:
    """E2M1 by definition: nearest value, ties to the even code, in exact arithmetic."""
    magnitude = min(range(8), key=lambda code: (abs(POSITIVE[code] - abs(x)), code % 2))
    return magnitude | (8 if x < 0 else 0)


def modelopt_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ModelOpt's published dynamic weight formula, written independently."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scale_2 = weight.abs().amax().float() / (6.0 * 448.0)
    blocks = weight.float().view(weight.shape[0], -1, 16)
    scale = blocks.abs().amax(-1) / (6.0 * scale_2)
    scale[scale == 0] = 1.0
    scale = scale.clamp(2**-9, 448.0).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * scale_2)[..., None]
    ordinal = torch.searchsorted(bounds, scaled.abs())
    ordinal += (scaled.abs()[..., None] == bounds[[1, 3, 5]]).any(-1)
    codes = (ordinal + 8 * (scaled < 0)).view(weight.shape).to(torch.uint8)
    return (codes[:, 1::2] << 4) | codes[:, 0::2], scale, scale_2


def make_weight(seed: int, rows: int = 24, columns: int = 64, spread: float = 3.0) -> torch.Tensor:
    """Normal values whose magnitude varies by block over ``spread`` decades, with a zero block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(rows, columns // 16, 16, generator=generator)
    blocks *= 10 ** (-spread * torch.rand(rows, columns // 16, 1, generator=generator))
    blocks[0, 0] = 0
    return blocks.view(rows, columns) * 0.05


def scheme():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
    )
    return quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def test_every_byte_decodes_to_its_two_values():
    packed = torch.arange(256, dtype=torch.uint8).view(32, 8)
    scale = torch.full((32, 1), 1.0).to(torch.float8_e4m3fn)
    decoded = nvfp4.decode_blocks(packed, scale).view(-1, 2)
    for byte in range(256):
        for position, code in enumerate((byte & 15, byte >> 4)):
            value = POSITIVE[code & 7] * (-1 if code & 8 else 1)
            assert decoded[byte, position] == value
            assert torch.signbit(decoded[byte, position]) == bool(code & 8)
    codes = nvfp4.unpack_codes(packed)
    assert torch.equal(nvfp4.pack_codes(codes), packed)
    assert torch.equal(nvfp4.decode_e2m1(codes).view(-1), decoded.view(-1))


@pytest.mark.parametrize("bound", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_thresholds_and_their_neighbours(bound, sign):
    centre = torch.tensor(bound)
    samples = torch.stack([torch.nextafter(centre, torch.tensor(0.0)), centre, torch.nextafter(centre, centre * 2)])
    codes = nvfp4.encode_e2m1(samples * sign)
    assert codes.tolist() == [nearest_code(float(x) * sign) for x in samples]


def test_encode_saturates_and_treats_zero_signs_as_documented():
    samples = torch.tensor([1e30, -1e30, torch.inf, 0.0, -0.0, -1e-9])
    assert nvfp4.encode_e2m1(samples).tolist() == [7, 15, 7, 0, 0, 8]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
@settings(max_examples=100, deadline=None)
def test_encode_is_round_to_nearest_even(values):
    assert nvfp4.encode_e2m1(torch.tensor(values)).tolist() == [nearest_code(x) for x in values]


@given(st.integers(0, 10_000), st.sampled_from(["modelopt", "compressed-tensors"]))
@settings(max_examples=25, deadline=None)
def test_codes_survive_a_round_trip(seed, convention):
    """Quantizing what was decoded gives the same values, when the global scale is kept."""
    packed, scale, multiplier = nvfp4.encode(make_weight(seed), convention=convention)
    decoded = nvfp4.decode_blocks(packed, scale) * multiplier
    again, scale_again, _ = nvfp4.encode(decoded, convention=convention, global_scale=multiplier)
    # A block whose largest code is below 6 may choose a smaller scale; compare the blocks that do reach 6.
    full = (nvfp4.unpack_codes(packed).view(24, 4, 16) & 7).amax(-1) == 7
    assert full.float().mean() > 0.9
    assert torch.equal(scale.float()[full], scale_again.float()[full])
    codes, codes_again = (nvfp4.unpack_codes(p).view(24, 4, 16)[full] for p in (packed, again))
    assert torch.equal(nvfp4.decode_e2m1(codes), nvfp4.decode_e2m1(codes_again))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [1.0, 4.0, 8.0])
def test_modelopt_bit_exact(seed, spread):
    weight = make_weight(seed, spread=spread)
    for mine, theirs in zip(nvfp4.encode(weight), modelopt_quantize(weight), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.float(), theirs.float())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [1.0, 4.0, 8.0])
def test_compressed_tensors_bit_exact(seed, spread):
    """Against the installed package: observer arithmetic, compressor and decompressor."""
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    compressors = pytest.importorskip("compressed_tensors.compressors.nvfp4")
    weight = make_weight(seed, spread=spread)
    blocks = weight.view(24, 4, 16)
    theirs_global = helpers.generate_gparam(weight.amin(), weight.amax())
    theirs_scale, _ = helpers.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme().weights, global_scale=theirs_global
    )
    state = {"weight": weight.clone(), "weight_scale": theirs_scale, "weight_global_scale": theirs_global}
    compressed = compressors.NVFP4PackedCompressor.compress(state, scheme())
    packed, scale, multiplier = nvfp4.encode(weight, convention="compressed-tensors")
    assert torch.equal(packed, compressed["weight_packed"])
    assert torch.equal(scale.float(), compressed["weight_scale"].float())
    assert torch.equal(multiplier, nvfp4.to_multiplier(theirs_global, "compressed-tensors")[0])


def test_conventions_differ_exactly_where_documented():
    weight = torch.zeros(2, 32)
    weight[0, :16] = 1.0
    weight[1, 0] = 1e-9  # underflows: 448e-9 is below half of 2^-9
    scales = {c: nvfp4.encode(weight, convention=c)[1].float() for c in ("modelopt", "compressed-tensors")}
    assert scales["modelopt"].tolist() == [[448.0, 1.0], [2**-9, 1.0]]
    assert scales["compressed-tensors"].tolist() == [[448.0, 0.125], [0.125, 0.125]]


@given(st.integers(0, 10_000), st.sampled_from(["modelopt", "compressed-tensors"]))
@settings(max_examples=30, deadline=None)
def test_search_is_never_worse_than_max6(seed, convention):
    weight = make_weight(seed, spread=1.0)
    errors = {}
    for method in ("max6", "search"):
        packed, scale, multiplier = nvfp4.encode(weight, method=method, convention=convention)
        decoded = nvfp4.decode_blocks(packed, scale).double() * multiplier.double()
        errors[method] = (decoded - weight.double()).view(24, 4, 16).square().sum(-1)
    assert bool((errors["search"] <= errors["max6"] * (1 + 1e-5) + 1e-30).all())
    assert errors["search"].sum() < 0.98 * errors["max6"].sum()


def test_zero_tensor_round_trips():
    for convention in ("modelopt", "compressed-tensors"):
        packed, scale, multiplier = nvfp4.encode(torch.zeros(4, 32), convention=convention, method="search")
        assert multiplier == 1.0
        assert torch.count_nonzero(nvfp4.decode_blocks(packed, scale)) == 0


def test_meta_tensors_give_meta_results():
    packed, scale, multiplier = nvfp4.encode(torch.empty(6, 64, device="meta"), method="search")
    assert {packed.device.type, scale.device.type, multiplier.device.type} == {"meta"}
    assert (packed.shape, packed.dtype) == ((6, 32), torch.uint8)
    assert (scale.shape, scale.dtype) == ((6, 4), torch.float8_e4m3fn)
    assert (multiplier.shape, multiplier.dtype) == ((), torch.float32)


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight": torch.zeros(2, 24)},
        {"weight": torch.zeros(32)},
        {"weight": torch.full((1, 16), torch.nan)},
        {"weight": torch.full((1, 16), torch.inf)},
        {"weight": torch.zeros(1, 16), "method": "max5"},
        {"weight": torch.zeros(1, 16), "convention": "reciprocal"},
    ],
)
def test_encode_refuses(arguments):
    weight = arguments.pop("weight")
    with pytest.raises(ValueError, match="NVFP4|NaN|method|convention"):
        nvfp4.encode(weight, **arguments)


@pytest.mark.parametrize("amax", [1e-3, 0.05, 1.0, 300.0])
def test_swapped_convention_is_refused(amax):
    weight = make_weight(1)
    weight *= amax / weight.abs().max()
    packed, scale, multiplier = nvfp4.encode(weight)
    nvfp4.check_scales(packed, scale, multiplier, "good")
    nvfp4.check_scales(packed, scale, multiplier.expand(24), "good rows")
    with pytest.raises(CheckpointError, match="convention"):
        nvfp4.check_scales(packed, scale, nvfp4.to_multiplier(multiplier, "compressed-tensors"), "layer.weight")


def test_damaged_scales_are_refused():
    packed, scale, multiplier = nvfp4.encode(make_weight(2))

    def check(packed=packed, scale=scale, multiplier=multiplier):
        nvfp4.check_scales(packed, scale, multiplier, "model.layers.3.up_proj in shard-1")

    for byte in (0x7F, 0xFF, 0x00, 0x80, 0x81):  # NaN, NaN, 0, -0, negative
        bad = scale.clone()
        bad.view(torch.uint8)[5, 1] = byte
        with pytest.raises(CheckpointError, match="block scale.*up_proj in shard-1"):
            check(scale=bad)
    for value in (torch.nan, torch.inf, 0.0, -1e-4):
        with pytest.raises(CheckpointError, match="global scale"):
            check(multiplier=torch.tensor(value))
    for changed in (
        {"packed": packed[:, :-1]},
        {"packed": packed.int()},
        {"scale": scale[:, :-1]},
        {"scale": scale.float()},
        {"multiplier": multiplier.expand(3)},
    ):
        with pytest.raises(CheckpointError):
            check(**changed)


@pytest.mark.parametrize("rows,columns", [(1, 1), (128, 4), (130, 5), (256, 12), (300, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_swizzle_places_and_restores_every_scale(rows, columns, dtype):
    linear = torch.randint(1, 120, (rows, columns), dtype=torch.uint8).view(dtype)
    flat = nvfp4.swizzle_scales_128x4(linear)
    tiles = -(-columns // 4)
    assert flat.dtype == dtype and flat.shape == (-(-rows // 128) * tiles * 512,)
    m, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    offset = ((m // 128) * tiles + j // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + j % 4
    raw = flat.view(torch.uint8)
    assert torch.equal(raw[offset], linear.view(torch.uint8))
    assert int(torch.count_nonzero(raw)) == rows * columns  # padding is zero
    restored = nvfp4.unswizzle_scales_128x4(flat, rows, columns)
    assert torch.equal(restored.view(torch.uint8), linear.view(torch.uint8))


def test_swizzle_offsets_worked_by_hand():
    linear = torch.zeros(256, 8, dtype=torch.uint8)
    for value, (m, j) in enumerate([(0, 1), (1, 0), (32, 0), (0, 4), (128, 0), (255, 7)], start=1):
        linear[m, j] = value
    flat = nvfp4.swizzle_scales_128x4(linear)
    assert [int(flat[i]) for i in (1, 16, 4, 512, 1024, 2047)] == [1, 2, 3, 4, 5, 6]
    view = nvfp4.view_scales_for_tma(flat, 256, 8)
    assert view.shape == (1, 2, 2, 2, 256)
    assert int(view[0, 1, 0, 0, 0]) == 5 and int(view[0, 1, 1, 1, 255]) == 6
    assert view.data_ptr() == flat.data_ptr()


def test_share_global_scale_never_gives_zero_and_refuses_a_smaller_one():
    scale = torch.tensor([[2.0**-9, 448.0], [1.0, 3.25]]).to(torch.float8_e4m3fn)
    moved, shared = nvfp4.share_global_scale(scale, torch.tensor([1e-6, 1.0]))
    assert shared == 1.0 and moved.float().tolist() == [[2.0**-9, 2.0**-9], [1.0, 3.25]]
    with pytest.raises(ValueError, match="below that of a row"):
        nvfp4.share_global_scale(scale, torch.tensor([0.5, 1.0]), torch.tensor(0.7))
