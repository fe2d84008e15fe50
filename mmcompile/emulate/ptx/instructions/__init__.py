"""What every instruction means: one file for each part of the PTX ISA, one table."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmcompile.emulate.ptx.instructions.table import Translation

FILES = (
    "integer", "floating", "logic_and_compare", "convert", "packed", "load_store", "atomic", "control", "warp",
    "async_copy", "mbarrier", "matrix", "wgmma", "tcgen05",
)  # fmt: skip


@lru_cache(1)
def load_translations() -> dict[str, Translation]:
    """The translations of all files, by opcode."""
    for name in FILES:
        importlib.import_module(f"{__name__}.{name}")
    from mmcompile.emulate.ptx.instructions import table

    return table.TRANSLATIONS
