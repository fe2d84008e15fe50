"""Continuous batching: who is prefilled, who decodes, who waits, who gives way when the pages run out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mmcompile.runtime.pages import PageAllocator
from mmcompile.runtime.sequence import FinishReason, Sequence, TokenEvent


@dataclass(frozen=True)
class Work:
    """One step: the phase and, for each of its sequences, how many new tokens to feed."""

    phase: str
    items: tuple[tuple[Sequence, int], ...]


class Scheduler:
    """Decides the next step. First come, first served; prefill goes before decode.

    Args:
        page_size: tokens per page. max_tokens: tokens per prefill step. max_batch: sequences at a time.
        max_context: most tokens that the cache may hold of one sequence.
    """

    def __init__(
        self, allocator: PageAllocator, *, page_size: int, max_tokens: int, max_batch: int, max_context: int
    ) -> None:
        self._allocator = allocator
        self._page_size, self._max_tokens = page_size, max_tokens
        self._max_batch, self._max_context = max_batch, max_context
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's pages; its tokens have to be fed again."""
        self._allocator.release(sequence.pages)
        sequence.pages, sequence.cached = [], 0

    def plan_step(self) -> tuple[Work | None, list[TokenEvent]]:
        """The next step, or None if there is nothing to run; and the sequences that ended for want of pages."""
        events = self._admit()
        work = self._plan_prefill()
        if work is None and self.running:
            events += self._grow()
            work = Work("decode", tuple((s, 1) for s in self.running)) if self.running else None
        return work, events

    def finish(self, sequence: Sequence, token: int, stop_tokens: frozenset[int]) -> FinishReason | None:
        """Why the sequence ends with the ``token`` just appended, or None if it goes on."""
        if token in stop_tokens:
            return "stop"
        if sequence.generated >= sequence.params.max_new_tokens:
            return "length"
        return "context" if len(sequence.tokens) > self._max_context else None

    def _admit(self) -> list[TokenEvent]:
        """Start waiting sequences, in order, while there is room for all of their tokens."""
        events = []
        while self.waiting and len(self.running) < self._max_batch:
            sequence = self.waiting[0]
            needed = self._pages_for(len(sequence.tokens))
            if needed > self._allocator.total:
                self.waiting.popleft()
                events.append(TokenEvent(sequence.id, None, True, "out_of_pages"))
                continue
            pages = self._allocator.allocate(needed)
            if pages is None:
                break
            sequence.pages = pages
            self.running.append(self.waiting.popleft())
        return events

    def _plan_prefill(self) -> Work | None:
        """Feed the running sequences that lack more than the token just generated, up to the step's token limit."""
        items, budget = [], self._max_tokens
        for sequence in self.running:
            if budget and self._needs_prefill(sequence):
                count = min(budget, sequence.pending)
                items.append((sequence, count))
                budget -= count
        return Work("prefill", tuple(items)) if items else None

    @staticmethod
    def _needs_prefill(sequence: Sequence) -> bool:
        return sequence.pending > 1 or sequence.cached == 0

    def _grow(self) -> list[TokenEvent]:
        """Give every running sequence the page for its next token; the last one admitted gives way."""
        index, events = 0, []
        while index < len(self.running):
            sequence = self.running[index]
            if self.grow(sequence):
                index += 1
            elif len(self.running) > 1:
                self._preempt(self.running[-1])
            else:
                self.remove(sequence)
                events.append(TokenEvent(sequence.id, None, True, "out_of_pages"))
        return events

    def grow(self, sequence: Sequence) -> bool:
        """Make the pages of a sequence suffice for its tokens; False if there are not enough free pages."""
        pages = self._allocator.allocate(self._pages_for(len(sequence.tokens)) - len(sequence.pages))
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's pages and put it back at the head of the queue, with what it has generated."""
        self.running.remove(sequence)
        self.release(sequence)
        self.waiting.appendleft(sequence)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
