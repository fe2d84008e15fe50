"""What an artifact holds, as plain data: shared by the build's summary, ``inspect`` and report.html."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmcompile.core.expression import evaluate
from mmcompile.core.plan import Buffer, Kernel, Launch, Manifest, Phase, Plan
from mmcompile.core.stream import count_copied, drop_streams

_LAYER_NUMBER = re.compile(r"[._](\d+)(?=[._]|$)")
_PHASES = ("forward", "prefill", "decode", "score", "load")
_LAYER_ROLES = ("weight", "derived", "state")


def summarise(
    manifest: Manifest,
    plans: Mapping[str, Plan],
    passes: Sequence[dict[str, Any]],
    counts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything worth knowing of an artifact.

    Args:
        plans: by target. passes: the records of passes/NN-name.json, in order. counts: the record of counts.json.

    Returns: keys kind, mmcompile, model, quantization, cache, weights, targets (a list), passes (a list; "launches" of
    each is [before, after], None without counts), checkpoint (bytes by format) beside (bytes by part) and
    published (bytes by mix of formats).
    """
    counts = counts or {}
    launches = counts["passes"] if counts else [None] * len(passes)
    return {
        "kind": manifest.kind,
        "mmcompile": manifest.mmcompile,
        "model": manifest.model.model_dump(),
        "quantization": _summarise_quantization(manifest),
        "cache": manifest.cache.model_dump() if manifest.cache else None,
        "weights": manifest.weights,
        "targets": [summarise_target(name, manifest, plans[name]) for name in sorted(manifest.targets)],
        "passes": [record | {"launches": pair} for record, pair in zip(passes, launches, strict=True)],
        "checkpoint": counts.get("checkpoint", {}),
        "beside": counts.get("beside", {}),
        "published": counts.get("published", {}),
    }


def _summarise_quantization(manifest: Manifest) -> dict[str, Any]:
    record = manifest.quantization
    counts = Counter((_layer_kind(name), outcome) for name, outcome in record.layers.items())
    return {
        "scheme": record.scheme,
        "options": record.options,
        "global_scale_convention": record.global_scale_convention,
        "kinds": [{"kind": kind, "count": n, "outcome": outcome} for (kind, outcome), n in sorted(counts.items())],
        "layers": record.layers,
    }


def _layer_kind(name: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" -> "mlp.up_proj": what is the same in every layer."""
    tail = re.split(r"\.\d+\.", name)[-1]
    return tail.removesuffix(".weight").removeprefix("model.")


def summarise_target(name: str, manifest: Manifest, plan: Plan) -> dict[str, Any]:
    """Kernels, phases and memory of one target."""
    entry = manifest.targets[name]
    return {
        "name": name,
        "architectures": list(entry.architectures),
        "toolchain": entry.toolchain,
        "copied_bytes": entry.copied_bytes,
        "kernels": [_summarise_kernel(kernel, plan) for _, kernel in sorted(plan.kernels.items())],
        "phases": [summarise_phase(plan, phase) for phase in list_phases(plan)],
        "memory": measure_memory(plan),
    }


def list_phases(plan: Plan) -> list[Phase]:
    """Phases in the order in which a request meets them, whatever their order in the file; "load" comes last."""
    order = {name: number for number, name in enumerate(_PHASES)}
    return sorted(plan.phases.values(), key=lambda phase: (order.get(phase.name, len(order)), phase.name))


def _summarise_kernel(kernel: Kernel, plan: Plan) -> dict[str, Any]:
    users = [
        (launch.op, choice.template)
        for phase in plan.phases.values()
        for launch in phase.launches
        for choice in launch.choices
        for used in choice.kernels
        if used.kernel == kernel.name
    ]
    return {
        "name": kernel.name,
        "operations": sorted({op for op, _ in users}),
        "templates": sorted({template for _, template in users}),
        "launches": len(users),
        "proofs": list(kernel.proofs),
        "binaries": [
            {
                "architecture": architecture,
                "registers": binary.registers,
                "shared": binary.shared,
                "spills": binary.spills,
                "num_warps": binary.num_warps,
                "ledger": highlight_ledger(kernel.expectations, binary.ledger),
            }
            for architecture, binary in sorted(kernel.binaries.items())
        ],
    }


def highlight_ledger(expectations: Mapping[str, bool], ledger: Mapping[str, int]) -> dict[str, int]:
    """Counts of the instructions that the kernel promises to hold (or, with a count of 0, not to hold)."""
    return {
        mnemonic: sum(count for name, count in ledger.items() if mnemonic in name) for mnemonic in sorted(expectations)
    }


def summarise_phase(plan: Plan, phase: Phase) -> dict[str, Any]:
    """Operations and launches of a phase; ``launches`` counts kernels and references at its typical token count.

    That count is 1 for decode and the largest of the plan for every other phase; a layer has ``layer_launches``.
    """
    tokens = 1 if phase.name == "decode" else plan.symbols.get("tokens", 1)
    layers = assign_layers(plan, phase)
    per_layer: Counter[int] = Counter()
    launches = references = 0
    for launch, layer in zip(phase.launches, layers, strict=True):
        chosen = launch.choose(tokens)
        count = len(chosen.kernels) if chosen else 1
        launches, references = launches + count, references + (chosen is None)
        if layer is not None:
            per_layer[layer] += count
    usual = Counter(per_layer.values()).most_common(1)
    return {
        "name": phase.name,
        "tokens": tokens,
        "operations": len(phase.launches),
        "launches": launches,
        "references": references,
        "layers": len(per_layer),
        "layer_launches": usual[0][0] if usual else 0,
        "arena_bytes": phase.arena_bytes,
        "by_operation": dict(sorted(Counter(launch.op for launch in phase.launches).items())),
        "without_kernel": sorted({f"{la.op}: {la.reason}" for la in phase.launches if not la.choices and la.reason}),
    }


def assign_layers(plan: Plan, phase: Phase) -> list[int | None]:
    """Layer of every launch, read from the names of its weights and caches; None outside the layers.

    A launch that reads none of them (attention's output, a residual sum) belongs to the layer around it.
    """
    return fill_layers([_read_layer(plan, launch) for launch in phase.launches])


def fill_layers(found: Sequence[int | str | None]) -> list[int | None]:
    """Give each "unknown" the layer around it: the one before and after it, None where these differ."""
    layers: list[int | None] = []
    following = _list_following(found)
    for layer, after in zip(found, following, strict=True):
        if layer == "unknown":
            before = layers[-1] if layers else None
            layer = before if before == after else None
        layers.append(layer if isinstance(layer, int) else None)
    return layers


def _list_following(found: Sequence[int | str | None]) -> list[int | str | None]:
    """For every place the first entry from there on that is known, None if there is none."""
    following: list[int | str | None] = []
    for layer in reversed(found):
        following.append((following[-1] if following else None) if layer == "unknown" else layer)
    return following[::-1]


def _read_layer(plan: Plan, launch: Launch) -> int | str | None:
    views = [view for view in launch.inputs.values() if view is not None]
    return read_layer([v.buffer for v in views if plan.buffers[v.buffer].role in _LAYER_ROLES])


def read_layer(names: Sequence[str]) -> int | str | None:
    """The number in the names of weights and caches; None if they have none, "unknown" if there are no names.

    RoPE tables and the like belong to no layer and are read by all.
    """
    numbers = [match for name in names if (match := _LAYER_NUMBER.search(name))]
    if numbers:
        return int(numbers[-1][1])
    return None if names else "unknown"


def measure_memory(plan: Plan) -> dict[str, int]:
    """Bytes of weights, of tensors derived when loading, and of the largest phase's arena.

    The weights of a streamed step are among the derived ones where one runs.
    """
    memory = {role: 0 for role in ("weight", "derived")}
    plan = plan if count_copied(plan) else drop_streams(plan)
    for buffer in plan.buffers.values():
        if buffer.role in memory:
            memory[buffer.role] += count_bytes(buffer, plan.symbols)
    return memory | {"arena": max((p.arena_bytes for p in plan.phases.values()), default=0)}


def count_bytes(buffer: Buffer, symbols: Mapping[str, int]) -> int:
    """Size of a buffer with every symbol at its largest value; a symbol without one ("pages") counts once."""
    size = getattr(torch, buffer.dtype).itemsize
    for dimension in buffer.shape:
        size *= evaluate(dimension, {"pages": 1, **symbols})
    return int(size)


def count_by_operation(passes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Number of operations after every pass: total, aten and mm, in order."""
    return [
        {
            "name": record["name"],
            "mm": sum(n for op, n in record["operations"].items() if op.startswith("mm.")),
            "other": sum(n for op, n in record["operations"].items() if not op.startswith("mm.")),
        }
        for record in passes
    ]


def read_passes(folder: Path) -> list[dict[str, Any]]:
    """The records of the passes that were dumped into ``folder``/passes, in order."""
    return [json.loads(path.read_text()) for path in sorted((folder / "passes").glob("*.json"))]
