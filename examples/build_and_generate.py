"""From Python: build an artifact for the CPU and generate from it, with nothing but mmcompile.

    python examples/build_and_generate.py                # SmolLM2-135M if its weights are installed
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from mmcompile.driver import BuildOptions, build
from mmcompile.runtime import Engine, SamplingParams, load


def main(model: str = "smollm2-135m", prompt: str | list[int] = "Once upon a time") -> list[int]:
    """Build ``model`` with NVFP4 weights, stream a continuation of ``prompt``, and return its tokens."""
    with tempfile.TemporaryDirectory() as folder:
        options = BuildOptions(targets=("cpu",), quantization="nvfp4", max_context=256)
        path = build(model, Path(folder) / "artifact", options, progress=lambda *step: print(*step, file=sys.stderr))
        engine = load(path, device="cpu")
        assert isinstance(engine, Engine)
        tokens: list[int] = []
        for chunk in engine.stream(prompt, SamplingParams(max_new_tokens=24)):
            if chunk.token is not None:
                tokens.append(chunk.token)
            print(chunk.text or chunk.token, end="" if chunk.text else " ", flush=True)
        print()
        engine.close()
    return tokens


if __name__ == "__main__":
    main()
