"""Compile linear kernels for sm90 on a machine without a GPU, for h200_linear.py to time on one.

python benchmarks/linear_kit.py -o kit
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mmcompile.core.kernel import OpCall, Operand
from mmcompile.lower.select import Selector
from mmcompile.targets._toolchain import CompileJob, compile_many
from mmcompile.targets.sm90 import TARGET

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (4096, 4096), (28672, 4096), (4096, 14336))


def describe(op: str, rows: int, k: int) -> OpCall:
    """A plain projection [tokens, k] -> [tokens, rows] in bf16."""
    x = Operand(("tokens", k), (k, 1), "bfloat16")
    operands: dict[str, Operand | None] = {"x": x, "bias": None, "residual": None}
    if op == "linear":
        operands["weight"] = Operand((rows, k), (k, 1), "bfloat16")
    else:
        operands["packed"] = Operand((rows, k // 2), (k // 2, 1), "uint8")
        operands["scale"] = Operand((rows, k // 16), (k // 16, 1), "float8_e4m3fn")
        operands["global_scale"] = Operand((rows,), (1,), "float32")
    result = Operand(("tokens", rows), (rows, 1), "bfloat16")
    return OpCall(op, operands, (result,), {"activation": "none", "phase": "decode"})


def main() -> None:
    """Compile and write kit.json and the cubins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", type=Path, required=True)
    out = parser.parse_args().o
    out.mkdir(parents=True, exist_ok=True)
    selector = Selector(TARGET.spec, TARGET.kernels)
    entries, jobs = [], []
    for rows, k in SHAPES:
        for op in ("linear", "linear_nvfp4"):
            chosen, reason = selector.select(describe(op, rows, k), 512)
            assert chosen, reason
            for choice in chosen:
                (source,) = choice.sources
                jobs.append(CompileJob(source, TARGET.spec.architectures[0], TARGET.spec))
                entries.append({"op": op, "rows": rows, "k": k, "max_tokens": choice.max_tokens, "grid": source.grid,
                                "arguments": [p.value for p in source.parameters]})  # fmt: skip
    for entry, compiled in zip(entries, compile_many(jobs), strict=True):
        entry |= {key: compiled.metadata[key] for key in ("name", "shared", "num_warps")}
        entry["file"] = f"{compiled.source.name}_{compiled.source.digest[:8]}.cubin"
        (out / entry["file"]).write_bytes(compiled.binary)
    (out / "kit.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
