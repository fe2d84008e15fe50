"""The table of the instructions: opcode to translation, and the functions that generated code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.parser import Instruction

Translation = Callable[[Emitter, Instruction], None]
Function = TypeVar("Function", bound=Callable[..., Any])

TRANSLATIONS: dict[str, Translation] = {}
"""Opcode (the first word of the instruction) to translation."""


def translates(*names: str) -> Callable[[Translation], Translation]:
    """The function appends the Python lines of the instructions ``names`` to the emitter, or calls its ``refuse``."""

    def register(function: Translation) -> Translation:
        for name in names:
            assert name not in TRANSLATIONS, name
            TRANSLATIONS[name] = function
        return function

    return register


def runtime(function: Function) -> Function:
    """The function can be called by name from generated code."""
    assert function.__name__ not in Emitter.NAMES, function.__name__
    Emitter.NAMES[function.__name__] = function
    return function
