"""Running hand-written PTX in the emulator: a fixture for the tests of the asynchronous and tensor core rooms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel

sys.path.insert(0, str(Path(__file__).parent))

HEAD = """.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
.reg .pred p<20>;
.reg .b16 h<20>;
.reg .b32 r<{words}>;
.reg .b64 d<60>;
mov.u32 r0, %tid.x;
{loads}
"""


def build_text(body: str, arguments: int, *, target: str = "sm_90a", threads: int = 128, words: int = 900) -> str:
    """A kernel whose parameters are pointers, in d0, d1, ...; r0 is the thread; shared memory starts at 0."""
    names = [f"pointer{i}" for i in range(arguments)]
    parameters = ", ".join(f".param .u64 {name}" for name in names)
    loads = "\n".join(f"ld.param.b64 d{i}, [{name}];" for i, name in enumerate(names))
    head = HEAD.format(target=target, parameters=parameters, threads=threads, words=words, loads=loads)
    return f"{head}{body}\nret;\n}}\n"


def run_body(
    body: str,
    arrays: list[np.ndarray[Any, Any]],
    *,
    target: str = "sm_90a",
    threads: int = 128,
    shared: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    **options: Any,
) -> list[np.ndarray[Any, Any]]:
    """Run ``body`` with pointers to ``arrays``; returns the arrays afterwards. Options: see ``Launch``."""
    memory = DeviceMemory()
    addresses = [memory.register(array, f"array {i}") for i, array in enumerate(arrays)]
    text = build_text(body, len(arrays), target=target, threads=threads)
    run_kernel(Launch(text, "kernel", grid, threads, shared, addresses, memory, **options))
    return [
        memory.contents(address).view(array.dtype).reshape(array.shape).copy()
        for address, array in zip(addresses, arrays, strict=True)
    ]


@pytest.fixture
def run_ptx() -> Callable[..., list[np.ndarray[Any, Any]]]:
    """The function ``run_body``."""
    return run_body


@pytest.fixture
def ptx_text() -> Callable[..., str]:
    """The function ``build_text``."""
    return build_text
