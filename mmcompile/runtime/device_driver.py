"""What a GPU executor asks of a driver, and how arguments are laid out for its launches."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 256


class Driver(Protocol):
    """The few calls that a GPU executor needs. Pointers and host addresses are ints, sizes are in bytes.

    Every method raises ToolchainError with the driver's message if the call fails.
    """

    kind: str
    device_name: str
    architecture: str

    def activate(self) -> None:
        """Make the device current for the calling thread."""

    def allocate(self, size: int) -> int:
        """Device memory, aligned to at least 256."""

    def allocate_host(self, size: int) -> int:
        """Page-locked host memory."""

    def copy_to_device(self, pointer: int, address: int, size: int) -> None:
        """Asynchronous, in stream order; page-locked memory must stay unchanged until ``synchronize``."""

    def copy_to_host(self, address: int, pointer: int, size: int) -> None:
        """Asynchronous, in stream order."""

    def fill_zero(self, pointer: int, size: int) -> None:
        """Asynchronous, in stream order."""

    def synchronize(self) -> None:
        """Wait for everything on the stream."""

    def free_memory(self) -> int:
        """Bytes free on the device."""

    def load_kernel(self, image: bytes, symbol: str, shared: int) -> Any:
        """Function of a module, allowed ``shared`` bytes of dynamic shared memory."""

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        parameters: int,
        cooperative: bool = False,
        early: bool = False,
    ) -> None:
        """Queue a launch; ``parameters`` is the address of an array of pointers to the arguments.

        cooperative: all programs have to be resident at once; refused by the driver if they cannot be. early: it may
        start before the launch in front of it has ended; see ``Binary.early``.
        """

    def begin_capture(self) -> None:
        """From here on calls are recorded instead of executed."""

    def end_capture(self) -> Any:
        """The recorded calls as an executable graph."""

    def replay(self, graph: Any) -> None:
        """Queue a graph."""

    def close(self) -> None:
        """Free everything that was allocated or loaded."""


def align(size: int) -> int:
    """Round up to the alignment of buffers."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def wrap_memory(address: int, size: int) -> Tensor:
    """uint8 tensor [size] over host memory that somebody else owns."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


class PackedArguments:
    """Kernel arguments in memory as the launch calls take them: an array of pointers to 8-byte slots."""

    def __init__(self, values: list[int]) -> None:
        self._slots = (ctypes.c_uint64 * len(values))(*(value & 0xFFFFFFFFFFFFFFFF for value in values))
        base = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_void_p * len(values))(*(base + 8 * i for i in range(len(values))))
        self.address = ctypes.addressof(self._pointers)
