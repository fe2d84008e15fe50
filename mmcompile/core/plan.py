"""LaunchPlan and manifest: the plain records of an artifact, validated by pydantic, unknown keys forbidden."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from mmcompile.core.expression import Expression

SCHEMA_VERSION = 1

# Inputs that the runtime provides to the phases of a decoder, in the order of the graph's placeholders.
DECODER_INPUTS: dict[str, tuple[tuple[Expression, ...], str]] = {
    "input_ids": (("tokens",), "int32"),
    "positions": (("tokens",), "int32"),
    "slot_mapping": (("tokens",), "int64"),
    "block_table": (("batch", "max_blocks"), "int32"),
    "seq_lens": (("batch",), "int32"),
    "query_start": (("batch + 1",), "int32"),
}
# Inputs of the sampler at the end of each phase.
SAMPLER_INPUTS: dict[str, tuple[tuple[Expression, ...], str]] = {
    "temperature": (("batch",), "float32"),
    "top_k": (("batch",), "int32"),
    "top_p": (("batch",), "float32"),
    "seed": (("batch",), "int64"),
    "sample_positions": (("batch",), "int32"),
}

Mode = Literal["standalone", "layer", "step", "stream"]
"""How a decode step is launched: kernel by kernel, or merged into one launch for each layer or for the whole step; as
one launch of a kernel tuned for it, with one stream of weights."""
MODES: tuple[Mode, ...] = get_args(Mode)
Role = Literal["input", "output", "weight", "derived", "state", "temporary"]


class Record(BaseModel):
    """Base: immutable, unknown keys forbidden."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(Record):
    """Where a weight lies in a derived buffer: from byte ``offset`` on, in a ``layout`` (core/stream.py)."""

    weight: str
    offset: int
    layout: str


class Buffer(Record):
    """A piece of memory.

    ``shape`` over the plan's symbols; contiguous. ``offset``: byte offset in the arena for role "temporary" and
    "output", else None. ``layout``: tag of the arrangement of a packed weight or cache ("linear" = row-major).
    "weight" buffers come from the weight files under the same name, "derived" ones are filled by the phase "load" or
    made of ``parts`` while the weights are loaded, "state" lives from step to step (the KV cache; its symbol "pages" is
    fixed when the artifact is loaded).
    """

    name: str
    shape: tuple[Expression, ...]
    dtype: str
    role: Role
    offset: int | None = None
    layout: str = "linear"
    parts: tuple[Part, ...] = ()


class View(Record):
    """A strided window on a buffer: offset and strides in elements."""

    buffer: str
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    offset: Expression = 0


class KernelLaunch(Record):
    """One launch of a kernel: grid expressions and arguments in the kernel's parameter order (views or symbols)."""

    kernel: str
    grid: tuple[Expression, Expression, Expression]
    arguments: tuple[View | str, ...]


class Choice(Record):
    """One implementation of a launch: the first whose ``max_tokens`` admits the token count is taken.

    ``template``: name of the kernel template; ``reason``: why the templates before it were passed over.
    """

    max_tokens: int | None
    template: str
    kernels: tuple[KernelLaunch, ...]
    reason: str = ""


class Launch(Record):
    """One operation of a phase: what it means (op, inputs, attributes) and how it is done (choices).

    ``op``: "mm.<name>", "region.pointwise" or "region.reduction" (a generated kernel; attributes hold the region), or
    "aten.<name>.<overload>".
    ``inputs``: views by parameter name (None where an optional tensor is absent). With no choices the operation runs
    by its reference. ``source``: where in the model's source it came from. ``reason``: why it has no kernel, if so.
    """

    name: str
    op: str
    inputs: dict[str, View | None]
    outputs: tuple[View, ...]
    attributes: dict[str, Any]
    choices: tuple[Choice, ...] = ()
    source: str = ""
    reason: str = ""

    def choose(self, tokens: int | None) -> Choice | None:
        """The implementation for ``tokens`` (None: for any number); None if the launch runs by its reference."""
        admits = (c for c in self.choices if c.max_tokens is None or (tokens is not None and tokens <= c.max_tokens))
        return next(admits, None)


class Stage(Record):
    """A stage of a merged launch: ``record`` is a kernel that stands for (a part of) the phase's launch ``launch``.

    The kernel exists as branch ``body`` of the merged one only. ``waits``: earlier stages whose counters it waits for.
    ``replicated``: every program computes all of its tiles, into a copy of its own. ``gated``: it asks for its weights
    before it waits.
    """

    launch: int
    record: KernelLaunch
    body: int
    waits: tuple[int, ...] = ()
    replicated: bool = False
    gated: bool = False


class Stream(Record):
    """A decode step as one launch of a tuned kernel (targets/_tuned/stream_*.py), in place of those up to ``last``.

    ``record``: the kernel and its arguments, "workspace" among them: ``workspace_bytes`` that are zero before the first
    launch and again after every ``period`` of them, and the kernel's own in between. ``programs``: all resident.
    ``tokens``: rows that it computes, asked for or not. ``bytes``: of its weights. ``latency``: seconds of a step
    beside those, measured on an H200. ``shape``: what the kernel was written for.
    """

    record: KernelLaunch
    last: int
    programs: int
    tokens: int
    bytes: int
    latency: float
    workspace_bytes: int
    period: int
    shape: dict[str, Any]


class Schedule(Record):
    """A phase as one persistent launch (mono-decode) for token counts from ``low`` to ``high``; see core/schedule.py.

    ``kernel``: the merged kernel. ``programs``: co-resident programs of the launch. ``layers``: ranges of stages, from
    one to before another, that make one launch for each layer. ``private``: byte offset of the buffers of which every
    program has a copy, in its part of ``private_bytes``. ``seconds``: what a step takes by each mode that there is by
    ``basis`` ("cost model", or the GPU that it was measured on); ``mode`` is the one to run. ``stream``: the same step
    by the tuned kernel; ``unstreamed``: why there is none.
    """

    low: int
    high: int
    kernel: str
    programs: int
    stages: tuple[Stage, ...]
    layers: tuple[tuple[int, int], ...]
    private: dict[str, int]
    private_bytes: int
    mode: Mode
    seconds: dict[str, float]
    basis: str
    stream: Stream | None = None
    unstreamed: str = ""


class Phase(Record):
    """Launches in order. ``after[i]`` lists the earlier launches that launch i must wait for (indices).

    ``schedules``: mono-decode by token count, in ascending order; ``unmerged``: why there is none, if it was asked for.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    launches: tuple[Launch, ...]
    after: tuple[tuple[int, ...], ...]
    arena_bytes: int
    schedules: tuple[Schedule, ...] = ()
    unmerged: str = ""


class Binary(Record):
    """A compiled kernel for one architecture; files are relative to the artifact."""

    file: str
    assembly: str
    sha256: str
    symbol: str
    shared: int
    num_warps: int
    warp_size: int
    registers: int
    spills: int
    global_scratch_size: int
    global_scratch_align: int
    profile_scratch_size: int
    ledger: dict[str, int]

    @property
    def early(self) -> bool:
        """True if it may be launched while the launch before it still runs, as it waits for that one's end itself."""
        return "griddepcontrol.wait" in self.ledger


class Kernel(Record):
    """An emitted kernel, shared by every launch that names it.

    Attributes:
        parameters: (name, Triton type) pairs. expectations: see ``KernelSource.ledger``. lanes: see ``KernelSource``.
    """

    name: str
    source: str
    parameters: tuple[tuple[str, str], ...]
    num_stages: int
    expectations: dict[str, bool]
    binaries: dict[str, Binary]
    proofs: tuple[str, ...] = ()
    lanes: bool = False


class Plan(Record):
    """Everything one target needs to run. ``symbols``: largest value of each symbol that sizes the arena."""

    schema_version: int = SCHEMA_VERSION
    target: str
    symbols: dict[str, int]
    buffers: dict[str, Buffer]
    phases: dict[str, Phase]
    kernels: dict[str, Kernel]


class CacheSpec(Record):
    """The paged caches: buffers kv_cache_<layer>, and kv_cache_<layer>_index of an indexer's keys.

    ``dtype``: of the elements, or "nvfp4". ``bytes_per_token``: over all layers and caches; in one layer K and V take
    ``kv_bytes``, the index key ``index_bytes``. ``quantizer``: exact name of what rounds to NVFP4 (see
    core/formats/nvfp4_cache.py), "" where nothing does. ``layouts``: tags of the caches by target.
    """

    page_size: int
    dtype: str
    layers: int
    bytes_per_token: int
    kv_bytes: int = 0
    index_bytes: int = 0
    quantizer: str = ""
    layouts: dict[str, tuple[str, ...]] = {}


class ModelSpec(Record):
    """What the engine must know of the model. ``max_context`` in tokens; ``tokenizer`` is a file of the artifact."""

    name: str
    door: str
    dtype: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    parameters: int = 0
    checkpoint: str = ""


class QuantizationSpec(Record):
    """How weights were quantized: scheme and per-layer outcome (a format or the reason why not)."""

    scheme: str = "none"
    options: dict[str, Any] = {}
    global_scale_convention: str = "multiplier"
    layers: dict[str, str] = {}


class TargetEntry(Record):
    """One target of an artifact.

    ``copied_bytes``: of weights that the device holds a second time, in the order of a streamed decode step.
    """

    plan: str
    architectures: tuple[str, ...]
    toolchain: dict[str, str]
    copied_bytes: int = 0


class Manifest(Record):
    """The table of contents. ``files``: sha256 of every other file; ``digest``: of this record (see ``seal``)."""

    schema_version: int = SCHEMA_VERSION
    mmcompile: str
    kind: Literal["decoder", "module"]
    model: ModelSpec
    quantization: QuantizationSpec
    cache: CacheSpec | None
    targets: dict[str, TargetEntry]
    weights: Literal["packed", "none"]
    files: dict[str, str]
    digest: str


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest's JSON record with its ``digest``: sha256 of the record without it, keys sorted."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return rest | {"digest": hashlib.sha256(text.encode()).hexdigest()}
