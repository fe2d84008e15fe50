"""report.html: one self-contained page on what became of a model; equal builds give equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmcompile.core.plan import Manifest, Plan
from mmcompile.driver.summary import read_passes, summarise


def write_report(folder: Path, manifest: Manifest, plans: Mapping[str, Plan]) -> None:
    """Write ``folder``/report.html from the manifest, the plans by target and the dumped passes."""
    summary = summarise(manifest, plans, read_passes(folder))
    (folder / "report.html").write_text(str(summary), encoding="utf-8")
