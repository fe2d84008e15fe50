"""MXFP8 against exact arithmetic, ModelOpt's formula, the compressed-tensors package and torch's own e8m0."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import CheckpointError
from mmcompile.core.formats import mxfp8

RULES = ["ocp", "modelopt", "compressed-tensors"]
E4M3 = sorted({float(v) for v in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()})


def exact_scale(amax: float, rule: str) -> int:
    """The published rules in exact rational arithmetic."""
    if amax == 0:
        return 0
    value = Fraction(amax)
    exponent = -400
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    if rule == "modelopt":
        power = next(p for p in range(-400, 200) if Fraction(2) ** p * 448 >= value)
    else:
        power = exponent - 8 + (rule == "compressed-tensors" and value >= Fraction(7, 4) * Fraction(2) ** exponent)
    return max(-127, min(127, power)) + 127


def exact_value(x: float, scale: int) -> float:
    """Nearest E4M3 value of x / 2^(scale - 127), ties to the even code, saturating."""
    wanted = abs(Fraction(x)) / Fraction(2) ** (scale - 127)
    code = min(range(len(E4M3)), key=lambda c: (abs(Fraction(E4M3[c]) - wanted), c % 2))
    return math.copysign(E4M3[code], x)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    rule=st.sampled_from(RULES),
)
def test_encode_is_the_published_rule_in_exact_arithmetic(values, rule):
    weight = torch.tensor([values])
    have, scale = mxfp8.encode(weight, rule=rule)
    want = exact_scale(max(map(abs, values)), rule)
    assert scale.tolist() == [[want]]
    assert have.float().tolist() == [[exact_value(v, want) for v in values]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("power", [-149, -130, -127, -126, -118, -1, 0, 8, 9, 127])
def test_scales_at_the_borders(rule, power):
    centre = 2.0**power
    for amax in (centre, 1.75 * centre, float(torch.nextafter(torch.tensor(1.75 * centre), torch.tensor(math.inf)))):
        single = float(torch.tensor(amax))
        if math.isfinite(single):
            assert mxfp8.choose_scale(torch.tensor(single), rule).item() == exact_scale(single, rule)


def test_the_largest_element_saturates_in_ocp_only():
    weight = torch.zeros(1, 32)
    weight[0, 3] = -500.0
    decoded = {rule: mxfp8.decode(*mxfp8.encode(weight, rule=rule))[0, 3].item() for rule in RULES}
    assert decoded == {"ocp": -448.0, "modelopt": -512.0, "compressed-tensors": -512.0}


def modelopt_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ModelOpt's published formula, written independently."""
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    descale = blocks.abs().amax(-1) / 448.0
    exponent = torch.where(descale > 0, torch.log2(descale), torch.tensor(-127.0)).ceil().clamp(-127, 127)
    scaled = blocks * torch.exp2(-exponent)[..., None]
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(weight.shape), (exponent + 127).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_to_modelopt(dtype):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 256, generator=generator) * 10 ** (4 * torch.rand(64, 1, generator=generator) - 4)
    weight[3, 32:64] = 0
    weight = weight.to(dtype)
    values, scale = mxfp8.encode(weight)
    want_values, want_scale = modelopt_quantize(weight)
    assert torch.equal(scale, want_scale)
    assert torch.equal(values.view(torch.uint8), want_values.view(torch.uint8))


def test_modelopt_agrees_at_every_bf16_block_maximum():
    every = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16)  # all positive normal numbers
    blocks = every[:, None].repeat(1, 32)
    assert torch.equal(mxfp8.encode(blocks)[1], modelopt_quantize(blocks)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_compressed_tensors(dtype):
    package = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    args = package.QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    scheme = package.QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(16, 128, generator=generator) * 0.05).to(dtype)
    blocks = weight.view(16, -1, 32)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    stored = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    values, have = mxfp8.encode(weight, rule="compressed-tensors")
    assert torch.equal(have, stored["weight_scale"])
    assert torch.equal(values.view(torch.uint8), stored["weight"].view(torch.uint8))
    opened = MXFP8QuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(mxfp8.decode(values, have).to(opened.dtype), opened)


def test_scale_codes_are_torchs_e8m0():
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e8m0fnu).float()
    have = mxfp8.decode_scale(codes)
    assert torch.equal(have[:255], want[:255]) and have[255].isnan() and want[255].isnan()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 99), rule=st.sampled_from(RULES))
def test_encoding_what_was_decoded_changes_nothing(rows, blocks, seed, rule):
    weight = torch.randn(rows, 32 * blocks, generator=torch.Generator().manual_seed(seed))
    decoded = mxfp8.decode(*mxfp8.encode(weight, rule=rule))
    assert torch.equal(mxfp8.decode(*mxfp8.encode(decoded, rule=rule)), decoded)
    bound = weight.abs() / 16 + weight.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1) * 2.0**-17
    if rule != "ocp":
        assert bool(((decoded - weight).abs() <= bound).all())


def test_stacked_and_meta_weights():
    weight = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    values, scale = mxfp8.encode(weight)
    for i in range(3):
        part = mxfp8.encode(weight[i])
        assert torch.equal(values[i].view(torch.uint8), part[0].view(torch.uint8)) and torch.equal(scale[i], part[1])
    meta = mxfp8.encode(torch.empty(4, 64, device="meta"))
    assert [(t.shape, t.dtype) for t in meta] == [((4, 64), torch.float8_e4m3fn), ((4, 2), torch.uint8)]


@pytest.mark.parametrize("shape", [(4, 33), (31,), ()])
def test_wrong_shape(shape):
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp8.encode(torch.zeros(shape))


def test_wrong_rule_and_values():
    with pytest.raises(ValueError, match="rule must be one of"):
        mxfp8.encode(torch.zeros(1, 32), rule="nearest")
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            mxfp8.encode(torch.full((1, 32), bad))


def parts():
    return mxfp8.encode(torch.randn(4, 64, generator=torch.Generator().manual_seed(5)) * 0.02)


def test_check_accepts_what_encode_gives():
    for rule in RULES:
        mxfp8.check_parts(*mxfp8.encode(torch.randn(4, 64) * 0.02, rule=rule), "here")
    mxfp8.check_parts(*mxfp8.encode(torch.zeros(4, 64)), "here")


def test_check_refuses_nan():
    values, scale = parts()
    scale[1, 1] = 255
    with pytest.raises(CheckpointError, match=r"MXFP8 scale is NaN \(code 255\) \(at here\)"):
        mxfp8.check_parts(values, scale, "here")
    for code in (0x7F, 0xFF):
        values, scale = parts()
        values.view(torch.uint8)[2, 7] = code
        with pytest.raises(CheckpointError, match="MXFP8 element is NaN"):
            mxfp8.check_parts(values, scale, "here")


def test_check_refuses_the_wrong_scale_convention():
    values, scale = parts()
    with pytest.raises(CheckpointError, match="which no model has.*check the scale convention"):
        mxfp8.check_parts(values, 254 - scale, "here")


@pytest.mark.parametrize("change", ["values dtype", "scale dtype", "scale shape", "columns", "vector"])
def test_check_refuses_other_shapes_and_types(change):
    values, scale = parts()
    values, scale = {
        "values dtype": (values.view(torch.uint8), scale),
        "scale dtype": (values, scale.float()),
        "scale shape": (values, scale[:, :1]),
        "columns": (values[:, :40], scale),
        "vector": (values[0], scale[0]),
    }[change]
    with pytest.raises(CheckpointError, match="must be"):
        mxfp8.check_parts(values, scale, "here")
