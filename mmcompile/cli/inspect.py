"""The verb ``inspect``: what an artifact holds, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mmcompile.cli import details, views
from mmcompile.cli.console import Debug, Json, emit, print_tables

_EPILOG = """[b]Examples[/b]

mmcompile inspect out

mmcompile inspect out --target sm100 --kernels

mmcompile inspect out --passes

mmcompile inspect out --graph 14 | less

mmcompile inspect out --json | jq '.targets[].kernels[].name'
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("inspect", epilog=_EPILOG)(inspect)


def inspect(
    artifact: Annotated[Path, typer.Argument(help="A directory that `mmcompile build` wrote.")],
    target: Annotated[str | None, typer.Option(help="Only this target of the artifact.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Registers, shared memory, spills, ledger.")] = False,
    passes: Annotated[bool, typer.Option("--passes", help="Passes, matches and near misses with reasons.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Quantization outcome of every layer.")] = False,
    launches: Annotated[bool, typer.Option("--launches", help="Launches in order; equal layers once.")] = False,
    buffers: Annotated[bool, typer.Option("--buffers", help="Buffers with role, shape, size, offset.")] = False,
    graph: Annotated[
        int | None, typer.Option(help="Print the graph after this pass (number from --passes).", metavar="NN")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what an artifact holds. Every file is checked against its hash first.

    Without an option: model, quantization, targets, launches, kernels, passes.
    """
    opened = details.open_selected(artifact, target)
    if graph is not None:
        text = details.read_graph(artifact, graph)
        emit({"pass": graph, "graph": text}, as_json, lambda console: print(text, end=""))
        return
    summary = opened.summary
    wanted = {"kernels": kernels, "passes": passes, "layers": layers, "launches": launches, "buffers": buffers}
    sections = [name for name, on in wanted.items() if on]

    def view(console: Console) -> None:
        if not sections:
            _print_overview(console, summary)
        for name in sections:
            details.SECTIONS[name](console, opened)

    emit(_make_document(opened, sections), as_json, view)


def _make_document(opened: details.Opened, sections: list[str]) -> dict[str, Any]:
    """The summary; launches and buffers, which are long, only on request."""
    document = dict(opened.summary)
    if "launches" in sections:
        document["launches"] = {name: details.list_launches(plan) for name, plan in opened.plans.items()}
    if "buffers" in sections:
        document["buffers"] = {name: details.list_buffers(plan) for name, plan in opened.plans.items()}
    return document


def _print_overview(console: Console, summary: Mapping[str, Any]) -> None:
    tables = [views.model_table(summary), views.quantization_table(summary), views.targets_table(summary)]
    for target in summary["targets"]:
        tables += [views.phases_table(target), views.kernels_table(target)]
    tables += [views.passes_table(summary, only_matches=True), views.near_misses_table(summary)]
    print_tables(console, *(table for table in tables if table is not None))
    for target in summary["targets"]:
        for phase in target["phases"]:
            for line in phase["without_kernel"]:
                console.print(f"\n{target['name']}, {phase['name']}: no kernel for {line}", markup=False)
