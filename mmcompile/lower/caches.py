"""The byte layout of NVFP4 caches: the target's, written into every operation that touches one and into its buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmcompile.core.errors import LoweringError
from mmcompile.core.formats import cache_pages, nvfp4_cache
from mmcompile.core.plan import View
from mmcompile.lower.operands import Operands

_CANONICAL = (nvfp4_cache.LINEAR, nvfp4_cache.INDEX)


def place_caches(
    operands: Operands, preferred: Sequence[str], inputs: Mapping[str, View | None], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """The attributes of an operation with the target's layouts in them; the buffers of its caches get the same tags.

    A graph says "nvfp4.linear" and "nvfp4.index", which run anywhere. As no layout changes a shape, one graph serves
    all targets, and here, where operations become launches of one target, is the only place that has to know them.

    preferred: tags of the target (see TargetSpec). Raises LoweringError if two operations want one cache differently.
    """
    placed = dict(attributes)
    for name, attribute in cache_pages.list_layouts(inputs, attributes).items():
        view = inputs[name]
        assert view is not None
        buffer, tag = operands.buffers[view.buffer], str(attributes[attribute])
        if tag in _CANONICAL:
            page_size, width = (int(n) for n in buffer.shape[-2:])
            tag = nvfp4_cache.choose_layout(tag, preferred, nvfp4_cache.head_dim_of_width(width), page_size)
        if operands.layouts.setdefault(buffer.name, tag) != tag:
            raise LoweringError(
                f"the cache {buffer.name} is wanted in the layouts {operands.layouts[buffer.name]!r} and {tag!r}",
                fix="let one pass name the layout of all operations on it",
            )
        operands.buffers[buffer.name] = buffer.model_copy(update={"layout": tag})
        placed[attribute] = tag
    return placed
