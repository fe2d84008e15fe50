"""Find in the decode phase of a plan what a streamed step is made of, by its operations, or say why it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mmcompile.core.plan import Launch, Phase, Plan, View
from mmcompile.targets._tuned.stream_shape import StepShape

_KINDS = (
    ("moe", "a mixture of experts"), ("route", "a mixture of experts"), ("index", "an indexer of sparse attention"),
    ("sparse", "block-sparse attention"), ("nvfp4", "weights in NVFP4"), ("mxfp8", "weights in MXFP8"),
    ("w4a4", "weights in NVFP4"),
)  # fmt: skip


class NotStreamedError(Exception):
    """The reason why a phase is no step of the streamed kernel, in one clause."""


@dataclass
class DecoderStep:
    """A decode step of a dense decoder: the launches of its phase up to ``last``, and what they read and write.

    ``weights`` and ``norms``: names of buffers by (role, layer), as ``stream_pack`` has them. ``views``: by the names
    of the kernel's parameters. ``shape``: for one token; programs and columns of a stage are not chosen yet.
    """

    shape: StepShape
    last: int
    weights: dict[tuple[str, int], str]
    norms: dict[tuple[str, int], str]
    views: dict[str, View]


def recognise_step(plan: Plan, phase: Phase) -> DecoderStep | str:
    """The step, or the first reason against it with the launch that gives it."""
    walk = _Walk(plan, phase)
    try:
        return walk.read_step()
    except NotStreamedError as error:
        return str(error)


def _demand(true: bool, reason: str) -> None:
    if not true:
        raise NotStreamedError(reason)


@dataclass
class _Walk:
    """Goes through the launches in order. ``sums``: buffers whose sum is the residual stream."""

    plan: Plan
    phase: Phase
    at: int = 0
    sums: tuple[str, ...] = ()
    weights: dict[tuple[str, int], str] = field(default_factory=dict)
    norms: dict[tuple[str, int], str] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def read_step(self) -> DecoderStep:
        """From the embedding to the logits."""
        launch = self._take("embedding")
        self._input(launch, "ids", "input_ids")
        self.views["embedding"] = self._weight(launch, "weight")
        self.sums = (launch.outputs[0].buffer,)
        layer = 0
        while True:
            normed = self._read_norm("input", layer)
            if self._peek("linear"):
                break
            self._read_attention(layer, normed)
            self._read_mlp(layer, self._read_norm("after", layer))
            layer += 1
        _demand(layer > 0, "the model has no layers")
        self.norms["final", layer] = self.norms.pop(("input", layer))
        self._read_head(layer, normed)
        self._refuse_readers()
        return DecoderStep(StepShape(layers=layer, **self.facts), self.at - 1, self.weights, self.norms, self.views)

    def _peek(self, op: str) -> bool:
        return self.at < len(self.phase.launches) and self.phase.launches[self.at].op == f"mm.{op}"

    def _take(self, *ops: str) -> Launch:
        """The next launch, which must be one of ``ops``."""
        _demand(self.at < len(self.phase.launches), "the phase ends before the logits")
        launch = self.phase.launches[self.at]
        if launch.op not in [f"mm.{op}" for op in ops]:
            kind = next((f" ({what})" for word, what in _KINDS if word in launch.op), "")
            raise NotStreamedError(f"{launch.name} is {launch.op}{kind} where a dense decoder has {' or '.join(ops)}")
        self.at += 1
        return launch

    def _absent(self, launch: Launch, names: Sequence[str], what: str) -> None:
        found = [name for name in names if launch.inputs.get(name) is not None]
        _demand(not found, f"{launch.name} has {what}")

    def _reads(self, launch: Launch, name: str, buffer: str) -> None:
        view = launch.inputs[name]
        _demand(view is not None and view.buffer == buffer and view.offset == 0, f"{launch.name} reads another {name}")

    def _input(self, launch: Launch, name: str, buffer: str) -> None:
        """An input of the runtime, which the kernel takes as it is."""
        self._reads(launch, name, buffer)
        self.views[buffer] = launch.inputs[name]  # type: ignore[assignment]

    def _weight(self, launch: Launch, name: str) -> View:
        """A view of a whole bf16 weight."""
        view = launch.inputs[name]
        assert view is not None
        buffer = self.plan.buffers[view.buffer]
        whole = buffer.role == "weight" and (view.shape, view.offset) == (buffer.shape, 0) and _is_dense(view)
        _demand(whole and buffer.layout == "linear", f"{launch.name} reads a part of a weight or one that is arranged")
        _demand(buffer.dtype == "bfloat16", f"{launch.name} has weights in {buffer.dtype}, not bfloat16")
        return view

    def _note(self, launch: Launch, **facts: Any) -> None:
        """Facts that all layers must share."""
        for name, value in facts.items():
            known = self.facts.setdefault(name, value)
            _demand(known == value, f"{launch.name} has {name} {value}, others have {known}")

    def _read_norm(self, role: str, layer: int) -> str:
        """The norm of the residual stream, which may take in the sum of the last two results: its result's buffer."""
        launch = self._take("rms_norm", "add_rms_norm")
        names = ("x",) if launch.op == "mm.rms_norm" else ("x", "residual")
        read = [view.buffer for name in names if (view := launch.inputs[name]) is not None and view.offset == 0]
        _demand(sorted(read) == sorted(self.sums), f"{launch.name} does not norm the residual stream")
        _demand(launch.attributes["weight_offset"] == 0.0, f"{launch.name} adds to its weights")
        self._note(launch, eps=launch.attributes["eps"])
        self.norms[role, layer] = self._weight(launch, "weight").buffer
        self.sums = (launch.outputs[1].buffer,) if len(names) == 2 else self.sums
        return launch.outputs[0].buffer

    def _project(self, launch: Launch, role: str, layer: int, x: str, activation: str) -> View:
        """A linear without bias: the view of its weight."""
        self._absent(launch, ("bias",), "a bias")
        self._reads(launch, "x", x)
        found = launch.attributes["activation"]
        _demand(found == activation, f"{launch.name} has the activation {found!r}, not {activation!r}")
        view = self._weight(launch, "weight")
        self.weights[role, layer] = view.buffer
        return view

    def _add(self, launch: Launch) -> None:
        """A projection's result on top of the residual stream, here or in the next norm."""
        residual, result = launch.inputs.get("residual"), launch.outputs[0].buffer
        _demand(len(self.sums) == 1, f"{launch.name} follows a sum that is not finished")
        if residual is not None:
            self._reads(launch, "residual", self.sums[0])
        self.sums = (result,) if residual is not None else (self.sums[0], result)

    def _read_attention(self, layer: int, normed: str) -> None:
        launch = self._take("qkv_norm_rope_insert")
        facts = launch.attributes
        self._absent(launch, ("q_weight", "k_weight"), "norms of q and k")
        self._absent(launch, ("bias",), "a bias")
        self._absent(launch, ("delta",), "an adapter")
        self._reads(launch, "x", normed)
        heads, kv_heads, d = (facts[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
        weight = self._weight(launch, "weight")
        self.weights["qkv", layer] = weight.buffer
        table = self._weight(launch, "cos_sin")
        _demand(table.shape[1] == d, f"{launch.name} turns {table.shape[1]} of {d} dimensions of a head (partial RoPE)")
        _demand(self.views.setdefault("table", table) == table, f"{launch.name} has a RoPE table of its own")
        self._note(launch, hidden=weight.shape[1], heads=heads, kv_heads=kv_heads, head_dim=d)
        self._input(launch, "positions", "positions")
        self._input(launch, "slot_mapping", "slot_mapping")
        cache = self._read_cache(launch, layer)
        attention = self._take("paged_attention")
        window, scale = attention.attributes["window"], attention.attributes["scale"]
        _demand(window == 0, f"{attention.name} has a window of {window} tokens")
        _demand(abs(scale - d**-0.5) < 1e-6 * scale, f"{attention.name} scales scores by {scale}, not {d}**-0.5")
        self._reads(attention, "q", launch.outputs[0].buffer)
        self._reads(attention, "kv_cache", cache)
        self._input(attention, "block_table", "block_table")
        self._input(attention, "seq_lens", "seq_lens")
        output = self._take("linear")
        self._project(output, "o", layer, attention.outputs[0].buffer, "none")
        self._add(output)

    def _read_cache(self, launch: Launch, layer: int) -> str:
        view = launch.inputs["kv_cache"]
        assert view is not None
        buffer, layout = self.plan.buffers[view.buffer], launch.attributes.get("layout", "linear")
        kind = buffer.dtype if layout == "linear" else layout
        _demand(kind == "bfloat16", f"{launch.name} keeps its cache in {kind}, not bfloat16")
        whole = view.shape == buffer.shape and view.offset == 0 and _is_dense(view)
        _demand(whole, f"{launch.name} uses a part of a cache")
        self._note(launch, page_size=view.shape[2])
        self.views[f"kv_cache.{layer}"] = view
        return view.buffer

    def _read_mlp(self, layer: int, normed: str) -> None:
        launch = self._take("linear")
        self._absent(launch, ("residual",), "a residual")
        weight = self._project(launch, "gate_up", layer, normed, "swiglu")
        self._note(launch, intermediate=int(weight.shape[0]) // 2)
        down = self._take("linear")
        self._project(down, "down", layer, launch.outputs[0].buffer, "none")
        self._add(down)

    def _read_head(self, layer: int, normed: str) -> None:
        launch = self._take("linear")
        self._absent(launch, ("residual",), "a residual")
        weight = self._project(launch, "head", layer, normed, "none")
        result = launch.outputs[0]
        buffer = self.plan.buffers[result.buffer]
        _demand(
            buffer.role == "output" and buffer.dtype == "bfloat16" and _is_dense(result) and result.offset == 0,
            f"{launch.name} does not write logits in bfloat16",
        )
        self._note(launch, vocabulary=weight.shape[0])
        self.views["result"] = result

    def _refuse_readers(self) -> None:
        """Nothing but logits and caches is left behind."""
        inside, outside = self.phase.launches[: self.at], self.phase.launches[self.at :]
        written = {view.buffer for launch in inside for view in launch.outputs} - {self.views["result"].buffer}
        read = {view.buffer for launch in outside for view in launch.inputs.values() if view is not None}
        kept = sorted(written & (read | set(self.phase.outputs)))
        _demand(not kept, f"{kept[0] if kept else ''} is read after the logits")


def _is_dense(view: View) -> bool:
    """True if a view is row-major without gaps."""
    strides = [1]
    for size in reversed(view.shape[1:]):
        if not isinstance(size, int):
            return False
        strides.insert(0, strides[0] * size)
    return list(view.strides) == strides
