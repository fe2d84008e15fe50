"""Matrix instructions of every shape and format against numpy products, laid out element by element."""

from __future__ import annotations

import numpy as np
import pytest
from gfx950_support import E2M1, E4M3, E5M2, from_bf16, run_snippet

from mmcompile.emulate.gfx950.mfma import SHAPES

TABLES = {"fp8": E4M3, "bf8": E5M2, "fp4": E2M1}
BITS = {"bf16": 16, "f16": 16, "f32": 32, "i8": 8, "fp8": 8, "bf8": 8, "fp4": 4}


def decode_one(code: int, name: str) -> float:
    if name == "bf16":
        return float(from_bf16(np.array([code], np.uint16))[0])
    if name == "f16":
        return float(np.array([code], np.uint16).view(np.float16)[0])
    if name == "f32":
        return float(np.array([code], np.uint32).view(np.float32)[0])
    if name == "i8":
        return code - 256 if code > 127 else code
    return float(TABLES[name][code])


def make_codes(rng, shape, name):
    """Codes of moderate finite values."""
    if name == "i8":
        return rng.integers(0, 256, shape)
    if name in TABLES:
        finite = [c for c in range(len(TABLES[name])) if np.isfinite(TABLES[name][c]) and abs(TABLES[name][c]) <= 16]
        return rng.choice(finite, shape)
    values = rng.integers(-32, 33, shape) / 8
    kind = {"f32": np.float32, "f16": np.float16, "bf16": np.float32}[name]
    raw = values.astype(kind)
    if name == "bf16":
        return (raw.view(np.uint32) >> 16).astype(np.int64)
    return raw.view(np.uint16 if name == "f16" else np.uint32).astype(np.int64)


def place(codes, name, blocks, rows, split=False):
    """Registers of the 64 lanes, for an operand of shape [blocks, rows, k]."""
    bits = BITS[name]
    inner = codes.shape[2]
    registers = np.zeros((max(inner * rows * blocks * bits // (64 * 32), 1), 64), np.uint64)
    per_lane = inner * rows * blocks // 64
    for lane in range(64):
        block, row, group = (lane // rows, lane % rows, 0) if blocks > 1 else (0, lane % rows, lane // rows)
        for j in range(per_lane):
            k = group * per_lane + j
            if split:
                k = 16 * group + j if j < 16 else inner // 2 + 16 * group + j - 16
            registers[j * bits // 32, lane] |= np.uint64(int(codes[block, row, k]) << (j * bits % 32))
    return registers.astype(np.uint32)


def find_result(m, blocks, register, lane):
    if blocks > 1:
        return lane // 4, register, lane % 4
    if m == 16:
        return 0, 4 * (lane // 16) + register, lane % 16
    return 0, 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32


def multiply(op, m, k, blocks, names, *, integer=False, modifiers="", split=(False, False), scales=None):
    rng = np.random.default_rng(3)
    codes = [make_codes(rng, (blocks, m, k), name) for name in names]
    values = [np.vectorize(decode_one)(c, n) for c, n in zip(codes, names, strict=True)]
    a, b = (place(c, n, blocks, m, s) for c, n, s in zip(codes, names, split, strict=True))
    count = 4 if blocks > 1 else m * m // 64
    accumulator = rng.integers(0, 8, (count, 64)).astype(np.int32 if integer else np.float32)
    inputs = [*a, *b, *accumulator.view(np.uint32)]
    extra, tail = [], ""
    if scales is not None:
        extra = [np.array([scales[w][lane % m][lane // m] << 8 * w for lane in range(64)]) for w in (0, 1)]
        values = [
            v * np.repeat(2.0 ** (np.array(s) - 127.0), 32, axis=1)[None] for v, s in zip(values, scales, strict=True)
        ]
        tail = f", v{len(inputs) + 1}, v{len(inputs) + 2}"
    first = 1

    def span(n):
        nonlocal first
        text = f"v[{first}:{first + n - 1}]" if n > 1 else f"v{first}"
        first += n
        return text

    operands = ", ".join(span(len(x)) for x in (a, b, accumulator))
    body = f"{op} v[100:{100 + count - 1}], {operands}{tail} {modifiers}"
    results = run_snippet(body, [*inputs, *extra], [f"v{100 + r}" for r in range(count)])
    product = values[0] @ values[1].swapaxes(1, 2)
    for register in range(count):
        got = results[register].view(np.int32 if integer else np.float32)
        for lane in range(64):
            expected = product[find_result(m, blocks, register, lane)] + accumulator[register, lane]
            assert got[lane] == np.float32(expected), (register, lane)


@pytest.mark.parametrize("name", SHAPES)
def test_dense_shapes(name):
    shape = SHAPES[name]
    multiply(f"v_mfma_{name}", shape.m, shape.k, shape.blocks, shape.inputs, integer=shape.integer)


@pytest.mark.parametrize(("m", "k"), [(16, 128), (32, 64)])
@pytest.mark.parametrize("names", [("fp4", "fp4"), ("fp8", "fp4"), ("bf8", "fp8")])
def test_scaled_shapes(m, k, names):
    rng = np.random.default_rng(4)
    codes = {"fp8": 0, "bf8": 1, "fp4": 4}
    scales = rng.integers(125, 130, (2, m, k // 32)).tolist()
    modifiers = f"op_sel:[0,1,0] op_sel_hi:[0,0,0] cbsz:{codes[names[0]]} blgp:{codes[names[1]]}"
    split = tuple(n != "fp4" for n in names)
    op = f"v_mfma_scale_f32_{m}x{m}x{k}_f8f6f4"
    multiply(op, m, k, 1, names, modifiers=modifiers, split=split, scales=scales)
