"""Batches and calls for the tests of tuned block-sparse kernels, which only an emulator can run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.kernel import KernelTemplate, OpCall, Operand
from mmcompile.targets import sm90
from tests.kernels.emulated import run_emulated

TARGET = sm90.TARGET
SPEC, ARCH = TARGET.spec, TARGET.spec.architectures[0]
PAGE = 128


def lay_out(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, int]:
    """Block table with garbage behind every sequence, the slots of all tokens, and the number of pages."""
    counts = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
    table = torch.tensor([-1, 2**31 - 1], dtype=torch.int32).repeat(len(lengths), max(counts) // 2 + 2)
    slots = []
    for b, length in enumerate(lengths):
        table[b, : counts[b]] = order[sum(counts[:b]) : sum(counts[: b + 1])].int()
        place = torch.arange(length)
        slots.append(table[b].long()[place // PAGE] * PAGE + place % PAGE)
    return table, torch.cat(slots), sum(counts) + 2


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choose(lengths: list[int], new: list[int], kv_heads: int, count: int) -> Tensor:
    """Selections in any order with the own block, one of the future and empty places."""
    generator = torch.Generator().manual_seed(count)
    rows = []
    for length, queries in zip(lengths, new, strict=True):
        for position in range(length - queries, length):
            for _ in range(kv_heads):
                own = max(position, 0) // PAGE
                past = torch.randperm(own, generator=generator)[: count - 2].tolist()
                ids = [*past, own, own + 1, *[-1] * count][:count]
                rows.append([ids[i] for i in torch.randperm(count, generator=generator)])
    return torch.tensor(rows, dtype=torch.int32).view(-1, kv_heads, count)


def describe(op: str, operands: dict[str, Tensor], result: Tensor, attributes: dict[str, Any]) -> OpCall:
    """The call as lowering makes it: tokens, batch and columns of the table are symbols."""
    symbols = {"q": "tokens", "index_q": "tokens", "blocks": "tokens", "seq_lens": "batch", "query_start": "batch + 1"}
    seen = {}
    for name, tensor in operands.items():
        shape: tuple[int | str, ...] = (symbols.get(name, tensor.shape[0]), *tensor.shape[1:])
        seen[name] = Operand(shape, tensor.stride(), str(tensor.dtype).removeprefix("torch."))
    seen["block_table"] = Operand(("batch", "max_blocks"), ("max_blocks", 1), "int32")
    rows = Operand(("tokens", *result.shape[1:]), result.stride(), str(result.dtype).removeprefix("torch."))
    if op == "paged_index_score":
        heads = result.shape[1]
        rows = Operand(("tokens", heads, "max_blocks"), (f"{heads}*max_blocks", "max_blocks", 1), "float32")
    return OpCall(op, seen, (rows,), {"phase": "decode"} | attributes)


def run(template: KernelTemplate, operands: dict[str, Tensor], result: Tensor, attributes: dict[str, Any],
        spec: Any = SPEC, **schedule: Any) -> Tensor:
    """The result of a template, from poisoned memory; ``schedule``: as ``run_emulated`` takes it."""
    call = describe(template.op, operands, result, attributes)
    assert template.refuse(call, spec, ARCH) is None
    symbols = {"tokens": result.shape[0], "batch": len(operands["seq_lens"]),
               "max_blocks": operands["block_table"].shape[1]}
    pool: dict[str, Any] = operands | symbols | {"result": poison(result.shape, result.dtype)}
    for scratch in template.scratch(call, spec):
        shape = [symbols.get(str(n), n) for n in scratch.shape]
        pool[f"scratch:{scratch.name}"] = poison(shape, getattr(torch, scratch.dtype))
    run_emulated(TARGET, template.emit(call, spec, ARCH), pool, symbols, {"result"}, **schedule)
    return pool["result"]


def poison(shape: Any, dtype: torch.dtype) -> Tensor:
    """Memory that the emulator takes for never written."""
    return torch.full((math.prod(shape) * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).view(*shape)
