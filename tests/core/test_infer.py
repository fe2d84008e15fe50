"""Inference that is done once for equal calls: same results as without memory, and nothing kept that must not be."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.core.infer import InferenceMemo
from mmcompile.core.symbols import make_fake_mode

aten = torch.ops.aten


@pytest.fixture
def mode():
    return make_fake_mode({"tokens": (2, 64)})


def _empty(mode, shape, dtype=torch.float32):
    with mode:
        return torch.empty(shape, dtype=dtype)


def test_equal_calls_share_their_value(mode) -> None:
    fake, names = mode
    memo = InferenceMemo()
    first, second = (_empty(fake, (names["tokens"], 4)) for _ in range(2))
    value = memo.infer_call(fake, aten.relu.default, (first,), {})
    assert memo.infer_call(fake, aten.relu.default, (second,), {}) is value
    assert str(value.shape[0]) == "tokens"


@pytest.mark.parametrize(
    "other",
    [
        lambda fake, names: (_empty(fake, (names["tokens"], 5)), 1),
        lambda fake, names: (_empty(fake, (7, 4)), 1),
        lambda fake, names: (_empty(fake, (names["tokens"], 4), torch.bfloat16), 1),
        lambda fake, names: (_empty(fake, (4, names["tokens"])).t(), 1),
        lambda fake, names: (_empty(fake, (names["tokens"], 4)), 1.0),
        lambda fake, names: (_empty(fake, (names["tokens"], 4)), True),
    ],
    ids=["size", "symbol", "dtype", "strides", "float", "bool"],
)
def test_different_calls_do_not(mode, other) -> None:
    fake, names = mode
    memo = InferenceMemo()
    first = memo.infer_call(fake, aten.add.Tensor, (_empty(fake, (names["tokens"], 4)), 1), {})
    with fake:
        args = other(fake, names)
        want = aten.add.Tensor(*args)
    value = memo.infer_call(fake, aten.add.Tensor, args, {})
    assert value is not first
    assert (str(value.shape), value.stride(), value.dtype) == (str(want.shape), want.stride(), want.dtype)


def test_calls_that_write_or_make_symbols_are_not_kept(mode) -> None:
    fake, names = mode
    memo = InferenceMemo()
    data = [_empty(fake, (names["tokens"],)) for _ in range(2)]
    sizes = [memo.infer_call(fake, aten.nonzero.default, (x,), {}).shape[0] for x in data]
    assert str(sizes[0]) != str(sizes[1])
    flat = [_empty(fake, (1, 3)) for _ in range(2)]
    assert [tuple(memo.infer_call(fake, aten.squeeze_.dim, (f, 0), {}).shape) for f in flat] == [(3,), (3,)]
    assert [tuple(f.shape) for f in flat] == [(3,), (3,)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_equals_inference_without_memory(shape: list[int], axis: int, keep: bool) -> None:
    fake, _ = make_fake_mode({})
    memo = InferenceMemo()
    args = _empty(fake, shape), [axis % len(shape)], keep
    for _ in range(2):
        value = memo.infer_call(fake, aten.sum.dim_IntList, args, {})
        with fake:
            want = aten.sum.dim_IntList(*args)
        assert (value.shape, value.stride(), value.dtype) == (want.shape, want.stride(), want.dtype)
    pair = memo.infer_call(fake, aten.split.Tensor, (args[0], 1), {})
    assert memo.infer_call(fake, operator.getitem, (pair, 0), {}).shape == torch.Size([1, *shape[1:]])
