"""A tiny random decoder, its plan written by hand, artifacts of it on disk, and a naive model to compare with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmcompile.core.expression import multiply
from mmcompile.core.plan import (
    DECODER_INPUTS,
    SAMPLER_INPUTS,
    Buffer,
    CacheSpec,
    Launch,
    Manifest,
    ModelSpec,
    Phase,
    Plan,
    QuantizationSpec,
    TargetEntry,
    View,
    seal,
)
from mmcompile.core.region import Region, Step

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS, EPS = 32, 4, 2, 8, 48, 101, 2, 1e-6
PAGE_SIZE, MAX_BLOCKS, MAX_TOKENS, MAX_BATCH = 4, 16, 16, 4
CONTEXT = PAGE_SIZE * MAX_BLOCKS
EOS = 100


def whole(buffer: Buffer) -> View:
    """View of a whole buffer."""
    strides: list[int | str] = []
    step: int | str = 1
    for dimension in reversed(buffer.shape):
        strides.append(step)
        step = multiply(dimension, step)
    return View(buffer=buffer.name, shape=buffer.shape, strides=tuple(reversed(strides)))


@dataclass
class PlanBuilder:
    """Collects buffers and the launches of the phase that is being written."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    phases: dict[str, Phase] = field(default_factory=dict)
    offset: int = 0
    symbols: dict[str, int] = field(
        default_factory=lambda: {"tokens": MAX_TOKENS, "batch": MAX_BATCH, "max_blocks": MAX_BLOCKS}
    )

    def buffer(self, name: str, shape: tuple, dtype: str, role: str) -> str:
        """Define a buffer; temporaries and outputs get a place of their own in the arena."""
        offset = None
        if role in ("temporary", "output"):
            offset = self.offset
            self.offset += 64 * 1024
        self.buffers[name] = Buffer(name=name, shape=shape, dtype=dtype, role=role, offset=offset)
        return name

    def launch(
        self, op: str, inputs: dict[str, str | View | None], outputs: list[str | View], /, **attributes: Any
    ) -> None:
        """Append a launch without kernels; names stand for whole buffers."""

        def view(item: str | View | None) -> View | None:
            return whole(self.buffers[item]) if isinstance(item, str) else item

        self.launches.append(
            Launch(
                name=f"n{len(self.launches)}",
                op=op,
                inputs={k: view(v) for k, v in inputs.items()},
                outputs=tuple(view(v) for v in outputs),
                attributes=attributes,
            )
        )

    def finish(self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        """Close the phase."""
        self.phases[name] = Phase(
            name=name,
            inputs=inputs,
            outputs=outputs,
            launches=tuple(self.launches),
            after=tuple((i - 1,) if i else () for i in range(len(self.launches))),
            arena_bytes=self.offset,
        )
        self.launches = []

    def plan(self, target: str) -> Plan:
        """The plan so far."""
        return Plan(target=target, symbols=self.symbols, buffers=self.buffers, phases=self.phases, kernels={})


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights, wide enough that greedy choices are never close."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {"embed": normal(VOCAB, HIDDEN, scale=1.0), "lm_head": normal(VOCAB, HIDDEN, scale=0.6)}
    weights["norm"] = 1 + normal(HIDDEN, scale=0.1)
    for i in range(LAYERS):
        weights |= {
            f"{i}.norm1": 1 + normal(HIDDEN, scale=0.1),
            f"{i}.norm2": 1 + normal(HIDDEN, scale=0.1),
            f"{i}.qkv": normal((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, scale=HIDDEN**-0.5),
            f"{i}.q_norm": 1 + normal(HEAD_DIM, scale=0.2),
            f"{i}.k_norm": 1 + normal(HEAD_DIM, scale=0.2),
            f"{i}.o": normal(HIDDEN, HEADS * HEAD_DIM, scale=HIDDEN**-0.5),
            f"{i}.gate": normal(INNER, HIDDEN, scale=HIDDEN**-0.5),
            f"{i}.up": normal(INNER, HIDDEN, scale=HIDDEN**-0.5),
            f"{i}.down": normal(HIDDEN, INNER, scale=INNER**-0.5),
        }
    angle = torch.arange(CONTEXT)[:, None] * (10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    weights["cos_sin"] = torch.cat([angle.cos(), angle.sin()], 1)
    return weights


def write_decoder_phase(b: PlanBuilder, phase: str) -> None:
    """Launches of "prefill", "decode" or "score"."""

    def temporary(name: str, *shape: int | str) -> str:
        return b.buffer(f"{phase}.{name}", ("tokens", *shape), "float32", "temporary")

    x = temporary("x", HIDDEN)
    b.launch("mm.embedding", {"ids": "input_ids", "weight": "embed_scaled"}, [x])
    normed = temporary("h0", HIDDEN)
    b.launch("mm.rms_norm", {"x": x, "weight": "0.norm1"}, [normed], eps=EPS)
    for i in range(LAYERS):
        qkv = temporary(f"{i}.qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        b.launch("mm.linear", {"x": normed, "weight": f"{i}.qkv"}, [qkv])
        q = temporary(f"{i}.q", HEADS, HEAD_DIM)
        norms = {"q_weight": f"{i}.q_norm", "k_weight": f"{i}.k_norm"} if i else {"q_weight": None, "k_weight": None}
        inputs = {"qkv": qkv, **norms, "positions": "positions", "cos_sin": "cos_sin"}
        inputs |= {"kv_cache": f"kv_cache.{i}", "slot_mapping": "slot_mapping"}
        heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        b.launch("mm.qk_norm_rope_insert", inputs, [q], **heads, eps=EPS)
        attended = temporary(f"{i}.attended", HEADS, HEAD_DIM)
        inputs = {"q": q, "kv_cache": f"kv_cache.{i}", "block_table": "block_table", "seq_lens": "seq_lens"}
        b.launch("mm.paged_attention", inputs | {"query_start": "query_start"}, [attended], scale=HEAD_DIM**-0.5)
        flat = View(buffer=attended, shape=("tokens", HEADS * HEAD_DIM), strides=(HEADS * HEAD_DIM, 1))
        projected = temporary(f"{i}.o", HIDDEN)
        b.launch("mm.linear", {"x": flat, "weight": f"{i}.o"}, [projected])
        h, total = temporary(f"{i}.h", HIDDEN), temporary(f"{i}.s", HIDDEN)
        b.launch("mm.add_rms_norm", {"x": projected, "residual": x, "weight": f"{i}.norm2"}, [h, total], eps=EPS)
        inner = temporary(f"{i}.inner", INNER)
        b.launch("mm.linear", {"x": h, "weight": f"{i}.gate_up", "bias": None}, [inner], activation="swiglu")
        x = temporary(f"{i}.x", HIDDEN)
        b.launch("mm.linear", {"x": inner, "weight": f"{i}.down", "residual": total}, [x])
        normed = temporary(f"{i}.normed", HIDDEN)
        following = f"{i + 1}.norm1" if i + 1 < LAYERS else "norm"
        b.launch("mm.rms_norm", {"x": x, "weight": following}, [normed], eps=EPS)
    _write_head(b, phase, normed)


def _write_head(b: PlanBuilder, phase: str, normed: str) -> None:
    if phase == "score":
        b.buffer("token_logits", ("tokens", VOCAB), "float32", "output")
        b.launch("mm.linear", {"x": normed, "weight": "lm_head"}, ["token_logits"])
        b.finish("score", tuple(DECODER_INPUTS), ("token_logits",))
        return
    last = b.buffer(f"{phase}.last", ("batch", HIDDEN), "float32", "temporary")
    b.launch("mm.gather_last", {"x": normed, "query_start": "query_start"}, [last])
    if "logits" not in b.buffers:
        b.buffer("logits", ("batch", VOCAB), "float32", "output")
        b.buffer("next_tokens", ("batch",), "int32", "output")
    b.launch("mm.linear", {"x": last, "weight": "lm_head"}, ["logits"])
    sampler = {name: name for name in SAMPLER_INPUTS if name != "sample_positions"}
    b.launch("mm.sample", {"logits": "logits", **sampler, "positions": "sample_positions"}, ["next_tokens"])
    b.finish(phase, (*DECODER_INPUTS, *SAMPLER_INPUTS), ("logits", "next_tokens"))


def decoder_plan(target: str, weights: dict[str, Tensor], phases: tuple[str, ...]) -> Plan:
    """Plan of the decoder: "load" derives the embedding (a region) and the merged gate and up weights (aten.cat)."""
    b = PlanBuilder()
    for name, tensor in weights.items():
        b.buffer(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "weight")
    for name, (shape, dtype) in (DECODER_INPUTS | SAMPLER_INPUTS).items():
        b.buffer(name, shape, dtype, "input")
    for i in range(LAYERS):
        b.buffer(f"kv_cache.{i}", ("pages", KV_HEADS, PAGE_SIZE, 2 * HEAD_DIM), "float32", "state")
        b.buffer(f"{i}.gate_up", (2 * INNER, HIDDEN), "float32", "derived")
    b.buffer("embed_scaled", (VOCAB, HIDDEN), "float32", "derived")
    region = Region(("in0",), (Step("s0", "mul", ("in0", 2.0), "float32"),), ("s0",))
    b.launch("region.pointwise", {"in0": "embed"}, ["embed_scaled"], **region.to_json())
    for i in range(LAYERS):
        arguments = {"args": [[{"input": "arg0"}, {"input": "arg1"}], 0], "kwargs": {}}
        b.launch("aten.cat.default", {"arg0": f"{i}.gate", "arg1": f"{i}.up"}, [f"{i}.gate_up"], **arguments)
    b.finish("load", (), ())
    for phase in phases:
        write_decoder_phase(b, phase)
    return b.plan(target)


def write_artifact(
    root: Path,
    plans: dict[str, Plan],
    weights: dict[str, Tensor],
    architectures: dict[str, tuple[str, ...]],
    /,
    **manifest: Any,
) -> Path:
    """Write plans, weights, any files already in ``root``, and the manifest over them."""
    (root / "weights").mkdir(parents=True, exist_ok=True)
    if manifest.get("weights", "packed") == "packed":
        save_file(weights, root / "weights" / "model-00001.safetensors")
    for target, plan in plans.items():
        (root / f"plan.{target}.json").write_text(plan.model_dump_json(indent=1))
    (root / "report.html").write_text("<html></html>")
    targets = {
        t: TargetEntry(plan=f"plan.{t}.json", architectures=architectures.get(t, ()), toolchain={}) for t in plans
    }
    record = {
        "mmcompile": "0.1.0",
        "kind": "decoder",
        "quantization": QuantizationSpec(),
        "weights": "packed",
    } | manifest
    write_manifest(root, Manifest(targets=targets, files={}, digest="", **record).model_dump(mode="json"))
    return root


def write_manifest(root: Path, record: dict[str, Any]) -> None:
    """Write manifest.json with the hashes of the files as they are now."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != "manifest.json")
    hashes = {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    (root / "manifest.json").write_text(json.dumps(seal(record | {"files": hashes}), indent=1))


def model_spec(**changes: Any) -> ModelSpec:
    """Record of the tiny decoder."""
    record = {"name": "tiny", "door": "test", "dtype": "float32", "vocab_size": VOCAB, "max_context": CONTEXT}
    return ModelSpec(**(record | {"eos_token_ids": (EOS,)} | changes))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: threads only cost."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def builder() -> type[PlanBuilder]:
    """For tests that write a plan of their own."""
    return PlanBuilder


@pytest.fixture(scope="session")
def store_artifact() -> Callable[..., Path]:
    """See write_artifact; the model record of the tiny decoder unless given."""

    def store(root: Path, plans: dict[str, Plan], weights: dict[str, Tensor], **manifest: Any) -> Path:
        fields = {"model": model_spec(), "cache": None} | manifest
        return write_artifact(root, plans, weights, fields.pop("architectures", {}), **fields)

    return store


@pytest.fixture(scope="session")
def rewrite_manifest() -> Callable[[Path], None]:
    """Bring the manifest's hashes up to date after a file was changed on purpose; edits the record if asked."""

    def rewrite(root: Path, edit: Callable[[dict[str, Any]], Any] = lambda record: None) -> None:
        record = json.loads((root / "manifest.json").read_text())
        edit(record)
        write_manifest(root, record)

    return rewrite


@pytest.fixture(scope="session")
def weights() -> dict[str, Tensor]:
    return make_weights()


@pytest.fixture(scope="session")
def make_artifact(weights: dict[str, Tensor]) -> Callable[..., Path]:
    """Writes an artifact of the tiny decoder into a folder; keywords change manifest fields or the model record."""

    def make(
        root: Path,
        *,
        targets: dict[str, tuple[str, ...]] | None = None,
        phases: tuple[str, ...] = ("prefill", "decode", "score"),
        model: dict[str, Any] | None = None,
        **manifest: Any,
    ) -> Path:
        architectures = targets or {"cpu": ()}
        plans = {target: decoder_plan(target, weights, phases) for target in architectures}
        size = 2 * HEAD_DIM * KV_HEADS * LAYERS * 4
        cache = CacheSpec(page_size=PAGE_SIZE, dtype="float32", layers=LAYERS, bytes_per_token=size)
        fields = {"model": model_spec(**(model or {})), "cache": cache} | manifest
        return write_artifact(root, plans, weights, architectures, **fields)

    return make


@pytest.fixture(scope="session")
def artifact(make_artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the tiny decoder for the CPU; do not change it."""
    return make_artifact(tmp_path_factory.mktemp("artifact"))


@pytest.fixture(scope="session")
def naive_logits(weights: dict[str, Tensor]) -> Callable[[list[int]], Tensor]:
    """The decoder in plain torch, without cache or mm operations: token ids -> logits [tokens, vocabulary]."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight

    def rotate(x: Tensor) -> Tensor:
        cos, sin = weights["cos_sin"][: x.shape[0], None].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def run(ids: list[int]) -> Tensor:
        w, t = weights, len(ids)
        x = 2 * w["embed"][ids]
        for i in range(LAYERS):
            qkv = (norm(x, w[f"{i}.norm1"]) @ w[f"{i}.qkv"].T).view(t, -1, HEAD_DIM)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
            if i:
                q, k = norm(q, w[f"{i}.q_norm"]), norm(k, w[f"{i}.k_norm"])
            q, k = rotate(q), rotate(k)
            k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
            scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
            x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(t, -1) @ w[f"{i}.o"].T
            h = norm(x, w[f"{i}.norm2"])
            x = x + (torch.nn.functional.silu(h @ w[f"{i}.gate"].T) * (h @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
        return norm(x, w["norm"]) @ w["lm_head"].T

    return run


@pytest.fixture(scope="session")
def naive_greedy(naive_logits: Callable[[list[int]], Tensor]) -> Callable[[list[int], int], list[int]]:
    """Greedy continuation by the naive model: (prompt, count) -> tokens."""

    def run(prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(naive_logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    return run
