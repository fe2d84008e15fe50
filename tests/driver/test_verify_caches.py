"""Verification of written NVFP4 caches: what it finds, and that a page read in another layout is far off."""

from __future__ import annotations

import pytest
import torch

from mmcompile.core.errors import VerificationError
from mmcompile.core.formats import cache_pages, nvfp4_cache
from mmcompile.core.plan import Buffer, Launch
from mmcompile.driver import verify_caches
from mmcompile.driver.verify_run import Memory, Outcome, _compare_pages

SLOTS = torch.tensor([3, -1, 18, 7])
TAG = nvfp4_cache.TOKEN_QUAD


def launch_of(op: str) -> Launch:
    return Launch(name="decode.x", op=op, inputs={}, outputs=(), attributes={"layout": TAG})


def make_pages(seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache before and after an insertion of rows of one seed, times ``scale``."""
    before = torch.full((2, 4, 16, 36), 0xFF, dtype=torch.uint8)
    after = before.clone()
    rows = torch.randn((2, 4, 2, 64), generator=torch.Generator().manual_seed(seed)) * scale
    cache_pages.insert_kv(after, TAG, rows[0], rows[1], SLOTS)
    return before, after


def compare(state: torch.Tensor, reference: torch.Tensor, op: str) -> Outcome:
    outcome = Outcome()
    before, _ = make_pages()
    _compare_pages(launch_of(op), "kv_cache", state, reference, before, outcome, {"slot_mapping": SLOTS}, TAG)
    return outcome


def test_equal_pages_pass_and_what_differs_in_rounding_may():
    _, want = make_pages()
    assert compare(want.clone(), want, "mm.insert_kv").relative_error == 0.0
    _, close = make_pages(scale=1.004)
    outcome = compare(close, want, "mm.qk_norm_rope_insert")
    assert 0 < outcome.relative_error <= outcome.bound == verify_caches.BOUND
    with pytest.raises(VerificationError, match="is not the byte that the quantizer stores"):
        compare(close, want, "mm.insert_kv")


def test_faults_are_found():
    _, want = make_pages()
    stray = want.clone()
    stray[0, 0, 0, 0] ^= 1
    with pytest.raises(VerificationError, match=r"kv_cache\[0, 0, 0, 0\] is overwritten"):
        compare(stray, want, "mm.qk_norm_rope_insert")
    _, other = make_pages(seed=1)
    with pytest.raises(VerificationError, match="relative error"):
        compare(other, want, "mm.qk_norm_rope_insert")
    unwritten, _ = make_pages()
    with pytest.raises(VerificationError, match="relative error"):
        compare(unwritten, want, "mm.qk_norm_rope_insert")


def test_scales_in_another_order_are_found():
    """V written linearly where token quads are wanted: in groups of different magnitude that is another tensor."""
    before, want = make_pages()
    other = before.clone()
    rows = torch.randn((2, 4, 2, 64), generator=torch.Generator().manual_seed(0))
    rows = rows * torch.tensor([0.1, 1.0, 4.0, 16.0]).repeat_interleave(16)
    cache_pages.insert_kv(other, nvfp4_cache.LINEAR, rows[0], rows[1], SLOTS)
    want = before.clone()
    cache_pages.insert_kv(want, TAG, rows[0], rows[1], SLOTS)
    with pytest.raises(VerificationError):
        compare(other, want, "mm.qk_norm_rope_insert")


def test_pages_are_poisoned_with_nan_scales():
    def first_byte(role: str, layout: str) -> int:
        buffer = Buffer(name="b", shape=(1, 2, 16, 36), dtype="uint8", role=role, layout=layout)
        return int(Memory({"b": buffer}, {})._make(buffer)[0])

    assert first_byte("state", TAG) == 0xFF and first_byte("weight", "linear") == 0x81
    assert torch.tensor(0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn).isnan()
