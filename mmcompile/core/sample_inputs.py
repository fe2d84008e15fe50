"""Seeded inputs for a graph at any stage: a prompt in the stateless form or the paged one, or one decode step."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.core.formats.nvfp4_cache import INDEX, LINEAR, head_dim_of, insert_index, insert_kv
from mmcompile.core.graph import value_of

PROMPT_TOKENS = 13
DECODE_LENGTHS = (5, 13, 9, 1)
"""Lengths of the sequences of a sample decode step, the new token included."""


def make_decoder_inputs(graph_module: fx.GraphModule, seed: int) -> dict[str, torch.Tensor]:
    """Inputs by placeholder name: a random prompt of 13 tokens, an empty cache, pages in shuffled order.

    Understands the inputs of core.plan.DECODER_INPUTS and SAMPLER_INPUTS (greedy), position_ids and kv_cache_<i>;
    anything else gets seeded noise of its shape.
    """
    return _make_inputs(graph_module, seed, torch.tensor([PROMPT_TOKENS]), torch.arange(PROMPT_TOKENS))


def make_decode_inputs(graph_module: fx.GraphModule, seed: int) -> dict[str, torch.Tensor]:
    """Inputs by placeholder name of a decode step: one new token for each of several sequences, cache full of noise."""
    lengths = torch.tensor(DECODE_LENGTHS)
    return _make_inputs(graph_module, seed, lengths, lengths - 1)


def _make_inputs(
    graph_module: fx.GraphModule, seed: int, lengths: torch.Tensor, positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``lengths`` [batch] with the new tokens; ``positions`` [tokens], equally many new tokens a sequence."""
    generator = torch.Generator().manual_seed(seed)
    placeholders = {str(n.target): n.meta["val"] for n in graph_module.graph.nodes if n.op == "placeholder"}
    # The tokens are drawn first, so that equal seeds give equal tokens whatever else the graph takes.
    ids = torch.randint(0, _vocabulary(graph_module), positions.shape, generator=generator)
    caches = [v for name, v in placeholders.items() if name.startswith("kv_cache")]
    page_size = int(caches[0].shape[2]) if caches else 16
    known, pages = _describe_batch(lengths, positions, page_size, generator)
    known |= {"input_ids": ids, "seed": torch.full(lengths.shape, seed)}
    is_prompt = len(lengths) < len(positions)
    inputs: dict[str, torch.Tensor] = {}
    for name, value in placeholders.items():
        if name in known:
            given = known[name].to(value.dtype)
            inputs[name] = given.reshape([1] * (value.dim() - given.dim()) + [*given.shape])
            continue
        is_cache = name.startswith("kv_cache")
        shape = [pages, *map(int, value.shape[1:])] if is_cache else [_hint(s) for s in value.shape]
        if is_cache and value.dtype == torch.uint8:
            inputs[name] = _make_nvfp4_pages(shape, is_prompt, generator)
            continue
        values = torch.zeros(shape) if is_cache and is_prompt else torch.randn(shape, generator=generator)
        inputs[name] = values.to(value.dtype)
    return inputs


def _describe_batch(
    lengths: torch.Tensor, positions: torch.Tensor, page_size: int, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], int]:
    """The inputs that say where tokens lie and how to sample, and the number of pages (two of them unused)."""
    batch, new = len(lengths), len(positions) // len(lengths)
    blocks = -(-int(lengths.max()) // page_size)
    pages = batch * blocks + 2
    table = torch.randperm(pages, generator=generator)[: batch * blocks].reshape(batch, blocks)
    sequence = torch.arange(batch).repeat_interleave(new)
    known = {
        "positions": positions,
        "position_ids": positions,
        "slot_mapping": table[sequence, positions // page_size] * page_size + positions % page_size,
        "block_table": table,
        "seq_lens": lengths,
        "query_start": torch.arange(batch + 1) * new,
        "temperature": torch.zeros(batch),
        "top_k": torch.zeros(batch),
        "top_p": torch.ones(batch),
        "sample_positions": lengths,
    }
    return known, pages


def _make_nvfp4_pages(shape: list[int], empty: bool, generator: torch.Generator) -> torch.Tensor:
    """Pages of zeros, or of random rows; a graph before lowering has its caches in the linear layouts."""
    pages = torch.zeros(shape, dtype=torch.uint8)
    if not empty:
        slots = torch.arange(shape[0] * shape[-2])
        heads = shape[1] // 2 if len(shape) == 4 else 1
        rows = torch.randn((2, len(slots), heads, head_dim_of(pages)), generator=generator)
        if len(shape) == 4:
            insert_kv(pages, LINEAR, rows[0], rows[1], slots)
        else:
            insert_index(pages, INDEX, rows[0, :, 0], slots)
    return pages


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _vocabulary(graph_module: fx.GraphModule) -> int:
    """Rows of the embedding table that input_ids index."""
    for node in graph_module.graph.nodes:
        if "embedding" in str(node.target) and node.op == "call_function":
            tables = [value_of(a) for a in node.args if isinstance(a, fx.Node) and value_of(a).is_floating_point()]
            return int(tables[0].shape[0])
    return 2
