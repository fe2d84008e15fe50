"""Instructions of the NVFP4 decode linears of every target, tuned and portable, from the disassembly; needs no GPU.

python benchmarks/linear_instructions.py [--rows 4096] [--k 4096] [--tokens 1]

What a program executes is its listing with the body of its loop over K as often as it runs, guards and branches taken
as passed. It is divided by the weights of the program: lane-instructions for 16 weights, of which 9 bytes are read.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from mmcompile.core.discover import load_module
from mmcompile.core.formats.nvfp4_fragments import LAYOUTS
from mmcompile.core.kernel import CompiledKernel, OpCall, Operand
from mmcompile.lower.select import Selector
from mmcompile.targets._disassemble import disassemble
from mmcompile.targets._kernels.catalogue import list_kernels
from mmcompile.targets._toolchain import CompileJob, compile_many

TARGETS = ("sm90", "sm100", "sm107", "gfx950")
_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.:]*)(.*)")
_GCN = re.compile(r"^\s+((?:v|s|ds|buffer|global|flat|scratch)_[a-z0-9_]+)\b(?!:)(.*)")
_LABEL = re.compile(r"^(\.\w+):")
_KINDS = (
    ("matrix", r"HMMA|UTC|HGMMA|v_mfma"),
    ("decode", r"F2FP\.\w+\.E[24]M[13]|v_cvt_scalef32"),
    ("global", r"LDG|STG|global_|buffer_"),
    ("local", r"LDS|STS|LDSM|SHFL|ds_"),
    ("other", r"BAR|BRA|EXIT|NOP|DEPBAR|LDGDEPBAR|LDC|S2|CS2R|U[A-Z]|BSSY|BSYNC|WARPSYNC|s_|v_readfirstlane"),
)


@dataclass(frozen=True)
class Row:
    """Lane-instructions for 16 weights by kind, and what the binary takes."""

    target: str
    kernel: str
    counts: Counter[str]
    registers: int
    spills: int
    shared: int


def describe(rows: int, k: int, tokens: int, layout: str) -> OpCall:
    """A plain NVFP4 linear layer for ``tokens`` tokens."""
    operands: dict[str, Operand | None] = {
        "x": Operand(("tokens", k), (k, 1), "bfloat16"),
        "packed": Operand((rows, k // 2), (k // 2, 1), "uint8", layout),
        "scale": Operand((rows, k // 16), (k // 16, 1), "float8_e4m3fn", layout),
        "global_scale": Operand((rows,), (1,), "float32"),
        "bias": None,
        "residual": None,
    }
    result = Operand(("tokens", rows), (rows, 1), "bfloat16")
    return OpCall("linear_nvfp4", operands, (result,), {"activation": "none", "phase": "decode"})


def classify(name: str) -> str:
    """The kind of an instruction; what is no other kind is arithmetic."""
    return next((kind for kind, pattern in _KINDS if re.match(pattern, name)), "arithmetic")


def count_executed(listing: str, trips: int) -> Counter[str]:
    """Instructions by kind that a warp executes if its longest loop runs ``trips`` times."""
    places: dict[str, int] = {}
    names: list[str] = []
    branches: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line.strip()):
            places[label[1]] = len(names)
        elif match := _SASS.match(line) or _GCN.match(line):
            names.append(match[1])
            if target := re.search(r"\.L\w+", match[2]) if re.match(r"BRA|s_c?branch", match[1]) else None:
                branches.append((len(names), target[0]))
    loops = [(places[label], end) for end, label in branches if places.get(label, end) < end - 1]
    start, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    executed = Counter(map(classify, names))
    for kind, count in Counter(map(classify, names[start:end])).items():
        executed[kind] += count * (trips - 1)
    return executed


def measure(rows: int, k: int, tokens: int, target: str) -> Iterator[Row]:
    """The kernel that the target selects for the layout it wants, and the portable one."""
    spec = load_module("targets", target).TARGET.spec
    for portable in (True, False):
        selector = Selector(spec, list_kernels(spec), portable=portable)
        wish = selector.propose_layouts(describe(rows, k, tokens, "linear"))
        assert wish.get("packed") in {None, *LAYOUTS.values()}
        chosen, reason = selector.select(describe(rows, k, tokens, wish.get("packed", "linear")), 512)
        if not chosen:
            raise SystemExit(f"{target}: {reason}")
        found = next(c for c in chosen if c.max_tokens is None or c.max_tokens >= tokens)
        (source,) = found.sources
        for compiled in compile_many([CompileJob(source, a, spec) for a in spec.architectures]):
            yield _describe_kernel(compiled, found.template, rows, k, spec.warp_size)


def _describe_kernel(compiled: CompiledKernel, template: str, rows: int, k: int, lanes: int) -> Row:
    source, facts = compiled.source, compiled.metadata
    sizes = {n: int(v) for n, v in re.findall(r"^(\w+) = tl\.constexpr\((\d+)\)$", source.text, re.MULTILINE)}
    trips = -(-k // (sizes["SPLIT"] * sizes["BLOCK_K"])) if "SPLIT" in sizes else 1
    executed = count_executed(disassemble(compiled), trips)
    share = source.num_warps * lanes * 16 * int(source.grid[0]) / (rows * k)
    counts = Counter({kind: count * share for kind, count in executed.items()})  # type: ignore[misc]
    return Row(compiled.architecture, template, counts, facts["registers"], facts["spills"], facts["shared"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 4096), ("k", 4096), ("tokens", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    kinds = ["decode", "arithmetic", "matrix", "global", "local", "other"]
    table = Table("binary", "kernel", "all", *kinds, "registers", "spills", "shared", box=None)
    for target in TARGETS:
        for row in measure(options.rows, options.k, options.tokens, target):
            shown = (f"{row.counts[kind]:.1f}" for kind in kinds)
            total = f"{sum(row.counts.values()):.1f}"
            table.add_row(row.target, row.kernel, total, *shown, str(row.registers), str(row.spills), str(row.shared))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
