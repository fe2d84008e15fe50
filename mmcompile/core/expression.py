"""Integer expressions over symbols ("tokens", "cdiv(tokens, 16) * 9"): the shapes and grids of a plan."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

from mmcompile.core.errors import ArtifactError

Expression = int | str

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "cdiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
    "Max": max,
    "Min": min,
}


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ArtifactError(f"{text!r} is not an integer expression", fix="rebuild the artifact") from None


def _walk(node: ast.expr, symbols: Mapping[str, int], text: str) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and node.id in symbols:
        return symbols[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_walk(node.left, symbols, text), _walk(node.right, symbols, text))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_walk(node.operand, symbols, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_walk(a, symbols, text) for a in node.args))
    raise ArtifactError(
        f"cannot evaluate {ast.unparse(node)!r} in the expression {text!r}",
        fix=f"use integers, + - * // %, cdiv, min, max and the symbols {', '.join(sorted(symbols)) or '(none)'}",
    )


def evaluate(expression: Expression, symbols: Mapping[str, int]) -> int:
    """Value of an expression for the given symbols; ArtifactError on anything but the integer forms above."""
    return expression if isinstance(expression, int) else _walk(_parse(expression), symbols, expression)


def evaluate_shape(shape: tuple[Expression, ...], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluate every dimension."""
    return tuple(evaluate(dimension, symbols) for dimension in shape)


def find_symbols(expression: Expression) -> set[str]:
    """Names that occur in an expression, functions left out."""
    if isinstance(expression, int):
        return set()
    names = {n.id for n in ast.walk(_parse(expression)) if isinstance(n, ast.Name)}
    return names - set(_FUNCTIONS)


def multiply(*factors: Expression) -> Expression:
    """Product as an expression, integers folded: multiply("tokens", 3, 4) == "tokens * 12"."""
    number, symbols = 1, []
    for factor in factors:
        if isinstance(factor, int):
            number *= factor
        else:
            symbols.append(factor if factor.isidentifier() else f"({factor})")
    if not symbols or number == 0:
        return number
    text = " * ".join(symbols)
    return f"{text} * {number}" if number != 1 else text
