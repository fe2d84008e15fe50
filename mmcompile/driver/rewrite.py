"""Run the pipeline on a captured graph and make the graphs of every phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from mmcompile.capture.export import Captured
from mmcompile.core.errors import UsageError, unknown_name
from mmcompile.core.passes import Pass, PassContext
from mmcompile.core.runner import PassReport, check_required, copy_graph, run_passes
from mmcompile.core.sample_inputs import make_decode_inputs
from mmcompile.core.sample_inputs import make_decoder_inputs as make_inputs
from mmcompile.driver.counts import Counts, count_checkpoint, count_launches
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.progress import Progress
from mmcompile.passes.pipeline import list_decode_passes, list_passes, list_rules, list_score_passes

_PAGE_SIZE = 64  # tokens per page of the KV cache, where neither the user nor the model says


@dataclass
class Rewritten:
    """Graphs by phase, what happened to them, and the largest value of each symbol in every phase."""

    graphs: dict[str, fx.GraphModule]
    reports: list[PassReport]
    context: PassContext
    symbols: dict[str, dict[str, int]]
    outputs: dict[str, tuple[str, ...]]
    parameters: int
    counts: Counts


def rewrite_model(captured: Captured, options: BuildOptions, dump: Path, progress: Progress) -> Rewritten:
    """Rewrite ``captured.graph_module`` in place; a decoder also gets its decode copy. Reports go to ``dump``."""
    decoder = captured.kind == "decoder"
    longest = captured.config.get("max_positions", options.max_context)
    context = PassContext(
        max_context=min(options.max_context, longest),
        quantization=options.quantization,
        quantization_options=options.quantization_options,
        cache_dtype=options.cache_dtype,
        page_size=options.page_size or captured.config.get("block_size", _PAGE_SIZE),
        checkpoint_nvfp4=captured.nvfp4,
        checkpoint_mxfp8=captured.mxfp8,
    )
    passes = list_passes(captured.kind, options.quantization, stored=find_stored_scheme(captured))
    copies = _list_copies(options) if decoder else {}
    every = [*passes, *(p for more in copies.values() for p in more)]
    _check_names(options, [p.name for p in every])
    if options.quantization_options and options.quantization == "none" and not find_stored_scheme(captured):
        names = ", ".join(options.quantization_options)
        raise UsageError(f"options of a quantization, but none is asked for: {names}", fix="pass --quant, e.g. nvfp4")

    graph = current = captured.graph_module
    outside = {key: captured.config.get(key, {}) for key in ("beside", "published")}
    counts, before = Counts(**outside), count_launches(graph)
    weights = {name: (tuple(p.shape), p.dtype) for name, p in graph.named_parameters()}
    parameters = sum(p.numel() for p in graph.parameters())

    def report(done: PassReport) -> None:
        nonlocal before
        changed = done.result.matches or done.nodes_before != done.nodes_after
        after = count_launches(current) if changed else before
        counts.passes.append((before, after))
        before = after
        progress("rewrite", done.name, done.index + 1, len(every))

    shared: dict[str, Any] = {"disabled": options.disabled, "dump": dump, "progress": report, "seed": options.seed}
    verify = options.verify and _has_values(graph)
    reports = run_passes(graph, passes, context, make_inputs=make_inputs if verify else None, **shared)
    graphs = {"prefill" if decoder else "forward": graph}
    for phase, more in copies.items():
        graphs[phase] = current = copy_graph(graph)
        before = count_launches(graph)
        inputs = (make_decode_inputs if phase == "decode" else None) if verify else None
        reports += run_passes(graphs[phase], more, context, make_inputs=inputs, first_index=len(reports), **shared)
    check_required(reports, options.required)
    outputs = {name: _name_results(name, g) for name, g in graphs.items()}
    counts.checkpoint = count_checkpoint(weights, context.info.get("layers", {}))
    return Rewritten(graphs, reports, context, _limits(captured, options, context), outputs, parameters, counts)


def find_stored_scheme(captured: Captured) -> str:
    """The scheme of passes/quant that takes over what the checkpoint stores quantized, "" if it stores nothing so."""
    experts = any(parts[0].ndim == 3 for parts in captured.nvfp4.values())
    if captured.mxfp8 or experts:
        return "nvfp4_mxfp8"
    return "nvfp4" if captured.nvfp4 else ""


def _list_copies(options: BuildOptions) -> dict[str, list[Pass]]:
    """Phases that are made from a copy of the finished prefill graph, with their own passes."""
    return {"decode": list_decode_passes()} | ({"score": list_score_passes()} if options.score else {})


def _has_values(graph_module: fx.GraphModule) -> bool:
    """False if weights were left out, so that nothing can be computed."""
    return not any(t.is_meta for t in (*graph_module.parameters(), *graph_module.buffers()))


def _name_results(phase: str, graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Public names of a phase's results."""
    if phase in ("prefill", "decode"):
        return ("logits", "next_tokens")
    (output,) = graph_module.graph.find_nodes(op="output")
    results = output.args[0]
    count = len(results) if isinstance(results, tuple | list) else 1
    base = "token_logits" if phase == "score" else "result"
    return tuple(f"{base}{i}" if i else base for i in range(count))


def _limits(captured: Captured, options: BuildOptions, context: PassContext) -> dict[str, dict[str, int]]:
    """Largest value of every symbol, by phase."""
    if captured.kind != "decoder":
        return {"forward": {name: high for name, (_, high) in captured.symbols.items()}}
    blocks = {"max_blocks": -(-context.max_context // context.page_size)}
    prefill = {"tokens": options.max_tokens, "batch": min(options.max_batch, options.max_tokens)} | blocks
    decode = {"tokens": options.max_batch, "batch": options.max_batch} | blocks
    return {"prefill": prefill, "decode": decode, "score": prefill}


def _check_names(options: BuildOptions, passes: list[str]) -> None:
    for name in options.disabled:
        if name not in passes:
            raise unknown_name("pass", name, passes)
    known = {*passes, *list_rules()}
    for name in options.required:
        if name not in known:
            raise unknown_name("rule or pass", name, known)
