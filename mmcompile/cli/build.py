"""The verb ``build``: a model becomes an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mmcompile.cli import views
from mmcompile.cli.console import Debug, Json, emit
from mmcompile.cli.progress import Watch, show_progress

_EPILOG = """[b]Examples[/b]

mmcompile build smollm2-135m --target cpu -o out

mmcompile build smollm2-135m --target sm100,gfx950 --quant nvfp4 --quant-option lm_head=true -o out

mmcompile build path/to/hf-checkpoint --target sm90 --max-context 8192 --cache-dtype float8_e4m3fn -o out

mmcompile build model.gguf --target cpu --require qk_norm_rope_insert --verify -o out

mmcompile build model.onnx --target cpu --fix batch=1 -o out

mmcompile build examples/tiny_mlp.py:factory --target cpu,sm100 -o out
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command("build", epilog=_EPILOG)(build)


def build(
    model: Annotated[
        str, typer.Argument(help="A name (mmcompile models), HF directory, config.json, .gguf, .onnx, file.py:factory.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to create.")],
    target: Annotated[
        list[str], typer.Option(help="Targets, comma-separated or repeated (mmcompile targets).", metavar="A,B")
    ] = ["cpu"],  # noqa: B006
    quant: Annotated[str, typer.Option(help="Quantization: none, nvfp4 or nvfp4_mxfp8.", metavar="SCHEME")] = "none",
    quant_option: Annotated[
        list[str] | None, typer.Option(help="Option of the scheme; repeat for several.", metavar="KEY=VALUE")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations: bfloat16, float16, float32.")] = "bfloat16",
    cache_dtype: Annotated[str, typer.Option(help="Of the KV cache: auto, a dtype, float8_e4m3fn or nvfp4.")] = "auto",
    page_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens per page of the KV cache, a power of two.", show_default="64, or the block of sparse attention"
        ),
    ] = None,
    max_context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prefill step; longer prompts go in chunks.")] = 512,
    max_batch: Annotated[int, typer.Option(help="Sequences per decode step.")] = 64,
    weights: Annotated[
        str,
        typer.Option(
            help="auto: the checkpoint's if found, else random. Or real, random, none (run takes --random-weights)."
        ),
    ] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="An operation without a kernel is an error.")] = False,
    portable: Annotated[bool, typer.Option("--portable", help="Leave tuned kernels out.")] = False,
    require: Annotated[
        list[str] | None, typer.Option(help="A rule or pass that must match; repeat for several.", metavar="NAME")
    ] = None,
    disable: Annotated[
        list[str] | None, typer.Option(help="A pass to leave out; repeat for several.", metavar="PASS")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every pass numerically with the graph before it.")
    ] = False,
    score: Annotated[
        bool, typer.Option("--score", help="Add a phase with the logits of every token, for perplexity.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random weights and verification.")] = 0,
    attention: Annotated[str, typer.Option(help="transformers' spelling to capture: sdpa or eager.")] = "sdpa",
    mono: Annotated[
        str,
        typer.Option(
            help="Merge the launches of a decode step of up to 16 tokens into one: off, layer or step (on sm90 by a "
            "tuned kernel where it can, which takes a second copy of the weights; --portable leaves it out)."
        ),
    ] = "off",
    workers: Annotated[int | None, typer.Option(help="Compiler processes [dim](default: one per core)[/dim].")] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="Fix a dimension or input of an ONNX model; repeat.", metavar="NAME=VALUE")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact that is there.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Build an artifact: capture, rewrite, quantize, lower, compile and pack, for one or more targets.

    Nothing appears at --out before all is done; equal inputs give equal bytes.
    """
    from mmcompile.driver import BuildOptions
    from mmcompile.driver import build as run_build

    options = BuildOptions(
        targets=tuple(dict.fromkeys(split_list(target))),
        quantization=quant,
        quantization_options=parse_options(quant_option, "--quant-option"),
        dtype=dtype,
        cache_dtype=cache_dtype,
        page_size=page_size,
        max_context=max_context,
        max_tokens=max_tokens,
        max_batch=max_batch,
        weights=weights,
        strict=strict,
        portable=portable,
        required=tuple(split_list(require or ())),
        disabled=tuple(split_list(disable or ())),
        verify=verify,
        score=score,
        seed=seed,
        attention=attention,
        workers=workers,
        mono=mono,
        fixed=parse_options(fix, "--fix"),
    )
    with show_progress(silent=as_json) as watch:
        path = run_build(model, out, options, force=force, progress=watch)
    _report(path, watch, as_json)


def parse_options(texts: list[str] | None, option: str) -> dict[str, Any]:
    """Repeated KEY=VALUE of an option as a dictionary; values are JSON, or else strings."""
    return dict(_parse_option(text, option) for text in texts or ())


def split_list(values: Any) -> list[str]:
    """Comma-separated and repeated names as one list."""
    return [name for value in values for name in value.split(",") if name]


def _parse_option(text: str, option: str) -> tuple[str, Any]:
    """ "lm_head=true" -> ("lm_head", True): a JSON value, or else a string."""
    from mmcompile.core.errors import UsageError

    key, equals, value = text.partition("=")
    if not key or not equals:
        example = "--fix batch=1" if option == "--fix" else "--quant-option lm_head=true"
        raise UsageError(f"{option} {text!r} is not KEY=VALUE", fix=f"write e.g. {example}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _report(path: Path, watch: Watch, as_json: bool) -> None:
    summary = views.read_summary(path)
    sizes = views.measure_files(path)
    document = {
        "path": str(path),
        "seconds": round(watch.total, 2),
        "steps": {step: round(seconds, 2) for step, seconds in watch.seconds.items()},
        "compiled": watch.compiled,
        "sizes": sizes,
        **summary,
    }

    def view(console: Console) -> None:
        views.print_build(console, path, summary, sizes, watch.compiled, watch.total)

    emit(document, as_json, view)
