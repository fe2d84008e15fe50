"""The capability for which Triton generates a kernel's code: several architectures share that of one."""

from __future__ import annotations

from mmcompile.core.kernel import KernelSource
from mmcompile.core.spec import Architecture

_BLACKWELL = 100


def code_capability(source: KernelSource, architecture: Architecture) -> int | str:
    """The capability to ask Triton for; what it emits is assembled for ``architecture``.

    Triton 3.9 emits for 103 and 107 what it emits for 100 (tests/targets/test_capability.py compares them), except that
    scaled matrix products are twice as deep on 107. So a kernel is translated once for the whole family.
    """
    capability = architecture.capability
    if capability == 103 or (capability == 107 and "dot_scaled" not in source.text):
        return _BLACKWELL
    return capability
