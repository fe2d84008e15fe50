"""How the tuned decode linears are cut: measured on an NVIDIA H200 by shape, and a rule for other shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How a decode linear is cut.

    Attributes:
        warps: warps a program, among which K is spread. hold: loads of a step are held together before the arithmetic.
        paired: 32 rows a program instead of 16. slices: 64 k a warp and step (row-major weights; fragments have 256).
        max_registers: registers a thread, None = as many as the assembler likes.
    """

    warps: int
    hold: bool = False
    paired: bool = False
    slices: int = 2
    max_registers: int | None = None


def choose_fragments(rows: int, k: int, groups: int, swiglu: bool, units: int) -> Config:
    """For NVFP4 fragments and at most 8 * groups tokens."""
    return Config(8 if k >= 2048 else 4, hold=True, paired=swiglu)


def choose_rows(rows: int, k: int, groups: int, swiglu: bool, units: int) -> Config | None:
    """For unquantized weights; None where the portable kernel is faster."""
    return None
