"""Running one block for the selected waves, with the checks of undefined and outstanding registers."""

from __future__ import annotations

import numpy as np

from mmcompile.emulate.gfx950.decoded import Decoded, apply_unknowns
from mmcompile.emulate.gfx950.decoder import Block
from mmcompile.emulate.gfx950.state import EXEC, SCALAR, Waves, name_register


def run_block(w: Waves, block: Block) -> None:
    """Execute the steps; ``w.jump`` holds the outcome of the last one if it is a branch."""
    pending, unknown = w.pending, w.unknown
    for decoded in block.steps:
        w.line, w.text, w.index = decoded.line, decoded.text, decoded.index
        touched = decoded.touched
        if pending and not pending.isdisjoint(touched):
            w.check_pending(decoded.reads, decoded.writes, decoded.queue)
        if unknown.isdisjoint(touched):
            decoded.step(w)
        else:
            run_unknown(w, decoded)
    if block.refreshes:
        w.refresh()


def run_unknown(w: Waves, decoded: Decoded) -> None:
    """A step that touches registers with undefined bits."""
    for register in decoded.demands:
        if register in w.unknown:
            check_demand(w, register)
    if decoded.keeps_unknown:
        decoded.step(w)
        return
    tainted = decoded.taint is not None and not w.unknown.isdisjoint(decoded.reads)
    found = decoded.taint(w) if tainted and decoded.taint is not None else []
    for register, mask in found:
        if register in (SCALAR + EXEC, SCALAR + EXEC + 1) and np.any(mask):
            raise w.fault("uninitialised", "an undefined value decides which lanes are active")
    decoded.step(w)
    if decoded.all_lanes and not w.full:
        active, w.full = w.active, True
        apply_unknowns(w, decoded.writes, found)
        w.active, w.full = active, False
        return
    apply_unknowns(w, decoded.writes, found)


def check_demand(w: Waves, register: int) -> None:
    """Fault if the register is undefined in an active lane (or, a scalar one, in a selected wave)."""
    if register >= SCALAR:
        bad = bool(w.scalar_unknown[w.rows, register - SCALAR].any())
    else:
        bad = bool(((w.vector_unknown[register, w.rows] != 0) & w.active).any())
    if bad:
        raise w.fault(
            "uninitialised", f"{name_register(register)} holds an undefined value, and decides an address or a branch"
        )
