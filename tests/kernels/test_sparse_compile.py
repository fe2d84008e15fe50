"""Block-sparse attention and router kernels compile for every target at MiniMax-M3's sizes, within its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.kernel import KernelTemplate, OpCall, Operand
from mmcompile.core.spec import Architecture
from mmcompile.targets._kernels import router, sparse_attention, sparse_index, sparse_top_k
from mmcompile.targets._target import Target

HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, PAGE, TOP_K, EXPERTS = 64, 4, 128, 4, 128, 16, 128
TARGETS = [load_module("targets", name).TARGET for name in list_names("targets")]
PLACES = [
    pytest.param(target, architecture, id=architecture.name,
                 marks=[] if architecture is target.spec.architectures[0] else [pytest.mark.slow])
    for target in TARGETS for architecture in target.spec.architectures
]
TEMPLATES = (*sparse_index.TEMPLATES, *sparse_top_k.TEMPLATES, *sparse_attention.TEMPLATES, *router.TEMPLATES)
QUICK = ("insert_index", "paged_index_score_decode4", "paged_index_score_prefill", "block_top_k",
         "paged_block_sparse_attention_split4", "paged_block_sparse_attention_tokens", "route_top_k", "swiglu_oai")
"""One of every tile function; the same ones with other splits and cache dtypes are slow tests."""
KERNELS = [
    pytest.param(template, cache, id=f"{template.name}-{cache}",
                 marks=[] if template.name in QUICK and cache == "bfloat16" else [pytest.mark.slow])
    for template in TEMPLATES
    for cache in (("bfloat16", "float8_e4m3fn", "uint8") if "index" in template.name or "sparse" in template.name
                  else ("bfloat16",))
]


def operand(*shape: int | str, dtype: str = "bfloat16") -> Operand:
    inner = [math.prod(int(n) for n in shape[d + 1 :]) for d in range(len(shape))]
    return Operand(shape, tuple(inner), dtype)


Q, INDEX_Q = operand("tokens", HEADS, HEAD_DIM), operand("tokens", INDEX_HEADS, HEAD_DIM)
SCORES = Operand(("tokens", INDEX_HEADS, "max_blocks"), ("4*max_blocks", "max_blocks", 1), "float32")
CHOSEN = operand("tokens", KV_HEADS, TOP_K, dtype="int32")
TABLES = {"block_table": Operand(("batch", "max_blocks"), ("max_blocks", 1), "int32"),
          "seq_lens": operand("batch", dtype="int32"), "query_start": operand("batch + 1", dtype="int32")}
HALF = operand("tokens", 3072)
RESULTS = {"insert_index": (), "paged_index_score": (SCORES,), "block_top_k": (CHOSEN,),
           "paged_block_sparse_attention": (Q,), "swiglu_oai": (HALF,),
           "route_top_k": (operand("tokens", 4, dtype="float32"), operand("tokens", 4, dtype="int32"))}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "block_top_k": {"block_size": PAGE, "top_k": TOP_K, "local_blocks": 1, "initial_blocks": 0},
    "paged_block_sparse_attention": {"scale": HEAD_DIM**-0.5}, "swiglu_oai": {"alpha": 1.702, "limit": 7.0},
    "route_top_k": {"top_k": 4, "scale": 2.0},
}


def m3_call(template: KernelTemplate, cache: str) -> OpCall:
    """The call of MiniMax-M3 that ``template`` serves, with caches of the dtype ``cache``; uint8 = NVFP4."""
    index_cache = operand(1000, PAGE, 72 if cache == "uint8" else HEAD_DIM, dtype=cache)
    kv_shape = (1000, 2 * KV_HEADS, PAGE, 72) if cache == "uint8" else (1000, KV_HEADS, PAGE, 2 * HEAD_DIM)
    operands: dict[str, dict[str, Operand | None]] = {
        "insert_index": {"index_k": operand("tokens", HEAD_DIM), "index_cache": index_cache,
                         "slot_mapping": operand("tokens", dtype="int64")},
        "paged_index_score": {"index_q": INDEX_Q, "index_cache": index_cache, **TABLES},
        "block_top_k": {"scores": SCORES, "positions": operand("tokens", dtype="int32")},
        "paged_block_sparse_attention": {"q": Q, "kv_cache": operand(*kv_shape, dtype=cache), "blocks": CHOSEN,
                                         **TABLES},
        "swiglu_oai": {"gate": HALF, "up": HALF},
        "route_top_k": {"logits": operand("tokens", EXPERTS, dtype="float32"),
                        "bias": operand(EXPERTS, dtype="float32")},
    }
    phase = {"phase": "prefill" if template.name.endswith(("prefill", "_tokens")) else "decode"}
    layout = {"layout": "nvfp4.index" if "index" in template.op else "nvfp4.token_quad"} if cache == "uint8" else {}
    attributes = ATTRIBUTES.get(template.op, {}) | phase | layout
    return OpCall(template.op, operands[template.op], RESULTS[template.op], attributes)


@pytest.mark.parametrize(("target", "architecture"), PLACES)
@pytest.mark.parametrize(("template", "cache"), KERNELS)
@pytest.mark.slow
def test_m3_kernels_compile(template: KernelTemplate, cache: str, target: Target, architecture: Architecture):
    call = m3_call(template, cache)
    assert template.refuse(call, target.spec, architecture) is None
    for source in template.emit(call, target.spec, architecture):
        assert target.check(target.compile(source, architecture)) == []
