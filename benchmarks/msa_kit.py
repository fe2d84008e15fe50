"""Compile the kernels of a block-sparse layer for sm90 without a GPU, for h200_msa.py and h200_qkv.py to run on one.

python benchmarks/msa_kit.py -o kit [--steps attend insert] [--cache nvfp4]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmcompile.core.formats.nvfp4_cache import SM90, SM90_INDEX
from mmcompile.core.kernel import KernelSource, OpCall, Operand
from mmcompile.lower.select import Selector
from mmcompile.targets._toolchain import CompileJob, compile_many
from mmcompile.targets.sm90 import TARGET

HEADS, KV_HEADS, INDEX_HEADS, HEAD_DIM, PAGE, TOP_K, HIDDEN, ROTARY = 64, 4, 4, 128, 128, 16, 6144, 64
CACHES = ("bfloat16", "float8_e4m3fn", "nvfp4")
ROWS = HEADS + 2 * KV_HEADS + INDEX_HEADS + 1
LARGEST = {"attend": 512, "insert": 8192}


def operand(*shape: int | str, dtype: str = "bfloat16") -> Operand:
    """A contiguous operand; only its first dimension may be a symbol."""
    inner = [math.prod(int(n) for n in shape[d + 1 :]) for d in range(len(shape))]
    return Operand(shape, tuple(inner), dtype)


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


STEPS: dict[str, Callable[[str], list[OpCall]]] = {"attend": describe_attention, "insert": describe_insertion}


def compile_launches(sources: list[KernelSource], out: Path) -> list[dict[str, Any]]:
    """Compile and write the binaries; what a launch needs to know of each."""
    launches = []
    jobs = [CompileJob(source, TARGET.spec.architectures[0], TARGET.spec) for source in sources]
    for source, compiled in zip(sources, compile_many(jobs), strict=True):
        launch = {"grid": source.grid, "arguments": [p.value for p in source.parameters]}
        launch |= {key: compiled.metadata[key] for key in ("name", "shared", "num_warps", "registers", "spills")}
        launch["early"] = "griddepcontrol.wait" in compiled.metadata["ledger"]
        launch["file"] = f"{compiled.source.name}_{compiled.source.digest[:8]}.cubin"
        (out / str(launch["file"])).write_bytes(compiled.binary)
        launches.append(launch)
    return launches


def main() -> None:
    """Compile and write kit.json and the cubins. Entries with "portable" are what --portable would choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=CACHES)
    arguments = parser.parse_args()
    arguments.o.mkdir(parents=True, exist_ok=True)
    entries, sources = [], []
    for portable in (False, True):
        selector = Selector(TARGET.spec, TARGET.kernels, portable)
        for step, cache, call in ((s, c, o) for s in arguments.steps for c in arguments.cache for o in STEPS[s](c)):
            chosen, reason = selector.select(call, LARGEST[step])
            assert chosen, reason
            for choice in chosen:
                scratch = [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in choice.scratch]
                entries.append({"op": call.op, "cache": cache, "template": choice.template, "portable": portable,
                                "max_tokens": choice.max_tokens, "scratch": scratch,
                                "launches": len(choice.sources)})  # fmt: skip
                sources += choice.sources
    launches = compile_launches(sources, arguments.o)
    for entry in entries:
        entry["launches"], launches = launches[: entry["launches"]], launches[entry["launches"] :]
    (arguments.o / "kit.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
