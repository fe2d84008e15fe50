"""Read a graph back from the text that ``print_graph`` writes; nothing in it is executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mmcompile.core.errors import ArtifactError
from mmcompile.core.graph import describe_value, infer_meta, set_parameter
from mmcompile.core.ops.define import OPS
from mmcompile.core.symbols import LARGEST, make_fake_mode

_ROOT = {"placeholder", "get_attr"}
_LINE = re.compile(r"(\w+) = ([\w.]+)(?:\((.*)\)| (\S+))")
_VALUE = re.compile(r"(\w+)\[(.*?)\]")
_SYMBOL = re.compile(r"(?<=[\[ ])[^\[\],]*[A-Za-z][^\[\],]*(?=[,\]])")
_PLAIN = {"getitem": operator.getitem} | {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg")
}
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}


def read_graph(text: str, *, where: str, symbols: Mapping[str, tuple[int, int]] | None = None) -> fx.GraphModule:
    """The graph of ``text`` with fake values.

    Args:
        where: file that errors name. symbols: smallest and largest value of sizes, by name; others are from 1 on.

    Weights are meta tensors under their names. Raises ArtifactError for a line that is none of ``print_graph``'s, an
    unknown operation, or a value of another shape or dtype than the text says.
    """
    return _Reader(where, dict(symbols or {})).read(text)


class _Reader:
    """The graph so far, its nodes and sizes by name, and the line that is being read."""

    def __init__(self, where: str, limits: dict[str, tuple[int, int]]) -> None:
        self.where, self.limits, self.line = where, limits, 0
        self.graph_module = fx.GraphModule(torch.nn.Module(), fx.Graph())
        self.graph = self.graph_module.graph
        self.nodes: dict[str, Any] = {}
        self.sizes: dict[str, Any] = {}

    def read(self, text: str) -> fx.GraphModule:
        lines = text.splitlines()
        shapes = [found[2] for line in lines if " = placeholder " in line for found in _VALUE.finditer(line)]
        names = dict.fromkeys(name for shape in shapes for name in re.findall(r"[A-Za-z_]\w*", shape))
        mode, self.sizes = make_fake_mode({name: self.limits.get(name, (1, LARGEST)) for name in names})
        self.graph_module.meta |= {"fake_mode": mode, "symbols": self.sizes}
        for self.line, line in enumerate(lines, start=1):
            code, _, comment = line.partition("    # ")
            if code.startswith("return "):
                self.graph.output(self._parse(code.removeprefix("return ")))
            else:
                self._add(code, comment)
        if not self.graph.find_nodes(op="output"):
            raise self._refuse("the graph has no end")
        self.graph.lint()
        self.graph_module.recompile()
        return self.graph_module

    def _refuse(self, what: str) -> ArtifactError:
        return ArtifactError(what, where=f"{self.where}:{self.line}", fix="build the artifact again")

    def _add(self, code: str, comment: str) -> None:
        found = _LINE.fullmatch(code)
        if found is None:
            raise self._refuse(f"no line of a graph: {code[:60]!r}")
        name, operation, given, target = found.groups()
        if operation in _ROOT:
            node = self.graph.create_node(operation, target, (), {}, name)
            node.meta["val"] = self._make_value(node, comment)
        else:
            args, kwargs = self._parse(f"call({given})")
            node = self.graph.create_node("call_function", self._find_target(operation), args, kwargs, name)
            try:
                infer_meta(self.graph_module, [node])
            except Exception as error:
                raise self._refuse(f"{operation} does not take these arguments") from error
        described = describe_value(node.meta["val"])
        stated, _, source = comment.partition("  ") if described else ("", "", comment)
        if _SYMBOL.sub("n", stated) != _SYMBOL.sub("n", described):  # a decode step has as many tokens as sequences
            raise self._refuse(f"{name} is {described}, the text says {stated}")
        node.meta["source"] = source
        self.nodes[name] = node

    def _make_value(self, node: fx.Node, comment: str) -> Any:
        """The fake value of an input; a meta tensor for a weight too."""
        found = _VALUE.match(comment)
        dtype = _find_dtype(found[1]) if found else None
        if found is None or dtype is None:
            raise self._refuse(f"{node.name} has no shape and dtype")
        shape = self._parse(f"({found[2]},)" if found[2] else "()")
        if node.op == "get_attr":
            set_parameter(self.graph_module, str(node.target), torch.empty(shape, dtype=dtype, device="meta"))
        with self.graph_module.meta["fake_mode"]:
            return torch.empty(shape, dtype=dtype)

    def _find_target(self, operation: str) -> Any:
        """The function behind a name of ``operation_name``: only aten and mm operations, and arithmetic of sizes."""
        family, _, rest = operation.partition(".")
        if family == "mm" and rest in OPS:
            return OPS[rest].handle
        if family == "aten" and rest.count(".") == 1:
            name, overload = rest.split(".")
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None and overload in packet.overloads():
                return getattr(packet, overload)
        if operation in _PLAIN:
            return _PLAIN[operation]
        raise self._refuse(f"unknown operation {operation}")

    def _parse(self, text: str) -> Any:
        try:
            return self._evaluate(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError):
            raise self._refuse(f"no arguments of a graph: {text[:60]!r}") from None

    def _evaluate(self, tree: ast.expr) -> Any:
        """The value of a literal, a name, a dtype, a list, a sum or product of sizes; ``call(...)`` gives arguments."""
        match tree:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.nodes or name in self.sizes or name in _NUMBERS:
                return self.nodes.get(name, self.sizes.get(name, _NUMBERS.get(name)))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(getattr(torch, name, None), _KINDS):
                return getattr(torch, name)
            case ast.List(elts=items):
                return [self._evaluate(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._evaluate(item) for item in items)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._evaluate(left), self._evaluate(right))
            case ast.Call(func=ast.Name(id="call"), args=args, keywords=keywords):
                return tuple(map(self._evaluate, args)), {str(k.arg): self._evaluate(k.value) for k in keywords}
        raise ValueError(ast.dump(tree))


_KINDS = (torch.dtype, torch.layout, torch.memory_format)


def _find_dtype(short: str) -> torch.dtype | None:
    """Inverse of the abbreviation of ``describe_value``: "bf16", "f8_e4m3fn", "int32"."""
    name = re.sub(r"^(b?)f(?=\d)", r"\1float", short)
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None
