"""AMD's barrier waits for no store: every wave first waits for its own; a release drains but those of one wave."""

import triton
import triton.language as tl


@triton.jit
def finish_stores():
    """All threads of the program see what any of them wrote before."""
    lane = tl.arange(0, 256)
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)\n v_mov_b32 $0, $1", "=v,v", [lane], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
