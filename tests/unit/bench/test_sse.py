"""Splitting a byte stream into events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.sse import Events

DATA = st.lists(st.binary(max_size=20).map(lambda data: data.translate(None, b"\r\n")), min_size=1, max_size=3)


@given(st.lists(DATA, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 400), max_size=10))
def test_parts_of_any_size_give_the_same_events(events: list[list[bytes]], end: bytes, cuts: list[int]) -> None:
    """For every split, also between CR and LF, each event comes once, in order and whole."""
    text = b"".join(b"".join(b"data: " + line + end for line in lines) + end for lines in events)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader = Events()
    messages = [each for start, stop in pairwise(places) for each in reader.feed(text[start:stop])]
    assert messages == [b"\n".join(lines) for lines in events]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (b": ping\n\n", []),
        (b"event: message\nid: 3\nretry: 10\n\n", []),
        (b"data:tight\n\n", [b"tight"]),
        (b"data:  two\n\n", [b" two"]),
        (b"data: unfinished\n", []),
        (b": ping\ndata: a\n\ndata: [DONE]\n\n", [b"a", b"[DONE]"]),
    ],
)
def test_only_data_counts(text: bytes, events: list[bytes]) -> None:
    """Comments and other fields are ignored; one space after the colon is not data."""
    assert Events().feed(text) == events
