"""A small decoder that is already standardised: mm:: ops only, token-major, stateless."""

import functools

import pytest
import torch
from torch import nn

from mmcompile.capture.export import capture_module
from mmcompile.core import ops as _ops  # noqa: F401  registers mm::
from mmcompile.core.runner import copy_graph

MM = torch.ops.mm


class StandardDecoder(nn.Module):
    """Llama-like (Qwen3-like with qk_norm) over mm:: ops: input_ids [tokens], positions [tokens] -> [tokens, vocab]."""

    def __init__(
        self,
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        inter=96,
        vocab=80,
        qk_norm=False,
        bias=False,
        dtype=torch.float32,
        seed=0,
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape, scale=0.1):
            return nn.Parameter((torch.randn(*shape, generator=generator) * scale).to(dtype), requires_grad=False)

        self.heads, self.kv_heads, self.head_dim, self.qk_norm = heads, kv_heads, head_dim, qk_norm
        self.embed = parameter(vocab, hidden, scale=1.0)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.norm1, layer.norm2 = parameter(hidden, scale=1.0), parameter(hidden, scale=1.0)
            layer.q, layer.o = parameter(heads * head_dim, hidden), parameter(hidden, heads * head_dim)
            layer.k, layer.v = parameter(kv_heads * head_dim, hidden), parameter(kv_heads * head_dim, hidden)
            layer.qb = parameter(heads * head_dim) if bias else None
            layer.kb = parameter(kv_heads * head_dim) if bias else None
            layer.vb = parameter(kv_heads * head_dim) if bias else None
            layer.qn, layer.kn = parameter(head_dim, scale=1.0), parameter(head_dim, scale=1.0)
            layer.gate, layer.up, layer.down = (
                parameter(inter, hidden),
                parameter(inter, hidden),
                parameter(hidden, inter),
            )
            self.layers.append(layer)
        self.norm, self.head = parameter(hidden, scale=1.0), parameter(vocab, hidden)
        angles = torch.outer(torch.arange(256).float(), 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim))
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype))

    def forward(self, input_ids, positions):
        x = MM.embedding(input_ids, self.embed)
        for layer in self.layers:
            h = MM.rms_norm(x, layer.norm1, 1e-5, 0.0, True)
            q, k, v = (MM.linear(h, w, b) for w, b in ((layer.q, layer.qb), (layer.k, layer.kb), (layer.v, layer.vb)))
            q = q.reshape(-1, self.heads, self.head_dim)
            k = k.reshape(-1, self.kv_heads, self.head_dim)
            v = v.reshape(-1, self.kv_heads, self.head_dim)
            if self.qk_norm:
                q, k = MM.rms_norm(q, layer.qn, 1e-6, 0.0, True), MM.rms_norm(k, layer.kn, 1e-6, 0.0, True)
            q, k = MM.rope(q, positions, self.cos_sin), MM.rope(k, positions, self.cos_sin)
            a = MM.attention(q, k, v, self.head_dim**-0.5, 0)
            x = x + MM.linear(a.reshape(-1, self.heads * self.head_dim), layer.o)
            h = MM.rms_norm(x, layer.norm2, 1e-5, 0.0, True)
            x = x + MM.linear(MM.swiglu(MM.linear(h, layer.gate), MM.linear(h, layer.up)), layer.down)
        return MM.linear(MM.rms_norm(x, self.norm, 1e-5, 0.0, True), self.head)


@functools.cache
def export_standard(**options):
    """Export a StandardDecoder to a graph as capture + standardise leave it."""
    example = {"input_ids": torch.arange(6, dtype=torch.int32), "positions": torch.arange(6, dtype=torch.int32)}
    dynamic = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
    symbols = {"tokens": (1, 4096)}
    captured = capture_module(StandardDecoder(**options), example, dynamic=dynamic, symbols=symbols, kind="decoder")
    return captured.graph_module


@pytest.fixture
def standard_decoder():
    """Factory of exported standard decoders; every call gives a graph of its own."""
    return lambda **options: copy_graph(export_standard(**options))
