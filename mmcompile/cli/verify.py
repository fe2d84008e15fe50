"""The verb ``verify``: an artifact's kernels against their references."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mmcompile.cli.console import Debug, Json, emit, make_table, mark, print_error
from mmcompile.cli.progress import show_progress

_EPILOG = """[b]Examples[/b]

mmcompile verify out --quick

mmcompile verify out --emulate --target gfx950

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
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Only run the assembly in the emulators; a row for each architecture.")
    ] = False,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Only run the sources in Triton's interpreter.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu: interpret and emulate. cuda: run the binaries on this machine's GPU.")
    ] = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove every kernel against its operation's reference, on a machine without a GPU.

    Every file must have its recorded hash, every binary its recorded instructions. Then every kernel's source runs in
    Triton's interpreter, and its emitted assembly in mmcompile's emulators of PTX and gfx950, with checks of bounds,
    of what nobody wrote, of barriers and of races. Merged decode launches (--mono) run there beside standalone ones.
    """
    from mmcompile.core.errors import UsageError, VerificationError, unknown_name
    from mmcompile.driver.verify import METHODS, verify_artifact
    from mmcompile.driver.verify_mono import verify_schedules

    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    if (emulate, interpret, device == "cuda").count(True) > 1:
        raise UsageError("--emulate, --interpret and --device cuda exclude each other", fix="name one of them")
    methods = {(True, False): ("emulator",), (False, True): ("interpreter",)}.get((emulate, interpret), METHODS)
    methods = ("hardware",) if device == "cuda" else methods
    targets = [name for value in target or () for name in value.split(",") if name]
    with show_progress(silent=as_json) as watch:
        verdicts = verify_artifact(
            artifact, targets=targets or None, kernel_pattern=kernel, quick=quick, progress=watch, methods=methods
        )
        merged = (
            verify_schedules(artifact, targets=targets or None, quick=quick, progress=watch)
            if "emulator" in methods and kernel is None
            else []
        )
    records, schedules = [asdict(verdict) for verdict in verdicts], [asdict(verdict) for verdict in merged]
    failed = [r for r in (*records, *schedules) if r["verdict"] == "failed"]
    document = {"records": records, "schedules": schedules, "failed": len(failed)}
    emit(document, as_json, lambda console: _print_all(console, records, schedules, emulate))
    if failed:
        names = ", ".join(f"{r['kernel']} ({r['target']})" for r in failed[:3])
        what = f"{len(failed)} of {len(records) + len(schedules)} kernels and schedules"
        print_error(f"{what} disagree with their references: {names}.")
        raise typer.Exit(VerificationError.exit_code)


def _print_all(console: Console, records: list[dict[str, Any]], schedules: list[dict[str, Any]], emulate: bool) -> None:
    (_print_emulations if emulate else _print_records)(console, records)
    if schedules:
        console.print()
        _print_schedules(console, schedules)


def _spell_kernel(names: str) -> str:
    """One kernel of a chain on each line."""
    return names.replace(" + ", "\n+ ")


def _print_reasons(console: Console, reasons: list[tuple[str, str]]) -> None:
    """What is wrong with which kernel, below the table."""
    for name, reason in reasons:
        if reason:
            console.print(f"\n{name}\n  {reason}", markup=False, soft_wrap=True)


def _print_records(console: Console, records: list[dict[str, Any]]) -> None:
    rows = [
        (
            _spell_kernel(r["kernel"]),
            r["target"],
            r["op"],
            r["cases"],
            f"{r['max_error']:.1e}",
            f"{r['relative_error']:.1e}",
            f"{r['bound']:.1e}",
            mark(r["verdict"] != "failed", r["verdict"]),
            "; ".join(part for part in (", ".join(r["proofs"]), r["coverage"]) if part),
        )
        for r in records
    ]
    columns = ("kernel", "target", "operation", "cases", "max error", "relative", "bound", "verdict", "passed")
    console.print(make_table("Every file has the hash that the manifest records.", columns, rows, numbers=(3, 4, 5, 6)))
    _print_reasons(console, [(f"{r['kernel']} ({r['target']})", r["reason"]) for r in records])
    verdicts = [r["verdict"] for r in records]
    console.print(f"\n{', '.join(f'{verdicts.count(v)} {v}' for v in ('ok', 'failed', 'skipped'))}")


def _print_emulations(console: Console, records: list[dict[str, Any]]) -> None:
    """One row for each kernel (or chain of kernels) and architecture; what was not checked, once, below."""
    emulated = [(r, e) for r in records for e in r["emulations"]]
    rows = [
        (
            _spell_kernel(r["kernel"]),
            e["architecture"],
            f"{e['instructions']:,}",
            f"{e['covered']:.0%}",
            f"{e['max_error']:.1e}",
            f"{e['relative_error']:.1e}",
            mark(e["verdict"] != "failed", e["verdict"]),
            e["coverage"],
        )
        for r, e in emulated
    ]
    columns = ("kernel", "binary", "instructions", "covered", "max error", "relative", "verdict", "programs")
    title = "Emitted assembly, executed in the emulators."
    console.print(make_table(title, columns, rows, numbers=(2, 3, 4, 5)))
    for sentence in dict.fromkeys(s for _, e in emulated for s in e["unchecked"]):
        console.print(f"Not checked: {sentence}")
    _print_reasons(console, [(f"{r['kernel']} ({e['architecture']})", e["reason"]) for r, e in emulated])
    verdicts = [e["verdict"] for _, e in emulated]
    console.print(f"\n{', '.join(f'{verdicts.count(v)} {v}' for v in ('ok', 'failed'))}")


def _print_schedules(console: Console, records: list[dict[str, Any]]) -> None:
    """One row for each emulated run of a merged decode launch, and for each schedule that the static checks refuse."""
    rows = [
        (
            r["kernel"],
            r["architecture"] or r["target"],
            r["tokens"] or "",
            r["mode"],
            r["programs"] or "",
            f"{r['difference']:.1e}",
            f"{r['equal']:.2%}",
            mark(r["verdict"] != "failed", r["verdict"]),
            "; ".join(part for part in (", ".join(r["proofs"]), r["coverage"]) if part),
        )
        for r in records
    ]
    columns = ("kernel", "binary", "tokens", "mode", "programs", "difference", "equal bytes", "verdict", "passed")
    title = (
        "Merged decode launches, beside standalone ones in the emulators, in a seeded order and with the race check."
    )
    console.print(make_table(title, columns, rows, numbers=(2, 4, 5, 6)))
    _print_reasons(console, [(f"{r['kernel']} ({r['architecture'] or r['target']})", r["reason"]) for r in records])
    verdicts = [r["verdict"] for r in records]
    console.print(f"\n{', '.join(f'{verdicts.count(v)} {v}' for v in ('ok', 'failed'))}")
