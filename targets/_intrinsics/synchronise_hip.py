"""AMD's arrival: a release waits for its own wave's stores only, so every wave drains its own before the barrier."""

import triton
import triton.language as tl


@triton.jit
def count_arrival(counter):
    """Release what this program wrote and add one to ``counter``; returns its value before."""
    lane = tl.arange(0, 256)
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)\n v_mov_b32 $0, $1", "=v,v", [lane], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
