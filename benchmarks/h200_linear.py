"""Linear kernels on an NVIDIA GPU: NVFP4 and bf16 weights against cuBLAS bf16 and the bytes-over-bandwidth limit.

python benchmarks/h200_linear.py kit     (the folder that linear_kit.py made)
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _common import print_table
from cuda.bindings import driver as cu

from mmcompile.core.expression import evaluate
from mmcompile.core.formats import nvfp4

COLD_BYTES = 512 << 20


def check(result: tuple) -> object:
    """The value of a driver call."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def load(folder: Path, entry: dict) -> Callable[[list[object], int], None]:
    """A function (arguments, tokens) that launches the entry's kernel on torch's stream."""
    module = check(cu.cuModuleLoadData((folder / entry["file"]).read_bytes()))
    function = check(cu.cuModuleGetFunction(module, entry["name"].encode()))
    if entry["shared"] > 48 * 1024:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(function, attribute, entry["shared"]))

    def launch(arguments: list[object], tokens: int) -> None:
        grid = [evaluate(e, {"tokens": tokens}) for e in entry["grid"]]
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments] + [0, 0]
        kinds = [ctypes.c_int32 if isinstance(a, int) else ctypes.c_void_p for a in arguments] + [ctypes.c_void_p] * 2
        stream = torch.cuda.current_stream().cuda_stream
        check(cu.cuLaunchKernel(function, *grid, 32 * entry["num_warps"], 1, 1, entry["shared"], stream,
                                (tuple(values), tuple(kinds)), 0))  # fmt: skip

    return launch


def time_graph(call: Callable[[int], None], copies: int) -> float:
    """Microseconds per call inside a CUDA graph of at least 40 calls that rotates over ``copies`` weight sets."""
    count = copies * max(1, -(-40 // copies))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % copies)
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return sorted(times)[len(times) // 2]


def measure_copy() -> float:
    """Bytes per second of a device-to-device copy, read and written bytes counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * source.numel() / sorted(times)[len(times) // 2]


def make_weights(rows: int, k: int, copies: int) -> list[dict[str, torch.Tensor]]:
    """Random weights in both forms; the copies share values, not memory."""
    weight = torch.randn(rows, k, device="cuda") * 0.05
    packed, scale, global_scale = nvfp4.encode(weight)
    first = {"weight": weight.bfloat16(), "packed": packed, "scale": scale,
             "global_scale": global_scale.reshape(1).expand(rows).contiguous()}  # fmt: skip
    return [{name: t.clone() for name, t in first.items()} for _ in range(copies)]


def compare(entries: list[dict], folder: Path, rows: int, k: int, tokens: int, bandwidth: float) -> list[list[object]]:
    """Rows of the table for one shape and token count."""
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    bytes_of = {"linear": rows * k * 2, "linear_nvfp4": rows * k * 9 // 16 + rows * 4}
    table = []
    for temperature in ("hot", "cold"):
        copies = 1 if temperature == "hot" else max(2, COLD_BYTES // bytes_of["linear_nvfp4"])
        copies = min(copies, 400)
        weights = make_weights(rows, k, copies)
        cublas = time_graph(lambda i, w=weights: torch.nn.functional.linear(x, w[i]["weight"]), copies)
        for op in ("linear", "linear_nvfp4"):
            entry = next(e for e in entries if e["op"] == op and (e["max_tokens"] or 1 << 30) >= tokens)
            launch, out = load(folder, entry), torch.full((tokens, rows), float("nan"), device="cuda").bfloat16()

            def call(i: int, launch=launch, out=out, entry=entry, weights=weights) -> None:
                values = {**weights[i], "x": x, "result": out, "tokens": tokens}
                launch([values[name] for name in entry["arguments"]], tokens)

            call(0)
            decoded = (
                nvfp4.decode_blocks(weights[0]["packed"], weights[0]["scale"]) * weights[0]["global_scale"][:, None]
            )
            want = x.float() @ (weights[0]["weight"].float() if op == "linear" else decoded).T
            error = float((out.float() - want).norm() / want.norm())
            assert error < 1e-2, (op, rows, k, tokens, error)
            micros = time_graph(call, copies)
            limit = (bytes_of[op] + tokens * (rows + k) * 2) / bandwidth * 1e6
            table.append([f"{op} {rows}x{k}", tokens, temperature, f"{micros:.2f}", f"{cublas:.2f}",
                          f"{cublas / micros:.2f}", f"{limit / micros:.2f}", f"{error:.1e}"])  # fmt: skip
    return table


def main() -> None:
    """Measure and print."""
    folder = Path(sys.argv[1])
    entries = json.loads((folder / "kit.json").read_text())
    torch.cuda.init()
    bandwidth = measure_copy()
    print(torch.cuda.get_device_name(), f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    table = []
    for rows, k in dict.fromkeys((e["rows"], e["k"]) for e in entries):
        mine = [e for e in entries if (e["rows"], e["k"]) == (rows, k)]
        for tokens in (1, 8, 32, 512):
            table += compare(mine, folder, rows, k, tokens, bandwidth)
    header = ["kernel", "tokens", "L2", "us", "cuBLAS bf16 us", "cuBLAS / ours", "limit / ours", "error"]
    print_table("Linear layers, time in a CUDA graph; limit = bytes that must move / copy bandwidth", header, table)


if __name__ == "__main__":
    main()
