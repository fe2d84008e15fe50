"""Paged attention kernels against the reference: lengths, garbage, windows, groups, page sizes, cache dtypes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcompile.core.kernel import KernelTemplate, OpCall, Operand
from mmcompile.targets import sm90
from mmcompile.targets._kernels import attention

SPEC, ARCH = dataclasses.replace(sm90.TARGET.spec, units=6), sm90.TARGET.spec.architectures[0]
SPLIT, _, WIDE_SPLIT, SINGLE, PREFILL = attention.TEMPLATES
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}


def with_phase(template: KernelTemplate, phase: str) -> KernelTemplate:
    """``template`` seeing what lowering adds to a call: the phase, and the block table's run-time row stride."""

    def complete(call: OpCall) -> OpCall:
        table = call.operands["block_table"]
        assert table is not None
        table = dataclasses.replace(table, shape=("batch", "max_blocks"), strides=("max_blocks", 1))
        return dataclasses.replace(call, operands=call.operands | {"block_table": table},
                                   attributes=call.attributes | {"phase": phase})

    return dataclasses.replace(
        template, refuse=lambda call, *rest: template.refuse(complete(call), *rest),
        emit=lambda call, *rest: template.emit(complete(call), *rest),
        scratch=lambda call, spec: template.scratch(complete(call), spec),
    )


def make_cache(lengths: list[int], kv_heads: int, d: int, page_size: int, dtype: torch.dtype,
               generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cache and block table: shuffled pages, NaN in every unused row, garbage past every sequence's last block."""
    counts = [-(-n // page_size) for n in lengths]
    pages, blocks = sum(counts) + 2, max(counts) + 2
    cache = torch.full((pages, kv_heads, page_size, 2 * d), math.nan)
    table = torch.empty((len(lengths), blocks), dtype=torch.int32)
    order = torch.randperm(pages, generator=generator).tolist()
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        used, order = order[:count], order[count:]
        table[b] = torch.tensor([*used, *([-1, 2**31 - 1] * blocks)[: blocks - count]], dtype=torch.int32)
        for i, page in enumerate(used):
            rows = min(page_size, length - i * page_size)
            cache[page, :, :rows] = torch.randn((kv_heads, rows, 2 * d), generator=generator)
    return cache.to(dtype), table


def make_case(lengths: list[int], queries: list[int], *, heads: int, kv_heads: int, d: int, page_size: int,
              dtype: torch.dtype, cache_dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    cache, table = make_cache(lengths, kv_heads, d, page_size, cache_dtype, generator)
    start = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn((sum(queries), heads + 2, d), generator=generator).to(dtype)[:, :heads]
    return {"q": q, "kv_cache": cache, "block_table": table,
            "seq_lens": torch.tensor(lengths, dtype=torch.int32), "query_start": start}


def run(runner: Any, template: KernelTemplate, tensors: dict[str, Any], window: int = 0) -> Any:
    phase = "prefill" if template is PREFILL else "decode"
    rows = {"q": "tokens" if template is PREFILL else "batch", "result": "tokens"}
    batch = tensors["seq_lens"].shape[0]
    symbols = {"tokens": tensors["q"].shape[0], "batch": batch, "max_blocks": tensors["block_table"].shape[1]}
    attributes = {"scale": tensors["q"].shape[2] ** -0.5, "window": window}
    return runner.run_op(with_phase(template, phase), tensors, attributes, SPEC, ARCH, rows=rows, symbols=symbols)


def check(outcome: Any, dtype: torch.dtype) -> None:
    assert outcome.errors[0] < BOUND[dtype], outcome.errors


BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CASES = [
    # heads, kv_heads, head_dim, page_size, window, dtype, cache dtype
    (9, 3, 64, 64, 0, BF16, BF16),
    (4, 4, 80, 16, 0, BF16, F8),
    (8, 1, 96, 128, 0, F16, F16),
    (4, 1, 128, 16, 40, F16, F8),
    (3, 1, 32, 64, 100, F32, F32),
    (2, 1, 64, 24, 1, BF16, F32),
]


@pytest.mark.parametrize(("heads", "kv_heads", "d", "page", "window", "dtype", "cache_dtype"), CASES)
def test_decode_split_matches_reference(runner, heads, kv_heads, d, page, window, dtype, cache_dtype):
    tensors = make_case([1, 0, 70, 129], [1] * 4, heads=heads, kv_heads=kv_heads, d=d, page_size=page, dtype=dtype,
                        cache_dtype=cache_dtype)
    for template in (SPLIT, WIDE_SPLIT):
        outcome = run(runner, template, tensors, window)
        check(outcome, dtype)
        assert not outcome.results[0][1].any()


@pytest.mark.parametrize(("heads", "kv_heads", "d", "page", "window", "dtype", "cache_dtype"), CASES)
def test_decode_single_matches_reference(runner, heads, kv_heads, d, page, window, dtype, cache_dtype):
    tensors = make_case([150, 0, 16], [1] * 3, heads=heads, kv_heads=kv_heads, d=d, page_size=page, dtype=dtype,
                        cache_dtype=cache_dtype)
    check(run(runner, SINGLE, tensors, window), dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "d", "page", "window", "dtype", "cache_dtype"), CASES)
def test_prefill_matches_reference(runner, heads, kv_heads, d, page, window, dtype, cache_dtype):
    tensors = make_case([70, 5, 130, 0], [70, 1, 33, 2], heads=heads, kv_heads=kv_heads, d=d, page_size=page,
                        dtype=dtype, cache_dtype=cache_dtype)
    outcome = run(runner, PREFILL, tensors, window)
    check(outcome, dtype)
    assert not outcome.results[0][-2:].any(), "new tokens of a sequence of length 0 give zeros"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prefill_of_any_batch(runner, data):
    batch = data.draw(st.integers(1, 6), "batch")
    queries = data.draw(st.lists(st.integers(0, 70), min_size=batch, max_size=batch), "queries")
    queries[-1] += not any(queries)
    past = data.draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch), "past")
    lengths = [n + m for n, m in zip(queries, past, strict=True)]
    tensors = make_case(lengths, queries, heads=1, kv_heads=1, d=16, page_size=16, dtype=F32, cache_dtype=F32)
    check(run(runner, PREFILL, tensors), F32)


def test_decode_of_17_sequences(runner):
    lengths = [(b * 37) % 90 for b in range(17)]
    tensors = make_case(lengths, [1] * 17, heads=3, kv_heads=1, d=64, page_size=16, dtype=BF16, cache_dtype=BF16)
    check(run(runner, SPLIT, tensors), BF16)


def make_call(phase: str, **changes: Any) -> OpCall:
    tensors = make_case([64], [1], heads=2, kv_heads=1, d=changes.pop("d", 64), page_size=changes.pop("page", 64),
                        dtype=BF16, cache_dtype=BF16)
    tensors |= changes
    operand = {n: (tuple(t.shape), tuple(t.stride()), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    operands = {name: Operand(*fields) for name, fields in operand.items()}
    return OpCall("paged_attention", operands, (operands["q"],), {"scale": 0.125, "window": 0, "phase": phase})


@pytest.mark.parametrize(("template", "call", "reason"), [
    (SPLIT, make_call("prefill"), "decode phase"),
    (PREFILL, make_call("decode"), "prefill phase"),
    (SPLIT, make_call("decode", page=4), "page_size"),
    (SPLIT, make_call("decode", d=512), "head_dim"),
    (SPLIT, make_call("decode", seq_lens=torch.zeros(1, dtype=torch.int64)), "int32"),
    (SINGLE, make_call("decode", kv_cache=torch.zeros((2, 1, 64, 128), dtype=torch.uint8)), "kv_cache"),
])
def test_refusals_name_the_reason(template, call, reason):
    assert reason in template.refuse(call, SPEC, ARCH)


def test_splits_depend_on_units_and_heads():
    counts = {units: attention.count_splits(make_call("decode"), dataclasses.replace(SPEC, units=units), 2)
              for units in (1, 4, 132, 256)}
    assert counts == {1: 2, 4: 8, 132: 32, 256: 32}
    spec = dataclasses.replace(SPEC, units=132)
    assert [attention.count_splits(make_call("decode"), spec, tokens) for tokens in (4, 16, 64)] == [32, 32, 8]
