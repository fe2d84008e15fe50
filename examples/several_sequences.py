"""Several sequences at once, of different lengths and with different sampling: continuous batching by hand.

    mmcompile build smollm2-135m --target cpu -o out && python examples/several_sequences.py out
"""

from __future__ import annotations

import sys

from mmcompile.runtime import Engine, SamplingParams, load

PROMPTS: list[tuple[list[int], SamplingParams]] = [
    ([1, 2, 3], SamplingParams(max_new_tokens=4)),
    ([7] * 20, SamplingParams(max_new_tokens=8, temperature=0.8, top_p=0.9, seed=1)),
    ([5, 6], SamplingParams(max_new_tokens=2, temperature=1.0, top_k=10, seed=2)),
]


def main(path: str) -> dict[int, list[int]]:
    """Serve PROMPTS together and print every token as it comes. Returns the tokens by sequence."""
    engine = load(path, device="cpu")
    assert isinstance(engine, Engine)
    tokens: dict[int, list[int]] = {engine.add(ids, params): [] for ids, params in PROMPTS}
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                tokens[event.sequence].append(event.token)
            print(f"sequence {event.sequence}: {event.token}" + (f" ({event.reason})" if event.finished else ""))
    engine.close()
    return tokens


if __name__ == "__main__":
    main(sys.argv[1])
