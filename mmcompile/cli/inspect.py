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

mmcompile inspect out --mlir --pass match_rms_norm   # before and after

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
    mono: Annotated[bool, typer.Option("--mono", help="Merged decode launches: waits, bytes, estimated time.")] = False,
    graph: Annotated[
        int | None, typer.Option(help="Print the graph after this pass (number from --passes).", metavar="NN")
    ] = None,
    mlir: Annotated[bool, typer.Option("--mlir", help="Print the graph before and after --pass as MLIR.")] = False,
    wanted: Annotated[
        str | None, typer.Option("--pass", help="Name, number or phase of a pass, for --mlir.", metavar="PASS")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what an artifact holds. Every file is checked against its hash first.

    Without an option: model, quantization, targets, launches, kernels, passes.
    """
    if mlir or wanted is not None:
        _show_pass(artifact, mlir, wanted, as_json)
        return
    opened = details.open_selected(artifact, target)
    if graph is not None:
        text = details.read_graph(artifact, graph)
        emit({"pass": graph, "graph": text}, as_json, lambda console: print(text, end=""))
        return
    summary = opened.summary
    wanted = {"kernels": kernels, "passes": passes, "layers": layers, "launches": launches, "buffers": buffers,
              "mono": mono}  # fmt: skip
    sections = [name for name, on in wanted.items() if on]

    def view(console: Console) -> None:
        if not sections:
            _print_overview(console, summary)
        for name in sections:
            details.SECTIONS[name](console, opened)

    emit(_make_document(opened, sections), as_json, view)


def _show_pass(artifact: Path, mlir: bool, wanted: str | None, as_json: bool) -> None:
    """A pass before and after, as MLIR."""
    from mmcompile.core.errors import UsageError

    if wanted is None or not mlir:
        raise UsageError("--mlir and --pass go together", fix="write e.g. --mlir --pass match_rms_norm")
    from mmcompile.driver.reopen import show_pass

    shown = show_pass(artifact, wanted)

    def view(console: Console) -> None:
        for side, graph in shown.items():
            print(f"// {side}: the graph after {graph['pass']}\n{graph['mlir']}")

    emit(shown, as_json, view)


def _make_document(opened: details.Opened, sections: list[str]) -> dict[str, Any]:
    """The summary; launches and buffers, which are long, only on request."""
    document = dict(opened.summary)
    if "launches" in sections:
        document["launches"] = {name: details.list_launches(plan) for name, plan in opened.plans.items()}
    if "buffers" in sections:
        document["buffers"] = {name: details.list_buffers(plan) for name, plan in opened.plans.items()}
    if "mono" in sections:
        document["mono"] = details.list_merged(opened.plans)
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
