"""Methods of transformers' modules that torch.export cannot trace, spelled so that it can, and a check that they agree.

MiniMax-M3's indexer asks whether the length is a multiple of the block and takes the smaller of two lengths, which
fixes the length of the prompt. The stand-ins choose among the blocks and some empty ones instead.
"""

from __future__ import annotations

import copy
import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mmcompile.core.errors import CaptureError

_INDEXER = "MiniMaxM3VLIndexer"


def stand_in(module: nn.Module) -> list[str]:
    """Give every indexer in ``module`` methods that torch.export can trace; returns the paths of those modules.

    Raises CaptureError if the installed transformers computes something else, as its first releases with this model
    do, where all heads share one choice of blocks.
    """
    found = {path: m for path, m in module.named_modules() if type(m).__name__ == _INDEXER}
    for path, indexer in found.items():
        if path == next(iter(found)):
            _check(indexer)
        indexer.forward = MethodType(_choose, indexer)
        indexer.build_block_mask = MethodType(_build_mask, indexer)  # type: ignore[assignment]
    return list(found)


def _count_blocks(indexer: Any, tokens: int) -> int:
    """All blocks that hold a token, and some that hold none, so that there are always enough to choose from."""
    return tokens // indexer.block_size + 1 + indexer.topk_blocks


def _choose(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor
) -> Tensor:
    """Ids [batch, heads, tokens, topk_blocks] of the chosen blocks of a prompt without a cache; -1 = none."""
    if cache is not None:
        raise CaptureError("the indexer was given a cache", where=_INDEXER, fix="capture with use_cache=False")
    batch, tokens, _ = hidden_states.shape
    q = self.q_norm(self.q_proj(hidden_states).view(batch, tokens, self.num_heads, self.head_dim)).transpose(1, 2)
    k = self.k_norm(self.k_proj(hidden_states).view(batch, tokens, 1, self.head_dim)).transpose(1, 2)
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    q, k = rotate(q, k, *(angles[..., : self.head_dim] for angles in position_embeddings))
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    key = torch.arange(tokens, device=scores.device)
    scores = scores.masked_fill(key > position_ids[:, None, :, None], float("-inf"))
    blocks = scores.new_full((batch, self.num_heads, tokens, _count_blocks(self, tokens)), float("-inf"))
    blocks = blocks.scatter_reduce(-1, (key // self.block_size).expand_as(scores), scores, "amax")
    own = (position_ids // self.block_size)[:, None, :, None]
    block = torch.arange(blocks.shape[-1], device=scores.device)
    local = (block <= own) & (block > own - self.local_blocks)
    best, ids = blocks.masked_fill(local, float("inf")).topk(self.topk_blocks, dim=-1)
    return ids.masked_fill(best == float("-inf"), -1)


def _build_mask(
    self: Any,
    block_indices: Tensor,
    attention_mask: Tensor | None,
    key_length: int,
    dtype: torch.dtype,
    device: torch.device,
    position_ids: Tensor,
) -> Tensor:
    """Mask [batch, query heads, tokens, tokens] to add to the scores: 0 where a chosen block's key is not ahead."""
    last = _count_blocks(self, key_length) - 1
    chosen = torch.zeros(*block_indices.shape[:3], last + 1, dtype=torch.bool, device=device)
    chosen = chosen.scatter(-1, block_indices.masked_fill(block_indices < 0, last), True)
    key = torch.arange(key_length, device=device)
    keep = chosen[..., key // self.block_size] & (key <= position_ids[:, None, :, None])
    keep = keep.repeat_interleave(self.config.num_attention_heads // block_indices.shape[1], dim=1)
    if attention_mask is not None:
        keep = keep & (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)
    return torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill(~keep, torch.finfo(dtype).min)


def _check(indexer: Any) -> None:
    """Compare the stand-ins with the methods they replace, for prompts within and beyond the chosen blocks."""
    config = copy.deepcopy(indexer.config)
    config.hidden_size = 8
    config.index_block_size = min(config.index_block_size, 8)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        small = type(indexer)(config, indexer.layer_idx).float().requires_grad_(False)
        for parameter in small.parameters():
            parameter.data = torch.randn(parameter.shape)
        for tokens in (1, config.index_block_size, (config.index_topk_blocks + 3) * config.index_block_size + 1):
            if not _agree(small, torch.randn(1, tokens, 8)):
                raise CaptureError(
                    "the indexer of the installed transformers does not choose blocks for each KV group on its own",
                    where=f"{type(indexer).__module__}.{_INDEXER}",
                    fix="use transformers 5.24 or later",
                )


def _agree(indexer: Any, hidden_states: Tensor) -> bool:
    positions = torch.arange(hidden_states.shape[1])[None]
    angles = positions[..., None] * torch.rand(indexer.head_dim // 4).repeat(2)
    given = hidden_states, (angles.cos(), angles.sin()), None, positions
    ids, wanted = _choose(indexer, *given), type(indexer).forward(indexer, *given)
    if ids.dim() != wanted.dim() or ids.shape[:3] != wanted.shape[:3]:
        return False
    length = hidden_states.shape[1]
    rest = None, length, torch.float32, ids.device, positions
    masks = _build_mask(indexer, ids, *rest), type(indexer).build_block_mask(indexer, wanted, *rest)
    return torch.equal(*masks)
