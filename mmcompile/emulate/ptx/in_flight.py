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


class InFlightRegisters:
    """The accumulators (written) and A fragments (read) of pending wgmma operations."""

    def __init__(self, g: Group) -> None:
        self._g = g
        self._values: dict[int, Words] = {}
        self._pending: dict[int, npt.NDArray[np.int64]] = {}
        self._guards: dict[int, GuardedRegister] = {}

    def begin(self, accumulators: list[int], lanes: Lanes) -> None:
        """A wgmma of ``lanes`` that will write ``accumulators`` is issued."""
        for register in accumulators:
            pending = self._pending.setdefault(register, np.zeros(self._g.lanes, np.int64))
            values = self.read(register)
            fresh = lanes & (pending == 0)
            held = self._values.get(register, values)
            self._values[register] = np.where(fresh, values, held)
            pending += lanes
            if (pending > 0).all():
                self._g.registers[register] = self._guards.setdefault(register, GuardedRegister(self._g))
            elif fresh.any():
                self._g.registers[register] = np.where(fresh, POISON, values)

    def read(self, register: int) -> Words:
        """The register as the program may see it: poisoned where it is in flight."""
        values = self._g.registers[register]
        if isinstance(values, GuardedRegister):
            return np.full(self._g.lanes, POISON)
        words: Words = values
        return words

    def accumulator(self, register: int) -> Words:
        """The value that a pending wgmma adds to; without one, the register itself."""
        words: Words = self._values.get(register, self._g.registers[register])
        return words

    def finish(self, accumulators: list[int], lanes: Lanes, results: list[Words]) -> None:
        """The oldest operation of ``lanes`` wrote its results [lanes].

        Raises EmulationFault("in flight") if something else wrote the registers before.
        """
        for register, result in zip(accumulators, results, strict=True):
            pending = self._pending.get(register)
            if pending is None:
                values = self._g.registers[register]
                self._g.registers[register] = np.where(lanes, result, values)
                continue
            visible = self.read(register)
            if (visible[lanes] != POISON).any():
                raise self._g.fault("in flight", "the accumulator of a wgmma is written before wgmma.wait_group")
            pending -= lanes
            self._values[register] = np.where(lanes, result, self._values[register])
            done = lanes & (pending == 0)
            if done.any():
                self._g.registers[register] = np.where(done, result, visible)
            if not pending.any():
                del self._pending[register], self._values[register]
                self._guards.pop(register, None)

    def check_unchanged(self, registers: list[int], before: list[Any], lanes: Lanes) -> None:
        """The A fragments are as they were when the wgmma was issued; raises EmulationFault("in flight")."""
        for register, values in zip(registers, before, strict=True):
            now = self._g.registers[register]
            if now is not values and (self.read(register)[lanes] != values[lanes]).any():
                raise self._g.fault("in flight", "a register of A is written while its wgmma is pending")
