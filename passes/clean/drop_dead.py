"""Remove calls and weights that no result needs."""

from __future__ import annotations

from torch import fx

from mmcompile.core.graph import is_pure
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.passes._edit import finish

DESCRIPTION = "remove what no result needs"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Placeholders stay, they are the interface; so do calls that write a cache."""
    result = PassResult()
    for node in reversed(graph_module.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and is_pure(node):
            result.matches.append(Match("drop_dead", (node.name,)))
            graph_module.graph.erase_node(node)
    return finish(graph_module, result)
