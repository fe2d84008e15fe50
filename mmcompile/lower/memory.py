"""Plan the arena of a phase: temporaries that are never alive together share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mmcompile.core.expression import evaluate_shape
from mmcompile.core.plan import Buffer

ALIGNMENT = 256


@dataclass(frozen=True)
class Lifetime:
    """First and last launch that touch a buffer, both included."""

    first: int
    last: int


def size_of(buffer: Buffer, symbols: Mapping[str, int]) -> int:
    """Bytes of a buffer at given symbol values, rounded up to the alignment."""
    count = 1
    for dimension in evaluate_shape(buffer.shape, symbols):
        count *= dimension
    item = torch.empty((), dtype=getattr(torch, buffer.dtype)).element_size()
    return -(-count * item // ALIGNMENT) * ALIGNMENT


def plan_memory(
    buffers: Sequence[Buffer],
    lifetimes: Mapping[str, Lifetime],
    symbols: Mapping[str, int],
    outputs: Sequence[Buffer] = (),
    output_symbols: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], int]:
    """Offsets by first fit, largest first. Returns ({buffer: byte offset}, bytes of the arena).

    Buffers whose lifetimes overlap never share a byte, sizes taken at the largest symbol values. ``outputs`` come first
    and keep their place for the whole phase; sized by ``output_symbols`` (the plan's), so that phases agree on them.
    """
    offsets: dict[str, int] = {}
    base = 0
    for buffer in outputs:
        offsets[buffer.name] = base
        base += size_of(buffer, output_symbols or symbols)
    sizes = {b.name: size_of(b, symbols) for b in buffers}
    alive: dict[int, list[str]] = {}  # what has a place, by launch
    for name in sorted(sizes, key=lambda n: (-sizes[n], lifetimes[n].first, n)):
        mine = range(lifetimes[name].first, lifetimes[name].last + 1)
        others = {other for launch in mine for other in alive.get(launch, ())}
        taken = sorted((offsets[o], offsets[o] + sizes[o]) for o in others)
        place = base
        for begin, end in taken:
            if place + sizes[name] <= begin:
                break
            place = max(place, end)
        offsets[name] = place
        for launch in mine:
            alive.setdefault(launch, []).append(name)
    return offsets, max((offsets[n] + sizes[n] for n in sizes), default=base)
