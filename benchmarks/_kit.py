"""Shared by the benchmarks of a GPU: the kernels of a kit that a machine without one compiled."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cu
from h200_linear import check, configure
from torch import Tensor

from mmcompile.core.expression import evaluate


class Kit:
    """The compiled kernels: picks the entry as the plan would, and launches it on torch's stream."""

    def __init__(self, folder: Path) -> None:
        self._entries = json.loads((folder / "kit.json").read_text())
        for entry in self._entries:
            for launch in entry["launches"]:
                launch["function"] = self._load(folder, launch)

    @staticmethod
    def _load(folder: Path, launch: dict[str, Any]) -> Any:
        module = check(cu.cuModuleLoadData((folder / launch["file"]).read_bytes()))
        function = check(cu.cuModuleGetFunction(module, launch["name"].encode()))
        if launch["shared"] > 48 * 1024:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, launch["shared"]))
        return function

    def list(self, tokens: int, **labels: object) -> list[dict[str, Any]]:
        """The entries that admit so many tokens and have these labels."""
        return [e for e in self._entries if all(e.get(name) == value for name, value in labels.items())
                and (e["max_tokens"] or 1 << 30) >= tokens]  # fmt: skip

    def find(self, tokens: int, *, portable: bool = False, **labels: object) -> dict[str, Any]:
        """The first entry with these labels that admits so many tokens, with tuned kernels or without."""
        return self.list(tokens, portable=portable, **labels)[0]

    def run(self, entry: dict[str, Any], values: dict[str, Any], symbols: dict[str, int]) -> None:
        """Queue the entry's launches; ``values``: tensors by what the launch passes."""
        for launch in entry["launches"]:
            given = [values.get(name, symbols.get(name)) for name in launch["arguments"]]
            kinds = [ctypes.c_int32 if isinstance(a, int) else ctypes.c_void_p for a in given] + [ctypes.c_void_p] * 2
            arguments = [a.data_ptr() if isinstance(a, Tensor) else a for a in given] + [0, 0]
            grid, stream = [evaluate(e, symbols) for e in launch["grid"]], torch.cuda.current_stream().cuda_stream
            configuration = configure(grid, 32 * launch["num_warps"], launch["shared"], stream, launch["early"])
            check(cu.cuLaunchKernelEx(configuration, launch["function"], (tuple(arguments), tuple(kinds)), 0))
