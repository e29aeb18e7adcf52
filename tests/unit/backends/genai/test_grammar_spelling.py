"""Texts in grammars are preserved, or rejected."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.genai.grammar_spelling import check_grammar, to_literals, write_choice
from shoal.errors import InvalidValue

LITERAL = re.compile(r'"((?:[^"\\\x00-\x1f]|\\["\\]|\\u00[0-9a-f]{2}(?="))*)"(?: |$)')
WRONG = re.compile(r"[\x80-\xff][0-9a-fA-F]")


@given(st.text() | st.text(alphabet='abß\xe9\x01\x7f\\"\n e9'))
def test_literals_say_the_text(text: str) -> None:
    """The literals join to the text, and none of them is one that the library misreads."""
    written, made, at = to_literals(text), "", 0
    while at < len(written):
        found = LITERAL.match(written, at)
        assert found is not None
        assert not WRONG.search(found[1])
        made += re.sub(r'\\(["\\]|u....)', lambda one: str(json.loads(f'"{one[0]}"')), found[1])
        at = found.end()
    assert made == text


def test_grammars() -> None:
    """A grammar that needs no change is left alone."""
    fine = 'root ::= "gr\xf6" "\xdf" "e" | "\u6771ea" | "caf\xe9"'
    assert check_grammar(fine) == fine
    with pytest.raises(InvalidValue, match="end the literal"):
        check_grammar('root ::= "gr\xf6\xdfe"')


def test_choices_share_their_beginnings() -> None:
    """Each result is one of the texts, in their order."""
    assert write_choice(["yes", 'n"o']) == '"yes" | "n\\"o"'
    assert write_choice(["0.25", "1", "0.5", "0", "0.25"]) == '"0" ("." ("25" | "5") | "") | "1"'
