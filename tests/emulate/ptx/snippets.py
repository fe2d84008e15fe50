"""Small PTX kernels for the tests: one thread for each element, operands a, b, c and result r of 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmcompile.emulate.launch import Launch, Report
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel

THREADS = 128

DECLARATIONS = """
 .reg .b32 %a, %b, %c, %r, %t, %x, %y, %z; .reg .b64 %p0, %p1, %p2, %p3, %o, %d0, %d1, %d2;
 .reg .pred %p, %q, %s; .reg .b16 %h, %g; .reg .b8 %e;
"""
HEAD = """
 mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4;
 ld.param.b64 %p0, [pa]; ld.param.b64 %p1, [pb]; ld.param.b64 %p2, [pc]; ld.param.b64 %p3, [pr];
 add.s64 %p0, %p0, %o; add.s64 %p1, %p1, %o; add.s64 %p2, %p2, %o; add.s64 %p3, %p3, %o;
 ld.global.b32 %a, [%p0]; ld.global.b32 %b, [%p1]; ld.global.b32 %c, [%p2];
"""
TAIL = "\n st.global.b32 [%p3], %r; ret;\n"


def make_module(body: str, threads: int = THREADS, outside: str = "", head: str = HEAD, tail: str = TAIL) -> str:
    """A module with the kernel ``k``: loads of a, b, c by thread, the body, the store of r."""
    parameters = ", ".join(f".param .u64 {name}" for name in ("pa", "pb", "pc", "pr"))
    return (
        f".version 8.7\n.target sm_100a\n.address_size 64\n{outside}\n"
        f".visible .entry k({parameters})\n.reqntid {threads}\n{{{DECLARATIONS}{head}\n{body}\n{tail}}}\n"
    )


def run_module(text: str, arrays: list[np.ndarray], shared: int = 0, **options: Any) -> Report:
    """Run the kernel ``k`` with the arrays as buffers, which it changes in place. Options: those of ``Launch``."""
    memory = DeviceMemory()
    addresses = [memory.register(array, name) for array, name in zip(arrays, "abcr", strict=False)]
    threads, grid = options.pop("threads", THREADS), options.pop("grid", (1, 1, 1))
    report = run_kernel(Launch(text, "k", grid, threads, shared, addresses, memory, **options))
    for array, address in zip(arrays, addresses, strict=True):
        array[...] = memory.contents(address).view(array.dtype).reshape(array.shape)
    return report


def evaluate(body: str, a: Any = 0, b: Any = 0, c: Any = 0, **options: Any) -> np.ndarray:
    """The results (uint32) of a body for operands that are arrays of 32-bit elements, or one number for all."""
    size = max(np.size(x) for x in (a, b, c))
    padded = -(-size // THREADS) * THREADS
    operands = []
    for x in (a, b, c):
        array = np.asarray(x)
        array = array.view(np.uint32) if array.dtype.itemsize == 4 else array.astype(np.uint32)
        operands.append(np.resize(array.ravel(), padded))
    result = np.zeros(padded, np.uint32)
    body = f" mov.u32 %x, %ctaid.x; mul.wide.u32 %o, %x, {4 * THREADS};" + "".join(
        f" add.s64 %p{k}, %p{k}, %o;" for k in range(4)
    ) + " ld.global.b32 %a, [%p0]; ld.global.b32 %b, [%p1]; ld.global.b32 %c, [%p2];\n" + body  # fmt: skip
    run_module(make_module(body), [*operands, result], grid=(padded // THREADS, 1, 1), **options)
    return result[:size]
