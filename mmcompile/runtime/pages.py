"""Allocator of the KV cache's pages: a free list, lowest page first, so that runs are reproducible."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PageAllocator:
    """Hands out the pages 0 .. total - 1, each to one owner at a time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._is_free = bytearray(b"\1") * total

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """The ``count`` lowest free pages in ascending order, or None (and nothing taken) if there are not as many."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. ValueError if one is not allocated."""
        for page in pages:
            if not 0 <= page < self.total or self._is_free[page]:
                raise ValueError(f"page {page} is not allocated")
            self._is_free[page] = 1
            heapq.heappush(self._free, page)
