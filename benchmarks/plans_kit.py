"""Build the artifacts whose decode steps h200_plans.py times: dense decoders for sm90 without a GPU, without weights.

python benchmarks/plans_kit.py -o kit [--only llama-3.2-1b] [--context 262144]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from mmcompile.driver import BuildOptions, build
from mmcompile.models import llama

NAMES = ("smollm2-135m", "llama-3.2-1b", "llama-3-8b")


def main() -> None:
    """Build one artifact for each model. The context is a property of the table of angles, so models are stretched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--context", type=int, default=262144)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    options = BuildOptions(
        targets=("sm90",), weights="none", mono="step", max_context=arguments.context, max_batch=arguments.batch,
        max_tokens=64,
    )  # fmt: skip
    for name in arguments.only:
        llama.MODELS[name] = dataclasses.replace(llama.MODELS[name], max_positions=arguments.context)
        path = build(name, arguments.o / name, options, force=True)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"{path}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
