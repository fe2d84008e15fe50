"""Check artifacts on an NVIDIA GPU against the CPU: greedy text, determinism, independence of the batch, sampling.

python benchmarks/h200_check.py ARTIFACT ... [--tokens 48] [--short]      (exit code 1 if anything disagrees)
"""

from __future__ import annotations

import argparse
import sys

import torch

import mmcompile
from mmcompile.runtime import Engine, SamplingParams

PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Explain in two sentences why the sky is blue.",
    "Name three fruits that are red, and say for each of them what one can cook with it in the winter months.",
]


def encode(engine: Engine, prompt: str) -> list[int]:
    """Token ids of a chat prompt."""
    return engine.text.encode(engine.text.render_chat([{"role": "user", "content": prompt}]))


def find_gap(cpu: Engine, ids: list[int], gpu_token: int, cpu_token: int) -> tuple[float, float]:
    """How far apart the CPU's logits of the two tokens are, and what bf16 rounding can move there."""
    handles, logits = cpu.prefill([ids])
    cpu.release(handles)
    row = logits[0].float()
    eps = torch.finfo(torch.bfloat16).eps
    return float(row[cpu_token] - row[gpu_token]), 2 * eps * float(row.abs().max())


def check_artifact(path: str, tokens: int, short: bool) -> bool:
    """Print what was found; True if all is well."""
    gpu = mmcompile.load(path, device="cuda")
    print(path, gpu.describe()["device"], flush=True)
    prompts = PROMPTS[:1] if short else PROMPTS
    ids = [encode(gpu, p) for p in prompts]
    greedy = SamplingParams(max_new_tokens=tokens)
    alone = [gpu.generate([i], greedy)[0] for i in ids]
    for result in alone:
        print("  ", repr(result.text[:100]))
    if short:
        gpu.close()
        return True
    cpu = mmcompile.load(path, device="cpu")
    good = True
    for prompt, i, result in zip(prompts, ids, alone, strict=True):
        want = cpu.generate([i], greedy)[0]
        if list(result.tokens) == list(want.tokens):
            print(f"  equal to the CPU for {len(want.tokens)} tokens: {prompt!r}")
            continue
        first = next(n for n, (a, b) in enumerate(zip(result.tokens, want.tokens, strict=False)) if a != b)
        gap, rounding = find_gap(cpu, i + list(want.tokens[:first]), result.tokens[first], want.tokens[first])
        verdict = "within bf16 rounding" if abs(gap) <= rounding else "NOT explained by rounding"
        good &= verdict.startswith("within")
        print(f"  token {first} of {prompt!r} differs: logits {gap:.4f} apart, rounding {rounding:.4f}: {verdict}")
    again = gpu.generate(ids, greedy)
    same = [list(a.tokens) == list(b.tokens) for a, b in zip(alone, again, strict=True)]
    print(f"  batch of {len(ids)} equals each alone: {same}")
    repeat = gpu.generate(ids, greedy)
    deterministic = [list(a.tokens) for a in again] == [list(b.tokens) for b in repeat]
    print(f"  run to run equal: {deterministic}")
    sampled = SamplingParams(max_new_tokens=tokens, temperature=0.8, top_k=50, top_p=0.95, seed=7)
    draws = [e.generate(ids[:2], sampled) for e in (gpu, gpu, cpu)]
    seeded = [list(a.tokens) for a in draws[0]] == [list(b.tokens) for b in draws[1]]
    shared = sum(
        x == y for a, b in zip(draws[0], draws[2], strict=True) for x, y in zip(a.tokens, b.tokens, strict=False)
    )
    print(f"  sampling: run to run equal {seeded}; {shared} tokens equal to the CPU's; {draws[0][0].text[:80]!r}")
    gpu.close()
    cpu.close()
    return good and deterministic and seeded


def main() -> None:
    """Check every artifact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", nargs="+")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--short", action="store_true", help="one prompt on the GPU only (for compute-sanitizer)")
    arguments = parser.parse_args()
    results = [check_artifact(path, arguments.tokens, arguments.short) for path in arguments.artifact]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
