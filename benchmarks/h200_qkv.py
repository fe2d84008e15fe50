"""Norms, RoPE and insertion of a block-sparse layer on an NVIDIA GPU, with the projection in front and without it.

python benchmarks/h200_qkv.py kit [--tokens 1 8 64 1024 8192] [--peer none]

``kit``: the folder that msa_kit.py made. [q | k | v | index_q | index_k] has 64 + 4 + 4 + 4 + 1 heads of 128, hidden
6144, bf16 weights. "separate" = the projection as a linear layer, then the insertion, each as chosen on its own.
"torch" = the same steps under torch.compile into bf16 caches. Cold: inputs, weights and slots take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _common import print_table
from _gpu import measure_copy, time_graph
from _kit import Kit
from h200_msa import HEAD_DIM, HEADS, INDEX_HEADS, KV_HEADS, PAGE, make_pool
from torch import Tensor

import mmcompile.core.ops  # noqa: F401
from mmcompile.core.formats.nvfp4_cache import SM90, SM90_INDEX

CACHES = ("bfloat16", "nvfp4")
ROWS, HIDDEN, ROTARY, POSITIONS = HEADS + 2 * KV_HEADS + INDEX_HEADS + 1, 6144, 64, 1 << 20
COLD_BYTES, BOUND = 256 << 20, 1e-2
NUMBERS = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "num_index_heads": INDEX_HEADS, "head_dim": HEAD_DIM,
           "eps": 1e-6, "weight_offset": 1.0, "round_before_scale": False}  # fmt: skip


def make_set(tokens: int, pages: int, shared: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Operands of one call; slots are random and different."""
    slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
    return shared | {
        "x": torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), "weight": weight, "slot_mapping": slots,
        "qkv": torch.randn(tokens, ROWS * HEAD_DIM, device="cuda").bfloat16(),
        "positions": torch.randint(0, POSITIONS, (tokens,), device="cuda", dtype=torch.int32),
    }  # fmt: skip


def insert_by_torch(
    values: dict[str, Tensor], qkv: Tensor, kv_cache: Tensor, index_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """What the operation does, into bf16 caches."""
    heads = qkv.unflatten(1, (ROWS, HEAD_DIM)).float()
    weights = torch.cat([values[f"{name}_weight"][None].expand(n, -1) for name, n in
                         (("q", HEADS), ("k", KV_HEADS), ("k", KV_HEADS), ("index_q", INDEX_HEADS), ("index_k", 1))])
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weights.float())
    cos, sin = values["cos_sin"][values["positions"]].float()[:, None].chunk(2, -1)
    first, second, rest = normed[..., : ROTARY // 2], normed[..., ROTARY // 2 : ROTARY], normed[..., ROTARY:]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).bfloat16()
    k, v = turned[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS : HEADS + 2 * KV_HEADS].bfloat16()
    page, place = values["slot_mapping"] // PAGE, values["slot_mapping"] % PAGE
    kv_cache[page, :, place] = torch.cat([k, v], -1)
    index_cache[page, place] = turned[:, -1]
    return turned[:, :HEADS], turned[:, HEADS + 2 * KV_HEADS : -1]


def project_by_torch(values: dict[str, Tensor], kv_cache: Tensor, index_cache: Tensor) -> tuple[Tensor, Tensor]:
    """With the projection in front."""
    qkv = torch.nn.functional.linear(values["x"], values["weight"])
    return insert_by_torch(values, qkv, kv_cache, index_cache)


def count_bytes(cache: str, tokens: int, projected: bool) -> float:
    """Bytes to move: rows in, results and cache rows out, the weight once."""
    element = 2.0 if cache == "bfloat16" else 0.5625
    row = ROWS if not projected else HIDDEN / HEAD_DIM
    rows = tokens * HEAD_DIM * (2 * (row + HEADS + INDEX_HEADS) + element * (2 * KV_HEADS + 1))
    return rows + (2 * ROWS * HEAD_DIM * HIDDEN if projected else 0)


class Bench:
    """The kernels, the caches and the weights."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.bandwidth = measure_copy()  # before any driver call of ours: it makes the context
        self.kit, self.mode = Kit(folder), mode
        self.pools = {name: (make_pool(name, KV_HEADS), make_pool(name, 0)) for name in CACHES}
        self.weights = [torch.randn(ROWS * HEAD_DIM, HIDDEN, device="cuda").mul_(HIDDEN**-0.5).bfloat16()
                        for _ in range(3)]  # fmt: skip
        angles = torch.rand(POSITIONS, ROTARY // 2, device="cuda") * 6.28
        self.shared = {"cos_sin": torch.cat([angles.cos(), angles.sin()], -1).bfloat16()}
        for name in ("q", "k", "index_q", "index_k"):
            self.shared[f"{name}_weight"] = torch.randn(HEAD_DIM, device="cuda").mul_(0.2).bfloat16()

    def call(self, entry: dict[str, Any], values: dict[str, Any], tokens: int) -> None:
        """Queue one entry's launches."""
        self.kit.run(entry, values, {"tokens": tokens})

    def allocate(self, entry: dict[str, Any], tokens: int, cache: str) -> dict[str, Tensor]:
        """Results, scratch and caches by what launches pass."""
        empty = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        own = {"result": empty(tokens, HEADS, HEAD_DIM), "result1": empty(tokens, INDEX_HEADS, HEAD_DIM)}
        own |= dict(zip(("kv_cache", "index_cache"), self.pools[cache], strict=True))
        for scratch in entry["scratch"]:
            shape = [tokens if n == "tokens" else int(n) for n in scratch["shape"]]
            dtype = getattr(torch, scratch["dtype"])
            own[f"scratch:{scratch['name']}"] = torch.empty(shape, dtype=dtype, device="cuda")
        return own

    def check(self, op: str, values: dict[str, Tensor], results: dict[str, Tensor], cache: str) -> None:
        """Queries against the reference, and the bytes of a cache of its own."""
        names = ("q_weight", "k_weight", "index_q_weight", "index_k_weight", "positions", "cos_sin", "slot_mapping")
        first = {"qkv": values["qkv"]} if op.startswith("qk_") else {
            "x": values["x"], "weight": values["weight"], "bias": None}  # fmt: skip
        tags = {"layout": SM90, "index_layout": SM90_INDEX} if cache == "nvfp4" else {}
        copies = {name: pool.clone() for name, pool in
                  zip(("kv_cache", "index_cache"), self.pools[cache], strict=True)}  # fmt: skip
        want = getattr(torch.ops.mm, op)(**first, **{n: values[n] for n in names}, **copies, **NUMBERS, **tags)
        for have, expected in zip((results["result"], results["result1"]), want, strict=True):
            error = float((have.float() - expected.float()).norm() / expected.float().norm())
            assert error < BOUND, (op, cache, error)
        slots, differing = values["slot_mapping"], 0
        for have, expected in zip(self.pools[cache], copies.values(), strict=True):
            if cache == "nvfp4":
                differing += int((have != expected).sum())
                continue
            rows = [(p.transpose(1, 2) if p.dim() == 4 else p)[slots // PAGE, slots % PAGE].float()
                    for p in (have, expected)]  # fmt: skip
            assert float((rows[0] - rows[1]).norm() / rows[1].norm()) < BOUND, (op, cache)
        assert differing <= BOUND * len(slots) * 72 * (2 * KV_HEADS + 1), (op, "bytes", differing)

    def time(self, ops: tuple[str, ...], cache: str, tokens: int, sets: list[dict[str, Tensor]]) -> float:
        """Microseconds of the operations one after the other."""
        entries = [self.kit.find(tokens, op=op, cache=cache) for op in ops]
        owned = [self.allocate(entry, tokens, cache) for entry in entries]
        if ops[0] == "linear":
            owned[0]["result"] = torch.empty(tokens, ROWS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            owned[1]["qkv"] = owned[0]["result"]

        def call(i: int) -> None:
            for entry, own in zip(entries, owned, strict=True):
                self.call(entry, sets[i] | own, tokens)

        call(0)
        torch.cuda.synchronize()
        if len(ops) == 1:
            self.check(ops[0], sets[0], owned[0], cache)
        return time_graph(call, len(sets))

    def time_peer(self, projected: bool, sets: list[dict[str, Tensor]]) -> float:
        """Microseconds of torch's steps."""
        if self.mode == "none":
            return float("nan")
        caches = self.pools["bfloat16"]
        plain = (lambda v: project_by_torch(v, *caches)) if projected else (
            lambda v: insert_by_torch(v, v["qkv"], *caches))  # fmt: skip
        function = torch.compile(plain, dynamic=False, mode=self.mode)
        return time_graph(lambda i: function(sets[i]), len(sets))

    def measure(self, tokens: int) -> list[list[object]]:
        """Rows of the table for one token count."""
        rows = []
        for temperature in ("hot", "cold"):
            count = 1 if temperature == "hot" else max(3, min(64, COLD_BYTES // (tokens * ROWS * HEAD_DIM * 4)))
            pages = min(len(pool) for pair in self.pools.values() for pool in pair)
            sets = [make_set(tokens, pages, self.shared, self.weights[i % 3]) for i in range(count)]
            peers = {projected: self.time_peer(projected, sets) for projected in (False, True)}
            for cache in CACHES:
                inserted = self.time(("qk_norm_rope_insert_index",), cache, tokens, sets)
                whole = self.time(("qkv_norm_rope_insert_index",), cache, tokens, sets)
                apart = self.time(("linear", "qk_norm_rope_insert_index"), cache, tokens, sets)
                for name, micros, projected in (("insertion", inserted, False), ("with projection", whole, True)):
                    limit = count_bytes(cache, tokens, projected) / self.bandwidth * 1e6
                    rows.append([name, cache, tokens, temperature, f"{micros:.2f}", f"{limit:.2f}",
                                 f"{limit / micros:.2f}", f"{apart:.2f}" if projected else "-",
                                 f"{peers[projected]:.1f}", f"{peers[projected] / micros:.2f}"])  # fmt: skip
        return rows


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 256, 1024, 8192])
    parser.add_argument("--peer", default="default", help="a mode of torch.compile, or none")
    arguments = parser.parse_args()
    torch.cuda.init()
    torch._dynamo.config.recompile_limit = 64
    bench = Bench(arguments.kit, arguments.peer)
    print(torch.cuda.get_device_name(), f"copy {bench.bandwidth / 1e12:.2f} TB/s", flush=True)
    table = []
    for tokens in arguments.tokens:
        for row in bench.measure(tokens):
            print(*row, flush=True)
            table.append(row)
    header = ["step", "cache", "tokens", "L2", "us", "limit us", "limit / ours", "separate us", "torch us",
              "torch / ours"]  # fmt: skip
    print_table("Norms, RoPE and insertion, 77 heads of 128, hidden 6144", header, table)


if __name__ == "__main__":
    main()
