"""Records of a generation request: parameters, the sequence as it grows, and the events it causes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmcompile.core.errors import RequestError

FinishReason = Literal["stop", "length", "context", "out_of_pages"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_new_tokens: at least 1. temperature: 0 = greedy. top_k: 0 = off. top_p: in (0, 1], 1 = off.
        seed: None = the engine's seed. With the same seed a prompt gives the same tokens, whatever runs beside it.
        stop_token_ids: end the sequence, in addition to the model's end-of-sequence tokens; the stop token is the last
            token of the result. ignore_eos: the model's own end-of-sequence tokens do not stop.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        rules = (
            (self.max_new_tokens >= 1, f"max_new_tokens = {self.max_new_tokens}", "use 1 or more"),
            (0.0 <= self.temperature < float("inf"), f"temperature = {self.temperature}", "use 0 or a positive number"),
            (self.top_k >= 0, f"top_k = {self.top_k}", "use 0 (off) or a positive number"),
            (0.0 < self.top_p <= 1.0, f"top_p = {self.top_p}", "use a number in (0, 1]"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, f"seed = {self.seed}", "use a 64-bit integer"),
        )
        for holds, what, fix in rules:
            if not holds:
                raise RequestError(f"invalid sampling parameter {what}", fix=fix)


GREEDY = SamplingParams()


@dataclass(frozen=True)
class TokenEvent:
    """A token of a sequence. ``token`` is None if the sequence ended without a new one (out of pages)."""

    sequence: int
    token: int | None
    finished: bool = False
    reason: FinishReason | None = None


@dataclass(frozen=True)
class Generation:
    """What a prompt led to: the new tokens, their text (None without a tokenizer) and why generation ended."""

    tokens: list[int]
    reason: FinishReason
    text: str | None = None


@dataclass
class Sequence:
    """A request in flight. ``tokens`` are prompt and generated tokens; the cache holds the first ``cached`` of them."""

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return len(self.tokens) - self.cached
