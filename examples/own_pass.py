"""A pass of your own, run after the built-in ones: count what a decode step multiplies, and rewrite by a rule.

A rule that should always run is one file in passes/fusion/ instead; nothing else has to change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.core.passes import Match, Pass, PassContext, PassResult
from mmcompile.core.rewrite import Rewrite, apply_rules
from mmcompile.core.runner import PassReport, run_passes
from mmcompile.driver import BuildOptions
from mmcompile.driver.doors import open_door
from mmcompile.passes.pipeline import list_passes

_ATEN = torch.ops.aten


def _twice_negated(x: Any) -> Any:
    return _ATEN.neg.default(_ATEN.neg.default(x))


def _itself(x: Any) -> Any:
    return x


# A rule: what to find, what to put there, and None or a function that says why a place does not qualify.
RULES = [Rewrite("cancel_negations", _twice_negated, _itself, None, ())]


def count_weights(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """A pass over the whole graph: it reports every matrix multiplication and changes nothing."""
    linears = [node for node in graph_module.graph.nodes if "linear" in str(node.target)]
    result = PassResult(matches=[Match("linear", (node.name,)) for node in linears])
    result.notes.append(f"{len(linears)} linear layers")
    return result


OWN_PASSES = [
    Pass("cancel_negations", "own", lambda graph, context: apply_rules(graph, RULES), "-(-x) becomes x", "bitwise"),
    Pass("count_weights", "own", count_weights, "count linear layers", "bitwise"),
]


def main() -> list[PassReport]:
    """Capture a small model, run the built-in passes and then OWN_PASSES. Returns the reports of the own ones."""
    captured = open_door("smollm2-tiny", BuildOptions(weights="random"))
    reports = run_passes(captured.graph_module, [*list_passes(), *OWN_PASSES], PassContext(max_context=256))
    for report in reports[-len(OWN_PASSES) :]:
        print(report.name, len(report.result.matches), "matches", *report.result.notes)
    return reports[-len(OWN_PASSES) :]


if __name__ == "__main__":
    main()
