"""Translate the steps of a region into Triton expressions with eager torch's rounding after every step.

Inside a kernel a float value of any dtype is an fp32 variable that holds a value of that dtype; integers and booleans
keep their own types.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mmcompile.core.region import (
    COMPARISON_OPS,
    CONSTANT_OPS,
    COPY_OPS,
    NORMALISING_OPS,
    REDUCING_OPS,
    REDUCTION_OPS,
    Argument,
    Step,
)
from mmcompile.targets._kernels.sampling import pack_candidates, unpack_index

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
DTYPES = {**{name: f"tl.{name}" for name in (*FLOAT_DTYPES, "int32", "int64", "uint8")}, "bool": "tl.int1"}
MAX_POWER = 16


@triton.jit
def tanh(x):
    """Hyperbolic tangent in fp32: a series near 0, where the quotient would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * -0.053968254)))
    decay = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def round_half_even(x):
    """Nearest integer, halves to even."""
    low = tl.floor(x)
    rest, odd = x - low, low - 2.0 * tl.floor(low * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), low + 1.0, low)


@triton.jit
def gelu(x):
    """x times the normal distribution function (Hendrycks & Gimpel 2016)."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """The tanh approximation of GELU."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def row_maximum(x, inside):
    """Maximum over the lanes that are ``inside``; NaN if one of them is NaN."""
    lost = tl.max(tl.where(inside & (x != x), 1, 0), axis=0)
    return tl.where(lost > 0, float("nan"), tl.max(tl.where(inside, x, float("-inf")), axis=0))


@triton.jit
def row_variance(x, inside, N: tl.constexpr, FREEDOM: tl.constexpr):
    """Sum of squared distances from the mean of the N lanes that are ``inside``, over FREEDOM."""
    distance = tl.where(inside, x - tl.sum(tl.where(inside, x, 0.0), axis=0) / N, 0.0)
    return tl.sum(distance * distance, axis=0) / FREEDOM


@triton.jit
def row_softmax(x, inside):
    """Softmax over the lanes that are ``inside``."""
    weight = tl.where(inside, tl.exp(x - row_maximum(x, inside)), 0.0)
    return weight / tl.sum(weight, axis=0)


@triton.jit
def row_log_softmax(x, inside):
    """Logarithm of the softmax over the lanes that are ``inside``."""
    shifted = x - row_maximum(x, inside)
    return shifted - tl.log(tl.sum(tl.where(inside, tl.exp(shifted), 0.0), axis=0))


@triton.jit
def row_argmax(x, inside):
    """First index of the maximum of the lanes that are ``inside``; a NaN is above everything."""
    index = tl.arange(0, x.shape[0])
    packed = pack_candidates(tl.where(inside, x, float("-inf")), tl.where(inside, index, 0x7FFFFFFF))
    return unpack_index(tl.max(packed, axis=0))


HELPERS = (tanh, round_half_even, gelu, gelu_tanh, row_maximum, row_variance, row_softmax, row_log_softmax, row_argmax)

_FLOAT_UNARY = {
    "abs": "tl.abs({0})", "ceil": "tl.ceil({0})", "cos": "tl.cos({0})", "erf": "tl.erf({0})", "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})", "floor": "tl.floor({0})", "log": "tl.log({0})", "log2": "tl.log2({0})", "neg": "-{0}",
    "reciprocal": "tl.div_rn(tl.full([], 1.0, tl.float32), {0})", "relu": "tl.where({0} < 0.0, 0.0, {0})",
    "round": "round_half_even({0})", "rsqrt": "tl.rsqrt({0})", "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "silu": "{0} / (1.0 + tl.exp(-{0}))", "sin": "tl.sin({0})", "sqrt": "tl.sqrt_rn({0})", "square": "{0} * {0}",
    "tanh": "tanh({0})",
}
_INTEGER_UNARY = {"abs": "tl.abs({0})", "bitwise_not": "~{0}", "neg": "-{0}", "square": "{0} * {0}",
                  "relu": "tl.maximum({0}, 0)"}
_BINARY = {
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}", "div": "tl.div_rn({0}, {1})",
    "eq": "{0} == {1}", "ge": "{0} >= {1}", "gt": "{0} > {1}", "le": "{0} <= {1}", "lt": "{0} < {1}",
    "logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "mul": "{0} * {1}", "ne": "{0} != {1}",
    "where": "tl.where({0}, {1}, {2})",
}
_REDUCTIONS = {
    "argmax": "row_argmax({0}, inside)", "amax": "row_maximum({0}, inside)", "amin": "-row_maximum(-{0}, inside)",
    "mean": "tl.sum(tl.where(inside, {0}, 0.0), axis=0) / {n}", "softmax": "row_softmax({0}, inside)",
    "sum": "tl.sum(tl.where(inside, {0}, 0), axis=0)", "log_softmax": "row_log_softmax({0}, inside)",
    "var": "row_variance({0}, inside, {n}, {freedom})",
}


def is_float(dtype: str) -> bool:
    """True for the float dtypes that a region may hold."""
    return dtype in FLOAT_DTYPES


def round_to(expression: str, dtype: str) -> str:
    """``expression`` converted to the in-kernel form of ``dtype``."""
    if dtype in ("bfloat16", "float16"):
        return f"({expression}).to({DTYPES[dtype]}).to(tl.float32)"
    return f"({expression}).to({DTYPES[dtype]})"


def write_number(value: int | float | bool, dtype: str) -> str:
    """A literal for a scalar that is used as a ``dtype`` ("float32" keeps a Python float's fp32 value)."""
    if not is_float(dtype):
        return str(int(value))
    rounded = float(torch.tensor(float(value), dtype=getattr(torch, dtype)))
    return repr(rounded) if math.isfinite(rounded) else f'float("{rounded}")'


def _convert(argument: Argument, dtypes: dict[str, str], compute: str) -> str:
    """An argument as a ``compute`` value: the variable of a name, converted if need be, or a literal."""
    if argument is None:
        return ""
    if not isinstance(argument, str):
        return write_number(argument, compute)
    own = dtypes[argument]
    if is_float(own) and is_float(compute) or own == compute:
        return f"v_{argument}"
    if compute == "bool":
        return f"(v_{argument} != 0)"
    return f"v_{argument}.to({'tl.float32' if is_float(compute) else DTYPES[compute]})"


def _compare_dtype(args: tuple[Argument, ...], dtypes: dict[str, str]) -> str:
    """The dtype that torch compares in: that of the tensors, lifted by the category of a scalar."""
    tensors = [getattr(torch, dtypes[a]) for a in args if isinstance(a, str)]
    common = tensors[0]
    for other in tensors[1:]:
        common = torch.promote_types(common, other)
    for scalar in args:
        if isinstance(scalar, float) and not common.is_floating_point:
            common = torch.float32
        elif isinstance(scalar, int) and not isinstance(scalar, bool) and common == torch.bool:
            common = torch.int64
    return str(common).removeprefix("torch.")


def _compute_dtype(step: Step, dtypes: dict[str, str]) -> str:
    """What the operands of a step are converted to before it."""
    if step.op in COMPARISON_OPS:
        common = _compare_dtype(step.args, dtypes)
        return "int32" if common == "bool" else common
    if step.op.startswith("logical"):
        return "bool"
    if step.op in ("argmax", "amax", "amin"):
        return "float32"
    return "float32" if is_float(step.dtype) else step.dtype


def _write_power(base: str, exponent: int | float) -> str:
    if exponent == 0.5:
        return f"tl.sqrt_rn({base})"
    if float(exponent).is_integer():
        product = " * ".join([base] * abs(int(exponent))) or f"({base} * 0 + 1)"
        return product if exponent >= 0 else f"1.0 / ({product})"
    return f"tl.exp2({write_number(exponent, 'float32')} * tl.log2({base}))"


def _write_clamp(x: str, low: str, high: str) -> str:
    lifted = f"tl.where({x} < {low}, {low}, {x})" if low else x
    return f"tl.where({lifted} > {high}, {high}, {lifted})" if high else lifted


def _write_sum(step: Step, args: list[str], compute: str) -> str:
    first, second = reversed(args) if step.op == "rsub" else args
    alpha = step.options.get("alpha", 1)
    if alpha != 1:
        second = f"{write_number(alpha, compute)} * {second}"
    return f"{first} {'+' if step.op == 'add' else '-'} {second}"


def _write_pointwise(step: Step, args: list[str], compute: str) -> str:
    """The unrounded expression of an elementwise step over converted arguments."""
    op = step.op
    if op in ("add", "sub", "rsub"):
        return _write_sum(step, args, compute)
    if op in ("maximum", "minimum"):
        nan = ", propagate_nan=tl.PropagateNan.ALL" if is_float(compute) else ""
        return f"tl.{op}({args[0]}, {args[1]}{nan})"
    if op == "pow":
        exponent = step.args[1]
        assert isinstance(exponent, int | float)
        return _write_power(args[0], exponent)
    if op in ("clamp", "clamp_min", "clamp_max"):
        bounds = {"clamp": args[1:], "clamp_min": [*args[1:], ""], "clamp_max": ["", *args[1:]]}[op]
        return _write_clamp(args[0], *bounds)
    if op == "masked_fill":
        return f"tl.where({args[1]}, {args[2]}, {args[0]})"
    if op in CONSTANT_OPS:
        return f"tl.full([], {args[0]}, {'tl.float32' if is_float(compute) else DTYPES[compute]})"
    if op == "gelu":
        return f"{'gelu_tanh' if step.options.get('approximate') == 'tanh' else 'gelu'}({args[0]})"
    if op == "logical_not" or (op == "bitwise_not" and compute == "bool"):
        return f"{args[0]} == 0"
    if op in COPY_OPS:
        return args[0]
    table = _BINARY if op in _BINARY else _FLOAT_UNARY if is_float(compute) else _INTEGER_UNARY
    return table[op].format(*args)


def write_step(step: Step, dtypes: dict[str, str], width: int) -> str:
    """The statement ``v_<name> = ...`` of a step.

    Args:
        dtypes: torch dtype names of the inputs and earlier steps. width: length of the row that reductions run over.
    """
    if step.op == "_to_copy":
        source = dtypes[str(step.args[0])]
        compute = "bool" if step.dtype == "bool" else "float32" if is_float(step.dtype) else source
    else:
        compute = _compute_dtype(step, dtypes)
    positions = {"where": (0,), "masked_fill": (1,)}.get(step.op, ())
    args = [_convert(a, dtypes, "bool" if i in positions else compute) for i, a in enumerate(step.args)]
    if step.op in REDUCTION_OPS:
        freedom = max(width - step.options.get("correction", 1), 0)
        expression = _REDUCTIONS[step.op.lstrip("_")].format(*args, n=width, freedom=f"{float(freedom)}")
    else:
        expression = _write_pointwise(step, args, compute)
    return f"v_{step.name} = {round_to(expression, step.dtype)}"


def find_unsupported(step: Step, dtypes: dict[str, str]) -> str | None:
    """Why a step cannot be generated, in one clause; None if it can."""
    if step.dtype not in DTYPES:
        return f"{step.op} gives {step.dtype}, not one of {', '.join(DTYPES)}"
    compute = _compute_dtype(step, dtypes)
    integral = not is_float(compute)
    if step.op in REDUCING_OPS | NORMALISING_OPS and step.op != "sum" and not is_float(dtypes[str(step.args[0])]):
        return f"{step.op} of {dtypes[str(step.args[0])]} has no generated form"
    if step.op == "pow":
        exponent = step.args[1]
        assert isinstance(exponent, int | float)
        if float(exponent).is_integer() and abs(exponent) > MAX_POWER:
            return f"pow with exponent {exponent} would be more than {MAX_POWER} products"
        if integral and exponent < 0:
            return "pow of integers with a negative exponent has no generated form"
    known = _INTEGER_UNARY.keys() | _BINARY.keys() | REDUCTION_OPS | COPY_OPS | CONSTANT_OPS
    shared = ("add", "sub", "rsub", "maximum", "minimum", "pow", "clamp", "clamp_min", "clamp_max", "masked_fill",
              "logical_not")
    if integral and step.op not in known and step.op not in shared:
        return f"{step.op} of integers has no generated form"
    return None
