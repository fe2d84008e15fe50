"""Batches of block-sparse attention with poisoned memory, for the kernel tests: pages, tables, spans, selections."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.kernel import KernelTemplate, OpCall
from mmcompile.targets import gfx950, sm90

SPEC, ARCH = dataclasses.replace(sm90.TARGET.spec, units=6), sm90.TARGET.spec.architectures[0]
WAVE_SPEC, WAVE_ARCH = gfx950.TARGET.spec, gfx950.TARGET.spec.architectures[0]
GARBAGE_PAGES = (-1, 2**31 - 1)


def complete(template: KernelTemplate, phase: str) -> KernelTemplate:
    """``template`` seeing what lowering adds to a call: the phase, and sizes that are known only at run time."""

    def extend(call: OpCall) -> OpCall:
        operands = dict(call.operands)
        results = call.results
        if "block_table" in operands:
            table = operands["block_table"]
            assert table is not None
            operands["block_table"] = dataclasses.replace(table, shape=("batch", "max_blocks"),
                                                          strides=("max_blocks", 1))
        if call.op == "paged_index_score":
            (result,) = results
            heads = int(result.shape[1])
            results = (dataclasses.replace(result, shape=("tokens", heads, "max_blocks"),
                                           strides=(f"{heads}*max_blocks", "max_blocks", 1)),)
        if call.op == "block_top_k":
            scores = operands["scores"]
            assert scores is not None
            heads = int(scores.shape[1])
            operands["scores"] = dataclasses.replace(scores, shape=("tokens", heads, "max_blocks"),
                                                     strides=(f"{heads}*max_blocks", "max_blocks", 1))
        return dataclasses.replace(call, operands=operands, results=results,
                                   attributes=call.attributes | {"phase": phase})

    return dataclasses.replace(
        template, refuse=lambda call, *rest: template.refuse(extend(call), *rest),
        emit=lambda call, *rest: template.emit(extend(call), *rest),
        scratch=lambda call, spec: template.scratch(extend(call), spec),
    )


def make_pages(lengths: list[int], row_shape: tuple[int, ...], page_size: int, dtype: torch.dtype, seed: int,
               ) -> tuple[Tensor, Tensor]:
    """Cache [pages, *row_shape with page_size rows] and block table.

    row_shape: (heads, width) or (width,). Pages are shuffled; every row that no sequence uses is NaN, table entries
    behind a sequence are no pages at all.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in lengths]
    pages, columns = sum(counts) + 2, max(counts) + 2
    shape = (pages, *row_shape[:-1], page_size, row_shape[-1])
    cache = torch.full(shape, math.nan)
    table = torch.empty((len(lengths), columns), dtype=torch.int32)
    order = torch.randperm(pages, generator=generator).tolist()
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        used, order = order[:count], order[count:]
        table[b] = torch.tensor([*used, *(GARBAGE_PAGES * columns)[: columns - count]], dtype=torch.int32)
        for i, page in enumerate(used):
            rows = min(page_size, length - i * page_size)
            cache[page, ..., :rows, :] = torch.randn((*row_shape[:-1], rows, row_shape[-1]), generator=generator)
    return cache.to(dtype), table


def make_spans(lengths: list[int], new: list[int]) -> dict[str, Tensor]:
    """seq_lens and query_start."""
    start = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    return {"seq_lens": torch.tensor(lengths, dtype=torch.int32), "query_start": start}


def list_positions(lengths: list[int], new: list[int]) -> list[int]:
    """Position of every new token in its sequence."""
    return [n - m + i for n, m in zip(lengths, new, strict=True) for i in range(m)]


def symbols_of(tensors: dict[str, Any], tokens: int) -> dict[str, int]:
    """Values of the symbols of a paged call."""
    table = tensors["block_table"]
    return {"tokens": tokens, "batch": table.shape[0], "max_blocks": table.shape[1]}
