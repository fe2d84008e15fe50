"""The verb ``quantize``: a checkpoint becomes a quantized one, for this project and for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mmcompile.cli.build import parse_options
from mmcompile.cli.console import Debug, Json, emit
from mmcompile.cli.progress import show_progress

_EPILOG = """[b]Examples[/b]

mmcompile quantize path/to/MiniMax-M3-bf16 --quant nvfp4_mxfp8 -o m3-nvfp4

mmcompile quantize path/to/hf-checkpoint --quant nvfp4 --quant-option method=search -o out

mmcompile quantize path/to/MiniMax-M3-bf16 --quant nvfp4_mxfp8 --layout minimax -o m3-mxfp8   # experts in MXFP8 too

mmcompile build m3-nvfp4 --target sm100 -o artifact   # takes the codes over as they are, no --quant
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("quantize", epilog=_EPILOG)(quantize)


def quantize(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face directory with safetensors, sharded or not.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to create.")],
    quant: Annotated[str, typer.Option(help="Quantization: nvfp4 or nvfp4_mxfp8.", metavar="SCHEME")] = "nvfp4_mxfp8",
    quant_option: Annotated[
        list[str] | None, typer.Option(help="Option of the scheme; repeat for several.", metavar="KEY=VALUE")
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="Names and scales: modelopt (weight_scale_2; MXFP8 weight_scale_inv), compressed-tensors "
            "(weight_packed, weight_global_scale), or minimax (all in MXFP8, weight_scale_inv)."
        ),
    ] = "modelopt",
    shard_size: Annotated[float, typer.Option(help="Largest shard in GB.")] = 5.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize a checkpoint, tensor by tensor: memory holds one at a time, however large the checkpoint is.

    Which layers, and why others stay, is decided on the model's graph, as by build --quant. Weights that are quantized
    already are checked and taken over. Nothing appears at --out before all is written.
    """
    from mmcompile.core.errors import UsageError
    from mmcompile.driver import BuildOptions
    from mmcompile.driver.quantize import quantize_checkpoint

    if not shard_size > 0:
        raise UsageError(f"--shard-size {shard_size} is no size", fix="write e.g. --shard-size 5")
    options = BuildOptions(quantization=quant, quantization_options=parse_options(quant_option, "--quant-option"))
    with show_progress(silent=as_json) as watch:
        facts = quantize_checkpoint(
            checkpoint, out, options, layout=layout, shard_bytes=int(shard_size * 1e9), progress=watch
        )

    def view(console: Console) -> None:
        weights = ", ".join(f"{count} {form}" for form, count in facts["weights"].items() if count)
        before, after = facts["bytes_before"] / 1e9, facts["bytes"] / 1e9
        console.print(
            f"Wrote {facts['path']}: {weights}; {before:.3g} GB became {after:.3g} GB, {facts['files']} files."
        )
        for reason in dict.fromkeys(facts["kept"].values()):
            names = [name for name, other in facts["kept"].items() if other == reason]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            console.print(f"Not quantized: {names[0]}{more}: {reason}", markup=False)

    emit(facts | {"seconds": round(watch.total, 2)}, as_json, view)
