"""Stop texts, compared with a search in the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pipelines.chat.stops import StopTexts
from tests.unit.pipelines.chat.chat_kit import PLACES, cut


def reference(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    matches = [(at, len(stop)) for stop in stops if stop and (at := text.find(stop)) >= 0]
    if not matches:
        return text, False
    at, size = min(matches)
    return text[: at + size if include else at], True


def run(stops: StopTexts, pieces: list[str]) -> tuple[str, bool]:
    released = ""
    for piece in pieces:
        text, hit = stops.push(piece)
        released += text
        if hit:
            return released, True
    text, hit = stops.flush()
    return released + text, hit


@given(
    text=st.text(alphabet="ab\n東", max_size=24),
    stops=st.lists(st.text(alphabet="ab\n東", max_size=5), max_size=4),
    places=PLACES,
    include=st.booleans(),
)
def test_pieces_give_the_result_of_a_search_in_the_whole_text(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    expected = reference(text, stops, include)
    for pieces in (cut(text, places), list(text), [text]):
        searched = StopTexts(stops, include=include)
        assert run(searched, pieces) == expected
        assert (searched.found != "") == expected[1]
        assert searched.found in ("", *stops)


@given(text=st.text(alphabet="abc", max_size=24), stops=st.lists(st.text(alphabet="abc", min_size=1), min_size=1))
def test_no_more_is_kept_back_than_could_be_the_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    stop_texts = StopTexts(stops)
    released, hit = stop_texts.push(text)
    rest = text[len(released) :]
    if not hit and rest:
        assert any(stop.startswith(rest) for stop in stops if len(stop) > len(rest))


def test_a_longer_stop_that_began_before_is_waited_for() -> None:
    assert StopTexts(["abcd", "c"]).push("xabc") == ("x", False)
    assert run(StopTexts(["abcd", "c"]), ["xabc", "d"]) == ("x", True)
    assert run(StopTexts(["abcd", "c"]), ["xabc", "e"]) == ("xab", True)
    assert run(StopTexts(["abcd", "c"]), ["xabc"]) == ("xab", True)


@pytest.mark.parametrize("include", [True, False])
def test_the_stop_itself_is_passed_on_only_on_request(include: bool) -> None:
    assert run(StopTexts(["\n\n"], include=include), ["one\n", "\ntwo"]) == ("one\n\n" if include else "one", True)


def test_without_stops_everything_passes() -> None:
    assert StopTexts([]).push("abc") == StopTexts([""]).push("abc") == ("abc", False)
    assert StopTexts([]).flush() == ("", False)


class Letters(str):
    """A text that counts reads of its characters."""

    looks = 0

    def __getitem__(self, at: Any) -> str:
        Letters.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("letter", ["a", "b"])
def test_a_long_stop_is_looked_at_letter_by_letter(letter: str) -> None:
    """Whatever the stop text's pattern: a few reads for each character of the stop text and the answer."""
    long, Letters.looks = 4_000, 0
    stops = StopTexts([Letters("a" * long + "b")])
    released = "".join(stops.push(piece)[0] for _ in range(long // 8) for piece in ("aaaa", "aaa" + letter))
    assert Letters.looks < 8 * long
    assert released + stops.flush()[0] == ("aaaaaaa" + letter) * (long // 8)


def test_released_text_starts_no_stop() -> None:
    stops = StopTexts(["ab", "abc\n"])
    assert stops.push("xa") == ("x", False)
    assert stops.flush() == ("a", False)
    assert stops.push("b") == ("b", False)
