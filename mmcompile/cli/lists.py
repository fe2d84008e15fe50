"""The verbs that list what there is: targets, passes, models, doctor."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from mmcompile.cli.console import Debug, Json, emit, make_table, mark, print_tables
from mmcompile.core.quantities import format_count


def register(app: typer.Typer) -> None:
    """Add the verbs to the application."""
    app.command("targets", epilog="Example: mmcompile targets --json")(targets)
    app.command("passes", epilog="Example: mmcompile passes --quant nvfp4")(passes)
    app.command("models", epilog="Then: mmcompile build smollm2-135m --target cpu -o out")(models)
    app.command("doctor", epilog="Exit code 9 if something that a build needs is missing.")(doctor)


def targets(as_json: Json = False, debug: Debug = False) -> None:
    """List the targets: binaries, what they need, where generated code has run, what is missing here."""
    from mmcompile.targets._doctor import describe_targets

    records = describe_targets()

    def view(console: Console) -> None:
        rows = [
            (
                r["name"],
                r["description"],
                ", ".join(r["architectures"]) or "none",
                r["needs"]["ptx"] or "-",
                r["needs"]["driver"],
                r["executed_on"],
            )
            for r in records
        ]
        console.print(make_table("Targets", ("name", "what", "binaries", "PTX", "driver", "executed on"), rows))
        console.print()
        for record in records:
            for line in record["missing"]:
                console.print(f"{record['name']} lacks here: {line}", markup=False)

    emit(records, as_json, view)


def passes(
    quant: Annotated[str, typer.Option(help="Quantization: none, nvfp4 or nvfp4_mxfp8.", metavar="SCHEME")] = "none",
    kind: Annotated[str, typer.Option(help='"decoder" or "module".')] = "decoder",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the passes in the order in which they run, and the rules for --require."""
    from mmcompile.core.discover import list_names
    from mmcompile.core.errors import unknown_name
    from mmcompile.passes.pipeline import list_decode_passes, list_passes, list_rules, list_score_passes

    for what, name, known in (
        ("quantization", quant, ["none", *list_names("passes.quant")]),
        ("kind", kind, ["decoder", "module"]),
    ):
        if name not in known:
            raise unknown_name(what, name, known)
    copies = [*list_decode_passes(), *list_score_passes()] if kind == "decoder" else []
    ordered = [*list_passes(kind, quant), *copies]
    records = [
        {"number": i, "phase": p.phase, "name": p.name, "effect": p.effect, "description": p.description}
        for i, p in enumerate(ordered)
    ]
    rules = list_rules()

    def view(console: Console) -> None:
        columns = ("no.", "phase", "name", "effect", "what it does")
        table = make_table("Passes", columns, [tuple(r.values()) for r in records], numbers=(0,))
        print_tables(console, table)
        console.print(f"\nRewrite rules, for --require: {', '.join(rules)}", markup=False)
        console.print(
            "Effect: what a pass may do to numbers (bitwise: nothing, bounded: rounding, quantizing: judged by the "
            "signal-to-noise ratio). --verify measures it."
        )

    emit({"passes": records, "rules": rules}, as_json, view)


def _list_models() -> list[dict[str, Any]]:
    from mmcompile.driver.doors import list_models

    records = []
    for name, module in sorted(list_models().items()):
        config = module.MODELS[name]
        found = module.find_weights(name)
        records.append(
            {
                "name": name,
                "family": module.__name__.rsplit(".", 1)[-1],
                "parameters": _count_parameters(module, config),
                "layers": config.num_layers,
                "context": config.max_positions,
                "weights": str(found) if found else None,
                "advice": "" if found else module.WEIGHTS_ADVICE,
            }
        )
    return records


def _count_parameters(module: Any, config: Any) -> int:
    import torch

    with torch.device("meta"):
        model = module.build(config)
    return sum(p.numel() for p in model.parameters())


def models(as_json: Json = False, debug: Debug = False) -> None:
    """List the models known by name, and whether their weights are on this machine."""
    records = _list_models()

    def view(console: Console) -> None:
        rows = [
            (
                r["name"],
                r["family"],
                format_count(r["parameters"]),
                r["layers"],
                r["context"],
                mark(True, "found") if r["weights"] else "not here",
            )
            for r in records
        ]
        columns = ("name", "family", "parameters", "layers", "context", "weights")
        console.print(make_table("Models", columns, rows, numbers=(2, 3, 4)))
        for advice in sorted({r["advice"] for r in records if r["advice"]}):
            console.print(f"\nWeights: {advice}.", markup=False)
        console.print(
            "Other doors: a Hugging Face directory or config.json, a .gguf file, file.py:factory for any nn.Module."
        )

    emit(records, as_json, view)


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Check this machine by doing: compile a kernel for every architecture, read it back, look for drivers."""
    from mmcompile.core.errors import ToolchainError
    from mmcompile.targets._doctor import run_doctor

    records = run_doctor()
    needed = [r for r in records if not r["ok"] and not r["advice"].startswith(("optional", "only to run"))]

    def view(console: Console) -> None:
        rows = [
            (mark(True, "ok") if r["ok"] else mark(False, "no"), r["check"], r["detail"], r["advice"]) for r in records
        ]
        console.print(make_table("Doctor", ("", "check", "found", "what to do"), rows))
        if not needed:
            console.print("\nThis machine can build for every target.")

    emit(records, as_json, view)
    if needed:
        raise typer.Exit(ToolchainError.exit_code)
