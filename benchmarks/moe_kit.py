"""Compile mixtures of experts and the NVFP4 encoder of activations for sm90 without a GPU, for h200_moe.py to run.

python benchmarks/moe_kit.py -o kit [--models minimax-m3 mixtral-8x7b qwen3-30b-a3b]
python benchmarks/moe_kit.py -o kit --sweep --models minimax-m3     (other configurations of the decode kernels as well)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _kit_build import operand, write_kit

from mmcompile.core.kernel import OpCall
from mmcompile.targets._tuned.linear_configs import Config
from mmcompile.targets._tuned.moe_fragments import TEMPLATES, emit_slots
from mmcompile.targets.sm90 import TARGET

LARGEST = 8192
SWEEP = (
    Config(4), Config(4, max_registers=48), Config(4, hold=True), Config(8), Config(8, hold=True),
    Config(8, hold=True, max_registers=48), Config(4, paired=True),
)  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: how many, of which a token chooses ``top_k``; each is [2 n, k] and [k, n]."""

    experts: int
    top_k: int
    n: int
    k: int
    activation: str

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the operation; alpha and limit count with swiglu_oai only."""
        return {"activation": self.activation, "alpha": 1.702, "limit": 7.0}

    @property
    def stacks(self) -> dict[str, tuple[int, int]]:
        """Weight rows and k of the two projections of an expert."""
        return {"gate_up": (2 * self.n, self.k), "down": (self.k, self.n)}


MODELS = {
    "minimax-m3": Experts(128, 4, 3072, 6144, "swiglu_oai"),
    "mixtral-8x7b": Experts(8, 2, 14336, 4096, "swiglu"),
    "qwen3-30b-a3b": Experts(128, 8, 768, 2048, "swiglu"),
}


def describe(model: Experts, op: str) -> OpCall:
    """The experts of a layer in bf16 ("moe") or NVFP4; the residual is the output of a shared expert."""
    x = operand("tokens", model.k)
    operands = {
        "x": x, "residual": x, "experts": operand("tokens", model.top_k, dtype="int32"),
        "weights": operand("tokens", model.top_k, dtype="float32"),
    }  # fmt: skip
    for base, (rows, k) in model.stacks.items():
        if op == "moe":
            operands[base] = operand(model.experts, rows, k)
            continue
        operands[f"{base}_packed"] = operand(model.experts, rows, k // 2, dtype="uint8")
        operands[f"{base}_scale"] = operand(model.experts, rows, k // 16, dtype="float8_e4m3fn")
        operands[f"{base}_global_scale"] = operand(model.experts, rows, dtype="float32")
    return OpCall(op, operands, (x,), model.attributes | {"phase": "decode"})


def describe_encoder(model: Experts) -> OpCall:
    """The quantizer of a layer's input."""
    results = (operand("tokens", model.k // 2, dtype="uint8"),
               operand("tokens", model.k // 16, dtype="float8_e4m3fn"), operand("tokens", dtype="float32"))  # fmt: skip
    return OpCall("nvfp4_quantize_activations", {"x": operand("tokens", model.k)}, results, {"phase": "decode"})


def list_calls(names: list[str]) -> Iterator[tuple[dict[str, Any], OpCall, int]]:
    """Everything that is measured."""
    for name in names:
        for op in ("moe_nvfp4", "moe"):
            yield {"model": name}, describe(MODELS[name], op), LARGEST
        yield {"model": name}, describe_encoder(MODELS[name]), LARGEST


def list_sweep(names: list[str]) -> Iterator[dict[str, Any]]:
    """The decode kernels in other configurations; gate and up are always two tiles, the only token's down is one."""
    spec, arch = TARGET.spec, TARGET.spec.architectures[0]
    for name in names:
        call = describe(MODELS[name], "moe_nvfp4")
        layouts = TEMPLATES[0].layouts(call, spec, arch)
        operands = {n: replace(o, layout=layouts.get(n, "linear")) for n, o in call.operands.items() if o}
        for only, config in ((only, config) for only in (True, False) for config in SWEEP):
            template = TEMPLATES[0] if only else TEMPLATES[1]
            label = f"w{config.warps}" + "h" * config.hold + "p" * config.paired
            scratch = [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in template.scratch(call, spec)]
            yield {
                "op": call.op, "model": name, "portable": False, "template": template.name, "layouts": layouts,
                "max_tokens": template.max_tokens, "scratch": scratch,
                "config": label + (f"r{config.max_registers}" if config.max_registers else ""),
                "sources": emit_slots(replace(call, operands=operands), arch, only, config, config),
            }  # fmt: skip


def main() -> None:
    """Compile and write the kit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    write_kit(arguments.o, list_calls(arguments.models), list_sweep(arguments.models) if arguments.sweep else ())


if __name__ == "__main__":
    main()
