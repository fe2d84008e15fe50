"""Linear kernels on an NVIDIA GPU: NVFP4 and bf16 weights against cuBLAS bf16 and the bytes-over-bandwidth limit.

python benchmarks/h200_linear.py kit     (the folder that linear_kit.py made; results.json is written to $OUT or there)

Cold: the weights of every call come from memory, copies of 512 MB or more take turns. Times in a CUDA graph: gap, ramp
and drain of the launches are in it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _common import print_table
from _gpu import measure_copy, time_events, time_graph
from cuda.bindings import driver as cu

from mmcompile.core.expression import evaluate
from mmcompile.core.formats import nvfp4, nvfp4_fragments
from mmcompile.core.ops.linear import apply_epilogue

COLD_BYTES = 512 << 20


def check(result: tuple) -> object:
    """The value of a driver call."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def configure(grid: list[int], threads: int, shared: int, stream: int, early: bool) -> object:
    """A launch, with ``early`` one that may start while the launch before it still runs (it waits by itself)."""
    made = cu.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = grid
    made.blockDimX, made.blockDimY, made.blockDimZ = threads, 1, 1
    made.sharedMemBytes, made.hStream = shared, cu.CUstream(stream)
    if early:
        attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        made.attrs, made.numAttrs = [attribute], 1
    return made


def load(folder: Path, entry: dict) -> Callable[[dict[str, object]], None]:
    """A function (values by name) that launches the entry's kernel on torch's stream."""
    module = check(cu.cuModuleLoadData((folder / entry["file"]).read_bytes()))
    function = check(cu.cuModuleGetFunction(module, entry["name"].encode()))
    if entry["shared"] > 48 * 1024:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(function, attribute, entry["shared"]))

    def launch(given: dict[str, object]) -> None:
        symbols = {name: value for name, value in given.items() if isinstance(value, int)}
        grid = [evaluate(e, symbols) for e in entry["grid"]]
        arguments = [given[name] for name in entry["arguments"]]
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments] + [0, 0]
        kinds = [ctypes.c_int32 if isinstance(a, int) else ctypes.c_void_p for a in arguments] + [ctypes.c_void_p] * 2
        stream = torch.cuda.current_stream().cuda_stream
        configuration = configure(grid, 32 * entry["num_warps"], entry["shared"], stream, entry.get("early", False))
        check(cu.cuLaunchKernelEx(configuration, function, (tuple(values), tuple(kinds)), 0))

    return launch


def measure_bandwidths(read: Callable[[dict[str, object]], None]) -> tuple[float, float]:
    """Bytes per second of a device-to-device copy, and of a pure read of 2 GiB."""
    source = torch.empty(1 << 29, dtype=torch.int32, device="cuda").random_()
    values = {"x": source, "out": torch.empty_like(source), "n": source.numel()}
    return measure_copy(), 4e6 * source.numel() / time_events(lambda: read(values), 12)


def count_bytes(op: str, rows: int, k: int) -> int:
    """Bytes of a weight."""
    return rows * k * 2 if op == "linear" else rows * k * 9 // 16 + rows * 4


def make_weights(op: str, rows: int, k: int) -> list[dict[str, torch.Tensor]]:
    """Copies of a random weight, enough of them to fill COLD_BYTES (at most 400)."""
    if op == "linear":
        first = {"weight": (torch.randn(rows, k, device="cuda") * 0.05).bfloat16()}
    else:
        first = {"packed": torch.randint(0, 256, (rows, k // 2), device="cuda").to(torch.uint8),
                 "scale": torch.randint(8, 100, (rows, k // 16), device="cuda").to(torch.uint8),
                 "global_scale": torch.rand(rows, device="cuda") * 1e-3}  # fmt: skip
        first["scale"] = first["scale"].view(torch.float8_e4m3fn)
    copies = min(max(2, COLD_BYTES // count_bytes(op, rows, k)), 400)
    return [first] + [{name: t.clone() for name, t in first.items()} for _ in range(copies - 1)]


def arrange(weights: list[dict[str, torch.Tensor]], dtype: str) -> list[dict[str, torch.Tensor]]:
    """The same in fragment order."""
    parts = {name: nvfp4_fragments.arrange(weights[0][name], dtype) for name in ("packed", "scale")}
    return [w | {name: t.clone() for name, t in parts.items()} for w in weights]


def compute(weights: dict[str, torch.Tensor], x: torch.Tensor, activation: str) -> torch.Tensor:
    """The expected result, accumulated in fp32 over pieces of the weight."""
    rows, pieces = next(iter(weights.values())).shape[0], []
    for start in range(0, rows, 8192):
        part = {name: t[start : start + 8192] for name, t in weights.items()}
        if "weight" in part:
            pieces.append(x.float() @ part["weight"].float().T)
        else:
            decoded = nvfp4.decode_blocks(part["packed"], part["scale"])
            pieces.append(x.float() @ decoded.T * part["global_scale"])
    return apply_epilogue(torch.cat(pieces, 1), None, None, activation)


def measure_shape(entries: list[dict], folder: Path, read: Callable[[dict[str, object]], None]) -> list[dict]:
    """Times of cuBLAS, of reading the bytes alone, and of every kernel of one shape."""
    rows, k, activation = (entries[0][name] for name in ("rows", "k", "activation"))
    x16 = torch.randn(512, k, device="cuda").bfloat16()
    results = []
    for op in ("linear", "linear_nvfp4"):
        mine = [e for e in entries if e["op"] == op]
        weights = make_weights(op, rows, k)
        copies = len(weights)
        if op == "linear":
            for tokens in sorted({t for e in entries for t in e["tokens"]}):
                x = x16[:tokens].contiguous()
                micros = time_graph(lambda i, x=x, w=weights: torch.nn.functional.linear(x, w[i]["weight"]), copies)
                results.append({"op": "cublas", "tokens": tokens, "us": micros})
        words = torch.empty(copies * count_bytes(op, rows, k) // 4, dtype=torch.int32, device="cuda").random_()
        slices = words.chunk(copies)
        n = slices[0].numel()
        micros = time_graph(lambda i, s=slices, w=words, n=n: read({"x": s[i], "out": w, "n": n}), copies)
        results.append({"op": f"read {op}", "tokens": 0, "us": micros})
        del words, slices
        want = compute(weights[0], x16, activation)
        arranged = {}
        for entry in mine:
            sets = weights
            if op == "linear_nvfp4" and entry["config"] != "portable":
                dtype = entry["dtype"]
                if dtype not in arranged:
                    arranged = {dtype: arrange(weights, dtype)}
                sets = arranged[dtype]
            launch = load(folder, entry)
            for tokens in entry["tokens"]:
                x = x16[:tokens].to(getattr(torch, entry["dtype"])).contiguous()
                out = torch.full((tokens, want.shape[1]), float("nan"), device="cuda").to(x.dtype)
                own = {"x": x, "result": out, "tokens": tokens}
                call = lambda i, s=sets, own=own, launch=launch: launch({**s[i], **own})  # noqa: E731
                call(0)
                error = float((out.float() - want[:tokens]).norm() / want[:tokens].norm())
                micros = time_graph(call, copies)
                results.append({key: entry[key] for key in ("op", "config", "registers", "dtype")}
                               | {"tokens": tokens, "us": micros, "error": error})  # fmt: skip
        del weights, arranged, want
        torch.cuda.empty_cache()
    return [{"rows": rows, "k": k, "activation": activation} | r for r in results]


def tabulate(results: list[dict], copy: float) -> list[list[object]]:
    """One row for each kernel, the fastest first."""
    cublas = {r["tokens"]: r["us"] for r in results if r["op"] == "cublas"}
    read = {r["op"]: r["us"] for r in results if r["op"].startswith("read")}
    table = []
    kernels = [r for r in results if r["op"].startswith("linear")]
    for r in sorted(kernels, key=lambda r: (r["op"], r["tokens"], r["us"])):
        size = count_bytes(r["op"], r["rows"], r["k"])
        table.append([
            f"{r['op']} {r['rows']}x{r['k']} {r['activation']}", r["tokens"], r["config"], f"{r['us']:.2f}",
            f"{cublas[r['tokens']]:.2f}", f"{cublas[r['tokens']] / r['us']:.2f}", f"{read['read ' + r['op']]:.2f}",
            f"{size / r['us'] / 1e3:.0f}", f"{size / r['us'] * 1e6 / copy:.2f}", f"{r['error']:.1e}",
        ])  # fmt: skip
    return table


def main() -> None:
    """Measure and print."""
    folder = Path(sys.argv[1])
    entries = json.loads((folder / "kit.json").read_text())
    torch.zeros(1, device="cuda")  # makes the context that modules are loaded into
    read = load(folder, next(e for e in entries if e["op"] == "read"))
    copy, pure = measure_bandwidths(read)
    print(torch.cuda.get_device_name(), f"copy {copy / 1e12:.3f} TB/s, read {pure / 1e12:.3f} TB/s", flush=True)
    header = ["kernel", "tokens", "config", "us", "cuBLAS us", "cuBLAS / ours", "read us", "GB/s", "of copy", "error"]
    results, file = [], Path(os.environ.get("OUT", folder)) / "results.json"
    shapes = [s for s in sys.argv[2:]]
    for shape in dict.fromkeys((e["rows"], e["k"], e["activation"]) for e in entries if e["op"] != "read"):
        if shapes and f"{shape[0]}x{shape[1]}" not in shapes:
            continue
        mine = [e for e in entries if e["op"] != "read" and (e["rows"], e["k"], e["activation"]) == shape]
        found = measure_shape(mine, folder, read)
        results += found
        file.write_text(json.dumps({"copy": copy, "read": pure, "results": results}))
        print_table("x".join(map(str, shape[:2])), header, tabulate(found, copy))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
