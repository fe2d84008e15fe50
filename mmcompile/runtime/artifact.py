"""Open an artifact directory: manifest, plans, kernels and weights, every file checked against its sha256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmcompile.core.errors import ArtifactError, UsageError
from mmcompile.core.plan import SCHEMA_VERSION, Binary, Buffer, Manifest, Plan, Record, seal
from mmcompile.runtime.executor import torch_dtype
from mmcompile.runtime.layouts import check_cache_layouts, check_streams, check_weight_layouts, place_weight
from mmcompile.runtime.random_weights import RandomWeights

MANIFEST = "manifest.json"
_REBUILD = "rebuild the artifact, or copy it again from its source"

R = TypeVar("R", bound=Record)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"not valid JSON ({error})", where=str(path), fix=_REBUILD) from None
    if not isinstance(data, dict):
        raise ArtifactError("not a JSON object", where=str(path), fix=_REBUILD)
    return data


def _read_record(path: Path, kind: type[R]) -> R:
    """Parse a file as ``kind``; the schema version is looked at first, so that it is what gets reported."""
    data = _read_json(path)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"schema version {version!r}, but this mmcompile reads version {SCHEMA_VERSION}",
            where=str(path),
            fix="rebuild the artifact with this mmcompile, or install the version that wrote it",
        )
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{key}: {first['msg']}", where=str(path), fix=_REBUILD) from None


def _check_files(root: Path, files: dict[str, str]) -> None:
    """Compare every file with its recorded sha256."""
    for name, expected in sorted(files.items()):
        path = root / name
        if not path.resolve().is_relative_to(root.resolve()):
            raise ArtifactError(f"{name!r} lies outside the artifact", where=str(root / MANIFEST), fix=_REBUILD)
        if not path.is_file():
            raise ArtifactError("file is missing", where=str(path), fix=_REBUILD)
        with path.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
        if actual != expected:
            raise ArtifactError(
                f"file is damaged: sha256 {actual[:12]}..., the manifest says {expected[:12]}...",
                where=str(path),
                fix=_REBUILD,
            )


@dataclass(frozen=True)
class Artifact:
    """An opened artifact whose files have all been checked."""

    root: Path
    manifest: Manifest
    _plans: dict[str, Plan] = field(default_factory=dict, repr=False)

    def plan(self, target: str) -> Plan:
        """Plan of one of ``manifest.targets``. Raises ArtifactError if it is malformed or inconsistent."""
        if target not in self._plans:
            path = self.root / self._listed(self.manifest.targets[target].plan, f"plan of {target}")
            plan = _read_record(path, Plan)
            if plan.target != target:
                raise ArtifactError(
                    f"plan is for target {plan.target!r}, not {target!r}", where=str(path), fix=_REBUILD
                )
            _check_names(plan, path)
            check_cache_layouts(plan, self.manifest.cache, str(path))
            check_weight_layouts(plan, str(path))
            check_streams(plan, str(path))
            self._plans[target] = plan
        return self._plans[target]

    def read_binary(self, kernel: str, binary: Binary) -> bytes:
        """Bytes of a compiled kernel (cubin or hsaco), compared with the sha256 that the plan records."""
        path = self.root / self._listed(binary.file, f"binary of kernel {kernel}")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != binary.sha256:
            raise ArtifactError(f"not the binary that the plan names for {kernel}", where=str(path), fix=_REBUILD)
        return data

    def read_weights(self, plan: Plan, random_weights: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the buffers of role "weight", memory-mapped, read one after the other, in their buffers' layouts.

        ``random_weights``: the seed of what an artifact that was built without weights lacks.
        Raises ArtifactError if the artifact was built without weights and no seed is given, or one is missing or of
        another shape or dtype; UsageError on a seed where the artifact has weights.
        """
        wanted = {name for name, buffer in plan.buffers.items() if buffer.role == "weight"}
        if wanted and self.manifest.weights == "none" and random_weights is None:
            raise ArtifactError(
                "the artifact holds no weights, so it can be inspected but not run",
                where=str(self.root / MANIFEST),
                fix="build it again with weights, or run it with random ones (--random-weights SEED)",
            )
        if self.manifest.weights == "packed" and random_weights is not None:
            raise UsageError("random weights for an artifact that has its own", fix="leave out --random-weights")
        found = self._read_weights(plan, wanted, random_weights)
        return ((name, place_weight(plan.buffers[name], tensor)) for name, tensor in found)

    def _read_weights(self, plan: Plan, wanted: set[str], seed: int | None) -> Iterator[tuple[str, Tensor]]:
        for file in sorted(f for f in self.manifest.files if f.startswith("weights/") and f.endswith(".safetensors")):
            path = self.root / file
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in sorted(wanted & set(handle.keys())):
                        wanted.remove(name)
                        yield name, _checked_weight(plan.buffers[name], handle.get_tensor(name), path)
            except SafetensorError as error:
                raise ArtifactError(f"not a safetensors file ({error})", where=str(path), fix=_REBUILD) from None
        if seed is not None:
            yield from RandomWeights(plan, seed).generate(sorted(wanted))
        elif wanted:
            raise ArtifactError(
                f"{len(wanted)} weights are in no weight file, e.g. {min(wanted)!r}",
                where=str(self.root / "weights"),
                fix=_REBUILD,
            )

    def _listed(self, file: str, what: str) -> str:
        if file not in self.manifest.files:
            raise ArtifactError(
                f"{file!r} ({what}) is not in the manifest's list of files",
                where=str(self.root / MANIFEST),
                fix=_REBUILD,
            )
        return file


def _checked_weight(buffer: Buffer, tensor: Tensor, path: Path) -> Tensor:
    if tuple(tensor.shape) != buffer.shape or tensor.dtype != torch_dtype(buffer):
        raise ArtifactError(
            f"weight {buffer.name!r} is {tensor.dtype} {list(tensor.shape)}, "
            f"the plan says {buffer.dtype} {list(buffer.shape)}",
            where=str(path),
            fix=_REBUILD,
        )
    return tensor


def _check_names(plan: Plan, path: Path) -> None:
    """Every buffer and kernel that a phase names must exist."""
    for phase in plan.phases.values():
        for launch in phase.launches:
            kernels = [k for choice in launch.choices for k in choice.kernels]
            views = [*launch.inputs.values(), *launch.outputs, *(a for k in kernels for a in k.arguments)]
            buffers = {v.buffer for v in views if v is not None and not isinstance(v, str)}
            missing = sorted(buffers - plan.buffers.keys()) + sorted({k.kernel for k in kernels} - plan.kernels.keys())
            if missing:
                raise ArtifactError(
                    f"launch {launch.name!r} names {missing[0]!r}, which the plan does not define",
                    where=str(path),
                    fix=_REBUILD,
                )


def open_artifact(path: str | Path) -> Artifact:
    """Read the manifest of the directory ``path`` and check every file that it lists (streamed, weights too).

    Raises ArtifactError: no such directory, no manifest, another schema version, an unknown or malformed key, a
    missing or damaged file, no target.
    """
    root = Path(path)
    if not (root / MANIFEST).is_file():
        what = f"no {MANIFEST} in it" if root.is_dir() else "no such directory"
        raise ArtifactError(
            f"not an artifact: {what}", where=str(root), fix="pass a directory that `mmcompile build` wrote"
        )
    manifest = _read_record(root / MANIFEST, Manifest)
    if seal(_read_json(root / MANIFEST))["digest"] != manifest.digest:
        raise ArtifactError("the manifest is damaged: wrong digest", where=str(root / MANIFEST), fix=_REBUILD)
    if not manifest.targets:
        raise ArtifactError("the artifact holds no target", where=str(root / MANIFEST), fix=_REBUILD)
    _check_files(root, manifest.files)
    return Artifact(root, manifest)
