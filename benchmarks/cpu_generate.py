"""Tokens per second on the CPU: the artifact against transformers' generate with the same weights.

python benchmarks/cpu_generate.py [--model smollm2-135m] [--tokens 64]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers
from _common import print_table

import mmcompile
from mmcompile.capture.checkpoint import open_checkpoint
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.doors import list_models
from mmcompile.runtime import SamplingParams

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


def load_transformers(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model with the checkpoint's weights."""
    checkpoint = open_checkpoint(path)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    state = {name: checkpoint.load(name).to(dtype) for name in checkpoint.names}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)
    model.tie_weights()
    return model


def time_ours(artifact: Path, ids: list[int], tokens: int) -> tuple[float, float, list[int]]:
    """(seconds to the first token, decode tokens per second, tokens)."""
    engine = mmcompile.load(artifact, device="cpu")
    for _ in range(2):
        started = time.perf_counter()
        first = None
        produced = []
        for chunk in engine.stream(ids, SamplingParams(max_new_tokens=tokens, ignore_eos=True)):
            first = first or time.perf_counter() - started
            produced.append(chunk.token)
        total = time.perf_counter() - started
    engine.close()
    return first or total, (len(produced) - 1) / (total - (first or 0)), produced


def time_theirs(model: torch.nn.Module, ids: list[int], tokens: int) -> tuple[float, float, list[int]]:
    """The same for transformers' generate, timed through its streamer."""
    moments: list[float] = []

    class Clock(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            moments.append(time.perf_counter())

        def end(self) -> None:
            pass

    for _ in range(2):
        moments.clear()
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=Clock(),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long), pad_token_id=2,
            )  # fmt: skip
    first = moments[1] - started  # moments[0] is the prompt itself
    return first, (tokens - 1) / (moments[-1] - moments[1]), out[0, len(ids) :].tolist()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    weights = list_models()[arguments.model].find_weights(arguments.model)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("float32", "bfloat16"):
            model = load_transformers(weights, getattr(torch, dtype))
            baseline = None
            for quantization in ("none", "nvfp4"):
                out = Path(folder) / f"{dtype}-{quantization}"
                build(arguments.model, out, BuildOptions(("cpu",), quantization, dtype=dtype))
                engine = mmcompile.load(out, device="cpu")
                ids = engine.text.encode(engine.text.render_chat([{"role": "user", "content": PROMPT}]))
                engine.close()
                baseline = baseline or time_theirs(model, ids, arguments.tokens)
                first, rate, tokens = time_ours(out, ids, arguments.tokens)
                same = sum(a == b for a, b in zip(tokens, baseline[2], strict=True))
                rows.append([
                    dtype, quantization, f"{rate:.1f}", f"{baseline[1]:.1f}", f"{rate / baseline[1]:.2f}",
                    f"{first * 1e3:.0f}", f"{baseline[0] * 1e3:.0f}", f"{same}/{len(tokens)}",
                ])  # fmt: skip
    header = ["dtype", "weights", "ours tok/s", "transformers tok/s", "ratio", "ours first ms", "theirs first ms",
              "equal tokens"]  # fmt: skip
    print_table(f"{arguments.model} on the CPU, {torch.get_num_threads()} threads, batch 1", header, rows)


if __name__ == "__main__":
    main()
