"""The file name is the registry key: find, list and import the modules of a folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

from mmcompile.core.errors import unknown_name


def list_names(folder: str) -> list[str]:
    """Return the public module names of ``mmcompile.<folder>``, sorted; ``folder`` may be dotted: "passes.quant"."""
    package = import_module(f"mmcompile.{folder}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load_module(folder: str, name: str) -> ModuleType:
    """Import ``mmcompile.<folder>.<name>``; raise UsageError with "did you mean" if there is no such file."""
    known = list_names(folder)
    if name not in known:
        raise unknown_name(folder.rsplit(".", 1)[-1].removesuffix("s"), name, known)
    return import_module(f"mmcompile.{folder}.{name}")
