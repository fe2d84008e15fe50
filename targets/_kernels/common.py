"""Small helpers that every kernel template shares: dtype spellings, operand layouts, parameters, grids."""

from __future__ import annotations

import re

from mmcompile.core.kernel import OpCall, Operand, Parameter

_TRITON_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv",
    "uint8": "u8", "int32": "i32", "int64": "i64",
}
_LANGUAGE_NAMES = {
    "bfloat16": "tl.bfloat16", "float16": "tl.float16", "float32": "tl.float32",
    "float8_e4m3fn": "tl.float8e4nv", "uint8": "tl.uint8", "int32": "tl.int32", "int64": "tl.int64",
}
ELEMENT_SIZES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8,
}
FLOATS = ("bfloat16", "float16", "float32")


def short_dtype(dtype: str) -> str:
    """Triton's short name of a torch dtype name, for kernel names and pointer types: "bfloat16" -> "bf16"."""
    return _TRITON_NAMES[dtype]


def language_dtype(dtype: str) -> str:
    """The expression that names a dtype inside emitted text: "bfloat16" -> "tl.bfloat16"."""
    return _LANGUAGE_NAMES[dtype]


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def need(call: OpCall, name: str) -> Operand:
    """The operand ``name``, which the operation always has."""
    operand = call.operands[name]
    assert operand is not None, f"mm::{call.op} without {name}"
    return operand


def is_present(call: OpCall, name: str) -> bool:
    """True if the optional operand ``name`` is given."""
    return call.operands.get(name) is not None


def stage_warps(call: OpCall, usual: int) -> int:
    """Warps of a kernel: ``usual``, unless it is to be a stage of a merged kernel, which has its own number."""
    return int(call.attributes.get("warps", usual))


def row_stride(operand: Operand) -> int:
    """Elements from one row to the next (of the first dimension); raises if it is not a number."""
    stride = operand.strides[0]
    if not isinstance(stride, int):
        raise TypeError(f"the row stride must be a number, got {stride!r}")
    return stride


def pointer(name: str, operand: Operand, value: str | None = None) -> Parameter:
    """A pointer parameter for ``operand``; ``value`` is what the launch passes, by default ``name``."""
    return Parameter(name, f"*{short_dtype(operand.dtype)}", value or name)


def symbols_of(*expressions: int | str) -> list[str]:
    """The symbol names in shape expressions, each once, in order of appearance."""
    found: dict[str, None] = {}
    for expression in expressions:
        for word in re.findall(r"[A-Za-z_]\w*", str(expression)):
            if word not in ("cdiv", "min", "max"):
                found[word] = None
    return list(found)


def symbol_parameters(*expressions: int | str) -> list[Parameter]:
    """One i32 parameter for each symbol in ``expressions`` (none for plain numbers)."""
    return [Parameter(symbol, "i32", symbol) for symbol in symbols_of(*expressions)]


def kernel_name(base: str, *parts: str | int) -> str:
    """Readable kernel name: the base and its specialisation, joined by underscores."""
    return "_".join([base, *(str(part) for part in parts if part != "")])


def refuse_rows(call: OpCall, *names: str) -> str | None:
    """A reason if a present operand among ``names`` is not float [rows, n] with unit stride, else None."""
    for name in names:
        operand = call.operands.get(name)
        if operand is None:
            continue
        if operand.dtype not in FLOATS:
            return f"{name} is {operand.dtype}, not one of {', '.join(FLOATS)}"
        if len(operand.shape) != 2:
            return f"{name} has {len(operand.shape)} dimensions, not 2"
        if operand.strides[1] != 1:
            return f"the last stride of {name} is {operand.strides[1]}, not 1"
        if not isinstance(operand.shape[1], int) or not isinstance(operand.strides[0], int):
            return f"the width or row stride of {name} is not a number"
    return None
