"""Shared by the kits: operands of calls, and the folder of what is chosen for them, compiled for sm90 without a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmcompile.core.kernel import KernelSource, OpCall, Operand
from mmcompile.lower.select import Selector
from mmcompile.targets._toolchain import CompileJob, compile_many
from mmcompile.targets.sm90 import TARGET


def operand(*shape: int | str, dtype: str = "bfloat16") -> Operand:
    """A contiguous operand; only its first dimension may be a symbol."""
    inner = [math.prod(int(n) for n in shape[d + 1 :]) for d in range(len(shape))]
    return Operand(shape, tuple(inner), dtype)


def compile_launches(sources: list[KernelSource], out: Path) -> list[dict[str, Any]]:
    """Compile and write the binaries; what a launch needs to know of each."""
    launches = []
    jobs = [CompileJob(source, TARGET.spec.architectures[0], TARGET.spec) for source in sources]
    for source, compiled in zip(sources, compile_many(jobs), strict=True):
        launch = {"grid": source.grid, "arguments": [p.value for p in source.parameters]}
        launch |= {key: compiled.metadata[key] for key in ("name", "shared", "num_warps", "registers", "spills")}
        launch["early"] = "griddepcontrol.wait" in compiled.metadata["ledger"]
        launch["file"] = f"{compiled.source.name}_{compiled.source.digest[:8]}.cubin"
        (out / str(launch["file"])).write_bytes(compiled.binary)
        launches.append(launch)
    return launches


def list_choices(selector: Selector, call: OpCall, largest: int) -> list[dict[str, Any]]:
    """What is chosen for up to ``largest`` tokens, weights in the layouts that it wants; with the sources."""
    layouts = selector.propose_layouts(call)
    operands = {n: replace(o, layout=layouts[n]) if o and n in layouts else o for n, o in call.operands.items()}
    chosen, reason = selector.select(replace(call, operands=operands), largest)
    assert chosen, reason
    return [
        {"template": c.template, "max_tokens": c.max_tokens, "layouts": layouts, "sources": c.sources,
         "scratch": [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in c.scratch]}
        for c in chosen
    ]  # fmt: skip


def write_kit(
    out: Path, calls: Iterable[tuple[dict[str, Any], OpCall, int]], others: Iterable[dict[str, Any]] = ()
) -> None:
    """kit.json and the cubins for (labels, call, largest number of tokens).

    An entry is what is chosen up to a number of tokens; with "portable" what --portable would choose. others: entries
    like those of ``list_choices`` to add behind them.
    """
    out.mkdir(parents=True, exist_ok=True)
    calls, entries = list(calls), []
    for portable in (False, True):
        selector = Selector(TARGET.spec, TARGET.kernels, portable)
        for labels, call, largest in calls:
            for choice in list_choices(selector, call, largest):
                entries.append({"op": call.op, **labels, "portable": portable, **choice})
    entries += others
    sources = {source.digest: source for entry in entries for source in entry["sources"]}
    launches = dict(zip(sources, compile_launches(list(sources.values()), out), strict=True))
    for entry in entries:  # equal kernels may be given other operands: an insertion reads what a projection left
        entry["launches"] = [launches[source.digest] | {"arguments": [p.value for p in source.parameters]}
                             for source in entry.pop("sources")]  # fmt: skip
    (out / "kit.json").write_text(json.dumps(entries, indent=1))
