"""The driver: the whole story from a model to an artifact, in one function."""

from __future__ import annotations

from pathlib import Path

from mmcompile.driver.compile import compile_sources
from mmcompile.driver.doors import open_door
from mmcompile.driver.mono import find_stage_rule, propose_decode_merges, schedule_decode
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
        targets = {name: load_target(name) for name in options.targets}
        lowered, merges = {}, {}
        for name, target in targets.items():
            progress("lower", name, 0, 1)
            lowered[name] = lower_model(
                rewritten.graphs, target.spec, target.kernels, rewritten.symbols, rewritten.outputs,
                strict=options.strict, portable=options.portable, refuse_stage=find_stage_rule(target, options.mono),
            )  # fmt: skip
            merges[name] = propose_decode_merges(lowered[name], target, options.mono, options.portable)
        sources = {name: low.sources for name, low in lowered.items()}
        for name, compiled in compile_sources(sources, targets, options.workers, progress).items():
            progress("compiled", f"{name}: {compiled.describe()}", 1, 1)
            schedule_decode(lowered[name], merges[name], compiled, targets[name], options.mono)
            packer.add_target(targets[name].spec, lowered[name], compiled)
        progress("pack", str(out), 0, 1)
        packer.finish()
    return Path(out)
