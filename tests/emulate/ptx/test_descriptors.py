"""Matrix descriptors: canonical layouts and swizzles against byte images built row by row; instruction descriptors."""

import numpy as np
import pytest

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.descriptors import (
    ELEMENT_BITS,
    locate_elements,
    parse_tcgen05_descriptor,
    parse_wgmma_descriptor,
    read_elements,
    swizzle,
)
from mmcompile.emulate.ptx.instruction_descriptor import parse_instruction_descriptor

RNG = np.random.default_rng(7)


def encode_wgmma(start, leading, stride, span):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | {0: 0, 128: 1, 64: 2, 32: 3}[span] << 62


def encode_tcgen05(start, leading, stride, span):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | {0: 0, 128: 2, 64: 4, 32: 6}[span] << 61


def swizzled_image(rows, span):
    """Rows of ``span`` bytes one after the other, their 16-byte chunks permuted as the TMA does it."""
    image = np.zeros(rows.size, np.uint8)
    for r, row in enumerate(rows):
        for chunk in range(span // 16):
            place = chunk ^ (r * span // 128 % (span // 16))
            image[r * span + place * 16 : r * span + place * 16 + 16] = row[chunk * 16 : chunk * 16 + 16]
    return image


BOTH = [(parse_wgmma_descriptor, encode_wgmma), (parse_tcgen05_descriptor, encode_tcgen05)]


@pytest.mark.parametrize("parse,encode", BOTH)
@pytest.mark.parametrize("span", [32, 64, 128])
@pytest.mark.parametrize("element", ["bf16", "e4m3", "tf32"])
def test_k_major_swizzled(parse, encode, span, element):
    """Rows of K of one span; groups of eight rows lie 8 * span apart; K advances by moving the start address."""
    size = ELEMENT_BITS[element] // 8
    rows, base = 64, 3072
    raw = RNG.integers(0, 120, (rows, span)).astype(np.uint8)
    shared = np.zeros(base + rows * span, np.uint8)
    shared[base:] = swizzled_image(raw, span)
    step = 32  # bytes of K of one instruction
    for first in range(0, span, step):
        descriptor = parse(encode(base + first, 16, 8 * span, span))
        places = locate_elements(descriptor, rows, step // size, ELEMENT_BITS[element])
        plain = np.arange(rows * span).reshape(rows, span)[:, first : first + step : size]
        wanted = read_elements(raw.reshape(-1), plain, element)
        np.testing.assert_array_equal(read_elements(shared, places, element), wanted)


def test_k_major_without_swizzle():
    """Core matrices of 8 rows of 16 bytes: leading offset along K, stride offset along M."""
    raw = RNG.integers(0, 256, (64, 32)).astype(np.uint8)
    leading, stride = 2048, 256
    shared = np.zeros(8192, np.uint8)
    for r in range(64):
        for chunk in range(2):
            at = 512 + r // 8 * stride + chunk * leading + r % 8 * 16
            shared[at : at + 16] = raw[r, chunk * 16 : chunk * 16 + 16]
    places = locate_elements(parse_wgmma_descriptor(encode_wgmma(512, leading, stride, 0)), 64, 32, 8)
    np.testing.assert_array_equal(shared[places], raw)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_mn_major_swizzled(span):
    """Transposed bf16: rows of K hold span bytes of M; blocks of M lie a leading offset apart, 8 K a stride offset."""
    matrix = RNG.integers(0, 60000, (128, 16)).astype(np.uint16)  # [M, K]
    across = span // 2
    blocks = 128 // across
    leading, stride = 16 * span, 8 * span
    shared = np.zeros(blocks * 16 * span, np.uint8)
    for block in range(blocks):
        rows = np.ascontiguousarray(matrix[block * across : (block + 1) * across].T).view(np.uint8)  # [16, span]
        shared[block * leading : (block + 1) * leading] = swizzled_image(rows, span)
    places = locate_elements(parse_tcgen05_descriptor(encode_tcgen05(0, leading, stride, span)), 128, 16, 16, True)
    np.testing.assert_array_equal(shared.view(np.uint16)[places >> 1], matrix)


def test_mn_major_without_swizzle():
    """Transposed bf16 core matrices: 8 M contiguous, 8 K in rows of 16 bytes, stride along M, leading along K."""
    matrix = RNG.integers(0, 60000, (64, 16)).astype(np.uint16)
    leading, stride = 128, 256
    shared = np.zeros(4096, np.uint8)
    for m in range(64):
        for k in range(16):
            at = m // 8 * stride + k // 8 * leading + k % 8 * 16 + m % 8 * 2
            shared[at : at + 2] = matrix[m, k : k + 1].view(np.uint8)
    places = locate_elements(parse_wgmma_descriptor(encode_wgmma(0, leading, stride, 0)), 64, 16, 16, True)
    np.testing.assert_array_equal(shared.view(np.uint16)[places >> 1], matrix)


@pytest.mark.parametrize("element,bits", [("e2m1 padded", 4), ("e2m3 padded", 6), ("e3m2 padded", 6)])
def test_padded_small_floats(element, bits):
    """16 packed codes, the lowest bits first, then padding up to 16 bytes."""
    codes = RNG.integers(0, 1 << bits, (8, 32)).astype(np.uint8)
    shared = np.full(8 * 32, 0xFF, np.uint8)
    for r in range(8):
        for group in range(2):
            word = sum(int(c) << bits * i for i, c in enumerate(codes[r, group * 16 : group * 16 + 16]))
            at = r * 32 + group * 16
            shared[at : at + 2 * bits] = np.frombuffer(word.to_bytes(2 * bits, "little"), np.uint8)
    places = np.arange(8)[:, None] * 32 + np.arange(32)[None]
    wanted = formats.decode(element.split()[0], codes)
    np.testing.assert_array_equal(read_elements(shared, places, element), wanted)


def test_dense_fp4():
    packed = RNG.integers(0, 256, (8, 32)).astype(np.uint8)
    descriptor = parse_tcgen05_descriptor(encode_tcgen05(0, 16, 256, 32))
    shared = swizzled_image(packed, 32)
    wanted = formats.decode("e2m1", formats.unpack_nibbles(packed))
    np.testing.assert_array_equal(read_elements(shared, locate_elements(descriptor, 8, 64, 4), "e2m1"), wanted)


def test_swizzle_is_an_involution_within_its_pattern():
    addresses = np.arange(4096)
    for span in (32, 64, 128):
        moved = swizzle(addresses, span)
        np.testing.assert_array_equal(swizzle(moved, span), addresses)
        np.testing.assert_array_equal(moved // span, addresses // span)


@pytest.mark.parametrize(
    "bits,what",
    [
        (encode_tcgen05(0, 16, 1024, 128) & ~(7 << 46), "0b001"),
        (encode_tcgen05(0, 16, 1024, 0) | 1 << 61, "swizzle mode 1"),
        (encode_tcgen05(0, 16, 1024, 128) | 3 << 49, "base offset"),
        (encode_tcgen05(0, 16, 1024, 128) | 1 << 52, "bits of 52-60"),
    ],
)
def test_wrong_descriptors_are_refused(bits, what):
    with pytest.raises(EmulationFault, match=what) as fault:
        parse_tcgen05_descriptor(bits)
    assert fault.value.kind == "illegal"


def test_a_row_beyond_its_swizzle_is_refused():
    with pytest.raises(EmulationFault, match="crosses"):
        locate_elements(parse_tcgen05_descriptor(encode_tcgen05(96, 16, 1024, 128)), 8, 96, 4)


def dense(rows, columns, a=0, b=0, d=1, **more):
    others = sum(value << int(name[3:]) for name, value in more.items())
    return d << 4 | a << 7 | b << 10 | columns // 8 << 17 | rows // 16 << 24 | others


def scaled(columns, a=1, b=1, ue8m0=0, a_id=0, b_id=0, extra=0):
    return b_id << 4 | a << 7 | b << 10 | columns // 8 << 17 | ue8m0 << 23 | 1 << 27 | a_id << 29 | extra


def test_triton_descriptors():
    """The two that Triton 3.9 emits for NVFP4 128 x 128 differ in the bit that doubles K on sm_107."""
    plain = parse_instruction_descriptor(136316032, "mxf4nvf4", 16, "sm_100a")
    assert (plain.rows, plain.columns, plain.depth, plain.scales, plain.scale_type) == (128, 128, 64, 4, "ue4m3")
    double = parse_instruction_descriptor(136316040, "mxf4nvf4", 16, "sm_107a")
    assert (double.depth, double.scales) == (128, 8)
    with pytest.raises(EmulationFault, match="K=128, which sm_100a lacks"):
        parse_instruction_descriptor(136316040, "mxf4nvf4", 16, "sm_100a")


def test_depths():
    def depth(kind, block, bits, target):
        return parse_instruction_descriptor(bits, kind, block, target).depth

    assert depth("f16", 0, dense(128, 64), "sm_100a") == 16
    assert depth("tf32", 0, dense(64, 8, 2, 2), "sm_100f") == 8
    assert depth("f8f6f4", 0, dense(128, 64), "sm_103a") == 32
    assert depth("f8f6f4", 0, dense(128, 64, bit29=1), "sm_107a") == 64
    assert depth("i8", 0, dense(128, 64, d=2), "sm_100a") == 32
    assert depth("mxf8f6f4", 32, scaled(64, 0, 0, 1), "sm_100a") == 32
    assert depth("mxf8f6f4", 32, scaled(64, 0, 0, 1, extra=1 << 31), "sm_107a") == 64
    assert depth("mxf4", 32, scaled(64, ue8m0=1), "sm_100a") == 64
    for target in ("sm_103a", "sm_107a"):
        assert depth("mxf4nvf4", 16, scaled(64, extra=1 << 31), target) == 96


@pytest.mark.parametrize(
    "kind,block,bits,target",
    [
        ("mxf4nvf4", 16, scaled(64, extra=1 << 31), "sm_100a"),  # K=96
        ("mxf4nvf4", 16, scaled(64, extra=1 << 31), "sm_103f"),
        ("mxf4nvf4", 16, scaled(64, a_id=1), "sm_100a"),  # four scales start at byte 0
        ("mxf4", 32, scaled(64), "sm_100a"),  # ue4m3
        ("mxf4", 16, scaled(64, ue8m0=1), "sm_100a"),
        ("i8", 0, dense(128, 64, d=2), "sm_103a"),
        ("i8", 0, dense(128, 64, d=1), "sm_100a"),
        ("f16", 0, dense(128, 24), "sm_100a"),
        ("f16", 0, dense(96, 64), "sm_100a"),
        ("f16", 0, dense(128, 64, bit2=1), "sm_100a"),  # sparse
        ("f16", 0, dense(128, 64, bit3=1), "sm_100a"),  # saturating floats
        ("f16", 0, dense(128, 64, 2), "sm_100a"),
        ("tf32", 0, dense(128, 64, 2, 2, 0), "sm_100a"),
        ("f16", 0, dense(128, 64, bit23=1), "sm_100a"),
    ],
)
def test_illegal_instruction_descriptors(kind, block, bits, target):
    with pytest.raises(EmulationFault) as fault:
        parse_instruction_descriptor(bits, kind, block, target)
    assert fault.value.kind == "illegal"
