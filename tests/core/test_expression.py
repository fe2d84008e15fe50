"""Integer expressions: values, symbols, refusals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import ArtifactError
from mmcompile.core.expression import evaluate, evaluate_shape, find_symbols, multiply

SIZES = st.integers(1, 10_000)


@given(tokens=SIZES, batch=SIZES, divisor=st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_agrees_with_python(tokens, batch, divisor):
    symbols = {"tokens": tokens, "batch": batch}
    cases = {
        f"cdiv(tokens, {divisor}) * 9": (tokens + divisor - 1) // divisor * 9,
        f"(tokens + batch) % {divisor}": (tokens + batch) % divisor,
        f"((tokens + {divisor - 1})//{divisor})": -(-tokens // divisor),  # as sympy prints CeilDiv
        f"Mod(tokens, {divisor}) - batch": tokens % divisor - batch,
        "min(tokens, batch) + Max(1, tokens, batch)": min(tokens, batch) + max(tokens, batch),
        "-(-tokens)": tokens,
        "batch + 1": batch + 1,
    }
    assert {text: evaluate(text, symbols) for text in cases} == cases


@given(factors=st.lists(st.one_of(st.integers(0, 50), st.sampled_from(["tokens", "batch + 1", "cdiv(tokens, 3)"]))))
@settings(max_examples=50, deadline=None)
def test_multiply_keeps_the_value(factors):
    symbols = {"tokens": 7, "batch": 3}
    want = 1
    for factor in factors:
        want *= evaluate(factor, symbols)
    assert evaluate(multiply(*factors), symbols) == want


def test_multiply_folds_integers():
    assert multiply("tokens", 3, 4) == "tokens * 12"
    assert multiply("tokens", 1) == "tokens"
    assert multiply("tokens", 0) == 0
    assert multiply() == 1


@pytest.mark.parametrize(
    "text",
    [
        "tokens / 2", "tokens ** 2", "1.5", "True", "'a'", "pages", "cdiv(tokens)", "min(tokens)", "abs(tokens)",
        "min(tokens, 2, key=3)", "cdiv(1, 2, 3)", "tokens if 1 else 2", "__import__('os')", "tokens.real", "tokens[0]",
        "", "tokens +", "1; 2", "tokens\0",
    ],
)  # fmt: skip
def test_refuses_everything_else(text):
    with pytest.raises(ArtifactError):
        evaluate(text, {"tokens": 5})


def test_refusal_names_the_symbols():
    with pytest.raises(ArtifactError, match="'pages' in the expression 'pages \\* 2'.*symbols batch, tokens"):
        evaluate("pages * 2", {"tokens": 1, "batch": 1})


def test_division_by_zero_is_an_artifact_error():
    for text in ("1 // tokens", "1 % tokens", "cdiv(1, tokens)", "Mod(1, tokens)"):
        with pytest.raises(ArtifactError, match="divides by zero.*tokens=0"):
            evaluate(text, {"tokens": 0})


def test_find_symbols_leaves_functions_out():
    assert find_symbols("cdiv(tokens, 16) * min(batch, Max(pages, 1))") == {"tokens", "batch", "pages"}
    assert find_symbols(12) == set()


def test_evaluate_shape():
    assert evaluate_shape(("tokens", 4, "tokens * 2"), {"tokens": 3}) == (3, 4, 6)
