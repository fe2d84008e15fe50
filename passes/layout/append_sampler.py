"""logits  ->  logits, sample(logits)     the next token is chosen on the device."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.graph import infer_meta
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.core.plan import SAMPLER_INPUTS
from mmcompile.core.symbols import new_symbolic_tensor

DESCRIPTION = "choose the next token of every sequence on the device"
EFFECT = "bitwise"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Add the inputs of core.plan.SAMPLER_INPUTS and the result next_tokens int32 [batch] after the logits."""
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    logits = output.args[0][0] if isinstance(output.args[0], tuple | list) else output.args[0]
    inputs = []
    last = graph.find_nodes(op="placeholder")[-1]
    for name, (shape, dtype) in SAMPLER_INPUTS.items():
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        last.meta["val"] = new_symbolic_tensor(graph_module, shape, getattr(torch, dtype))
        inputs.append(last)
    with graph.inserting_before(output):
        chosen = graph.call_function(torch.ops.mm.sample.default, (logits, *inputs))
    infer_meta(graph_module, [chosen])
    output.args = ((logits, chosen),)
    context.info["vocab_size"] = int(logits.meta["val"].shape[-1])
    return PassResult([Match("append_sampler", (logits.name,), (chosen.name,))])
