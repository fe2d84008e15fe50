"""Generation from a hand-built artifact against a naive model without cache, batch, chunks or preemption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcompile.core.errors import RequestError, UsageError
from mmcompile.runtime import Engine, SamplingParams, load

PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], list(range(20, 56)), [42] * 5, [60, 61]]
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=40, top_p=0.95, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Engine:
    return load(artifact, device="cpu")


def alone(artifact: Path, params: SamplingParams) -> list[list[int]]:
    engine = load(artifact, device="cpu")
    return [engine.generate([prompt], params)[0].tokens for prompt in PROMPTS]


def test_greedy_equals_the_naive_model(engine: Engine, naive_greedy: Callable[[list[int], int], list[int]]) -> None:
    results = engine.generate(PROMPTS, GREEDY)
    assert [r.tokens for r in results] == [naive_greedy(prompt, 12) for prompt in PROMPTS]
    assert {r.reason for r in results} == {"length"}
    assert engine.describe()["pages"]["free"] == engine.limits.pages


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_together_equals_alone(artifact: Path, params: SamplingParams) -> None:
    together = load(artifact, device="cpu").generate(PROMPTS, params)
    assert [r.tokens for r in together] == alone(artifact, params)


def test_sampling_is_seeded(engine: Engine) -> None:
    def run(seed: int | None) -> list[int]:
        return engine.generate(
            [[1, 2]], SamplingParams(max_new_tokens=20, temperature=1.5, seed=seed, ignore_eos=True)
        )[0].tokens

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) == run(engine.seed)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_preemption_changes_no_token(artifact: Path, params: SamplingParams) -> None:
    """Twelve pages hold the longest sequence (36 + 12 tokens) and little else, so the others must give way."""
    engine = load(artifact, device="cpu", pages=12)
    ids = [engine.add(prompt, params) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    preempted = 0
    while engine.busy:
        running = len(engine._scheduler.running)
        finished = 0
        for event in engine.step():
            tokens[event.sequence] += [] if event.token is None else [event.token]
            finished += event.finished
        preempted += len(engine._scheduler.running) + finished < running
    assert preempted > 0
    assert [tokens[i] for i in ids] == alone(artifact, params)
    assert engine.describe()["pages"]["free"] == 12


def test_out_of_pages_ends_only_the_sequence_that_cannot_fit(artifact: Path) -> None:
    engine = load(artifact, device="cpu", pages=3)
    long, short = engine.generate([[1] * 8, [2] * 3], SamplingParams(max_new_tokens=9, ignore_eos=True))
    reference = load(artifact, device="cpu").generate(
        [[1] * 8, [2] * 3], SamplingParams(max_new_tokens=9, ignore_eos=True)
    )
    assert (long.reason, short.reason) == ("out_of_pages", "length")
    assert long.tokens == reference[0].tokens[:5] and short.tokens == reference[1].tokens
    assert engine.describe()["pages"]["free"] == 3


def test_chunked_prefill_equals_one_chunk(engine: Engine, naive_logits: Callable[[list[int]], Tensor]) -> None:
    handles, logits = engine.prefill(PROMPTS[:4])
    for row, prompt in zip(logits, PROMPTS, strict=False):
        torch.testing.assert_close(row, naive_logits(prompt)[-1], rtol=1e-4, atol=1e-4)
    tokens = [5, 6, 7, 8]
    following = engine.decode(handles, tokens)
    for row, prompt, token in zip(following, PROMPTS, tokens, strict=False):
        torch.testing.assert_close(row, naive_logits([*prompt, token])[-1], rtol=1e-4, atol=1e-4)
    engine.release(handles)
    assert engine.describe()["pages"]["free"] == engine.limits.pages


def test_score_equals_the_naive_model(engine: Engine, naive_logits: Callable[[list[int]], Tensor]) -> None:
    for length in (2, 16, 17, 50):
        ids = [(7 * i) % 100 for i in range(length)]
        expected = torch.log_softmax(naive_logits(ids)[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(engine.score(ids), expected, rtol=1e-4, atol=1e-4)


def test_score_needs_its_phase(make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    engine = load(make_artifact(tmp_path, phases=("prefill", "decode")), device="cpu")
    with pytest.raises(RequestError, match='no phase "score"'):
        engine.score([1, 2])


def test_stop_tokens_and_eos(engine: Engine, make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    tokens = engine.generate([[1, 2, 3]], GREEDY)[0].tokens
    stop = tokens[4]
    expected = tokens[: tokens.index(stop) + 1]
    stopped = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)))[0]
    assert (stopped.tokens, stopped.reason) == (expected, "stop")
    other = load(make_artifact(tmp_path, model={"eos_token_ids": (stop,)}), device="cpu")
    assert other.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0].tokens == expected
    assert other.generate([[1, 2, 3]], GREEDY)[0].tokens == tokens


def test_context_ends_a_sequence(engine: Engine, naive_greedy: Callable[[list[int], int], list[int]]) -> None:
    prompt = [i % 90 for i in range(61)]
    result = engine.generate([prompt], SamplingParams(max_new_tokens=50, ignore_eos=True))[0]
    assert (result.tokens, result.reason) == (naive_greedy(prompt, 4), "context")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1] * 65, "65 tokens, the context holds 64"), ([101], "token 101"), ([-1], "token -1")],
)
def test_bad_prompts(engine: Engine, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.add(prompt)
    with pytest.raises(RequestError, match=message):
        engine.generate([[1, 2], prompt])
    assert not engine.busy and engine.describe()["pages"]["free"] == engine.limits.pages


def test_prompt_larger_than_the_cache(artifact: Path) -> None:
    with pytest.raises(RequestError, match="needs 4 pages, the cache has 3"):
        load(artifact, device="cpu", pages=3).add([1] * 13)


@pytest.mark.parametrize("field", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_bad_parameters(field: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="invalid sampling parameter"):
        SamplingParams(**field)


def test_low_level_misuse(artifact: Path) -> None:
    engine = load(artifact, device="cpu", pages=4)
    handles, _ = engine.prefill([[1] * 8])
    with pytest.raises(RequestError, match="out of pages"):
        engine.prefill([[1] * 4, [2] * 8])
    assert engine.describe()["pages"]["free"] == 2
    for bad in ((handles, []), ([99], [1]), (handles * 2, [1, 1]), (handles, [500])):
        with pytest.raises(RequestError):
            engine.decode(*bad)
    engine.add([3] * 12)
    with pytest.raises(RequestError, match="low-level"):
        engine.step()
    engine.release(handles)
    assert engine.step()[0].token is not None


def test_stream_beside_other_sequences(engine: Engine) -> None:
    expected = engine.generate([[1, 2, 3]], GREEDY)[0].tokens
    other = engine.add([4, 5], GREEDY)
    chunks = list(engine.stream([1, 2, 3], GREEDY))
    assert [c.token for c in chunks] == expected
    assert [c.finished for c in chunks] == [False] * 11 + [True] and chunks[-1].reason == "length"
    events = engine.step()
    while engine.busy:
        events += engine.step()
    assert {e.sequence for e in events} == {other} and len(events) == 12


def test_a_closed_stream_frees_its_pages(engine: Engine) -> None:
    stream = engine.stream([1, 2, 3], GREEDY)
    next(stream)
    stream.close()
    assert not engine.busy and engine.describe()["pages"]["free"] == engine.limits.pages


def test_max_batch(artifact: Path) -> None:
    with pytest.raises(UsageError, match="max_batch = 5"):
        load(artifact, device="cpu", max_batch=5)
    one_by_one = load(artifact, device="cpu", max_batch=1).generate(PROMPTS, GREEDY)
    assert [r.tokens for r in one_by_one] == alone(artifact, GREEDY)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    pages=st.integers(9, 40),
    late=st.integers(0, 6),
    batch=st.integers(1, 4),
)
def test_any_arrival_gives_the_same_tokens(
    artifact: Path, engine: Engine, lengths: list[int], pages: int, late: int, batch: int
) -> None:
    """Whatever the cache size, the batch and the time of arrival."""
    params = SamplingParams(max_new_tokens=6, temperature=0.7, seed=1, ignore_eos=True)
    prompts = [[(13 * i + j) % 100 for j in range(n)] for i, n in enumerate(lengths)]
    reference = [engine.generate([prompt], params)[0].tokens for prompt in prompts]
    crowded = load(artifact, device="cpu", pages=pages, max_batch=batch)
    ids: list[int] = []
    tokens: dict[int, list[int]] = {}
    while crowded.busy or len(ids) < len(prompts):
        if len(ids) < len(prompts):
            ids.append(crowded.add(prompts[len(ids)], params))
        for event in [e for _ in range(late) for e in crowded.step()]:
            if event.token is not None:
                tokens.setdefault(event.sequence, []).append(event.token)
        late = max(late, 1) if len(ids) == len(prompts) else late
    assert [tokens[i] for i in ids] == reference
    assert crowded.describe()["pages"]["free"] == pages
