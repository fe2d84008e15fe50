"""Mixtures of experts on an NVIDIA GPU: NVFP4 tuned and portable against bf16, torch.compile and the limit; encoding.

python benchmarks/h200_moe.py kit [--models minimax-m3] [--tokens 1 2 4 8 16 128 1024 8192] [--routing random one]
python benchmarks/h200_moe.py kit --sweep --tokens 1 4 16     (a kit with --sweep: the decode kernels one by one)
python benchmarks/h200_moe.py --cpu     (no GPU: the peers' formulas against the operation's reference)

``kit``: the folder that moe_kit.py made. Every kernel is first checked against its operation's reference. "limit" is
the longer of the bytes of the touched experts (and of x, the residual and the result) at the bandwidth that a copy
reaches here, and of the multiplications at the rate that a large bf16 torch.matmul reaches here. Cold: successive calls
choose other experts until all have had their turn. "one": all tokens choose the same experts. Of torch: "select" copies
the chosen experts for a batched product, up to 16 tokens; "grouped" is torch._grouped_mm over sorted rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import print_table
from _gpu import measure_copy, time_events, time_graph
from moe_kit import MODELS, Experts
from torch import Tensor

import mmcompile.core.ops  # noqa: F401
from mmcompile.core.expression import evaluate
from mmcompile.core.formats import nvfp4, nvfp4_fragments

BYTES = {"moe_nvfp4": 0.5625, "moe": 2.0}
"""Of a weight; a row of NVFP4 has a global scale beside it."""
SELECTED_TOKENS, MOST_SETS, BOUND = 16, 16, 1e-2
ENCODED_TOKENS = (1, 16, 128, 1024, 8192, 65536)
Function = Callable[..., Tensor]


def activate(gate_up: Tensor, model: Experts) -> Tensor:
    """The activation of [gate | up]."""
    gate, up = gate_up.chunk(2, -1)
    if model.activation == "swiglu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1.0) * (gate * torch.sigmoid(gate * 1.702))


def run_selected(model: Experts, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
                 residual: Tensor) -> Tensor:  # fmt: skip
    """Every pair of token and expert by a batched product."""
    chosen = experts.flatten()
    hidden = activate(torch.bmm(gate_up[chosen], x.repeat_interleave(model.top_k, 0)[..., None])[..., 0], model)
    outputs = torch.bmm(down[chosen], hidden[..., None]).view(*experts.shape, -1)
    return (outputs.float() * weights[..., None]).sum(1).to(x.dtype) + residual


def run_grouped(model: Experts, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
                residual: Tensor) -> Tensor:  # fmt: skip
    """The pairs sorted by expert, by grouped products."""
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = (chosen[:, None] == torch.arange(model.experts, device=x.device)).sum(0)
    ends = counts.cumsum(0).to(torch.int32)
    hidden = activate(torch._grouped_mm(x[order // model.top_k], gate_up.transpose(1, 2), offs=ends), model)
    sorted_outputs = torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    outputs = torch.empty_like(sorted_outputs).index_copy(0, order, sorted_outputs).view(*experts.shape, -1)
    return (outputs.float() * weights[..., None]).sum(1).to(x.dtype) + residual


PEERS: dict[str, Function] = {"select": run_selected, "grouped": run_grouped}


def make_weights(model: Experts, op: str, device: str) -> dict[str, Tensor]:
    """Random experts in bf16 ("moe") or NVFP4, row-major, of a size that keeps results near one."""
    made: dict[str, Tensor] = {}
    for base, (rows, k) in model.stacks.items():
        shape = (model.experts, rows)
        if op == "moe":
            made[base] = torch.empty((*shape, k), dtype=torch.bfloat16, device=device)
            for expert in made[base]:
                expert.copy_(torch.randn((rows, k), device=device) * k**-0.5)
            continue
        made[f"{base}_packed"] = torch.randint(0, 256, (*shape, k // 2), dtype=torch.uint8, device=device)
        scale = torch.randint(0x30, 0x40, (*shape, k // 16), dtype=torch.uint8, device=device)
        made[f"{base}_scale"] = scale.view(torch.float8_e4m3fn)
        made[f"{base}_global_scale"] = (torch.rand(shape, device=device) + 0.5) * k**-0.5 / 3
    return made


def choose(model: Experts, tokens: int, routing: str, device: str) -> Tensor:
    """Experts int32 [tokens, top_k], different ones for a token; "one": the same for all tokens."""
    ranking = torch.rand(1 if routing == "one" else tokens, model.experts, device=device)
    return ranking.argsort(1)[:, : model.top_k].expand(tokens, -1).contiguous().to(torch.int32)


def turn_experts(chosen: Tensor, experts: int, turn: int) -> Tensor:
    """The same choice among other experts: those in use give way to as many others, in turn."""
    used = torch.unique(chosen)
    rest = torch.ones(experts, dtype=torch.bool, device=chosen.device)
    rest[used] = False
    order = torch.cat([used, rest.nonzero()[:, 0].to(used.dtype)])
    return order[(order.argsort()[chosen] + turn * len(used)) % experts].to(torch.int32)


def make_set(model: Experts, chosen: Tensor) -> dict[str, Tensor]:
    """Operands of one call but for the weights."""
    tokens, device = len(chosen), chosen.device
    weights = torch.rand(chosen.shape, device=device) + 0.1
    return {
        "x": torch.randn((tokens, model.k), device=device).bfloat16(), "experts": chosen,
        "weights": weights / weights.sum(1, keepdim=True),
        "residual": torch.randn((tokens, model.k), device=device).bfloat16(),
    }  # fmt: skip


def count_bytes(model: Experts, op: str, tokens: int, touched: int) -> float:
    """Bytes that a call must move."""
    matrices = sum(rows * k * BYTES[op] + (rows * 4 if op == "moe_nvfp4" else 0) for rows, k in model.stacks.values())
    return touched * matrices + 3 * tokens * model.k * 2


def count_operations(model: Experts, tokens: int) -> float:
    """Multiplications and additions of a call."""
    return 6.0 * model.n * model.k * tokens * model.top_k


def measure_rate() -> float:
    """Operations a second of a large bf16 product by torch."""
    a, b = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    return 2.0 * 8192**3 / time_events(lambda: torch.matmul(a, b), 12) * 1e6


def compare(result: Tensor, want: Tensor) -> float:
    """Relative error; AssertionError if it is too large."""
    error = float((result.float() - want.float()).norm() / want.float().norm())
    assert error < BOUND, error
    return error


@dataclass
class Bench:
    """What the measurements of a model share. ``arranged``: the NVFP4 weights in the layouts that an entry names."""

    kit: Any
    name: str
    bandwidth: float
    rate: float
    mode: str
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    arranged: dict[str, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> Experts:
        """The sizes."""
        return MODELS[self.name]

    def prepare(self, ops: tuple[str, ...] = tuple(BYTES)) -> None:
        """Random weights of the operations."""
        torch.manual_seed(0)
        self.weights = {op: make_weights(self.model, op, "cuda") for op in ops}

    def release(self) -> None:
        """Give the memory back."""
        self.weights, self.arranged = {}, {}
        torch.cuda.empty_cache()

    def find_weights(self, entry: dict[str, Any]) -> dict[str, Tensor]:
        """The weights of an entry, arranged once."""
        found = dict(self.weights[entry["op"]])
        for name, layout in entry["layouts"].items():
            if name not in self.arranged:
                self.arranged[name] = nvfp4_fragments.arrange_as(found[name], layout)
            found[name] = self.arranged[name]
        return found

    def time_entry(self, op: str, sets: list[dict[str, Tensor]], portable: bool) -> tuple[float, float, str]:
        """Microseconds of a kernel, its error against the reference, and the template."""
        entry = self.kit.find(len(sets[0]["x"]), portable=portable, op=op, model=self.name)
        values, error = self.check_entry(entry, sets)
        return time_graph(partial(self.run_turn, entry, values, sets), len(sets)), error, entry["template"]

    def check_entry(self, entry: dict[str, Any], sets: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], float]:
        """What the launches of an entry pass beside the operands, and the error of a run against the reference."""
        symbols = {"tokens": len(sets[0]["x"])}
        values = self.find_weights(entry) | {"result": torch.full_like(sets[0]["x"], math.nan)}
        for scratch in entry["scratch"]:
            size = [evaluate(n, symbols) for n in scratch["shape"]]
            dtype = getattr(torch, scratch["dtype"])
            values[f"scratch:{scratch['name']}"] = torch.empty(size, dtype=dtype, device="cuda")
        self.kit.run(entry, values | sets[0], symbols)
        op = entry["op"]
        want = getattr(torch.ops.mm, op)(**sets[0], **self.weights[op], **self.model.attributes)
        return values, compare(values["result"], want)

    def time_peer(self, peer: str, sets: list[dict[str, Tensor]]) -> float:
        """Microseconds of torch's way over bf16 weights; nan where it is not asked for."""
        if self.mode == "none" or (peer == "select" and len(sets[0]["x"]) > SELECTED_TOKENS):
            return math.nan
        function, weights = PEERS[peer], self.weights["moe"]
        want = torch.ops.mm.moe(**sets[0], **weights, **self.model.attributes)
        if self.mode != "eager":
            function = torch.compile(function, dynamic=False, mode=self.mode)
        compare(function(self.model, **sets[0], **weights), want)
        return time_graph(lambda i: function(self.model, **sets[i], **weights), len(sets))

    def measure(self, tokens: int, routing: str) -> Iterator[list[object]]:
        """Rows of the table for one number of tokens: hot, then cold."""
        model = self.model
        chosen = choose(model, tokens, routing, "cuda")
        touched = len(torch.unique(chosen))
        limit = max(count_bytes(model, "moe_nvfp4", tokens, touched) / self.bandwidth,
                    count_operations(model, tokens) / self.rate) * 1e6  # fmt: skip
        for temperature in ("hot", "cold"):
            turns = 1 if temperature == "hot" else max(2, min(MOST_SETS, model.experts // touched))
            sets = [make_set(model, turn_experts(chosen, model.experts, i)) for i in range(turns)]
            micros, error, template = self.time_entry("moe_nvfp4", sets, portable=False)
            portable, bf16 = (self.time_entry(op, sets, portable=True)[0] for op in ("moe_nvfp4", "moe"))
            peers = [self.time_peer(peer, sets) for peer in PEERS]
            best = min((t for t in (bf16, *peers) if not math.isnan(t)), default=math.nan)
            yield [self.name, tokens, routing, touched, temperature, template.removeprefix("moe_nvfp4_"),
                   f"{micros:.1f}", f"{limit:.1f}", f"{limit / micros:.2f}", f"{portable:.1f}", f"{bf16:.1f}",
                   *(f"{t:.1f}" for t in peers), f"{best / micros:.2f}", f"{error:.1e}"]  # fmt: skip

    def run_turn(self, entry: dict[str, Any], values: dict[str, Tensor], sets: list[dict[str, Tensor]], i: int) -> None:
        """Queue the launches of an entry on the operands of a turn."""
        self.kit.run(entry, values | sets[i], {"tokens": len(sets[i]["x"])})

    def sweep(self, tokens: int) -> Iterator[list[object]]:
        """Rows for each kernel and configuration of one number of tokens, cold, the fastest first.

        A kernel runs by itself, over experts and routes that take turns.
        """
        model, chosen = self.model, choose(self.model, tokens, "random", "cuda")
        touched, name = len(torch.unique(chosen)), "moe_nvfp4_only_token" if tokens == 1 else "moe_nvfp4_slot_lanes"
        count, symbols, rows = min(MOST_SETS, max(2, model.experts // touched)), {"tokens": tokens}, []
        sets = [make_set(model, turn_experts(chosen, model.experts, i)) for i in range(count)]
        for entry in self.kit.list(tokens, model=self.name, template=name):
            values, error = self.check_entry(entry, sets)
            for one in sets:  # every turn has the routes that the first kernel leaves
                self.kit.run(entry | {"launches": entry["launches"][:1]}, values | one, symbols)
                one["scratch:routes"] = values["scratch:routes"].clone()
            for launch, (stack, (n, k)) in zip(entry["launches"], model.stacks.items(), strict=False):
                moved = touched * (n * k * BYTES["moe_nvfp4"] + 4 * n)
                alone = partial(self.run_turn, entry | {"launches": [launch]}, values, sets)
                micros = time_graph(alone, count)
                rows.append([self.name, tokens, stack, entry.get("config", "selected"), launch["registers"], micros,
                             f"{moved / micros / 1e3:.0f}", f"{moved / micros * 1e6 / self.bandwidth:.2f}",
                             f"{error:.1e}"])  # fmt: skip
            for one in sets:
                del one["scratch:routes"]
        for row in sorted(rows, key=lambda r: (r[2], r[5])):
            yield [*row[:5], f"{row[5]:.2f}", *row[6:]]

    def measure_encoder(self, tokens: int) -> list[object]:
        """A row for the quantizer of ``tokens`` rows, inputs taking turns."""
        k, op = self.model.k, "nvfp4_quantize_activations"
        moved = tokens * (k * 2.5625 + 4)
        copies = int(max(2, min(64, (256 << 20) // moved)))
        inputs = [torch.randn((tokens, k), device="cuda").bfloat16() for _ in range(copies)]
        entry = self.kit.find(tokens, op=op, model=self.name)
        want = nvfp4.encode_rows(inputs[0])
        results = dict(zip(("result", "result1", "result2"), map(torch.empty_like, want), strict=True))
        run = lambda i: self.kit.run(entry, results | {"x": inputs[i]}, {"tokens": tokens})  # noqa: E731
        run(0)
        other = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in
                    zip(results.values(), want, strict=True))  # fmt: skip
        assert other <= moved * 1e-4, other
        micros, limit = time_graph(run, copies), moved / self.bandwidth * 1e6
        peer = math.nan
        if self.mode != "none":
            function = nvfp4.encode_rows if self.mode == "eager" else torch.compile(
                nvfp4.encode_rows, dynamic=False, mode=self.mode)  # fmt: skip
            peer = time_graph(lambda i: function(inputs[i]), copies)
        return [f"{tokens}x{k}", f"{micros:.2f}", f"{limit:.2f}", f"{limit / micros:.2f}", f"{peer:.1f}", other]


def check_on_cpu() -> None:
    """The peers against the operation's reference, and that turns change the experts, on small sizes."""
    for activation in ("swiglu", "swiglu_oai"):
        model = Experts(8, 2, 64, 96, activation)
        for op in BYTES:
            weights = make_weights(model, op, "cpu")
            for tokens, routing in ((1, "random"), (5, "random"), (7, "one")):
                chosen = choose(model, tokens, routing, "cpu")
                values = make_set(model, turn_experts(chosen, model.experts, 1))
                want = getattr(torch.ops.mm, op)(**values, **weights, **model.attributes)
                assert len(torch.unique(values["experts"])) == len(torch.unique(chosen))
                assert bool(want.isfinite().all())
                found = [compare(f(model, **values, **weights), want) for f in PEERS.values() if op == "moe"]
                print(op, activation, tokens, routing, *(f"{error:.1e}" for error in found))


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path, nargs="?")
    parser.add_argument("--cpu", action="store_true", help="only check the peers, without a GPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 128, 512, 2048, 8192])
    parser.add_argument("--routing", nargs="+", choices=("random", "one"), default=["random"])
    parser.add_argument("--sweep", action="store_true", help="time the decode kernels of a swept kit one by one")
    parser.add_argument("--peer", default="max-autotune-no-cudagraphs", help="a mode of torch.compile, eager, or none")
    arguments = parser.parse_args()
    if arguments.cpu:
        check_on_cpu()
        return
    assert arguments.kit is not None, "name the folder that moe_kit.py made"
    torch.cuda.init()
    from _kit import Kit

    torch._dynamo.config.recompile_limit = 256
    torch.zeros(1, device="cuda")  # makes the context that modules are loaded into
    kit, bandwidth, rate = Kit(arguments.kit), measure_copy(), measure_rate()
    print(torch.cuda.get_device_name(), f"copy {bandwidth / 1e12:.2f} TB/s, {rate / 1e12:.0f} TFLOP/s", "torch",
          torch.__version__, flush=True)  # fmt: skip
    benches = [Bench(kit, name, bandwidth, rate, arguments.peer) for name in arguments.models]
    if arguments.sweep:
        print_sweep(benches, arguments.tokens)
    else:
        print_measurements(benches, arguments.tokens, arguments.routing)


def print_sweep(benches: list[Bench], tokens: list[int]) -> None:
    """The table of the decode kernels by themselves."""
    header = ["model", "tokens", "stack", "config", "registers", "us", "GB/s", "of copy", "error"]
    for bench in benches:
        bench.prepare(("moe_nvfp4",))
        rows = [row for count in tokens if count <= SELECTED_TOKENS for row in bench.sweep(count)]
        print_table(f"Decode kernels of {bench.name}", header, rows)
        bench.release()


def print_measurements(benches: list[Bench], tokens: list[int], routings: list[str]) -> None:
    """The tables of everything else."""
    header = ["model", "tokens", "routing", "experts", "L2", "template", "us", "limit us", "limit / ours",
              "portable us", "bf16 us", "torch select us", "torch grouped us", "best bf16 / ours", "error"]  # fmt: skip
    table, encoded = [], []
    for bench in benches:
        encoded += [bench.measure_encoder(count) for count in ENCODED_TOKENS]
        bench.prepare()
        for row in (r for count in tokens for routing in routings for r in bench.measure(count, routing)):
            print(*row, flush=True)
            table.append(row)
        bench.release()
    print_table("NVFP4 experts", header, table)
    header = ["rows", "us", "limit us", "limit / ours", "torch us", "other bytes"]
    print_table("NVFP4 encoding of activations", header, encoded)


if __name__ == "__main__":
    main()
