"""Export: capture a model, run its passes up to a chosen one, and write the graph for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import fx

from mmcompile.capture.export import Captured
from mmcompile.capture.tensors import require_package
from mmcompile.core.errors import ArtifactError, UsageError, unknown_name
from mmcompile.core.passes import Pass, PassContext
from mmcompile.core.runner import run_passes
from mmcompile.driver.doors import open_door
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.progress import Progress, silent
from mmcompile.driver.reopen import is_artifact, read_after, reopen
from mmcompile.driver.rewrite import find_stored_scheme
from mmcompile.interchange.plain_cache import PAGED
from mmcompile.passes.pipeline import list_passes

MLIR_FORMATS = ("torch", "linalg", "stablehlo", "tosa")
FORMATS = ("onnx", *MLIR_FORMATS, "mm")  # mm: MLIR for reading, with mm operations as they are
NVFP4_FORMS = ("standard", "function")
_PHASES = ("clean", "standardise", "quantize", "fuse", "layout")
_PROTOBUF_LIMIT = 2**31 - 1


def export(
    model: str, out: Path, options: BuildOptions, *, format: str = "onnx", after: str = "layout",
    nvfp4: str = "standard", widen: bool = False, sizes: Mapping[str, int] | None = None, force: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """Write the graph of ``model`` after a pass; of an artifact, its finished graph with its packed weights.

    Args:
        format: "onnx", or a form of MLIR (see interchange.mlir_writer), as bytecode if ``out`` ends in ``.mlirbc``,
            or "mm" (see interchange.mlir_view).
        after: name of a pass, or of a phase (its last pass). The passes of the paged cache are left out. Of an
            artifact only "mm" has the graph after any pass (by name or number), as built, its paged cache included.
        nvfp4: "standard" or "function" (see interchange.onnx_writer). widen: spell bfloat16 out in fp32 in ONNX (see
            interchange.onnx_widen). sizes: symbols to fix in MLIR. force: replace a file that is there.

    Returns: facts: path, format, after, nodes, functions, inputs, outputs, bytes. Raises the MMError of what failed,
        and writes nothing then.
    """
    for kind, name, known in (("format", format, FORMATS), ("form of NVFP4 weights", nvfp4, NVFP4_FORMS)):
        if name not in known:
            raise unknown_name(kind, name, known)
    if sizes and format not in MLIR_FORMATS:
        raise UsageError(
            f"sizes stay symbols in the format {format}", fix="leave --size out, or choose a format of MLIR"
        )
    if widen and format != "onnx":
        raise UsageError(f"bfloat16 is spelled out in ONNX alone, not in {format}", fix="leave --widen out")
    built = is_artifact(model)
    if built:
        _check_artifact(model, options, format, after)
    if out.exists() and not force:
        raise ArtifactError("the output exists already", where=str(out), fix="pass --force to replace it")
    if format == "onnx":
        require_package("onnx", "onnx")
    else:
        require_package("torch_mlir", "mlir")
    if built and format == "mm":
        graph_module, last = read_after(model, after)
        facts = _export_view(graph_module, out)
    else:
        captured, last = reopen(model) if built else capture_until(model, options, after, progress)
        if format == "onnx":
            facts = _export_onnx(captured, out, Path(model).stem, nvfp4, widen)
        elif format == "mm":
            facts = _export_view(captured.graph_module, out)
        else:
            facts = _export_mlir(captured, out, format, sizes or {})
    return {"path": str(out), "format": format, "after": last, **facts, "bytes": out.stat().st_size}


def _check_artifact(model: str, options: BuildOptions, format: str, after: str) -> None:
    """Raise UsageError for options that were decided when the artifact was built."""
    if options != BuildOptions():
        raise UsageError(
            "an artifact was built with its options",
            where=model,
            fix="leave the options of a build out, or name the model",
        )
    if after != "layout" and format != "mm":
        raise UsageError(
            f"an artifact has packed weights for its finished graph alone, not for the one after {after}", where=model,
            fix="leave --after out, name the model, or read it with --format mm",
        )  # fmt: skip


def capture_until(model: str, options: BuildOptions, after: str, progress: Progress) -> tuple[Captured, str]:
    """A captured model whose graph went through the passes up to ``after``, and the name of the last one."""
    progress("capture", model, 0, 1)
    captured = open_door(model, options)
    stored = find_stored_scheme(captured)
    passes = _choose(list_passes(captured.kind, options.quantization, stored=stored), after)
    longest = captured.config.get("max_positions", options.max_context)
    context = PassContext(
        max_context=min(options.max_context, longest),
        quantization=options.quantization,
        quantization_options=options.quantization_options,
        checkpoint_nvfp4=captured.nvfp4,
        checkpoint_mxfp8=captured.mxfp8,
    )
    run_passes(captured.graph_module, passes, context, disabled=options.disabled, required=options.required)
    return captured, passes[-1].name if passes else "capture"


def _export_onnx(captured: Captured, out: Path, name: str, nvfp4: str, widen: bool) -> dict[str, Any]:
    import onnx

    from mmcompile.interchange.onnx_widen import widen_bfloat16
    from mmcompile.interchange.onnx_writer import list_functions, write_onnx

    made = write_onnx(captured.graph_module, name=name, nvfp4=nvfp4)  # type: ignore[arg-type]
    if made.ByteSize() > _PROTOBUF_LIMIT:
        raise UsageError("the model exceeds 2 GB, the limit of an ONNX file without external data", fix="quantize it")
    if widen:
        made = widen_bfloat16(made)
    onnx.checker.check_model(made, full_check=True)
    _write(out, lambda stream: stream.write(made.SerializeToString(deterministic=True)))
    return {
        "nodes": len(made.graph.node),
        "functions": list_functions(made),
        "inputs": [v.name for v in made.graph.input],
        "outputs": [v.name for v in made.graph.output],
    }


def _export_mlir(captured: Captured, out: Path, form: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    from mmcompile.interchange.mlir_writer import make_mlir

    made = make_mlir(captured.graph_module, form=form, sizes=sizes, limits=captured.symbols)
    _write(out, lambda stream: made.write(stream, bytecode=out.suffix == ".mlirbc"))
    return {"nodes": made.nodes, "functions": [], "inputs": list(made.inputs), "outputs": list(made.outputs)}


def _export_view(graph_module: fx.GraphModule, out: Path) -> dict[str, Any]:
    from mmcompile.interchange.mlir_view import format_mlir

    text = format_mlir(graph_module).encode()
    _write(out, lambda stream: stream.write(text))
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
    inputs = [str(n.target) for n in graph_module.graph.find_nodes(op="placeholder")]
    return {"nodes": len(nodes), "functions": [], "inputs": inputs, "outputs": []}


def _choose(passes: list[Pass], after: str) -> list[Pass]:
    """Passes up to and with ``after``, without those of the paged cache."""
    if after in PAGED:
        raise UsageError(f"{after} belongs to the paged cache of the runtime, which no file has", fix="choose another")
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


def _write(out: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """A file that appears whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with part.open("wb") as stream:
            fill(stream)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
