"""Control flow, barriers of the block, fences and hints (PTX ISA, Control Flow and Parallel Synchronization)."""

from __future__ import annotations

import numpy as np

from mmcompile.emulate.ptx.emitter import Emitter
from mmcompile.emulate.ptx.group import Group, Mask
from mmcompile.emulate.ptx.instructions.table import runtime, translates
from mmcompile.emulate.ptx.parser import Instruction


@translates("bra")
def translate_bra(emitter: Emitter, instruction: Instruction) -> None:
    """bra: the scheduler splits the lanes that branch."""
    (target,) = instruction.targets
    emitter.ended = True
    if instruction.predicate is None:
        emitter.append(f"return {target}")
    else:
        emitter.append(f"return ('branch', {emitter.condition()}, {target})")


@translates("brx")
def translate_brx(emitter: Emitter, instruction: Instruction) -> None:
    """brx.idx: a branch to one of a list of labels."""
    if instruction.predicate is not None:
        emitter.refuse("under a predicate")
    emitter.ended = True
    index = emitter.full_source(instruction.operands[0], "u32")
    emitter.append(f"return ('indexed', {index}, {instruction.targets})")


@translates("exit")
def translate_exit(emitter: Emitter, instruction: Instruction) -> None:
    """exit, and ret of the kernel."""
    emitter.ended = True
    emitter.append(f"return ('exit', {emitter.mask if instruction.predicate is not None else None})")


@translates("bar", "barrier")
def translate_barrier(emitter: Emitter, instruction: Instruction) -> None:
    """bar.sync, bar.arrive, barrier.sync; bar.warp.sync orders the lanes of a warp, which go together anyway."""
    modifiers = [m for m in instruction.modifiers if m not in ("cta", "aligned")]
    if modifiers[0] == "warp":
        emitter.append("pass")
        return
    if modifiers[0] == "cluster":  # a cluster has one block: its threads are those of bar.sync 0, only apart from it
        emitter.refuse("clusters")
    if modifiers[0] not in ("sync", "arrive"):
        emitter.refuse("reduction")
    if instruction.predicate is not None:
        emitter.refuse("under a predicate")
    values = [emitter.full_source(x, "b32") for x in instruction.operands]
    emitter.ended = True
    count = values[1] if len(values) > 1 else None
    emitter.append(f"return ('barrier', {values[0]}, {count}, {modifiers[0] == 'arrive'})")


_NOTE_PROXY = (
    "fence.proxy.async of one thread publishes all earlier writes of its block to the asynchronous proxy, also those "
    "of threads that it is not ordered after"
)


@translates("fence", "membar")
def translate_fence(emitter: Emitter, instruction: Instruction) -> None:
    """Fences: memory is sequentially consistent here, so they only count for races and for the async proxy."""
    if instruction.modifiers[0] == "proxy":
        if len(instruction.modifiers) > 1 and instruction.modifiers[1].startswith("async"):
            emitter.notes.add(_NOTE_PROXY)
            emitter.append(f"publish_to_async_proxy(g, {emitter.mask})")
        else:
            emitter.append("pass")
        return
    emitter.append(f"fence(g, {emitter.mask})")


@runtime
def fence(group: Group, mask: Mask) -> None:
    """fence.acq_rel, fence.sc, membar."""
    if group.order:
        group.order.fence(group, group.active_lanes(mask))


@runtime
def publish_to_async_proxy(group: Group, mask: Mask) -> None:
    """fence.proxy.async: writes to shared memory become visible to asynchronous operations.

    One thread's fence publishes all earlier writes of its block (PTX ISA: those it has seen).
    """
    if group.late:
        blocks = group.active(mask).reshape(group.blocks, group.threads).any(axis=1)
        for block in np.flatnonzero(blocks):
            part = slice(block * group.shared_stride, (block + 1) * group.shared_stride)
            group.async_shared[part] = group.shared[part]


@translates("griddepcontrol", "setmaxnreg", "prefetch", "prefetchu", "discard", "applypriority", "pmevent")
def translate_hint(emitter: Emitter, instruction: Instruction) -> None:
    """Hints, and the wait for earlier grids, which have ended: nothing to do."""
    emitter.append("pass")


@translates("createpolicy")
def translate_createpolicy(emitter: Emitter, instruction: Instruction) -> None:
    """createpolicy: cache policies have no effect."""
    emitter.put(instruction.operands[0], "g.full(uint64(0))", "b64")


@translates("nanosleep")
def translate_nanosleep(emitter: Emitter, instruction: Instruction) -> None:
    """nanosleep: the lanes wait for others."""
    emitter.append("g.spun = True")


@translates("trap", "brkpt")
def translate_trap(emitter: Emitter, instruction: Instruction) -> None:
    """trap: the kernel gives up."""
    emitter.append(f"trap(g, {emitter.mask})")


@runtime
def trap(group: Group, mask: Mask) -> None:
    """Raise EmulationFault("trap") if a lane is active."""
    lanes = group.active_lanes(mask)
    if len(lanes):
        thread = int(lanes[0])
        block = tuple(int(n) for n in group.block_ids[thread // group.threads])
        raise group.fault("trap", f"thread {thread % group.threads} of block {block} executed it")
