"""The graph of a decoder with one layer of block-sparse attention and experts, by hand: no capture to wait for."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mmcompile.core import ops  # noqa: F401
from mmcompile.core.symbols import make_fake_mode

MM = torch.ops.mm
HIDDEN, WIDTH, VOCABULARY, EXPERTS, TOP_K = 64, 32, 512, 8, 2
HEADS, KV_HEADS, INDEX_HEADS, HEAD_DIM, PAGE = 4, 2, 2, 16, 16
QKV = (HEADS + 2 * KV_HEADS + INDEX_HEADS + 1) * HEAD_DIM
SYMBOLS = {"tokens": 16, "batch": 16, "max_blocks": 16, "pages": 64}
CACHES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "nvfp4": torch.uint8}


class SparseLayer:
    """Builds the graph; ``weights``: "bf16", or "mxfp8" linears with NVFP4 experts; ``cache``: a key of CACHES."""

    def __init__(self, weights: str, cache: str) -> None:
        self.mxfp8, self.nvfp4, self.cache = weights == "mxfp8", cache == "nvfp4", CACHES[cache]
        self.mode, self.symbols = make_fake_mode({name: (1, most) for name, most in SYMBOLS.items()})
        self.root, self.graph = torch.nn.Module(), fx.Graph()

    def symbol(self, name: str) -> Any:
        return self.symbols[name]

    def input(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype = torch.int32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        target = name.replace(".", "_")
        self.root.register_buffer(target, torch.zeros(shape, dtype=dtype))
        node = self.graph.get_attr(target)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, function: Any, *arguments: Any) -> fx.Node:
        node = self.graph.call_function(function, arguments)
        values = fx.map_arg(arguments, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = function(*values)
        return node

    def items(self, node: fx.Node) -> list[fx.Node]:
        return [self.call(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def packed(self, name: str, rows: int, k: int) -> tuple[fx.Node, ...]:
        """The weight of a linear layer: bf16, or values and scales."""
        if not self.mxfp8:
            return (self.weight(name, (rows, k)),)
        return (self.weight(f"{name}.values", (rows, k), torch.float8_e4m3fn),
                self.weight(f"{name}.scale", (rows, k // 32), torch.uint8))  # fmt: skip

    def linear(self, x: fx.Node, name: str, rows: int, k: int) -> fx.Node:
        if self.mxfp8:
            return self.call(MM.linear_mxfp8.default, x, *self.packed(name, rows, k), None, None, "none")
        return self.call(MM.linear.default, x, *self.packed(name, rows, k), None, None, "none")

    def attention(self, x: fx.Node) -> fx.Node:
        batch, pages = self.symbol("batch"), self.symbol("pages")
        positions, slots = (self.graph.find_nodes(op="placeholder")[i] for i in (1, 2))
        table = self.input("block_table", (batch, self.symbol("max_blocks")))
        lengths, starts = self.input("seq_lens", (batch,)), self.input("query_start", (batch + 1,))
        width = HEAD_DIM // 2 + 1 if self.nvfp4 else HEAD_DIM
        shape = (pages, 2 * KV_HEADS, PAGE, width) if self.nvfp4 else (pages, KV_HEADS, PAGE, 2 * HEAD_DIM)
        kv = self.input("kv_cache_0", shape, self.cache)
        index = self.input("kv_cache_0_index", (pages, PAGE, width), self.cache)
        layouts = ("nvfp4.linear", "nvfp4.index") if self.nvfp4 else ("linear", "linear")
        norms = [self.weight(f"layers.0.{n}_norm", (HEAD_DIM,)) for n in ("q", "k", "index_q", "index_k")]
        angles = self.weight("cos_sin_table", (256, HEAD_DIM // 2))
        project = MM.qkv_norm_rope_insert_index_mxfp8 if self.mxfp8 else MM.qkv_norm_rope_insert_index
        q, index_q = self.items(self.call(
            project.default, x, *self.packed("layers.0.qkv", QKV, HIDDEN), None, *norms, positions, angles, kv, index,
            slots, HEADS, KV_HEADS, INDEX_HEADS, HEAD_DIM, 1e-6, 1.0, False, None, *layouts,
        ))  # fmt: skip
        scores = self.call(MM.paged_index_score.default, index_q, index, table, lengths, starts, layouts[1])
        blocks = self.call(MM.block_top_k.default, scores, positions, PAGE, 3, 1, 0)
        operands = (q, kv, blocks, table, lengths, starts)
        found = self.call(MM.paged_block_sparse_attention.default, *operands, 0.25, layouts[0])
        return self.call(torch.ops.aten.reshape.default, found, [-1, HEADS * HEAD_DIM])

    def experts(self, x: fx.Node) -> fx.Node:
        wide = self.call(torch.ops.aten.to.dtype, x, torch.float32)
        gate = self.weight("layers.0.gate", (EXPERTS, HIDDEN), torch.float32)
        logits = self.call(MM.linear.default, wide, gate)
        bias = self.weight("layers.0.bias", (EXPERTS,), torch.float32)
        weights, chosen = self.items(self.call(MM.route_top_k.default, logits, bias, TOP_K, 2.0))
        both = self.linear(x, "layers.0.shared.gate_up", 2 * WIDTH, HIDDEN)
        split = self.call(torch.ops.aten.split_with_sizes.default, both, [WIDTH, WIDTH], -1)
        gated = self.call(MM.swiglu_oai.default, *self.items(split), 1.702, 7.0)
        shared = self.linear(gated, "layers.0.shared.down", HIDDEN, WIDTH)
        stacks: list[fx.Node] = []
        for name, rows, k in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            if self.mxfp8:
                stacks.append(self.weight(f"layers.0.{name}.packed", (EXPERTS, rows, k // 2), torch.uint8))
                stacks.append(self.weight(f"layers.0.{name}.scale", (EXPERTS, rows, k // 16), torch.float8_e4m3fn))
                stacks.append(self.weight(f"layers.0.{name}.global", (EXPERTS, rows), torch.float32))
            else:
                stacks.append(self.weight(f"layers.0.{name}", (EXPERTS, rows, k)))
        op = MM.moe_nvfp4 if self.mxfp8 else MM.moe
        return self.call(op.default, x, chosen, weights, *stacks, shared, "swiglu_oai", 1.702, 7.0)

    def build(self) -> fx.GraphModule:
        tokens = self.symbol("tokens")
        ids = self.input("input_ids", (tokens,))
        self.input("positions", (tokens,))
        self.input("slot_mapping", (tokens,), torch.int64)
        x = self.call(MM.embedding.default, ids, self.weight("embed", (VOCABULARY, HIDDEN)))
        normed = self.call(MM.rms_norm.default, x, self.weight("layers.0.norm", (HIDDEN,)), 1e-6, 1.0, False)
        attended = self.linear(self.attention(normed), "layers.0.o", HIDDEN, HEADS * HEAD_DIM)
        norm = self.weight("layers.0.norm2", (HIDDEN,))
        normed, x = self.items(self.call(MM.add_rms_norm.default, x, attended, norm, 1e-6, 1.0, False))
        norm = self.weight("norm", (HIDDEN,))
        normed, _ = self.items(self.call(MM.add_rms_norm.default, x, self.experts(normed), norm, 1e-6, 1.0, False))
        logits = self.call(MM.linear.default, normed, self.weight("lm_head", (VOCABULARY, HIDDEN)))
        self.graph.output((logits,))
        return fx.GraphModule(self.root, self.graph)
