"""Which weights a target keeps in another layout: those that tuned kernels want so and all their readers can read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmcompile.core.plan import Launch, View
from mmcompile.lower.operands import Operands
from mmcompile.lower.phase import PhaseLowering
from mmcompile.lower.select import Selector


def choose_layouts(phases: Sequence[PhaseLowering], selector: Selector) -> dict[str, str]:
    """Layout tags by buffer name; buffers that stay "linear" are left out.

    There is one copy of a weight for all phases: a weight that one launch wants in a layout keeps its own if another
    launch that reads it wants it otherwise, reads only a part of it, or would be left without a kernel. The arrangement
    is made when the weights are loaded; files hold "linear" weights.
    """
    readers = [(phase, launch) for phase in phases for launch in phase.launches]
    wishes = [selector.propose_layouts(phase.describe(launch)) for phase, launch in readers]
    wanted: dict[str, str] = {}
    for (_, launch), wish in zip(readers, wishes, strict=True):
        wanted |= {view.buffer: tag for name, tag in wish.items() if (view := launch.inputs[name]) is not None}
    for phase in phases:
        _drop(wanted, (v for launch in phase.load_launches for v in (*launch.inputs.values(), *launch.outputs)))
    changed = True
    while changed:
        changed = False
        for (phase, launch), wish in zip(readers, wishes, strict=True):
            read = {n: wanted[v.buffer] for n, v in launch.inputs.items() if v is not None and v.buffer in wanted}
            if read and not (read == wish and _can_read(phase, launch, read, selector)):
                _drop(wanted, (launch.inputs[name] for name in read))
                changed = True
    return wanted


def _can_read(phase: PhaseLowering, launch: Launch, read: dict[str, str], selector: Selector) -> bool:
    whole = all(_is_whole(launch.inputs[name], phase.operands) for name in read)
    return whole and bool(phase.find_kernels(launch, selector, read)[0])


def _is_whole(view: View | None, operands: Operands) -> bool:
    """True if a view is all of a weight's buffer as it lies there."""
    assert view is not None
    buffer, steps = operands.buffers[view.buffer], [1]
    for size in reversed(view.shape[1:]):
        steps.insert(0, steps[0] * size if isinstance(size, int) else 0)
    return buffer.role == "weight" and (view.shape, view.strides, view.offset) == (buffer.shape, tuple(steps), 0)


def _drop(wanted: dict[str, str], views: Iterable[View | None]) -> None:
    for view in views:
        if view is not None:
            wanted.pop(view.buffer, None)
