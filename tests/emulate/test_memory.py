"""Device memory of the emulators: every way out of a buffer is a fault that names the buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.memory import DeviceMemory


def addresses(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_contents_are_read_and_written_in_place() -> None:
    memory = DeviceMemory()
    memory.register(np.zeros(3, np.uint8), "before")
    x = memory.register(np.arange(8, dtype=np.uint32), "x")
    index = memory.locate(addresses(x + 4, x + 28), 4, write=False)
    assert memory.read(index, 4).view(np.uint32).ravel().tolist() == [1, 7]
    memory.write(memory.locate(addresses(x), 4, write=True), np.array([[9, 0, 0, 0]], np.uint8))
    assert memory.contents(x).view(np.uint32).tolist() == [9, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("offset", "size"), [(-4, 4), (16, 4), (12, 8), (8, 16), (1 << 40, 4), (-(1 << 40), 4)])
def test_outside_of_a_buffer(offset: int, size: int) -> None:
    memory = DeviceMemory()
    x = memory.register(np.zeros(4, np.uint32), "x")
    with pytest.raises(EmulationFault, match="byte .* of buffer 'x'") as caught:
        memory.locate(addresses(x, x + offset), size, write=False)
    assert caught.value.kind == "out of bounds"


@given(st.integers(1, 40), st.integers(-20, 60), st.sampled_from([1, 2, 4, 8, 16]))
def test_bounds_are_exact(size: int, offset: int, width: int) -> None:
    memory = DeviceMemory()
    x = memory.register(np.zeros(size, np.uint8), "x")
    inside, aligned = offset >= 0 and offset + width <= size, offset % width == 0
    if inside and aligned:
        assert memory.locate(addresses(x + offset), width, write=True).tolist() == [memory.regions[0].start + offset]
    else:
        with pytest.raises(EmulationFault) as caught:
            memory.locate(addresses(x + offset), width, write=True)
        assert caught.value.kind == ("misaligned" if inside else "out of bounds")


def test_two_buffers_are_never_one_access_apart() -> None:
    memory = DeviceMemory()
    x, y = memory.register(np.zeros(256, np.uint8), "x"), memory.register(np.zeros(256, np.uint8), "y")
    assert y - x > 4096
    with pytest.raises(EmulationFault, match="buffer 'x'"):
        memory.locate(addresses(x + 256), 1, write=False)


def test_inputs_are_read_only() -> None:
    memory = DeviceMemory()
    x = memory.register(np.zeros(4, np.uint8), "x", writable=False)
    memory.locate(addresses(x), 4, write=False)
    with pytest.raises(EmulationFault, match="byte 0 of buffer 'x'") as caught:
        memory.locate(addresses(x), 4, write=True)
    assert caught.value.kind == "read-only"


def test_what_nobody_wrote_may_not_be_read() -> None:
    memory = DeviceMemory()
    x = memory.register(np.zeros(8, np.uint8), "x", known=np.arange(8) < 4)
    memory.locate(addresses(x), 4, write=False)
    with pytest.raises(EmulationFault, match="byte 4 of buffer 'x'") as caught:
        memory.locate(addresses(x + 4), 4, write=False)
    assert caught.value.kind == "uninitialised"
    memory.write(memory.locate(addresses(x + 4), 4, write=True), np.ones((1, 4), np.uint8))
    memory.locate(addresses(x + 4), 4, write=False)


def test_the_shadow_covers_writable_buffers_only() -> None:
    memory = DeviceMemory()
    memory.register(np.zeros(100, np.uint8), "weights", writable=False)
    x = memory.register(np.zeros(16, np.uint8), "x")
    memory.register(np.zeros(100, np.uint8), "more", writable=False)
    y = memory.register(np.zeros(8, np.uint8), "y")
    assert memory.shadow_size == 24
    index = memory.locate(addresses(x + 4, y), 4, write=False)
    writable, places = memory.find_shadow(index)
    assert writable.all() and places.tolist() == [4, 16]
