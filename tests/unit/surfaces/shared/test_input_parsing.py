"""Inputs that mix, in whatever way they are written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidValue, RequestError, TooManyInputs, WrongType
from shoal.surfaces.openai.wire_embeddings import EmbeddingsInput
from shoal.surfaces.shared import input_parsing
from shoal.surfaces.shared.input_parsing import ImageReference
from shoal.surfaces.shared.wire_inputs import ImageLink, InputMessage, InputObject
from shoal.types import Image

DECODER = msgspec.json.Decoder(EmbeddingsInput)
LINK = st.text(min_size=1, max_size=5)
FORMS: list[tuple[str, Any]] = [
    ("", lambda link: link),
    (".image", lambda link: {"image": link}),
    (".image.url", lambda link: {"image": {"url": link}, "text": None}),
    (".image_url", lambda link: {"type": "image_url", "image_url": link}),
    (".image_url.url", lambda link: {"type": "input_image", "image_url": {"url": link, "detail": "low"}}),
]


@given(st.lists(st.tuples(st.sampled_from(FORMS), LINK), min_size=1, max_size=6))
def test_every_form_of_an_image_keeps_its_place(sent: list[tuple[tuple[str, Any], str]]) -> None:
    value = DECODER.decode(msgspec.json.encode([form(link) for (_, form), link in sent]))
    expected = [ImageReference(link, f"input[{at}]{where}") for at, ((where, _), link) in enumerate(sent)]
    assert input_parsing.parse_inputs(value, 6, "image") == expected
    assert input_parsing.parse_inputs(value, 6, ["image"] * len(sent)) == expected


VALUES = st.one_of(
    st.text(max_size=3),
    st.integers(0, 9),
    st.lists(st.integers(0, 9), max_size=2),
    st.builds(
        InputObject,
        type=st.sampled_from([None, "text", "image_url", "image"]),
        text=st.none() | st.text(max_size=2),
        image=st.none() | st.text(max_size=2) | st.builds(ImageLink, url=st.text(max_size=2)),
        image_url=st.none() | st.text(max_size=2),
    ),
)
KINDS = st.sampled_from(["text", "image"])


@given(st.lists(VALUES, max_size=4), st.none() | KINDS | st.lists(KINDS, max_size=4))
def test_whatever_is_sent_is_an_input_each_or_refused(value: list[Any], modality: Any) -> None:
    """Never an input more or less, never an empty text, never two kinds of text; or a refusal that names a field."""
    try:
        parsed = input_parsing.parse_inputs(value, 3, modality)
    except RequestError as error:
        assert error.param in {"input", "modality"}
        return
    bare = all(isinstance(each, int) for each in value)
    assert len(parsed) == (1 if bare else len(value)) <= 3
    assert all(parsed)
    assert len({type(each) for each in parsed} - {ImageReference}) <= 1
    assert input_parsing.has_images(parsed) == any(isinstance(each, ImageReference) for each in parsed)


def test_a_plain_list_is_not_copied() -> None:
    """Thousands of texts are looked at, and go on as they are."""
    texts = ["a", "b"]
    assert input_parsing.parse_inputs(texts, 2) is texts
    assert not input_parsing.has_images(input_parsing.parse_texts(texts, 2))
    with pytest.raises(TooManyInputs):
        input_parsing.parse_texts(texts, 1)


def test_a_long_conversation_is_refused_by_its_first_parts() -> None:
    parts = [InputObject(text="a"), InputObject(image="b"), InputObject()]
    with pytest.raises(InvalidValue, match="more than one"):
        input_parsing.parse_messages([InputMessage(content=parts), InputMessage(content=parts)])
    with pytest.raises(WrongType, match=r"messages\[1\].content\[0\]"):
        input_parsing.parse_messages([InputMessage(content=[]), InputMessage(content=parts[2:])])


def test_tokens_of_texts() -> None:
    assert input_parsing.count_text_tokens(["a", Image(b""), [1, 2]], [3, 50, 2]) == 5


@pytest.mark.parametrize(
    ("raw", "expected"), [(msgspec.UNSET, {}), (msgspec.Raw(b"null"), {}), (msgspec.Raw(b'{"a":"b"}'), {"a": "b"})]
)
def test_headers(raw: Any, expected: dict[str, str]) -> None:
    assert input_parsing.parse_headers(raw) == expected
