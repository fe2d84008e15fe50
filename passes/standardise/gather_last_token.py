"""lm_head(norm(x))  ->  lm_head(norm(gather_last(x)))     logits for the last token of every sequence only."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.graph import find_op, infer_meta, source_of
from mmcompile.core.passes import Match, PassContext, PassResult

DESCRIPTION = "compute logits for the last token of every sequence only"
EFFECT = "last_token"
_MM = torch.ops.mm


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Put mm.gather_last before the row-wise operations that end in the output.

    Row-wise operations (see core.ops.define.Op) commute with picking rows, so the gather climbs from the output to the
    first operation that is not row-wise, has other readers or several inputs.
    """
    graph = graph_module.graph
    (output,) = (n for n in graph.nodes if n.op == "output")
    (logits,) = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    starts = next(n for n in graph.nodes if n.op == "placeholder" and n.target == "query_start")
    reader, value = output, logits
    while _is_row_wise(value) and len(value.users) == 1:
        reader, value = value, value.args[0]
    if value is logits:
        return PassResult(notes=["the output is not a row-wise operation; logits stay complete"])
    with graph.inserting_before(reader):
        gathered = graph.call_function(_MM.gather_last.default, (value, starts))
    gathered.meta["source"] = source_of(value)
    reader.replace_input_with(value, gathered)
    after = [n for n in graph.nodes if n >= gathered and n.op == "call_function"]
    infer_meta(graph_module, after)
    return PassResult([Match("gather_last_token", (logits.name,), (gathered.name,), source_of(value))])


def _is_row_wise(node: fx.Node) -> bool:
    op = find_op(node.target)
    return op is not None and op.row_wise and not isinstance(node.meta["val"], tuple | list)
