"""Compile the kernels of a block-sparse layer for sm90 without a GPU, for h200_msa.py and h200_qkv.py to run on one.

python benchmarks/msa_kit.py -o kit [--steps attend insert separate] [--cache nvfp4]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _kit_build import operand, write_kit

from mmcompile.core.formats.nvfp4_cache import SM90, SM90_INDEX
from mmcompile.core.kernel import OpCall, Operand

HEADS, KV_HEADS, INDEX_HEADS, HEAD_DIM, PAGE, TOP_K, HIDDEN, ROTARY = 64, 4, 4, 128, 128, 16, 6144, 64
CACHES = ("bfloat16", "float8_e4m3fn", "nvfp4")
ROWS = HEADS + 2 * KV_HEADS + INDEX_HEADS + 1
PARTS = {"q": HEADS, "k": KV_HEADS, "index_q": INDEX_HEADS, "index_k": 1}
"""Heads of what is normed and rotated."""
LARGEST = {"attend": 2048, "insert": 8192, "separate": 8192}


def describe_caches(cache: str) -> tuple[Operand, Operand, dict[str, str], dict[str, str]]:
    """KV cache and index cache of a dtype or "nvfp4", and the layouts that operations on one of them are told."""
    if cache == "nvfp4":
        pages = operand("pages", 2 * KV_HEADS, PAGE, 72, dtype="uint8")
        return pages, operand("pages", PAGE, 72, dtype="uint8"), {"layout": SM90}, {"layout": SM90_INDEX}
    pages = operand("pages", KV_HEADS, PAGE, 2 * HEAD_DIM, dtype=cache)
    return pages, operand("pages", PAGE, HEAD_DIM, dtype=cache), {"layout": "linear"}, {"layout": "linear"}


def describe_attention(cache: str) -> list[OpCall]:
    """MiniMax-M3's three operations of one sparse layer in decode."""
    q, index_q = operand("tokens", HEADS, HEAD_DIM), operand("tokens", INDEX_HEADS, HEAD_DIM)
    kv_cache, index_cache, of_kv, of_index = describe_caches(cache)
    tables = {
        "block_table": Operand(("batch", "max_blocks"), ("max_blocks", 1), "int32"),
        "seq_lens": operand("batch", dtype="int32"), "query_start": operand("batch + 1", dtype="int32"),
    }  # fmt: skip
    strides = (f"{INDEX_HEADS}*max_blocks", "max_blocks", 1)
    scores = Operand(("tokens", INDEX_HEADS, "max_blocks"), strides, "float32")
    blocks, phase = operand("tokens", KV_HEADS, TOP_K, dtype="int32"), {"phase": "decode"}
    chosen = {"block_size": PAGE, "top_k": TOP_K, "local_blocks": 1, "initial_blocks": 0}
    return [
        OpCall("paged_index_score", {"index_q": index_q, "index_cache": index_cache, **tables}, (scores,),
               of_index | phase),
        OpCall("block_top_k", {"scores": scores, "positions": operand("tokens", dtype="int32")}, (blocks,),
               chosen | phase),
        OpCall("paged_block_sparse_attention", {"q": q, "kv_cache": kv_cache, "blocks": blocks, **tables}, (q,),
               {"scale": HEAD_DIM**-0.5} | of_kv | phase),
    ]  # fmt: skip


def describe_insertion(cache: str) -> list[OpCall]:
    """Norms, RoPE and insertion behind the projection, with it, and the projection alone, with bf16 weights."""
    kv_cache, index_cache, of_kv, of_index = describe_caches(cache)
    places = {
        **{f"{name}_weight": operand(HEAD_DIM) for name in ("q", "k", "index_q", "index_k")},
        "positions": operand("tokens", dtype="int32"), "cos_sin": operand(1 << 20, ROTARY),
        "kv_cache": kv_cache, "index_cache": index_cache, "slot_mapping": operand("tokens", dtype="int64"),
    }  # fmt: skip
    attributes: dict[str, Any] = {
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "num_index_heads": INDEX_HEADS, "head_dim": HEAD_DIM,
        "eps": 1e-6, "weight_offset": 1.0, "round_before_scale": False, **of_kv,
        "index_layout": of_index["layout"], "phase": "decode",
    }  # fmt: skip
    results = operand("tokens", HEADS, HEAD_DIM), operand("tokens", INDEX_HEADS, HEAD_DIM)
    x, weight, qkv = operand("tokens", HIDDEN), operand(ROWS * HEAD_DIM, HIDDEN), operand("tokens", ROWS * HEAD_DIM)
    linear = {"x": x, "weight": weight, "bias": None}
    return [
        OpCall("qk_norm_rope_insert_index", {"qkv": qkv, **places}, results, attributes),
        OpCall("qkv_norm_rope_insert_index", {**linear, **places, "delta": None}, results, attributes),
        OpCall("linear", {**linear, "residual": None}, (qkv,), {"phase": "decode"}),
    ]


def describe_separate(cache: str) -> dict[str, OpCall]:
    """The insertion as ten launches, by label: norms and rotations of contiguous parts, then one of each cache."""
    kv_cache, index_cache, of_kv, of_index = describe_caches(cache)
    calls = {}
    for name, heads in PARTS.items():
        rows, tokens = operand(f"{heads}*tokens", HEAD_DIM), operand("tokens", heads, HEAD_DIM)
        calls[f"norm_{name}"] = OpCall(
            "rms_norm", {"x": rows, "weight": operand(HEAD_DIM)}, (rows,),
            {"eps": 1e-6, "weight_offset": 1.0, "round_before_scale": False, "phase": "decode"})  # fmt: skip
        turned = {"x": tokens, "positions": operand("tokens", dtype="int32"), "cos_sin": operand(1 << 20, ROTARY)}
        calls[f"rope_{name}"] = OpCall("rope", turned, (tokens,), {"phase": "decode"})
    slots, keys = operand("tokens", dtype="int64"), operand("tokens", KV_HEADS, HEAD_DIM)
    calls["insert_kv"] = OpCall(
        "insert_kv", {"k": keys, "v": keys, "kv_cache": kv_cache, "slot_mapping": slots}, (), of_kv)  # fmt: skip
    calls["insert_index"] = OpCall(
        "insert_index", {"index_k": operand("tokens", HEAD_DIM), "index_cache": index_cache, "slot_mapping": slots},
        (), of_index)  # fmt: skip
    return calls


def label(calls: list[OpCall]) -> dict[str, OpCall]:
    """By the name of the operation."""
    return {call.op: call for call in calls}


STEPS: dict[str, Callable[[str], dict[str, OpCall]]] = {
    "attend": lambda cache: label(describe_attention(cache)),
    "insert": lambda cache: label(describe_insertion(cache)),
    "separate": describe_separate,
}


def main() -> None:
    """Compile and write the kit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=CACHES)
    arguments = parser.parse_args()
    write_kit(arguments.o, (({"cache": cache, "op": name}, call, LARGEST[step])
                            for step in arguments.steps for cache in arguments.cache
                            for name, call in STEPS[step](cache).items()))


if __name__ == "__main__":
    main()
