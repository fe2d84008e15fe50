"""An artifact's graphs: the finished one with its weights as a captured model, and the one after any pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import fx

from mmcompile.capture.export import Captured, Input
from mmcompile.capture.tensors import require_package
from mmcompile.core.errors import ArtifactError, UsageError, unknown_name
from mmcompile.core.graph import get_parameter, set_parameter
from mmcompile.core.graph_text import read_graph
from mmcompile.core.symbols import to_expression
from mmcompile.driver.summary import read_passes
from mmcompile.interchange.plain_cache import PAGED, remove_paged_cache
from mmcompile.runtime.artifact import Artifact, open_artifact

MAIN = ("clean", "standardise", "quantize", "fuse", "layout")  # other phases work on copies of the finished graph


@dataclass(frozen=True)
class Stored:
    """A pass whose graph an artifact holds."""

    index: int
    name: str
    phase: str


def is_artifact(path: str | Path) -> bool:
    """Whether ``path`` is a directory that build wrote."""
    return (Path(path) / "manifest.json").is_file()


def reopen(path: str | Path) -> tuple[Captured, str]:
    """The finished graph of an artifact with its packed weights, without a paged cache, and the name of the last pass.

    Raises ArtifactError for an artifact that is damaged or holds no weights, LoweringError for a graph that cannot do
    without pages.
    """
    artifact = open_artifact(path)
    manifest = artifact.manifest
    if manifest.weights == "none":
        raise ArtifactError("the artifact holds no weights", where=str(path), fix="build it without --weights none")
    passes = [p for p in list_stored(artifact) if p.phase in MAIN]
    limits = {name: (2, high) for name, high in artifact.plan(min(manifest.targets)).symbols.items()}
    decoder = manifest.kind == "decoder"
    if decoder:
        limits["tokens"] = (2, manifest.model.max_context)
    graph_module = read_stored(artifact, passes[-1], limits)
    if decoder:
        remove_paged_cache(graph_module)
    _load_weights(artifact, graph_module)
    inputs = tuple(
        Input(str(n.target), tuple(map(to_expression, n.meta["val"].shape)), _name(n.meta["val"].dtype))
        for n in graph_module.graph.find_nodes(op="placeholder")
    )
    symbols = {name: limits[name] for i in inputs for name in i.shape if isinstance(name, str) and name in limits}
    last = [p.name for p in passes if p.name not in PAGED][-1]
    return Captured(graph_module, symbols, inputs, manifest.kind, manifest.model.door), last


def read_after(path: str | Path, wanted: str) -> tuple[fx.GraphModule, str]:
    """The graph after a pass of an artifact, and the name of that pass (see ``find_stored``)."""
    artifact = open_artifact(path)
    stored = find_stored(artifact, wanted)
    return read_stored(artifact, stored), stored.name


def show_pass(path: str | Path, wanted: str) -> dict[str, dict[str, str]]:
    """The graph before and after a pass of an artifact, as MLIR for reading.

    Returns: "before" and "after", each the ``pass`` that left the graph, and its ``mlir``. Raises UsageError for an
    unknown pass, and for the first one.
    """
    require_package("torch_mlir", "mlir")
    from mmcompile.interchange.mlir_view import format_mlir

    artifact = open_artifact(path)
    after = find_stored(artifact, wanted)
    sides = {"before": find_before(artifact, after), "after": after}
    return {
        side: {"pass": f"{stored.index:02d}-{stored.name}", "mlir": format_mlir(read_stored(artifact, stored))}
        for side, stored in sides.items()
    }


def list_stored(artifact: Artifact) -> list[Stored]:
    """The passes of an artifact in order. Raises ArtifactError if it holds none."""
    stored = [Stored(r["index"], r["name"], r["phase"]) for r in read_passes(artifact.root)]
    if not stored:
        raise ArtifactError("the artifact holds no passes", where=str(artifact.root), fix="build it again")
    return stored


def read_stored(
    artifact: Artifact, stored: Stored, symbols: dict[str, tuple[int, int]] | None = None
) -> fx.GraphModule:
    """The graph after a pass, weights as meta tensors. Raises ArtifactError if its text is damaged."""
    file = artifact.root / "passes" / f"{stored.index:02d}-{stored.name}.txt"
    if not file.is_file():
        raise ArtifactError("file is missing", where=str(file), fix="build the artifact again")
    return read_graph(file.read_text(), where=str(file), symbols=symbols)


def find_stored(artifact: Artifact, wanted: str) -> Stored:
    """A pass by its name (the first of several), its number, or its phase (the last of it). Raises UsageError."""
    every = list_stored(artifact)
    found = [p for p in every if wanted in (p.name, str(p.index), f"{p.index:02d}")][:1]
    found = found or [p for p in every if wanted == p.phase][-1:]
    if not found:
        raise unknown_name("pass", wanted, [p.name for p in every], where=str(artifact.root))
    return found[0]


def find_before(artifact: Artifact, stored: Stored) -> Stored:
    """The pass whose graph ``stored`` rewrote: the first decode or score pass took the finished graph.

    Raises UsageError for the first pass, whose graph is the captured one, which no artifact holds.
    """
    earlier = [p for p in list_stored(artifact) if p.index < stored.index and p.phase in (stored.phase, *MAIN)]
    if not earlier:
        raise UsageError(
            f"{stored.name} is the first pass, and the graph before it is not in the artifact",
            where=str(artifact.root),
            fix="run mmcompile export MODEL --format mm --after capture",
        )
    return earlier[-1]


def _load_weights(artifact: Artifact, graph_module: fx.GraphModule) -> None:
    """Replace the meta tensors of ``graph_module`` by the tensors of the weight files."""
    missing = {str(n.target) for n in graph_module.graph.find_nodes(op="get_attr")}
    for file in sorted(f for f in artifact.manifest.files if f.endswith(".safetensors")):
        with safe_open(artifact.root / file, framework="pt") as handle:
            for name in sorted(missing & set(handle.keys())):
                tensor, wanted = handle.get_tensor(name), get_parameter(graph_module, name)
                if (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype):
                    set_parameter(graph_module, name, tensor)
                    missing.remove(name)
    if missing:
        raise ArtifactError(
            f"{min(missing)!r} is in no weight file with its shape and dtype", where=str(artifact.root),
            fix="build the artifact again",
        )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
