"""The page allocator against a model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.runtime.pages import PageAllocator


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 24), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_allocator_keeps_pages_apart(total: int, actions: list[tuple[bool, int]]) -> None:
    allocator, owned = PageAllocator(total), []
    for allocates, number in actions:
        if allocates:
            free = sorted(set(range(total)) - {p for pages in owned for p in pages})
            pages = allocator.allocate(number)
            assert pages == (free[:number] if number <= len(free) else None)
            owned += [pages] if pages is not None else []
        elif owned:
            allocator.release(owned.pop(number % len(owned)))
        assert allocator.free == total - sum(map(len, owned))


@pytest.mark.parametrize("pages", [[0, 0], [1], [-1], [2]])
def test_release_of_what_is_not_allocated(pages: list[int]) -> None:
    allocator = PageAllocator(2)
    assert allocator.allocate(1) == [0]
    with pytest.raises(ValueError, match="is not allocated"):
        allocator.release(pages)
