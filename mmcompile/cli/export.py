"""The verb ``export``: the graph of a model after a pass, as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mmcompile.cli.build import parse_options, split_list
from mmcompile.cli.console import Debug, Json, emit
from mmcompile.cli.progress import show_progress
from mmcompile.core.errors import UsageError

_EPILOG = """[b]Examples[/b]

mmcompile export smollm2-135m --format onnx --after standardise --dtype float32 -o smollm2.onnx

mmcompile export smollm2-135m --quant nvfp4 --dtype float32 --nvfp4 function -o smollm2-nvfp4.onnx

mmcompile export smollm2-135m --format linalg --size tokens=1 --dtype float32 -o decode.mlirbc

mmcompile export out --format onnx -o out.onnx   # an artifact: its finished graph with its packed weights

mmcompile export smollm2-tiny --format mm --after linear_swiglu -o after.mlir   # diff with the pass before it
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("export", epilog=_EPILOG)(export)


def export(
    model: Annotated[
        str, typer.Argument(help="A name, HF directory or config.json, .gguf, .onnx, file.py:factory; or an artifact.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to create.")],
    format: Annotated[str, typer.Option(help="onnx; MLIR: torch, linalg, stablehlo, tosa; or mm, to read.")] = "onnx",
    after: Annotated[str, typer.Option(help="Pass or phase after which the graph is taken; or capture.")] = "layout",
    quant: Annotated[str, typer.Option(help="Quantization scheme: none or nvfp4.", metavar="SCHEME")] = "none",
    quant_option: Annotated[
        list[str] | None, typer.Option(help="Option of the scheme; repeat for several.", metavar="KEY=VALUE")
    ] = None,
    nvfp4: Annotated[
        str, typer.Option(help="NVFP4 weights as standard FLOAT4E2M1, or by a function over bytes: standard, function.")
    ] = "standard",
    widen: Annotated[
        bool, typer.Option("--widen", help="ONNX: bfloat16 by fp32 kernels, each result rounded, for CPU runtimes.")
    ] = False,
    size: Annotated[
        list[str] | None,
        typer.Option(help="Fix a size in MLIR, e.g. tokens=1 or past=0; others are dynamic.", metavar="NAME=N"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations: bfloat16, float16, float32.")] = "bfloat16",
    max_context: Annotated[int, typer.Option(help="Tokens per sequence (length of RoPE tables).")] = 2048,
    weights: Annotated[str, typer.Option(help="auto, real or random.")] = "auto",
    disable: Annotated[
        list[str] | None, typer.Option(help="A pass to leave out; repeat for several.", metavar="PASS")
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="Fix a dimension or input of an ONNX model; repeat.", metavar="NAME=VALUE")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the graph of a model after a pass: standard operators, and mm functions with bodies where there are none.

    A decoder takes its cache as past_key_<i> and past_value_<i> and gives the new one back, for prefill and decode.
    MLIR goes out through torch-mlir, mm operations by their references, as bytecode if the file ends in .mlirbc.
    """
    from mmcompile.driver import BuildOptions
    from mmcompile.driver.export import export as run_export

    options = BuildOptions(
        quantization=quant,
        quantization_options=parse_options(quant_option, "--quant-option"),
        dtype=dtype,
        max_context=max_context,
        weights=weights,
        disabled=tuple(split_list(disable or ())),
        seed=seed,
        fixed=parse_options(fix, "--fix"),
    )
    with show_progress(silent=as_json) as watch:
        facts = run_export(
            model, out, options, format=format, after=after, nvfp4=nvfp4, widen=widen, sizes=_parse_sizes(size),
            force=force, progress=watch,
        )  # fmt: skip

    def view(console: Console) -> None:
        functions = ", ".join(facts["functions"]) or "none"
        console.print(
            f"Wrote {facts['path']} after {facts['after']}: {facts['nodes']} nodes, mm functions: {functions}."
        )

    emit(facts, as_json, view)


def _parse_sizes(texts: list[str] | None) -> dict[str, int]:
    sizes = parse_options(texts, "--size")
    for name, value in sizes.items():
        if type(value) is not int:
            raise UsageError(f"--size {name} takes a whole number, not {value!r}", fix="write e.g. --size tokens=1")
    return sizes
