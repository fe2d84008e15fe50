"""Tables over the summary of an artifact (see driver.summary), for ``build`` and ``inspect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmcompile.cli.console import make_table, mark, print_tables
from mmcompile.core.formats import WEIGHT_FORMATS
from mmcompile.core.quantities import format_bytes, format_count

Summary = Mapping[str, Any]


def read_summary(path: Path) -> dict[str, Any]:
    """Open an artifact, check every hash, and summarise it. Raises ArtifactError."""
    from mmcompile.driver.counts import read_counts
    from mmcompile.driver.summary import read_passes, summarise
    from mmcompile.runtime.artifact import open_artifact

    artifact = open_artifact(path)
    plans = {name: artifact.plan(name) for name in artifact.manifest.targets}
    return summarise(artifact.manifest, plans, read_passes(path), read_counts(path))


def measure_files(path: Path) -> dict[str, int]:
    """Bytes of weights, kernels and everything else."""
    sizes = {"weights": 0, "kernels": 0, "other": 0}
    for file in path.rglob("*"):
        if file.is_file():
            folder = file.relative_to(path).parts[0]
            sizes[folder if folder in sizes else "other"] += file.stat().st_size
    return sizes


def print_build(
    console: Console,
    path: Path,
    summary: Summary,
    sizes: Mapping[str, int],
    compiled: Mapping[str, str],
    seconds: float,
) -> None:
    """The end of a build: passes, targets, sizes, where to look next."""
    quantization = summarise_kinds(summary)
    print_tables(console, passes_table(summary, only_matches=True), targets_table(summary, compiled))
    console.print()
    if quantization:
        console.print(f"Quantized: {quantization}", markup=False)
    parts = ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items())
    console.print(f"Size: {format_bytes(sum(sizes.values()))} ({parts})", markup=False)
    console.print(f"Built {path} in {seconds:.1f} s.", style="bold", markup=False)
    console.print("\nLook next:")
    ask = '--prompt "Hello"' if summary["model"]["tokenizer"] else "--ids 1,2,3"
    lines = [f"mmcompile inspect {path}", f"mmcompile verify {path} --quick"]
    if summary["kind"] == "decoder" and summary["weights"] == "packed":
        lines.insert(0, f"mmcompile run {path} {ask}")
    for line in (*lines, f"open {path}/report.html"):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def summarise_kinds(summary: Summary) -> str:
    """ "7 kinds of layers in nvfp4 (14 layers); lm_head not: reason"."""
    kinds = summary["quantization"]["kinds"]
    done = {form: sum(k["count"] for k in kinds if k["outcome"] == form) for form in WEIGHT_FORMATS}
    rest = [f"{k['kind']} not: {k['outcome']}" for k in kinds if k["outcome"] not in done]
    counted = [f"{count} layers in {form}" for form, count in done.items() if count]
    return "; ".join((*counted, *rest))


def passes_table(summary: Summary, *, only_matches: bool = False) -> Table:
    """One row per pass; ``only_matches`` leaves out those that did and nearly did nothing."""
    rows = []
    for record in summary["passes"]:
        matches, misses = record["result"]["matches"], record["result"]["near_misses"]
        if only_matches and not matches and not misses:
            continue
        rows.append(
            (
                f"{record['index']:02d}",
                record["phase"],
                record["name"],
                len(matches),
                len(misses) or "-",
                f"{record['nodes_before']} -> {record['nodes_after']}",
                *_format_launches(record["launches"]),
                format_certificate(record["certificate"]),
            )
        )
    columns = ("no.", "phase", "pass", "matches", "near misses", "nodes", "launches/step", "per layer", "verified")
    return make_table("Passes", columns, rows, numbers=(3, 4))


def _format_launches(launches: Sequence[Mapping[str, int]] | None) -> tuple[str, str]:
    """Launches of a step and of the usual layer before and after a pass, "-" if they were not counted."""
    if launches is None:
        return "-", "-"
    before, after = launches
    return f"{before['step']} -> {after['step']}", f"{before['layer']} -> {after['layer']}"


def format_checkpoint(summary: Summary) -> str:
    """ "250.1 GB: bf16 4.9 GB, nvfp4 232.4 GB, vision tower 1.7 GB (not in the graph)"."""
    stored, beside = summary["checkpoint"], summary["beside"]
    parts = [f"{form} {format_bytes(size)}" for form, size in stored.items() if form != "total"]
    parts += [f"{part} {format_bytes(size)} (not in the graph)" for part, size in beside.items()]
    parts += [f"published in {mix}: {format_bytes(size)}" for mix, size in summary["published"].items()]
    return f"{format_bytes(stored['total'] + sum(beside.values()))}: {', '.join(parts)}"


def format_certificate(certificate: Mapping[str, Any] | None) -> str:
    """What was measured for a pass, "-" if it changed nothing or was not verified."""
    if certificate is None:
        return "-"
    if certificate["snr_db"] is None:
        return "equal"
    error = certificate["max_error"] / max(certificate["scale"], 1e-30)
    return f"{certificate['kind']}: error {error:.1e}, {certificate['snr_db']:.0f} dB"


def near_misses_table(summary: Summary, limit: int | None = None) -> Table | None:
    """Equal reasons are counted together; None if there is none."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in summary["passes"]:
        for miss in record["result"]["near_misses"]:
            groups.setdefault((miss["rule"], miss["reason"]), []).append(miss)
    if not groups:
        return None
    rows = [
        (rule, len(misses), misses[0]["source"] or misses[0]["node"], reason)
        for (rule, reason), misses in list(groups.items())[:limit]
    ]
    return make_table("Near misses", ("rule", "places", "first", "why not"), rows, numbers=(1,))


def targets_table(summary: Summary, compiled: Mapping[str, str] | None = None) -> Table:
    """One row per target: binaries, kernels, launches of a decode step (or of the module)."""
    rows = []
    for target in summary["targets"]:
        phases = {phase["name"]: phase for phase in target["phases"]}
        main = phases.get("decode") or phases.get("forward")
        row = [target["name"], ", ".join(target["architectures"]) or "runs by references", len(target["kernels"])]
        row += [main["launches"], main["layer_launches"] or "-", main["references"] or "-"] if main else ["-"] * 3
        memory = target["memory"]
        row += [format_bytes(memory["weight"]), format_bytes(memory["arena"])]
        rows.append([*row, (compiled or {}).get(target["name"], "-")] if compiled is not None else row)
    columns = ["target", "binaries", "kernels", "launches/step", "per layer", "references", "weights", "arena"]
    return make_table(
        "Targets", [*columns, "compilation"] if compiled is not None else columns, rows, numbers=(2, 3, 4, 5, 6, 7)
    )


def model_table(summary: Summary) -> Table:
    """What the model is and how it is stored."""
    model, cache = summary["model"], summary["cache"]
    rows: list[tuple[str, str]] = [
        ("model", f"{model['name']} ({model['door']})"),
        ("parameters", format_count(model["parameters"])),
        *([("checkpoint", format_checkpoint(summary))] if summary["checkpoint"] else []),
        ("dtype", model["dtype"]),
        ("weights", summary["weights"]),
        ("quantization", summary["quantization"]["scheme"]),
    ]
    if summary["kind"] == "decoder":
        rows.append(("context", f"{model['max_context']} tokens, vocabulary {model['vocab_size']}"))
        rows.append(("text", "tokenizer" + (" and chat template" if model["chat_template"] else "")
                     if model["tokenizer"] else "no tokenizer: prompts are token ids"))  # fmt: skip
    if cache:
        rows += _describe_cache(cache)
    return make_table("Model", ("", ""), rows)


def _describe_cache(cache: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows on the paged caches."""
    layer = f"{cache['kv_bytes']} bytes of K and V" + (
        f", {cache['index_bytes']} of index keys" * bool(cache["index_bytes"])
    )
    rows = [
        ("KV cache", f"{cache['bytes_per_token']} bytes per token: {cache['layers']} layers, {cache['dtype']}, "
         f"pages of {cache['page_size']} tokens"),
        ("a layer's share", layer),
    ]  # fmt: skip
    if cache["quantizer"]:
        layouts = "; ".join(f"{target} {', '.join(tags)}" for target, tags in cache["layouts"].items())
        rows.append(("NVFP4 cache", f"quantizer {cache['quantizer']}, layouts {layouts}"))
    return rows


def quantization_table(summary: Summary) -> Table | None:
    """Outcome by kind of layer; None without quantization."""
    kinds = summary["quantization"]["kinds"]
    if not kinds:
        return None
    rows = [(k["kind"], k["count"], k["outcome"]) for k in kinds]
    return make_table("Quantization", ("layer", "count", "outcome"), rows, numbers=(1,))


def phases_table(target: Mapping[str, Any]) -> Table:
    """Launches of every phase of a target."""
    rows = [
        (
            p["name"], p["tokens"], p["operations"], p["launches"], p["layer_launches"] or "-",
            p["references"] or "-", format_bytes(p["arena_bytes"]),
        )
        for p in target["phases"]
    ]  # fmt: skip
    columns = ("phase", "tokens", "operations", "launches", "per layer", "references", "arena")
    return make_table(f"Phases on {target['name']}", columns, rows, numbers=(1, 2, 3, 4, 5, 6))


def kernels_table(target: Mapping[str, Any]) -> Table | None:
    """Kernels of a target with what the assembler made of them; None if it has none."""
    rows: list[tuple[Any, ...]] = []
    for kernel in target["kernels"]:
        for index, binary in enumerate(kernel["binaries"]):
            spills = binary["spills"]
            rows.append(
                (
                    "" if index else kernel["name"],
                    "" if index else kernel["launches"],
                    binary["architecture"],
                    binary["registers"],
                    format_bytes(binary["shared"]),
                    mark(False, str(spills)) if spills else Text("0"),
                    ", ".join(f"{name} x{n}" if n else f"no {name}" for name, n in binary["ledger"].items()) or "-",
                )
            )
    if not rows:
        return None
    columns = ("kernel", "uses", "binary", "registers", "shared", "spills", "instructions promised and found")
    return make_table(f"Kernels of {target['name']}", columns, rows, numbers=(1, 3, 4, 5))
