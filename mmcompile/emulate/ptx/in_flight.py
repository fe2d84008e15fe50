"""Registers of wgmma in flight: reading or writing them before wgmma.wait_group is a fault.

PTX ISA, "wgmma.mma_async": accessing the registers of a pending wgmma, the accumulator or the fragments of A, is
undefined behaviour. Only in late mode something is in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.group import Group

Lanes = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint32]

POISON = np.uint32(0x7FE5A5A5)
"""A NaN (as fp32, and as two fp16 or bf16) in the accumulators that nobody may read yet."""


class GuardedRegister(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands in the register list for an accumulator that all lanes have in flight: any use is a fault."""

    def __init__(self, g: Group) -> None:
        self._g = g

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._g.fault("in flight", "the accumulator of a wgmma is accessed before wgmma.wait_group")

    __array_ufunc__ = __array_function__ = __array__ = __getitem__ = __len__ = __iter__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


class _Accumulator:
    """The registers of one accumulator while operations on it are pending.

    Attributes: values [registers, lanes]: what the operations add to. pending [lanes]: their number. visible: the
        arrays that were put into the register list, to see whether something else wrote there.
    """

    def __init__(self, registers: tuple[int, ...], lanes: int) -> None:
        self.values = np.zeros((len(registers), lanes), np.uint32)
        self.pending = np.zeros(lanes, np.int64)
        self.visible: list[Any] = []


class InFlightRegisters:
    """The accumulators (written) and A fragments (read) of pending wgmma operations.

    An accumulator that all lanes have in flight is guarded: any use is a fault. If only some have, the others may use
    the register, so those lanes hold a poison instead.
    """

    def __init__(self, g: Group) -> None:
        self._g = g
        self._accumulators: dict[tuple[int, ...], _Accumulator] = {}
        self._guard = GuardedRegister(g)

    def begin(self, registers: tuple[int, ...], lanes: Lanes) -> None:
        """A wgmma of ``lanes`` that will write ``registers`` is issued."""
        accumulator = self._accumulators.get(registers)
        if accumulator is None:
            self._refuse_overlap(registers)
            accumulator = self._accumulators[registers] = _Accumulator(registers, self._g.lanes)
        fresh = lanes & (accumulator.pending == 0)
        accumulator.pending += lanes
        if not fresh.any():
            return
        current = self._read(registers)
        accumulator.values[:, fresh] = current[:, fresh]
        if accumulator.pending.all():
            self._show(registers, accumulator, [self._guard] * len(registers))
        else:
            self._show(registers, accumulator, list(np.where(fresh, POISON, current)))

    def accumulate(self, registers: tuple[int, ...]) -> Words:
        """Values [registers, lanes] that the oldest pending operation adds to (in early mode: the registers)."""
        accumulator = self._accumulators.get(registers)
        return self._read(registers) if accumulator is None else accumulator.values

    def finish(self, registers: tuple[int, ...], lanes: Lanes, results: Words) -> None:
        """The oldest operation of ``lanes`` wrote its results [registers, lanes].

        Raises EmulationFault("in flight") if something else wrote the registers before.
        """
        accumulator = self._accumulators.get(registers)
        if accumulator is None:
            shown = results if lanes.all() else np.where(lanes, results, self._read(registers))
            for register, values in zip(registers, shown, strict=True):
                self._g.registers[register] = values
            return
        held = [self._g.registers[register] for register in registers]
        untouched = all(now is before for now, before in zip(held, accumulator.visible, strict=True))
        if not untouched and (self._read(registers)[:, lanes] != POISON).any():
            raise self._g.fault("in flight", "the accumulator of a wgmma is written before wgmma.wait_group")
        accumulator.values[:, lanes] = results[:, lanes]
        accumulator.pending -= lanes
        done = lanes & (accumulator.pending == 0)
        if done.any():
            shown = results if done.all() else np.where(done, results, self._read(registers))
            self._show(registers, accumulator, list(shown))
        if not accumulator.pending.any():
            del self._accumulators[registers]

    def check_unchanged(self, registers: tuple[int, ...], before: list[Any], lanes: Lanes) -> None:
        """The A fragments are as they were when the wgmma was issued; raises EmulationFault("in flight")."""
        for register, values in zip(registers, before, strict=True):
            now = self._g.registers[register]
            if now is not values and (self._read((register,))[0, lanes] != values[lanes]).any():
                raise self._g.fault("in flight", "a register of A is written while its wgmma is pending")

    def _read(self, registers: tuple[int, ...]) -> Words:
        """Values [registers, lanes] as the program may see them: poisoned where they are in flight."""
        hidden = np.full(self._g.lanes, POISON)
        held = (self._g.registers[register] for register in registers)
        return np.stack([hidden if values is self._guard else values for values in held])

    def _show(self, registers: tuple[int, ...], accumulator: _Accumulator, arrays: list[Any]) -> None:
        accumulator.visible = arrays
        for register, values in zip(registers, arrays, strict=True):
            self._g.registers[register] = values

    def _refuse_overlap(self, registers: tuple[int, ...]) -> None:
        taken = {register for other in self._accumulators for register in other}
        if taken & set(registers):
            raise self._g.fault("in flight", "wgmma operations with different accumulators share registers")
