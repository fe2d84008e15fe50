"""lm_head(norm(x))  ->  lm_head(norm(gather_last(x)))     logits for the last token of every sequence only."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import depends_only_on_weights, find_op, infer_meta, source_of
from mmcompile.core.passes import Match, PassContext, PassResult

DESCRIPTION = "compute logits for the last token of every sequence only"
EFFECT = "last_token"
_MM = torch.ops.mm


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Put mm.gather_last before the row-wise operations that end in the output.

    Row-wise operations (see core.ops.define.Op) and pointwise functions of one tensor (a soft cap of the logits)
    commute with picking rows, so the gather climbs from the output to the first value that comes from another kind of
    operation, has other readers, or comes from several values that vary by token.
    """
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    if len(output.all_input_nodes) != 1:
        raise LoweringError(f"a decoder has one result, the logits; this graph has {len(output.all_input_nodes)}")
    (logits,) = output.all_input_nodes
    starts = next(n for n in graph.find_nodes(op="placeholder") if n.target == "query_start")
    weights = depends_only_on_weights(graph_module)
    reader, value = output, logits
    while _is_row_wise(value, weights) and len(value.users) == 1:
        reader, value = value, value.args[0]
    with graph.inserting_before(reader):
        gathered = graph.call_function(_MM.gather_last.default, (value, starts))
    gathered.meta["source"] = source_of(value)
    reader.replace_input_with(value, gathered)
    after = [n for n in graph.nodes if n >= gathered and n.op == "call_function"]
    infer_meta(graph_module, after)
    return PassResult([Match("gather_last_token", (logits.name,), (gathered.name,), source_of(value))])


def _is_row_wise(node: fx.Node, weights: set[fx.Node]) -> bool:
    """True if row i of the result depends on row i of the first argument and on weights only."""
    if node.op != "call_function" or [n for n in node.all_input_nodes if n not in weights] != [node.args[0]]:
        return False
    op = find_op(node.target)
    if op is not None:
        return op.row_wise and isinstance(node.meta["val"], torch.Tensor)
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(node.all_input_nodes) == 1
