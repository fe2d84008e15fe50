"""The verb ``verify``: an artifact's kernels against their references."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mmcompile.cli.console import Debug, Json, emit, make_table, mark, print_error
from mmcompile.cli.progress import show_progress

_EPILOG = """[b]Examples[/b]

mmcompile verify out --quick

mmcompile verify out --target sm100 --kernel 'linear_nvfp4*'

mmcompile verify out --device cuda

Exit code 6 for a damaged artifact, 8 if a kernel disagrees with its reference.
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("verify", epilog=_EPILOG)(verify)


def verify(
    artifact: Annotated[Path, typer.Argument(help="A directory that `mmcompile build` wrote.")],
    target: Annotated[
        list[str] | None, typer.Option(help="Targets, comma-separated or repeated; all unless named.", metavar="A,B")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="Only kernels whose name matches.", metavar="PATTERN")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases.")] = False,
    device: Annotated[
        str, typer.Option(help="cpu: interpret the sources. cuda: run the binaries on this machine's GPU.")
    ] = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check every file's hash, then run every kernel's source in Triton's interpreter against its reference."""
    from mmcompile.core.errors import VerificationError, unknown_name
    from mmcompile.driver.verify import verify_artifact

    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    targets = [name for value in target or () for name in value.split(",") if name]
    with show_progress(silent=as_json) as watch:
        verdicts = verify_artifact(
            artifact, targets=targets or None, kernel_pattern=kernel, quick=quick, progress=watch, device=device
        )
    records = [vars(verdict) for verdict in verdicts]
    failed = [r for r in records if r["verdict"] == "failed"]
    emit({"records": records, "failed": len(failed)}, as_json, lambda console: _print_records(console, records))
    if failed:
        names = ", ".join(f"{r['kernel']} ({r['target']})" for r in failed[:3])
        print_error(f"{len(failed)} of {len(records)} kernels disagree with their references: {names}.")
        raise typer.Exit(VerificationError.exit_code)


def _print_records(console: Console, records: list[dict[str, Any]]) -> None:
    rows = [
        (
            r["kernel"],
            r["target"],
            r["op"],
            r["cases"],
            f"{r['max_error']:.1e}",
            f"{r['relative_error']:.1e}",
            f"{r['bound']:.1e}",
            mark(r["verdict"] != "failed", r["verdict"]),
            "; ".join(part for part in (", ".join(r["proofs"]), r["coverage"], r["reason"]) if part),
        )
        for r in records
    ]
    columns = ("kernel", "target", "operation", "cases", "max error", "relative", "bound", "verdict", "passed")
    console.print(make_table("Every file has the hash that the manifest records.", columns, rows, numbers=(3, 4, 5, 6)))
    verdicts = [r["verdict"] for r in records]
    console.print(f"\n{', '.join(f'{verdicts.count(v)} {v}' for v in ('ok', 'failed', 'skipped'))}")
