"""How many pages of KV cache fit, and how many are wanted."""

from __future__ import annotations

import os

from mmcompile.core.errors import UsageError
from mmcompile.core.plan import Plan
from mmcompile.runtime.executor import count_bytes, memory_by_role

DEFAULT_TOKENS_PER_SEQUENCE = 2048
_GPU_FRACTION = 0.9
_CPU_FRACTION = 0.25


def bytes_per_page(plan: Plan) -> int:
    """Growth of the state buffers with the symbol "pages"."""
    states = [buffer for buffer in plan.buffers.values() if buffer.role == "state"]
    return sum(count_bytes(b, {"pages": 2}) - count_bytes(b, {"pages": 1}) for b in states)


def cpu_budget() -> int:
    """Bytes that the cache may take on the CPU: a quarter of the physical memory."""
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_FRACTION)


def gpu_budget(plan: Plan, free: int) -> int:
    """Bytes that the cache may take of ``free`` device bytes: nine tenths of what weights and arena leave."""
    roles = memory_by_role(plan, {"pages": 0})
    return int((free - sum(roles.values())) * _GPU_FRACTION)


def choose_pages(plan: Plan, budget: int, *, page_size: int, max_batch: int, max_context: int) -> int:
    """Pages for ``max_batch`` sequences of 2048 tokens (or the context, if shorter), as far as ``budget`` bytes go.

    Raises UsageError if not even one page fits.
    """
    wanted = max_batch * -(-min(DEFAULT_TOKENS_PER_SEQUENCE, max_context) // page_size)
    per_page = bytes_per_page(plan)
    pages = min(wanted, budget // per_page) if per_page else wanted
    if pages < 1:
        raise UsageError(
            f"no memory for the KV cache: a page takes {per_page} bytes and {max(budget, 0)} are left",
            fix="free memory on the device, use a smaller model, or pass pages=",
        )
    return pages
