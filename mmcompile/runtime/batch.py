"""Lay out the sequences of a step as the input tensors of a decoder phase."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.plan import DECODER_INPUTS, SAMPLER_INPUTS
from mmcompile.runtime.sequence import Sequence

_DTYPES = {name: getattr(torch, dtype) for name, (_, dtype) in (DECODER_INPUTS | SAMPLER_INPUTS).items()}


def round_up_to_power_of_two(value: int, limit: int) -> int:
    """Smallest power of two >= value, but at most ``limit``: steps of few sizes can be bound or captured once each."""
    return min(1 << max(value - 1, 0).bit_length(), limit)


def build_inputs(
    items: Items[tuple[Sequence, int]], *, page_size: int, max_blocks: int, rows: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Inputs and symbol values for feeding each sequence its next ``count`` tokens.

    Args:
        items: (sequence, count) pairs; the sequences' pages hold their tokens up to ``cached + count``.
        max_blocks: most columns of the block table, which has the longest sequence's pages in a power of two.
        rows: the batch is filled up to so many rows with empty ones, which write no slot and have no tokens of their
            own; if rows exceed the sequences, each of these must feed one token (tokens == batch == rows).

    Returns: the tensors of DECODER_INPUTS and SAMPLER_INPUTS, contiguous, and {"tokens", "batch", "max_blocks"}.
    """
    blocks = round_up_to_power_of_two(max(len(s.pages) for s, _ in items), max_blocks)
    columns: dict[str, list[Any]] = {name: [] for name in _DTYPES}
    columns["query_start"] = [0]
    for sequence, count in items:
        _append(columns, sequence, count, page_size, blocks)
    empty = rows - len(items)
    if empty > 0:
        _append_empty(columns, empty, blocks)
    tensors = {name: torch.tensor(column, dtype=_DTYPES[name]) for name, column in columns.items()}
    batch = max(rows, len(items))
    tensors["block_table"] = tensors["block_table"].view(batch, blocks)
    return tensors, {"tokens": len(columns["input_ids"]), "batch": batch, "max_blocks": blocks}


def _append(columns: dict[str, list[Any]], sequence: Sequence, count: int, page_size: int, blocks: int) -> None:
    begin, end = sequence.cached, sequence.cached + count
    pages, params = sequence.pages, sequence.params
    columns["input_ids"] += sequence.tokens[begin:end]
    columns["positions"] += range(begin, end)
    columns["slot_mapping"] += [pages[p // page_size] * page_size + p % page_size for p in range(begin, end)]
    columns["block_table"] += pages + [0] * (blocks - len(pages))
    columns["seq_lens"].append(end)
    columns["query_start"].append(columns["query_start"][-1] + count)
    columns["temperature"].append(params.temperature)
    columns["top_k"].append(params.top_k)
    columns["top_p"].append(params.top_p)
    columns["seed"].append(sequence.seed)
    columns["sample_positions"].append(end)


def _append_empty(columns: dict[str, list[Any]], count: int, blocks: int) -> None:
    fill = {"slot_mapping": -1, "top_p": 1.0, "query_start": columns["query_start"][-1]}
    for name, column in columns.items():
        column += [fill.get(name, 0)] * (count * blocks if name == "block_table" else count)
