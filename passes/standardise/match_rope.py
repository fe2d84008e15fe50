"""Rotary embeddings become ``mm.rope``, and what depends on positions alone becomes a table of cosines and sines."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from mmcompile.core.graph import full_arguments, infer_meta, set_parameter, source_of
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import (
    Refusal,
    depends_on_value,
    describe,
    dtype_of,
    emit,
    evaluate,
    expect_call,
    find_input,
    finish,
    is_call,
    is_dynamic,
    replace,
    shape_of,
)

DESCRIPTION = "x * cos + rotate_half(x) * sin becomes mm.rope with a table"
EFFECT = "bitwise"

aten = torch.ops.aten
_TOLERANCE = 1e-5


@dataclass
class _Tables:
    """Tables made so far, by the nodes of cos and sin."""

    graph_module: fx.GraphModule
    length: int
    made: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rotation:
    """``add(x * cos, rotate_half(x) * sin)`` at ``root``; ``x`` is the part that rotates."""

    root: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """Replace every rotation whose angles are a function of each token's own position; report the others.

    The table has ``context.max_context`` rows in the dtype of cos and sin.
    """
    result = PassResult()
    positions = find_input(graph_module, "positions")
    if positions is None:
        result.notes.append("no input is called positions, so nothing can be a rotary embedding")
        return result
    tables = _Tables(graph_module, context.max_context)
    angles = _find_angles(graph_module, positions)
    for node in list(graph_module.graph.nodes):
        if not node._erased and is_call(node, aten.add.Tensor, aten.sub.Tensor):
            try:
                rotation = _match_rotation(node, angles)
                if rotation is not None:
                    _rewrite(rotation, positions, tables, result)
            except Refusal as refusal:
                result.near_misses.append(refusal.as_near_miss("rope"))
    return finish(graph_module, result)


def _find_angles(graph_module: fx.GraphModule, positions: fx.Node) -> set[fx.Node]:
    """Floating-point calls computed from positions and constants alone."""
    found: set[fx.Node] = set()
    known: set[fx.Node] = {positions}
    constant: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (node.op == "call_function" and all(i in constant for i in inputs)):
            constant.add(node)
        if node.op != "call_function" or not any(i in known for i in inputs):
            continue
        if all(i in known or i in constant or not isinstance(i.meta["val"], Tensor) for i in inputs):
            known.add(node)
            value = node.meta["val"]
            if isinstance(value, Tensor) and value.is_floating_point():
                found.add(node)
    return found


def _match_rotation(root: fx.Node, angles: set[fx.Node]) -> _Rotation | None:
    """The rotation at ``root``; None if it is another sum; Refusal if it only resembles one."""
    terms = [_split_product(term, angles) for term in root.args[:2]]
    if root in angles or None in terms:
        return None
    if root.target == aten.sub.Tensor:
        raise Refusal(root, "the second product is subtracted: the rotation runs the other way")
    (a, cos_a), (b, cos_b) = terms  # type: ignore[misc]
    turned = [is_call(v, aten.cat.default) for v in (a, b)]
    if turned == [True, False]:
        a, cos_a, b, cos_b = b, cos_b, a, cos_a
    elif turned != [False, True]:
        raise Refusal(root, "neither product holds the two halves put together in reverse (rotate_half)")
    _check_halves(a, b)
    if root.kwargs.get("alpha", 1) != 1:
        raise Refusal(root, f"the sum has alpha={root.kwargs['alpha']}")
    if dtype_of(cos_a) != dtype_of(a) or dtype_of(cos_b) != dtype_of(a):
        raise Refusal(root, f"the angles are {dtype_of(cos_a)}, the rotated tensor is {dtype_of(a)}")
    return _Rotation(root, a, cos_a, cos_b)


def _split_product(term: object, angles: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """(activation, angle) of a product of the two, else None."""
    if not isinstance(term, fx.Node) or not is_call(term, aten.mul.Tensor):
        return None
    first, second = term.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    if (first in angles) == (second in angles):
        return None
    return (second, first) if first in angles else (first, second)


def _check_halves(x: fx.Node, turned: fx.Node) -> None:
    """``turned`` must be cat([-x[..., r/2:], x[..., :r/2]], -1)."""
    parts, *rest = turned.args
    if len(parts) != 2 or (rest[0] if rest else 0) % len(shape_of(x)) != len(shape_of(x)) - 1:
        raise Refusal(turned, "it is not made of two halves of the last dimension")
    if is_call(parts[1], aten.neg.default) and not is_call(parts[0], aten.neg.default):
        raise Refusal(parts[1], "the wrong half is negated: the rotation runs the other way")
    second = expect_call(parts[0], turned, aten.neg.default).args[0]
    size = int(shape_of(x)[-1])
    for part, start in ((second, size // 2), (parts[1], 0)):
        bounds = _read_slice(part, turned)
        if bounds[0] is not x:
            raise Refusal(part, f"it takes a part of {bounds[0].name}, the other product reads {x.name}")
        if bounds[1:] != (start, start + size // 2):
            wanted = f"the rotation needs {start} to {start + size // 2}"
            raise Refusal(part, f"it takes elements {bounds[1]} to {bounds[2]}, {wanted}")


def _read_slice(part: fx.Node, owner: fx.Node) -> tuple[fx.Node, int, int]:
    """(tensor, start, end) of a slice, or an item of a chunk or split, along the last dimension."""
    part = expect_call(part, owner, aten.slice.Tensor, operator.getitem)
    if part.target is operator.getitem:
        cut, index = part.args
        cut = expect_call(cut, part, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
        given = full_arguments(cut)
        _check_last_dimension(part, cut, given["dim"])
        widths = [int(v.shape[-1]) for v in cut.meta["val"]]
        return given["self"], sum(widths[:index]), sum(widths[: index + 1])
    given = full_arguments(part)
    x, size = given["self"], int(shape_of(given["self"])[-1])
    _check_last_dimension(part, part, given["dim"])
    if given["step"] != 1:
        raise Refusal(part, f"it takes every element {given['step']} apart (interleaved); mm.rope rotates halves")
    start, end, _ = slice(given["start"], given["end"]).indices(size)
    return x, start, end


def _check_last_dimension(part: fx.Node, cut: fx.Node, dimension: int) -> None:
    rank = len(shape_of(cut.args[0]))
    if dimension % rank != rank - 1:
        raise Refusal(part, f"it cuts dimension {dimension}, not the last one")


def _rewrite(rotation: _Rotation, positions: fx.Node, tables: _Tables, result: PassResult) -> None:
    """Put mm.rope over [tokens, heads, d] where the rotation (and the untouched rest of the heads) stands."""
    graph_module = tables.graph_module
    table = _make_table(rotation, tables)
    root, x = _include_rest(rotation)
    with graph_module.graph.inserting_before(root):
        steps = list(_to_token_major(rotation, x))
        value = x
        for target, arguments in steps:
            value = emit(graph_module, root, target, value, *arguments)
        row = positions if len(shape_of(positions)) == 1 else emit(graph_module, root, aten.select.int, positions, 0, 0)
        value = emit(graph_module, root, torch.ops.mm.rope.default, value, row, table)
        for target, arguments in reversed(steps):
            back = (aten.unsqueeze.default, (0,)) if target == aten.select.int else (target, arguments)
            value = emit(graph_module, root, back[0], value, *back[1])
    replace(graph_module, "rope", root, value, result)


def _include_rest(rotation: _Rotation) -> tuple[fx.Node, fx.Node]:
    """Partial rotary: (cat([rotated, rest]), whole) where x is the front of ``whole``; else the rotation itself."""
    users = list(rotation.root.users)
    if len(users) != 1 or not is_call(users[0], aten.cat.default) or not is_call(rotation.x, aten.slice.Tensor):
        return rotation.root, rotation.x
    parts = users[0].args[0]
    whole, start, end = _read_slice(rotation.x, rotation.x)
    if len(parts) != 2 or parts[0] is not rotation.root or start != 0:
        return rotation.root, rotation.x
    if _read_slice(parts[1], users[0]) != (whole, end, int(shape_of(whole)[-1])):
        raise Refusal(parts[1], f"what follows the rotated part is not the rest of {whole.name}")
    return users[0], whole


def _to_token_major(rotation: _Rotation, x: fx.Node) -> Iterator[tuple[object, tuple[int, ...]]]:
    """Steps from x's layout to [tokens, heads, d]; each is undone by itself, select by unsqueeze."""
    rank, angle_rank = len(shape_of(x)), len(shape_of(rotation.cos))
    varying = [i - angle_rank for i, d in enumerate(shape_of(rotation.cos)) if is_dynamic(d)]
    tokens = [i - rank for i, d in enumerate(shape_of(x)) if is_dynamic(d)]
    if varying != tokens or len(tokens) != 1 or rank not in (3, 4):
        raise Refusal(
            rotation.root, f"x has shape {list(shape_of(x))}, one dimension of tokens and one of heads needed"
        )
    if rank == 4:
        if shape_of(x)[0] != 1:
            raise Refusal(rotation.root, f"x holds a batch of {shape_of(x)[0]}, only one sequence is supported")
        yield aten.select.int, (0, 0)
    if tokens[0] == -2:
        yield aten.transpose.int, (0, 1)


def _make_table(rotation: _Rotation, tables: _Tables) -> fx.Node:
    """get_attr of the table [max_context, r] for these angles; proves that they are a function of each position."""
    key = (rotation.cos, rotation.sin)
    if key in tables.made:
        return tables.made[key]
    graph_module = tables.graph_module
    cos, sin = (_tabulate(graph_module, node, tables.length) for node in key)
    half = cos.shape[1] // 2
    for node, values in ((rotation.cos, cos), (rotation.sin, sin)):
        if not torch.equal(values[:, :half], values[:, half:]):
            raise Refusal(node, "the angles of the two halves differ")
    name = "cos_sin_table" if not tables.made else f"cos_sin_table_{len(tables.made)}"
    set_parameter(graph_module, name, torch.cat([cos[:, :half], sin[:, :half]], dim=1).contiguous())
    first = next(iter(graph_module.graph.nodes))
    with graph_module.graph.inserting_before(first):
        table = graph_module.graph.get_attr(name)
    infer_meta(graph_module, [table])
    table.meta |= {"source": source_of(rotation.cos), "nn_module_stack": {}}
    tables.made[key] = table
    return table


def _tabulate(graph_module: fx.GraphModule, node: fx.Node, length: int) -> Tensor:
    """Rows of ``node`` for positions 0 .. length - 1, after checking that a row depends on its position alone."""
    if depends_on_value(node, "input_ids"):
        raise Refusal(node, "the angles depend on the token ids")
    width = int(shape_of(node)[-1])

    def rows(positions: Tensor) -> Tensor:
        shape = [*([1] * (len(shape_of(given)) - 1)), positions.shape[0]]
        tokens = positions.reshape(shape)
        values = evaluate(graph_module, node, {"positions": tokens, "input_ids": torch.zeros_like(tokens)})
        if values.numel() != positions.shape[0] * width:
            raise Refusal(node, f"the angles have shape {list(values.shape)}, not one row a token")
        return values.reshape(-1, width)

    given = find_input(graph_module, "positions")
    table = rows(torch.arange(length))
    generator = torch.Generator().manual_seed(0)
    probes = [
        torch.randperm(length, generator=generator),
        torch.tensor([length - 1]),
        torch.tensor([0, 0, length // 2]),
    ]
    for probe in probes:
        if not torch.allclose(rows(probe).float(), table[probe].float(), rtol=0.0, atol=_TOLERANCE):
            raise Refusal(node, f"the angles of a token depend on the other tokens too ({describe(node)})")
    return table
