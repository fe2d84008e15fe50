"""The process behind ``Interpreter``: reads jobs from stdin, runs them in Triton's interpreter, answers on stdout.

Triton 3.9's interpreter keeps bfloat16 and float8 values as integers of their size, and then adds, multiplies and
dots those integers; it also rounds halves up where the hardware rounds to even. ``_repair`` corrects both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from safetensors.torch import load_file, save_file
from triton.runtime import interpreter

from mmcompile.targets._interpret import rebuild_arguments

_TORCH_DTYPES = {
    tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _to_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
    """The numbers behind the interpreter's array of ``dtype``."""
    target = _TORCH_DTYPES[dtype]
    integers = np.ascontiguousarray(data).view(f"{'u' if target.itemsize == 1 else 'i'}{target.itemsize}")
    return torch.from_numpy(integers).view(target)


def _from_torch(tensor: torch.Tensor, like: np.dtype[Any]) -> np.ndarray:
    """The interpreter's array (numpy dtype ``like``) of a tensor."""
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize]).numpy().view(like)


def _repair() -> None:
    """Give the interpreter the hardware's bfloat16 arithmetic and round-to-nearest-even conversions."""
    builder = interpreter.InterpreterBuilder
    convert, binary, dot = interpreter._convert_float, builder.binary_op, builder.create_dot
    narrow = (tl.bfloat16, tl.float8e4nv, tl.float8e5)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in _TORCH_DTYPES or target not in _TORCH_DTYPES or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return convert(data, source, target, rounding)
        converted = _to_torch(data, source).to(_TORCH_DTYPES[target])
        return _from_torch(converted, np.dtype(f"u{converted.dtype.itemsize}")).reshape(np.shape(data))

    def widen(handle: Any) -> Any:
        return interpreter.TensorHandle(_to_torch(handle.data, handle.dtype.scalar).float().numpy(), tl.float32)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        dtype = left.dtype.scalar
        if dtype not in narrow:
            return binary(self, left, right, op)
        wide = op(widen(left).data, widen(right).data)
        if wide.dtype == np.bool_:
            return interpreter.TensorHandle(wide, tl.int1)
        return self.create_fp_to_fp(interpreter.TensorHandle(wide, tl.float32), dtype, None)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if a.dtype.scalar in narrow or a.dtype.scalar == tl.float16:
            a, b = widen(a), widen(b)
        return dot(self, a, b, d, precision, imprecise)

    interpreter._convert_float = convert_float
    builder.binary_op = binary_op
    builder.create_dot = create_dot


def _load(path: Path, modules: dict[Path, ModuleType]) -> ModuleType:
    if path not in modules:
        spec = importlib.util.spec_from_file_location(f"emitted_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        modules[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[path])
    return modules[path]


@contextlib.contextmanager
def _only_programs(grid: tuple[int, ...], programs: list[tuple[int, ...]]) -> Iterator[None]:
    """Within, program i of a launch over (len(programs), 1, 1) runs as ``programs[i]`` of ``grid``."""
    builder = interpreter.interpreter_builder

    def set_grid_dim(*_: int) -> None:
        builder.grid_dim = grid

    def set_grid_idx(x: int, *_: int) -> None:
        builder.grid_idx = programs[x]

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_dim, builder.set_grid_idx


def _run(job: dict[str, Any], folder: Path, modules: dict[Path, ModuleType]) -> str:
    """Run one job; return the last line of the traceback, or an empty string."""
    try:
        storages = load_file(folder / "in.safetensors")
        arguments = rebuild_arguments(storages, job["arguments"])
        kernel, grid = _load(Path(job["script"]), modules).kernel, tuple(job["grid"])
        if job["programs"] is None:
            kernel[grid](*arguments)
        else:
            with _only_programs(grid, [tuple(p) for p in job["programs"]]):
                kernel[(len(job["programs"]), 1, 1)](*arguments)
        save_file(storages, folder / "out.safetensors")
    except Exception:
        return traceback.format_exc().strip().splitlines()[-1]
    return ""


def main() -> None:
    """Serve jobs until stdin closes. The kernels' own prints go to stderr."""
    folder, modules = Path(sys.argv[1]), {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    _repair()
    for line in sys.stdin:
        print(json.dumps({"error": _run(json.loads(line), folder, modules)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
