"""tcgen05.mma: every kind against fp64 products, NVFP4 with all scale codes, A in tensor memory, planted faults."""

import numpy as np
import pytest
import torch

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault

RNG = np.random.default_rng(17)
LATE = {"late": True}
A_AT, B_AT, SA_AT, SB_AT, BARRIER, SHARED = 0, 16384, 49152, 51200, 57344, 57856
SCALES_AT, D_AT = 256, 0
"""Columns of tensor memory: the accumulator, then the scale factors of A (8 or 16) and of B."""


def swizzled(rows):
    """Rows [n, 32] of bytes with a swizzle of 32 bytes, as the TMA writes them."""
    image = np.zeros_like(rows)
    for r, row in enumerate(rows):
        for chunk in range(2):
            place = chunk ^ (r // 4 % 2)
            image[r, place * 16 : place * 16 + 16] = row[chunk * 16 : chunk * 16 + 16]
    return image


def chunked(rows):
    """Rows [n, 64] or [n, 48] of bytes as core matrices of 8 rows of 16 bytes: chunk by chunk of all rows."""
    count, size = rows.shape
    return rows.reshape(count // 8, 8, size // 16, 16).transpose(2, 0, 1, 3).reshape(-1)


def describe(start, rows, size):
    """K-major: 32 bytes of K with a 32-byte swizzle, else no swizzle and chunks of K ``16 * rows`` bytes apart."""
    leading, stride, mode = (16, 256, 6) if size == 32 else (16 * rows, 128, 0)
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | mode << 61


def lay_out(rows):
    return swizzled(rows).reshape(-1) if rows.shape[1] == 32 else chunked(rows)


def make_operand(name, rows, depth):
    """Bytes [rows, bytes] in shared memory, and values [rows, depth]."""
    if name in ("s8", "u8"):
        raw = RNG.integers(0, 256, (rows, depth)).astype(np.uint8)
        return raw, (raw.view(np.int8) if name == "s8" else raw).astype(np.float64)
    if name == "e2m1":
        raw = RNG.integers(0, 256, (rows, depth // 2)).astype(np.uint8)
        return raw, formats.decode("e2m1", formats.unpack_nibbles(raw)).astype(np.float64)
    if name in ("e2m1 padded", "e2m3 padded", "e3m2 padded"):
        bits = 4 if name.startswith("e2m1") else 6
        codes = RNG.integers(0, 1 << bits, (rows, depth)).astype(np.uint8)
        raw = np.zeros((rows, depth), np.uint8)
        for r in range(rows):
            for at in range(0, depth, 16):
                word = sum(int(c) << bits * i for i, c in enumerate(codes[r, at : at + 16]))
                raw[r, at : at + 2 * bits] = np.frombuffer(word.to_bytes(2 * bits, "little"), np.uint8)
        return raw, formats.decode(name.split()[0], codes).astype(np.float64)
    x = torch.from_numpy(RNG.standard_normal((rows, depth)).astype(np.float32))
    if name == "tf32":
        bits = x.numpy().view(np.uint32) & np.uint32(0xFFFFE000)
        return bits.view(np.uint8), bits.view(np.float32).astype(np.float64)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    y = x.to(dtype)
    return y.contiguous().view(torch.uint8).numpy().reshape(rows, -1), y.double().numpy()


FILL = """shr.u32 r1, r0, 5; setp.eq.u32 p1, r1, 0; setp.eq.u32 p3, r0, 0;
@p3 mbarrier.init.shared::cta.b64 [57344], 1;
@p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [57352], 512;
mov.b32 r2, 0; shl.b32 r3, r0, 4; mul.wide.u32 d40, r0, 16; add.s64 d41, d0, d40;
FILL: ld.global.v4.b32 {r4, r5, r6, r7}, [d41]; st.shared.v4.b32 [r3], {r4, r5, r6, r7};
add.u32 r3, r3, 2048; add.s64 d41, d41, 2048; add.u32 r2, r2, 1; setp.lt.u32 p4, r2, 28; @p4 bra FILL;
"""
FENCE = "fence.proxy.async.shared::cta; bar.sync 0; ld.shared.b32 r8, [57352];"
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p5, [57344], 0; @!p5 bra WAIT;"
COMMIT = "@p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [57344];"
END = "bar.sync 0; @p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 r8, 512;"


def registers(first, count):
    return "{" + ", ".join(f"r{first + i}" for i in range(count)) + "}"


def copy_scales(start, column, cells):
    """Scales in shared memory are groups of 512 bytes: 32 rows of 16 bytes, to 4 columns of all partitions."""
    return "".join(
        f"mov.b64 d20, {start + 512 * i >> 4 | 8 << 16 | 8 << 32 | 1 << 46}; add.u32 r9, r8, {column + 4 * i}; "
        f"@p3 tcgen05.cp.cta_group::1.32x128b.warpx4 [r9], d20;"
        for i in range(cells // 4)
    )


def read_out(columns, rows):
    """Write the accumulator to the second array, 8 columns at a time; M=64 has 16 rows in each partition."""
    if rows == 128:
        head = f"mul.wide.u32 d42, r0, {4 * columns}; add.s64 d42, d42, d1;"
        step = """tcgen05.ld.sync.aligned.32x32b.x8.b32 {r20, r21, r22, r23, r24, r25, r26, r27}, [r10];
        st.global.v4.b32 [d42+%d], {r20, r21, r22, r23}; st.global.v4.b32 [d42+%d], {r24, r25, r26, r27};"""
        parts = [step % (4 * c, 4 * c + 16) for c in range(0, columns, 8)]
    else:  # lanes 16 to 31 load the second half of the columns of the first 16 rows
        head = f"""and.b32 r12, r0, 15; shl.b32 r16, r1, 5; add.u32 r12, r12, r16; mul.wide.u32 d42, r12, {4 * columns};
        and.b32 r12, r0, 16; cvt.u64.u32 d43, r12; add.s64 d42, d42, d43; add.s64 d42, d42, d1;"""
        step = """tcgen05.ld.sync.aligned.16x32bx2.x4.b32 {r20, r21, r22, r23}, [r10], 4;
        st.global.v4.b32 [d42+%d], {r20, r21, r22, r23};"""
        parts = [step % (4 * c) for c in range(0, columns, 8)]
    body = " ".join(f"add.u32 r10, r11, {8 * i}; {part}" for i, part in enumerate(parts))
    return f"shl.b32 r11, r1, 21; add.u32 r11, r11, r8; {head} {body} tcgen05.wait::ld.sync.aligned;"


def kernel(
    instruction, columns, *, fence=FENCE, commit=COMMIT, wait=WAIT, scales="", end=END, before="", rows=128
):
    """Copy the operands in, multiply, write the accumulator out."""
    return f"{FILL} {fence} {before} {scales} {instruction} {commit} {wait} {read_out(columns, rows)} {end}"


def run_kernel(run_ptx, body, image, columns, target, **options):
    result = np.zeros((128, columns), np.uint32)
    return run_ptx(body, [image, result], target=target, shared=SHARED, **options)[1]


def place(a, b, sa=None, sb=None):
    image = np.zeros(28 * 2048, np.uint8)
    for at, part in ((A_AT, lay_out(a)), (B_AT, lay_out(b)), (SA_AT, sa), (SB_AT, sb)):
        if part is not None:
            image[at : at + part.size] = part.reshape(-1)
    return image


def multiply(kind, descriptor, a, b, *, use_d=0, scaled="", first=""):
    scales = "[r13], [r14], " if scaled else ""
    block = f".block_scale{scaled}" if scaled else ""
    sources = f"mov.b64 d10, {describe(A_AT, len(a), a.shape[1])}; mov.b64 d11, {describe(B_AT, len(b), b.shape[1])};"
    return f"""{sources} mov.b32 r15, {descriptor}; setp.ne.u32 p7, r15, {0 if use_d else descriptor};
    add.u32 r13, r8, {SCALES_AT}; add.u32 r14, r8, {SCALES_AT + 32}; {first}
    @p3 tcgen05.mma.cta_group::1.kind::{kind}{block} [r8], d10, d11, r15, {scales}p7;"""


def dense(rows, columns, a=0, b=0, d=1, extra=0):
    return d << 4 | a << 7 | b << 10 | columns // 8 << 17 | rows // 16 << 24 | extra


CASES = [
    ("f16", "f16", "f16", 16, (0, 0, 1), 0), ("f16", "bf16", "bf16", 16, (1, 1, 1), 0),
    ("f16", "f16", "bf16", 16, (0, 1, 1), 0),
    ("f16", "f16", "f16", 16, (0, 0, 0), 0), ("tf32", "tf32", "tf32", 8, (2, 2, 1), 0),
    ("f8f6f4", "e4m3", "e4m3", 32, (0, 0, 1), 0), ("f8f6f4", "e5m2", "e4m3", 32, (1, 0, 1), 0),
    ("f8f6f4", "e4m3", "e2m1 padded", 32, (0, 5, 1), 0), ("f8f6f4", "e2m3 padded", "e3m2 padded", 32, (3, 4, 1), 0),
    ("f8f6f4", "e4m3", "e5m2", 64, (0, 1, 1), 1 << 29), ("i8", "s8", "u8", 32, (1, 0, 2), 0),
    ("i8", "u8", "s8", 32, (0, 1, 2), 0),
]  # fmt: skip


@pytest.mark.parametrize("kind,a_type,b_type,depth,codes,extra", CASES)
@pytest.mark.parametrize("rows,columns", [(128, 16), (128, 256), (64, 8), (64, 104)])
def test_dense_kinds(run_ptx, kind, a_type, b_type, depth, codes, extra, rows, columns):
    if kind == "i8" and columns == 104:
        columns = 112
    a_bytes, a = make_operand(a_type, rows, depth)
    b_bytes, b = make_operand(b_type, columns, depth)
    target = "sm_107a" if extra else "sm_100a"
    body = kernel(multiply(kind, dense(rows, columns, *codes, extra), a_bytes, b_bytes), columns, rows=rows)
    out = run_kernel(run_ptx, body, place(a_bytes, b_bytes), columns, target)
    wanted = a @ b.T
    if rows == 64:
        out = np.ascontiguousarray(out.reshape(4, 32, columns)[:, :16].reshape(64, columns))
    if codes[2] == 0:
        np.testing.assert_array_equal(out.astype(np.uint16).view(np.float16), wanted.astype(np.float16))
    else:
        np.testing.assert_array_equal(out.view(np.int32 if codes[2] == 2 else np.float32), wanted.astype(np.float32))


# ---------------------------------------------------------------------- block scales

UE4M3_CODES = np.arange(128, dtype=np.uint8)


def scale_image(codes):
    """Codes [rows, n] to groups of 512 bytes (32 rows of 16 bytes): byte 4 q + k of row r is scale k of row 32 q + r.

    The layout that tcgen05.cp.32x128b.warpx4 wants, one group for 128 rows and four scales.
    """
    rows, count = codes.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-count // 4) * 4), np.uint8)
    padded[:rows, :count] = codes
    parts = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4)  # [row group, q, r, scale group, k]
    return np.ascontiguousarray(parts.transpose(3, 0, 2, 1, 4)).reshape(-1)


def scaled(columns, a=1, b=1, ue8m0=0, a_id=0, b_id=0, extra=0):
    return b_id << 4 | a << 7 | b << 10 | columns // 8 << 17 | ue8m0 << 23 | 1 << 27 | a_id << 29 | extra


K96, K128, MX_K64 = 1 << 31, 1 << 3, 1 << 31
SCALED = [
    ("mxf4nvf4", ".block16", "e2m1", 64, 16, 0, 0, "sm_100a"),
    ("mxf4nvf4", ".block16", "e2m1", 128, 16, 0, K128, "sm_107a"),
    ("mxf4nvf4", ".block16", "e2m1", 96, 16, 0, K96, "sm_103a"),
    ("mxf4nvf4", ".block16", "e2m1", 96, 16, 0, K96, "sm_107a"),
    ("mxf4nvf4", ".scale_vec::4X", "e2m1", 64, 16, 1, 0, "sm_100a"),
    ("mxf4nvf4", ".block32", "e2m1", 64, 32, 1, 0, "sm_100f"),
    ("mxf4", ".block32", "e2m1", 64, 32, 1, 0, "sm_100a"),
    ("mxf4", ".block32", "e2m1", 96, 32, 1, K96, "sm_103a"),
    ("mxf8f6f4", ".block32", "e4m3", 32, 32, 1, 0, "sm_100a"),
    ("mxf8f6f4", ".block32", "e4m3", 64, 32, 1, MX_K64, "sm_107a"),
]


def prepare_scaled(case, columns, a_id=0, b_id=0):
    """Body, image of shared memory and the exact result; the scale codes take all values."""
    kind, block, name, depth, size, ue8m0, extra, _ = case
    a_bytes, a = make_operand(name, 128, depth)
    b_bytes, b = make_operand(name, columns, depth)
    codes = np.arange(256, dtype=np.uint8) if ue8m0 else UE4M3_CODES
    count = depth // size
    sa = RNG.permutation(np.resize(codes, (128 * 12,))).reshape(128, 12)
    sb = RNG.choice(codes[100:156] if ue8m0 else codes, (columns, 12))
    format_name = "ue8m0" if ue8m0 else "e4m3"
    code = 0 if name == "e4m3" else 1
    cells = -(-(max(a_id, b_id) + count) // 4) * 4
    across = -(-columns // 32)
    copies = copy_scales(SA_AT, SCALES_AT, cells) + copy_scales(SB_AT, SCALES_AT + 32, cells * max(1, across // 4))
    instruction = multiply(
        kind, scaled(columns, code, code, ue8m0, a_id, b_id, extra), a_bytes, b_bytes, scaled=block
    )
    image = place(a_bytes, b_bytes, scale_image(sa[:, :cells]), scale_image(sb[:, :cells]))
    with np.errstate(all="ignore"):
        a_scaled = a * formats.decode(format_name, sa[:, a_id : a_id + count]).astype(np.float64).repeat(size, axis=1)
        b_scaled = b * formats.decode(format_name, sb[:, b_id : b_id + count]).astype(np.float64).repeat(size, axis=1)
        wanted = (a_scaled @ b_scaled.T).astype(np.float32)
    return instruction, copies, image, wanted


@pytest.mark.parametrize("case", SCALED, ids=lambda case: f"{case[0]}{case[1]}-K{case[3]}-{case[7]}")
@pytest.mark.parametrize("columns", [128, 256])
def test_block_scaled_kinds(run_ptx, case, columns):
    instruction, copies, image, wanted = prepare_scaled(case, columns)
    out = run_kernel(run_ptx, kernel(instruction, columns, scales=copies), image, columns, case[7])
    np.testing.assert_array_equal(out.view(np.float32), wanted)


@pytest.mark.parametrize("case,a_id,b_id", [(SCALED[2], 2, 0), (SCALED[6], 2, 0), (SCALED[7], 3, 1), (SCALED[8], 3, 2)])
def test_scale_identifiers(run_ptx, case, a_id, b_id):
    instruction, copies, image, wanted = prepare_scaled(case, 128, a_id, b_id)
    out = run_kernel(run_ptx, kernel(instruction, 128, scales=copies), image, 128, case[7])
    np.testing.assert_array_equal(out.view(np.float32), wanted)


RACES = {"check_races": True}
MODES = [LATE, {"late": True, "schedule": "warp", "seed": 2}, {"late": True, **RACES}, RACES]


@pytest.mark.parametrize("options", MODES, ids=["late", "late-warp", "late-races", "races"])
def test_modes(run_ptx, options):
    instruction, copies, image, wanted = prepare_scaled(SCALED[0], 128)
    out = run_kernel(run_ptx, kernel(instruction, 128, scales=copies), image, 128, "sm_100a", **options)
    np.testing.assert_array_equal(out.view(np.float32), wanted)


# ---------------------------------------------------------------------- other operands


def test_a_in_tensor_memory_and_accumulation(run_ptx):
    """A stored by tcgen05.st: two bf16 to a cell; D = A B^T twice, the second time scaled down by 2**2 first."""
    a_bytes, a = make_operand("bf16", 128, 16)
    b_bytes, b = make_operand("bf16", 16, 16)
    image = place(a_bytes, b_bytes)
    image[SA_AT : SA_AT + 4096] = a_bytes.reshape(-1)  # rows of 32 bytes, for the threads to load
    load = f"""shl.b32 r16, r0, 5; ld.shared.v4.b32 {registers(30, 4)}, [r16+{SA_AT}];
    ld.shared.v4.b32 {registers(34, 4)}, [r16+{SA_AT + 16}]; shl.b32 r16, r1, 21; add.u32 r16, r16, r8;
    add.u32 r16, r16, 128; tcgen05.st.sync.aligned.32x32b.x8.b32 [r16], {registers(30, 8)};
    tcgen05.wait::st.sync.aligned; bar.sync 0; add.u32 r17, r8, 128;"""
    instruction = multiply("f16", dense(128, 16, 1, 1), a_bytes, b_bytes)
    instruction = instruction.replace("[r8], d10,", "[r8], [r17],")
    again = "setp.eq.u32 p7, r15, r15; @p3 tcgen05.mma.cta_group::1.kind::f16 [r8], [r17], d11, r15, p7, 2;"
    body = kernel(instruction + again, 16, before=load)
    for options in ({}, LATE, {"late": True, "check_races": True}):
        out = run_kernel(run_ptx, body, image, 16, "sm_100a", **options)
        once = (a @ b.T).astype(np.float32)
        np.testing.assert_array_equal(out.view(np.float32), (a @ b.T + once * 0.25).astype(np.float32))


def test_disabled_lanes_keep_their_rows(run_ptx):
    a_bytes, a = make_operand("bf16", 128, 16)
    b_bytes, b = make_operand("bf16", 16, 16)
    first = multiply("f16", dense(128, 16, 1, 1), a_bytes, b_bytes)
    second = """mov.b32 r30, 0; mov.b32 r31, 0xffffffff; setp.eq.u32 p7, r15, r15;
    @p3 tcgen05.mma.cta_group::1.kind::f16 [r8], d10, d11, r15, {r30, r31, r30, r30}, p7;"""
    out = run_kernel(run_ptx, kernel(first + second, 16), place(a_bytes, b_bytes), 16, "sm_100a").view(np.float32)
    once = (a @ b.T).astype(np.float32)
    twice = (a @ b.T + once).astype(np.float32)
    np.testing.assert_array_equal(out, np.where((np.arange(128) // 32 == 1)[:, None], once, twice))


def test_negated_operands(run_ptx):
    a_bytes, a = make_operand("f16", 128, 16)
    b_bytes, b = make_operand("f16", 16, 16)
    body = kernel(multiply("f16", dense(128, 16, extra=1 << 14), a_bytes, b_bytes), 16)
    out = run_kernel(run_ptx, body, place(a_bytes, b_bytes), 16, "sm_100a")
    np.testing.assert_array_equal(out.view(np.float32), (-(a @ b.T)).astype(np.float32))


# ---------------------------------------------------------------------- planted faults


def outcome(run_ptx, options, change=None, drop_scales=False, **parts):
    """ "right", "wrong" or the kind of the fault of an NVFP4 product with a planted fault."""
    instruction, copies, image, wanted = prepare_scaled(SCALED[0], 128)
    body = kernel(instruction, 128, scales="" if drop_scales else copies, **parts)
    if change:
        assert change[0] in body
        body = body.replace(*change)
    try:
        out = run_kernel(run_ptx, body, image, 128, "sm_100a", **options)
    except EmulationFault as fault:
        return fault.kind
    return "right" if np.array_equal(out.view(np.float32), wanted, equal_nan=True) else "wrong"


SCALES_OF_B = f"add.u32 r14, r8, {SCALES_AT + 32};"
A_DESCRIPTOR = describe(A_AT, 128, 32)


@pytest.mark.parametrize(
    "fault,options,kinds",
    [
        ({"wait": ""}, LATE, {"in flight"}),  # freed before the product is waited for
        ({"wait": "", "end": WAIT + END}, LATE, {"wrong"}),  # the accumulator is loaded before it is written
        ({"wait": ""}, RACES, {"race"}),
        ({"commit": ""}, {}, {"deadlock"}),
        ({"fence": FENCE.split(";", 1)[1]}, LATE, {"in flight"}),  # the tensor core sees old bytes
        ({"fence": FENCE.replace("bar.sync 0; ", "bar.warp.sync -1; ")}, RACES, {"race", "uninitialised"}),
        ({"drop_scales": True}, {}, {"uninitialised"}),
        ({"change": (SCALES_OF_B, SCALES_OF_B.replace("288", "284"))}, {}, {"uninitialised"}),
        ({"change": (".block16", ".block32")}, {}, {"wrong"}),
        ({"change": (str(scaled(128)), str(scaled(128, extra=K128)))}, {}, {"illegal"}),
        ({"change": (str(A_DESCRIPTOR), str(A_DESCRIPTOR & ~(7 << 61)))}, {}, {"wrong"}),
        ({"change": (str(A_DESCRIPTOR), str(A_DESCRIPTOR & ~(7 << 46)))}, {}, {"illegal"}),
        ({"change": (str(describe(B_AT, 128, 32)), str(describe(SHARED, 128, 32)))}, {}, {"out of bounds"}),
        ({"change": ("cta_group::1.kind::mxf4nvf4", "cta_group::2.kind::mxf4nvf4")}, {}, {"unknown instruction"}),
        ({"end": ""}, {}, {"illegal"}),
    ],
)
def test_planted_faults(run_ptx, fault, options, kinds):
    assert outcome(run_ptx, options, **fault) in kinds


@pytest.mark.parametrize("operand", ["accumulator", "A"])
def test_operands_that_nobody_wrote(run_ptx, operand):
    """Tensor memory that tcgen05.mma reads must be written: its accumulator if it adds to it, and A."""
    (a, _), (b, _) = make_operand("bf16", 128, 16), make_operand("bf16", 16, 16)
    instruction = multiply("f16", dense(128, 16, 1, 1), a, b, use_d=operand == "accumulator")
    if operand == "A":
        instruction = f"add.u32 r17, r8, 128; {instruction.replace('[r8], d10,', '[r8], [r17],')}"
    with pytest.raises(EmulationFault, match="was never written") as fault:
        run_kernel(run_ptx, kernel(instruction, 16), place(a, b), 16, "sm_100a")
    assert fault.value.kind == "uninitialised" and "tcgen05.mma" in fault.value.text


def test_freed_in_flight(run_ptx):
    """Tensor memory deallocated before the product that writes it was waited for."""
    free = "@p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 r8, 512;"
    assert outcome(run_ptx, LATE, wait=f"{free} {WAIT}", end="") == "in flight"
    assert outcome(run_ptx, RACES, wait=f"{free} {WAIT}", end="") in ("race", "out of bounds")


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.mma.cta_group::1.kind::f16.collector::a::fill [r1], d1, d2, r2, p1;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [r1], d1, d2, r2, p1;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [r1], d1, d2, [r3], r2, p1;",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [r1], d1, d2, r2, [r3], [r4], p1;",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [r1], h1;",
    ],
)
def test_unknown_forms_are_refused(run_ptx, text):
    with pytest.raises(EmulationFault) as fault:
        run_ptx(text, [], target="sm_100a", shared=64)
    assert fault.value.kind == "unknown instruction"
