"""Run the pipeline on a captured graph and make the graphs of every phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import fx

from mmcompile.capture.export import Captured
from mmcompile.core.errors import unknown_name
from mmcompile.core.passes import PassContext
from mmcompile.core.runner import PassReport, check_required, copy_graph, run_passes
from mmcompile.core.sample_inputs import make_decoder_inputs
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.progress import Progress
from mmcompile.passes.pipeline import list_decode_passes, list_passes, list_rules


@dataclass
class Rewritten:
    """Graphs by phase, what happened to them, and the largest value of each symbol in every phase."""

    graphs: dict[str, fx.GraphModule]
    reports: list[PassReport]
    context: PassContext
    symbols: dict[str, dict[str, int]]
    outputs: tuple[str, ...]
    captured_operations: int
    parameters: int


def rewrite_model(captured: Captured, options: BuildOptions, dump: Path, progress: Progress) -> Rewritten:
    """Rewrite ``captured.graph_module`` in place; a decoder also gets its decode copy. Reports go to ``dump``."""
    decoder = captured.kind == "decoder"
    longest = captured.config.get("max_positions", options.max_context)
    context = PassContext(
        max_context=min(options.max_context, longest),
        quantization=options.quantization,
        quantization_options=options.quantization_options,
        cache_dtype=options.cache_dtype,
        page_size=options.page_size,
        checkpoint_nvfp4=captured.nvfp4,
    )
    passes = list_passes(captured.kind, options.quantization, stored=bool(captured.nvfp4))
    decode_passes = list_decode_passes() if decoder else []
    _check_names(options, [p.name for p in (*passes, *decode_passes)])
    total = len(passes) + len(decode_passes)

    def report(done: PassReport) -> None:
        progress("rewrite", done.name, len(reports) + done.index + 1, total)

    graph = captured.graph_module
    operations = sum(n.op == "call_function" for n in graph.graph.nodes)
    parameters = sum(p.numel() for p in graph.parameters())
    verify = make_decoder_inputs if options.verify and _has_values(graph) else None
    reports: list[PassReport] = []
    reports += run_passes(
        graph, passes, context, make_inputs=verify, disabled=options.disabled, dump=dump, progress=report,
        seed=options.seed,
    )  # fmt: skip
    graphs = {"forward": graph}
    if decoder:
        decode = copy_graph(graph)
        reports += run_passes(
            decode, decode_passes, context, disabled=options.disabled, dump=dump, progress=report, seed=options.seed,
            first_index=len(reports),
        )  # fmt: skip
        graphs = {"prefill": graph, "decode": decode}
    check_required(reports, options.required)
    names = ("logits", "next_tokens") if decoder else _name_results(graph)
    return Rewritten(graphs, reports, context, _limits(captured, options, context), names, operations, parameters)


def _has_values(graph_module: fx.GraphModule) -> bool:
    """False if weights were left out, so that nothing can be computed."""
    return not any(t.is_meta for t in (*graph_module.parameters(), *graph_module.buffers()))


def _name_results(graph_module: fx.GraphModule) -> tuple[str, ...]:
    (output,) = graph_module.graph.find_nodes(op="output")
    results = output.args[0]
    count = len(results) if isinstance(results, tuple | list) else 1
    return tuple(f"result{i}" if i else "result" for i in range(count))


def _limits(captured: Captured, options: BuildOptions, context: PassContext) -> dict[str, dict[str, int]]:
    """Largest value of every symbol, by phase."""
    if captured.kind != "decoder":
        return {"forward": {name: high for name, (_, high) in captured.symbols.items()}}
    blocks = {"max_blocks": -(-context.max_context // options.page_size)}
    prefill = {"tokens": options.max_tokens, "batch": min(options.max_batch, options.max_tokens)} | blocks
    return {"prefill": prefill, "decode": {"tokens": options.max_batch, "batch": options.max_batch} | blocks}


def _check_names(options: BuildOptions, passes: list[str]) -> None:
    for name in options.disabled:
        if name not in passes:
            raise unknown_name("pass", name, passes)
    known = {*passes, *list_rules()}
    for name in options.required:
        if name not in known:
            raise unknown_name("rule or pass", name, known)
