"""Compile the kernels of block-sparse attention for sm90 without a GPU, for h200_msa.py to check and time on one.

python benchmarks/msa_kit.py -o kit
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mmcompile.core.kernel import OpCall, Operand
from mmcompile.lower.select import Selector
from mmcompile.targets._toolchain import CompileJob, compile_many
from mmcompile.targets.sm90 import TARGET

HEADS, KV_HEADS, INDEX_HEADS, HEAD_DIM, PAGE, TOP_K = 64, 4, 4, 128, 128, 16
CACHES = ("bfloat16", "float8_e4m3fn")
LARGEST = 512


def describe_calls(cache: str) -> list[OpCall]:
    """MiniMax-M3's three operations of one sparse layer in decode, caches of the dtype ``cache``."""
    phase = {"phase": "decode"}
    q = Operand(("tokens", HEADS, HEAD_DIM), (HEADS * HEAD_DIM, HEAD_DIM, 1), "bfloat16")
    index_q = Operand(("tokens", INDEX_HEADS, HEAD_DIM), (INDEX_HEADS * HEAD_DIM, HEAD_DIM, 1), "bfloat16")
    index_cache = Operand(("pages", PAGE, HEAD_DIM), (PAGE * HEAD_DIM, HEAD_DIM, 1), cache)
    row = PAGE * 2 * HEAD_DIM
    kv_cache = Operand(("pages", KV_HEADS, PAGE, 2 * HEAD_DIM), (KV_HEADS * row, row, 2 * HEAD_DIM, 1), cache)
    tables = {
        "block_table": Operand(("batch", "max_blocks"), ("max_blocks", 1), "int32"),
        "seq_lens": Operand(("batch",), (1,), "int32"),
        "query_start": Operand(("batch + 1",), (1,), "int32"),
    }
    strides = (f"{INDEX_HEADS}*max_blocks", "max_blocks", 1)
    scores = Operand(("tokens", INDEX_HEADS, "max_blocks"), strides, "float32")
    blocks = Operand(("tokens", KV_HEADS, TOP_K), (KV_HEADS * TOP_K, TOP_K, 1), "int32")
    positions = Operand(("tokens",), (1,), "int32")
    chosen = {"block_size": PAGE, "top_k": TOP_K, "local_blocks": 1, "initial_blocks": 0}
    return [
        OpCall("paged_index_score", {"index_q": index_q, "index_cache": index_cache, **tables}, (scores,),
               phase),
        OpCall("block_top_k", {"scores": scores, "positions": positions}, (blocks,), chosen | phase),
        OpCall("paged_block_sparse_attention", {"q": q, "kv_cache": kv_cache, "blocks": blocks, **tables}, (q,),
               {"scale": HEAD_DIM**-0.5} | phase),
    ]  # fmt: skip


def main() -> None:
    """Compile and write kit.json and the cubins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", type=Path, required=True)
    out = parser.parse_args().o
    out.mkdir(parents=True, exist_ok=True)
    selector = Selector(TARGET.spec, TARGET.kernels)
    entries, launches, jobs = [], [], []
    for cache in CACHES:
        for call in describe_calls(cache):
            chosen, reason = selector.select(call, LARGEST)
            assert chosen, reason
            for choice in chosen:
                scratch = [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in choice.scratch]
                entries.append({"op": call.op, "cache": cache, "template": choice.template,
                                "max_tokens": choice.max_tokens, "scratch": scratch, "launches": []})  # fmt: skip
                for source in choice.sources:
                    jobs.append(CompileJob(source, TARGET.spec.architectures[0], TARGET.spec))
                    launch = {"grid": source.grid, "arguments": [p.value for p in source.parameters]}
                    launches.append(launch)
                    entries[-1]["launches"].append(launch)
    for launch, compiled in zip(launches, compile_many(jobs), strict=True):
        launch |= {key: compiled.metadata[key] for key in ("name", "shared", "num_warps", "registers", "spills")}
        launch["file"] = f"{compiled.source.name}_{compiled.source.digest[:8]}.cubin"
        (out / launch["file"]).write_bytes(compiled.binary)
    (out / "kit.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
