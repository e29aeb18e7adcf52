"""Distinct texts of exact length, and the requests built from them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.texts import LIMIT, PATHS, WORDS, Bodies, Surface, Texts


def test_words_are_distinct_and_plain() -> None:
    """256 different lower-case words, so that numbers give distinct starts."""
    assert len(set(WORDS)) == len(WORDS) == 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@given(st.integers(0, LIMIT - 1), st.integers(0, LIMIT - 1))
def test_two_numbers_have_two_texts(first: int, second: int) -> None:
    """Different numbers never share a text, over the whole range."""
    assert (_TEXTS.text(first) == _TEXTS.text(second)) is (first == second)


@pytest.mark.parametrize("tokens", [5, 16, 100, 500])
def test_a_text_has_two_words_fewer_than_tokens(tokens: int) -> None:
    """The length includes the two special tokens."""
    assert {len(text.split()) for text in Texts(tokens).take(50)} == {tokens - 2}


def test_texts_never_repeat_and_seeds_differ() -> None:
    """Texts of one generator are all new; another seed gives others."""
    texts = Texts(16, seed=1)
    first, second = texts.take(3000), texts.take(3000)
    assert len(set(first) | set(second)) == 6000
    assert Texts(16, seed=1).take(3000) == first
    assert set(Texts(16, seed=2).take(3000)) != set(first)


def test_too_short_texts_are_refused() -> None:
    """Fewer than five tokens cannot encode a number and are refused."""
    with pytest.raises(ValueError, match="at least 5"):
        Texts(4)


@pytest.mark.parametrize(
    ("surface", "count", "expected"),
    [
        ("openai", 1, {"model": 'a"b', "input": "one text", "encoding_format": "base64"}),
        ("openai", 2, {"model": 'a"b', "input": ["one text", "two"], "encoding_format": "base64"}),
        ("tei", 1, {"inputs": "one text"}),
        ("tei", 2, {"inputs": ["one text", "two"]}),
        ("embedding", 2, [{"query": "one text"}, {"query": "two"}]),
    ],
)
def test_bodies_are_the_surface_s_json(surface: Surface, count: int, expected: Any) -> None:
    """Each surface has its own body format and path, with an exact content-length."""
    request = Bodies(surface, 'a"b', "base64", "h:1").request(["one text", "two"][:count])
    head, _, body = request.partition(b"\r\n\r\n")
    assert json.loads(body) == expected
    assert head.startswith(f"POST {PATHS[surface]} HTTP/1.1\r\n".encode())
    assert f"content-length: {len(body)}".encode() in head


def test_extra_headers_reach_the_request() -> None:
    """A key is sent as its header line."""
    token = base64.b64encode(b"k").decode()
    request = Bodies("tei", "", "float", "h:1", f"authorization: Bearer {token}\r\n").request(["x"])
    assert f"\r\nauthorization: Bearer {token}\r\n".encode() in request


_TEXTS = Texts(16)
