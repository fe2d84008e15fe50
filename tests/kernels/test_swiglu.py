"""SwiGLU kernel against the reference, on strided halves of one projection."""

from __future__ import annotations

import pytest
import torch

from mmcompile.core.kernel import OpCall, Operand
from mmcompile.targets import sm90
from mmcompile.targets._kernels import swiglu

SPEC, ARCH = sm90.TARGET.spec, sm90.TARGET.spec.architectures[0]
(SWIGLU,) = swiglu.TEMPLATES


@pytest.mark.parametrize(("width", "dtype", "bound"), [
    (1536, torch.bfloat16, 1e-3), (100, torch.float16, 2e-4), (33, torch.float32, 1e-6),
])
def test_swiglu_matches_reference(runner, normal, width, dtype, bound):
    both = normal(3, 2 * width, dtype=dtype, scale=3.0)
    both[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
    tensors = {"gate": both[:, :width], "up": both[:, width:]}
    outcome = runner.run_op(SWIGLU, tensors, {}, SPEC, ARCH, rows={n: "tokens" for n in ("gate", "up", "result")},
                            symbols={"tokens": 3})
    assert outcome.errors[0] < bound


def test_refuses_mixed_dtypes():
    gate, up = Operand(("tokens", 8), (16, 1), "bfloat16"), Operand(("tokens", 8), (16, 1), "float32")
    assert "one dtype" in SWIGLU.refuse(OpCall("swiglu", {"gate": gate, "up": up}, (gate,), {}), SPEC, ARCH)
