"""Decoding: types, unknown fields, and errors that name the field."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import Malformed, TooManyInputs, WrongType
from shoal.http.json import complexity, decoder
from shoal.surfaces.shared.wire_inputs import TokenId
from shoal.surfaces.tei import wire as tei_wire


class Inner(msgspec.Struct):
    b: int


class Outer(msgspec.Struct):
    a: int
    inner: Inner | None = None
    rows: list[int] = []


@pytest.fixture
def decode() -> decoder.Decoder[Outer]:
    return decoder.Decoder(Outer, "test")


def test_known_fields(decode: decoder.Decoder[Outer]) -> None:
    """Known fields are decoded without further work."""
    decoded = decode(b'{"a":1,"inner":{"b":2}}')
    assert isinstance(decoded, Outer)
    assert msgspec.structs.asdict(decoded) == {"a": 1, "inner": Inner(2), "rows": []}


def test_unknown_fields_are_logged_once(decode: decoder.Decoder[Outer], caplog: pytest.LogCaptureFixture) -> None:
    """Each name is logged once per surface."""
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        for _ in range(3):
            assert decode(b'{"a":1,"x":[1],"y":{}}').a == 1
        decode(b'{"a":1,"z":null}')
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"test: unknown field '{name}' ignored" for name in "xyz"
    ]


def test_invented_names_do_not_fill_the_log(decode: decoder.Decoder[Outer], caplog: pytest.LogCaptureFixture) -> None:
    """After 256 names nothing more is logged, and long names are truncated."""
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        for at in range(300):
            decode(b'{"a":1,"%b%d":0}' % (b"n" * 1000, at))
    assert len(caplog.records) == 256
    assert max(len(record.getMessage()) for record in caplog.records) < 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"a":"x"}', "a", "'a' is invalid: expected `int`, got `str`."),
        (b'{"a":"x","u":1}', "a", "'a' is invalid: expected `int`, got `str`."),
        (b'{"u":1,"a":"x"}', "a", "'a' is invalid: expected `int`, got `str`."),
        (b'{"a":1,"inner":{"b":"x"}}', "inner", "'inner.b' is invalid: expected `int`, got `str`."),
        (b'{"a":1,"inner":{}}', "inner", "Missing required field 'inner.b'."),
        (b'{"a":1,"rows":[1,null]}', "rows", "'rows[1]' is invalid: expected `int`, got `null`."),
        (b"{}", "a", "Missing required field 'a'."),
        (b'{"u":1}', "a", "Missing required field 'a'."),
        (b"[]", None, "The body is invalid: expected `object`, got `array`."),
    ],
)
def test_wrong_types(decode: decoder.Decoder[Outer], body: bytes, param: str | None, message: str) -> None:
    """The message has the path, `param` the top-level field."""
    with pytest.raises(WrongType) as caught:
        decode(body)
    assert (caught.value.param, caught.value.message) == (param, message)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"a":1}}', b'{"a":1,"\xff":1}', b'{"u":' + b"[" * 100_000, b'\xef\xbb\xbf{"a":1}'],
)
def test_invalid_json_is_malformed(decode: decoder.Decoder[Outer], body: bytes) -> None:
    """Input that is not JSON, not UTF-8, or nested too deeply is Malformed."""
    with pytest.raises(Malformed):
        decode(body)


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (b"", "is empty; send JSON"),
        (b" \n", "is empty; send JSON"),
        (b'\xef\xbb\xbf{"a":1}', "byte order mark; encode it as UTF-8 without one"),
    ],
)
def test_common_mistakes_are_named(decode: decoder.Decoder[Outer], body: bytes, remedy: str) -> None:
    """The parser's words ("truncated", "invalid character") would not tell what to do."""
    with pytest.raises(Malformed, match=remedy):
        decode(body)


class Lists(msgspec.Struct):
    ids: str | list[str | TokenId | list[TokenId]]
    more: int = 0


MANY = [[at, 70_000, 2**31 - 1] * 8 for at in range(1000)]


def add_spaces(text: bytes) -> bytes:
    return text.replace(b",", b" ,\n ").replace(b"]", b" ]")


def start_turn_counter() -> tuple[asyncio.Task[None], list[int]]:
    """Start a task that counts the loop turns it gets."""
    iterations = [0]

    async def other() -> None:
        while True:
            iterations[0] += 1
            await asyncio.sleep(0)

    return asyncio.create_task(other()), iterations


@pytest.mark.parametrize("spelled", [bytes, add_spaces])
async def test_many_ids_are_counted_in_turns(spelled: Callable[[bytes], bytes]) -> None:
    """The lists equal those of a single decode, for any white space, and other tasks get turns in between."""
    body = spelled(msgspec.json.encode({"unknown": 1, "ids": MANY, "more": 7}))
    task, iterations = start_turn_counter()
    decoded = await decoder.Decoder(Lists, "test", 100_000).decode_async(body)
    task.cancel()
    assert (decoded.ids, decoded.more) == (MANY, 7)
    assert iterations[0] >= 2


@pytest.mark.parametrize(
    "ids",
    [
        MANY[0] * 2000,
        ["text"] * 20_000,
        ["]", *MANY],
        [*MANY, "]"],
        [*MANY, 1],
        [*MANY, []],
        [[1]] * 70_000,
        "x" * 200_000,
    ],
)
async def test_large_bodies_of_other_kinds(ids: Any) -> None:
    """Bodies that only resemble lists of ids are decoded normally."""
    decoded = await decoder.Decoder(Lists, "test", 100_000).decode_async(msgspec.json.encode({"ids": ids}))
    assert decoded.ids == ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([*MANY, [1, None]], "'ids[1000][1]' is invalid: expected `int`, got `null`."),
        ([*MANY, [1.5]], "'ids[1000][0]' is invalid: expected `int`, got `float`."),
        ([*MANY, [-1]], "'ids[1000][0]' is invalid: expected `int` >= 0."),
        ([*MANY, [[1]]], "'ids[1000][0]' is invalid: expected `int`, got `array`."),
        ([*MANY, {"]": 1}], "'ids[1000]' is invalid: expected `int | str | array`, got `object`."),
    ],
)
async def test_an_invalid_id_among_many(ids: Any, message: str) -> None:
    """The error equals that of a small body, with its position."""
    with pytest.raises(WrongType) as caught:
        await decoder.Decoder(Lists, "test", 100_000).decode_async(msgspec.json.encode({"ids": ids}))
    assert caught.value.message == message


@pytest.mark.parametrize("broken", [b"[1],,[2]", b"[1]][2]", b"[1,2", b"[1,]"])
async def test_many_ids_that_are_not_json(broken: bytes) -> None:
    """Splitting a body does not make invalid JSON valid."""
    body = b'{"ids":[' + b"[1,2,3]," * 20_000 + broken + b"]}"
    with pytest.raises((Malformed, WrongType)):
        await decoder.Decoder(Lists, "test", 100_000).decode_async(body)


class Optionals(msgspec.Struct, kw_only=True):
    texts: str | list[str] | None = None
    more: int = 0


TEXT = 'a "quoted", [bracketed] \\ \u00e4 ' * 40_000


@pytest.mark.parametrize(
    "value",
    [
        [TEXT, "b", "", TEXT],
        TEXT,
        [101] * 100_000,
        [[101] * 100_000, [], [7], "a", [70_000] * 100_000],
        ["ab"] * 80_000,
        ["a", 1, 2, "b", 3, *[4] * 50_000],
    ],
)
async def test_large_values_leave_turns_to_others(value: Any) -> None:
    """A large body is decoded correctly, and counted in a number of steps that grows with it."""
    body = msgspec.json.encode({"u": [1, {"v": None}], "ids": value, "more": 7})
    task, iterations = start_turn_counter()
    decoded = await decoder.Decoder(Lists, "test", 100_000).decode_async(body)
    task.cancel()
    assert (decoded.ids, decoded.more) == (value, 7)
    assert iterations[0] >= len(body) // decoder.LARGE


class Undecodable:
    def decode(self, body: bytes) -> Any:
        raise AssertionError("what is too much was decoded all the same")


@pytest.mark.parametrize("element", [b"[]", b'"ab"', b"[1,2]", b"{}", b"7,7"])
@pytest.mark.parametrize("field", ["ids", "unknown"])
async def test_too_many_values_are_refused_before_decoding(
    element: bytes, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million elements are counted and refused, at any position."""
    decode = decoder.Decoder(Lists, "test", 10)
    monkeypatch.setattr(decode, "_strict", Undecodable())
    monkeypatch.setattr(decode, "_lenient", Undecodable())
    body = b'{"%b":[%b]}' % (field.encode(), b",".join([element] * 1_000_000))
    with pytest.raises(TooManyInputs, match=r"The body has more than 1048896 values.*split the request"):
        await decode.decode_async(body)


@pytest.mark.parametrize("ids", [[0] * 1_048_576, [[30_000] * 512] * 2048, [["a", "b"]] * 20_000, [[7]] * 90_000])
async def test_as_many_values_as_a_request_needs(ids: Any) -> None:
    """Token ids of 2,048 texts, a long one's alone, and more pairs and lists than inputs may be: all are decoded, so
    that whoever counts them says how many there are."""

    class Any_(msgspec.Struct):
        ids: list[Any]

    assert (await decoder.Decoder(Any_, "test", 2048).decode_async(msgspec.json.encode({"ids": ids}))).ids == ids


async def test_the_limit_grows_with_max_inputs() -> None:
    """A higher `max_inputs` permits as many pairs of texts."""
    pairs = [["a", "b"]] * 200_000
    body = msgspec.json.encode({"ids": pairs})
    with pytest.raises(TooManyInputs):
        await decoder.Decoder(Lists, "test", 2048).decode_async(body)

    class Pairs(msgspec.Struct):
        ids: list[list[str]]

    assert (await decoder.Decoder(Pairs, "test", 200_000).decode_async(body)).ids == pairs


@pytest.mark.parametrize("ids", [[0] * 1_200_000, [[1], [0] * 1_200_000]])
async def test_more_ids_than_any_model_reads(ids: Any) -> None:
    """One input may have as many as a whole request."""
    with pytest.raises(TooManyInputs, match=f"more than {complexity.MAX_VALUES + 10 * complexity.VALUES_PER_INPUT} "):
        await decoder.Decoder(Lists, "test", 10).decode_async(msgspec.json.encode({"ids": ids}))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([TEXT, 1], "'texts[1]' is invalid: expected `str`, got `int`."),
        ([TEXT, []], "'texts[1]' is invalid: expected `str`, got `array`."),
        ([TEXT, {}], "'texts[1]' is invalid: expected `str`, got `object`."),
        ([TEXT, TEXT, None], "'texts[2]' is invalid: expected `str`, got `null`."),
        ({"a": TEXT}, "'texts' is invalid: expected `str | array | null`, got `object`."),
    ],
)
async def test_errors_in_large_lists_of_texts(texts: Any, message: str) -> None:
    """The errors equal those of small lists, with the position."""
    body = msgspec.json.encode({"texts": texts, "more": 7})
    with pytest.raises(WrongType) as caught:
        await decoder.Decoder(Optionals, "test", 100).decode_async(body)
    assert (caught.value.message, caught.value.param) == (message, "texts")


async def test_a_field_that_may_be_missing() -> None:
    """In a large body as in a small one."""
    decode = decoder.Decoder(Optionals, "test", 100)
    decoded = await decode.decode_async(msgspec.json.encode({"more": 7, "u": TEXT}))
    assert (decoded.texts, decoded.more) == (None, 7)
    assert (await decode.decode_async(b'{"texts":null,"more":3' + b" " * 100_000 + b"}")).texts is None


async def test_unknown_fields_of_a_large_body(caplog: pytest.LogCaptureFixture) -> None:
    """Only the first is named: there may be millions."""
    body = b'{"ids":"a",%b}' % b",".join(b'"u%d":1' % at for at in range(20_000))
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        assert (await decoder.Decoder(Lists, "test", 10).decode_async(body)).ids == "a"
    assert [record.getMessage() for record in caplog.records] == ["test: unknown field 'u0' ignored"]


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("shift", range(13))
@pytest.mark.parametrize("character", ["\U0001f600", "\u00e4", "\u20ac", '"', "\\", "\\ud83d"])
async def test_long_texts_are_not_cut(character: str, shift: int, ascii: bool) -> None:
    """For every end of a counting step and every spelling of the characters."""
    text = "x" * shift + character * 100_000
    body = json.dumps({"ids": [text, text]}, ensure_ascii=ascii).encode()
    assert (await decoder.Decoder(Lists, "test", 10).decode_async(body)).ids == [text, text]


# With every character that has a meaning in JSON.
scraps = st.text(st.sampled_from('ab"\\[]{},: \u00e4\U0001f600\n'), max_size=12)
numbers = st.integers(0, 2**31 - 1)


@given(
    ids=scraps | st.lists(scraps | numbers | st.lists(numbers, max_size=5), max_size=8),
    ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_large_and_small_bodies_decode_alike(ids: Any, ascii: bool, indent: int | None) -> None:
    """Large and small bodies mean the same, in every spelling."""
    body = json.dumps({"ids": ids, "more": 3}, ensure_ascii=ascii, indent=indent).encode()
    padded = body[:-1] + b" " * decoder.LARGE + b"}"
    decode = decoder.Decoder(Lists, "test", 100)
    large, small = asyncio.run(decode.decode_async(padded)), asyncio.run(decode.decode_async(body))
    assert (large.ids, large.more) == (small.ids, small.more) == (ids, 3)


@pytest.mark.parametrize("padding", [0, decoder.LARGE])
@pytest.mark.parametrize("after", ['"', ' and"', '\\u0041"', '\\n", "more": 1', '", "more": 1'])
@pytest.mark.parametrize("half", ["ud83d", "uDE00", "udbff"])
async def test_half_a_character(half: str, after: str, padding: int) -> None:
    """Half an emoji is reported as such with the next step, at any position and for every msgspec message."""
    body = f'{{"ids": {" " * padding}"caf\\{half}{after}}}'.encode()
    with pytest.raises(Malformed, match=rf"lone surrogate \\{half}\).*toWellFormed"):
        await decoder.Decoder(Lists, "test", 10).decode_async(body)


@pytest.mark.parametrize(
    "body", [b'{"ids":"\\ud83d\\ude00', b'{"ids":"\\\\ud83d', b'{"ids":"\\ud83', b'{"ids":"\\x"}', b'{"ids":"\\u12"}']
)
def test_other_errors_are_not_half_a_character(body: bytes) -> None:
    """Whole emojis, escaped backslashes and other errors are not reported as half a character."""
    with pytest.raises(Malformed, match="could not be read as JSON"):
        decoder.Decoder(Lists, "test")(body)


class Both(msgspec.Struct, kw_only=True):
    left: list[str] | None = None
    right: list[str | Inner] | None = None
    other: int = 0


LONG = "x" * decoder.LARGE


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"left": [LONG, 7]}, "'left[1]' is invalid: expected `str`, got `int`"),
        ({"left": [LONG], "right": [{"b": "7"}]}, "'right[0].b' is invalid"),
        ({"left": [LONG], "right": ["a", {"c": "b"}]}, "Missing required field 'right[1].b'"),
        ({"left": LONG}, "'left' is invalid"),
        ({"left": [LONG], "other": "a"}, "'other' is invalid"),
        ([LONG], "The body is invalid"),
        ({"left": ["a", {"text": LONG}]}, "'left[1]' is invalid: expected `str`, got `object`"),
    ],
)
async def test_errors_in_a_large_body(body: Any, words: str) -> None:
    """The error has the position in the body, in any of several lists."""
    with pytest.raises(WrongType) as caught:
        await decoder.Decoder(Both, "test", 4).decode_async(msgspec.json.encode(body))
    assert words in caught.value.message


async def test_a_large_body_that_is_not_json() -> None:
    with pytest.raises(Malformed):
        await decoder.Decoder(Both, "test", 4).decode_async(b'{"left": ["' + LONG.encode())


async def test_invalid_utf_8_in_a_large_body() -> None:
    """The body is not UTF-8."""
    with pytest.raises(Malformed, match="not UTF-8"):
        await decoder.Decoder(Both, "test", 4).decode_async(b'{"left":["%b"]}' % (LONG.encode() + b"\x80" * 9))


@pytest.mark.parametrize("pad", ["", LONG])
async def test_part_of_a_body(pad: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fields that another decoder reads are neither logged nor refused; all others are."""
    decode = decoder.Decoder(Inner, "openai", 4, partial=True)
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        assert await decode.decode_async(msgspec.json.encode({"b": 1, "x": pad, "chat_template": "y"})) == Inner(1)
    assert not caplog.records
    with pytest.raises(WrongType):
        await decode.decode_async(msgspec.json.encode({"b": "a", "x": pad}))


def test_arrays_at_the_top() -> None:
    """A list of structs also ignores unknown keys."""
    assert decoder.Decoder(list[Inner], "test")(b'[{"b":1,"u":2}]') == [Inner(1)]


def test_every_wire_type_has_a_schema() -> None:
    """The OpenAPI document is built from these types, so each needs a JSON schema."""
    kinds = [*vars(decoder).values(), *vars(tei_wire).values()]
    structs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components(structs)
    assert len(components) == len(structs) > 15
