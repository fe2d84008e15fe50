"""Kernels over NVFP4 caches compile for every target in its own layout, without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmcompile.core.formats import nvfp4_cache
from mmcompile.core.kernel import KernelTemplate
from mmcompile.targets import gfx950, sm90, sm100, sm107
from mmcompile.targets._kernels import attention, qkv, qkv_index
from mmcompile.targets._target import Target

TOKENS, ROWS = 4, {name: "tokens" for name in ("x", "q", "positions", "slot_mapping", "result")}
TARGETS = [pytest.param(t.TARGET, id=t.TARGET.spec.name) for t in (sm90, sm100, sm107, gfx950)]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def choose(target: Target, d: int, page: int) -> dict[str, str]:
    """The layouts of the target for heads of ``d``."""
    tags = {"layout": nvfp4_cache.LINEAR, "index_layout": nvfp4_cache.INDEX}
    return {n: nvfp4_cache.choose_layout(t, target.spec.cache_layouts, d, page) for n, t in tags.items()}


def make_cache(d: int, page: int, kv_heads: int = 0) -> torch.Tensor:
    return empty(8, *((2 * kv_heads,) if kv_heads else ()), page, d // 2 + d // 16, dtype=torch.uint8)


def make_places(d: int, rotary: int, page: int, kv_heads: int) -> dict[str, Any]:
    return {"positions": empty(TOKENS, dtype=torch.int32), "cos_sin": empty(128, rotary),
            "kv_cache": make_cache(d, page, kv_heads), "slot_mapping": empty(TOKENS, dtype=torch.int64)}


def check(template: KernelTemplate, call: Any, target: Target) -> None:
    architecture = target.spec.architectures[0]
    assert template.refuse(call, target.spec, architecture) is None
    for source in template.emit(call, target.spec, architecture):
        compiled = target.compile(source, architecture)
        warnings = target.check(compiled)
        assert compiled.metadata["spills"] == 0, warnings


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_fused_projection_of_smollm2(call_of, target):
    """Full rotary, no norms: 9 and 3 heads of 64."""
    layout = choose(target, 64, 16)["layout"]
    tensors = {"x": empty(TOKENS, 576), "weight": empty(15 * 64, 576), "bias": None, "q_weight": None, "k_weight": None}
    tensors |= make_places(64, 64, 16, 3)
    attributes = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "eps": 1e-5, "layout": layout}
    call = call_of("qkv_norm_rope_insert", tensors, attributes, ROWS, [empty(TOKENS, 9, 64)])
    check(next(t for t in qkv.TEMPLATES if t.op == call.op), call, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_fused_projection_with_index_keys(call_of, target):
    """Half rotary and norms: 16 heads of 128, one of keys, one of index keys."""
    tensors = {"x": empty(TOKENS, 256), "weight": empty(20 * 128, 256), "bias": None}
    tensors |= {name: empty(128) for name in qkv_index.NORMS} | make_places(128, 64, 128, 1)
    tensors |= {"index_cache": make_cache(128, 128)}
    attributes = {"num_heads": 16, "num_kv_heads": 1, "num_index_heads": 1, "head_dim": 128, "eps": 1e-6,
                  **choose(target, 128, 128)}
    results = [empty(TOKENS, 16, 128), empty(TOKENS, 1, 128)]
    call = call_of("qkv_norm_rope_insert_index", tensors, attributes, ROWS, results)
    template = next(t for t in qkv_index.TEMPLATES if t.op == call.op)
    check(template, call, target)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("target", TARGETS)
def test_dense_attention(call_of, target, phase):
    layout = choose(target, 128, 128)["layout"]
    tensors = {"q": empty(TOKENS, 16, 128), "kv_cache": make_cache(128, 128, 2)}
    tensors |= {name: empty(*shape, dtype=torch.int32)
                for name, shape in (("block_table", (2, 4)), ("seq_lens", (2,)), ("query_start", (3,)))}
    attributes = {"scale": 0.1, "layout": layout, "phase": phase}
    call = call_of("paged_attention", tensors, attributes, ROWS, [empty(TOKENS, 16, 128)])
    check(attention.TEMPLATES[-1 if phase == "prefill" else 0], call, target)
