"""How the tuned decode linears are cut: measured on an NVIDIA H200 by shape, and a rule for other shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmcompile.core.spec import TargetSpec


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


_LATENCY = 0.7e-6  # seconds from a load to its data
_WIDE, _HELD = Config(8), Config(8, hold=True)
# (weight rows, k): for at most 8 tokens, for at most 16; docs/measurements.md has the times.
_FRAGMENTS = {
    (3072, 2048): (_HELD, _HELD),
    (2048, 2048): (_HELD, _HELD),
    (16384, 2048): (Config(8), Config(4, paired=True)),
    (2048, 8192): (_HELD, _HELD),
    (128256, 2048): (Config(4), Config(2, paired=True)),
    (6144, 4096): (_HELD, _WIDE),
    (4096, 4096): (_HELD, _HELD),
    (28672, 4096): (Config(4), Config(4, paired=True)),
    (4096, 14336): (_HELD, _HELD),
    (9856, 6144): (_WIDE, _WIDE),
    (6144, 8192): (_HELD, _WIDE),
    (24576, 6144): (Config(4), Config(4, paired=True)),
    (24576, 3072): (Config(4), Config(4, paired=True)),
    (262144, 6144): (Config(4), Config(4, paired=True)),
}
# The same for unquantized weights; None where the portable kernel is as fast.
_ROWS: dict[tuple[int, int], tuple[Config | None, Config | None]] = {
    (960, 576): (_HELD, _HELD),
    (576, 576): (_HELD, _HELD),
    (3072, 576): (_HELD, _HELD),
    (576, 1536): (_HELD, None),
    (3072, 2048): (_HELD, None),
    (2048, 2048): (_HELD, _HELD),
    (2048, 8192): (_HELD, _HELD),
    (16384, 2048): (_HELD, None),
    (262144, 6144): (_HELD, None),
}


def must_hold(spec: TargetSpec) -> bool:
    """True where a full unit of lanes with one 16-byte load each asks for less than its share of bandwidth x latency.

    The latency is an assumption. For the H200 the rule says no, as its measured configurations do.
    """
    return spec.threads_per_unit * 16 < spec.memory_bandwidth / spec.units * _LATENCY


def choose_fragments(rows: int, k: int, groups: int, swiglu: bool, units: int, hold: bool = False) -> Config:
    """For NVFP4 fragments and at most 8 * groups tokens; with ``hold`` loads are always held together.

    The rule for other shapes: few programs a unit keep their loads together and share K among eight warps; many hide
    the latency by their number, with fewer warps and, for more tokens, fewer reads of x.
    """
    programs = rows / (16 * units)
    if (rows, k) in _FRAGMENTS:
        config = _FRAGMENTS[rows, k][groups - 1]
    elif programs >= 7:
        config = Config(4, paired=groups > 1)
    else:
        config = _HELD if programs < (4 if groups == 1 else 2.5) else _WIDE
    warps = min(config.warps, 1 << (k // 256 - 1).bit_length())
    paired = swiglu or (config.paired and rows % 32 == 0)  # a last tile of 16 rows has no second one
    return replace(config, warps=warps, paired=paired, hold=config.hold or hold)


def choose_rows(rows: int, k: int, groups: int, swiglu: bool, units: int) -> Config | None:
    """For unquantized weights; None where the portable kernel is faster."""
    few = _HELD if rows <= 3072 else None
    config = _ROWS.get((rows, k), (few, None))[groups - 1]
    return None if config is None else replace(config, paired=config.paired or swiglu)
