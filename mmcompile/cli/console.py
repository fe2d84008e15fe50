"""What every verb shares: --json and --debug, consoles that know terminals from pipes, tables, number formats."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_WIDTH_IN_PIPES = 140


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; colours only on a terminal without NO_COLOR, wide tables in pipes."""
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else _pipe_width()
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def _pipe_width() -> int:
    return shutil.get_terminal_size((_WIDTH_IN_PIPES, 24)).columns


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_error(sentence: str) -> None:
    """ "error: ..." on stderr, on one line whatever the width."""
    console = make_console(stderr=True)
    line = " ".join(sentence.split())
    console.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)


def emit(document: Any, as_json: bool, view: Callable[[Console], None]) -> None:
    """Print ``document`` as JSON, or what ``view`` prints on a console."""
    if as_json:
        print_json(document)
    else:
        view(make_console())


def make_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], *, numbers: tuple[int, ...] = ()
) -> Table:
    """A plain table; the columns whose index is in ``numbers`` are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        right = index in numbers
        table.add_column(column, justify="right" if right else "left", no_wrap=right or index == 0, header_style="dim")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def print_tables(console: Console, *tables: Table) -> None:
    """Tables with an empty line between them."""
    for index, table in enumerate(tables):
        if index:
            console.print()
        console.print(table)


def mark(good: bool, text: str) -> Text:
    """A verdict in green or red."""
    return Text(text, style="green" if good else "bold red")
