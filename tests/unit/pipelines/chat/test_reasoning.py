"""Reasoning and answer are separated, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pipelines.chat.reasoning import ReasoningSplit


def split(fragments: list[str], *, opened: bool = False) -> tuple[str, str]:
    """Return (reasoning, text) of an answer."""
    splitter = ReasoningSplit(opened)
    pieces = [piece for fragment in fragments for piece in splitter.push(fragment)] + splitter.flush()
    assert all(text for _, text in pieces)
    joined = {kind: "".join(text for k, text in pieces if k == kind) for kind in ("reasoning", "text")}
    return joined["reasoning"], joined["text"]


GOLDEN = [
    ("Hello.", False, ("", "Hello.")),
    ("", False, ("", "")),
    ("<think>a</think>b", False, ("a", "b")),
    ("\n <think>\n\na\nb\n</think>\n\nAnswer\n", False, ("a\nb\n", "Answer\n")),
    ("<think>\n\n</think>\n\nAnswer", False, ("", "Answer")),
    ("<think>\r\na</think>\r\nb", False, ("a", "b")),
    ("<think>never closed", False, ("never closed", "")),
    ("<think>a</thi", False, ("a</thi", "")),
    ("<think>a < b </think>c </think> <think>d</think>", False, ("a < b ", "c </think> <think>d</think>")),
    ("<thi", False, ("", "<thi")),
    ("  <thing>", False, ("", "  <thing>")),
    ("\n\n", False, ("", "\n\n")),
    ("Use <think>x</think> tags.", False, ("", "Use <think>x</think> tags.")),
    ("</think>a", False, ("", "</think>a")),
    (" " * 65 + "<think>a</think>b", False, ("", " " * 65 + "<think>a</think>b")),
    (" " * 64 + "<think>a</think>b", False, ("a", "b")),
    ("a</think>\nb", True, ("a", "b")),
    ("\n\na</think>b", True, ("a", "b")),
    ("<think>\na</think>b", True, ("a", "b")),
    ("</think>b", True, ("", "b")),
    ("all of it", True, ("all of it", "")),
    ("a <think> b </think>c", True, ("a <think> b ", "c")),
    ("<thi", True, ("<thi", "")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), GOLDEN)
def test_whole_and_character_by_character(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split([text], opened=opened) == expected
    assert split(list(text), opened=opened) == expected


PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "\n", " ", "a", "é", "<", ">", "\r\n", "word "]),
    max_size=14,
)


@given(PARTS, st.booleans(), st.data())
def test_the_same_however_it_is_cut(parts: list[str], opened: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    fragments = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(fragments, opened=opened) == split([text], opened=opened)


@given(PARTS)
def test_nothing_but_tags_blanks_and_line_ends_is_left_out(parts: list[str]) -> None:
    reasoning, text = split(parts)
    content = "".join(reasoning.split()) + "".join(text.split())
    given_text = "".join("".join(parts).split())
    assert content in (given_text, given_text.replace("<think>", "", 1), _without_tags(given_text))


def _without_tags(text: str) -> str:
    return text.replace("<think>", "", 1).replace("</think>", "", 1)


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    splitter = ReasoningSplit()
    assert splitter.push("<think>Let") == [("reasoning", "Let")]
    assert splitter.push(" me see</t") == [("reasoning", " me see")]
    assert splitter.push("able></think>") == [("reasoning", "</table>")]
    assert splitter.push("\n") == []
    assert splitter.push("\nSo") == [("text", "So")]
    assert splitter.push(" be it<") == [("text", " be it<")]
    assert splitter.flush() == []


def test_one_push_may_hold_all() -> None:
    assert ReasoningSplit().push("<think>a</think>b") == [("reasoning", "a"), ("text", "b")]


def test_held_back_text_is_never_longer_than_a_tag() -> None:
    splitter = ReasoningSplit(opened=True)
    length = sum(len(text) for _ in range(5000) for _, text in splitter.push("</thin"))
    assert length >= 30000 - len("</think>")
