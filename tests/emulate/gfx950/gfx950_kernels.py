"""Triton kernels of the tests of the gfx950 emulator, and compiling them without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Compiled:
    """Assembly text and what a launch needs of the metadata."""

    assembly: str
    name: str
    threads: int
    shared: int


def compile_kernel(function, signature: dict[str, str], constants: dict[str, int], **options) -> Compiled:
    """Compile for gfx950; ``signature`` without the constants."""
    full = {**signature, **dict.fromkeys(constants, "constexpr")}
    options = {"enable_fp_fusion": True, **options}
    kernel = triton.compile(
        ASTSource(function, signature=full, constexprs=constants),
        target=GPUTarget("hip", "gfx950", 64),
        options=options,
    )
    data = kernel.metadata
    return Compiled(kernel.asm["amdgcn"], data.name, 64 * data.num_warps, data.shared)


@triton.jit
def add_vectors(a, b, c, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + place, mask=place < count)
    y = tl.load(b + place, mask=place < count)
    tl.store(c + place, x + y, mask=place < count)


@triton.jit
def rms_norm(x, weight, y, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + place, mask=place < columns, other=0.0).to(tl.float32)
    scale = tl.load(weight + place, mask=place < columns, other=0.0).to(tl.float32)
    variance = tl.sum(value * value, axis=0) / columns
    tl.store(
        y + row * columns + place, (value * tl.rsqrt(variance + eps) * scale).to(tl.bfloat16), mask=place < columns
    )


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + place, mask=place < columns, other=float("-inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(y + row * columns + place, value / tl.sum(value, axis=0), mask=place < columns)


@triton.jit
def dot(a, b, c, inner, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, steps = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, inner, K):
        x = tl.load(a + rows[:, None] * inner + k + steps[None, :])
        y = tl.load(b + (k + steps)[:, None] * N + columns[None, :])
        total = tl.dot(x, y, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total)


@triton.jit
def dot_scaled_weights(a, b, scales, c, inner, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """a bf16 [M, inner] times b e2m1 [N, inner], with a scale for each GROUP of b."""
    rows, columns, steps = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    packed, groups = tl.arange(0, K // 2), tl.arange(0, K // GROUP)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, inner, K):
        x = tl.load(a + rows[:, None] * inner + k + steps[None, :])
        y = tl.load(b + columns[None, :] * (inner // 2) + (k // 2 + packed)[:, None])
        s = tl.load(scales + columns[:, None] * (inner // GROUP) + (k // GROUP + groups)[None, :])
        total = tl.dot_scaled(x, None, "bf16", y, s, "e2m1", total)
    tl.store(c + rows[:, None] * N + columns[None, :], total)


@triton.jit
def dot_scaled_both(a, sa, b, sb, c, inner, A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """a [M, inner] times b [M, inner] transposed, both with e8m0 scales for 32; A, B: "e2m1" or "e4m3"."""
    pa: tl.constexpr = 2 if A == "e2m1" else 1
    pb: tl.constexpr = 2 if B == "e2m1" else 1
    rows, groups = tl.arange(0, M), tl.arange(0, K // 32)
    ka, kb = tl.arange(0, K // pa), tl.arange(0, K // pb)
    total = tl.zeros((M, M), tl.float32)
    for k in range(0, inner, K):
        x = tl.load(a + rows[:, None] * (inner // pa) + (k // pa + ka)[None, :])
        y = tl.load(b + rows[None, :] * (inner // pb) + (k // pb + kb)[:, None])
        u = tl.load(sa + rows[:, None] * (inner // 32) + (k // 32 + groups)[None, :])
        v = tl.load(sb + rows[:, None] * (inner // 32) + (k // 32 + groups)[None, :])
        total = tl.dot_scaled(x, u, A, y, v, B, total)
    tl.store(c + rows[:, None] * M + rows[None, :], total)


@triton.jit
def dot_nvfp4(a, b, scales, c, inner, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """a bf16 [M, inner] times NVFP4 b [N, inner]: exact decoding to bf16, eight values a word."""
    rows, columns, steps = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    words, groups = tl.arange(0, K // 8), tl.arange(0, K // 16)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, inner, K):
        x = tl.load(a + rows[:, None] * inner + k + steps[None, :])
        y = tl.load(b + columns[:, None] * (inner // 8) + (k // 8 + words)[None, :])
        s = tl.load(scales + columns[:, None] * (inner // 16) + k // 16 + groups[None, :]).to(tl.float32)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            "v_cvt_scalef32_pk_bf16_fp4 $0, $4, 1.0\n"
            "v_cvt_scalef32_pk_bf16_fp4 $1, $4, 1.0 op_sel:[1,0,0]\n"
            "v_cvt_scalef32_pk_bf16_fp4 $2, $4, 1.0 op_sel:[0,1,0]\n"
            "v_cvt_scalef32_pk_bf16_fp4 $3, $4, 1.0 op_sel:[1,1,0]",
            "=&v,=&v,=&v,=&v,v",
            [y],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        pairs = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (N, K // 2))
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
        spread = tl.reshape(tl.broadcast_to(s[:, :, None], (N, K // 16, 8)), (N, K // 2))
        weights = tl.reshape(tl.join((low * spread).to(tl.bfloat16), (high * spread).to(tl.bfloat16)), (N, K))
        total = tl.dot(x, tl.trans(weights), total)
    tl.store(c + rows[:, None] * N + columns[None, :], total)


@triton.jit
def grid_barrier(counter, data, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, DRAIN: tl.constexpr):
    """Every program writes a block, waits for all programs, and copies the next one's block."""
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    tl.store(data + program * BLOCK + place, (place + program).to(tl.float32))
    if DRAIN:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [place], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    old = tl.atomic_add(counter, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < PROGRAMS:
        tl.inline_asm_elementwise("s_sleep 1\nv_mov_b32 $0, $1", "=v,v", [old], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    value = tl.load(data + ((program + 1) % PROGRAMS) * BLOCK + place)
    tl.store(data + PROGRAMS * BLOCK + program * BLOCK + place, value)
