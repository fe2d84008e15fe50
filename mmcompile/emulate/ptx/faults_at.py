"""Gives faults of rooms that do not know the program the line of the running instruction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.group import Group


@contextmanager
def faults_at_line(g: Group) -> Iterator[None]:
    """A fault without a line becomes one at ``g.line``."""
    try:
        yield
    except EmulationFault as fault:
        if fault.line:
            raise
        raise g.fault(fault.kind, fault.what) from fault
