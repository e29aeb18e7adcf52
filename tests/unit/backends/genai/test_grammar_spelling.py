"""Texts in grammars come out as they are, or are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.genai.grammar_spelling import check_grammar, respell_schema, to_literals
from shoal.errors import InvalidValue

LITERAL = re.compile(r'"((?:[^"\\\x00-\x1f]|\\["\\]|\\u00[0-9a-f]{2}(?="))*)"(?: |$)')
WRONG = re.compile(r"[\x80-\xff][0-9a-fA-F]")


@given(st.text() | st.text(alphabet='abß\xe9\x01\x7f\\"\n e9'))
def test_literals_say_the_text(text: str) -> None:
    """Read one after the other they are the text, and none of them is one that is misread."""
    written, made, at = to_literals(text), "", 0
    while at < len(written):
        found = LITERAL.match(written, at)
        assert found is not None
        assert not WRONG.search(found[1])
        made += re.sub(r'\\(["\\]|u....)', lambda one: str(json.loads(f'"{one[0]}"')), found[1])
        at = found.end()
    assert made == text


def test_grammars() -> None:
    """One that is read as it stands is left alone."""
    fine = 'root ::= "gr\xf6" "\xdf" "e" | "\u6771ea" | "caf\xe9"'
    assert check_grammar(fine) == fine
    with pytest.raises(InvalidValue, match="end the literal"):
        check_grammar('root ::= "gr\xf6\xdfe"')


@pytest.mark.parametrize(
    "fine",
    [
        '{"type":  "object"}',
        '{"enum": ["\u6771ea", "caf\xe9"]}',
        '{"properties": {"na\xefve": {}}}',
        "{",
        '{"description": "l\u0027ann\xe9e',
    ],
)
def test_schemas_without_such_letters_stay_as_they_are(fine: str) -> None:
    """To the letter, also those that are none."""
    assert respell_schema(fine) == fine


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"const": "ann\xe9e"}, {"anyOf": [{"type": "string", "pattern": "^ann\xe9e$"}]}),
        (
            {"type": "string", "enum": ["ja", "gr\xf6\xdfe (a+b)?", 5]},
            {
                "anyOf": [
                    {"const": "ja"},
                    {"type": "string", "pattern": "^gr\xf6\xdfe \\(a\\+b\\)\\?$"},
                    {"const": 5},
                ]
            },
        ),
        ({"description": "l\u0027ann\xe9e", "type": "string"}, {"description": "l\u0027ann\xe9e", "type": "string"}),
    ],
)
def test_constants_become_expressions(given: dict[str, Any], made: dict[str, Any]) -> None:
    """However deep they are, and however their JSON is escaped; descriptions are never written."""
    for ascii_only in (True, False):
        text = json.dumps({"items": [given]}, ensure_ascii=ascii_only)
        assert json.loads(respell_schema(text)) == {"items": [made]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": {"ann\xe9e": {}}},
        {"items": {"enum": ['"gr\xf6\xdfe"']}},
        {"const": "ann\xe9e\n"},
        {"format": {"type": "const_string", "value": "ann\xe9e"}},
        {"format": {"begin": "\xe9e", "end": "x"}},
        {"format": {"triggers": ["x", "\xe9a"]}},
    ],
)
def test_what_would_come_out_wrong(wrong: dict[str, Any]) -> None:
    """It is refused, and named."""
    with pytest.raises(InvalidValue, match="would come out wrong"):
        respell_schema(json.dumps(wrong))
