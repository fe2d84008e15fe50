"""Prove by evaluation what an indexer computes: block scores, the choice of blocks, and the mask that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mmcompile.core.graph import get_parameter
from mmcompile.core.ops.sparse import block_top_k, index_score
from mmcompile.passes._edit import Refusal, is_dynamic, shape_of

_LARGEST_BLOCK = 1024
_MOST_FORCED = 4


@dataclass(frozen=True)
class Selection:
    """Attributes of ``mm.index_score`` and ``mm.block_top_k`` that a graph was proved to compute."""

    block_size: int
    top_k: int
    local_blocks: int
    initial_blocks: int


def evaluate_from(graph_module: fx.GraphModule, node: fx.Node, given: Mapping[fx.Node, Any], tokens: int) -> Any:
    """Value of ``node`` where the nodes in ``given`` have these values, for one sequence of ``tokens`` tokens.

    Raises Refusal if it needs a weight that is not at hand.
    """
    values: dict[fx.Node, Any] = dict(given)
    for step in _find_needed(node, given):
        if step.op == "placeholder":
            shape = [tokens if is_dynamic(d) else int(d) for d in shape_of(step)]
            values[step] = torch.zeros(shape, dtype=step.meta["val"].dtype)
            if step.target == "positions":
                values[step] += torch.arange(tokens)
        elif step.op == "get_attr":
            values[step] = get_parameter(graph_module, str(step.target))
            if values[step].is_meta:
                raise Refusal(step, f"it depends on the weight {step.target!r}, which is not loaded")
        else:
            args, kwargs = fx.map_arg((step.args, step.kwargs), lambda n: values[n])
            values[step] = step.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _find_needed(node: fx.Node, given: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The node and what it is computed from, in graph order, without the given nodes and what only they need."""
    seen = {node} - set(given)
    stack = list(seen)
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in seen and parent not in given:
                seen.add(parent)
                stack.append(parent)
    return [n for n in node.graph.nodes if n in seen]


def fingerprint(node: fx.Node, given: tuple[fx.Node, ...]) -> str:
    """Text that is equal for nodes computed in the same way from the given ones."""
    needed = _find_needed(node, dict.fromkeys(given))
    numbers = {n: i for i, n in enumerate([*given, *needed])}
    lines = [str([str(shape_of(g)) for g in given])]
    for step in needed:
        args = fx.map_arg((step.args, step.kwargs), lambda n: f"%{numbers[n]}")
        lines.append(f"{step.target} {args}" if step.op == "call_function" else f"{step.op} {step.target}")
    return "\n".join(lines)


def prove_scores(graph_module: fx.GraphModule, scores: fx.Node, index_q: fx.Node, index_k: fx.Node) -> int:
    """Block size of block scores of index_q [tokens, heads, d] and index_k [tokens, 1, d]; Refusal if they differ."""
    heads, d = (int(n) for n in shape_of(index_q)[1:])

    def compute(q: Tensor, k: Tensor) -> Tensor:
        dtypes = [n.meta["val"].dtype for n in (index_q, index_k)]
        given = {index_q: q.to(dtypes[0]), index_k: k[:, None].to(dtypes[1])}
        return _as_rows(scores, evaluate_from(graph_module, scores, given, len(q)), len(q), heads)

    size = _measure_block(compute, heads, d, scores)
    for tokens in (1, 3, size, size + 1, 2 * size + 3):
        generator = torch.Generator().manual_seed(tokens)
        # Small integers: their products are exact in any dtype and order of summation.
        q, k = (torch.randint(-3, 4, s, generator=generator).float() for s in ((tokens, heads, d), (tokens, d)))
        have, want = compute(q, k), index_score(q, k, size)
        rest = have[..., want.shape[-1] :]
        if not torch.equal(have[..., : want.shape[-1]], want) or not bool((rest == float("-inf")).all()):
            raise Refusal(scores, f"for {tokens} tokens these are not the largest products of blocks of {size} keys")
    return size


def _measure_block(compute: Any, heads: int, d: int, scores: fx.Node) -> int:
    """Keys a block, from products that grow with the key: the first score is that of the last key of the block."""
    tokens = 16
    while tokens <= 2 * _LARGEST_BLOCK:
        q, k = torch.zeros(tokens, heads, d), torch.zeros(tokens, d)
        # Key j is spread over two elements, each of which bfloat16 holds exactly.
        q[..., 0], q[..., 1] = 128.0, 1.0
        k[:, 0], k[:, 1] = torch.arange(tokens) // 128, torch.arange(tokens) % 128
        last = compute(q, k)[-1, 0, 0]
        if 0 <= last < tokens - 1:
            return int(last) + 1
        tokens *= 2
    raise Refusal(scores, f"no blocks of at most {_LARGEST_BLOCK} keys can be told from its values")


def _as_rows(node: fx.Node, value: Tensor, tokens: int, heads: int) -> Tensor:
    """[tokens, heads, n] of a value laid out so, or as [1, heads, tokens, n]."""
    if value.dim() == 4 and value.shape[0] == 1:
        value = value[0].transpose(0, 1)
    if value.dim() != 3 or value.shape[:2] != (tokens, heads):
        raise Refusal(node, f"its shape is {list(value.shape)} for {tokens} tokens and {heads} index heads")
    return value


def prove_choice(graph_module: fx.GraphModule, ids: fx.Node, scores: fx.Node, size: int) -> Selection:
    """What ``ids`` chooses from scores, for sequences longer than the chosen blocks hold; Refusal if it is no top-k."""
    top_k = shape_of(ids)[-1]
    if is_dynamic(top_k):
        raise Refusal(ids, "the number of chosen blocks is not fixed")
    places = range(min(int(top_k), _MOST_FORCED) + 1)
    candidates = [(n, i) for n in (1, *(n for n in places if n != 1)) for i in places if n + i <= top_k]
    cases = [_evaluate_choice(graph_module, ids, scores, t, size) for t in (1, size + 1, (int(top_k) + 6) * size + 1)]
    for forced in candidates:
        if all(
            torch.equal(_sort_ids(block_top_k(r, torch.arange(len(r)), size, top_k, *forced), r), h) for r, h in cases
        ):
            return Selection(size, int(top_k), *forced)
    raise Refusal(ids, f"it is not a choice of the {top_k} best blocks with the last or first ones forced")


def _evaluate_choice(
    graph_module: fx.GraphModule, ids: fx.Node, scores: fx.Node, tokens: int, size: int
) -> tuple[Tensor, Tensor]:
    """Random scores [tokens, heads, blocks] and the ids that the graph chooses for them, sorted."""
    given, rows = _draw_scores(scores, tokens, size)
    have = evaluate_from(graph_module, ids, {scores: given}, tokens)
    return rows, _sort_ids(_as_rows(ids, have, tokens, rows.shape[1]), rows)


def _sort_ids(ids: Tensor, scores: Tensor) -> Tensor:
    return ids.long().masked_fill(ids < 0, scores.shape[-1]).sort(-1).values


def _draw_scores(scores: fx.Node, tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Random scores in the node's own layout, no two equal in a row, and as [tokens, heads, blocks]."""
    shape = [_size_for(d, tokens) for d in shape_of(scores)]
    heads, blocks = shape[-3 if len(shape) == 4 else 1], shape[-1]
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.rand(tokens, heads, blocks, generator=generator).argsort(-1).float() - blocks / 2
    own = (torch.arange(tokens) // size)[:, None, None]
    rows = rows.masked_fill(torch.arange(blocks) > own, float("-inf"))
    return rows if len(shape) == 3 else rows.transpose(0, 1)[None], rows


def _size_for(dimension: Any, tokens: int) -> int:
    """A dimension for so many tokens."""
    if not is_dynamic(dimension):
        return int(dimension)
    expression = dimension.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))


def prove_mask(graph_module: fx.GraphModule, mask: fx.Node, ids: fx.Node, heads: int, size: int) -> None:
    """Refusal unless the mask lets each query head see the chosen blocks of its group up to the query itself."""
    selections, top_k = shape_of(ids)[-3 if len(shape_of(ids)) == 4 else 1], int(shape_of(ids)[-1])
    for tokens in (1, size, 2 * size + 3):
        blocks = -(-tokens // size)
        generator = torch.Generator().manual_seed(tokens)
        order = torch.rand(tokens, int(selections), max(blocks, top_k), generator=generator).argsort(-1)[..., :top_k]
        chosen = order.masked_fill(order >= blocks, -1)
        given = chosen if len(shape_of(ids)) == 3 else chosen.transpose(0, 1)[None]
        value = evaluate_from(graph_module, mask, {ids: given.to(ids.meta["val"].dtype)}, tokens)
        allowed = _read_allowed(mask, value)
        key = torch.arange(tokens)
        want = (chosen[..., None] == key // size).any(2) & (key <= key[:, None])[:, None]
        want = want.transpose(0, 1).repeat_interleave(heads // int(selections), 0)
        if allowed.shape[-2:] != want.shape[-2:] or not torch.equal(allowed.expand(1, *want.shape)[0], want):
            raise Refusal(mask, f"for {tokens} tokens the mask is not that of the chosen blocks, causal within each")


def _read_allowed(mask: fx.Node, value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value
    hidden = value <= torch.finfo(value.dtype).min / 2
    if bool((~hidden & (value != 0)).any()):
        raise Refusal(mask, "the mask adds something that is neither 0 nor as good as minus infinity")
    return ~hidden
