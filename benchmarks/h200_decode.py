"""Decode tokens per second on an NVIDIA GPU: artifacts against transformers under torch.compile with CUDA graphs.

The artifacts are built elsewhere, without a GPU; this script needs neither Triton nor the compiler:

    python benchmarks/h200_decode.py --config config.json --dense ART_BF16 --artifact ART_BF16 --artifact ART_NVFP4

``--dense``: the artifact whose weights (bf16, unquantized) transformers gets. ``--config``: its Hugging Face config.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from _common import print_table
from safetensors import safe_open

import mmcompile
from mmcompile.runtime import SamplingParams

CONTEXT = 512


def load_dense(artifact: Path, config_path: Path) -> torch.nn.Module:
    """transformers' Llama with the artifact's weights: merged layers are split again by their row counts."""
    config = transformers.LlamaConfig(**json.loads(config_path.read_text()))
    state = {}
    for file in sorted((artifact / "weights").glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            state |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    own = model.state_dict()
    for name in [n for n in state if n not in own and n != "cos_sin_table"]:
        folder, _, leaves = name.removesuffix(".weight").rpartition(".")
        parts = [part for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if part in leaves]
        sizes = [own[f"{folder}.{part}.weight"].shape[0] for part in parts]
        for part, rows in zip(parts, state[name].split(sizes), strict=True):
            own[f"{folder}.{part}.weight"].copy_(rows)
    for name in own.keys() & state.keys():
        own[name].copy_(state[name])
    model.tie_weights()
    return model.cuda().eval()


def time_transformers(model: torch.nn.Module, batch: int, steps: int, mode: str) -> float:
    """Seconds per decode step: static cache, torch.compile in ``mode``, CUDA graphs."""
    torch._dynamo.reset()
    cache = transformers.StaticCache(config=model.config, max_cache_len=CONTEXT + 256)
    compiled = torch.compile(model.forward, mode=mode, fullgraph=True, dynamic=False)
    ids = torch.randint(10, 1000, (batch, CONTEXT), device="cuda")
    with torch.inference_mode():
        position = torch.arange(CONTEXT, device="cuda")
        out = model(ids, past_key_values=cache, cache_position=position, use_cache=True, logits_to_keep=1)
        token, times = out.logits[:, -1:].argmax(-1), []
        for i in range(steps + 10):
            place = torch.tensor([CONTEXT + i], device="cuda")
            torch.cuda.synchronize()
            started = time.perf_counter()
            out = compiled(token, past_key_values=cache, cache_position=place, use_cache=True)
            token = out.logits[:, -1:].argmax(-1).clone()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return statistics.median(times[10:])


def time_ours(path: Path, batch: int, steps: int) -> tuple[float, float]:
    """(seconds per engine step, seconds per replayed CUDA graph)."""
    engine = mmcompile.load(path, device="cuda", max_batch=batch)
    generator = torch.Generator().manual_seed(0)
    for _ in range(batch):
        ids = torch.randint(10, 1000, (CONTEXT,), generator=generator).tolist()
        engine.add(ids, SamplingParams(max_new_tokens=steps + 20, ignore_eos=True))
    times = []
    for i in range(batch + steps + 10):
        started = time.perf_counter()
        events = engine.step()
        if len(events) == batch and i > 10:
            times.append(time.perf_counter() - started)
        if len(times) == steps:
            break
    replay = engine.time_decode_graph(200)
    engine.close()
    return statistics.median(times), replay


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--artifact", type=Path, action="append", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--mode", nargs="+", default=["reduce-overhead"])
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__)
    model = load_dense(arguments.dense, arguments.config)
    rows = []
    for batch in arguments.batch:
        theirs = {m: time_transformers(model, batch, arguments.steps, m) for m in arguments.mode}
        best = min(theirs.values())
        for artifact in arguments.artifact:
            ours, replay = time_ours(artifact, batch, arguments.steps)
            row = [f"{artifact.name}, batch {batch}", f"{batch / ours:.0f}", f"{ours * 1e6:.0f}", f"{replay * 1e6:.0f}"]
            rows.append([*row, *(f"{s * 1e6:.0f}" for s in theirs.values()), f"{best / ours:.2f}"])
            print(rows[-1], flush=True)
    header = ["artifact", "tok/s", "step us", "graph us", *(f"transformers {m} us" for m in arguments.mode), "ratio"]
    print_table(f"Decode at context {CONTEXT}", header, rows)


if __name__ == "__main__":
    main()
