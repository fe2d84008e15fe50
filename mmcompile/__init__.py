"""mmcompile: capture a model as a graph, rewrite it, lower it to kernels for a target, run the artifact."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_LAZY = {"build": "mmcompile.driver", "load": "mmcompile.runtime"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mmcompile' has no attribute {name!r}")
