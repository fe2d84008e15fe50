"""mma.sync, ldmatrix and stmatrix against matrix products, with the fragment formulas of the PTX ISA written out."""

import numpy as np
import pytest
import torch

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault

RNG = np.random.default_rng(3)
PER_WORD = {"tf32": 1, "f16": 2, "bf16": 2, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4}


def a_place(i, lane, depth, per_word):
    """Row and column of element i of a lane's A fragment (PTX ISA, Matrix Fragments for mma.m16n8k*)."""
    g, t = lane >> 2, lane & 3
    if per_word == 1:
        return (g if i in (0, 2) else g + 8), (t if i < 2 else t + 4)
    if per_word == 2:
        return (g if i < 2 or 4 <= i < 6 else g + 8), t * 2 + (i & 1) + (8 if i >= 4 else 0)
    return (g if i < 4 or 8 <= i < 12 else g + 8), t * 4 + (i & 3) + (16 if i >= 8 else 0)


def b_place(i, lane, depth, per_word):
    g, t = lane >> 2, lane & 3
    if per_word == 1:
        return t + 4 * i, g
    if per_word == 2:
        return t * 2 + (i & 1) + (8 if i >= 2 else 0), g
    return t * 4 + (i & 3) + (16 if i >= 4 else 0), g


def c_place(i, lane):
    return (lane >> 2) + (8 if i >= 2 else 0), (lane & 3) * 2 + (i & 1)


def make_values(kind, *shape):
    """Raw elements (unsigned, one each) and their values."""
    if kind in ("s8", "u8"):
        raw = RNG.integers(0, 256, shape).astype(np.uint8)
        return raw, (raw.view(np.int8) if kind == "s8" else raw).astype(np.float64)
    x = torch.from_numpy(RNG.standard_normal(shape).astype(np.float32))
    if kind == "tf32":
        bits = x.numpy().view(np.uint32) & np.uint32(0xFFFFE000)
        return bits, bits.view(np.float32).astype(np.float64)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    y = x.to(dtype)
    raw = y.view(torch.uint8 if kind[0] == "e" else torch.int16).numpy()
    return raw.view(np.uint8 if kind[0] == "e" else np.uint16), y.double().numpy()


def pack_fragment(raw, place, depth, words, per_word):
    out = np.zeros((32, words * per_word), raw.dtype)
    for lane in range(32):
        for i in range(words * per_word):
            out[lane, i] = raw[place(i, lane, depth, per_word)]
    return np.ascontiguousarray(out).view(np.uint32).reshape(32, words)


def load(first, pointer, count, stride=None):
    """Registers r[first ...] of this lane from words [lanes, count]."""
    lines = [f"mul.wide.u32 d40, r0, {4 * count}; add.s64 d40, d40, {pointer};"]
    return "\n".join(lines + [f"ld.global.b32 r{first + i}, [d40+{4 * i}];" for i in range(count)])


def store(first, pointer, count):
    lines = [f"mul.wide.u32 d40, r0, {4 * count}; add.s64 d40, d40, {pointer};"]
    return "\n".join(lines + [f"st.global.b32 [d40+{4 * i}], r{first + i};" for i in range(count)])


def registers(first, count):
    return "{" + ", ".join(f"r{first + i}" for i in range(count)) + "}"


CASES = [
    ("f32", "tf32", "tf32", 4), ("f32", "tf32", "tf32", 8), ("f32", "bf16", "bf16", 8), ("f32", "bf16", "bf16", 16),
    ("f32", "f16", "f16", 8), ("f32", "f16", "f16", 16), ("f16", "f16", "f16", 16), ("f32", "e4m3", "e4m3", 32),
    ("f32", "e4m3", "e5m2", 32), ("f32", "e5m2", "e5m2", 16), ("f16", "e4m3", "e4m3", 32), ("s32", "s8", "s8", 16),
    ("s32", "s8", "s8", 32), ("s32", "u8", "s8", 32), ("s32", "u8", "u8", 32),
]  # fmt: skip


@pytest.mark.parametrize("d_type,a_type,b_type,depth", CASES)
def test_mma(run_ptx, d_type, a_type, b_type, depth):
    per_word = PER_WORD[a_type]
    words = depth // (4 * per_word)
    a_raw, a = make_values(a_type, 16, depth)
    b_raw, b = make_values(b_type, depth, 8)
    c_words = 2 if d_type == "f16" else 4
    if d_type == "s32":
        c = RNG.integers(-(2**20), 2**20, (16, 8)).astype(np.int32)
    else:
        c = RNG.standard_normal((16, 8)).astype(np.float16 if d_type == "f16" else np.float32)
    c_fragment = np.array([[c[c_place(i, lane)] for i in range(4)] for lane in range(32)], c.dtype).view(np.uint32)
    body = f"""{load(100, "d0", 2 * words)} {load(120, "d1", words)} {load(140, "d2", c_words)}
    mma.sync.aligned.m16n8k{depth}.row.col.{d_type}.{a_type}.{b_type}.{d_type} {registers(160, c_words)},
      {registers(100, 2 * words)}, {registers(120, words)}, {registers(140, c_words)};
    {store(160, "d3", c_words)}"""
    arrays = [
        pack_fragment(a_raw, a_place, depth, 2 * words, per_word),
        pack_fragment(b_raw, b_place, depth, words, per_word),
        c_fragment, np.zeros((32, c_words), np.uint32),
    ]  # fmt: skip
    result = run_ptx(body, arrays, threads=32)[3]
    elements = result.view(c.dtype).reshape(32, 4)
    d = np.zeros((16, 8), c.dtype)
    for lane in range(32):
        for i in range(4):
            d[c_place(i, lane)] = elements[lane, i]
    np.testing.assert_array_equal(d, (a @ b + c).astype(c.dtype))


def test_mma_saturates_integers(run_ptx):
    """.satfinite clamps the accumulator, without it the sum wraps."""
    full = np.full((32, 4), 0x7F7F7F7F, np.uint32)
    top = np.full((32, 4), 0x7FFFFFFF, np.uint32)
    for mode, wanted in ((".satfinite", 0x7FFFFFFF), ("", (0x7FFFFFFF + 32 * 127 * 127) % 2**32)):
        body = f"""{load(100, "d0", 4)} {load(120, "d0", 2)} {load(140, "d1", 4)}
        mma.sync.aligned.m16n8k32.row.col{mode}.s32.s8.s8.s32 {registers(160, 4)}, {registers(100, 4)},
          {registers(120, 2)}, {registers(140, 4)}; {store(160, "d2", 4)}"""
        result = run_ptx(body, [full, top, np.zeros((32, 4), np.uint32)], threads=32)[2]
        assert (result == wanted).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(run_ptx, count, transposed):
    """Row i of matrix j is 16 bytes at the address of lane 8 j + i; lane l holds two elements of row l / 4."""
    matrices = RNG.integers(0, 65536, (count, 8, 8)).astype(np.uint16)
    order = RNG.permutation(8 * count)  # where each row lies
    image = np.zeros((32, 8), np.uint16)
    image[order] = matrices.reshape(-1, 8)
    addresses = np.zeros(32, np.uint32)
    addresses[: 8 * count] = order * 16
    trans = ".trans" if transposed else ""
    body = f"""
    mul.wide.u32 d40, r0, 16; add.s64 d40, d40, d0; ld.global.v4.b32 {{r1, r2, r3, r4}}, [d40];
    shl.b32 r5, r0, 4; st.shared.v4.b32 [r5], {{r1, r2, r3, r4}}; bar.sync 0;
    {load(6, "d1", 1)}
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers(10, count)}, [r6];
    {store(10, "d2", count)}
    add.u32 r6, r6, 512;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [r6], {registers(10, count)};
    bar.sync 0;
    setp.lt.u32 p1, r0, {8 * count};
    @p1 ld.shared.v4.b32 {{r1, r2, r3, r4}}, [r6];
    mul.wide.u32 d40, r0, 16; add.s64 d40, d40, d3; @p1 st.global.v4.b32 [d40], {{r1, r2, r3, r4}};"""
    arrays = [image, addresses, np.zeros((32, count), np.uint32), np.zeros((32, 8), np.uint16)]
    _, _, loaded, stored = run_ptx(body, arrays, threads=32, shared=1024)
    for j in range(count):
        matrix = matrices[j].T if transposed else matrices[j]
        halves = np.ascontiguousarray(loaded[:, j]).view(np.uint16).reshape(32, 2)
        for lane in range(32):
            column = 2 * (lane % 4)
            np.testing.assert_array_equal(halves[lane], matrix[lane // 4, column : column + 2])
    np.testing.assert_array_equal(stored[: 8 * count], matrices.reshape(-1, 8))


def test_ldmatrix_of_unwritten_memory(run_ptx):
    with pytest.raises(EmulationFault, match="nobody wrote") as fault:
        run_ptx(
            "shl.b32 r1, r0, 4; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {r2}, [r1];", [], threads=32, shared=1024
        )
    assert fault.value.kind == "uninitialised"


@pytest.mark.parametrize(
    "text",
    [
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {d1}, {d1}, {d1}, {d1};",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {r1,r2,r3,r4}, {r1,r2,r3,r4}, {r1,r2}, {r1,r2,r3,r4};",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {r1,r2,r3,r4}, {r1,r2}, {r1,r2}, {r1,r2,r3,r4};",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {r1, r2}, [r3];",
    ],
)
def test_unknown_forms_are_refused(run_ptx, text):
    with pytest.raises(EmulationFault) as fault:
        run_ptx(text, [], threads=32, shared=1024)
    assert fault.value.kind == "unknown instruction"


def test_fp16_rounding_of_accumulators():
    """One rounding from the wide sum: 2048 + 1 stays 2048, 2049 + 2 becomes 2052 (to even)."""
    assert formats.decode_f16(formats.encode_f16(np.array([2049.0, 2051.0]))).tolist() == [2048.0, 2052.0]
