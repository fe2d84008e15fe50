"""Prove what an attention mask is by evaluating it: causal, or causal with a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from mmcompile.passes._edit import (
    SYM_SIZE,
    Refusal,
    depends_on_value,
    dtype_of,
    evaluate,
    find_ancestors,
    is_call,
    is_dynamic,
    shape_of,
)

_LARGEST = 8192
_SIZES = (1, 2, 3, 8, 33)


def prove_causal(graph_module: fx.GraphModule, mask: fx.Node, max_context: int) -> int:
    """Window of a mask node [..., tokens, tokens]: 0 for plain causal, w if the last w tokens are seen.

    The mask may depend on sizes and on positions. It is evaluated for several token counts, among them some beyond
    every integer in its computation (a window is such an integer), and must agree element by element. Boolean masks
    are true where attention is allowed, the others are added to the scores: 0, or as good as minus infinity.
    Raises Refusal naming the first element that differs.
    """
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if node.target != "positions" and depends_on_value(mask, str(node.target)):
            raise Refusal(mask, f"the mask depends on the values of {node.target}")
    literals = {v for v in _find_literals(mask) if 1 < v < max_context}
    if literals and max(literals) > _LARGEST - 2:
        raise Refusal(mask, f"its computation holds {max(literals)}, too large to test for a window of that size")
    sizes = sorted({*_SIZES, *(v + 2 for v in literals)})
    largest = _evaluate(graph_module, mask, sizes[-1], 0)
    window = _read_window(largest)
    for size in sizes:
        for offset in (0, 5):
            _compare(mask, _evaluate(graph_module, mask, size, offset), window)
    return window


def _find_literals(mask: fx.Node) -> set[int]:
    """Absolute values of the integers in the arguments of the mask's computation."""
    found: set[int] = set()

    def collect(value: object) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                collect(item)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.add(abs(value))

    for node in find_ancestors(mask):
        if node.op == "call_function" and not is_call(node, SYM_SIZE, torch.ops.aten.slice.Tensor):
            collect(node.args)
            collect(list(node.kwargs.values()))
    return found


def _evaluate(graph_module: fx.GraphModule, mask: fx.Node, size: int, offset: int) -> Tensor:
    """Boolean [size, size], true where attention is allowed, for positions offset .. offset + size - 1."""
    inputs = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        shape = [size if is_dynamic(d) else int(d) for d in shape_of(node)]
        inputs[str(node.target)] = torch.zeros(shape, dtype=dtype_of(node))
    if "positions" in inputs:
        inputs["positions"] = inputs["positions"] + torch.arange(size) + offset
    values = evaluate(graph_module, mask, inputs)
    values = values.expand(*values.shape[:-2], size, size)
    if values.numel() != size * size:
        raise Refusal(mask, f"the mask has shape {list(values.shape)}: it differs between heads or sequences")
    values = values.reshape(size, size)
    if values.dtype == torch.bool:
        return values
    hidden = values <= torch.finfo(values.dtype).min / 2
    biased = ~hidden & (values != 0)
    if bool(biased.any()):
        row_index, column = torch.nonzero(biased)[0].tolist()
        bias = float(values[row_index, column])
        raise Refusal(mask, f"the mask adds {bias:.4g} at (row, column) = ({row_index}, {column}), neither 0 nor -inf")
    return ~hidden


def _read_window(allowed: Tensor) -> int:
    """Number of keys that the last query sees, 0 if it sees them all."""
    seen = int(allowed[-1].sum())
    return 0 if seen == allowed.shape[1] else seen


def _compare(mask: fx.Node, allowed: Tensor, window: int) -> None:
    size = allowed.shape[0]
    row, column = torch.arange(size)[:, None], torch.arange(size)[None, :]
    expected = (column <= row) & ((column > row - window) if window else torch.tensor(True))
    if torch.equal(allowed, expected):
        return
    where = tuple(torch.nonzero(allowed != expected)[0].tolist())
    state = "seen" if bool(allowed[where]) else "hidden"
    kind = f"causal with a window of {window}" if window else "causal"
    raise Refusal(mask, f"for {size} tokens the mask is not {kind}: (row, column) = {where} is {state}")
