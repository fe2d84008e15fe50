"""wgmma: every N, all types, transposed operands, A in registers; late mode; registers in flight; planted faults."""

import numpy as np
import pytest
import torch

from mmcompile.emulate.faults import EmulationFault

RNG = np.random.default_rng(5)
DEPTH = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
A_AT, B_AT = 0, 8192


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


def swizzled(rows, span=32):
    """Rows [n, span] of bytes in the layout of the TMA with a swizzle of 32 bytes."""
    image = np.zeros((len(rows), span), np.uint8)
    for r, row in enumerate(rows):
        for chunk in range(span // 16):
            place = chunk ^ (r * span // 128 % (span // 16))
            image[r, place * 16 : place * 16 + 16] = row[chunk * 16 : chunk * 16 + 16]
    return image


def describe(start, span=32, leading=16, stride=None):
    """K-major: groups of eight rows lie 8 * span bytes apart."""
    stride = 8 * span if stride is None else stride
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | {0: 0, 128: 1, 64: 2, 32: 3}[span] << 62


FILL = """
mul.wide.u32 d40, r0, 128; add.s64 d41, d0, d40; shl.b32 r1, r0, 7;
""" + "\n".join(
    f"ld.global.v4.b32 {{r2, r3, r4, r5}}, [d41+{16 * i}]; st.shared.v4.b32 [r1+{16 * i}], {{r2, r3, r4, r5}};"
    for i in range(8)
)
"""128 threads copy 16 KB of operands into shared memory."""
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def registers(first, count):
    return "{" + ", ".join(f"r{first + i}" for i in range(count)) + "}"


def load(first, pointer, count):
    lines = [f"mul.wide.u32 d42, r0, {4 * count}; add.s64 d42, d42, {pointer};"]
    return "\n".join(lines + [f"ld.global.b32 r{first + i}, [d42+{4 * i}];" for i in range(count)])


def store(first, pointer, count):
    lines = [f"mul.wide.u32 d42, r0, {4 * count}; add.s64 d42, d42, {pointer};"]
    return "\n".join(lines + [f"st.global.b32 [d42+{4 * i}], r{first + i};" for i in range(count)])


def place_image(a_rows, b_rows):
    image = np.zeros(16384, np.uint8)
    image[A_AT : A_AT + a_rows.size] = a_rows.reshape(-1)
    image[B_AT : B_AT + b_rows.size] = b_rows.reshape(-1)
    return image


def gather(words, columns, dtype):
    """The accumulator [64, columns] by the formula of the PTX ISA (Register Fragments of wgmma)."""
    d = np.zeros((64, columns), dtype)
    values = words.view(dtype).reshape(128, columns // 2)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(columns // 2):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            d[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2] = values[thread, i]
    return d


def scatter(d):
    out = np.zeros((128, d.shape[1] // 2), d.dtype)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(d.shape[1] // 2):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            out[thread, i] = d[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2]
    return out.view(np.uint32)


def multiply(d_type, a_type, b_type, columns, a="d10", b="d11", use_d=1, immediates=None, first=100, count=None):
    if immediates is None:
        immediates = {"bf16": "1, 1, 0, 0", "f16": "1, 1, 0, 0"}.get(a_type, "" if a_type in ("s8", "u8") else "1, 1")
    count = count or columns // 2
    return f"""wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH[a_type]}.{d_type}.{a_type}.{b_type}
      {registers(first, count)}, {a}, {b}, {use_d}{", " + immediates if immediates else ""};"""


def prepare(a_type, b_type, columns):
    a_raw, a = make_values(a_type, 64, DEPTH[a_type])
    b_raw, b = make_values(b_type, columns, DEPTH[b_type])
    a_rows = np.ascontiguousarray(a_raw).view(np.uint8).reshape(64, 32)
    b_rows = np.ascontiguousarray(b_raw).view(np.uint8).reshape(columns, 32)
    return a, b, a_rows, b_rows


def clear(first, count):
    return " ".join(f"mov.b32 r{first + i}, 0;" for i in range(count))


def simple(columns, a_type="bf16", b_type=None, d_type="f32", *, fence=FENCE, commit=COMMIT, wait=WAIT, between=""):
    """Body of a kernel D += A B^T with both operands in shared memory."""
    words = columns // 2
    return f"""{FILL} {fence}
    mov.b64 d10, {describe(A_AT)}; mov.b64 d11, {describe(B_AT)};
    {load(100, "d1", words)}
    wgmma.fence.sync.aligned;
    {multiply(d_type, a_type, b_type or a_type, columns)} {between}
    {commit} {wait}
    {store(100, "d2", words)}"""


def run_simple(run_ptx, body, columns, a_rows, b_rows, c, **options):
    arrays = [place_image(swizzled(a_rows), swizzled(b_rows)), scatter(c), np.zeros((128, columns // 2), np.uint32)]
    return gather(run_ptx(body, arrays, shared=16384, **options)[2], columns, c.dtype)


@pytest.mark.parametrize("columns", range(8, 257, 8))
def test_every_n(run_ptx, columns):
    a, b, a_rows, b_rows = prepare("bf16", "bf16", columns)
    c = RNG.standard_normal((64, columns)).astype(np.float32)
    d = run_simple(run_ptx, simple(columns), columns, a_rows, b_rows, c)
    np.testing.assert_array_equal(d, (a @ b.T + c).astype(np.float32))


@pytest.mark.parametrize(
    "d_type,a_type,b_type",
    [("f32", "f16", "f16"), ("f32", "tf32", "tf32"), ("f32", "e4m3", "e4m3"), ("f32", "e4m3", "e5m2"),
     ("f32", "e5m2", "e4m3"), ("s32", "s8", "s8"), ("s32", "u8", "s8"), ("s32", "s8", "u8"), ("s32", "u8", "u8")],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"late": True, "schedule": "warp"}], ids=["eager", "late-warp"])
def test_types(run_ptx, d_type, a_type, b_type, options):
    a, b, a_rows, b_rows = prepare(a_type, b_type, 24)
    kind = np.int32 if d_type == "s32" else np.float32
    c = (RNG.standard_normal((64, 24)) * 50).astype(kind)
    d = run_simple(run_ptx, simple(24, a_type, b_type, d_type), 24, a_rows, b_rows, c, **options)
    np.testing.assert_array_equal(d, (a @ b.T + c).astype(kind))


def test_f16_accumulator(run_ptx):
    """Two columns to a register: D and C are packed f16."""
    columns = 16
    a, b, a_rows, b_rows = prepare("f16", "f16", columns)
    body = f"""{FILL} {FENCE} mov.b64 d10, {describe(A_AT)}; mov.b64 d11, {describe(B_AT)}; {clear(100, 4)}
    {multiply("f16", "f16", "f16", columns, use_d=0, count=4)} {COMMIT} {WAIT} {store(100, "d1", 4)}"""
    image = place_image(swizzled(a_rows), swizzled(b_rows))
    out = run_ptx(body, [image, np.zeros((128, 4), np.uint32)], shared=16384)[1]
    d, values = np.zeros((64, columns), np.float16), out.view(np.float16).reshape(128, columns // 2)
    for thread in range(128):
        for i in range(columns // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            d[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2] = values[thread, i]
    np.testing.assert_array_equal(d, (a @ b.T).astype(np.float16))


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_a_in_registers_and_signs(run_ptx, signs):
    """A fragment as of mma.m16n8k16, one for each warp; imm-scale negates; B transposed (MN-major)."""
    columns = 32
    a_raw, a = make_values("bf16", 64, 16)
    b_raw, b = make_values("bf16", columns, 16)
    fragment = np.zeros((128, 8), np.uint16)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(8):
            row = lane // 4 + (0 if i < 2 or 4 <= i < 6 else 8)
            fragment[thread, i] = a_raw[16 * warp + row, lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)]
    image = np.zeros(16384, np.uint8)
    for block in range(columns // 16):  # 16 columns of bf16 are the 32 bytes of a swizzled row, 16 rows of K
        rows = np.ascontiguousarray(b_raw[16 * block : 16 * block + 16].T).view(np.uint8)
        image[B_AT + 512 * block : B_AT + 512 * block + 512] = swizzled(rows).reshape(-1)
    immediates = f"{signs[0]}, {signs[1]}, 1"
    body = f"""{FILL} {FENCE} mov.b64 d11, {describe(B_AT, leading=512, stride=256)};
    {load(10, "d1", 4)} {clear(100, 16)}
    {multiply("f32", "bf16", "bf16", columns, a=registers(10, 4), use_d=0, immediates=immediates)} {COMMIT} {WAIT}
    {store(100, "d2", 16)}"""
    arrays = [image, fragment.view(np.uint32), np.zeros((128, 16), np.uint32)]
    d = gather(run_ptx(body, arrays, shared=16384)[2], columns, np.float32)
    np.testing.assert_array_equal(d, (a @ b.T * signs[0] * signs[1]).astype(np.float32))


LATE = {"late": True}


def run_fault(run_ptx, body, **options):
    """The kind of the fault, or the difference to the right result: "wrong" or "right"."""
    a, b, a_rows, b_rows = prepare("bf16", "bf16", 16)
    c = RNG.standard_normal((64, 16)).astype(np.float32)
    try:
        d = run_simple(run_ptx, body, 16, a_rows, b_rows, c, **options)
    except EmulationFault as fault:
        return fault.kind
    return "right" if np.array_equal(d, (a @ b.T + c).astype(np.float32)) else "wrong"


@pytest.mark.parametrize("options", [{}, LATE, {"late": True, "schedule": "warp"}, {"check_races": True, "late": True}])
def test_the_whole_kernel_is_right(run_ptx, options):
    assert run_fault(run_ptx, simple(16), **options) == "right"


@pytest.mark.parametrize(
    "parts,kinds",
    [
        ({"wait": ""}, {"in flight"}),
        ({"commit": ""}, {"in flight"}),
        ({"wait": "wgmma.wait_group.sync.aligned 1;"}, {"in flight"}),
        ({"fence": "bar.sync 0;"}, {"in flight"}),  # no proxy fence: the tensor core sees the old bytes
        ({"between": "mov.b32 r100, 0;"}, {"in flight"}),  # writes the accumulator
        ({"between": "add.u32 r3, r101, 1;"}, {"in flight"}),  # reads it
    ],
)
def test_planted_faults(run_ptx, parts, kinds):
    assert run_fault(run_ptx, simple(16, **parts), **LATE) in kinds


def test_a_missing_wait_shows_when_warps_run_alone(run_ptx):
    """The accumulators of the other warps may be used, so that the register holds a poison instead of a guard."""
    assert run_fault(run_ptx, simple(16, wait=""), late=True, schedule="warp") in ("in flight", "wrong")


def test_a_register_of_a_is_written_in_flight(run_ptx):
    body = f"""{FILL} {FENCE} mov.b64 d11, {describe(B_AT)}; {load(10, "d1", 4)} {clear(100, 8)}
    {multiply("f32", "bf16", "bf16", 16, a=registers(10, 4), use_d=0, immediates="1, 1, 0")} {COMMIT}
    add.u32 r10, r10, 1; {WAIT} {store(100, "d2", 8)}"""
    arrays = [np.zeros(16384, np.uint8), np.zeros((128, 4), np.uint32), np.zeros((128, 8), np.uint32)]
    run_ptx(body, arrays, shared=16384)
    with pytest.raises(EmulationFault, match="register of A") as fault:
        run_ptx(body, arrays, shared=16384, **LATE)
    assert fault.value.kind == "in flight"


def test_overwriting_an_operand_in_flight_is_a_race(run_ptx):
    """Another warp writes B before the warps that read it have waited: the barrier does not order the wgmma."""
    overwrite = f"{COMMIT} bar.sync 0; setp.lt.u32 p1, r0, 32; mov.b32 r6, 0; @p1 st.shared.b32 [{B_AT}], r6;"
    assert run_fault(run_ptx, simple(16, commit=overwrite), late=True, check_races=True) == "race"
    safe = f"{COMMIT} {WAIT} bar.sync 0; setp.lt.u32 p1, r0, 1; mov.b32 r6, 0; @p1 st.shared.b32 [{B_AT}], r6;"
    assert run_fault(run_ptx, simple(16, commit=safe, wait=""), late=True, check_races=True) == "right"


def test_missing_barrier_after_the_fill_is_a_race(run_ptx):
    assert run_fault(run_ptx, simple(16, fence="fence.proxy.async.shared::cta;"), check_races=True) == "race"


def test_out_of_bounds_descriptor(run_ptx):
    body = simple(16).replace(str(describe(B_AT)), str(describe(16384)))
    assert run_fault(run_ptx, body) == "out of bounds"


@pytest.mark.parametrize("span", [64, 128])
def test_wrong_swizzle_bits_are_noticed(run_ptx, span):
    body = simple(16).replace(str(describe(B_AT)), str(describe(B_AT, span=span, stride=256)))
    assert run_fault(run_ptx, body) in ("wrong", "uninitialised", "out of bounds")


@pytest.mark.parametrize(
    "text",
    [
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {r1,r2,r3,r4}, d1, d2, r5, 0, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.f16 {r1,r2,r3,r4}, d1, d2, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {r1,r2,r3,r4}, d1, d2, 1, 1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {r1,r2,r3,r4}, d1, d2, 1, 1, 1, 0, 0;",
    ],
)
def test_unknown_forms_are_refused(run_ptx, text):
    with pytest.raises(EmulationFault) as fault:
        run_ptx(text, [])
    assert fault.value.kind == "unknown instruction"
