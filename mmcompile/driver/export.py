"""Export: capture a model, run its passes up to a chosen one, and write the graph for other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmcompile.capture.tensors import require_package
from mmcompile.core.errors import ArtifactError, UsageError, unknown_name
from mmcompile.core.passes import Pass, PassContext
from mmcompile.core.runner import run_passes
from mmcompile.driver.doors import open_door
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.progress import Progress, silent
from mmcompile.passes.pipeline import list_passes

FORMATS = ("onnx",)
NVFP4_FORMS = ("standard", "function")
# These serve the paged cache of the runtime. An ONNX file has its cache as plain inputs and outputs instead.
PAGED = ("insert_paged_cache", "gather_last_token", "append_sampler")
_PHASES = ("clean", "standardise", "quantize", "fuse", "layout")
_PROTOBUF_LIMIT = 2**31 - 1


def export(
    model: str, out: Path, options: BuildOptions, *, format: str = "onnx", after: str = "layout",
    nvfp4: str = "standard", force: bool = False, progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """Write the graph of ``model`` after a pass.

    Args:
        after: name of a pass, or of a phase (its last pass). The passes of the paged cache are left out.
        nvfp4: "standard" or "function" (see interchange.onnx_writer). force: replace a file that is there.

    Returns: facts: path, format, after, nodes, functions, inputs, outputs, bytes. Raises the MMError of what failed,
        and writes nothing then.
    """
    for kind, name, known in (("format", format, FORMATS), ("form of NVFP4 weights", nvfp4, NVFP4_FORMS)):
        if name not in known:
            raise unknown_name(kind, name, known)
    if (Path(model) / "manifest.json").is_file():
        raise UsageError(
            "an artifact holds launches and packed weights, not a graph",
            where=model,
            fix="name the model it was built from",
        )
    if out.exists() and not force:
        raise ArtifactError("the output exists already", where=str(out), fix="pass --force to replace it")
    require_package("onnx", "onnx")
    import onnx

    from mmcompile.interchange.onnx_writer import list_functions, write_onnx

    progress("capture", model, 0, 1)
    captured = open_door(model, options)
    passes = _choose(list_passes(captured.kind, options.quantization, stored=bool(captured.nvfp4)), after)
    longest = captured.config.get("max_positions", options.max_context)
    context = PassContext(
        max_context=min(options.max_context, longest),
        quantization=options.quantization,
        quantization_options=options.quantization_options,
        checkpoint_nvfp4=captured.nvfp4,
    )
    run_passes(captured.graph_module, passes, context, disabled=options.disabled, required=options.required)
    made = write_onnx(captured.graph_module, name=Path(model).stem, nvfp4=nvfp4)  # type: ignore[arg-type]
    if made.ByteSize() > _PROTOBUF_LIMIT:
        raise UsageError("the model exceeds 2 GB, the limit of an ONNX file without external data", fix="quantize it")
    onnx.checker.check_model(made, full_check=True)
    _write(out, made.SerializeToString(deterministic=True))
    return {
        "path": str(out),
        "format": format,
        "after": passes[-1].name if passes else "capture",
        "nodes": len(made.graph.node),
        "functions": list_functions(made),
        "inputs": [v.name for v in made.graph.input],
        "outputs": [v.name for v in made.graph.output],
        "bytes": out.stat().st_size,
    }


def _choose(passes: list[Pass], after: str) -> list[Pass]:
    """Passes up to and with ``after``, without those of the paged cache."""
    if after in PAGED:
        raise UsageError(
            f"{after} belongs to the paged cache of the runtime, which ONNX does not have", fix="choose another"
        )
    if after == "capture":
        return []
    usable = [p for p in passes if p.name not in PAGED]
    if after in _PHASES:
        order = _PHASES.index(after)
        return [p for p in usable if _PHASES.index(p.phase) <= order]
    names = [p.name for p in usable]
    if after not in names:
        raise unknown_name("pass", after, [*_PHASES, "capture", *names])
    return usable[: names.index(after) + 1]


def _write(out: Path, content: bytes) -> None:
    """A file that appears whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
