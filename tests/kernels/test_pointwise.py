"""Generated elementwise and reduction kernels against the region's eager meaning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcompile.core.kernel import OpCall, Operand
from mmcompile.core.region import UNARY_OPS, Region, Step, evaluate_program
from mmcompile.targets import sm90
from mmcompile.targets._kernels import pointwise

SPEC, ARCH = sm90.TARGET.spec, sm90.TARGET.spec.architectures[0]
POINTWISE, REDUCTION = pointwise.TEMPLATES
Shape = tuple[int | str, ...]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# A result in the last place of fp32 may round the other way: one place of the narrow type, at most 2^-7 of the value.
ULP = {BF16: 2**-7, F16: 2**-10, F32: 2e-6}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def program(inputs: list[Tensor], *steps: tuple[Any, ...], outputs: list[str] | None = None) -> Region:
    """Region of steps (name, op, args, dtype, options?) over inputs in0, in1, ..."""
    built = tuple(Step(s[0], s[1], tuple(s[2]), name_of(s[3]), s[4] if len(s) > 4 else {}) for s in steps)
    return Region(tuple(f"in{i}" for i in range(len(inputs))), built, tuple(outputs or [built[-1].name]))


def as_operand(tensor: Tensor, shape: Shape | None = None) -> Operand:
    return Operand(shape if shape is not None else tuple(tensor.shape), tuple(tensor.stride()), name_of(tensor.dtype))


def run(interpreter: Any, region: Region, inputs: list[Tensor], shapes: list[Shape] | None = None,
        result: Shape | None = None, symbols: dict[str, int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the generated kernel, in buffers that were poisoned before, and of the eager evaluator.

    ``shapes`` and ``result``: the operands' shapes over ``symbols``, where they are not fixed.
    """
    expected = list(evaluate_program(region, inputs))
    results = [torch.full(e.shape, math.nan if e.dtype.is_floating_point else 113).to(e.dtype) for e in expected]
    tensors = dict(zip(region.inputs, inputs, strict=True))
    operands = {n: as_operand(t, shapes[i] if shapes else None) for i, (n, t) in enumerate(tensors.items())}
    call = OpCall(region.kind, operands, tuple(as_operand(r, result) for r in results), region.to_json())
    template = POINTWISE if region.kind == "pointwise" else REDUCTION
    reason = template.refuse(call, SPEC, ARCH)
    assert reason is None, reason
    (source,) = template.emit(call, SPEC, ARCH)
    pool: dict[str, Any] = tensors | (symbols or {}) | {f"result{i or ''}": r for i, r in enumerate(results)}
    names = {"cdiv": lambda a, b: -(-a // b), **(symbols or {})}
    grid = tuple(int(eval(e, {"__builtins__": {}}, names)) for e in source.grid)
    values = [p.value for p in source.parameters]
    pool |= dict(zip(values, interpreter.run(source, [pool[v] for v in values], grid), strict=True))
    return [pool[f"result{i or ''}"] for i in range(len(results))], expected


def check(outcome: tuple[list[Tensor], list[Tensor]], tolerance: float = 0.0) -> None:
    """Equal up to a relative ``tolerance`` and, unless that is 0, 1e-6 absolute."""
    for i, (out, expected) in enumerate(zip(*outcome, strict=True)):
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=min(tolerance, 1e-6), equal_nan=True,
                                   msg=lambda text, i=i: f"output {i}: {text}")


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 0.05, -0.07, 3e-4, 20.0, -30.0, math.inf, -math.inf,
                        math.nan])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_unary_op(interpreter, normal, dtype):
    x = torch.cat([SPECIAL, normal(48, dtype=F32, scale=3.0)]).to(dtype)
    floats = sorted(UNARY_OPS - {"bitwise_not", "logical_not"})
    steps = [(f"r_{op}", op, ["in0"], dtype) for op in floats]
    region = program([x], *steps, ("inv", "logical_not", ["in0"], torch.bool),
                     outputs=[*(f"r_{op}" for op in floats), "inv"])
    check(run(interpreter, region, [x]), ULP[dtype])


def test_gelu_tanh_powers_and_clamps(interpreter, normal):
    x = normal(200, dtype=F32)
    powers = [0, 1, 2, 3, 5, -1, -2, 0.5, 1.7]
    steps = [(f"p{i}", "pow", ["in0", e], F32) for i, e in enumerate(powers)]
    steps += [("g", "gelu", ["in0"], F32, {"approximate": "tanh"}), ("c", "clamp", ["in0", -0.5, None], F32),
              ("d", "clamp", ["c", None, 0.7], F32), ("e", "clamp", ["in0", -1, 1], F32),
              ("f", "clamp_min", ["in0", 0.1], F32), ("h", "clamp_max", ["in0", 0.1], F32),
              ("k", "sub", ["in0", "h"], F32, {"alpha": 0.5}), ("m", "rsub", ["k", 1.0], F32)]
    check(run(interpreter, program([x], *steps, outputs=[s[0] for s in steps]), [x]), 1e-5)


def test_integers_booleans_and_casts(interpreter):
    ids = torch.tensor([0, 1, -5, 2**20, 7], dtype=torch.int32)
    wide = torch.tensor([3, -3, 2**40, 0, 7])
    mask = torch.tensor([True, False, True, True, False])
    inputs = [ids, wide, mask]
    steps = [
        ("a", "add", ["in1", "in0"], torch.int64), ("b", "eq", ["in0", "in1"], torch.bool),
        ("c", "logical_and", ["b", "in2"], torch.bool), ("d", "bitwise_or", ["in0", 8], torch.int32),
        ("e", "bitwise_not", ["in2"], torch.bool), ("f", "div", ["in0", 2], F32),
        ("g", "where", ["in2", "in1", 5], torch.int64), ("h", "_to_copy", ["in0"], BF16),
        ("i", "_to_copy", ["in2"], torch.int32), ("j", "_to_copy", ["in1"], torch.bool),
        ("k", "gt", ["in1", 0.5], torch.bool), ("l", "mul", ["in2", 3], torch.int64),
        ("m", "maximum", ["in0", "in0"], torch.int32), ("n", "full", [9], torch.int64),
        ("o", "add", ["in0", "n"], torch.int64), ("p", "bitwise_xor", ["in2", "b"], torch.bool),
        ("q", "masked_fill", ["h", "in2", -math.inf], BF16), ("r", "_to_copy", ["f"], torch.int32),
    ]
    check(run(interpreter, program(inputs, *steps, outputs=[s[0] for s in steps if s[0] != "n"]), inputs))


@pytest.mark.parametrize("shapes", [
    [("tokens", 5, 8), (5, 8), ("tokens", 1, 8), (1,)],
    [(1, "tokens", 16), ("tokens", 1), (16,)],
    [(2, 3, 4), (3, 1), ()],
])
def test_broadcasting_over_symbols(interpreter, normal, shapes):
    inputs = [normal(*[7 if n == "tokens" else n for n in shape], dtype=F32) for shape in shapes]
    total = [("s1", "add", ["in0", "in1"], F32)]
    total += [(f"s{i}", "mul", [f"s{i - 1}", f"in{i}"], F32) for i in range(2, len(inputs))]
    region = program(inputs, *total)
    result = pointwise.broadcast_shapes(shapes)
    check(run(interpreter, region, inputs, shapes, result, {"tokens": 7}))


def test_transposed_and_strided_operands(interpreter, normal):
    x, y = normal(6, 10, dtype=F32).t(), normal(10, 24, dtype=BF16)[:, ::4]
    region = program([x, y], ("a", "_to_copy", ["in1"], F32), ("b", "mul", ["a", "in0"], F32))
    check(run(interpreter, region, [x, y]))


EXACT = ["add", "sub", "mul", "maximum", "minimum", "neg", "abs", "relu", "floor", "eq", "lt", "ge", "where"]
EXACT += ["_to_copy"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_programs_are_bitwise_equal(interpreter, data):
    # The scalars are exact in every dtype: torch's CPU kernels round others differently in their vector and tail loops.
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    dtypes = data.draw(st.lists(st.sampled_from([BF16, F16, F32]), min_size=1, max_size=3), "dtypes")
    shapes = [data.draw(st.sampled_from([(3, 7), (7,), (3, 1)])) for _ in dtypes[1:]]
    inputs = [torch.randn(s, generator=generator).to(d) for s, d in zip([(3, 7), *shapes], dtypes, strict=True)]
    values: dict[str, Tensor] = {f"in{i}": x for i, x in enumerate(inputs)}
    steps: list[tuple[Any, ...]] = []
    for i in range(data.draw(st.integers(1, 8), "length")):
        floats = [n for n, v in values.items() if v.dtype.is_floating_point]
        masks = [n for n, v in values.items() if v.dtype == torch.bool]
        op = data.draw(st.sampled_from([o for o in EXACT if o != "where" or masks]), "op")
        a = data.draw(st.sampled_from(floats), "a")
        b = data.draw(st.one_of(st.sampled_from(floats), st.sampled_from([2, -0.75, 0.125])), "b")
        args = [a] if op in (*UNARY_OPS, "_to_copy") else [a, b]
        args = [data.draw(st.sampled_from(masks), "mask"), *args] if op == "where" else args
        args[-1] = a if op in ("maximum", "minimum") and not isinstance(b, str) else args[-1]
        real = [values[x] if isinstance(x, str) else x for x in args]
        dtype = data.draw(st.sampled_from([BF16, F16, F32])) if op == "_to_copy" else None
        values[f"s{i}"] = real[0].to(dtype) if dtype else getattr(torch.ops.aten, op)(*real)
        steps.append((f"s{i}", op, args, values[f"s{i}"].dtype))
    steps += [("keep", "eq", ["in0", "in0"], torch.bool), ("whole", "where", ["keep", "in0", 0.0], dtypes[0])]
    full = [s[0] for s in steps if s[0] in values and values[s[0]].shape == (3, 7)] + ["whole"]
    check(run(interpreter, program(inputs, *steps, outputs=full), inputs))


def layer_norm(x: Tensor, weight: Tensor) -> Region:
    return program([x, weight], ("f", "_to_copy", ["in0"], F32), ("m", "mean", ["f"], F32, {"keepdim": True}),
                   ("c", "sub", ["f", "m"], F32), ("v", "var", ["f"], F32, {"keepdim": True, "correction": 0}),
                   ("e", "add", ["v", 1e-5], F32), ("r", "rsqrt", ["e"], F32), ("n", "mul", ["c", "r"], F32),
                   ("b", "_to_copy", ["n"], BF16), ("o", "mul", ["b", "in1"], BF16), outputs=["o", "m"])


def test_layer_norm_is_one_kernel(interpreter, normal):
    x, weight = normal(2, 5, 150), normal(150)
    out, expected = run(interpreter, layer_norm(x, weight), [x, weight])
    torch.testing.assert_close(out[0], expected[0], rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(out[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["softmax", "_softmax", "log_softmax", "_log_softmax"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_softmax(interpreter, normal, op, dtype):
    x = normal(4, 3, 70, dtype=dtype, scale=5.0)
    x[0, 0, :69], x[1, 1] = -math.inf, -math.inf
    out, expected = run(interpreter, program([x], ("s", op, ["in0"], dtype)), [x])
    torch.testing.assert_close(out[0], expected[0], rtol=ULP[dtype] * 2, atol=1e-6, equal_nan=True)


def test_reductions_without_keepdim(interpreter, normal):
    x, ids = normal(6, 33, dtype=F32), torch.arange(6 * 33).reshape(6, 33) % 50
    x[1, 5], x[2, [4, 20]] = math.nan, 100.0
    steps = [("a", "amax", ["in0"], F32), ("b", "amin", ["in0"], F32), ("c", "argmax", ["in0"], torch.int64),
             ("d", "sum", ["in1"], torch.int64), ("e", "sum", ["in0"], F32), ("f", "var", ["in0"], F32),
             ("g", "sub", ["a", "b"], F32), ("h", "gt", ["in0", 0.0], torch.bool), ("i", "sum", ["h"], torch.int64)]
    check(run(interpreter, program([x, ids], *steps, outputs=[s[0] for s in steps if s[0] != "h"]), [x, ids]), 1e-5)


def test_row_of_symbols_and_transposed_rows(interpreter, normal):
    x, scale = normal(8, 5, 40).transpose(0, 1), normal(8, 1)
    region = program([x, scale], ("a", "mul", ["in0", "in1"], BF16), ("m", "amax", ["a"], BF16, {"keepdim": True}),
                     ("o", "sub", ["a", "m"], BF16))
    check(run(interpreter, region, [x, scale], [("tokens", 8, 40), (8, 1)], ("tokens", 8, 40), {"tokens": 5}))


def refusal(region: Region, *shapes: Shape, result: Shape, dtype: str = "float32") -> str:
    operands = {f"in{i}": Operand(s, (1,) * len(s), dtype) for i, s in enumerate(shapes)}
    call = OpCall(region.kind, operands, tuple(Operand(result, (1,) * len(result), dtype) for _ in region.outputs),
                  region.to_json())
    template = POINTWISE if region.kind == "pointwise" else REDUCTION
    return str(template.refuse(call, SPEC, ARCH))


def test_refusals_name_the_reason():
    one = [torch.zeros(1)]
    add = program(one * 2, ("a", "add", ["in0", "in1"], F32))
    assert "broadcast" in refusal(add, ("tokens",), ("batch",), result=("tokens",))
    assert "broadcast shape" in refusal(add, (3, 4), (4,), result=(4,))
    assert "float64" in refusal(add, (3,), (3,), result=(3,), dtype="float64")
    total = program(one, ("a", "sum", ["in0"], F32))
    assert "longer" in refusal(total, (2, 40000), result=(2,))
    assert "number" in refusal(total, (2, "tokens"), result=(2,))
    assert "shape" in refusal(total, (2, 40), result=(2, 1))
    mixed = program(one, ("a", "sum", ["in0"], F32), ("b", "sub", ["in0", "a"], F32))
    assert "keepdim" in refusal(mixed, (4, 4), result=(4, 4))
    huge = program(one, ("a", "pow", ["in0", 99], F32))
    assert "exponent" in refusal(huge, (4,), result=(4,))
