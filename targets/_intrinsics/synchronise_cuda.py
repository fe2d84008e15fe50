"""NVIDIA's waits: one thread polls with acquiring loads, and every 4096 polls looks whether another wait failed."""

import triton
import triton.language as tl


@triton.jit
def wait_for(counter, target, fault, code):
    """Wait until ``counter`` holds ``target`` and acquire what was written before; always true.

    After seconds in vain (2^21 polls) it goes on with whatever is there, as do the waits after it, and ``fault``
    holds (code of the wait, value found): the first to fail writes it.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred done, other;
        .reg .b32 thread, found, polls, low, first;
        mov.u32 thread, %tid.x;
        setp.ne.u32 other, thread, 0;
        mov.b32 polls, 0;
        @other bra leave;
        poll:
        ld.acquire.gpu.global.b32 found, [$1];
        setp.eq.u32 done, found, $2;
        @done bra leave;
        add.u32 polls, polls, 1;
        and.b32 low, polls, 4095;
        setp.ne.u32 other, low, 0;
        @other bra poll;
        ld.relaxed.gpu.global.b32 first, [$3];
        setp.ne.u32 done, first, 0;
        @done bra leave;
        setp.lt.u32 other, polls, 2097152;
        @other bra poll;
        atom.relaxed.gpu.global.cas.b32 first, [$3], 0, $4;
        setp.ne.u32 done, first, 0;
        @done bra leave;
        st.relaxed.gpu.global.b32 [$3+4], found;
        leave:
        mov.b32 $0, 0;
        }""",
        "=r,l,r,l,r", [counter, target, fault, code], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()
    return target >= 0


@triton.jit
def prefetch_bytes(pointer, SIZE: tl.constexpr):
    """Ask for SIZE bytes (a multiple of 16) from ``pointer`` on: one thread has them brought into L2."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [pointer, SIZE], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read_clock():
    """Nanoseconds of the clock that all programs share."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
