"""Kernels that write NVFP4 pages: the quantizer's bytes in every layout, and not one byte beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.formats import cache_pages, nvfp4_cache
from mmcompile.core.ops.linear import nvfp4_quantize
from mmcompile.driver.verify_caches import BOUND, find_written, read_rows
from mmcompile.targets import sm90
from mmcompile.targets._kernels import qkv, qkv_index, rope, sparse_index

SPEC, ARCH = sm90.TARGET.spec, sm90.TARGET.spec.architectures[0]
INSERT_INDEX = sparse_index.TEMPLATES[0]
_, INSERT_KV, FUSED = rope.TEMPLATES
FUSED_INDEX = qkv_index.INSERT
ROWS = {name: "tokens" for name in ("k", "v", "index_k", "qkv", "x", "positions", "slot_mapping", "result")}
BF16, F32 = torch.bfloat16, torch.float32
KV = [nvfp4_cache.LINEAR, nvfp4_cache.TOKEN_QUAD, nvfp4_cache.SM90]
SLOW_KV = [nvfp4_cache.TOKEN_QUAD, *(pytest.param(tag, marks=pytest.mark.slow) for tag in (KV[0], KV[2]))]
INDEX_OF = {nvfp4_cache.SM90: nvfp4_cache.SM90_INDEX}
SLOTS = torch.tensor([17, -1, 0, 31, 5, 19, 38])


def noise(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sizes_of(tag: str) -> tuple[int, int]:
    """(page size, head_dim) to test a layout with."""
    return (128, 128) if tag in (nvfp4_cache.SM90, nvfp4_cache.SM90_INDEX) else (16, 64)


def make_cache(tag: str, kv_heads: int = 0, d: int | None = None) -> Tensor:
    """Pages of random bytes: what is not written must stay, whatever it is."""
    page, usual = sizes_of(tag)
    d = d or usual
    shape = (3, *((2 * kv_heads,) if kv_heads else ()), page, d // 2 + d // 16)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(7), dtype=torch.uint8)


def run(runner: Any, template: Any, tensors: dict[str, Any], attributes: dict[str, Any]) -> Any:
    tokens = tensors["slot_mapping"].shape[0]
    return runner.run_op(template, tensors, attributes, SPEC, ARCH, rows=ROWS, symbols={"tokens": tokens})


def special(x: Tensor) -> Tensor:
    """Rows of zeros, of what saturates the scale, and of what needs the smallest one."""
    x[0], x[2], x[3, ..., ::3] = 0.0, 1e5, -1e-3
    return x


@pytest.mark.parametrize(("tag", "dtype"), [
    pytest.param(nvfp4_cache.INDEX, F32, marks=pytest.mark.slow), (nvfp4_cache.SM90_INDEX, BF16),
])
def test_index_keys_are_the_quantizers_bytes(runner, tag, dtype):
    _, d = sizes_of(tag)
    tensors = {"index_k": special(noise(7, d, seed=1, dtype=dtype)), "index_cache": make_cache(tag),
               "slot_mapping": SLOTS}
    outcome = run(runner, INSERT_INDEX, tensors, {"layout": tag})
    assert torch.equal(outcome.tensors["index_cache"], outcome.reference_tensors["index_cache"])
    assert not torch.equal(outcome.tensors["index_cache"], make_cache(tag))


@pytest.mark.parametrize("tag", SLOW_KV)
def test_keys_and_values_are_the_quantizers_bytes(runner, tag):
    _, d = sizes_of(tag)
    tensors = {"k": special(noise(7, 4, d, seed=1))[:, :3], "v": special(noise(7, 3, d, seed=2)),
               "kv_cache": make_cache(tag, 3), "slot_mapping": SLOTS}
    outcome = run(runner, INSERT_KV, tensors, {"layout": tag})
    assert torch.equal(outcome.tensors["kv_cache"], outcome.reference_tensors["kv_cache"])


def make_angles(rotary: int, dtype: torch.dtype = BF16) -> Tensor:
    angle = torch.rand(50, rotary // 2, generator=torch.Generator().manual_seed(3)) * 6.28
    return torch.cat([angle.cos(), angle.sin()], 1).to(dtype)


def make_fused(tag: str, heads: int, kv_heads: int, d: int, rotary: int, tokens: int = 7) -> dict[str, Any]:
    return {
        "q_weight": None, "k_weight": None, "cos_sin": make_angles(rotary),
        "positions": torch.tensor([9, 0, 49, 1, 2, 30, 31])[:tokens], "kv_cache": make_cache(tag, kv_heads, d),
        "slot_mapping": SLOTS[:tokens],
    }  # fmt: skip


@pytest.mark.parametrize(("tag", "d", "rotary"), [
    pytest.param(nvfp4_cache.TOKEN_QUAD, 64, 64, marks=pytest.mark.slow),
    (nvfp4_cache.LINEAR, 16, 8),
    pytest.param(nvfp4_cache.LINEAR, 64, 24, marks=pytest.mark.slow),
    pytest.param(nvfp4_cache.SM90, 128, 64, marks=pytest.mark.slow),
])
def test_rotated_heads_are_the_quantizers_bytes(runner, tag, d, rotary):
    """Without norms every product and sum is rounded alike, so that not a bit may differ."""
    tensors = {"qkv": noise(7, 7 * d, seed=4)} | make_fused(tag, 3, 2, d, rotary)
    attributes = {"num_heads": 3, "num_kv_heads": 2, "head_dim": d, "eps": 0.0, "layout": tag}
    outcome = run(runner, FUSED, tensors, attributes)
    assert outcome.errors[0] == 0.0
    assert torch.equal(outcome.tensors["kv_cache"], outcome.reference_tensors["kv_cache"])


def check_cache(outcome: Any, name: str, tag: str) -> None:
    """Decoded rows within the bound, every other byte as it was."""
    have, want = outcome.tensors[name], outcome.reference_tensors[name]
    slots = outcome.tensors["slot_mapping"]
    slots = slots[slots >= 0].long()
    written = find_written(have, tag, slots)
    assert torch.equal(have[~written], want[~written])
    rows, expected = (read_rows(cache, tag, slots) for cache in (have, want))
    error = float((rows - expected).norm() / expected.norm())
    assert error <= BOUND, error


GEMMA = {"eps": 1e-6, "weight_offset": 1.0, "round_before_scale": False}


def make_index(tag: str, kv_heads: int, d: int, rotary: int, tokens: int = 7) -> dict[str, Any]:
    norms = {name: noise(d, seed=10 + i) * 0.3 for i, name in enumerate(qkv_index.NORMS)}
    index_cache = make_cache(INDEX_OF.get(tag, nvfp4_cache.INDEX), 0, d)
    return make_fused(tag, 3, kv_heads, d, rotary, tokens) | norms | {"index_cache": index_cache}


@pytest.mark.slow
@pytest.mark.parametrize("tag", KV)
def test_normed_heads_go_into_both_caches(runner, tag):
    _, d = sizes_of(tag)
    tensors = {"qkv": noise(7, 9 * d, seed=5)} | make_index(tag, 2, d, d // 2)
    index_tag = INDEX_OF.get(tag, nvfp4_cache.INDEX)
    attributes = {"num_heads": 2, "num_kv_heads": 2, "num_index_heads": 2, "head_dim": d, **GEMMA, "layout": tag,
                  "index_layout": index_tag}
    outcome = run(runner, FUSED_INDEX, tensors, attributes)
    assert max(outcome.errors) < 2e-3
    check_cache(outcome, "kv_cache", tag)
    check_cache(outcome, "index_cache", index_tag)


def find(templates: tuple[Any, ...], name: str) -> Any:
    return next(t for t in templates if t.name == name)


@pytest.mark.parametrize(("tag", "d", "rotary"), [
    (nvfp4_cache.TOKEN_QUAD, 64, 64), (nvfp4_cache.LINEAR, 16, 8), (nvfp4_cache.SM90, 128, 128),
])
@pytest.mark.slow
def test_projected_heads(runner, tag, d, rotary):
    weight = noise(4 * d, 64, seed=6, dtype=F32) / 8
    packed = dict(zip(("packed", "scale", "global_scale"), nvfp4_quantize(weight), strict=True))
    tensors = {"x": noise(5, 64, seed=7), **packed, "bias": None} | make_fused(tag, 2, 1, d, rotary, 5)
    attributes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": d, "eps": 0.0, "layout": tag}
    outcome = run(runner, find(qkv.TEMPLATES, "qkv_norm_rope_insert_nvfp4_skinny16"), tensors, attributes)
    assert outcome.errors[0] < 2e-3
    check_cache(outcome, "kv_cache", tag)


@pytest.mark.parametrize("tag", SLOW_KV)
def test_projected_heads_and_index_keys(runner, tag):
    _, d = sizes_of(tag)
    tensors = {"x": noise(5, 64, seed=7), "weight": noise(6 * d, 64, seed=8) / 8, "bias": None}
    tensors |= make_index(tag, 1, d, d // 2, 5)
    index_tag = INDEX_OF.get(tag, nvfp4_cache.INDEX)
    attributes = {"num_heads": 2, "num_kv_heads": 1, "num_index_heads": 1, "head_dim": d, **GEMMA, "layout": tag,
                  "index_layout": index_tag}
    outcome = run(runner, find(qkv_index.TEMPLATES, "qkv_norm_rope_insert_index_skinny16"), tensors, attributes)
    assert max(outcome.errors) < 2e-3
    check_cache(outcome, "kv_cache", tag)
    check_cache(outcome, "index_cache", index_tag)


def test_refusals_name_the_reason(call_of):
    tensors = {"x": noise(5, 64, seed=7), "weight": noise(6 * 64, 64, seed=8), "bias": None}
    tensors |= make_index(nvfp4_cache.LINEAR, 1, 64, 48, 5)
    attributes = {"num_heads": 2, "num_kv_heads": 1, "num_index_heads": 1, "head_dim": 64, **GEMMA,
                  "layout": nvfp4_cache.LINEAR, "index_layout": nvfp4_cache.INDEX}
    results = [torch.empty(5, 2, 64), torch.empty(5, 1, 64)]
    template = find(qkv_index.TEMPLATES, "qkv_norm_rope_insert_index_skinny16")

    def refuse(**changes: Any) -> str:
        call = call_of(template.op, tensors, attributes | changes, {}, results)
        return template.refuse(call, SPEC, ARCH) or ""

    assert "48 of 64 dimensions are rotated" in refuse()
    assert "no pages of 16 tokens" in refuse(layout=nvfp4_cache.SM90, index_layout=nvfp4_cache.SM90_INDEX)
    assert "in the layout 'linear'" in refuse(layout=cache_pages.PLAIN, index_layout=nvfp4_cache.INDEX)
    tensors |= make_index(nvfp4_cache.SM90, 1, 128, 64, 5)
    tensors |= {"weight": noise(6 * 128, 64, seed=8), "kv_cache": make_cache(nvfp4_cache.SM90, 1)}
    apart = refuse(head_dim=128, layout=nvfp4_cache.SM90, index_layout=nvfp4_cache.INDEX)
    assert "the layouts 'nvfp4.sm90' and 'nvfp4.index' do not go together" in apart
