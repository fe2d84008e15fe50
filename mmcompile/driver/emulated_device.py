"""A GPU that is emulated on the CPU: the driver calls of an executor over emulated memory and assembly."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmcompile.core.plan import Binary
from mmcompile.emulate.launch import Launch, Report
from mmcompile.emulate.memory import BASE, DeviceMemory
from mmcompile.emulate.run import run_kernel

EmulatedKernel = tuple[str, Binary, int]


class EmulatedDriver:
    """See :class:`mmcompile.runtime.device_driver.Driver`; an image is the name of a kernel.

    Every launch runs at once. A cooperative one keeps all programs resident and interleaves them in the order of
    ``seed``, with the race check on.

    Args:
        kernels: assembly text, binary and number of parameters by name.
    """

    kind, device_name = "emulated", "emulator"

    def __init__(self, kernels: Mapping[str, EmulatedKernel], architecture: str, seed: int = 0) -> None:
        self.architecture = architecture
        self.memory, self.launches = DeviceMemory(), 0
        self._kernels, self._seed = kernels, seed
        self.reports: list[Report] = []
        self._host: list[Any] = []
        self._recorded: list[Launch] | None = None

    def activate(self) -> None:
        """See Driver."""

    def synchronize(self) -> None:
        """See Driver."""

    def allocate(self, size: int) -> int:
        """See Driver."""
        return self.memory.register(np.zeros(size, np.uint8), f"allocation {len(self.memory.regions)}", known=False)

    def allocate_host(self, size: int) -> int:
        """See Driver."""
        self._host.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self._host[-1])

    def copy_to_device(self, pointer: int, address: int, size: int) -> None:
        """See Driver."""
        place = slice(pointer - BASE, pointer - BASE + size)
        self.memory.data[place] = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        self.memory.known[place] = True

    def copy_to_host(self, address: int, pointer: int, size: int) -> None:
        """See Driver."""
        ctypes.memmove(address, self.memory.data[pointer - BASE : pointer - BASE + size].ctypes.data, size)

    def fill_zero(self, pointer: int, size: int) -> None:
        """See Driver."""
        self.memory.data[pointer - BASE : pointer - BASE + size] = 0
        self.memory.known[pointer - BASE : pointer - BASE + size] = True

    def free_memory(self) -> int:
        """See Driver."""
        return 1 << 30

    def load_kernel(self, image: bytes, symbol: str, shared: int) -> EmulatedKernel:
        """See Driver."""
        return self._kernels[image.decode()]

    def launch(
        self,
        function: EmulatedKernel,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        parameters: int,
        cooperative: bool = False,
        early: bool = False,
    ) -> None:
        """See Driver."""
        assembly, binary, count = function
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        arguments = [ctypes.c_uint64.from_address(pointers[i]).value for i in range(count)]
        launch = Launch(
            assembly, binary.symbol, grid, threads, shared, arguments, self.memory, check_races=cooperative,
            schedule="interleaved" if cooperative else "program", late=self.launches % 2 == 0, seed=self._seed,
        )  # fmt: skip
        if self._recorded is not None:
            self._recorded.append(launch)
            return
        self.reports.append(run_kernel(launch))
        self.launches += 1

    def begin_capture(self) -> None:
        """See Driver."""
        self._recorded = []

    def end_capture(self) -> list[Launch]:
        """See Driver."""
        assert self._recorded is not None
        graph, self._recorded = self._recorded, None
        return graph

    def replay(self, graph: list[Launch]) -> None:
        """See Driver."""
        for launch in graph:
            self.reports.append(run_kernel(launch))
            self.launches += 1

    def close(self) -> None:
        """See Driver."""
