"""What a pass is: a function from a graph to a PassResult; and the records of what it did and what it nearly did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Match:
    """One application of a rule: the nodes it replaced and the nodes that stand there now."""

    rule: str
    nodes: tuple[str, ...]
    replaced_by: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class NearMiss:
    """A place where a rule almost applied: which node differs, why, and what would make it match."""

    rule: str
    node: str
    reason: str
    source: str = ""


@dataclass
class PassResult:
    """Outcome of one pass.

    ``notes``: free text for the report (such as which layers stay unquantized and why). ``effect``: set where the
    options decide what the pass does to numbers (an fp8 cache quantizes, a bf16 one does not).
    """

    matches: list[Match] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    effect: str | None = None

    def extend(self, other: PassResult) -> None:
        """Append another result to this one."""
        self.matches += other.matches
        self.near_misses += other.near_misses
        self.notes += other.notes


@dataclass
class PassContext:
    """What passes may consult.

    Attributes:
        max_context: longest sequence to prepare for, tokens (length of RoPE tables).
        quantization: scheme ("none" or a file of passes/quant) and its options.
        cache_dtype, page_size: of the paged KV cache.
        checkpoint_nvfp4: module path -> (packed, scale, global_scale) for layers that the checkpoint stores in NVFP4; a
            stack of experts by the name of its parameter. checkpoint_mxfp8: module path -> (values, scale).
        info: what passes hand on to the manifest (quantization outcome per layer, number of KV layers, ...).
    """

    max_context: int = 2048
    quantization: str = "none"
    quantization_options: dict[str, Any] = field(default_factory=dict)
    cache_dtype: str = "bfloat16"
    page_size: int = 64
    checkpoint_nvfp4: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    checkpoint_mxfp8: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


PassFunction = Callable[[fx.GraphModule, PassContext], PassResult]


@dataclass(frozen=True)
class Pass:
    """A named step of the pipeline.

    ``effect`` is what it may do to numbers: "bitwise" (nothing), "bounded" (rounding), "quantizing" (judged by the
    signal-to-noise ratio), "last_token" (bounded, and only the last row of a result remains), "drop_batch" (bitwise,
    and a leading dimension of 1 is gone).
    """

    name: str
    phase: str
    run: PassFunction
    description: str
    effect: str = "bitwise"
