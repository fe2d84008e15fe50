"""report.html: one self-contained page on what became of a model; equal builds give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mmcompile.core.formats import WEIGHT_FORMATS
from mmcompile.core.plan import Launch, Manifest, Phase, Plan
from mmcompile.core.quantities import format_bytes, format_count
from mmcompile.driver.counts import read_counts
from mmcompile.driver.mono_summary import draw_timeline, list_unstreamed
from mmcompile.driver.summary import (
    assign_layers,
    count_by_operation,
    count_bytes,
    list_phases,
    read_passes,
    summarise,
)
from mmcompile.driver.targets import load_target

_BAR_WIDTH, _ROW_HEIGHT = 520, 22
_BOX_WIDTH, _BOX_HEIGHT, _BOX_GAP, _BOX_LEFT = 700, 70, 22, 70
_LARGEST_BUFFERS = 12
_MEMORY_LABELS = (("weight", "weights"), ("derived", "derived at load"), ("arena", "arena"))


def write_report(folder: Path, manifest: Manifest, plans: Mapping[str, Plan]) -> None:
    """Write ``folder``/report.html from the manifest, the plans by target and the dumped passes."""
    environment = Environment(
        loader=PackageLoader("mmcompile", "driver"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"bytes": format_bytes, "count": format_count}
    summary = summarise(manifest, plans, read_passes(folder), read_counts(folder))
    page = environment.get_template("report.html").render(
        **summary,
        figures=_list_figures(summary),
        bars=draw_operations(count_by_operation(summary["passes"])),
        pictures=[draw_layer(plans[target["name"]]) | {"target": target["name"]} for target in summary["targets"]],
        buffers={name: _largest_buffers(plan) for name, plan in sorted(plans.items())},
        memory=[draw_memory(target) for target in summary["targets"]],
        timelines=_draw_timelines(plans),
        unstreamed=list_unstreamed(plans),
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


def _draw_timelines(plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """Merged decode launches of every target that has some."""
    drawn = {name: draw_timeline(plan, load_target(name).spec) for name, plan in sorted(plans.items())}
    return [picture | {"target": name} for name, picture in drawn.items() if picture is not None]


def _list_figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers at the top of the page: (value, label)."""
    results = [record["result"] for record in summary["passes"]]
    quantization, cache = summary["quantization"], summary["cache"]
    quantized = sum(outcome in WEIGHT_FORMATS for outcome in quantization["layers"].values())
    figures = [
        (format_count(summary["model"]["parameters"]), "parameters"),
        (f"{quantized} of {len(quantization['layers'])}" if quantization["layers"] else "none", "layers quantized"),
        (str(sum(len(r["matches"]) for r in results)), f"rewrites in {len(results)} passes"),
        (str(sum(len(r["near_misses"]) for r in results)), "near misses"),
        (str(sum(len(t["kernels"]) for t in summary["targets"])), f"kernels for {len(summary['targets'])} targets"),
        (format_bytes(max(t["memory"]["weight"] for t in summary["targets"])), "weights"),
    ]
    if summary["checkpoint"]:
        total = summary["checkpoint"]["total"] + sum(summary["beside"].values())
        figures.append((format_bytes(total), "checkpoint"))
    if cache:
        figures.append((format_bytes(cache["bytes_per_token"]), "KV cache per token"))
    return figures


def draw_operations(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometry of the bars: operations after every pass, mm:: and other ones."""
    largest = max((row["mm"] + row["other"] for row in counts), default=1) or 1
    scale = _BAR_WIDTH / largest
    rows = [
        row
        | {
            "y": i * _ROW_HEIGHT,
            "mm_width": round(row["mm"] * scale, 1),
            "other_width": round(row["other"] * scale, 1),
        }
        for i, row in enumerate(counts)
    ]
    return {"rows": rows, "height": len(counts) * _ROW_HEIGHT + 6}


def draw_layer(plan: Plan) -> dict[str, Any]:
    """Geometry of one layer's launches: boxes from top to bottom, arrows for what must wait for what.

    The layer is the second one where there are several (its norm is fused as in all that follow); a module without
    layers is drawn whole.
    """
    phase = plan.phases.get("decode") or list_phases(plan)[0]
    layers = assign_layers(plan, phase)
    numbers = sorted({layer for layer in layers if layer is not None})
    layer = numbers[min(1, len(numbers) - 1)] if numbers else None
    indices = [i for i, own in enumerate(layers) if layer is None or own == layer]
    boxes = [_draw_box(plan, phase.launches[i], row) for row, i in enumerate(indices)]
    return {
        "phase": phase.name,
        "layer": layer,
        "equal": len(numbers),
        "boxes": boxes,
        "arrows": _draw_arrows(phase, indices),
        "width": _BOX_LEFT + _BOX_WIDTH + 10,
        "height": len(boxes) * (_BOX_HEIGHT + _BOX_GAP) + 10,
        "box_width": _BOX_WIDTH,
        "box_height": _BOX_HEIGHT,
    }


def _draw_box(plan: Plan, launch: Launch, row: int) -> dict[str, Any]:
    chosen = launch.choose(1)
    views = [v for v in launch.inputs.values() if v is not None]
    weights = {v.buffer: plan.buffers[v.buffer] for v in views if plan.buffers[v.buffer].role in ("weight", "derived")}
    output = launch.outputs[0] if launch.outputs else None
    return {
        "x": _BOX_LEFT,
        "y": row * (_BOX_HEIGHT + _BOX_GAP) + 5,
        "operation": launch.op,
        "how": chosen.template if chosen else "by reference",
        "kernels": len(chosen.kernels) if chosen else 0,
        "grid": " x ".join(str(g) for g in chosen.kernels[0].grid) if chosen else "",
        "weights": format_bytes(sum(count_bytes(b, plan.symbols) for b in weights.values())) if weights else "",
        "shape": f"[{', '.join(map(str, output.shape))}]" if output else "",
        "portable": bool(chosen),
        "attributes": ", ".join(
            f"{k} {v}" for k, v in sorted(launch.attributes.items()) if isinstance(v, int | float | str)
        ),
    }


def _draw_arrows(phase: Phase, indices: list[int]) -> list[str]:
    """SVG paths: straight down to the next box, an arc on the left over others (a residual)."""
    rows = {index: row for row, index in enumerate(indices)}
    paths = []
    for index in indices:
        for before in phase.after[index]:
            if before not in rows:
                continue
            top = rows[before] * (_BOX_HEIGHT + _BOX_GAP) + 5 + _BOX_HEIGHT
            bottom = rows[index] * (_BOX_HEIGHT + _BOX_GAP) + 5
            if rows[index] == rows[before] + 1:
                x = _BOX_LEFT + _BOX_WIDTH // 2
                paths.append(f"M{x} {top} L{x} {bottom - 3}")
            else:
                reach = _BOX_LEFT - min(60, 14 * (rows[index] - rows[before]))
                start, end = top - _BOX_HEIGHT // 2, bottom + _BOX_HEIGHT // 2
                paths.append(f"M{_BOX_LEFT} {start} C{reach} {start} {reach} {end} {_BOX_LEFT - 3} {end}")
    return paths


def _largest_buffers(plan: Plan) -> list[dict[str, Any]]:
    """The largest buffers, caches at one page."""
    sized = sorted(plan.buffers.values(), key=lambda b: (-count_bytes(b, plan.symbols), b.name))
    return [
        {"name": b.name, "role": b.role, "shape": f"[{', '.join(map(str, b.shape))}]", "dtype": b.dtype,
         "layout": b.layout, "bytes": count_bytes(b, plan.symbols)}
        for b in sized[:_LARGEST_BUFFERS]
    ]  # fmt: skip


def draw_memory(target: Mapping[str, Any]) -> dict[str, Any]:
    """Geometry of a target's memory as one bar: weights, derived tensors, arena."""
    total = sum(target["memory"].values()) or 1
    parts, x = [], 0.0
    for key, label in _MEMORY_LABELS:
        width = _BAR_WIDTH * target["memory"][key] / total
        parts.append({"label": label, "bytes": target["memory"][key], "x": round(x, 1), "width": round(width, 1)})
        x += width
    return {"target": target["name"], "total": total, "parts": parts, "copied": target["copied_bytes"]}
