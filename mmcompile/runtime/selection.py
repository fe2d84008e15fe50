"""Decide which target and architecture of an artifact a device runs: exact, compatible, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mmcompile.core.errors import ArtifactError
from mmcompile.core.plan import Manifest, TargetEntry

DeviceKind = Literal["cpu", "cuda", "hip"]
Match = Literal["exact", "compatible"]


@dataclass(frozen=True)
class Selection:
    """A target and, where it has binaries, the architecture to load."""

    target: str
    architecture: str | None
    match: Match


def device_kind(entry: TargetEntry) -> DeviceKind:
    """Kind of device that a target's binaries are for; a target without binaries runs on the CPU."""
    if not entry.architectures:
        return "cpu"
    return "hip" if entry.architectures[0].startswith("gfx") else "cuda"


def match_architecture(architecture: str, device: str) -> Match | None:
    """How a binary built for ``architecture`` fits a device ("9.0", "gfx950:sramecc+"); None if it does not load.

    Rules of the vendors: "sm_90a" loads only on 9.0; "sm_100f" on every 10.y with y >= 0 (its family); "sm_80" on 8.y
    with y >= 0; a gfx binary only on the same gfx.
    """
    if architecture.startswith("gfx"):
        return "exact" if architecture.split(":")[0] == device.split(":")[0] else None
    parsed = re.fullmatch(r"sm_(\d+)(\d)([af]?)", architecture)
    capability = re.fullmatch(r"(\d+)\.(\d+)", device)
    if parsed is None or capability is None:
        return None
    (major, minor), suffix = map(int, parsed.groups()[:2]), parsed[3]
    device_major, device_minor = map(int, capability.groups())
    if suffix == "a" or (major, minor) == (device_major, device_minor):
        return "exact" if (major, minor) == (device_major, device_minor) else None
    return "compatible" if major == device_major and minor <= device_minor else None


def _preference(architecture: str, match: Match) -> tuple[bool, bool, str]:
    return match != "exact", not architecture.endswith("a"), architecture


def describe_targets(manifest: Manifest) -> str:
    """Targets of an artifact in words: "cpu, sm90 (sm_90a)"."""
    return ", ".join(
        f"{name} ({', '.join(entry.architectures)})" if entry.architectures else name
        for name, entry in sorted(manifest.targets.items())
    )


def select_target(manifest: Manifest, kind: DeviceKind, device: str, target: str | None) -> Selection:
    """Choose for a device: the given target, or the best-fitting one.

    Args:
        device: compute capability "9.0", a gfx name, or "cpu". target: a name of the artifact, or None for any.

    Raises ArtifactError, saying what the artifact holds and how to build for this device, if nothing fits.
    """
    require_target(manifest, target)
    found: list[tuple[tuple[bool, bool, str], Selection]] = []
    for name in sorted(manifest.targets) if target is None else [target]:
        entry = manifest.targets[name]
        if device_kind(entry) != kind:
            continue
        if kind == "cpu":
            return Selection(name, None, "exact")
        found += _fitting(name, entry.architectures, device)
    if found:
        return min(found, key=lambda item: item[0])[1]
    raise ArtifactError(
        f"{'target ' + target if target else 'no target of the artifact'} "
        f"{'does not run' if target else 'runs'} on this device ({device}); it holds {describe_targets(manifest)}",
        fix=f"run it on one of those devices, or build it again for {device}",
    )


def _fitting(name: str, architectures: Iterable[str], device: str) -> list[tuple[tuple[bool, bool, str], Selection]]:
    matches = ((a, match_architecture(a, device)) for a in architectures)
    return [(_preference(a, match), Selection(name, a, match)) for a, match in matches if match is not None]


def require_target(manifest: Manifest, target: str | None) -> None:
    """ArtifactError if a target is named that the artifact does not hold."""
    if target is not None and target not in manifest.targets:
        raise ArtifactError(
            f"the artifact has no target {target!r}; it holds {describe_targets(manifest)}",
            fix="choose one of those, or build it again with that target",
        )
