"""Programmatic dependent launch (feature griddepcontrol): a launch may start while the one before it still runs."""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wait_for_launch():
    """Wait until the launch before this one has ended and what it wrote is seen."""
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_launch():
    """Let the launch behind this one start; it waits by itself for what this program still does."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
