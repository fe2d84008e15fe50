"""sample(lm_head(gather_last(x)))  ->  lm_head(x)     logits of every token, to score a text."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.graph import infer_meta, source_of
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.core.plan import SAMPLER_INPUTS

DESCRIPTION = "keep the logits of every token and drop the sampler"
EFFECT = "bitwise"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Undo gather_last_token and append_sampler in a copy of the finished prefill graph."""
    graph, result = graph_module.graph, PassResult()
    (output,) = graph.find_nodes(op="output")
    output.args = (output.args[0][0],)
    for node in reversed(list(graph.nodes)):
        sampling = node.op == "placeholder" and node.target in SAMPLER_INPUTS
        if node.target == torch.ops.mm.sample.default or sampling:
            graph.erase_node(node)
        elif node.target == torch.ops.mm.gather_last.default:
            result.matches.append(Match("score_every_token", (node.name,), (), source_of(node)))
            after = [n for n in graph.nodes if n > node and n.op == "call_function"]
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            infer_meta(graph_module, after)
    return result
