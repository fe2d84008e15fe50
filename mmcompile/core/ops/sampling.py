"""Choosing the next token: greedy, temperature, top-k, top-p, seeded and independent of the batch around it."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcompile.core.ops.define import define_op

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _mul_hi_lo(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * constant for int64 tensors that hold 32-bit values."""
    low_a, high_a = a & 0xFFFF, a >> 16
    low = low_a * constant
    mid = high_a * constant + (low >> 16)
    return (mid >> 16) & _MASK, ((mid & 0xFFFF) << 16) | (low & 0xFFFF)


def philox_uniform(seed: Tensor, counter: Tensor, lane: Tensor) -> Tensor:
    """Uniform fp32 in (0, 1): first word of Philox-4x32-10 (Salmon et al. 2011) of counter (lane, counter, 0, 0).

    The upper 23 bits are used, so that every value is exact and 1 (an infinite Gumbel noise) cannot occur.
    seed: int64 (64-bit key). counter: int (position). lane: int (token id). All broadcast; integers hold 32-bit values.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    shape = (seed + counter + lane).shape
    c0, c1 = (lane.long() & _MASK).expand(shape), (counter.long() & _MASK).expand(shape)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(c0, _M0)
        hi1, lo1 = _mul_hi_lo(c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return ((c0 >> 9).float() + 0.5) * (1.0 / (1 << 23))


def _fake_sample(logits: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


@define_op(fake=_fake_sample)
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, positions: Tensor
) -> Tensor:
    """Next token of every sequence.

    Args:
        logits: [batch, vocabulary]. temperature: fp32 [batch], 0 = greedy (lowest id wins a tie).
        top_k: int32 [batch], 0 = off, else keep logits >= the k-th largest. top_p: fp32 [batch], 1 = off, else keep
            logits >= the largest threshold whose softmax mass (after temperature and top-k) reaches top_p.
        seed: int64 [batch]. positions: int32 [batch], position of the token being chosen.

    The draw is Gumbel-max with Philox noise keyed by (seed, position, token id), so it does not depend on the rest of
    the batch. Returns int32 [batch].
    """
    chosen = logits.float().argmax(-1)
    lane = torch.arange(logits.shape[1], device=logits.device)
    for b in torch.nonzero(temperature > 0).flatten().tolist():
        scores = logits[b].float() / temperature[b]
        if int(top_k[b]) > 0:
            kth = torch.topk(scores, min(int(top_k[b]), scores.numel())).values[-1]
            scores = scores.masked_fill(scores < kth, float("-inf"))
        if float(top_p[b]) < 1.0:
            ordered = torch.sort(scores, descending=True).values
            mass = torch.softmax(ordered, 0).cumsum(0)
            last = min(int((mass < top_p[b]).sum()), scores.numel() - 1)
            scores = scores.masked_fill(scores < ordered[last], float("-inf"))
        uniform = philox_uniform(seed[b], positions[b], lane)
        chosen[b] = (scores - torch.log(-torch.log(uniform))).argmax()
    return chosen.to(torch.int32)
