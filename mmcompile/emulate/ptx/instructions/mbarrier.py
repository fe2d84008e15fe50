"""mbarrier instructions: init, inval, arrive, arrive_drop, expect_tx, complete_tx, test_wait, try_wait.

PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". Only objects in the block's own shared
memory: there are no clusters of several blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate.ptx.async_state import get_state
from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.faults_at import faults_at_line
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.mbarriers import Key
from mmcompile.emulate.ptx.parser import Instruction, Operand

Mask = npt.NDArray[np.bool_] | None
WARP = 32


@translates("mbarrier")
def translate_mbarrier(emitter: Emitter, instruction: Instruction) -> None:
    """All mbarrier instructions but pending_count and the .noComplete forms."""
    action, modifiers = instruction.modifiers[0], instruction.modifiers
    if not any(m.startswith("shared") for m in modifiers) or "noComplete" in modifiers or "multicast" in modifiers:
        emitter.refuse("only plain forms in shared memory are modelled")
    if action in ("init", "inval"):
        count = emitter.full_source(instruction.operands[1], "b32") if action == "init" else "None"
        emitter.append(f"set_mbarrier(g, {emitter.address(instruction.operands[0])}, {count}, {emitter.mask})")
    elif action in ("test_wait", "try_wait"):
        _translate_wait(emitter, instruction)
    elif action in ("expect_tx", "complete_tx"):
        address, size = instruction.operands
        emitter.append(
            f"count_bytes(g, {emitter.address(address)}, {emitter.full_source(size, 'b32')}, "
            f"{1 if action == 'expect_tx' else -1}, {emitter.mask})"
        )
    elif action in ("arrive", "arrive_drop"):
        _translate_arrive(emitter, instruction)
    else:
        emitter.refuse()


def _translate_wait(emitter: Emitter, instruction: Instruction) -> None:
    destination, address, phase = instruction.operands[:3]
    kind = "b32" if "parity" in instruction.modifiers else "b64"
    name = emitter.new_name()
    emitter.append(
        f"{name} = test_mbarrier(g, {emitter.address(address)}, {emitter.full_source(phase, kind)}, {emitter.mask})"
    )
    emitter.put(destination, name, "pred")


def _translate_arrive(emitter: Emitter, instruction: Instruction) -> None:
    operands = list(instruction.operands)
    state: Operand | None = None if operands[0].kind == "memory" else operands.pop(0)
    address, rest = operands[0], operands[1:]
    expect = "expect_tx" in instruction.modifiers
    number = emitter.full_source(rest[0], "b32") if rest else "None"
    count, size = ("None", number) if expect else (number, "None")
    name = emitter.new_name()
    emitter.append(
        f"{name} = arrive_mbarrier(g, {emitter.address(address)}, {count}, {size}, "
        f"{instruction.modifiers[0] == 'arrive_drop'}, {emitter.mask})"
    )
    if state is not None:
        emitter.put(state, name, "b64", packed=True)


def _note_access(g: Group, addresses: Any, lanes: npt.NDArray[np.int64], *, replaces: bool) -> None:
    """For the race check init and inval are writes, everything else is atomic: barriers must lie between."""
    index = g.shared_index(addresses[lanes], 8, lanes)
    if replaces:
        g.note_shared_write(index, 8, lanes)
    else:
        get_state(g).order.access_mbarriers(lanes, index)


def _keys(g: Group, addresses: Any, lanes: npt.NDArray[np.int64], *, replaces: bool = False) -> list[Key]:
    """Block and address of the mbarrier of each lane, checked."""
    _note_access(g, addresses, lanes, replaces=replaces)
    blocks = lanes // g.threads
    return [(int(block), int(address)) for block, address in zip(blocks, addresses[lanes], strict=True)]


@runtime
def set_mbarrier(g: Group, addresses: Any, counts: Any, mask: Mask) -> None:
    """mbarrier.init with ``counts``, or mbarrier.inval if they are None."""
    lanes, barriers = g.active_lanes(mask), get_state(g).mbarriers
    with faults_at_line(g):
        for lane, key in zip(lanes, _keys(g, addresses, lanes, replaces=True), strict=True):
            if counts is None:
                barriers.invalidate(key)
            else:
                barriers.initialise(key, int(counts[lane]))


@runtime
def count_bytes(g: Group, addresses: Any, sizes: Any, sign: int, mask: Mask) -> None:
    """mbarrier.expect_tx (sign 1) and complete_tx (sign -1)."""
    lanes, barriers = g.active_lanes(mask), get_state(g).mbarriers
    with faults_at_line(g):
        for lane, key in zip(lanes, _keys(g, addresses, lanes), strict=True):
            barriers.expect(key, sign * int(sizes[lane]))


@runtime
def arrive_mbarrier(g: Group, addresses: Any, counts: Any, sizes: Any, drop: bool, mask: Mask) -> Any:
    """mbarrier.arrive and arrive_drop, with a count, or with the bytes to expect; returns the phases before."""
    lanes, state = g.active_lanes(mask), get_state(g)
    tokens = np.zeros(g.lanes, np.uint64)
    released: set[tuple[int, int]] = set()
    with faults_at_line(g):
        for lane, key in zip(lanes, _keys(g, addresses, lanes), strict=True):
            if (lane // WARP, key[1]) not in released:
                released.add((lane // WARP, key[1]))
                state.order.arrive(int(lane), key[1])
            count = 1 if counts is None else int(counts[lane])
            size = 0 if sizes is None else int(sizes[lane])
            tokens[lane] = state.mbarriers.arrive(key, count, expect_bytes=size, drop=drop)
    return tokens


@runtime
def test_mbarrier(g: Group, addresses: Any, phases: Any, mask: Mask) -> Any:
    """Whether the phase of each lane completed; a failing test makes the running block yield."""
    lanes, state = g.active_lanes(mask), get_state(g)
    result = np.zeros(g.lanes, np.bool_)
    if not len(lanes):
        return result
    _note_access(g, addresses, lanes, replaces=False)
    asked = np.stack([lanes // g.threads, addresses[lanes].astype(np.int64), phases[lanes].astype(np.int64) & 1])
    with faults_at_line(g):
        for block, address, phase in asked[:, :1].T if (asked == asked[:, :1]).all() else np.unique(asked, axis=1).T:
            here = lanes[(asked == [[block], [address], [phase]]).all(axis=0)]
            if state.mbarriers.test((int(block), int(address)), int(phase)):
                result[here] = True
                for warp in np.unique(here // WARP) if state.order.enabled else ():
                    state.order.wait(int(warp) * WARP, int(address))
            else:
                g.spun = True
    return result
