"""Quantize a checkpoint without building: decisions of the passes, weights streamed from shards to shards."""

from __future__ import annotations

import errno
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch import fx

from mmcompile.capture.checkpoint import open_checkpoint
from mmcompile.capture.encoder import Encoding, encode_checkpoint
from mmcompile.capture.experts import find_parameter, stack_experts
from mmcompile.capture.shards import INDEX_NAME
from mmcompile.capture.tensors import Checkpoint, list_some
from mmcompile.capture.writer import Layout, write_checkpoint
from mmcompile.core.errors import ArtifactError, CheckpointError, UsageError, unknown_name
from mmcompile.core.formats import WEIGHT_FORMATS
from mmcompile.core.passes import PassContext
from mmcompile.core.runner import run_passes
from mmcompile.driver.doors import open_door
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.pack import claim_output
from mmcompile.driver.progress import Progress, silent
from mmcompile.passes.pipeline import list_passes

LAYOUTS = get_args(Layout)
_BESIDE = (".json", ".txt", ".model", ".jinja", ".md")
_REWRITTEN = ("config.json", "hf_quant_config.json", INDEX_NAME)


def quantize_checkpoint(
    source: Path, out: Path, options: BuildOptions, *, layout: str = "modelopt", shard_bytes: int = 5_000_000_000,
    progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """Write the Hugging Face directory ``source`` quantized to the directory ``out``, which must not exist.

    Args:
        options: quantization and quantization_options decide as in a build, by the model's graph. layout: see
            :func:`mmcompile.capture.writer.write_checkpoint`; "minimax", which has no NVFP4, stores experts in MXFP8.

    Weights are encoded from the dtype that they are stored in. A build of ``out`` takes its codes over as they are;
    in ModelOpt's layout they are those that a build of the bf16 checkpoint with the same quantization makes. Memory
    holds one tensor at a time (embedding tables are written whole). ``out`` appears whole or not at all.

    Returns: facts: path, layout, files, bytes, bytes before, weights by format, reasons of those that stay.
    """
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    if options.quantization == "none":
        raise UsageError("no quantization is named", fix="pass --quant, e.g. nvfp4_mxfp8")
    if not source.is_dir():
        raise CheckpointError("a checkpoint to quantize is a Hugging Face directory", where=str(source))
    if out.exists():
        raise ArtifactError("the output exists already", where=str(out), fix="remove it or name another with -o")
    checkpoint = open_checkpoint(source)
    outcomes, parameters = _decide(source, options, progress)
    _check_complete(checkpoint, parameters)
    formats, reasons = {}, {}
    for name in checkpoint.tensors:
        outcome = outcomes.get(find_parameter(name, parameters), "")
        if outcome in WEIGHT_FORMATS:
            formats[name] = "mxfp8" if layout == "minimax" else outcome
        elif outcome:
            reasons[name] = outcome
    given = options.quantization_options
    convention = "compressed-tensors" if layout == "compressed-tensors" else "modelopt"
    encoding = Encoding(given.get("method", "max6"), given.get("rule", "modelopt"), convention)
    told: Counter[str] = Counter()
    totals: Counter[str] = Counter()

    def report(step: str, name: str) -> None:
        told[step] += 1
        progress(step, name, told[step], totals[step])

    made = encode_checkpoint(checkpoint, formats, encoding, report)
    totals.update(measure=len(made.nvfp4), quantize=len(made.tensors) + len(made.nvfp4) + len(made.mxfp8))
    files = _write(made, source, out, layout, shard_bytes)
    return {
        "path": str(out), "layout": layout, "files": len(files),
        "bytes": sum((out / f.name).stat().st_size for f in files), "bytes_before": _count_bytes(checkpoint),
        "weights": {"nvfp4": len(made.nvfp4), "mxfp8": len(made.mxfp8), "plain": len(made.tensors)},
        "kept": dict(sorted(reasons.items())),
    }  # fmt: skip


def _decide(source: Path, options: BuildOptions, progress: Progress) -> tuple[dict[str, str], set[str]]:
    """The outcome of every weight by parameter (a format, or why not), and the names of all parameters."""
    progress("capture", str(source), 0, 1)
    captured = open_door(str(source), replace(options, weights="none"))
    parameters = _name_parameters(captured.graph_module)
    passes = list_passes(captured.kind, options.quantization)
    last = next(i for i, p in enumerate(passes) if p.phase == "quantize")
    context = PassContext(
        quantization=options.quantization,
        quantization_options=options.quantization_options,
        page_size=captured.config.get("block_size", PassContext.page_size),
    )
    run_passes(captured.graph_module, passes[: last + 1], context, disabled=options.disabled)
    return context.info.get("layers", {}), parameters


def _name_parameters(graph_module: fx.GraphModule) -> set[str]:
    return {name for name, _ in graph_module.named_parameters()}


def _check_complete(checkpoint: Checkpoint, parameters: set[str]) -> None:
    """Raise CheckpointError if an expert or another parameter is missing."""
    spelled = stack_experts(checkpoint, parameters)
    stored = {*spelled.tensors, *spelled.experts, *(f"{m}.weight" for m in (*spelled.nvfp4, *spelled.mxfp8))}
    if missing := parameters - stored:
        raise CheckpointError(
            f"missing tensors: {list_some(missing)}",
            where=checkpoint.where,
            fix="finish the download, or check that config.json belongs to these weights",
        )


def _count_bytes(checkpoint: Checkpoint) -> int:
    parts = [*checkpoint.tensors.values()]
    parts += [lazy for p in checkpoint.nvfp4.values() for lazy in (p.packed, p.scale, p.global_scale)]
    parts += [lazy for s in checkpoint.mxfp8.values() for lazy in (s.values, s.scale)]
    return sum(math.prod(lazy.shape) * lazy.dtype.itemsize for lazy in parts)


def _write(made: Checkpoint, source: Path, out: Path, layout: str, shard_bytes: int) -> list[Path]:
    """Write into a folder beside ``out`` and rename it; on any failure nothing is left."""
    needed = _count_bytes(made)
    full = f"{out.parent} has no room for {needed / 1e9:.1f} GB"
    out.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(out.parent).free < needed:
        raise ArtifactError(full, where=str(out), fix="free space there or name another directory with -o")
    try:
        with claim_output(out, force=False) as folder:
            files = write_checkpoint(folder, made, layout, shard_bytes=shard_bytes)
            for path in sorted(source.iterdir()):
                if path.is_file() and path.suffix in _BESIDE and path.name not in _REWRITTEN:
                    shutil.copy2(path, folder / path.name)
    except OSError as error:
        what = full if error.errno == errno.ENOSPC else f"the output cannot be written: {error.strerror}"
        raise ArtifactError(what, where=str(out), fix="name another directory with -o") from error
    return files
