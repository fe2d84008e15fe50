"""How undefined bits pass through vector instructions that work bit by bit; ``masks`` are set where undefined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.gfx950.decoded import ALL

Array = npt.NDArray[Any]
Masks = Sequence[Array]
_31 = np.uint32(31)


def pass_move(masks: Masks, values: Masks) -> Array:
    """A move, or the bits inverted."""
    return masks[0]


def pass_and(masks: Masks, values: Masks) -> Array:
    """Defined where either side is a defined 0."""
    (a, b), (x, y) = masks, values
    return (a | b) & (a | x) & (b | y)


def pass_or(masks: Masks, values: Masks) -> Array:
    """Defined where either side is a defined 1."""
    (a, b), (x, y) = masks, values
    return (a | b) & (a | ~x) & (b | ~y)


def pass_any(masks: Masks, values: Masks) -> Array:
    """Undefined where any source is."""
    total = masks[0]
    for mask in masks[1:]:
        total = total | mask
    return total


def pass_shift(run: Callable[..., Any], amount: int, moved: int) -> Callable[[Masks, Masks], Array]:
    """A shift: the undefined bits move like the value; an undefined amount spoils everything."""

    def precise(masks: Masks, values: Masks) -> Array:
        arguments = [values[amount], masks[moved]] if moved > amount else [masks[moved], values[amount]]
        return np.where(masks[amount] != 0, ALL, run(*arguments).view(np.uint32))

    return precise


def pass_logic(run: Callable[..., Any]) -> Callable[[Masks, Masks], Array]:
    """Logic of three sources, after shifts by defined amounts: where the result depends on undefined bits."""

    def precise(masks: Masks, values: Masks) -> Array:
        low = [v & ~m for v, m in zip(values, masks, strict=True)]
        high = [v | m for v, m in zip(values, masks, strict=True)]
        base = run(*low)
        changed = base ^ run(*high)
        for k in range(3):
            mixed = [high[n] if n == k else low[n] for n in range(3)]
            opposite = [low[n] if n == k else high[n] for n in range(3)]
            changed = changed | (base ^ run(*mixed)) | (base ^ run(*opposite))
        return np.asarray(changed, np.uint32)

    return precise


def pass_shift_or(masks: Masks, values: Masks) -> Array:
    """(a << b) | c."""
    moved = np.where(masks[1] != 0, ALL, masks[0] << (values[1] & _31))
    return pass_or([moved, masks[2]], [values[0] << (values[1] & _31), values[2]])


def pass_and_or(masks: Masks, values: Masks) -> Array:
    """(a & b) | c."""
    return pass_or([pass_and(masks[:2], values[:2]), masks[2]], [values[0] & values[1], values[2]])


def pass_select(masks: Masks, values: Masks) -> Array:
    """c ? b : a, by a lane mask."""
    return np.where(masks[2] != 0, ALL, np.where(values[2], masks[1], masks[0]))
