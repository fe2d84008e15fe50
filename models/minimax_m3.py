"""MiniMax-M3 and M3.1-Flash, text decoder: plain PyTorch, stateless, weights named as in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmcompile.core.formats.footprint import count_checkpoint_bytes
from mmcompile.models._minimax_m3_checkpoint import list_checkpoint_weights
from mmcompile.models._minimax_m3_config import MODEL_TYPES, MiniMaxM3Config, read_config, slice_layers

__all__ = ["MODELS", "MODEL_TYPES", "MiniMaxM3Config", "build", "find_weights", "read_config", "slice_layers"]


_MOE = (0,) * 3 + (1,) * 57
_TINY = MiniMaxM3Config(
    sparse_attention_freq=(0, 1, 1), moe_layer_freq=(0, 1, 1), vocab_size=512, hidden_size=64,
    dense_intermediate_size=96, intermediate_size=32, shared_intermediate_size=32, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, rotary_dim=8, max_positions=1024, num_experts=8, experts_per_token=2, index_heads=2,
    index_head_dim=16, block_size=16, top_k_blocks=3, eos_token_ids=(2,),
)  # fmt: skip

MODELS: dict[str, MiniMaxM3Config] = {
    "minimax-m3": MiniMaxM3Config(sparse_attention_freq=_MOE, moe_layer_freq=_MOE),
    "minimax-m3.1-flash": MiniMaxM3Config(sparse_attention_freq=(1,) * 60, moe_layer_freq=_MOE),
    "minimax-m3-tiny": _TINY,
    "minimax-m3.1-flash-tiny": replace(_TINY, sparse_attention_freq=(1, 1, 1)),
    # One layer with the heads, the group and the blocks of the real model, for what depends on them (cache layouts).
    "minimax-m3.1-flash-tiny-heads": replace(
        _TINY,
        sparse_attention_freq=(1,),
        moe_layer_freq=(1,),
        num_layers=1,
        num_heads=16,
        num_kv_heads=1,
        head_dim=128,
        rotary_dim=64,
        index_heads=1,
        index_head_dim=128,
        block_size=128,
    ),
}

# Mixes of formats in which checkpoints are published, and how many multi-token prediction modules those hold.
_PUBLISHED = {"minimax-m3": {"mxfp8": 1}, "minimax-m3.1-flash": {"nvfp4_mxfp8": 0}}

WEIGHTS_ADVICE = "name a directory with the checkpoint instead, or build with --weights random or none"


def find_weights(name: str) -> Path | None:
    """No installed package holds these weights."""
    return None


def count_beside(name: str) -> dict[str, int]:
    """Bytes that the published checkpoint holds beside the text decoder, by part; {} for slices and tiny models."""
    if name not in ("minimax-m3", "minimax-m3.1-flash"):
        return {}
    weights = list_checkpoint_weights({}, MODELS[name], "bf16")
    return {"vision tower": count_checkpoint_bytes(weights)["total"]}


def count_published(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes of the checkpoints of a model as they are published, by mix of formats; {} for slices and tiny models.

    ``shapes``: of the text decoder's parameters; what lies beside it is counted too.
    """
    mixes = _PUBLISHED.get(name, {})
    listed = {mix: list_checkpoint_weights(shapes, MODELS[name], mix, mtp_modules=n) for mix, n in mixes.items()}
    return {mix: count_checkpoint_bytes(weights)["total"] for mix, weights in listed.items()}


def build(config: MiniMaxM3Config) -> nn.Module:
    """The decoder with freshly initialised weights (normal, deviation 0.02; norms and the router's bias at zero)."""
    return MiniMaxM3ForCausalLM(config)


class RMSNorm(nn.Module):
    """Gemma's RMSNorm over the last dimension: fp32 throughout, times ``1 + weight``, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, NeoX halves, of the first r dimensions; x [tokens, heads, d], cos, sin [tokens, 1, r], halves repeated."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def swiglu_oai(gate: Tensor, up: Tensor, config: MiniMaxM3Config) -> Tensor:
    """gpt-oss's activation ``(up + 1) * gate * sigmoid(alpha * gate)``, gate clamped from above, up on both sides."""
    gate = gate.clamp(max=config.swiglu_limit)
    up = up.clamp(min=-config.swiglu_limit, max=config.swiglu_limit)
    return (up + 1.0) * (gate * torch.sigmoid(gate * config.swiglu_alpha))


class Places(NamedTuple):
    """Where the tokens are: positions and blocks [tokens], the angles of RoPE [tokens, 1, r], and which keys (columns)
    lie ahead of a query (row)."""

    positions: Tensor
    block: Tensor
    cos: Tensor
    sin: Tensor
    future: Tensor


def locate(positions: Tensor, frequencies: Tensor, block_size: int, dtype: torch.dtype) -> Places:
    """Places of the tokens of one sequence, positions int [tokens]."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    key = torch.arange(positions.shape[0], device=positions.device)
    future = key > positions[:, None]
    cos, sin = angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]
    return Places(positions, key // block_size, cos, sin, future)


class Attention(nn.Module):
    """Causal grouped-query attention with per-head norms and partial RoPE, over one sequence."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, places: Places, blocks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [tokens, hidden] -> [tokens, hidden], and the blocks as they came."""
        return self._attend(x, places, None), blocks

    def _attend(self, x: Tensor, places: Places, seen: Tensor | None) -> Tensor:
        """``seen``: boolean [heads, tokens, tokens], None for all earlier tokens."""
        q, k, v = (p(x).view(x.shape[0], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), places.cos, places.sin), rotate(self.k_norm(k), places.cos, places.sin)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        mask = None if seen is None else seen[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=seen is None, enable_gqa=True)
        return self.o_proj(out[0].transpose(0, 1).reshape(x.shape[0], -1))


class SparseAttention(Attention):
    """Attention over the blocks of keys that an indexer chooses for every query, per KV group (arXiv 2606.13392)."""

    def __init__(self, config: MiniMaxM3Config, chooses: bool) -> None:
        super().__init__(config)
        self.config, self.chooses = config, chooses
        self.index_q_proj = nn.Linear(config.hidden_size, config.index_heads * config.index_head_dim, bias=False)
        self.index_k_proj = nn.Linear(config.hidden_size, config.index_head_dim, bias=False)
        self.index_q_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps)
        self.index_k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, places: Places, blocks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As of Attention; ``blocks`` are those that an earlier layer chose, read where this layer shares them."""
        if self.chooses or blocks is None:
            blocks = self._choose(self._score(x, places), places)
        return self._attend(x, places, self._see(blocks, places)), blocks

    def _score(self, x: Tensor, places: Places) -> Tensor:
        """Scores fp32 [tokens, index heads, blocks]: the largest product of the query with a key of the block."""
        tokens = x.shape[0]
        q = self.index_q_norm(self.index_q_proj(x).view(tokens, -1, self.config.index_head_dim))
        k = self.index_k_norm(self.index_k_proj(x).view(tokens, 1, self.config.index_head_dim))
        q, k = rotate(q, places.cos, places.sin), rotate(k, places.cos, places.sin)
        scores = torch.matmul(q.float(), k[:, 0].float().t()).masked_fill(places.future[:, None], float("-inf"))
        blocks = scores.new_full((tokens, self.config.index_heads, self._count_blocks(tokens)), float("-inf"))
        return blocks.scatter_reduce(-1, places.block.expand_as(scores), scores, "amax")

    def _count_blocks(self, tokens: int) -> int:
        """All blocks that hold a token and some that hold none, so that there are always enough to choose from."""
        return tokens // self.config.block_size + 1 + self.config.top_k_blocks

    def _choose(self, scores: Tensor, places: Places) -> Tensor:
        """Ids [tokens, index heads, top_k_blocks] of the chosen blocks, -1 where there are not as many."""
        config = self.config
        block = torch.arange(scores.shape[-1], device=scores.device)
        own = (places.positions // config.block_size)[:, None]
        forced = (block <= own) & ((block > own - config.local_blocks) | (block < config.initial_blocks))
        scores = scores.masked_fill(forced[:, None], float("inf"))
        best, ids = scores.topk(config.top_k_blocks, dim=-1)
        return ids.masked_fill(best == float("-inf"), -1)

    def _see(self, blocks: Tensor, places: Places) -> Tensor:
        """Boolean [heads, tokens, tokens]: the key lies in a chosen block and not ahead of the query."""
        last = self._count_blocks(places.block.shape[0]) - 1
        chosen = torch.zeros(*blocks.shape[:2], last + 1, dtype=torch.bool, device=blocks.device)
        chosen = chosen.scatter(-1, blocks.masked_fill(blocks < 0, last), True)
        seen = chosen[..., places.block] & ~places.future[:, None]
        return seen.transpose(0, 1).repeat_interleave(self.config.num_heads // self.config.index_heads, dim=0)


class MLP(nn.Module):
    """SwiGLU-OAI feed-forward."""

    def __init__(self, config: MiniMaxM3Config, intermediate_size: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu_oai(self.gate_proj(x), self.up_proj(x), self.config))


class Experts(nn.Module):
    """The matrices of all experts of a layer."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.config = config
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden]; experts and weights [tokens, places]: every place is a row of its own, then summed."""
        places = experts.shape[1]
        chosen = experts.reshape(-1)
        rows = x.repeat_interleave(places, dim=0).unsqueeze(-1)
        gate, up = torch.bmm(self.gate_up_proj[chosen], rows).squeeze(-1).chunk(2, dim=-1)
        hidden = swiglu_oai(gate, up, self.config).unsqueeze(-1)
        rows = torch.bmm(self.down_proj[chosen], hidden).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
        return rows.view(x.shape[0], places, -1).sum(dim=1).to(x.dtype)


class MoE(nn.Module):
    """Experts chosen by a sigmoid router, and a shared expert that every token passes."""

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))
        self.experts = Experts(config)
        self.shared_experts = MLP(config, config.shared_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.gate(x.to(self.gate.weight.dtype)).float())
        ranking = scores + self.e_score_correction_bias.float()
        experts = torch.topk(ranking, self.config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        routed = self.experts(x, experts, weights / weights.sum(dim=-1, keepdim=True))
        return routed * self.config.routed_scaling_factor + self.shared_experts(x)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection; their kinds are read from the config."""

    def __init__(self, config: MiniMaxM3Config, index: int) -> None:
        super().__init__()
        sparse, experts = config.sparse_attention_freq[index], config.moe_layer_freq[index]
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SparseAttention(config, config.chooses_blocks(index)) if sparse else Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if experts else MLP(config, config.dense_intermediate_size)

    def forward(self, x: Tensor, places: Places, blocks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        attended, blocks = self.self_attn(self.input_layernorm(x), places, blocks)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), blocks


class MiniMaxM3Model(nn.Module):
    """Embedding, layers and final norm."""

    rotary: Tensor

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_size = config.block_size
        pairs = torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim
        self.register_buffer("rotary", 1.0 / config.rope_theta**pairs, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        places, blocks = locate(positions, self.rotary, self.block_size, x.dtype), None
        for layer in self.layers:
            x, blocks = layer(x, places, blocks)
        return self.norm(x)


class MiniMaxM3ForCausalLM(nn.Module):
    """Decoder with a language-model head: input_ids, positions int [tokens] -> logits [tokens, vocab]."""

    # Parameters that stay fp32 in a bf16 model: the published checkpoints route in fp32.
    _keep_in_fp32_modules_strict = ("mlp.gate.weight", "e_score_correction_bias")

    def __init__(self, config: MiniMaxM3Config) -> None:
        super().__init__()
        self.config = config
        self.model = MiniMaxM3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, positions))
