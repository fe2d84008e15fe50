"""gather_last(x)  ->  x     in a decode step every sequence has exactly one new token."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.graph import source_of
from mmcompile.core.passes import Match, PassContext, PassResult

DESCRIPTION = "specialise to decode: one token a sequence, tokens == batch"
EFFECT = "bitwise"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Drop mm.gather_last; valid only in the decode copy of the graph, where query_start is 0, 1, 2, ..."""
    result = PassResult()
    for node in list(graph_module.graph.nodes):
        if node.target == torch.ops.mm.gather_last.default:
            result.matches.append(Match("one_token_per_sequence", (node.name,), (), source_of(node)))
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    return result
