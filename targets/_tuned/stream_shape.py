"""Shape of a decode step in one launch, and what every such step has in common."""

from __future__ import annotations

from dataclasses import dataclass

from mmcompile.core.stream import WARPS

THREADS = 32 * WARPS
SHARED_BYTES = 232448
"""Dynamic shared memory of one program on sm_90: 227 KB, so one program on each multiprocessor."""
PRIVATE_OFFSET = 1024
"""First byte of the shared memory that the inline assembly keeps for itself; Triton's own must end before it."""
MULTIPROCESSORS = {"sm_90a": 132}
TRACED = ("residual read", "q, k, v", "q, k, v read", "attention", "parts merged", "o", "residual again", "gate, up",
          "activation read", "down")  # fmt: skip
"""What has just been done at the times of a trace, layer by layer; then the same of the head: read, done."""
HEADER_WORDS = 64


@dataclass(frozen=True)
class StepShape:
    """A decode step, or a range of its layers, of a dense decoder with grouped-query attention and SwiGLU.

    RMSNorm before both, RoPE over the whole head (NeoX halves), scores scaled by head_dim ** -0.5; no biases, no norms
    of q and k, no sliding window.

    Attributes:
        vocabulary: rows of the output projection; None: the launch ends with the residual stream.
        cache_dtype: torch's name. weight_format: "bf16" or "nvfp4" (see ``core/formats/nvfp4_fragments.py``, flavour
            float16). max_tokens: rows that every launch computes, 1 to 8.
        programs: blocks of the launch, all resident. first, last: layers of this launch (last None = the final one);
            a launch that does not reach the final layer ends with the residual stream.
        warp_k: columns of the weights in one stage of a warp's stream; smaller ones are for tests.
        prefetch: how many stages of weights beyond those in flight the L2 is asked for: always; and before a program
            waits for q, k, v; for attention; for the residual after attention; for the activation.
        folded: two halves of a tile's columns in one MMA, as its rows 0 to 7 and 8 to 15; for bf16 and up to 4 tokens.
        prefetch_lines: bytes that one prefetch instruction brings, 64 or 128; 0: in bulk copies of a warp's part.
        part_tokens: tokens of context for each part of a sequence's attention, more in long contexts.
        trace: write the time of every phase of every layer to the workspace, for measurements.
        spin_limit: polls after which a wait gives up and writes the fault record.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int | None
    eps: float = 1e-5
    page_size: int = 16
    cache_dtype: str = "bfloat16"
    weight_format: str = "bf16"
    max_tokens: int = 1
    programs: int = 128
    first: int = 0
    last: int | None = None
    warp_k: int = 256
    prefetch: tuple[int, int, int, int, int] = (0, 2, 4, 4, 0)
    folded: bool = True
    prefetch_lines: int = 0
    part_tokens: int | None = None
    trace: bool = False
    spin_limit: int = 2_000_000

    @property
    def end(self) -> int:
        """The layer after the last of this launch."""
        return self.layers if self.last is None else self.last + 1

    @property
    def has_head(self) -> bool:
        """True if the launch ends with logits."""
        return self.vocabulary is not None and self.end == self.layers

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def team(self) -> int:
        """Programs that share one KV head."""
        return self.programs // self.kv_heads
