"""Any nn.Module: a factory gives the module, example inputs and what is dynamic.

    mmcompile build examples/tiny_mlp.py:factory --target cpu,sm90 -o out/tiny-mlp
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TinyMLP(nn.Module):
    """A gated feed-forward block over [rows, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def factory() -> tuple[nn.Module, dict[str, Tensor], dict[str, Any]]:
    """The module, example inputs by name, and the axis whose size may change: 2 to 1024 rows."""
    return TinyMLP(), {"x": torch.randn(8, 64)}, {"x": {0: ("rows", 2, 1024)}}


def main(out: Path | None = None) -> float:
    """Build the module for the CPU, run it on 5 rows, and return its largest difference from PyTorch."""
    from mmcompile.driver import BuildOptions, build
    from mmcompile.runtime import ModuleEngine, load

    with tempfile.TemporaryDirectory() as folder:
        options = BuildOptions(targets=("cpu",), dtype="float32")
        path = build(f"{__file__}:factory", out or Path(folder) / "mlp", options)
        engine = load(path)
        assert isinstance(engine, ModuleEngine)
        x = torch.randn(5, 64)
        (result,) = engine.forward(x=x).values()
    torch.manual_seed(options.seed)
    module, _, _ = factory()
    with torch.no_grad():
        difference = float((result - module(x)).abs().max())
    print(f"largest difference from PyTorch: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
