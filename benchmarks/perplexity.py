"""Perplexity of SmolLM2-135M on a fixed public-domain text: bf16 weights against NVFP4 weights.

python benchmarks/perplexity.py [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

from _common import TEXT, print_table

import mmcompile
from mmcompile.driver import BuildOptions, build

CASES = {
    "as captured": ("none", {}),
    "nvfp4, max6": ("nvfp4", {"method": "max6"}),
    "nvfp4, search": ("nvfp4", {"method": "search"}),
    "nvfp4, search, lm_head too": ("nvfp4", {"method": "search", "lm_head": True}),
}


def measure(model: str, dtype: str, quantization: str, options: dict[str, object], folder: Path) -> tuple[float, int]:
    """Perplexity and number of scored tokens."""
    build(model, folder, BuildOptions(("cpu",), quantization, options, dtype=dtype, score=True))
    engine = mmcompile.load(folder, device="cpu")
    scores = engine.score(engine.text.encode(TEXT.read_text()))
    engine.close()
    return math.exp(-float(scores.double().mean())), len(scores)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    rows, reference = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, (scheme, options)) in enumerate(CASES.items()):
            value, count = measure(arguments.model, arguments.dtype, scheme, options, Path(folder) / str(i))
            reference = reference or value
            rows.append([name, f"{value:.3f}", f"{value / reference:.4f}", count])
    print_table(f"{arguments.model}, {arguments.dtype}, perplexity on {TEXT.name}",
                ["weights", "perplexity", "ratio", "tokens"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
