"""Bounds of a guide's text, checked before anything is compiled."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.genai import guide_bounds
from shoal.errors import InvalidValue
from shoal.types import Guide

BOMB = "((a{1,1000}){1,1000}){1,1000}"


def refusal(kind: Any, value: str | dict[str, Any]) -> str:
    """Return why a guide is rejected, or "" if it passes."""
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        guide_bounds.check(Guide(kind=kind, value=text, field="asked"))
    except InvalidValue as error:
        assert error.param == "asked"
        return error.message
    return ""


class TestExpressions:
    @pytest.mark.parametrize(
        "text",
        [
            BOMB,
            r"(?:\)(a{1,200}[)\]]){1,200}){1}",
            "a{200}{200}",
            "(x|(y|z{1,101}){100,}){2}",
            "((a{101}){ 1 , 100 })",
            ".{1,100001}",
            ".{100001,}",
            "a{1," + "9" * 5000 + "}",
            "(" * 200 + ")" * 200,
        ],
    )
    def test_too_large(self, text: str) -> None:
        """Nested repeats multiply, also after escapes and classes."""
        assert refusal("regex", text)

    @pytest.mark.parametrize(
        "text",
        [
            r"[\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63}){1,4}",
            r"\d{4}-\d{2}-\d{2}",
            "(a{1,100}){1,100}",
            ".{1,100000}",
            "a{1,9000}b{1,9000}c{1,9000}",  # side by side
            r"(\(a{1,1000}\)){1,9}",
            "[(a{1,1000}]{1,1000}",
            r"\{1000}{1000}x{,}",
            "((a*)*)*",
            "[0-9",
            ")){9}",
            "",
        ],
    )
    def test_ordinary(self, text: str) -> None:
        """Ordinary and invalid expressions pass: the library reports the invalid ones."""
        assert not refusal("regex", text)

    @given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.sampled_from(["a", r"\{", "[)(]", "(?:b|c)"]))
    def test_the_product_decides(self, repeats: list[int], atom: str) -> None:
        """Nested repeats are rejected exactly above the limit, however they are written."""
        text, product = atom, 1
        for number in repeats:
            text, product = f"({text}{{1,{number}}})", product * number
        assert bool(refusal("regex", text)) == (product > guide_bounds.MAX_NESTED_REPEATS)

    @given(st.text(alphabet="(){}[]\\,a019*?+|", max_size=60))
    def test_any_text(self, text: str) -> None:
        """Any text passes or is rejected."""
        assert re.search("maximum|nested|^$", refusal("regex", text))


class TestGrammars:
    @pytest.mark.parametrize(
        "text",
        [
            'root ::= (("a"{1,1000}){1,1000}){1,1000}',
            'root ::= a{100}\na ::= b{100}\nb ::= "x"{2}',
            'b ::= "x"{2} # {1}\na ::= b{100}\nroot ::= a{100}',
            'root ::= [)(]{500} ("(" [a-z]{500}){500}',
            "\n".join(f"r{number} ::= r{number + 1}" for number in range(5000)),
        ],
    )
    def test_too_large(self, text: str) -> None:
        """References to rules count too."""
        assert refusal("grammar", text)

    @pytest.mark.parametrize(
        "text",
        [
            'root ::= root "a" | "a"',
            "root ::= a\na ::= b\nb ::= a{10} b",
            'root ::= "(a{1,1000}){1,1000}" | "b"{1,1000}',
            'root ::= x{50}\nx ::= "a"{50}',
            "no rule at all {9}{9}",
            "",
        ],
    )
    def test_ordinary(self, text: str) -> None:
        """Recursive rules pass: the library checks them."""
        assert not refusal("grammar", text)


class TestSchemas:
    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "string", "pattern": BOMB},
            {"properties": {"a": {"items": {"anyOf": [{"pattern": BOMB}]}}}},
            {"patternProperties": {BOMB: {}}},
            {"maxLength": 10**9},
            {"items": {"maxItems": 1e300}},
            {"minItems": 10_001},
            {"minLength": 10_001},
            {"minProperties": 10**6},
            {"enum": ["a"] * 10_001},
            "[" * 5000 + "]" * 5000,
            '{"items":' * 101 + "{}" + "}" * 101,
            "[" * 100_000,
        ],
    )
    def test_too_large(self, schema: Any) -> None:
        """Limits apply at any depth; the message names the next step."""
        assert re.search("lower it|repeat less|fewer|flatten", refusal("json_schema", schema))

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "object", "properties": {"pattern": {"type": "string"}, "maxLength": {"maxLength": 65535}}},
            {"pattern": 7, "minItems": "x", "patternProperties": []},
            {"enum": list(range(5000))},
            {"maximum": 10**30},
            "{",
            "7",
        ],
    )
    def test_ordinary(self, schema: Any) -> None:
        """Properties may have the names of limits."""
        assert not refusal("json_schema", schema)

    def test_tags(self) -> None:
        """Expressions, grammars and schemas in a structural tag are checked like separate guides."""
        for content in (
            {"type": "regex", "pattern": BOMB},
            {"type": "grammar", "grammar": 'root ::= ("a"{999}){999}'},
            {"type": "json_schema", "json_schema": {"maxLength": 10**9}},
        ):
            tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
            assert refusal("structural_tag", {"type": "structural_tag", "format": tag})

    def test_other_kinds(self) -> None:
        """Choices are literal texts, not expressions."""
        assert not refusal("choice", json.dumps([BOMB]))
        assert not refusal("json_object", "")
