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
# The capitalised names are how sympy prints its own functions.
_EXTREMES: dict[str, Callable[..., int]] = {"min": min, "max": max, "Min": min, "Max": max}
_DIVISIONS: dict[str, Callable[[int, int], int]] = {
    "cdiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise ArtifactError(f"{text!r} is not an integer expression", fix="rebuild the artifact") from None


def _walk(node: ast.expr, symbols: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return value
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_walk(operand, symbols, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_walk(left, symbols, text), _walk(right, symbols, text))
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _DIVISIONS:
            return _DIVISIONS[name](_walk(left, symbols, text), _walk(right, symbols, text))
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as values, keywords=[]) if name in _EXTREMES:
            return _EXTREMES[name](_walk(value, symbols, text) for value in values)
    raise ArtifactError(
        f"cannot evaluate {ast.unparse(node)!r} in the expression {text!r}",
        fix=f"use integers, + - * // %, cdiv, min, max and the symbols {', '.join(sorted(symbols)) or '(none)'}",
    )


def evaluate(expression: Expression, symbols: Mapping[str, int]) -> int:
    """Value of an expression for the given symbols.

    Raises ArtifactError for anything but the integer forms above, an unknown symbol or a division by zero.
    """
    if isinstance(expression, int):
        return expression
    try:
        return _walk(_parse(expression), symbols, expression)
    except ZeroDivisionError:
        known = ", ".join(f"{name}={value}" for name, value in sorted(symbols.items()))
        raise ArtifactError(f"the expression {expression!r} divides by zero", where=known) from None


def evaluate_shape(shape: tuple[Expression, ...], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluate every dimension."""
    return tuple(evaluate(dimension, symbols) for dimension in shape)


def find_symbols(expression: Expression) -> set[str]:
    """Names that occur in an expression, functions left out."""
    if isinstance(expression, int):
        return set()
    names = {n.id for n in ast.walk(_parse(expression)) if isinstance(n, ast.Name)}
    return names - set(_EXTREMES) - set(_DIVISIONS)


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
