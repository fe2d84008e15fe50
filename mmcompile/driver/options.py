"""What a build can be told, validated in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmcompile.core.discover import list_names
from mmcompile.core.errors import UsageError, unknown_name

DTYPES = ("bfloat16", "float16", "float32")
CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "float8_e4m3fn", "nvfp4")
WEIGHTS = ("auto", "real", "random", "none")


@dataclass(frozen=True)
class BuildOptions:
    """Options of ``build``.

    Attributes:
        targets: names of files in targets/. quantization: "none" or a file of passes/quant.
        quantization_options: options of that scheme. dtype: of weights and activations.
        cache_dtype: of the KV cache; "auto" = dtype, "nvfp4" = pages in each target's layout. page_size: tokens per
            page of the cache; None = 64, or the block of the model's block-sparse attention.
        max_context: tokens per sequence. max_tokens: tokens per prefill step (longer prompts go in chunks).
        max_batch: sequences per decode step. weights: "auto" takes the checkpoint's, or random ones if there is none.
        strict: an operation without a kernel is an error. portable: leave tuned kernels out.
        required: rules or passes that must match. disabled: passes to leave out.
        verify: compare every pass numerically with the graph before it. seed: of random weights and verification.
        score: add a phase that gives the logits of every token (for perplexity).
        attention: "sdpa" or "eager", the spelling of transformers to capture. workers: compiler processes.
        fixed: dimensions and inputs of an ONNX model that become constants.
        mono: "off", or "layer" or "step" to merge the launches of a decode layer or step into one.
    """

    targets: tuple[str, ...] = ("cpu",)
    quantization: str = "none"
    quantization_options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    cache_dtype: str = "auto"
    page_size: int | None = None
    max_context: int = 2048
    max_tokens: int = 512
    max_batch: int = 64
    weights: str = "auto"
    strict: bool = False
    portable: bool = False
    required: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    verify: bool = False
    seed: int = 0
    score: bool = False
    attention: str = "sdpa"
    workers: int | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    mono: str = "off"

    def __post_init__(self) -> None:
        if not self.targets:
            raise UsageError("no target is named", fix="pass --target, e.g. --target cpu")
        _check("target", self.targets, list_names("targets"))
        _check("quantization", (self.quantization,), ["none", *list_names("passes.quant")])
        _check("dtype", (self.dtype,), DTYPES)
        _check("cache dtype", (self.cache_dtype,), CACHE_DTYPES)
        _check("weights option", (self.weights,), WEIGHTS)
        _check("attention spelling", (self.attention,), ("sdpa", "eager"))
        _check("mono-decode option", (self.mono,), ("off", "layer", "step"))
        for name in ("max_context", "max_tokens", "max_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_batch > self.max_tokens:
            raise UsageError(
                f"max_batch ({self.max_batch}) exceeds max_tokens ({self.max_tokens})", fix="raise --max-tokens"
            )
        if self.page_size is not None and (self.page_size < 8 or self.page_size & (self.page_size - 1)):
            raise UsageError(f"page_size must be a power of two from 8 on, got {self.page_size}")


def _check(kind: str, names: tuple[str, ...], known: Any) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
