"""Kernels compiled once for all tests of a session."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def compiled():
    """``compiled(function_name, signature, constants)``, cached."""
    import gfx950_kernels as kernels

    @functools.cache
    def compile_once(name: str, signature: tuple, constants: tuple):
        return kernels.compile_kernel(getattr(kernels, name), dict(signature), dict(constants))

    return lambda name, signature, constants: compile_once(name, tuple(signature.items()), tuple(constants.items()))
