"""An indexer, the mask of the blocks that it chooses and attention under that mask become block-sparse attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from mmcompile.core.graph import is_getitem, source_of
from mmcompile.core.passes import Match, PassContext, PassResult
from mmcompile.passes._edit import Refusal, emit, find_input, finish, is_call, replace, shape_of
from mmcompile.passes.standardise import match_attention
from mmcompile.passes.standardise._block_selection import (
    Selection,
    fingerprint,
    prove_choice,
    prove_mask,
    prove_scores,
)

DESCRIPTION = "indexers and attention over chosen blocks become mm.index_score, block_top_k and block_sparse_attention"
EFFECT = "bounded"

aten, mm = torch.ops.aten, torch.ops.mm
_LAYOUT = (
    aten.to.dtype,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.select.int,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.reshape.default,
    aten.view.default,
    aten.expand.default,
)


@dataclass
class _Run:
    """Choices already rewritten, by the node of their ids, and proofs by what was proved."""

    graph_module: fx.GraphModule
    result: PassResult
    chosen: dict[fx.Node, tuple[fx.Node, Selection]] = field(default_factory=dict)
    proofs: dict[str, object] = field(default_factory=dict)

    def prove(self, what: Callable[..., object], node: fx.Node, *given: fx.Node, extra: tuple[int, ...] = ()) -> object:
        """Run a proof once for equal computations: equal layers prove one another."""
        key = f"{what.__name__} {extra}\n{fingerprint(node, given)}"
        if key not in self.proofs:
            self.proofs[key] = what(self.graph_module, node, *given, *extra)
        return self.proofs[key]


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Every attention whose mask depends on a top-k is replaced or reported; the others are left to match_attention."""
    state = _Run(graph_module, PassResult())
    for node in list(graph_module.graph.nodes):
        try:
            found = _read(node)
            if found is not None:
                _rewrite(state, found)
        except Refusal as refusal:
            state.result.near_misses.append(refusal.as_near_miss("block_sparse_attention"))
    return finish(graph_module, state.result)


def _read(node: fx.Node) -> match_attention._Attention | None:
    """The attention at this node if its mask comes from a top-k."""
    if is_call(node, aten.scaled_dot_product_attention.default):
        found = match_attention._read_builtin(node) if node.args[3:] or node.kwargs.get("attn_mask") else None
    elif is_call(node, aten.softmax.int, aten._softmax.default) and match_attention._holds_product(node):
        found = match_attention._read_spelled_out(node)
    else:
        return None
    return found if found is not None and found.mask is not None and any(_find_nearest(found.mask, _is_topk)) else None


def _is_topk(node: fx.Node) -> bool:
    return is_call(node, aten.topk.default)


def _is_block_maximum(node: fx.Node) -> bool:
    return is_call(node, aten.amax.default) or (is_call(node, aten.scatter_reduce.two) and node.args[4] == "amax")


def _is_product(node: fx.Node) -> bool:
    return is_call(node, aten.matmul.default, aten.bmm.default)


def _find_nearest(start: fx.Node, wanted: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Ancestors that satisfy ``wanted``, not looking beyond them."""
    seen = {start}
    stack = [start]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                if wanted(parent):
                    yield parent
                else:
                    stack.append(parent)


def _find_only(start: fx.Node, wanted: Callable[[fx.Node], bool], what: str) -> fx.Node:
    found = list(_find_nearest(start, wanted))
    if len(found) != 1:
        raise Refusal(start, f"it is computed from {len(found)} {what}, block-sparse attention has exactly one")
    return found[0]


def _find_ids(mask: fx.Node) -> fx.Node:
    """The chosen ids, -1 where fewer were chosen."""
    topk = _find_only(mask, _is_topk, "choices (topk)")
    indices = [user for user in topk.users if is_getitem(user, 1)]
    marked = [u for n in indices for u in n.users if is_call(u, aten.masked_fill.Scalar) and u.args[2] == -1]
    if len(marked) != 1:
        raise Refusal(topk, "the ids that it chooses are not marked with -1 where there are fewer blocks")
    return marked[0]


def _find_rotated(operand: fx.Node) -> fx.Node:
    """The rotated heads [tokens, heads, d] that an operand of the product only casts and rearranges."""
    node = operand
    while is_call(node, *_LAYOUT):
        node = node.args[0]
    if not is_call(node, mm.rope.default):
        raise Refusal(node, "the heads of the indexer are not rotated by mm.rope")
    return node


def _choose(state: _Run, ids: fx.Node, root: fx.Node) -> tuple[fx.Node, Selection]:
    """mm.block_top_k in place of ``ids``, and what it was proved to choose."""
    if ids in state.chosen:
        return state.chosen[ids]
    scores = _find_only(ids, _is_block_maximum, "block maxima")
    product = _find_only(scores, _is_product, "products")
    index_q, index_k = (_find_rotated(operand) for operand in product.args[:2])
    if int(shape_of(index_k)[1]) != 1:
        raise Refusal(index_k, f"the indexer has {shape_of(index_k)[1]} key heads, mm.index_score has one")
    size = state.prove(prove_scores, scores, index_q, index_k)
    selection = state.prove(prove_choice, ids, scores, extra=(size,))
    graph_module = state.graph_module
    positions = find_input(graph_module, "positions")
    with graph_module.graph.inserting_before(root):
        keys = emit(graph_module, ids, aten.select.int, index_k, 1, 0)
        if len(shape_of(positions)) == 2:
            positions = emit(graph_module, ids, aten.select.int, positions, 0, 0)
        score = emit(graph_module, scores, mm.index_score.default, index_q, keys, selection.block_size)
        forced = (selection.local_blocks, selection.initial_blocks)
        blocks = emit(graph_module, ids, mm.block_top_k.default, score, positions, size, selection.top_k, *forced)
    match = Match("block_top_k", (scores.name, ids.name), (score.name, blocks.name), source_of(ids))
    state.result.matches.append(match)
    state.chosen[ids] = blocks, selection
    return blocks, selection


def _rewrite(state: _Run, found: match_attention._Attention) -> None:
    graph_module, root = state.graph_module, found.root
    heads = int(shape_of(found.q)[-3])
    ids = _find_ids(found.mask)
    k, v = (match_attention._undo_repeat(node, heads) for node in (found.k, found.v))
    kv_heads, selections = int(shape_of(k)[-3]), int(shape_of(ids)[-3 if len(shape_of(ids)) == 4 else 1])
    if kv_heads % selections:
        raise Refusal(ids, f"{selections} choices of blocks for {kv_heads} KV heads")
    blocks, selection = _choose(state, ids, root)
    state.prove(prove_mask, found.mask, ids, extra=(heads, selection.block_size))
    with graph_module.graph.inserting_before(root):
        q, k, v = (match_attention._to_token_major(graph_module, root, node) for node in (found.q, k, v))
        arguments = (q, k, v, blocks, found.scale, selection.block_size)
        value = emit(graph_module, root, mm.block_sparse_attention.default, *arguments)
        value = emit(graph_module, root, aten.transpose.int, value, 0, 1)
        if len(shape_of(found.q)) == 4:
            value = emit(graph_module, root, aten.unsqueeze.default, value, 0)
    replace(graph_module, "block_sparse_attention", root, value, state.result)
