"""What can be wrong with a kernel that an emulator runs: one exception, one closed list of kinds."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "unknown instruction",  # not in the tables of the emulator; the kernel is not judged
    "malformed assembly",  # the text cannot be parsed, or an operand has the wrong form
    "out of bounds",  # outside every registered buffer, shared memory or scratch
    "read-only",  # a write to a buffer that the kernel may only read
    "misaligned",  # an address that is not a multiple of the access size
    "uninitialised",  # a register, or shared or global memory, that nobody wrote
    "in flight",  # a register or memory with an asynchronous access that was not waited for
    "race",  # two accesses without an ordering edge, at least one of them a write
    "divergent barrier",  # not all lanes of a warp, or not all warps, reach the barrier
    "deadlock",  # nothing can run any more, or only spinning is left
    "trap",  # the kernel itself gave up
    "illegal",  # the instruction set forbids it: resources, descriptors, shapes
]


_LONGEST_TEXT = 100


class EmulationFault(Exception):
    """A fault with its kind and the line of the assembly text.

    Attributes:
        kind: see ``Kind``. what: one clear sentence. line: 1-based line of the assembly text, 0 if unknown.
        text: the instruction.
    """

    def __init__(self, kind: Kind, what: str, line: int = 0, text: str = "") -> None:
        self.kind: Kind = kind
        self.what, self.line, self.text = what, line, text
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """Kind, sentence, and where."""
        text = self.text if len(self.text) <= _LONGEST_TEXT else self.text[:_LONGEST_TEXT] + " ..."
        where = f" at line {self.line}: {text}" if self.line else ""
        return f"{self.kind}: {self.what}{where}"
