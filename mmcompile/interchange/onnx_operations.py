"""The table of operations on the way out: aten and ``mm::`` calls as ONNX nodes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import full_arguments
from mmcompile.interchange.onnx_builder import ELEMENT_TYPES, Builder

aten = torch.ops.aten
Writer = Callable[["Context", fx.Node, dict[str, Any]], Any]
LARGEST = np.iinfo(np.int64).max


class Context:
    """The builder and the ONNX names of the graph's values so far."""

    def __init__(self, builder: Builder) -> None:
        self.builder, self.names = builder, dict[fx.Node, Any]()

    def name(self, value: Any, like: Tensor | None = None) -> str:
        """ONNX name of a node, or of a number as a scalar of ``like``'s dtype."""
        if isinstance(value, fx.Node):
            return str(self.names[value])
        assert like is not None
        return self.builder.scalar_like(value, like)

    def sizes(self, values: list[Any]) -> str:
        """A shape as a value: constants, or joined from symbolic sizes."""
        if all(isinstance(v, int) for v in values):
            return self.builder.constant(values, "shape")
        parts = [
            self.builder.constant([v], "shape") if isinstance(v, int) else self._one_size(self.names[v]) for v in values
        ]
        return str(self.builder.add("Concat", parts, axis=0))

    def _one_size(self, name: str) -> str:
        return str(self.builder.add("Unsqueeze", [name, self.builder.constant([0], "axes")]))

    def cast(self, name: str, dtype: torch.dtype) -> str:
        """A value in another dtype."""
        return str(self.builder.add("Cast", [name], to=ELEMENT_TYPES[dtype]))

    def refuse(self, node: fx.Node, reason: str) -> LoweringError:
        """The error for a call that has no ONNX form."""
        return LoweringError(f"{node.target} cannot be written as ONNX: {reason}", where=f"node {node.name}")


def _value(node: Any) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _unary(op: str) -> Writer:
    return lambda c, n, a: c.builder.add(op, [c.name(n.args[0])], name=n.name)


def _binary(op: str) -> Writer:
    def write(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
        if a.get("alpha", 1) != 1:
            raise c.refuse(n, f"alpha={a['alpha']}")
        left, right = n.args[:2]
        tensors = [_value(x) for x in (left, right) if isinstance(x, fx.Node) and isinstance(x.meta["val"], Tensor)]
        dtype = torch.result_type(*tensors) if len(tensors) == 2 else _value(n).dtype
        dtype = tensors[0].dtype if _value(n).dtype == torch.bool and len(tensors) == 1 else dtype
        like = torch.empty((), dtype=dtype)
        names = []
        for x in (left, right):
            name = c.name(x, like)
            given = x.meta["val"] if isinstance(x, fx.Node) else None
            differs = given is not None and (not isinstance(given, Tensor) or given.dtype != dtype)
            names.append(c.cast(name, dtype) if differs else name)
        return str(c.builder.add(op, names, name=n.name))

    return write


def _pow(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    x = n.args[0]
    return str(c.builder.add("Pow", [c.name(x), c.name(n.args[1], _value(x))], name=n.name))


def _mean(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    axes = c.builder.constant(list(a["dim"]), "axes")
    return str(c.builder.add("ReduceMean", [c.name(a["self"]), axes], name=n.name, keepdims=int(a["keepdim"])))


def _rsqrt(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Reciprocal", [c.builder.add("Sqrt", [c.name(n.args[0])])], name=n.name))


def _silu(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    x = c.name(n.args[0])
    return str(c.builder.add("Mul", [x, c.builder.add("Sigmoid", [x])], name=n.name))


def _reshape(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    shape = c.sizes(list(n.args[1]))  # type: ignore[arg-type]
    return str(c.builder.add("Reshape", [c.name(n.args[0]), shape], name=n.name, allowzero=1))


def _transpose(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    rank = _value(n).dim()
    order = list(range(rank))
    i, j = (0, 1) if n.target == aten.t.default else (a["dim0"] % rank, a["dim1"] % rank)
    order[i], order[j] = order[j], order[i]
    return str(c.builder.add("Transpose", [c.name(n.args[0])], name=n.name, perm=order))


def _permute(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    order = [d % len(a["dims"]) for d in a["dims"]]
    return str(c.builder.add("Transpose", [c.name(n.args[0])], name=n.name, perm=order))


def _unsqueeze(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Unsqueeze", [c.name(a["self"]), c.builder.constant([a["dim"]], "axes")], name=n.name))


def _squeeze(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Squeeze", [c.name(a["self"]), c.builder.constant([a["dim"]], "axes")], name=n.name))


def _select(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    index = c.builder.constant(a["index"], "index")
    return str(c.builder.add("Gather", [c.name(a["self"]), index], name=n.name, axis=a["dim"]))


def _slice(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    start, end = a["start"] or 0, LARGEST if a["end"] is None else a["end"]
    places = [c.sizes([v]) for v in (start, end)]
    axes, steps = c.builder.constant([a["dim"]], "axes"), c.builder.constant([a["step"]], "steps")
    return str(c.builder.add("Slice", [c.name(a["self"]), *places, axes, steps], name=n.name))


def _cat(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Concat", [c.name(t) for t in a["tensors"]], name=n.name, axis=a["dim"]))


def _split(c: Context, n: fx.Node, a: dict[str, Any]) -> list[str]:
    """chunk, split and split_with_sizes, by the sizes of their results."""
    axis = a["dim"] % _value(a["self"]).dim()
    sizes = [int(v.shape[axis]) for v in n.meta["val"]]
    given = [c.name(a["self"]), c.builder.constant(sizes, "sizes")]
    made = c.builder.add("Split", given, name=n.name, outputs=len(sizes), axis=axis)
    return made if isinstance(made, list) else [made]


def _expand(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    shape = [1 if isinstance(s, int) and s == -1 else s for s in a["size"]]
    return str(c.builder.add("Expand", [c.name(a["self"]), c.sizes(shape)], name=n.name))


def _getitem(c: Context, n: fx.Node, a: dict[str, Any]) -> Any:
    return c.names[n.args[0]][n.args[1]]  # type: ignore[index]


def _same(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return c.name(n.args[0])


def _to(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Cast", [c.name(n.args[0])], name=n.name, to=ELEMENT_TYPES[_value(n).dtype]))


def _clamp(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    bounds = ["" if a[k] is None else c.name(a[k], _value(n)) for k in ("min", "max")]
    return str(c.builder.add("Clip", [c.name(a["self"]), *bounds], name=n.name))


def _softmax(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Softmax", [c.name(a["self"])], name=n.name, axis=a["dim"]))


def _gelu(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Gelu", [c.name(a["self"])], name=n.name, approximate=a["approximate"]))


def _matmul(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("MatMul", [c.name(n.args[0]), c.name(n.args[1])], name=n.name))


def _linear(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    turned = c.builder.add("Transpose", [c.name(a["weight"])], perm=[1, 0])
    y = c.builder.add("MatMul", [c.name(a["input"]), turned], name=n.name)
    return str(y if a["bias"] is None else c.builder.add("Add", [y, c.name(a["bias"])], name=n.name))


def _embedding(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Gather", [c.name(a["weight"]), c.name(a["indices"])], name=n.name, axis=0))


def _layer_norm(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    given = [c.name(a["input"]), c.name(a["weight"]), *([c.name(a["bias"])] if a["bias"] is not None else [])]
    axis = -len(a["normalized_shape"])
    return str(c.builder.add("LayerNormalization", given, name=n.name, axis=axis, epsilon=a["eps"]))


def _attention(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    """scaled_dot_product_attention of [(batch,) heads, tokens, d]."""
    scale = a["scale"] if a["scale"] is not None else 1.0 / math.sqrt(int(_value(a["query"]).shape[-1]))
    axes = c.builder.constant([0], "axes")
    names = [c.name(a[k]) for k in ("query", "key", "value")]
    flat = _value(a["query"]).dim() == 3
    names = [c.builder.add("Unsqueeze", [x, axes]) for x in names] if flat else names
    mask = [c.name(a["attn_mask"])] if a["attn_mask"] is not None else []
    y = c.builder.add("Attention", [*names, *mask], name=n.name, scale=scale, is_causal=int(a["is_causal"]))
    return str(c.builder.add("Squeeze", [y, axes]) if flat else y)


def _size(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    x, axis = n.args
    shape = c.builder.add("Shape", [c.name(x)], start=axis, end=axis + 1)  # type: ignore[operator]
    return str(c.builder.add("Squeeze", [shape, c.builder.constant([0], "axes")], name=n.name))


def _arange(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    ends = [a.get("start", 0), a["end"], a.get("step", 1) or 1]
    if _value(n).dtype != torch.int64:
        raise c.refuse(n, f"it counts in {_value(n).dtype}")
    names = [c.builder.constant(v, "number") if isinstance(v, int) else c.names[v] for v in ends]
    return str(c.builder.add("Range", names, name=n.name))


def _where(c: Context, n: fx.Node, a: dict[str, Any]) -> str:
    like = _value(n)
    return str(c.builder.add("Where", [c.name(n.args[0]), *(c.name(x, like) for x in n.args[1:])], name=n.name))


TABLE: dict[Any, Writer] = {
    aten.add.Tensor: _binary("Add"),
    aten.sub.Tensor: _binary("Sub"),
    aten.mul.Tensor: _binary("Mul"),
    aten.div.Tensor: _binary("Div"),
    aten.eq.Tensor: _binary("Equal"),
    aten.le.Tensor: _binary("LessOrEqual"),
    aten.lt.Tensor: _binary("Less"),
    aten.ge.Tensor: _binary("GreaterOrEqual"),
    aten.gt.Tensor: _binary("Greater"),
    aten.neg.default: _unary("Neg"),
    aten.exp.default: _unary("Exp"),
    aten.cos.default: _unary("Cos"),
    aten.sin.default: _unary("Sin"),
    aten.tanh.default: _unary("Tanh"),
    aten.sigmoid.default: _unary("Sigmoid"),
    aten.relu.default: _unary("Relu"),
    aten.sqrt.default: _unary("Sqrt"),
    aten.erf.default: _unary("Erf"),
    aten.abs.default: _unary("Abs"),
    aten.rsqrt.default: _rsqrt,
    aten.silu.default: _silu,
    aten.gelu.default: _gelu,
    aten.clamp.default: _clamp,
    aten.pow.Tensor_Scalar: _pow,
    aten.mean.dim: _mean,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.reshape.default: _reshape,
    aten.view.default: _reshape,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.chunk.default: _split,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.expand.default: _expand,
    operator.getitem: _getitem,
    aten.to.dtype: _to,
    aten._to_copy.default: _to,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.linear.default: _linear,
    aten.embedding.default: _embedding,
    aten.layer_norm.default: _layer_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.sym_size.int: _size,
    aten.arange.default: _arange,
    aten.arange.start_step: _arange,
    aten.where.self: _where,
}


def write_call(context: Context, node: fx.Node, more: dict[Any, Writer]) -> None:
    """Write one call by this table or ``more``. Raises LoweringError that names a call without a form."""
    writer = more.get(node.target) or TABLE.get(node.target)
    if writer is None:
        raise LoweringError(
            f"{node.target} has no ONNX form here", where=f"node {node.name}",
            fix="choose another pass with --after: later ones leave fewer kinds of operations",
        )  # fmt: skip
    context.names[node] = writer(context, node, full_arguments(node))
