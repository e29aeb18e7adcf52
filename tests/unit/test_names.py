"""The grammar of served names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.names import NAME, PART, RESERVED, is_name, is_part

PARTS = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}", fullmatch=True)
HOSTILE = [
    "", "..", ".", ".hidden", "a\0b", "a b", "a%2eb", "a\\b", "caf\u00e9", "\u0430bc", "a\u2215b", "\uff41", "a\n",
    "\na", "a:b", "a@b", "a+b", "a~b", "a" * 97,
]  # fmt: skip


@given(PARTS, PARTS)
def test_one_part_or_two(one: str, other: str) -> None:
    """Three parts are invalid."""
    assert is_part(one)
    assert is_name(one)
    assert is_name(f"{one}/{other}")
    assert not is_part(f"{one}/{other}")
    assert not is_name(f"{one}/{other}/{one}")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_parts(text: str) -> None:
    """Traversal, lookalikes, control characters and overlong parts, alone and on either side."""
    assert not is_part(text)
    assert not any(is_name(name) for name in (text, f"{text}/a", f"a/{text}", f"/{text}", f"{text}/"))


@given(st.text(max_size=12) | st.from_regex(r"[a-zA-Z0-9._/-]{1,12}", fullmatch=True))
def test_the_rule_matches_a_second_implementation(text: str) -> None:
    """At most one "/"; each side has valid characters, a valid length and a valid first character."""
    allowed = re.compile(r"[A-Za-z0-9._-]*")
    parts = text.split("/")
    good = [1 <= len(part) <= 96 and not part.startswith(".") and bool(allowed.fullmatch(part)) for part in parts]
    assert is_name(text) == (len(parts) <= 2 and all(good))


def test_patterns_can_be_embedded_in_others() -> None:
    """The text after a pattern does not change its match."""
    assert re.fullmatch(rf"{NAME}@x", "org/name@x")
    assert re.fullmatch(rf"{PART}@x", "org/name@x") is None


def test_reserved_names_match_the_grammar() -> None:
    """Other names need no reservation."""
    assert RESERVED
    assert all(map(is_name, RESERVED))
