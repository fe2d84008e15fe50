"""Decode steps in one launch on an NVIDIA GPU: against the bytes that must move, and torch.compile of the same model.

python benchmarks/h200_mono.py kit [--only NAME] [--peers]     (kit: the folder that mono_kit.py made)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import print_table
from _gpu import measure_copy
from cuda.bindings import driver as cu

from mmcompile.core.formats import nvfp4
from mmcompile.core.stream import FAULT_WORD
from mmcompile.targets._tuned.stream_pack import pack_gains, pack_norms, pack_stream
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_reference import StepInputs, run_step
from mmcompile.targets._tuned.stream_shape import TRACED, StepShape

CONTEXTS = (1024, 32768, 262144)
MEMORY = 100 << 30
Weights = dict[tuple[str, int], torch.Tensor]


def check(result: tuple) -> object:
    """The value of a driver call."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def time_call(call: Callable[[], object], count: int = 12, repeats: int = 5) -> float:
    """Seconds per call: median over ``repeats`` of ``count`` back to back."""
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / count)
    return statistics.median(times[1:])


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def make_weights(shape: StepShape) -> tuple[Weights, Weights, torch.Tensor]:
    """Random weights and norms by (role, layer), and embeddings."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(rows: int, k: int) -> torch.Tensor:
        values = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda")
        return values.normal_(0, 1 / math.sqrt(k), generator=generator)

    s, d = shape, shape.head_dim
    weights, norms = {}, {}
    for layer in range(s.layers):
        weights["qkv", layer] = draw((s.heads + 2 * s.kv_heads) * d, s.hidden)
        weights["o", layer] = draw(s.hidden, s.heads * d)
        weights["gate_up", layer] = draw(2 * s.intermediate, s.hidden)
        weights["down", layer] = draw(s.hidden, s.intermediate)
        for name in ("input", "after"):
            norms[name, layer] = 1 + 8 * draw(s.hidden, 1).view(-1) * 0.02
    weights["head", s.layers] = draw(s.vocabulary, s.hidden)
    norms["final", s.layers] = 1 + 8 * draw(s.hidden, 1).view(-1) * 0.02
    return weights, norms, draw(s.vocabulary, s.hidden) * math.sqrt(s.hidden)


def draw_codes(weights: Weights) -> tuple[dict, Weights]:
    """Random NVFP4 weights of the same shapes (packed, scale, global scale), and their values in bf16."""
    generator = torch.Generator(device="cuda").manual_seed(2)
    coded, values = {}, {}
    for name, weight in weights.items():
        rows, k = weight.shape
        packed = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
        scale = (torch.rand(rows, k // 16, device="cuda", generator=generator) * 2 + 0.1).to(torch.float8_e4m3fn)
        factor = (torch.rand(rows, device="cuda", generator=generator) + 0.5) / (3 * math.sqrt(k))
        coded[name] = packed, scale, factor
        values[name] = torch.empty_like(weight)
        for start in range(0, rows, 8192):
            part = slice(start, start + 8192)
            values[name][part] = nvfp4.decode_blocks(packed[part], scale[part]) * factor[part, None]
    return coded, values


def make_inputs(shape: StepShape, embedding: torch.Tensor, lengths: list[int], poison: bool) -> tuple[StepInputs, dict]:
    """Inputs of a step; with ``poison`` every element of the caches that must not be read is NaN.

    Caches that would not fit memory side by side are one and the same for all layers (each is far larger than the L2).
    """
    generator = torch.Generator(device="cuda").manual_seed(1)
    s, batch = shape, len(lengths)
    blocks = -(-max(*lengths, 1) // s.page_size)
    pages = batch * blocks + 1
    table = torch.randperm(pages, device="cuda", generator=generator)[: batch * blocks].view(batch, blocks).int()
    size = (pages, s.kv_heads, s.page_size, 2 * s.head_dim)
    own = s.layers if math.prod(size) * 2 * s.layers < MEMORY else 1
    caches = [torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in range(own)]
    last = [max(n - 1, 0) for n in lengths]
    slots = [int(table[b, n // s.page_size]) * s.page_size + n % s.page_size for b, n in enumerate(last)]
    slots = [slot if n else -1 for slot, n in zip(slots, lengths, strict=True)]
    if poison:
        for cache in caches:
            kept = torch.zeros(pages, s.page_size, dtype=torch.bool, device="cuda")
            for b, n in enumerate(last):
                spots = torch.arange(n, device="cuda")
                kept[table[b].long()[spots // s.page_size], spots % s.page_size] = True
            cache.masked_fill_(~kept[:, None, :, None], float("nan"))
    angles = (
        torch.arange(max(*lengths, 1), device="cuda")[:, None]
        / 500000 ** torch.linspace(0, 1, s.head_dim // 2 + 1, device="cuda")[:-1]
    )
    ids = torch.randint(0, s.vocabulary, (batch,), device="cuda", generator=generator).int()
    inputs = StepInputs(
        embedding[ids.long()], torch.tensor(last, device="cuda").int(), torch.tensor(slots, device="cuda"), table,
        torch.tensor(lengths, device="cuda").int(), torch.cat([angles.cos(), angles.sin()], -1).bfloat16(),
        [caches[i % own] for i in range(s.layers)],
    )  # fmt: skip
    return inputs, {"input_ids": ids}


class Step:
    """One entry of the kit, loaded, with its buffers."""

    def __init__(self, folder: Path, entry: dict, packed: dict[str, torch.Tensor]) -> None:
        entry["shape"]["prefetch"] = tuple(entry["shape"]["prefetch"])
        self.shape, self.entry, self.packed = StepShape(**entry["shape"]), entry, packed
        module = check(cu.cuModuleLoadData((folder / entry["file"]).read_bytes()))
        self.function = check(cu.cuModuleGetFunction(module, entry["symbol"].encode()))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(self.function, attribute, entry["shared"]))
        size = StepPlan(self.shape).workspace["end"]
        self.workspace = torch.zeros(size, dtype=torch.int32, device="cuda")
        self.result = torch.empty(self.shape.max_tokens, self.shape.vocabulary, dtype=torch.bfloat16, device="cuda")

    def bind(self, inputs: StepInputs, more: dict) -> Callable[[], None]:
        """A function that launches the step on torch's stream."""
        values = self.packed | more | {
            "table": inputs.table, "positions": inputs.positions, "slot_mapping": inputs.slot_mapping,
            "block_table": inputs.block_table, "seq_lens": inputs.seq_lens, "workspace": self.workspace,
            "result": self.result, "tokens": len(inputs.seq_lens), "max_blocks": inputs.block_table.shape[1],
        }  # fmt: skip
        values |= {f"kv_cache.{i}": cache for i, cache in enumerate(inputs.caches)}
        arguments = [values[name] for name in self.entry["arguments"]]
        plain = tuple([a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments] + [0, 0])
        kinds = [ctypes.c_int32 if isinstance(a, int) else ctypes.c_void_p for a in arguments] + [ctypes.c_void_p] * 2
        programs = self.shape.programs

        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            check(cu.cuLaunchKernel(self.function, programs, 1, 1, 256, 1, 1, self.entry["shared"], stream,
                                    (plain, tuple(kinds)), 0))  # fmt: skip

        launch.keep = values
        return launch

    def find_fault(self) -> list[int]:
        """The fault record: zeros if no wait gave up."""
        return self.workspace[FAULT_WORD : FAULT_WORD + 2].tolist()


def measure_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def prove(step: Step, weights: Weights, norms: Weights, embedding: torch.Tensor, lengths: list[int]) -> dict:
    """Poisoned outputs and caches, the fp32 and bf16 references, and the bits of three further runs."""
    inputs, more = make_inputs(step.shape, embedding, lengths, poison=True)
    copies = [StepInputs(*vars(inputs).values()) for _ in range(2)]
    errors, results = {}, {}
    for name, dtype, given in zip(("wanted", "bf16"), (torch.float32, torch.bfloat16), copies, strict=True):
        given = StepInputs(**(vars(given) | {"caches": [c.clone() for c in inputs.caches]}))
        results[name] = run_step(step.shape, weights, norms, given, dtype)
        results[name, "caches"] = given.caches
    launch = step.bind(inputs, more)
    runs = []
    for _ in range(4):
        step.result.fill_(float("nan"))
        launch()
        torch.cuda.synchronize()
        runs.append(step.result[: len(lengths)].clone())
    alive = [b for b, n in enumerate(lengths) if n]
    errors["logits"] = measure_error(runs[0][alive], results["wanted"][alive])
    errors["bf16 torch"] = measure_error(results["bf16"][alive], results["wanted"][alive])
    new = [(b, int(s) // step.shape.page_size, int(s) % step.shape.page_size)
           for b, s in enumerate(inputs.slot_mapping.tolist()) if s >= 0]  # fmt: skip
    rows = {key: torch.stack([c[p, :, o].float() for c in caches for _, p, o in new])
            for key, caches in (("ours", inputs.caches), ("wanted", results["wanted", "caches"]))}  # fmt: skip
    errors["new rows"] = measure_error(rows["ours"], rows["wanted"])
    same = all(torch.equal(a[alive].view(torch.int16), runs[0][alive].view(torch.int16)) for a in runs)
    top = bool((runs[0][alive].argmax(-1) == results["wanted"][alive].argmax(-1)).all())
    return errors | {"same bits": same, "same token": top, "fault": step.find_fault()}


def count_bytes(shape: StepShape, lengths: list[int]) -> int:
    """Weights read once, keys and values of the cached tokens, new ones written."""
    s, width = shape, shape.head_dim
    rows = (s.heads + 2 * s.kv_heads) * width * s.hidden + s.hidden * s.heads * width + 3 * s.hidden * s.intermediate
    cache = sum(lengths) * 4 * s.kv_heads * width * s.layers
    bits = 4.5 if s.weight_format == "nvfp4" else 16
    return int((rows * s.layers + (s.vocabulary or 0) * s.hidden) * bits / 8) + cache


def time_step(step: Step, embedding: torch.Tensor, batch: int, context: int) -> float | None:
    """Seconds per step inside a CUDA graph; None if the cache does not fit."""
    s = step.shape
    if batch * context * 4 * s.kv_heads * s.head_dim > MEMORY // 2:
        return None
    inputs, more = make_inputs(s, embedding, [context] * batch, poison=False)
    graph = capture(step.bind(inputs, more))
    seconds = time_call(graph.replay)
    return None if any(step.find_fault()) else seconds


def print_trace(step: Step, embedding: torch.Tensor, context: int) -> None:
    """Mean nanoseconds of every phase of a layer over programs and layers, first two layers left out."""
    inputs, more = make_inputs(step.shape, embedding, [context] * step.shape.max_tokens, poison=False)
    launch, plan = step.bind(inputs, more), StepPlan(step.shape)
    for _ in range(4):
        launch()
    torch.cuda.synchronize()
    words = 2 * step.shape.programs * plan.trace_stamps
    trace = step.workspace[plan.workspace["trace"] :][:words].view(torch.int64).view(step.shape.programs, -1).cpu()
    layers = trace[:, :-2].reshape(len(trace), -1, len(TRACED)).double()
    layers[:, :, 2] = torch.where(layers[:, :, 2] < layers[:, :, 1], layers[:, :, 1], layers[:, :, 2])
    flat = layers.reshape(len(trace), -1)
    steps = torch.cat([flat[:, :1] * 0, flat[:, 1:] - flat[:, :-1]], 1).view(layers.shape)[:, 2:]
    means = {name: round(steps[:, :, i].mean().item()) for i, name in enumerate(TRACED)}
    head = (trace[:, -1] - trace[:, -2]).double().mean().item()
    print("trace ns", means, "layer", round(sum(means.values())), "head", head,
          "whole", (trace[:, -1].max() - trace[:, 0].min()).item(), flush=True)  # fmt: skip


def time_torch(shape: StepShape, context: int, batch: int = 1) -> dict[str, float]:
    """transformers' Llama with random weights: max-autotune, static cache, the step captured as a CUDA graph."""
    import torch._inductor.config as inductor
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=context + 64, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=context + 128)  # every step takes one more place
    token = torch.randint(10, 1000, (batch, 1), device="cuda")
    inductor.coordinate_descent_tuning = True
    times = {}
    with torch.inference_mode():
        model(token, past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.cumulative_length.fill_(context - 1)
        compiled = torch.compile(model.forward, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)

        def step() -> object:
            return compiled(token, past_key_values=cache, use_cache=True).logits

        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        print(f"torch.compile took {time.perf_counter() - started:.0f} s", flush=True)
        times["torch.compile max-autotune, one graph"] = time_call(capture(step).replay)
    return times


def run_model(folder: Path, entries: list[dict], bandwidth: float, contexts: list[int]) -> list[list[str]]:
    """Prove and time every entry of one model; the rows of its table."""
    shape = StepShape(**(entries[0]["shape"] | {"prefetch": tuple(entries[0]["shape"]["prefetch"])}))
    weights, norms, embedding = make_weights(shape)
    packed = {"norms": pack_norms(shape, norms), "embedding": embedding}
    if shape.weight_format == "nvfp4":
        coded, weights = draw_codes(weights)
        packed |= {"stream": pack_stream(shape, coded), "gains": pack_gains(shape, coded)}
    else:
        packed["stream"] = pack_stream(shape, weights)
    rows, steps = [], []
    for entry in entries:
        step = Step(folder, entry, packed)
        batch = step.shape.max_tokens
        lengths = [1024, 1, 777, 0, 2001, 64, 513, 1023][:batch]
        found = prove(step, weights, norms, embedding, lengths)
        print(entry["name"], entry["registers"], "registers", found, flush=True)
        if any(found["fault"]) or not found["logits"] < 1.2 * found["bf16 torch"]:
            print(entry["name"], "is wrong and is not timed", flush=True)
            continue
        steps.append(step)
        if step.shape.trace:
            print_trace(step, embedding, 1024)
    if steps:
        print("long", prove(steps[0], weights, norms, embedding, [20011]), flush=True)
    weights.clear()
    torch.cuda.empty_cache()
    # The short context twice, and before the long ones, which heat the GPU.
    for context in (contexts[0], *contexts):
        for step in steps:
            if "=" in step.entry["name"] and context != contexts[0]:
                continue  # a variant
            batch = step.shape.max_tokens
            seconds = time_step(step, embedding, batch, context)
            torch.cuda.empty_cache()
            if seconds is None:
                continue
            limit = count_bytes(step.shape, [context] * batch) / bandwidth
            rows.append([f"{step.entry['name']}, context {context}", f"{seconds * 1e6:.1f}", f"{limit * 1e6:.1f}",
                         f"{limit / seconds:.3f}"])  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("--only", action="append", help="models or entries that start with this")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--peers", action="store_true", help="also torch.compile")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    bandwidth = measure_copy()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    entries = json.loads((arguments.kit / "kit.json").read_text())
    if arguments.only:
        entries = [e for e in entries if any(e["name"].startswith(prefix) for prefix in arguments.only)]
    rows = []
    models = dict.fromkeys(e["name"].partition(":")[0] for e in entries)
    for model in models:
        mine = [e for e in entries if e["name"].partition(":")[0] == model]
        rows += run_model(arguments.kit, mine, bandwidth, arguments.contexts)
        torch.cuda.empty_cache()
    for model in models if arguments.peers else ():
        entry = next(e for e in entries if e["name"].partition(":")[0] == model)["shape"]
        shape = StepShape(**(entry | {"prefetch": tuple(entry["prefetch"])}))
        if shape.weight_format != "bf16":
            continue
        for name, seconds in time_torch(shape, 1024).items():
            limit = count_bytes(shape, [1024]) / bandwidth
            rows.append([f"{model}, {name}, context 1024", f"{seconds * 1e6:.1f}", f"{limit * 1e6:.1f}",
                         f"{limit / seconds:.3f}"])  # fmt: skip
            print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    print_table("Decode step", ["what", "us", "limit us", "limit / time"], rows)


if __name__ == "__main__":
    main()
