"""The long sections of ``inspect``: passes, layers, launches, buffers, graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mmcompile.cli import views
from mmcompile.cli.console import make_table, print_tables
from mmcompile.core.errors import UsageError
from mmcompile.core.plan import MODES, Launch, Phase, Plan, View
from mmcompile.core.quantities import format_bytes


@dataclass(frozen=True)
class Opened:
    """An artifact's summary and the plans of the targets that were asked for."""

    summary: dict[str, Any]
    plans: dict[str, Plan]


def open_selected(path: Path, target: str | None) -> Opened:
    """Open an artifact, all targets or one. Raises ArtifactError."""
    from mmcompile.driver.counts import read_counts
    from mmcompile.driver.summary import read_passes, summarise
    from mmcompile.runtime.artifact import open_artifact
    from mmcompile.runtime.selection import require_target

    artifact = open_artifact(path)
    require_target(artifact.manifest, target)
    plans = {name: artifact.plan(name) for name in artifact.manifest.targets}
    summary = summarise(artifact.manifest, plans, read_passes(path), read_counts(path))
    if target is not None:
        summary["targets"] = [t for t in summary["targets"] if t["name"] == target]
        plans = {target: plans[target]}
    return Opened(summary, plans)


def read_graph(path: Path, number: int) -> str:
    """Text of the graph after a pass. Raises UsageError if no pass has that number."""
    files = sorted((path / "passes").glob(f"{number:02d}-*.txt"))
    if not files:
        known = sorted(file.stem for file in (path / "passes").glob("*.txt"))
        last = known[-1] if known else "none"
        raise UsageError(f"there is no pass {number}", where=str(path), fix=f"the last one is {last}; see --passes")
    return files[0].read_text()


def list_launches(plan: Plan) -> list[dict[str, Any]]:
    """Every launch of every phase: layer, operation, choices with kernels and grids, shapes, reason."""
    from mmcompile.driver.summary import assign_layers, list_phases

    return [
        {
            "phase": phase.name,
            "layer": layer,
            "name": launch.name,
            "operation": launch.op,
            "inputs": {name: _shape(view) for name, view in launch.inputs.items() if view is not None},
            "outputs": [_shape(view) for view in launch.outputs],
            "choices": [
                {
                    "template": choice.template,
                    "max_tokens": choice.max_tokens,
                    "kernels": [{"kernel": k.kernel, "grid": list(k.grid)} for k in choice.kernels],
                    "reason": choice.reason,
                }
                for choice in launch.choices
            ],
            "reason": launch.reason,
            "source": launch.source,
        }
        for phase in list_phases(plan)
        for launch, layer in zip(phase.launches, assign_layers(plan, phase), strict=True)
    ]


def _shape(view: View) -> str:
    return f"[{', '.join(map(str, view.shape))}]"


def list_buffers(plan: Plan) -> list[dict[str, Any]]:
    """Every buffer, weights first: name, role, shape, dtype, layout, bytes at the largest symbols, arena offset."""
    from mmcompile.driver.summary import count_bytes

    order = ("weight", "derived", "state", "input", "output", "temporary")
    return [
        {
            "name": b.name,
            "role": b.role,
            "shape": list(b.shape),
            "dtype": b.dtype,
            "layout": b.layout,
            "bytes": count_bytes(b, plan.symbols),
            "offset": b.offset,
        }
        for b in sorted(plan.buffers.values(), key=lambda b: order.index(b.role))
    ]


def _print_kernels(console: Console, opened: Opened) -> None:
    for target in opened.summary["targets"]:
        table = views.kernels_table(target)
        if table is None:
            console.print(f"{target['name']} has no kernels: it runs by the references.")
        else:
            print_tables(console, table)


def _print_passes(console: Console, opened: Opened) -> None:
    tables = [views.passes_table(opened.summary), views.near_misses_table(opened.summary)]
    print_tables(console, *(table for table in tables if table is not None))
    for record in opened.summary["passes"]:
        for note in record["result"]["notes"]:
            console.print(f"{record['name']}: {note}", markup=False)


def _print_layers(console: Console, opened: Opened) -> None:
    quantization = opened.summary["quantization"]
    if not quantization["layers"]:
        console.print("Nothing is quantized.")
        return
    rows = list(quantization["layers"].items())
    console.print(make_table(f"Layers, scheme {quantization['scheme']}", ("weight", "outcome"), rows))


def _print_launches(console: Console, opened: Opened) -> None:
    from mmcompile.driver.summary import list_phases

    for target, plan in opened.plans.items():
        print_tables(console, *(_launch_table(target, plan, phase) for phase in list_phases(plan)))


def _launch_table(target: str, plan: Plan, phase: Phase) -> Any:
    """Launches outside layers and of the first layer."""
    from mmcompile.driver.summary import assign_layers

    layers = assign_layers(plan, phase)
    numbers = sorted({layer for layer in layers if layer is not None})
    shown = numbers[:1]
    rows = [
        (
            index,
            "-" if layer is None else layer,
            launch.op,
            _describe_choices(launch),
            ", ".join(_shape(view) for view in launch.outputs),
            launch.source,
        )
        for index, (launch, layer) in enumerate(zip(phase.launches, layers, strict=True))
        if layer is None or layer in shown
    ]
    more = f", layer {shown[0]} of {len(numbers)}" if len(numbers) > 1 else ""
    title = f"{phase.name} on {target}{more}"
    return make_table(title, ("no.", "layer", "operation", "kernel", "result", "source"), rows, numbers=(0, 1))


def _describe_choices(launch: Launch) -> str:
    """ "gemv (to 16 tokens) | gemm", or "reference: reason"."""
    if not launch.choices:
        return f"reference{': ' + launch.reason if launch.reason else ''}"
    parts = []
    for choice in launch.choices:
        limit = f" (to {choice.max_tokens} tokens)" if choice.max_tokens is not None else ""
        parts.append(choice.template + limit)
    return " | ".join(parts)


def _print_buffers(console: Console, opened: Opened) -> None:
    for target, plan in opened.plans.items():
        rows = [
            (
                b["name"], b["role"], f"[{', '.join(map(str, b['shape']))}]", b["dtype"], b["layout"],
                format_bytes(b["bytes"]), "-" if b["offset"] is None else b["offset"],
            )
            for b in list_buffers(plan)
        ]  # fmt: skip
        columns = ("buffer", "role", "shape", "dtype", "layout", "size", "offset")
        print_tables(console, make_table(f"Buffers of {target}", columns, rows, numbers=(5, 6)))


def list_merged(plans: Mapping[str, Plan]) -> dict[str, Any]:
    """What merging does to decode, by target: a record for every schedule, and why launches are left out."""
    from mmcompile.driver.mono_summary import list_schedules
    from mmcompile.driver.targets import load_target

    return {
        name: {
            "schedules": list_schedules(plan, load_target(name).spec),
            "unmerged": plan.phases["decode"].unmerged if "decode" in plan.phases else "",
        }
        for name, plan in plans.items()
    }


def _print_mono(console: Console, opened: Opened) -> None:
    from mmcompile.driver.mono_summary import list_unstreamed

    for target, record in list_merged(opened.plans).items():
        if not record["schedules"]:
            console.print(f"{target}: no merged decode launches. {record['unmerged']}", markup=False)
            continue
        print_tables(console, *_mono_tables(target, record["schedules"]))
        if record["unmerged"]:
            console.print(f"not merged: {record['unmerged']}", markup=False)
        for line in list_unstreamed({target: opened.plans[target]}):
            console.print(line, markup=False)


def _mono_tables(target: str, schedules: list[dict[str, Any]]) -> list[Any]:
    """One table of what a launch is made of, one of what it costs."""
    made, costs = [], []
    for r in schedules:
        tokens = f"{r['low']} to {r['high']}"
        step, layer = (
            [r["launches"][mode][what] for mode in MODES if mode in r["launches"]] for what in ("step", "layer")
        )
        waits, size = r["waits"], r["weight_bytes"]
        made.append(
            (tokens, r["kernel"], r["programs"], r["stages"], r["replicated"], waits["none"], waits["counter"],
             f"{format_bytes(size['least'])} to {format_bytes(size['most'])}")
        )  # fmt: skip
        costs.append(
            (tokens, " > ".join(map(str, step)), " > ".join(map(str, layer)), r["mode"],
             *(f"{r['seconds'][mode] * 1e6:.1f}" if mode in r["seconds"] else "-" for mode in MODES), r["basis"],
             ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in r["time"].items()))
        )  # fmt: skip
    columns = ("tokens", "kernel", "programs", "stages", "replicated", "without wait", "counters waited for",
               "weights of a program")  # fmt: skip
    first = make_table(f"Merged decode launches on {target}", columns, made, numbers=(2, 3, 4, 5, 6))
    columns = ("tokens", "launches a step", "a layer", "mode", *(f"{mode} us" for mode in MODES), "basis",
               "us of an average program")  # fmt: skip
    title = "Launches standalone > a layer at once > a step at once > streamed, and seconds of what is merged"
    tables = [first, make_table(title, columns, costs, numbers=(4, 5, 6, 7))]
    streamed = [
        (f"{r['low']} to {r['high']}", s["kernel"], s["programs"], s["tokens"], format_bytes(s["bytes"]),
         format_bytes(s["workspace_bytes"]))
        for r in schedules if (s := r["stream"])
    ]  # fmt: skip
    columns = ("tokens", "kernel", "programs", "rows", "second copy of the weights", "workspace")
    title = f"Streamed decode steps on {target}: the tuned kernel of a whole step"
    return [*tables, make_table(title, columns, streamed, numbers=(2, 3))] if streamed else tables


SECTIONS: dict[str, Callable[[Console, Opened], None]] = {
    "kernels": _print_kernels,
    "passes": _print_passes,
    "layers": _print_layers,
    "launches": _print_launches,
    "buffers": _print_buffers,
    "mono": _print_mono,
}
