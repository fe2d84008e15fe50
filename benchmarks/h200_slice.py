"""The first layers of MiniMax-M3.1-Flash at real dimensions with random weights: an H200 against references on the CPU.

    B=minimax-m3.1-flash-slice:4
    mmcompile build $B --weights none --quant nvfp4_mxfp8 --target sm90,cpu --max-context 4096 -o out/slice
    mmcompile build $B --weights none --quant nvfp4_mxfp8 --target cpu --max-context 4096 --dtype float32 -o out/exact
    python benchmarks/h200_slice.py run out/slice --device cuda -o gpu.pt &
    python benchmarks/h200_slice.py run out/slice --device cpu -o cpu.pt &
    python benchmarks/h200_slice.py run out/exact --device cpu -o exact.pt & wait
    python benchmarks/h200_slice.py compare gpu.pt cpu.pt exact.pt          (exit code 1 if a bound is exceeded)

All of them get the same weights from the seed, the same prompts and the same tokens to decode. Sequences cross the
border of a page (128) and the 2048 tokens from which on attention is sparse. What rounding to bf16 does to the logits
is seen on the CPU, as the distance of its bf16 run to its float32 run. The GPU rounds at other places: its median row
may be FACTOR times as far from the float32 run as the CPU's. Where two experts or blocks score alike, rounding decides
which is taken and the row is far off; so many rows more than on the CPU may be so as SLACK says.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import print_table
from torch import Tensor

import mmcompile
from mmcompile.runtime import Engine
from mmcompile.runtime.executor import count_bytes

GROUPS = ((126,), (2046,), (5, 127, 1000, 2046))
FACTOR, SLACK = 2.0, 0.15
_NAN = 0xFF  # a byte that makes NaN of every float


def make_tokens(length: int, place: int, vocabulary: int) -> list[int]:
    """The same random tokens for every device."""
    generator = torch.Generator().manual_seed(1000 * place + length)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


def run_group(engine: Engine, lengths: tuple[int, ...], steps: int) -> Tensor:
    """Logits of the prompts' last tokens and of ``steps`` decoded ones: fp32 [sequences, 1 + steps, vocabulary]."""
    vocabulary = engine.manifest.model.vocab_size
    tokens = [make_tokens(length + steps, place, vocabulary) for place, length in enumerate(lengths)]
    handles, logits = engine.prefill([t[:length] for t, length in zip(tokens, lengths, strict=True)])
    rows = [logits.float()]
    for step in range(steps):
        following = [t[length + step] for t, length in zip(tokens, lengths, strict=True)]
        rows.append(engine.decode(handles, following).float())
    engine.release(handles)
    return torch.stack(rows, 1)


def poison_caches(engine: Any) -> None:
    """Fill every page of the caches with NaN: nothing that a sequence did not write may decide a result."""
    executor = engine.executor
    for buffer in engine._plan.buffers.values():
        if buffer.role == "state":
            garbage = torch.full((count_bytes(buffer, {"pages": engine.limits.pages}),), _NAN, dtype=torch.uint8)
            executor._driver.copy_to_device(executor._persistent[buffer.name], garbage.data_ptr(), garbage.numel())
            executor._driver.synchronize()


def count_read(engine: Any, batch: int) -> int:
    """Bytes of weights that a decode step must read at least: all but the embedding, and experts by what is chosen."""
    total = 0
    for buffer in engine._plan.buffers.values():
        size = count_bytes(buffer, {}) if buffer.role == "weight" else 0
        if ".experts." in buffer.name:
            size = size * min(4 * batch, int(buffer.shape[0])) // int(buffer.shape[0])
        total += 0 if "embed_tokens" in buffer.name else size
    return total


def measure(engine: Engine, groups: list[tuple[int, ...]], steps: int) -> list[list[str]]:
    """Seconds of the decode graph of every group, of a step with the host's share, and of the prompt."""
    rows = []
    for lengths in groups:
        vocabulary = engine.manifest.model.vocab_size
        prompts = [make_tokens(length, place, vocabulary) for place, length in enumerate(lengths)]
        started = time.perf_counter()
        handles, _ = engine.prefill(prompts)
        prefill = time.perf_counter() - started
        for _ in range(3):
            engine.decode(handles, [1] * len(lengths))
        started = time.perf_counter()
        for _ in range(steps):
            engine.decode(handles, [1] * len(lengths))
        host = (time.perf_counter() - started) / steps
        graph = min(engine.time_decode_graph(100) for _ in range(5))
        engine.release(handles)
        read = count_read(engine, len(lengths))
        rows.append([
            str(len(lengths)), " ".join(map(str, lengths)), f"{1e3 * prefill:.1f}", f"{1e3 * host:.3f}",
            f"{1e6 * graph:.1f}", f"{read / 1e9:.3f}", f"{read / graph / 4.8e12:.2f}",
        ])  # fmt: skip
    return rows


def check_repeats(engine: Engine, groups: list[tuple[int, ...]], steps: int, found: dict[str, Tensor]) -> bool:
    """Run again, then on poisoned caches; True if every bit is the same."""
    good = True
    for what in ("a second run", "a run on caches full of NaN"):
        if "NaN" in what:
            poison_caches(engine)
        equal = [torch.equal(run_group(engine, lengths, steps), found[str(lengths)]) for lengths in groups]
        print(f"equal bits in {what}: {equal}", flush=True)
        good &= all(equal)
    return good


def run(arguments: argparse.Namespace) -> None:
    """Load, run every group, store the logits after each; on a GPU repeat, poison and time too."""
    groups = [tuple(map(int, text.split(","))) for text in arguments.lengths] or list(GROUPS)
    started = time.perf_counter()
    engine = mmcompile.load(
        arguments.artifact, device=arguments.device, random_weights=arguments.seed, pages=arguments.pages
    )
    assert isinstance(engine, Engine)
    facts = engine.describe()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{arguments.artifact} on {facts['device']}: {facts['weights']}, {facts['memory']}")
    print(f"loaded in {time.perf_counter() - started:.1f} s, host memory up to {resident:.1f} GiB", flush=True)
    found: dict[str, Any] = {}
    for lengths in groups:
        started = time.perf_counter()
        if arguments.device == "cpu":
            parts = [_run_alone(engine, lengths, place, arguments.steps) for place in range(len(lengths))]
            found[str(lengths)] = torch.cat(parts)
        else:
            found[str(lengths)] = run_group(engine, lengths, arguments.steps)
        print(f"{lengths}: {time.perf_counter() - started:.1f} s", flush=True)
        torch.save(found, arguments.output)
    if arguments.device != "cpu" and not arguments.short:
        good = check_repeats(engine, groups, arguments.steps, found)
        header = ["batch", "prompts", "prefill ms", "step ms", "graph us", "weights read GB", "of 4.8 TB/s"]
        print_table("Decode", header, measure(engine, groups, 20))
        sys.exit(0 if good else 1)


_alone: dict[tuple[int, int], Tensor] = {}


def _run_alone(engine: Engine, lengths: tuple[int, ...], place: int, steps: int) -> Tensor:
    """One sequence of a group by itself, which changes no reference; remembered for other groups that hold it."""
    key = (lengths[place], place)
    if key not in _alone:
        vocabulary = engine.manifest.model.vocab_size
        tokens = make_tokens(lengths[place] + steps, place, vocabulary)
        handles, logits = engine.prefill([tokens[: lengths[place]]])
        rows = [logits] + [engine.decode(handles, [t]) for t in tokens[lengths[place] :]]
        engine.release(handles)
        _alone[key] = torch.stack([row.float() for row in rows], 1)
    return _alone[key]


def compare(arguments: argparse.Namespace) -> None:
    """A row of errors for every sequence, and the verdict."""
    gpu, cpu, exact = (torch.load(path) for path in (arguments.gpu, arguments.cpu, arguments.exact))
    rows, every = [], {"gpu": [], "cpu": []}
    for group in [name for name in gpu if name in cpu and name in exact]:
        for place in range(gpu[group].shape[0]):
            want = exact[group][place]
            errors = {}
            for name, logits in (("gpu", gpu[group][place]), ("cpu", cpu[group][place])):
                errors[name] = (logits - want).norm(dim=-1) / want.norm(dim=-1)
                every[name].append(errors[name])
            same = [int((logits[group][place].argmax(-1) == want.argmax(-1)).sum()) for logits in (gpu, cpu)]
            between = (gpu[group][place] - cpu[group][place]).norm(dim=-1) / want.norm(dim=-1)
            shown = [f"{float(e.median()):.2e} / {float(e.max()):.2e}" for e in (*errors.values(), between)]
            rows.append([group, str(place), *shown, f"{same[0]} / {same[1]} of {want.shape[0]}"])
    header = ["prompts", "sequence", "GPU", "CPU bf16", "GPU to CPU bf16", "same choice as float32, GPU / CPU"]
    print_table("Relative error of a row of logits against float32, median / largest", header, rows)
    found = {name: torch.cat(parts) for name, parts in every.items()}
    usual = float(found["cpu"].median())
    near = {name: float((errors <= 2 * FACTOR * usual).float().mean()) for name, errors in found.items()}
    median = float(found["gpu"].median())
    good = median <= FACTOR * usual and near["gpu"] >= near["cpu"] - SLACK
    print(f"\nmedian of {len(found['gpu'])} rows: GPU {median:.2e}, CPU bf16 {usual:.2e}, bound {FACTOR * usual:.2e}")
    print(f"rows within {2 * FACTOR:g} CPU medians: GPU {near['gpu']:.0%}, CPU bf16 {near['cpu']:.0%}; good: {good}")
    sys.exit(0 if good else 1)


def main() -> None:
    """Parse and go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("run")
    one.add_argument("artifact", type=Path)
    one.add_argument("--device", choices=("cuda", "cpu"), required=True)
    one.add_argument("-o", "--output", type=Path, required=True)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--pages", type=int, default=80)
    one.add_argument("--lengths", nargs="*", default=[], metavar="A,B", help="prompts of every group, in tokens")
    one.add_argument("--short", action="store_true", help="run the groups once and no more (for compute-sanitizer)")
    one.set_defaults(action=run)
    two = verbs.add_parser("compare")
    for name in ("gpu", "cpu", "exact"):
        two.add_argument(name, type=Path)
    two.set_defaults(action=compare)
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
