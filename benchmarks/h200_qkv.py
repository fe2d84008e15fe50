"""Norms, RoPE and insertion of a block-sparse layer on an NVIDIA GPU, with the projection in front and without it.

python benchmarks/h200_qkv.py kit [--quick] [--seconds 480] [--tokens 1 8 64 1024 8192] [--peer none]

``kit``: the folder that msa_kit.py made. [q | k | v | index_q | index_k] has 64 + 4 + 4 + 4 + 1 heads of 128, hidden
6144, bf16 weights. Rows: "insertion" behind the projection; "with projection" in front; "encode" = the launches that
only quantize or copy K, V and index keys into their caches. "separate" is the same work as launches of their own: ten
of norms, rotations and insertions over contiguous parts, or the projection as a linear layer, then the insertion.
"portable" = what --portable would choose, "torch" = the same steps under torch.compile into bf16 caches. Cold: inputs,
weights and slots take turns, more of them than the L2 cache holds. --cpu only holds torch's side against the reference.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from _common import print_table
from _gpu import measure_copy, time_graph
from _kit import Kit
from h200_msa import HEAD_DIM, HEADS, INDEX_HEADS, KV_HEADS, PAGE, make_pool
from torch import Tensor

import mmcompile.core.ops  # noqa: F401
from mmcompile.core.expression import evaluate
from mmcompile.core.formats.nvfp4_cache import SM90, SM90_INDEX

CACHES = {"bfloat16": 2.0, "float8_e4m3fn": 1.0, "nvfp4": 0.5625}
"""Bytes of an element of the caches."""
ROWS, HIDDEN, ROTARY, POSITIONS = HEADS + 2 * KV_HEADS + INDEX_HEADS + 1, 6144, 64, 1 << 20
INSERT, PROJECT = "qk_norm_rope_insert_index", "qkv_norm_rope_insert_index"
NAMES = ("q", "k", "index_q", "index_k")
COLD_BYTES, MOST_SETS, BOUND = 128 << 20, 4096, 1e-2
QUICK_TOKENS, TOKENS = (1, 8, 64, 1024, 8192), (1, 2, 4, 8, 16, 32, 64, 256, 1024, 8192)
NUMBERS = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "num_index_heads": INDEX_HEADS, "head_dim": HEAD_DIM,
           "eps": 1e-6, "weight_offset": 1.0, "round_before_scale": False}  # fmt: skip


def make_shared(device: str, positions: int) -> dict[str, Tensor]:
    """What all calls share: the table of angles and the norms' weights."""
    angles = torch.rand(positions, ROTARY // 2, device=device) * 6.28
    shared = {"cos_sin": torch.cat([angles.cos(), angles.sin()], -1).bfloat16()}
    for name in NAMES:
        shared[f"{name}_weight"] = torch.randn(HEAD_DIM, device=device).mul_(0.2).bfloat16()
    return shared


def make_set(tokens: int, shared: dict[str, Tensor], weight: Tensor, slots: Tensor) -> dict[str, Tensor]:
    """Operands of one call; ``slots``: a permutation of all, of which the first are taken."""
    device, positions = weight.device, len(shared["cos_sin"])
    begin = int(torch.randint(0, len(slots) - tokens + 1, (1,)))
    return shared | {
        "x": torch.randn(tokens, HIDDEN, device=device).bfloat16(), "weight": weight,
        "slot_mapping": slots[begin : begin + tokens].clone(),
        "qkv": torch.randn(tokens, ROWS * HEAD_DIM, device=device).bfloat16(),
        "positions": torch.randint(0, positions, (tokens,), device=device, dtype=torch.int32),
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


def count_bytes(step: str, cache: str, tokens: int) -> float:
    """Bytes to move: rows in, results and cache rows out, the weight once."""
    stored = CACHES[cache] * (2 * KV_HEADS + 1)
    if step == "encode":
        return tokens * HEAD_DIM * (2 * (2 * KV_HEADS + 1) + stored)
    projected = step == "with projection"
    row = HIDDEN / HEAD_DIM if projected else ROWS
    rows = tokens * HEAD_DIM * (2 * (row + HEADS + INDEX_HEADS) + stored)
    return rows + (2 * ROWS * HEAD_DIM * HIDDEN if projected else 0)


class Bench:
    """The kernels, the caches and the weights."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.bandwidth = measure_copy()  # before any driver call of ours: it makes the context
        self.kit, self.mode = Kit(folder), mode
        self.pools = {name: (make_pool(name, KV_HEADS), make_pool(name, 0)) for name in CACHES}
        self.weights = [torch.randn(ROWS * HEAD_DIM, HIDDEN, device="cuda").mul_(HIDDEN**-0.5).bfloat16()
                        for _ in range(3)]  # fmt: skip
        self.shared = make_shared("cuda", POSITIONS)
        pages = min(len(pool) for pair in self.pools.values() for pool in pair)
        self.slots = torch.randperm(pages * PAGE, device="cuda")
        self.peers: dict[bool, Any] = {}

    def allocate(self, entry: dict[str, Any], tokens: int, cache: str) -> dict[str, Tensor]:
        """Results, scratch and caches by what launches pass."""
        empty = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        own = {"result": empty(tokens, HEADS, HEAD_DIM), "result1": empty(tokens, INDEX_HEADS, HEAD_DIM)}
        own |= dict(zip(("kv_cache", "index_cache"), self.pools[cache], strict=True))
        for scratch in entry["scratch"]:
            shape = [evaluate(n, {"tokens": tokens}) for n in scratch["shape"]]
            dtype = getattr(torch, scratch["dtype"])
            own[f"scratch:{scratch['name']}"] = torch.empty(shape, dtype=dtype, device="cuda")
        return own

    def list_separate(self, tokens: int, sets: list[dict[str, Tensor]]) -> list[dict[str, dict[str, Tensor]]]:
        """For each set, by launch: norms and rotations of contiguous parts, then what the insertions read."""
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "index_q": INDEX_HEADS, "index_k": 1}
        made = []
        for values in sets:
            split = values["qkv"].unflatten(1, (ROWS, HEAD_DIM)).split(list(heads.values()), dim=1)
            parts = {name: part.contiguous() for name, part in zip(heads, split, strict=True)}
            steps, turned = {}, {"v": parts["v"]}
            for name in NAMES:
                normed, turned[name] = torch.empty_like(parts[name]), torch.empty_like(parts[name])
                steps[f"norm_{name}"] = {"x": parts[name], "weight": values[f"{name}_weight"], "result": normed}
                steps[f"rope_{name}"] = {"x": normed, "result": turned[name]}
            steps["insert_kv"] = {"k": turned["k"], "v": turned["v"]}
            steps["insert_index"] = {"index_k": turned["index_k"]}
            made.append(steps)
        return made

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

    def time(
        self, ops: tuple[str, ...], cache: str, tokens: int, sets: list[dict[str, Tensor]], portable: bool = False
    ) -> float:
        """Microseconds of the operations one after the other; one of the fused ones is checked."""
        entries = {op: self.kit.find(tokens, portable=portable, op=op, cache=cache) for op in ops}
        owned = {op: self.allocate(entry, tokens, cache) for op, entry in entries.items()}
        if ops[0] == "linear":
            owned["linear"]["result"] = torch.empty(tokens, ROWS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            owned[ops[1]]["qkv"] = owned["linear"]["result"]
        apart = self.list_separate(tokens, sets) if not {"linear", INSERT, PROJECT} & set(ops) else None

        def call(i: int) -> None:
            for op, entry in entries.items():
                given = sets[i] | owned[op] | (apart[i][op] if apart else {})
                self.kit.run(entry, given, {"tokens": tokens})

        call(0)
        torch.cuda.synchronize()
        if ops in ((INSERT,), (PROJECT,)):
            self.check(ops[0], sets[0], owned[ops[0]], cache)
        return time_graph(call, len(sets))

    def time_peer(self, projected: bool, sets: list[dict[str, Tensor]]) -> float:
        """Microseconds of torch's steps."""
        if self.mode == "none":
            return float("nan")
        if projected not in self.peers:
            caches = self.pools["bfloat16"]
            plain = (lambda v: project_by_torch(v, *caches)) if projected else (
                lambda v: insert_by_torch(v, v["qkv"], *caches))  # fmt: skip
            self.peers[projected] = torch.compile(plain, dynamic=False, mode=self.mode)
        function = self.peers[projected]
        return time_graph(lambda i: function(sets[i]), len(sets))

    def measure(self, tokens: int, cache: str, temperature: str) -> list[list[object]]:
        """Rows of the table for one token count and cache."""
        most = max(3, min(MOST_SETS, COLD_BYTES // (tokens * ROWS * HEAD_DIM * 2)))
        sets = [make_set(tokens, self.shared, self.weights[i % 3], self.slots)
                for i in range(1 if temperature == "hot" else most)]  # fmt: skip
        few = sets[: max(1, min(len(sets), 48))]  # their weights alone are more than the L2 cache holds
        norms = tuple(f"{step}_{name}" for name in NAMES for step in ("norm", "rope"))
        separate = (*norms, "insert_kv", "insert_index")
        cases: tuple[tuple[str, tuple[str, ...], tuple[str, ...], list[dict[str, Tensor]]], ...] = (
            ("insertion", (INSERT,), separate, sets), ("with projection", (PROJECT,), ("linear", INSERT), few),
            ("encode", separate[-2:], (), sets),
        )  # fmt: skip
        rows: list[list[object]] = []
        for step, ops, apart, used in cases:
            micros, slower = (self.time(ops, cache, tokens, used, portable) for portable in (False, True))
            limit = count_bytes(step, cache, tokens) / self.bandwidth * 1e6
            others = self.time(apart, cache, tokens, used) if apart else float("nan")
            peer = self.time_peer(step == "with projection", used) if step != "encode" else float("nan")
            rows.append([step, cache, tokens, temperature, f"{micros:.2f}", f"{limit:.2f}", f"{limit / micros:.2f}",
                         f"{slower:.2f}", f"{others:.2f}", f"{others / micros:.2f}", f"{peer:.1f}",
                         f"{peer / micros:.2f}"])  # fmt: skip
        return rows


def check_torch(tokens: int = 5, pages: int = 2) -> float:
    """Largest relative error of torch's side against the operation's reference, on the CPU."""
    weight = torch.randn(ROWS * HEAD_DIM, HIDDEN).mul_(HIDDEN**-0.5).bfloat16()
    values = make_set(tokens, make_shared("cpu", 64), weight, torch.randperm(pages * PAGE))
    ours = [torch.zeros(pages, KV_HEADS, PAGE, 2 * HEAD_DIM), torch.zeros(pages, PAGE, HEAD_DIM)]
    mine, theirs = ([cache.bfloat16() for cache in ours] for _ in range(2))
    names = (*(f"{name}_weight" for name in NAMES), "positions", "cos_sin", "slot_mapping")
    given = {name: values[name] for name in names}
    errors = []
    for projected in (False, True):
        first = {"x": values["x"], "weight": weight, "bias": None} if projected else {"qkv": values["qkv"]}
        op = getattr(torch.ops.mm, PROJECT if projected else INSERT)
        want = op(**first, **given, kv_cache=mine[0], index_cache=mine[1], **NUMBERS)
        have = project_by_torch(values, *theirs) if projected else insert_by_torch(values, values["qkv"], *theirs)
        pairs = [*zip(have, want, strict=True), *zip(theirs, mine, strict=True)]
        errors += [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    return max(errors)


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="few sizes, cold, no torch")
    parser.add_argument("--seconds", type=float, default=480.0, help="start nothing after that, and say what")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--peer", default="default", help="a mode of torch.compile, or none")
    parser.add_argument("--cpu", action="store_true", help="check torch's side on the CPU and end")
    arguments = parser.parse_args()
    if arguments.cpu:
        error = check_torch()
        assert error < BOUND, error
        print(f"torch's side agrees with the reference: {error:.1e}")
        return
    begun = time.perf_counter()
    torch.cuda.init()
    torch._dynamo.config.recompile_limit = 64
    bench = Bench(arguments.kit, "none" if arguments.quick else arguments.peer)
    print(torch.cuda.get_device_name(), f"copy {bench.bandwidth / 1e12:.2f} TB/s", flush=True)
    table, missing = [], []
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    for count, cache, temperature in ((n, c, t) for n in tokens for c in reversed(arguments.cache)
                                      for t in (("cold",) if arguments.quick else ("hot", "cold"))):  # fmt: skip
        if time.perf_counter() - begun > arguments.seconds:
            missing.append(f"{count} tokens, {cache}, {temperature}")
            continue
        for row in bench.measure(count, cache, temperature):
            print(*row, flush=True)
            table.append(row)
    header = ["step", "cache", "tokens", "L2", "us", "limit us", "limit / ours", "portable us", "separate us",
              "separate / ours", "torch us", "torch / ours"]  # fmt: skip
    print_table("Norms, RoPE and insertion, 77 heads of 128, hidden 6144", header, table)
    if missing:
        print("not measured, no time left:", *missing, sep="\n")


if __name__ == "__main__":
    main()
