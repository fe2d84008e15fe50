"""The ONNX project's own node tests through the door: which pass, which are out of scope and why, which fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto

from mmcompile.capture.onnx.door import capture_onnx
from mmcompile.capture.onnx.values import BOUNDARY, to_torch
from mmcompile.core.errors import CaptureError

# Operators that are left out on purpose, with the reason that the table gives.
OUT_OF_SCOPE = {
    "Bernoulli": "random numbers",
    "RandomUniformLike": "random numbers",
    "ImageDecoder": "decoding of image files",
    "DeformConv": "detection operators (DeformConv, RoiAlign, NonMaxSuppression)",
    "RoiAlign": "detection operators (DeformConv, RoiAlign, NonMaxSuppression)",
    "NonMaxSuppression": "detection operators (DeformConv, RoiAlign, NonMaxSuppression)",
    "TfIdfVectorizer": "text features",
}
# Ranges of the integers of two and four bits.
FEW_BITS = {
    TensorProto.INT4: (-8, 7),
    TensorProto.UINT4: (0, 15),
    TensorProto.INT2: (-2, 1),
    TensorProto.UINT2: (0, 3),
}
# Rounding of two-byte results; the tests' own tolerances suit a runtime that computes in the same order.
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


@lru_cache
def list_cases() -> list[Any]:
    """All node tests that ship with the onnx package (their inputs are made when they are listed)."""
    from onnx.backend.test.case.node import collect_testcases

    return collect_testcases(None)


@dataclass
class Table:
    """Outcome of a sweep: number of tests by outcome, and the failures with their reasons."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)

    def print(self) -> None:
        """The coverage table."""
        print()
        for outcome, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            print(f"{count:5d}  {outcome}")
        for name, reason in self.failures.items():
            print(f"FAILED {name}: {reason}")


def find_reason_out_of_scope(model: onnx.ModelProto) -> str | None:
    """Why a test is out of scope, None if it is in."""
    for imported in model.opset_import:
        if imported.domain in ("", "ai.onnx") and imported.version < 13:
            return "opset below 13"
        if imported.domain.startswith("ai.onnx.ml"):
            return "classical machine learning (ai.onnx.ml)"
        if "training" in imported.domain:
            return "training (ai.onnx.preview.training)"
    for value in (*model.graph.input, *model.graph.output):
        if value.type.WhichOneof("value") != "tensor_type":
            return "sequences or optionals as inputs or outputs"
        if value.type.tensor_type.elem_type == TensorProto.STRING:
            return "string tensors"
    for node in model.graph.node:
        if node.op_type in OUT_OF_SCOPE:
            return OUT_OF_SCOPE[node.op_type]
        if node.op_type == "Dropout" and len(node.input) == 3 and "training" in model.graph.name:
            return "random numbers"
    return None


def _convert(value: Any, elem_type: int) -> torch.Tensor:
    array = onnx.numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
    tensor = to_torch(array, elem_type, "a test's data")
    return tensor.to(BOUNDARY[elem_type]) if elem_type in BOUNDARY else tensor


def run_case(case: Any, folder: Path) -> str:
    """Capture a test's model and compare its results; "passed" or how. Raises AssertionError or CaptureError."""
    path = folder / "model.onnx"
    path.write_bytes(case.model.SerializeToString())
    given, wanted = case.data_sets[0]
    types = {v.name: v.type.tensor_type.elem_type for v in case.model.graph.input}
    inputs = {name: _convert(v, t) for (name, t), v in zip(types.items(), given, strict=True)}
    fixed: dict[str, Any] = {}
    for attempt in range(3):
        try:
            captured = capture_onnx(path, fixed=fixed)
            break
        except CaptureError as error:
            if attempt == 2 or "--fix" not in str(error):
                raise
            names = list(inputs)  # shapes, axes and the like come as inputs in these tests: first fix all but the data
            fixed = {n: inputs[n] for n in (names[1:] if attempt == 0 else names)}
    with torch.no_grad():
        results = captured.graph_module(*[v for n, v in inputs.items() if n not in fixed])
    results = results if isinstance(results, tuple | list) else [results]
    partly = False
    for have, want, value in zip(results, wanted, case.model.graph.output, strict=True):
        elem_type = value.type.tensor_type.elem_type
        transform = any(n.op_type in ("DFT", "STFT") for n in case.model.graph.node)
        wanted_value = _convert(want, elem_type)
        if case.name.startswith("test_cast") and elem_type in FEW_BITS:
            defined = _find_defined(next(iter(inputs.values())), elem_type)
            assert defined.any() and have.shape == wanted_value.shape
            partly, have, wanted_value = not bool(defined.all()), have[defined], wanted_value[defined]
        compare(have, wanted_value, case.rtol, case.atol, sums=transform)
    if partly:
        return "passed, but for values that the standard leaves undefined"
    return "passed, shape inputs fixed" if fixed else "passed"


def _find_defined(x: torch.Tensor, elem_type: int) -> torch.Tensor:
    """Where a cast of ``x`` is defined: the operator Cast leaves floats out of an integer's range "undefined".

    The tests expect what ml_dtypes makes of those, which differs from version to version.
    """
    low, high = FEW_BITS[elem_type]
    return (x >= low) & (x <= high) if x.is_floating_point() else torch.ones(x.shape, dtype=torch.bool)


def compare(have: torch.Tensor, want: torch.Tensor, rtol: float, atol: float, *, sums: bool = False) -> None:
    """Equal shape, dtype and values within the test's tolerance, or that of its dtype's rounding.

    ``sums``: results are sums of terms as large as the largest result (Fourier transforms), rounded with it.
    """
    assert have.dtype == want.dtype and have.shape == want.shape, (
        f"{have.dtype} {have.shape}, {want.dtype} {want.shape}"
    )
    dtype, rounding = have.dtype, ROUNDING.get(have.dtype, 0.0)
    if have.dtype.itemsize == 1 and have.dtype.is_floating_point:
        have, want = have.float(), want.float()
    finite = want[want.isfinite()].abs().max().item() if want.is_floating_point() and want.isfinite().any() else 0.0
    rounding = max(rounding, 2.0**-22 * finite) if sums else rounding
    wide = torch.complex128 if have.is_complex() else torch.float64
    torch.testing.assert_close(
        have.to(wide), want.to(wide), rtol=max(rtol, ROUNDING.get(dtype, 0.0)), atol=max(atol, rounding), equal_nan=True
    )


def sweep(folder: Path, step: int = 1) -> Table:
    """Every ``step``-th test."""
    table = Table()
    for case in list_cases()[::step]:
        reason = find_reason_out_of_scope(case.model)
        if reason is not None:
            table.counts[f"out of scope: {reason}"] += 1
            continue
        try:
            table.counts[run_case(case, folder)] += 1
        except Exception as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            table.counts["FAILED"] += 1
            table.failures[case.name] = f"{type(error).__name__}: {first}"
    return table
