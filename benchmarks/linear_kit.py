"""Compile linear kernels for sm90 on a machine without a GPU, for h200_linear.py to time on one.

python benchmarks/linear_kit.py -o kit             (what the target selects, and the portable kernels)
python benchmarks/linear_kit.py -o kit --sweep     (every configuration of the tuned kernels as well)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mmcompile.core.kernel import KernelSource, OpCall, Operand, Parameter
from mmcompile.lower.select import Selector
from mmcompile.targets._kernels import linear, linear_nvfp4
from mmcompile.targets._kernels.linear import Blocks
from mmcompile.targets._toolchain import CompileJob, compile_many
from mmcompile.targets._tuned.fragments_gemm import emit_fragments_gemm
from mmcompile.targets._tuned.linear_configs import Config
from mmcompile.targets._tuned.linear_fragments import TEMPLATES as TUNED
from mmcompile.targets._tuned.linear_fragments import emit_fragments, emit_rows
from mmcompile.targets.sm90 import TARGET

Shape = tuple[int, int, str]
# (weight rows, k, activation): SmolLM2-135M, Llama-3.2-1B, Llama-3-8B, MiniMax-M3.1.
SHAPES = (
    (960, 576, "none"), (576, 576, "none"), (3072, 576, "swiglu"), (576, 1536, "none"), (49152, 576, "none"),
    (3072, 2048, "none"), (2048, 2048, "none"), (16384, 2048, "swiglu"), (2048, 8192, "none"), (128256, 2048, "none"),
    (6144, 4096, "none"), (4096, 4096, "none"), (28672, 4096, "swiglu"), (4096, 14336, "none"),
    (9856, 6144, "none"), (6144, 8192, "none"), (24576, 6144, "none"), (24576, 3072, "none"), (262144, 6144, "none"),
)  # fmt: skip
DECODE, PREFILL = (1, 2, 4, 8, 16), (32, 64, 512)
GEMM_SHAPES = ((576, 1536), (3072, 2048), (16384, 2048), (4096, 4096), (28672, 4096), (4096, 14336))
GEMMS = (Blocks(64, 128, 64, 4, 3), Blocks(64, 64, 64, 4, 3), Blocks(128, 128, 64, 8, 3))
READ = '''
import triton
import triton.language as tl


@triton.jit
def kernel(x, out, n):
    start = tl.program_id(0).to(tl.int64) * 8192
    total = tl.zeros((4096,), tl.int32)
    for part in tl.static_range(2):
        place = start + part * 4096 + tl.arange(0, 4096)
        total |= tl.load(x + place, mask=place // 4 < n // 4, other=0, eviction_policy="evict_first")
    found = tl.reduce(total, 0, any_bit)
    tl.store(out, found, mask=found == 1)


@triton.jit
def any_bit(a, b):
    return a | b
'''


def describe(op: str, rows: int, k: int, activation: str = "none", dtype: str = "bfloat16") -> OpCall:
    """A projection [tokens, k] by a weight [rows, k]."""
    x = Operand(("tokens", k), (k, 1), dtype)
    operands: dict[str, Operand | None] = {"x": x, "bias": None, "residual": None}
    if op == "linear":
        operands["weight"] = Operand((rows, k), (k, 1), dtype)
    else:
        operands["packed"] = Operand((rows, k // 2), (k // 2, 1), "uint8")
        operands["scale"] = Operand((rows, k // 16), (k // 16, 1), "float8_e4m3fn")
        operands["global_scale"] = Operand((rows,), (1,), "float32")
    width = rows // 2 if activation == "swiglu" else rows
    result = Operand(("tokens", width), (width, 1), dtype)
    return OpCall(op, operands, (result,), {"activation": activation, "phase": "decode"})


def list_configs(op: str, rows: int, activation: str, groups: int) -> Iterator[Config]:
    """The configurations that a sweep compares."""
    if op == "linear":
        found = [Config(4, slices=1), Config(8, slices=1), Config(8, hold=True)]
        found.append(Config(8) if groups == 1 else Config(8, paired=True, slices=1))
    else:
        found = [Config(4), Config(4, hold=True), Config(8), Config(8, hold=True)]
        if groups == 2:
            found += [Config(4, paired=True), Config(8, paired=True)] + [Config(2, paired=True)] * (rows > 20000)
    for config in found:
        yield replace(config, paired=True) if activation == "swiglu" else config


def list_choices(selector: Selector, call: OpCall, counts: tuple[int, ...]) -> Iterator[tuple[list[int], KernelSource]]:
    """(token counts, source) of the kernels that are selected for a call."""
    chosen, reason = selector.select(call, 512)
    assert chosen, reason
    above = 0
    for choice in chosen:
        mine = [t for t in counts if above < t <= (choice.max_tokens or 1 << 30)]
        above = choice.max_tokens or 0
        if mine:
            yield mine, choice.sources[0]


def list_sweep(op: str, rows: int, k: int, activation: str) -> Iterator[tuple[dict[str, object], KernelSource]]:
    """Every configuration of the tuned kernels for one shape."""
    call = describe(op, rows, k, activation)
    emit = emit_rows if op == "linear" else emit_fragments
    for groups in (1, 2):
        for config in dict.fromkeys(list_configs(op, rows, activation, groups)):
            label = f"w{config.warps}" + "h" * config.hold + "p" * config.paired + f"s{config.slices}"
            yield {"config": label, "tokens": DECODE[:4] if groups == 1 else [16]}, emit(call, groups, config)[0]
    if op == "linear_nvfp4" and (rows, k) in GEMM_SHAPES:
        for blocks in GEMMS:
            label = f"gemm{blocks.m}x{blocks.n}w{blocks.num_warps}s{blocks.num_stages}"
            yield {"config": label, "tokens": [512]}, emit_fragments_gemm(call, blocks, {})[0]
    if op == "linear_nvfp4" and rows in (9856, 262144):
        call = describe(op, rows, k, activation, "float16")
        for config in list_configs(op, rows, activation, 1):
            label = f"f16 w{config.warps}" + "h" * config.hold
            yield {"config": label, "tokens": [1, 8], "dtype": "float16"}, emit_fragments(call, 1, config)[0]


def list_sources(shapes: Sequence[Shape], sweep: bool) -> Iterator[tuple[dict[str, object], KernelSource]]:
    """(entry, source) of everything to be timed."""
    templates = (*TUNED, *linear.TEMPLATES, *linear_nvfp4.TEMPLATES)
    portable, tuned = (Selector(TARGET.spec, templates, portable=p) for p in (True, False))
    for rows, k, activation in shapes:
        counts = DECODE + PREFILL if (rows, k) in GEMM_SHAPES else DECODE
        for op in ("linear", "linear_nvfp4"):
            call = describe(op, rows, k, activation)
            entry = {"op": op, "rows": rows, "k": k, "activation": activation, "dtype": "bfloat16"}
            for tokens, source in list_choices(portable, call, counts):
                yield entry | {"config": "portable", "tokens": tokens}, source
            layouts = tuned.propose_layouts(call)
            arranged = {n: replace(o, layout=layouts.get(n, "linear")) if o else None for n, o in call.operands.items()}
            for tokens, source in list_choices(tuned, replace(call, operands=arranged), counts):
                if layouts or source.lanes:
                    yield entry | {"config": "selected", "tokens": tokens}, source
            if sweep and (op == "linear" or k % 256 == 0):
                for own, source in list_sweep(op, rows, k, activation):
                    yield entry | own, source


def main() -> None:
    """Compile and write kit.json and the cubins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", help="rows x k of shapes, comma-separated, e.g. 4096x4096,3072x2048")
    options = parser.parse_args()
    out = options.o
    out.mkdir(parents=True, exist_ok=True)
    parameters = (Parameter("x", "*i32", "x"), Parameter("out", "*i32", "out"), Parameter("n", "i32", "n"))
    read = KernelSource("read", READ, parameters, ("cdiv(n, 8192)", "1", "1"), 4, 1)
    shapes = [s for s in SHAPES if not options.only or f"{s[0]}x{s[1]}" in options.only.split(",")]
    found = [({"op": "read", "rows": 0, "k": 0, "config": "", "tokens": []}, read)]
    found += list_sources(shapes, options.sweep)
    jobs = [CompileJob(source, TARGET.spec.architectures[0], TARGET.spec) for _, source in found]
    entries = []
    for (entry, source), compiled in zip(found, compile_many(jobs), strict=True):
        facts = {key: compiled.metadata[key] for key in ("name", "shared", "num_warps", "registers", "spills")}
        file = f"{source.name}_{source.digest[:8]}.cubin"
        (out / file).write_bytes(compiled.binary)
        arguments = [p.value for p in source.parameters]
        entries.append(entry | facts | {"file": file, "grid": source.grid, "arguments": arguments})
    (out / "kit.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
