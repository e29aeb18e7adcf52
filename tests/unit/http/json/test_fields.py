"""Bodies with several long lists, and lists of objects: decoded in turns as if it were at once."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import Malformed, WrongType
from shoal.http.json import decoder
from shoal.http.json.fields import FieldsDecoder
from shoal.http.json.lists import ListDecoder
from shoal.http.json.objects import MAX_NESTED, STEP, find_object_end


class Inner(msgspec.Struct):
    text: str


class Both(msgspec.Struct, kw_only=True):
    left: list[str] | None = None
    right: list[str | Inner] | None = None
    other: int = 0


FIELDS = FieldsDecoder(Both, "test", ("left", "right"), 4)
LONG = "x" * decoder.LARGE
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES), st.binary(max_size=4))
async def test_where_an_object_ends(value: dict[str, Any], behind: bytes) -> None:
    """Behind its own brace, whatever is inside of it and whatever follows; escaped or not."""
    for spelled in (orjson.dumps(value), orjson.dumps(value, option=orjson.OPT_INDENT_2), msgspec.json.encode(value)):
        assert await find_object_end(memoryview(spelled + b"," + behind), 0, "a") == len(spelled)


@pytest.mark.parametrize("filler", [b"\\\\", b"\\u00e9", "é".encode(), b'\\"', b"{}"])
@pytest.mark.parametrize("shift", range(3))
async def test_a_text_longer_than_a_step(filler: bytes, shift: int) -> None:
    """Where a step ends inside of an escape, nothing is lost."""
    body = b'{"a":"' + b"y" * shift + filler * (STEP // len(filler) + 9) + b'"}'
    assert await find_object_end(memoryview(body + b"]"), 0, "a") == len(body)


async def test_too_many_objects() -> None:
    """Each costs an object in memory: more than any text has parts are refused."""
    body = b'{"a":[' + b",".join([b"{}"] * (MAX_NESTED + 1)) + b"]}"
    with pytest.raises(msgspec.ValidationError, match=r"1024 objects - at `\$\.right\[3\]`"):
        await find_object_end(memoryview(body), 0, "right[3]")


@settings(max_examples=40)
@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4), st.integers())
async def test_in_turns_as_at_once(left: list[str], right: list[str], other: int) -> None:
    """A large body says what a small one says."""
    other %= 1000
    mixed = [each if at % 2 else {"text": each} for at, each in enumerate(right)]
    small = orjson.dumps({"left": left, "right": mixed, "other": other})
    large = orjson.dumps({"left": left, "right": mixed, "other": other, "unknown": LONG})
    wanted = msgspec.json.decode(small, type=Both)
    assert msgspec.structs.asdict(await FIELDS(small)) == msgspec.structs.asdict(wanted)
    found = await FIELDS(large)
    assert (found.left, found.right, found.other) == (
        left,
        [each if at % 2 else Inner(each) for at, each in enumerate(right)],
        other,
    )


async def test_absent_and_null() -> None:
    """Of a large body, too."""
    found = await FIELDS(orjson.dumps({"left": None, "unknown": LONG}))
    assert (found.left, found.right) == (None, None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"left": [LONG, 7]}, "'left[1]' is invalid: expected `str`, got `int`"),
        ({"left": [LONG], "right": [{"text": 7}]}, r"'right[0].text' is invalid"),
        ({"left": [LONG], "right": ["a", {"title": "b"}]}, "Missing required field 'right[1].text'"),
        (
            {"left": [LONG], "right": [{"text": "a", "more": [{}] * 2000}]},
            "'right[0]' is invalid: holds more than 1024",
        ),
        ({"left": LONG}, "'left' is invalid"),
        ({"left": [LONG], "other": "a"}, "'other' is invalid"),
        ([LONG], "The body is invalid"),
    ],
)
async def test_what_is_wrong(body: Any, words: str) -> None:
    """It is told with its place in the body."""
    with pytest.raises(WrongType) as caught:
        await FIELDS(orjson.dumps(body))
    assert words in caught.value.message


async def test_no_json() -> None:
    with pytest.raises(Malformed):
        await FIELDS(b'{"left": ["' + LONG.encode())


async def test_no_more_than_asked_for() -> None:
    """One entry too many comes back, so that whoever counts sees it."""
    found = await FIELDS(orjson.dumps({"left": ["a"] * 9, "right": [{"text": "a"}] * 9, "unknown": LONG}))
    assert (len(found.left or ()), len(found.right or ())) == (5, 5)


async def test_objects_where_none_may_be() -> None:
    """Are refused with their place."""
    with pytest.raises(msgspec.ValidationError, match=r"got `object` - at `\$\.left\[1\]`"):
        await ListDecoder("left", list[str], 4).decode(memoryview(b'["a", {"text": "b"}]'))
