"""The door of the emulators: which family a text belongs to, what of it is unknown, and running it."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Launch, Report, UnknownInstruction


class Family(Protocol):
    """An instruction set: the module ``mmcompile.emulate.<family>.machine``."""

    def list_unknown(self, assembly: str, entry: str) -> list[UnknownInstruction]:
        """Instructions of the kernel without semantics, by form, in the order of their first line."""

    def run(self, launch: Launch) -> Report:
        """Run a launch; its memory holds the results. Raises EmulationFault."""


def find_family(assembly: str) -> str:
    """ "ptx" or "gfx950". Raises EmulationFault for any other text."""
    if ".amdgcn_target" in assembly:
        if "gfx950" in assembly.split(".amdgcn_target", 1)[1].split("\n", 1)[0]:
            return "gfx950"
    elif ".target sm_" in assembly:
        return "ptx"
    raise EmulationFault("malformed assembly", "the text is neither PTX nor gfx950 assembly (no target directive)")


def load_family(name: str) -> Family:
    """The emulator of a family."""
    return cast(Family, importlib.import_module(f"mmcompile.emulate.{name}.machine"))


def list_unknown(assembly: str, entry: str) -> list[UnknownInstruction]:
    """What the emulator of the text's family does not know of the kernel ``entry``."""
    return load_family(find_family(assembly)).list_unknown(assembly, entry)


def run_kernel(launch: Launch) -> Report:
    """Execute a launch on the CPU; ``launch.memory`` holds the results.

    Raises EmulationFault with the line of the text: see ``faults.Kind``. A kernel with unknown instructions is not
    started.
    """
    family = load_family(find_family(launch.assembly))
    unknown = family.list_unknown(launch.assembly, launch.entry)
    if unknown:
        first = unknown[0]
        rest = f", and {len(unknown) - 1} more forms" if len(unknown) > 1 else ""
        raise EmulationFault("unknown instruction", f"{first.form} ({first.count} times){rest}", first.line, first.form)
    return family.run(launch)
