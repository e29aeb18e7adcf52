"""Python's literals to JSON, compared with Python's own reading of them."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pipelines.chat.tools.literals import arguments_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_python_literals_are_read_as_python_reads_them(arguments: dict[str, Any]) -> None:
    written = "(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")"
    arguments_text = arguments_json(written)
    assert arguments_text is not None
    assert json.loads(arguments_text) == as_json(arguments)


@pytest.mark.parametrize(
    "literal",
    [
        '"\\x41\\101\\u00e9\\U0001F30A\\t\\\\n\\\n"',
        "'\\d\\.\\q'",
        "'a' \"b\"",
        '"""three quotes"""',
        "1_000",
        "10_000",
        "+5",
        "-0",
        "0x1F",
        "0b101",
        "0o17",
        "1.",
        ".5",
        "-1e5",
        "1_0.5",
        "(1,)",
        "()",
        "[1, 2, ]",
        "{}",
        "{'a': {'b': ()}, }",
        " [\n1 ] ",
        "'東京 🌊'",
    ],
)
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:invalid escape sequence:SyntaxWarning")
def test_literals_are_parsed_as_in_python(literal: str) -> None:
    arguments_text = arguments_json(f"(a={literal})")
    assert arguments_text is not None
    assert json.loads(arguments_text) == {"a": as_json(ast.literal_eval(literal.strip()))}


@pytest.mark.parametrize(("written", "expected"), [("true", True), ("false", False), ("null", None)])
def test_json_words_are_known(written: str, expected: object) -> None:
    assert json.loads(arguments_json(f"(a={written})") or "") == {"a": expected}


@pytest.mark.parametrize("digits", ["9" * 100_000, "-1" + "0" * 5000 + ".5e-3"])
def test_numbers_keep_their_digits(digits: str) -> None:
    assert arguments_json(f"(a={digits})") == f'{{"a": {digits}}}'


def test_text_stays_readable_and_halves_of_pairs_are_escaped() -> None:
    assert arguments_json("(a='é', b='\\ud83c\\udf0a', c='\\ud800')") == (
        '{"a": "é", "b": "\\ud83c\\udf0a", "c": "\\ud800"}'
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "()x",
        "(a)",
        "(a=)",
        "(a=1",
        "(a=1 b=2)",
        "(,)",
        "(1=2)",
        "(a=1, a=2)",
        "(a=b)",
        "(a=b())",
        "(a=1+2)",
        "(a=1-2)",
        "(a=--1)",
        "(a=not 1)",
        "(a=1j)",
        "(a=007)",
        "(a=1__0)",
        "(a=+1e999)",
        "(a=0x)",
        "(a=+" + "9" * 5000 + ")",
        "(a=nan)",
        "(a={1, 2})",
        "(a={1: 2})",
        "(a={'b'})",
        "(a=[1)",
        "(a=f'x')",
        "(a=b'x')",
        "(a='x)",
        "(a='\\UFFFFFFFF')",
        "(a=...)",
        "(a=1; b=2)",
        "(*a)",
        "(a=" + "[" * 65 + "]" * 65 + ")",
        "(a=" + "(" * 100_000 + ")" * 100_000 + ")",
        "(a=" + "{'a':" * 100_000,
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert arguments_json(text) is None


def test_as_deep_as_the_limit() -> None:
    value: Any = json.loads(arguments_json("(a=" + "[" * 64 + "]" * 64 + ")") or "")["a"]
    for _ in range(63):
        (value,) = value
    assert value == []


@given(st.text(alphabet="([{}]),:='\"\\ \nab01.-e_xTrueNone", max_size=40))
def test_any_text_is_read_as_an_object_or_not_at_all(text: str) -> None:
    arguments_text = arguments_json(f"(a={text})")
    if arguments_text is not None:
        read = json.loads(arguments_text)
        assert isinstance(read, dict)
        assert "a" in read
