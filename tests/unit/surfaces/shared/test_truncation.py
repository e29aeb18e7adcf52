"""What dialects say of texts that are too long, and of one thing by two names."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.protocols import ModelFacts
from shoal.core.registry import ModelCard
from shoal.errors import InvalidValue, Unsupported
from shoal.surfaces.shared.truncation import (
    check_token_limit,
    fits,
    merge_fields,
    merge_truncate_fields,
    parse_truncation,
)


def card(max_tokens: int | None, *, known: bool = True) -> ModelCard:
    facts = ModelFacts(source="s", backend="b", tasks=("embed",), max_input_tokens=max_tokens)
    return ModelCard("m", (), "ready", 0, facts if known else None, None, ())


@pytest.mark.parametrize(
    ("value", "side", "expected"),
    [
        (None, None, (None, "right")),
        (None, "left", (None, "left")),
        (True, None, (True, "right")),
        (True, "left", (True, "left")),
        (False, None, (False, "right")),
        ("NONE", None, (False, "right")),
        ("END", None, (True, "right")),
        ("START", "right", (True, "left")),
    ],
)
def test_words(value: Any, side: str | None, expected: Any) -> None:
    """A flag and a direction; a word for the start wins over a side."""
    assert parse_truncation(value, side) == expected


def test_limits() -> None:
    """A limit is only what the model does anyway; below that, or where nobody knows, it is refused by name."""
    assert check_token_limit(card(512), None, "n") is None
    assert check_token_limit(card(512), -1, "n") is check_token_limit(card(512), 512, "n") is True
    assert check_token_limit(card(None), -1, "n") is True
    assert not fits(card(512), 511)
    with pytest.raises(Unsupported, match=r"'n' cannot be less than the model's own length \(512\)") as caught:
        check_token_limit(card(512), 511, "n")
    assert caught.value.param == "n"
    for unknown in (card(None), card(512, known=False)):
        with pytest.raises(Unsupported, match="own length: omit it"):
            check_token_limit(unknown, 4096, "n")


def test_two_names_for_one_thing() -> None:
    """None is not said; what is said twice must be the same."""
    assert merge_fields(a=None, b=None) is None
    assert merge_fields(a=None, b=False) is False
    assert merge_fields(a=3, b=3, c=None) == 3
    with pytest.raises(InvalidValue, match="'a' and 'c' are aliases with different values") as caught:
        merge_fields(a=1, b=None, c=2)
    assert caught.value.param == "a"


@pytest.mark.parametrize(
    ("truncate", "truncation", "expected"),
    [
        (None, None, None),
        (None, False, False),
        ("START", None, "START"),
        ("START", True, "START"),
        ("NONE", False, "NONE"),
        (False, False, False),
        (True, True, True),
    ],
)
def test_a_word_and_a_flag(truncate: Any, truncation: bool | None, expected: Any) -> None:
    """The word says more than a flag that agrees with it."""
    assert merge_truncate_fields(truncate, truncation) == expected


@pytest.mark.parametrize(("truncate", "truncation"), [("END", False), ("NONE", True), (True, False), (False, True)])
def test_a_word_and_a_flag_that_differ(truncate: Any, truncation: bool) -> None:
    """Are refused."""
    with pytest.raises(InvalidValue, match="'truncate' and 'truncation' are aliases with different values"):
        merge_truncate_fields(truncate, truncation)
