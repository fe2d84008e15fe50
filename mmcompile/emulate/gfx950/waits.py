"""Outstanding memory operations: issue, s_waitcnt, and delivery (CDNA3/CDNA4 ISA, "Data dependency resolution")."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.gfx950.decoded import Decoded
from mmcompile.emulate.gfx950.state import SCALAR, Counter, Deferred, Mask, Waves

Array = npt.NDArray[Any]
Perform = Callable[[Array | None], None]
"""Does a transfer for a selection of its lanes: bool over its flat list of active lanes, or None for all."""


def issue(w: Waves, counter: Counter, registers: Sequence[int]) -> None:
    """Count an operation; ``registers`` are written when it returns."""
    counter.issued[w.rows] += 1
    if registers:
        numbers = counter.issued[w.rows]
        for register in registers:
            counter.mark[register, w.rows] = numbers
            w.load_line[register] = w.line
        w.pending.update(registers)


def defer(w: Waves, counter: Counter, lane_waves: Array, perform: Perform) -> None:
    """Have ``perform`` called when the waits of the waves reach the operation that was issued last."""
    waves = w.waves.copy()
    position = np.zeros(w.count, np.int64)
    position[waves] = np.arange(len(waves))
    where = position[lane_waves]
    line, text = w.line, w.text

    def deliver(ready: Mask) -> None:
        try:
            perform(ready[where])
        except EmulationFault as fault:
            raise EmulationFault(fault.kind, fault.what, line, text) from fault

    counter.deferred.append(Deferred(waves, counter.issued[waves].copy(), deliver))


def submit(w: Waves, counter: Counter, registers: Sequence[int], lane_waves: Array, perform: Perform) -> None:
    """Issue a transfer: it is performed at once, or at the wait if the launch is ``late``."""
    issue(w, counter, registers)
    if w.late:
        defer(w, counter, lane_waves, perform)
    else:
        perform(None)


def complete(w: Waves, counter: Counter, left: int) -> None:
    """The selected waves go on when at most ``left`` operations of the counter are outstanding."""
    counter.done[w.rows] = np.maximum(counter.done[w.rows], counter.issued[w.rows] - left)
    if counter.deferred:
        remaining = []
        for entry in counter.deferred:
            ready = entry.numbers <= counter.done[entry.waves]
            if ready.any():
                entry.deliver(ready)
                entry.numbers = np.where(ready, np.iinfo(np.int64).max, entry.numbers)
            if not (entry.numbers == np.iinfo(np.int64).max).all():
                remaining.append(entry)
        counter.deferred = remaining


def finish_all(w: Waves) -> None:
    """A wave ends: everything it has outstanding is performed."""
    complete(w, w.vm, 0)
    complete(w, w.lgkm, 0)
    w.smem[:, w.rows] = False
    if w.races is not None:
        w.races.drain(w)
    _forget_returned(w)


def _forget_returned(w: Waves) -> None:
    for register in list(w.pending):
        if register >= SCALAR:
            outstanding = w.smem[register - SCALAR].any()
        else:
            outstanding = (w.vm.mark[register] > w.vm.done).any() or (w.lgkm.mark[register] > w.lgkm.done).any()
        if not outstanding:
            w.pending.discard(register)


def parse_counts(text: str) -> tuple[int | None, int | None]:
    """vmcnt and lgkmcnt of ``s_waitcnt``; None where there is no limit. A number is the encoding of gfx9."""
    if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", text):
        value = int(text, 0)
        vm, lgkm = (value & 15) | ((value >> 14 & 3) << 4), value >> 8 & 15
        return (None if vm == 63 else vm), (None if lgkm == 15 else lgkm)
    counts = {name: int(number, 0) for name, number in re.findall(r"(\w+)\((\w+)\)", text)}
    if not counts or set(counts) - {"vmcnt", "lgkmcnt", "expcnt"}:
        raise EmulationFault("malformed assembly", f"cannot read s_waitcnt {text!r}")
    return counts.get("vmcnt"), counts.get("lgkmcnt")


def build_wait(text: str) -> Decoded:
    """s_waitcnt. Scalar loads return in any order: only lgkmcnt(0) guarantees them."""
    vm, lgkm = parse_counts(text)

    def step(w: Waves) -> None:
        if vm is not None:
            complete(w, w.vm, vm)
        if lgkm is not None:
            complete(w, w.lgkm, lgkm)
            if lgkm == 0:
                w.smem[:, w.rows] = False
        if vm == 0 and w.races is not None:
            w.races.drain(w)
        if w.pending:
            _forget_returned(w)

    return Decoded(step)
