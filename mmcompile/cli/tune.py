"""The verb ``tune``: which mode of mono-decode is fastest on this machine's GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.cli.console import Debug, Json, emit, make_table
from mmcompile.cli.progress import show_progress

_EPILOG = """[b]Examples[/b]

mmcompile tune out

mmcompile tune out --context 32768 --json

mmcompile tune out --random-weights 0          (built with --weights none)
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("tune", epilog=_EPILOG)(tune)


def tune(
    artifact: Annotated[Path, typer.Argument(help="A directory that `mmcompile build --mono step` wrote.")],
    context: Annotated[int, typer.Option(help="Tokens of every sequence.")] = 1024,
    random_weights: Annotated[
        int | None, typer.Option(help="Seed of random weights, for an artifact without any.", metavar="SEED")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time decode steps on this machine's GPU: standalone launches, one a layer, one a step, the tuned kernel.

    What is fastest for each range of token counts is written into the artifact, and the runtime goes by it. Without
    this the cost model decides, as `mmcompile inspect --mono` says.
    """
    from mmcompile.core.plan import MODES
    from mmcompile.driver.tune import tune_artifact

    with show_progress(silent=as_json) as watch:
        tuned = tune_artifact(artifact, context=context, random_weights=random_weights, progress=watch)
    times = [[f"{t.seconds[m] * 1e6:.0f}" if m in t.seconds else "-" for m in MODES] for t in tuned]
    rows = [[str(t.tokens), *own, t.mode] for t, own in zip(tuned, times, strict=True)]
    columns = ("tokens", *(f"{m} us" for m in MODES), "fastest")
    table = make_table(f"Decode steps on {tuned[0].basis}", columns, rows, numbers=(0, 1, 2, 3, 4))
    emit([asdict(t) for t in tuned], as_json, lambda console: console.print(table))
