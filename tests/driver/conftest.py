"""Artifacts that the driver's tests share, built once in a session, and module files for the module door."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from mmcompile.driver import BuildOptions, build

SMALL: dict[str, Any] = {"weights": "random", "max_context": 128, "max_tokens": 64, "max_batch": 32, "workers": 1}

MODULES = '''
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(48) + 0.5)

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * self.weight
        return torch.softmax(normed * torch.sigmoid(x), dim=-1) + 1.0


class Running(nn.Module):
    def forward(self, x):
        return torch.cumsum(torch.relu(x), dim=0)


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(48, 32)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def gated():
    return Gated(), (torch.randn(5, 48),), {"x": {0: ("rows", 2, 64)}}


def running():
    return Running(), (torch.randn(5, 48),)


def projected():
    return Projected(), (torch.randn(5, 48),), {"x": {0: ("rows", 2, 64)}}
'''


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python file with the factories gated, running and projected."""
    path = tmp_path_factory.mktemp("modules") / "user_modules.py"
    path.write_text(MODULES)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(quantization=..., dtype=..., ...)``: the artifact of smollm2-tiny for sm90 and gfx950."""

    @lru_cache
    def make(**options: Any) -> Path:
        out = tmp_path_factory.mktemp("artifacts") / "tiny"
        return build("smollm2-tiny", out, BuildOptions(**SMALL | {"targets": ("sm90", "gfx950")} | options))

    return make
