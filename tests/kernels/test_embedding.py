"""Embedding and gather_last kernels: exact copies of the right rows."""

from __future__ import annotations

import pytest
import torch

from mmcompile.core.kernel import OpCall, Operand
from mmcompile.targets import sm90
from mmcompile.targets._kernels import embedding

SPEC, ARCH = sm90.TARGET.spec, sm90.TARGET.spec.architectures[0]
EMBEDDING, GATHER = embedding.TEMPLATES


@pytest.mark.parametrize(("width", "dtype", "ids"), [
    (576, torch.bfloat16, torch.int32), (4100, torch.float16, torch.int64), (1, torch.float32, torch.int32),
])
def test_embedding_copies_rows(runner, normal, width, dtype, ids):
    tensors = {"ids": torch.tensor([4, 0, 10, 4], dtype=ids), "weight": normal(11, width + 8, dtype=dtype)[:, :width]}
    outcome = runner.run_op(EMBEDDING, tensors, {}, SPEC, ARCH, rows={"ids": "tokens", "result": "tokens"},
                            symbols={"tokens": 4})
    assert torch.equal(outcome.results[0], outcome.references[0])


def test_embedding_of_a_matrix_of_ids(runner, normal):
    tensors = {"ids": torch.tensor([[1, 2, 3], [3, 0, 1]]), "weight": normal(4, 40)}
    outcome = runner.run_op(EMBEDDING, tensors, {}, SPEC, ARCH, rows={"ids": "batch", "result": "batch"},
                            symbols={"batch": 2})
    assert torch.equal(outcome.results[0], outcome.references[0])


@pytest.mark.parametrize("shape", [(100,), (3, 40)])
def test_gather_last_takes_the_last_rows(runner, normal, shape):
    tensors = {"x": normal(12, *shape), "query_start": torch.tensor([0, 1, 9, 12], dtype=torch.int32)}
    outcome = runner.run_op(GATHER, tensors, {}, SPEC, ARCH, rows={"x": "tokens", "result": "batch"},
                            symbols={"tokens": 12, "batch": 3})
    assert torch.equal(outcome.results[0], tensors["x"][[0, 8, 11]])


def test_refusals():
    weight = Operand((9, 8), (8, 1), "bfloat16")
    strided = OpCall("embedding", {"ids": Operand(("tokens",), (2,), "int32"), "weight": weight}, (weight,), {})
    floats = OpCall("embedding", {"ids": Operand(("tokens",), (1,), "float32"), "weight": weight}, (weight,), {})
    assert "contiguous" in EMBEDDING.refuse(strided, SPEC, ARCH)
    assert "float32" in EMBEDDING.refuse(floats, SPEC, ARCH)
    starts = Operand(("batch",), (1,), "int32")
    columns = OpCall("gather_last", {"x": Operand(("tokens", 8), (1, 64), "bfloat16"), "query_start": starts}, (), {})
    assert "contiguous" in GATHER.refuse(columns, SPEC, ARCH)
