"""Seeded inputs for a graph at any stage: one prompt, in the stateless form and in the paged one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import value_of

TOKENS = 13


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _vocabulary(graph_module: fx.GraphModule) -> int:
    """Rows of the embedding table that input_ids index."""
    for node in graph_module.graph.nodes:
        if "embedding" in str(node.target) and node.op == "call_function":
            tables = [value_of(a) for a in node.args if isinstance(a, fx.Node) and value_of(a).is_floating_point()]
            return int(tables[0].shape[0])
    return 2


def make_decoder_inputs(graph_module: fx.GraphModule, seed: int) -> dict[str, torch.Tensor]:
    """Inputs by placeholder name: a random prompt of 13 tokens whose pages lie in shuffled order.

    Understands input_ids, positions / position_ids, slot_mapping, block_table, seq_lens, query_start and kv_cache_<i>;
    anything else gets seeded noise of its shape.
    """
    generator = torch.Generator().manual_seed(seed)
    placeholders = {str(n.target): n.meta["val"] for n in graph_module.graph.nodes if n.op == "placeholder"}
    # The prompt is drawn first, so that equal seeds give equal prompts whatever else the graph takes.
    ids = torch.randint(0, _vocabulary(graph_module), (TOKENS,), generator=generator)
    caches = [v for name, v in placeholders.items() if name.startswith("kv_cache")]
    page_size = int(caches[0].shape[2]) if caches else 16
    blocks = -(-TOKENS // page_size)
    order = torch.randperm(blocks + 2, generator=generator)[:blocks]
    positions = torch.arange(TOKENS)
    known = {
        "input_ids": ids,
        "positions": positions,
        "position_ids": positions,
        "slot_mapping": order[positions // page_size] * page_size + positions % page_size,
        "block_table": order[None, :],
        "seq_lens": torch.tensor([TOKENS]),
        "query_start": torch.tensor([0, TOKENS]),
        "temperature": torch.zeros(1),
        "top_k": torch.zeros(1),
        "top_p": torch.ones(1),
        "seed": torch.tensor([seed]),
        "sample_positions": torch.tensor([TOKENS]),
    }
    inputs: dict[str, torch.Tensor] = {}
    for name, value in placeholders.items():
        if name in known:
            inputs[name] = (
                known[name].to(value.dtype).reshape([1] * (value.dim() - known[name].dim()) + [*known[name].shape])
            )
        elif name.startswith("kv_cache"):
            inputs[name] = torch.zeros([blocks + 2, *map(int, value.shape[1:])], dtype=value.dtype)
        else:
            noise = torch.randn([_hint(s) for s in value.shape], generator=generator)
            inputs[name] = noise.to(value.dtype)
    return inputs
