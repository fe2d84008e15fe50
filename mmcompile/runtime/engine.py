"""The decoder engine: prefill, decode, continuous batching, generation, streaming, scoring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError, RequestError, UsageError
from mmcompile.core.plan import DECODER_INPUTS, SAMPLER_INPUTS, Manifest, Plan
from mmcompile.runtime.artifact import Artifact
from mmcompile.runtime.batch import build_inputs, round_up_to_power_of_two
from mmcompile.runtime.executor import Executor, describe_weights
from mmcompile.runtime.pages import PageAllocator
from mmcompile.runtime.scheduler import Scheduler
from mmcompile.runtime.selection import Selection
from mmcompile.runtime.sequence import GREEDY, FinishReason, Generation, SamplingParams, Sequence, TokenEvent
from mmcompile.runtime.text import TextCodec

Prompt = str | Items[int]


@dataclass(frozen=True)
class StreamChunk:
    """A step of a stream: the token (None for text that was held back to the end) and the text it completes."""

    token: int | None
    text: str
    finished: bool
    reason: FinishReason | None


@dataclass(frozen=True)
class Limits:
    """What an engine can serve: pages of the cache, sequences at a time, tokens of a sequence."""

    pages: int
    page_size: int
    max_batch: int
    max_context: int


def decoder_limits(manifest: Manifest, plan: Plan, max_batch: int | None) -> Limits:
    """Limits of a decoder artifact, pages still 0. ArtifactError if it is none, UsageError on max_batch."""
    if manifest.cache is None:
        raise ArtifactError("a decoder needs a cache record", where="manifest.json", fix="rebuild the artifact")
    known = DECODER_INPUTS.keys() | SAMPLER_INPUTS.keys()
    for name in ("prefill", "decode"):
        phase = plan.phases.get(name)
        if phase is None or not {"logits", "next_tokens"} <= set(phase.outputs) or not set(phase.inputs) <= known:
            raise ArtifactError(
                f"phase {name!r} is missing or does not have the inputs and outputs of a decoder",
                where=f"plan of {plan.target}",
                fix="rebuild the artifact",
            )
    limit = plan.symbols["batch"]
    if max_batch is not None and not 1 <= max_batch <= limit:
        raise UsageError(
            f"max_batch = {max_batch}, the artifact allows 1 to {limit}", fix="choose a number in that range"
        )
    page_size = manifest.cache.page_size
    context = min(manifest.model.max_context, plan.symbols["max_blocks"] * page_size)
    return Limits(0, page_size, max_batch or limit, context)


class Engine:
    """Serves a decoder artifact on one device. Made by :func:`mmcompile.runtime.load`.

    ``add`` and ``step`` batch continuously; ``generate`` and ``stream`` drive them; ``prefill`` and ``decode`` give
    logits without sampling. One thread at a time.
    """

    def __init__(
        self,
        artifact: Artifact,
        plan: Plan,
        selection: Selection,
        executor: Executor,
        limits: Limits,
        seed: int,
        random_weights: int | None = None,
    ) -> None:
        self.manifest, self.limits, self.seed, self.random_weights = artifact.manifest, limits, seed, random_weights
        self._root, self._plan, self._selection, self.executor = artifact.root, plan, selection, executor
        self._allocator = PageAllocator(limits.pages)
        self._scheduler = Scheduler(
            self._allocator,
            page_size=limits.page_size,
            max_tokens=plan.symbols["tokens"],
            max_batch=limits.max_batch,
            max_context=limits.max_context,
        )
        self._sequences: dict[int, Sequence] = {}
        self._held: dict[int, Sequence] = {}
        self._claimed: dict[int, deque[TokenEvent]] = {}
        self._unclaimed: list[TokenEvent] = []
        self._next_id = 0

    @cached_property
    def text(self) -> TextCodec:
        """Tokenizer and chat template; ArtifactError if the artifact has none."""
        return TextCodec(self._root, self.manifest.model)

    # Continuous batching.

    def add(self, prompt_ids: Items[int], params: SamplingParams = GREEDY) -> int:
        """Queue a prompt; returns the sequence's id. Raises RequestError if it can never be served."""
        sequence = self._new_sequence(prompt_ids, params)
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)
        return sequence.id

    def cancel(self, sequence: int) -> None:
        """Drop a sequence that was added; unknown and finished ids are ignored."""
        record = self._sequences.pop(sequence, None)
        if record is not None:
            self._scheduler.remove(record)

    @property
    def busy(self) -> bool:
        """True while sequences that were added are unfinished."""
        return self._scheduler.busy

    def step(self) -> list[TokenEvent]:
        """Run one prefill or decode step. Returns its events, in the order of admission; [] if nothing is to do."""
        self._advance()
        events, self._unclaimed = self._unclaimed, []
        return events

    def _advance(self) -> None:
        """One step; events go to whoever claimed their sequence."""
        work, events = self._scheduler.plan_step()
        if work is None and not events and self._scheduler.busy:
            raise RequestError(
                "no pages for the waiting sequences: all are held by low-level sequences", fix="release() them first"
            )
        if work is not None:
            tokens = self._run(work.phase, work.items, ("next_tokens",))["next_tokens"].tolist()
            for (sequence, count), token in zip(work.items, tokens, strict=False):
                sequence.cached += count
                if sequence.pending == 0:
                    events.append(self._accept(sequence, token))
        for event in events:
            if event.finished:
                self._sequences.pop(event.sequence, None)
            self._claimed.get(event.sequence, self._unclaimed).append(event)

    def _accept(self, sequence: Sequence, token: int) -> TokenEvent:
        """Append a sampled token and see whether the sequence ends."""
        sequence.tokens.append(token)
        params = sequence.params
        stops = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else self.manifest.model.eos_token_ids
        )
        reason = self._scheduler.finish(sequence, token, stops)
        if reason is not None:
            self._scheduler.remove(sequence)
        return TokenEvent(sequence.id, token, reason is not None, reason)

    # Generation.

    def generate(
        self, prompts: Items[Prompt], params: SamplingParams | Items[SamplingParams] = GREEDY
    ) -> list[Generation]:
        """Complete prompts (text or token ids), batched; one result each, in order.

        ``params``: one for all, or one for each prompt. Raises RequestError before anything runs if one is invalid.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is a single text", fix="pass a list of prompts")
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(every)} params", fix="pass one for each prompt, or one"
            )
        added: list[int] = []
        try:
            for prompt, own in zip(prompts, every, strict=True):
                added.append(self._claim(prompt, own))
            results = [self._result(sequence) for sequence in added]
        finally:
            for sequence in added:
                self._unclaim(sequence)
        return results

    def _result(self, sequence: int) -> Generation:
        events = list(self._events(sequence))
        tokens = [event.token for event in events if event.token is not None]
        reason = events[-1].reason
        assert reason is not None
        return Generation(tokens, reason, self.text.decode(tokens) if self.manifest.model.tokenizer else None)

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Iterator[StreamChunk]:
        """Complete one prompt token by token; ``text`` is "" where a character is incomplete or there is no tokenizer.

        Closing the iterator early cancels the sequence. Other sequences advance beside it.
        """
        sequence = self._claim(prompt, params)
        decoder = self.text.detokenizer() if self.manifest.model.tokenizer else None
        try:
            for event in self._events(sequence):
                text = decoder.push(event.token) if decoder and event.token is not None else ""
                if event.finished and decoder:
                    text += decoder.flush()
                yield StreamChunk(event.token, text, event.finished, event.reason)
        finally:
            self._unclaim(sequence)

    def _claim(self, prompt: Prompt, params: SamplingParams) -> int:
        sequence = self.add(self.text.encode(prompt) if isinstance(prompt, str) else prompt, params)
        self._claimed[sequence] = deque()
        return sequence

    def _unclaim(self, sequence: int) -> None:
        self.cancel(sequence)
        self._claimed.pop(sequence, None)

    def _events(self, sequence: int) -> Iterator[TokenEvent]:
        box = self._claimed[sequence]
        while True:
            while not box:
                self._advance()
            event = box.popleft()
            yield event
            if event.finished:
                return

    # Low level: logits, no scheduler.

    def prefill(self, prompts: Items[Items[int]]) -> tuple[list[int], Tensor]:
        """Feed prompts, in chunks where they are long. Returns handles for ``decode`` and logits [prompts, vocabulary].

        The handles hold pages until ``release``. Raises RequestError if the pages do not suffice.
        """
        sequences = [self._new_sequence(prompt, GREEDY) for prompt in prompts]
        try:
            rows = [self._feed(sequence) for sequence in sequences]
        except RequestError:
            for sequence in sequences:
                self._scheduler.release(sequence)
            raise
        self._held.update({sequence.id: sequence for sequence in sequences})
        return [sequence.id for sequence in sequences], torch.stack(rows)

    def decode(self, handles: Items[int], tokens: Items[int]) -> Tensor:
        """Feed one token to each sequence. Returns logits [handles, vocabulary]."""
        sequences = [self._held_sequence(handle) for handle in handles]
        if not sequences or len(set(handles)) != len(sequences) or len(tokens) != len(sequences):
            raise RequestError("decode needs different handles and one token for each", fix="check the arguments")
        if len(sequences) > self._plan.symbols["batch"]:
            raise RequestError(
                f"{len(sequences)} sequences, the artifact decodes {self._plan.symbols['batch']} at a time",
                fix="send fewer",
            )
        self._check_tokens(tokens)
        for sequence, token in zip(sequences, tokens, strict=True):
            if len(sequence.tokens) >= self.limits.max_context:
                raise RequestError(f"sequence {sequence.id} has filled its context", fix="release it")
            sequence.tokens.append(int(token))
        if not all([self._scheduler.grow(sequence) for sequence in sequences]):
            for sequence in sequences:
                sequence.tokens.pop()
            raise self._out_of_pages()
        logits = self._run("decode", [(sequence, 1) for sequence in sequences], ("logits",))["logits"]
        for sequence in sequences:
            sequence.cached += 1
        return logits[: len(sequences)].clone()

    def release(self, handles: Items[int]) -> None:
        """Free the pages of low-level sequences."""
        for handle in handles:
            self._scheduler.release(self._held_sequence(handle))
            del self._held[handle]

    def score(self, ids: Items[int]) -> Tensor:
        """Log-probability of each token given those before it: fp32 [len(ids) - 1].

        Raises RequestError if the artifact has no phase "score" or there are fewer than two tokens.
        """
        if "score" not in self._plan.phases:
            raise RequestError(
                'the artifact has no phase "score" (logits of every token)', fix="build it again with scoring"
            )
        if len(ids) < 2:
            raise RequestError(f"{len(ids)} tokens leave nothing to score", fix="pass two tokens or more")
        sequence = self._new_sequence(ids, GREEDY)
        try:
            return self._score(sequence)
        finally:
            self._scheduler.release(sequence)

    def _score(self, sequence: Sequence) -> Tensor:
        parts = []
        for count, logits in self._chunks(sequence, "score"):
            following = torch.tensor(sequence.tokens[sequence.cached + 1 : sequence.cached + 1 + count])
            rows = torch.log_softmax(logits[: len(following)].float(), -1)
            parts.append(rows.gather(1, following[:, None])[:, 0])
        return torch.cat(parts)

    def _feed(self, sequence: Sequence) -> Tensor:
        """Prefill one sequence; logits of its last token."""
        *_, last = (logits[0].clone() for _, logits in self._chunks(sequence, "prefill"))
        return last

    def _chunks(self, sequence: Sequence, phase: str) -> Iterator[tuple[int, Tensor]]:
        """Run a phase over a sequence in chunks: (tokens fed, its first output, the logits).

        ``cached`` advances when the next chunk is asked for.
        """
        logits = self._plan.phases[phase].outputs[0]
        if not self._scheduler.grow(sequence):
            raise self._out_of_pages()
        while sequence.pending:
            count = min(sequence.pending, self._plan.symbols["tokens"])
            yield count, self._run(phase, [(sequence, count)], (logits,))[logits]
            sequence.cached += count

    # Shared.

    def _run(self, phase: str, items: Items[tuple[Sequence, int]], outputs: tuple[str, ...]) -> dict[str, Tensor]:
        pads = phase == "decode" and self.executor.pads_decode
        rows = round_up_to_power_of_two(len(items), self._plan.symbols["batch"]) if pads else len(items)
        inputs, symbols = build_inputs(
            items, page_size=self.limits.page_size, max_blocks=self._plan.symbols["max_blocks"], rows=rows
        )
        needed = self._plan.phases[phase].inputs
        return self.executor.run(phase, {name: inputs[name] for name in needed}, symbols, outputs)

    def _new_sequence(self, prompt_ids: Items[int], params: SamplingParams) -> Sequence:
        tokens = [int(token) for token in prompt_ids]
        if not tokens:
            raise RequestError("the prompt is empty", fix="pass at least one token")
        if len(tokens) > self.limits.max_context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.limits.max_context}", fix="shorten it"
            )
        needed = -(-len(tokens) // self.limits.page_size)
        if needed > self.limits.pages:
            raise RequestError(
                f"the prompt needs {needed} pages, the cache has {self.limits.pages}",
                fix="shorten it, or load the artifact with more pages",
            )
        self._check_tokens(tokens)
        self._next_id += 1
        seed = self.seed if params.seed is None else params.seed
        return Sequence(self._next_id - 1, tokens, len(tokens), params, seed)

    def _check_tokens(self, tokens: Items[int]) -> None:
        size = self.manifest.model.vocab_size
        wrong = [token for token in tokens if not 0 <= token < size]
        if wrong:
            raise RequestError(f"token {wrong[0]} is not in the vocabulary of {size}", fix="use this model's tokenizer")

    def _held_sequence(self, handle: int) -> Sequence:
        if handle not in self._held:
            raise RequestError(f"no low-level sequence {handle}", fix="use a handle that prefill() gave")
        return self._held[handle]

    def _out_of_pages(self) -> RequestError:
        return RequestError(
            f"out of pages: {self._allocator.free} of {self._allocator.total} are free",
            fix="release sequences, or load the artifact with more pages",
        )

    def describe(self) -> dict[str, Any]:
        """Target, device, weights, kernels, launches per phase, fallbacks, memory by role, pages, limits, graphs."""
        return {
            "model": self.manifest.model.name,
            "target": self._selection.target,
            "architecture": self._selection.architecture,
            "match": self._selection.match,
            "weights": describe_weights(self.random_weights),
            **self.executor.describe(),
            "pages": {"total": self._allocator.total, "free": self._allocator.free, "size": self.limits.page_size},
            "max_batch": self.limits.max_batch,
            "max_context": self.limits.max_context,
        }

    def time_decode_graph(self, repeats: int = 100) -> float:
        """Seconds per replay of the last decode step's CUDA graph; RequestError where nothing was captured."""
        measure = getattr(self.executor, "time_graph", None)
        if measure is None:
            raise RequestError("this device has no graphs", fix="load the artifact with device='cuda'")
        return float(measure(repeats))

    def close(self) -> None:
        """Free the device's memory."""
        self.executor.close()
