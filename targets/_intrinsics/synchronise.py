"""What the stages of a merged kernel share: waits for counters, arrivals, and weights asked for before a wait."""

import triton
import triton.language as tl


@triton.jit
def wait_for(counter, target, fault, code):
    """Wait until ``counter`` holds ``target`` and acquire what was written before; False after a second in vain.

    ``fault``: two words, (code of the wait, value found) of the first wait in vain; 0 as long as there is none. The
    second has eight parts, each of which reads the counter anew: a poll gives up by a clock that goes on while the
    launch is suspended, so one look at it proves nothing.
    """
    reached = target < 0
    parts = 0
    while (parts < 8) & (reached == 0):
        reached = tl.atomic_poll(counter, target, sem="acquire", scope="gpu", timeout_ns=125000000)
        parts += 1
    if not reached:
        found = tl.atomic_load(counter, sem="relaxed", scope="gpu")
        if tl.atomic_cas(fault, 0, code) == 0:
            tl.store(fault + 1, found)
    return reached


@triton.jit
def finish_stores():
    """All threads of the program see what any of them wrote before."""
    tl.debug_barrier()


@triton.jit
def count_arrival(counter):
    """Release what this program wrote and add one to ``counter``; returns its value before."""
    finish_stores()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def prefetch_bytes(pointer, SIZE: tl.constexpr):
    """Ask for SIZE bytes (a multiple of 16) from ``pointer`` on, if the target can: into its second-level cache."""
    pass


@triton.jit
def enter_gate(gate):
    """Wait until the inputs of a tile are there, if anybody may still be writing them; weights may be read before.

    gate: None where a launch starts with its inputs complete; in a merged kernel what its wait needs.
    """
    pass


@triton.jit
def read_clock():
    """Nanoseconds of a clock that all programs share; 0 where there is none."""
    return tl.full((), 0, tl.int64)
