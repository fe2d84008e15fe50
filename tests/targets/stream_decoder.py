"""The decode phase of a small dense decoder as a plan, written by hand, for tests of the streamed step."""

from __future__ import annotations

from typing import Any

from mmcompile.core.plan import DECODER_INPUTS, Buffer, Launch, Phase, Plan, View

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY, PAGE = 256, 4, 2, 64, 256, 500, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def view(buffer: Buffer) -> View:
    """The whole of a buffer."""
    strides: list[Any] = [1]
    for size in reversed(buffer.shape[1:]):
        strides.insert(0, strides[0] * size if isinstance(size, int) and isinstance(strides[0], int) else size)
    return View(buffer=buffer.name, shape=buffer.shape, strides=tuple(strides))


class Decoder:
    """Buffers and launches of ``layers`` layers; a test changes them before it asks for the plan."""

    def __init__(self, layers: int = 2) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.launches: list[Launch] = []
        for name, (shape, dtype) in DECODER_INPUTS.items():
            self.buffers[name] = Buffer(name=name, shape=shape, dtype=dtype, role="input")
        self.weight("embed", VOCABULARY, HIDDEN)
        self.weight("cos_sin", 64, HEAD_DIM)
        stream = self.call("embed", "embedding", {"ids": "input_ids", "weight": "embed"}, (HIDDEN,))[0]
        left: tuple[str, ...] = (stream,)
        for i in range(layers):
            normed, left = self.norm(f"layers.{i}.input", left)
            attended = self.attend(i, normed)
            left = (*left, self.linear(f"layers.{i}.o", attended, HIDDEN, HEADS * HEAD_DIM))
            normed, left = self.norm(f"layers.{i}.after", left)
            gate = self.linear(f"layers.{i}.gate_up", normed, 2 * INTERMEDIATE, HIDDEN, "swiglu")
            residual = left[0] if i == layers - 1 else None  # the last one adds by itself, as builds do
            down = self.linear(f"layers.{i}.down", gate, HIDDEN, INTERMEDIATE, residual=residual)
            left = (down,) if residual else (*left, down)
        normed, _ = self.norm("norm", left)
        self.buffers["logits"] = Buffer(
            name="logits", shape=("batch", VOCABULARY), dtype="bfloat16", role="output", offset=0
        )
        self.linear("head", normed, VOCABULARY, HIDDEN, out="logits")
        self.call("sample", "sample", {"logits": "logits"}, (1,))

    def weight(self, name: str, *shape: int, dtype: str = "bfloat16") -> str:
        self.buffers[name] = Buffer(name=name, shape=shape, dtype=dtype, role="weight")
        return name

    def call(
        self,
        name: str,
        op: str,
        inputs: dict[str, str | None],
        out: tuple[int, ...],
        results: int = 1,
        **attributes: Any,
    ) -> list[str]:
        """Add a launch with results of its own: their names."""
        names = [f"decode.{name}.{i}" for i in range(results)]
        for result in names:
            self.buffers[result] = Buffer(
                name=result, shape=("tokens", *out), dtype="bfloat16", role="temporary", offset=4096 * len(self.buffers)
            )
        outputs = tuple(view(self.buffers[n]) for n in names)
        read = {key: view(self.buffers[n]) if n else None for key, n in inputs.items()}
        self.launches.append(Launch(name=name, op=f"mm.{op}", inputs=read, outputs=outputs, attributes=attributes))
        return names

    def norm(self, name: str, left: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        weight = self.weight(f"{name}_norm", HIDDEN)
        facts = {"eps": 1e-5, "weight_offset": 0.0, "round_before_scale": True}
        if len(left) == 1:
            return self.call(f"{name}.rms", "rms_norm", {"x": left[0], "weight": weight}, (HIDDEN,), **facts)[0], left
        inputs: dict[str, str | None] = {"x": left[0], "residual": left[1], "weight": weight}
        normed, total = self.call(f"{name}.rms", "add_rms_norm", inputs, (HIDDEN,), 2, **facts)
        return normed, (total,)

    def attend(self, i: int, normed: str) -> str:
        cache = f"kv_cache_{i}"
        self.buffers[cache] = Buffer(
            name=cache, shape=("pages", KV_HEADS, PAGE, 2 * HEAD_DIM), dtype="bfloat16", role="state"
        )
        inputs: dict[str, str | None] = {
            "x": normed, "weight": self.weight(f"layers.{i}.qkv", QKV, HIDDEN), "bias": None, "q_weight": None,
            "k_weight": None, "delta": None, "positions": "positions", "cos_sin": "cos_sin", "kv_cache": cache,
            "slot_mapping": "slot_mapping",
        }  # fmt: skip
        (q,) = self.call(
            f"layers.{i}.qkv", "qkv_norm_rope_insert", inputs, (HEADS, HEAD_DIM), num_heads=HEADS,
            num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, eps=0.0, weight_offset=0.0, layout="linear",
        )  # fmt: skip
        inputs = {"q": q, "kv_cache": cache, "block_table": "block_table", "seq_lens": "seq_lens",
                  "query_start": "query_start"}  # fmt: skip
        return self.call(
            f"layers.{i}.attention", "paged_attention", inputs, (HEADS * HEAD_DIM,), scale=0.125, window=0,
            layout="linear",
        )[0]  # fmt: skip

    def linear(
        self, name: str, x: str, rows: int, k: int, activation: str = "none", residual: str | None = None, out: str = ""
    ) -> str:
        width = rows // 2 if activation == "swiglu" else rows
        inputs: dict[str, str | None] = {
            "x": x, "weight": self.weight(name, rows, k), "bias": None, "residual": residual
        }  # fmt: skip
        (result,) = self.call(name, "linear", inputs, (width,), activation=activation)
        if out:
            del self.buffers[result]
            self.launches[-1] = self.launches[-1].model_copy(update={"outputs": (view(self.buffers[out]),)})
        return out or result

    def change(self, name: str, op: str | None = None, **attributes: Any) -> None:
        """Other attributes, or another operation, of the launch ``name``."""
        index = next(i for i, launch in enumerate(self.launches) if launch.name == name)
        launch = self.launches[index]
        changed = {"attributes": launch.attributes | attributes, "op": f"mm.{op}" if op else launch.op}
        self.launches[index] = launch.model_copy(update=changed)

    def give(self, name: str, **inputs: str | None) -> None:
        """Other inputs of the launch ``name``, by buffer."""
        index = next(i for i, launch in enumerate(self.launches) if launch.name == name)
        views = {key: view(self.buffers[n]) if n else None for key, n in inputs.items()}
        self.launches[index] = self.launches[index].model_copy(update={"inputs": self.launches[index].inputs | views})

    def plan(self) -> Plan:
        phase = Phase(
            name="decode", inputs=tuple(DECODER_INPUTS), outputs=("logits",), launches=tuple(self.launches),
            after=tuple(() for _ in self.launches), arena_bytes=4096 * len(self.buffers),
        )  # fmt: skip
        symbols = {"tokens": 8, "batch": 8, "max_blocks": 4}
        return Plan(target="sm90", symbols=symbols, buffers=self.buffers, phases={"decode": phase}, kernels={})
