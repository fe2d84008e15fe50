"""Compile decode steps in one launch for sm90 without a GPU, for h200_mono.py to check and time on one.

python benchmarks/mono_kit.py -o kit
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from mmcompile.targets._toolchain import CompileJob, compile_many
from mmcompile.targets._tuned.stream_emit import emit_stream
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_shape import StepShape
from mmcompile.targets.sm90 import TARGET

DENSE = {
    "llama-3.2-1b": StepShape(16, 2048, 32, 8, 64, 8192, 128256),
    "llama-3-8b": StepShape(32, 4096, 32, 8, 128, 14336, 128256),
}
MODELS = DENSE | {f"{name}-nvfp4": dataclasses.replace(s, weight_format="nvfp4") for name, s in DENSE.items()}
TOKENS = (1, 2, 4, 8)


def list_shapes(variants: list[str], only: list[str]) -> dict[str, StepShape]:
    """By name: every model at every number of tokens (or ``only`` some); variants besides, for tuning."""
    shapes = {
        f"{name}:{tokens}": dataclasses.replace(shape, max_tokens=tokens)
        for name, shape in MODELS.items()
        for tokens in TOKENS
        if not only or f"{name}:{tokens}" in only
    }
    for variant in variants:
        name, tokens, *settings = variant.split(":")
        values = {field: json.loads(value) for field, _, value in (s.partition("=") for s in settings)}
        values = {field: tuple(value) if isinstance(value, list) else value for field, value in values.items()}
        shapes[variant] = dataclasses.replace(MODELS[name], max_tokens=int(tokens), **values)
    return shapes


def main() -> None:
    """Compile and write kit.json and the cubins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--variant", action="append", default=[], help='e.g. "llama-3.2-1b:1:prefetch=[0,0,0,0]"')
    parser.add_argument("--only", action="append", default=[], help='e.g. "llama-3.2-1b:1"; all by default')
    arguments = parser.parse_args()
    arguments.o.mkdir(parents=True, exist_ok=True)
    shapes = list_shapes(arguments.variant, arguments.only)
    architecture = TARGET.spec.architectures[0]
    sources = {name: emit_stream(shape, architecture) for name, shape in shapes.items()}
    jobs = [CompileJob(source, architecture, TARGET.spec) for source in sources.values()]
    entries = []
    for (name, source), compiled in zip(sources.items(), compile_many(jobs), strict=True):
        facts = compiled.metadata
        assert not facts["spills"], (name, facts["spills"])
        file = f"{source.digest}.cubin"
        (arguments.o / file).write_bytes(compiled.binary)
        entries.append({
            "name": name, "shape": dataclasses.asdict(shapes[name]), "file": file, "symbol": facts["name"],
            "shared": facts["shared"], "arguments": [p.value for p in source.parameters],
            "registers": facts["registers"],
        })  # fmt: skip
        print(name, facts["registers"], "registers,", StepPlan(shapes[name]).slots, "slots")
    (arguments.o / "kit.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
