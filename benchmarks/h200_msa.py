"""Block-sparse attention of MiniMax-M3 on an NVIDIA GPU: scores, selection, attention against bytes and torch.compile.

python benchmarks/h200_msa.py kit [--quick] [--seconds 480] [--cache nvfp4] [--peer none]

``kit``: the folder that msa_kit.py made. Every kernel is first checked against its operation's reference. "limit" is
the time of its bytes at the bandwidth that a copy reaches here; cold = successive calls read other pages, together
more than the L2 cache holds; "portable" is what --portable would choose, where that is another kernel; torch reads a
bf16 cache where ours is NVFP4.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _common import print_table
from _gpu import measure_copy, time_graph
from _kit import Kit
from torch import Tensor

import mmcompile.core.ops  # noqa: F401
from mmcompile.core.expression import evaluate
from mmcompile.core.formats.nvfp4_cache import SM90, SM90_INDEX

HEADS, KV_HEADS, INDEX_HEADS, HEAD_DIM, PAGE, TOP_K = 64, 4, 4, 128, 128, 16
CACHES = {"bfloat16": 2.0, "float8_e4m3fn": 1.0, "nvfp4": 0.5625}
"""Bytes of an element of the caches."""
OPERATIONS = ("paged_index_score", "block_top_k", "paged_block_sparse_attention")
COLD_BYTES = 256 << 20
POOL_BYTES = 1 << 30
LARGEST_CHECK = 1 << 22
BOUND = 1e-2
SELECTION = {"block_size": PAGE, "top_k": TOP_K, "local_blocks": 1, "initial_blocks": 0}


@dataclass(frozen=True)
class Load:
    """One measured size: sequences, tokens of context each, new tokens each."""

    batch: int
    context: int
    new: int

    @property
    def symbols(self) -> dict[str, int]:
        """Values of the plan's symbols."""
        return {"tokens": self.batch * self.new, "batch": self.batch, "max_blocks": -(-self.context // PAGE)}

    def count_bytes(self, op: str, size: float) -> float:
        """Bytes to move: every page once, rows of queries and results; ``size``: bytes of an element of the cache."""
        tokens, blocks = self.batch * self.new, self.symbols["max_blocks"]
        scores = tokens * INDEX_HEADS * blocks * 4
        if op == "paged_index_score":
            return self.batch * self.context * HEAD_DIM * size + tokens * INDEX_HEADS * HEAD_DIM * 2 + scores
        if op == "block_top_k":
            return scores + tokens * INDEX_HEADS * TOP_K * 4
        pages = min(TOP_K, blocks)
        return tokens * (KV_HEADS * pages * PAGE * 2 * HEAD_DIM * size + 2 * HEADS * HEAD_DIM * 2)


def make_pool(cache: str, runs: int) -> Tensor:
    """Pages of random rows, POOL_BYTES in all. runs: KV heads, or 0 for index keys."""
    if cache == "nvfp4":
        shape = (2 * runs, PAGE, 72) if runs else (PAGE, 72)
        pool = torch.randint(0, 256, (POOL_BYTES // math.prod(shape), *shape), dtype=torch.uint8, device="cuda")
        bytes_of_codes = 2 * PAGE * HEAD_DIM // 2 if runs else PAGE * HEAD_DIM // 2
        scales = pool.view(len(pool), max(runs, 1), -1)[..., bytes_of_codes:]
        scales.copy_(torch.randint(0x30, 0x48, scales.shape, dtype=torch.uint8, device="cuda"))
        return pool
    shape, dtype = (runs, PAGE, 2 * HEAD_DIM) if runs else (PAGE, HEAD_DIM), getattr(torch, cache)
    pool = torch.empty((POOL_BYTES // (math.prod(shape) * dtype.itemsize), *shape), dtype=dtype, device="cuda")
    for part in pool.split(max(1, len(pool) // 16)):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    return pool


def make_inputs(load: Load, pages: int) -> dict[str, Tensor]:
    """Queries, table with random pages, spans, positions, and a random selection with the own block."""
    symbols, device = load.symbols, "cuda"
    tokens, blocks = symbols["tokens"], symbols["max_blocks"]
    table = torch.randint(0, pages, (load.batch, blocks), device=device, dtype=torch.int32)
    positions = load.context - load.new + torch.arange(tokens, device=device, dtype=torch.int32) % load.new
    scores = torch.randn((tokens, INDEX_HEADS, blocks), device=device)
    chosen = torch.ops.mm.block_top_k(scores, positions, **SELECTION)
    return {
        "q": torch.randn((tokens, HEADS, HEAD_DIM), device=device).bfloat16(),
        "index_q": torch.randn((tokens, INDEX_HEADS, HEAD_DIM), device=device).bfloat16(),
        "block_table": table, "positions": positions, "scores": scores, "blocks": chosen,
        "seq_lens": torch.full((load.batch,), load.context, device=device, dtype=torch.int32),
        "query_start": torch.arange(load.batch + 1, device=device, dtype=torch.int32) * load.new,
    }  # fmt: skip


def score_by_torch(index_q: Tensor, cache: Tensor, table: Tensor) -> Tensor:
    """Scores of one new token a sequence, whose blocks are all full."""
    keys = cache[table].flatten(1, 2).to(index_q.dtype)
    return torch.einsum("bhd,bsd->bhs", index_q, keys).float().unflatten(-1, (-1, PAGE)).amax(-1)


def select_by_torch(scores: Tensor) -> Tensor:
    """The blocks by torch.topk: ties as they fall, in order of the score."""
    return scores.topk(min(TOP_K, scores.shape[-1]), dim=-1).indices.int()


def attend_by_torch(q: Tensor, cache: Tensor, blocks: Tensor, table: Tensor) -> Tensor:
    """Attention of one new token a sequence over the chosen pages, all of them full."""
    pages = table[:, None, :].expand(-1, KV_HEADS, -1).gather(2, blocks.clamp(min=0).long())
    heads = torch.arange(KV_HEADS, device=q.device)[:, None]
    rows = cache[pages, heads].flatten(2, 3).to(q.dtype)
    grouped = q.unflatten(1, (KV_HEADS, -1))
    out = torch.nn.functional.scaled_dot_product_attention(grouped, rows[..., :HEAD_DIM], rows[..., HEAD_DIM:])
    return out.flatten(1, 2)


def list_operations(
    inputs: dict[str, Tensor], cache: str, pools: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, dict[str, Any]]:
    """By operation: the operands, the attributes, and the operands of torch's function."""
    paged = {name: inputs[name] for name in ("block_table", "seq_lens", "query_start")}
    index_pool, kv_pool = pools[cache]
    of_index, of_kv = (SM90_INDEX, SM90) if cache == "nvfp4" else ("linear", "linear")
    plain_index, plain_kv = pools["bfloat16" if cache == "nvfp4" else cache]
    return {
        "paged_index_score": {
            "operands": {"index_q": inputs["index_q"], "index_cache": index_pool, **paged},
            "attributes": {"layout": of_index},
            "peer": (score_by_torch, (inputs["index_q"], plain_index, inputs["block_table"] % len(plain_index))),
        },
        "block_top_k": {
            "operands": {"scores": inputs["scores"], "positions": inputs["positions"]}, "attributes": SELECTION,
            "peer": (select_by_torch, (inputs["scores"],)),
        },
        "paged_block_sparse_attention": {
            "operands": {"q": inputs["q"], "kv_cache": kv_pool, "blocks": inputs["blocks"], **paged},
            "attributes": {"scale": HEAD_DIM**-0.5, "layout": of_kv},
            "peer": (attend_by_torch, (inputs["q"], plain_kv, inputs["blocks"], inputs["block_table"] % len(plain_kv))),
        },
    }  # fmt: skip


def check_result(op: str, result: Tensor, operands: dict[str, Tensor], attributes: dict[str, Any]) -> float:
    """Relative error against the reference; exact for the selection. AssertionError if it is too large."""
    want = getattr(torch.ops.mm, op)(**operands, **attributes)
    if op == "block_top_k":
        assert torch.equal(result, want), op
        return 0.0
    finite = want.isfinite()
    assert torch.equal(result.isfinite(), finite), op
    error = float((result.float() - want.float())[finite].norm() / want.float()[finite].norm())
    assert error < BOUND, (op, error)
    return error


def allocate(op: str, entry: dict[str, Any], load: Load) -> dict[str, Tensor]:
    """The result and the temporary buffers of an operation, by what its launches pass."""
    symbols = load.symbols
    results = {
        "paged_index_score": ((symbols["tokens"], INDEX_HEADS, symbols["max_blocks"]), torch.float32),
        "block_top_k": ((symbols["tokens"], INDEX_HEADS, TOP_K), torch.int32),
        "paged_block_sparse_attention": ((symbols["tokens"], HEADS, HEAD_DIM), torch.bfloat16),
    }
    shape, dtype = results[op]
    values = {"result": torch.empty(shape, dtype=dtype, device="cuda")}
    for scratch in entry["scratch"]:
        size = [evaluate(n, symbols) for n in scratch["shape"]]
        values[f"scratch:{scratch['name']}"] = torch.empty(size, dtype=getattr(torch, scratch["dtype"]), device="cuda")
    return values


@dataclass
class Bench:
    """What all measurements share. ``peer_times``: torch's, by what was timed."""

    kit: Kit
    pools: dict[str, tuple[Tensor, Tensor]]
    bandwidth: float
    mode: str
    peer_times: dict[Any, float] = field(default_factory=dict)

    def time_peer(self, op: str, cache: str, load: Load, sets: list[dict[str, Any]]) -> float:
        """Microseconds of torch's function; nan where none is asked for: only for one new token at 32K."""
        if self.mode == "none" or load.new != 1 or load.context != 32768 or load.batch > 64:
            return float("nan")
        key = (op, cache.replace("nvfp4", "bfloat16"), load, len(sets) == 1)
        if key not in self.peer_times:
            function = sets[0]["peer"][0]
            if self.mode != "eager":
                function = torch.compile(function, dynamic=False, mode=self.mode)
            self.peer_times[key] = time_graph(lambda i: function(*sets[i]["peer"][1]), len(sets))
        return self.peer_times[key]

    def time_entry(
        self, entry: dict[str, Any], load: Load, sets: list[dict[str, Any]], checked: bool
    ) -> tuple[float, str]:
        """Microseconds of a kernel, and its error against the reference if asked for and not too large to compute."""
        op, symbols = entry["op"], load.symbols
        values = allocate(op, entry, load)

        def call(i: int) -> None:
            self.kit.run(entry, values | sets[i]["operands"], symbols)

        call(0)
        torch.cuda.synchronize()
        error = "-"
        if checked and load.batch * load.context <= LARGEST_CHECK:
            error = f"{check_result(op, values['result'], sets[0]['operands'], sets[0]['attributes']):.1e}"
        return time_graph(call, len(sets)), error

    def measure(
        self, op: str, cache: str, load: Load, temperatures: tuple[str, ...]
    ) -> Iterator[list[object]]:
        """Rows of the table for one operation and size."""
        chosen, portable = (self.kit.find(load.symbols["tokens"], portable=p, op=op, cache=cache)
                            for p in (False, True))  # fmt: skip
        moved = load.count_bytes(op, CACHES[cache])
        pages = len(self.pools[cache][0 if op == "paged_index_score" else 1])
        for temperature in temperatures:
            copies = 1 if temperature == "hot" else int(max(2, min(64, COLD_BYTES // moved)))
            sets = [list_operations(make_inputs(load, pages), cache, self.pools)[op] for _ in range(copies)]
            micros, error = self.time_entry(chosen, load, sets, temperature == temperatures[0])
            slower = float("nan")
            if chosen["template"] != portable["template"]:
                slower, _ = self.time_entry(portable, load, sets, False)
            limit, peer = moved / self.bandwidth * 1e6, self.time_peer(op, cache, load, sets)
            yield [f"{op} {cache}", load.batch, load.context, load.new, temperature, f"{micros:.2f}", f"{limit:.2f}",
                   f"{limit / micros:.2f}", f"{slower:.2f}", f"{peer:.1f}", f"{peer / micros:.2f}", error]  # fmt: skip


def list_cases(caches: list[str]) -> list[tuple[str, str]]:
    """(operation, cache); the selection reads no cache."""
    return [(op, cache) for cache in caches for op in OPERATIONS if op != "block_top_k" or cache == caches[0]]


def list_loads(op: str, quick: bool) -> list[Load]:
    """The sizes of an operation. Attention reads as many pages at any context, so few of its sizes differ in that."""
    if quick:
        return [Load(b, 32768, n) for n in (1, 8) for b in (1, 8, 64) if op != "block_top_k" or n == 1]
    batches = {1: (1, 8, 16, 32, 64, 128, 256), 8: (1, 8, 32, 64)}
    loads = [Load(b, 32768, n) for n in (1, 8) for b in batches[n]]
    if op == "paged_block_sparse_attention":
        return loads + [Load(b, c, n) for c in (4096, 262144, 1 << 20) for n in (1, 8) for b in (1, 32)]
    most = {4096: 256, 262144: 256, 1 << 20: 32}
    loads += [Load(b, c, n) for c in most for n in (1, 8) for b in batches[n] if b <= most[c] // n]
    return [load for load in loads if op != "block_top_k" or (load.new == 1 and load.batch <= 64)]


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("--quick", action="store_true", help="context 32K, batch 1, 8 and 64, cold, no torch")
    parser.add_argument("--seconds", type=float, default=480.0, help="start nothing after that, and say what")
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--peer", default="max-autotune-no-cudagraphs", help="a mode of torch.compile, eager, or none")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    torch.cuda.init()
    torch._dynamo.config.recompile_limit = 64
    bandwidth = measure_copy()
    print(torch.cuda.get_device_name(), f"copy {bandwidth / 1e12:.2f} TB/s", "torch", torch.__version__, flush=True)
    pools = {name: (make_pool(name, 0), make_pool(name, KV_HEADS)) for name in CACHES}
    bench = Bench(Kit(arguments.kit), pools, bandwidth, "none" if arguments.quick else arguments.peer)
    temperatures = ("cold",) if arguments.quick else ("hot", "cold")
    table, missing = [], []
    cases = [(load, op, cache) for op, cache in list_cases(arguments.cache) for load in list_loads(op, arguments.quick)]
    # what was never measured first, then by size, so that a cut leaves the largest out
    for load, op, cache in sorted(cases, key=lambda c: (c[0].context != 32768, c[0].batch * c[0].context)):
        if time.perf_counter() - begun > arguments.seconds:
            missing.append(f"{op} {cache} {load}")
            continue
        for row in bench.measure(op, cache, load, temperatures):
            print(*row, flush=True)
            table.append(row)
    header = ["kernel", "batch", "context", "new", "L2", "us", "limit us", "limit / ours", "portable us", "torch us",
              "torch / ours", "error"]  # fmt: skip
    print_table("Block-sparse attention, 64/4 heads of 128, 16 pages of 128", header, table)
    if missing:
        print("not measured, no time left:", *missing, sep="\n")


if __name__ == "__main__":
    main()
