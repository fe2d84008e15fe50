"""The driver: the whole story from a model to an artifact, in one function."""

from __future__ import annotations

from pathlib import Path

from mmcompile.driver.compile import compile_sources
from mmcompile.driver.doors import open_door
from mmcompile.driver.mono import propose_decode_merges, schedule_decode
from mmcompile.driver.options import BuildOptions
from mmcompile.driver.pack import Packer, claim_output
from mmcompile.driver.progress import Progress, silent
from mmcompile.driver.rewrite import rewrite_model
from mmcompile.driver.targets import load_target
from mmcompile.lower.plan import lower_model

__all__ = ["BuildOptions", "build"]


def build(
    model: str, out: str | Path, options: BuildOptions, *, force: bool = False, progress: Progress = silent
) -> Path:
    """Build an artifact for one or more targets.

    Args:
        model: a name in models/, a Hugging Face directory or config.json, a .gguf file, or file.py:factory.
        out: directory to create; nothing appears there until all is done. force: replace an artifact that is there.
        progress: told of every step (see driver.progress).

    Returns: the path of the artifact. Raises the MMError of the step that failed.
    """
    with claim_output(Path(out), force) as folder:
        progress("capture", model, 0, 1)
        captured = open_door(model, options)
        progress("capture", captured.note, 1, 1)
        rewritten = rewrite_model(captured, options, folder / "passes", progress)
        packer = Packer(folder, model, captured, rewritten, options)
        for name in options.targets:
            target = load_target(name)
            progress("lower", name, 0, 1)
            lowered = lower_model(
                rewritten.graphs, target.spec, target.kernels, rewritten.symbols, rewritten.outputs,
                strict=options.strict, portable=options.portable,
            )  # fmt: skip
            merges = propose_decode_merges(lowered, target, options.mono)
            compiled = compile_sources(lowered.sources, target, options.workers, progress)
            schedule_decode(lowered, merges, compiled, target, options.mono)
            progress("compiled", compiled.describe(), 1, 1)
            packer.add_target(target.spec, lowered, compiled)
        progress("pack", str(out), 0, 1)
        packer.finish()
    return Path(out)
