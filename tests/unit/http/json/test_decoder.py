"""Decoding: types, unknown fields, and errors that name the field."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
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
    """What is known is decoded, and nothing more is done."""
    decoded = decode(b'{"a":1,"inner":{"b":2}}')
    assert isinstance(decoded, Outer)
    assert msgspec.structs.asdict(decoded) == {"a": 1, "inner": Inner(2), "rows": []}


def test_unknown_fields_are_logged_once(decode: decoder.Decoder[Outer], caplog: pytest.LogCaptureFixture) -> None:
    """Each name is logged at its first sight only, with its surface."""
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        for _ in range(3):
            assert decode(b'{"a":1,"x":[1],"y":{}}').a == 1
        decode(b'{"a":1,"z":null}')
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"test: unknown field '{name}' ignored" for name in "xyz"
    ]


def test_made_up_names_do_not_fill_the_log(decode: decoder.Decoder[Outer], caplog: pytest.LogCaptureFixture) -> None:
    """After 256 names no more are logged, and no name is logged at length."""
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
def test_not_json(decode: decoder.Decoder[Outer], body: bytes) -> None:
    """What is not JSON, not UTF-8, or nested without end is Malformed."""
    with pytest.raises(Malformed):
        decode(body)


class Lists(msgspec.Struct):
    ids: str | list[str | TokenId | list[TokenId]]
    more: int = 0


MANY = [[at, 70_000, 2**31 - 1] * 8 for at in range(1000)]


def spaced(text: bytes) -> bytes:
    return text.replace(b",", b" ,\n ").replace(b"]", b" ]")


def stepping() -> tuple[asyncio.Task[None], list[int]]:
    """A task that counts the turns that others leave it."""
    iterations = [0]

    async def other() -> None:
        while True:
            iterations[0] += 1
            await asyncio.sleep(0)

    return asyncio.create_task(other()), iterations


@pytest.mark.parametrize("spelled", [bytes, spaced])
async def test_many_ids_are_counted_in_turns(spelled: Callable[[bytes], bytes]) -> None:
    """The same lists as in one go, whatever the white space, with turns for other tasks in between."""
    body = spelled(msgspec.json.encode({"unknown": 1, "ids": MANY, "more": 7}))
    task, iterations = stepping()
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
    """What only looks like lists of ids, or is something else, is decoded as ever."""
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
async def test_a_fault_among_many_ids(ids: Any, message: str) -> None:
    """The error is the one that a small body gets, with its place."""
    with pytest.raises(WrongType) as caught:
        await decoder.Decoder(Lists, "test", 100_000).decode_async(msgspec.json.encode({"ids": ids}))
    assert caught.value.message == message


@pytest.mark.parametrize("broken", [b"[1],,[2]", b"[1]][2]", b"[1,2", b"[1,]"])
async def test_many_ids_that_are_not_json(broken: bytes) -> None:
    """Splitting a body does not make broken JSON whole."""
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
    """However the body is large, it is decoded to what it says, and counted in steps that grow in number with it."""
    body = msgspec.json.encode({"u": [1, {"v": None}], "ids": value, "more": 7})
    task, iterations = stepping()
    decoded = await decoder.Decoder(Lists, "test", 100_000).decode_async(body)
    task.cancel()
    assert (decoded.ids, decoded.more) == (value, 7)
    assert iterations[0] >= len(body) // decoder.LARGE


class Undecodable:
    def decode(self, body: bytes) -> Any:
        raise AssertionError("what is too much was decoded all the same")


@pytest.mark.parametrize("element", [b"[]", b'"ab"', b"[1,2]", b"{}", b"7,7"])
@pytest.mark.parametrize("field", ["ids", "unknown"])
async def test_no_more_is_decoded_than_may_be_there(
    element: bytes, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million elements are counted and refused, wherever they stand."""
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


async def test_the_bound_grows_with_the_inputs_that_may_be_there() -> None:
    """Whoever raises `max_inputs` means it: so many pairs of texts are decoded."""
    pairs = [["a", "b"]] * 200_000
    body = msgspec.json.encode({"ids": pairs})
    with pytest.raises(TooManyInputs):
        await decoder.Decoder(Lists, "test", 2048).decode_async(body)

    class Pairs(msgspec.Struct):
        ids: list[list[str]]

    assert (await decoder.Decoder(Pairs, "test", 200_000).decode_async(body)).ids == pairs


@pytest.mark.parametrize("ids", [[0] * 1_200_000, [[1], [0] * 1_200_000]])
async def test_more_ids_than_any_model_reads(ids: Any) -> None:
    """In one input they are as many as in a whole request."""
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
async def test_faults_in_large_lists_of_texts(texts: Any, message: str) -> None:
    """As in small ones, with the place."""
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
    """The first alone is named: there may be millions."""
    body = b'{"ids":"a",%b}' % b",".join(b'"u%d":1' % at for at in range(20_000))
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        assert (await decoder.Decoder(Lists, "test", 10).decode_async(body)).ids == "a"
    assert [record.getMessage() for record in caplog.records] == ["test: unknown field 'u0' ignored"]


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("shift", range(13))
@pytest.mark.parametrize("character", ["\U0001f600", "\u00e4", "\u20ac", '"', "\\", "\\ud83d"])
async def test_long_texts_are_not_cut(character: str, shift: int, ascii: bool) -> None:
    """Wherever the steps of counting end, and however the characters are spelled."""
    text = "x" * shift + character * 100_000
    body = json.dumps({"ids": [text, text]}, ensure_ascii=ascii).encode()
    assert (await decoder.Decoder(Lists, "test", 10).decode_async(body)).ids == [text, text]


# With every character that means something to JSON.
scraps = st.text(st.sampled_from('ab"\\[]{},: \u00e4\U0001f600\n'), max_size=12)
numbers = st.integers(0, 2**31 - 1)


@settings(max_examples=200)
@given(
    ids=scraps | st.lists(scraps | numbers | st.lists(numbers, max_size=5), max_size=8),
    ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_any_value_is_decoded_alike(ids: Any, ascii: bool, indent: int | None) -> None:
    """Large and small bodies mean the same, whatever their spelling."""
    body = json.dumps({"ids": ids, "more": 3}, ensure_ascii=ascii, indent=indent).encode()
    padded = body[:-1] + b" " * decoder.LARGE + b"}"
    decode = decoder.Decoder(Lists, "test", 100)
    large, small = asyncio.run(decode.decode_async(padded)), asyncio.run(decode.decode_async(body))
    assert (large.ids, large.more) == (small.ids, small.more) == (ids, 3)


@pytest.mark.parametrize("padding", [0, decoder.LARGE])
@pytest.mark.parametrize("after", ['"', ' and"', '\\u0041"', '\\n", "more": 1', '", "more": 1'])
@pytest.mark.parametrize("half", ["ud83d", "uDE00", "udbff"])
async def test_half_a_character(half: str, after: str, padding: int) -> None:
    """Half an emoji is called that, with the way out, wherever it stands and whatever msgspec says of it."""
    body = f'{{"ids": {" " * padding}"caf\\{half}{after}}}'.encode()
    with pytest.raises(Malformed, match=rf"lone surrogate \\{half}\).*toWellFormed"):
        await decoder.Decoder(Lists, "test", 10).decode_async(body)


@pytest.mark.parametrize(
    "body", [b'{"ids":"\\ud83d\\ude00', b'{"ids":"\\\\ud83d', b'{"ids":"\\ud83', b'{"ids":"\\x"}', b'{"ids":"\\u12"}']
)
def test_no_half_of_a_character(body: bytes) -> None:
    """Whole emojis, escaped backslashes and other faults are not taken for one."""
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
async def test_what_is_wrong_in_a_large_body(body: Any, words: str) -> None:
    """It is told with its place in the body, whichever of several lists it is in."""
    with pytest.raises(WrongType) as caught:
        await decoder.Decoder(Both, "test", 4).decode_async(msgspec.json.encode(body))
    assert words in caught.value.message


async def test_a_large_body_that_is_not_json() -> None:
    with pytest.raises(Malformed):
        await decoder.Decoder(Both, "test", 4).decode_async(b'{"left": ["' + LONG.encode())


async def test_bytes_that_are_no_character_in_a_large_body() -> None:
    """Not UTF-8."""
    with pytest.raises(Malformed, match="not UTF-8"):
        await decoder.Decoder(Both, "test", 4).decode_async(b'{"left":["%b"]}' % (LONG.encode() + b"\x80" * 9))


@pytest.mark.parametrize("pad", ["", LONG])
async def test_part_of_a_body(pad: str, caplog: pytest.LogCaptureFixture) -> None:
    """What another decoder reads too is neither logged nor refused here, and all else is."""
    decode = decoder.Decoder(Inner, "openai", 4, partial=True)
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        assert await decode.decode_async(msgspec.json.encode({"b": 1, "x": pad, "chat_template": "y"})) == Inner(1)
    assert not caplog.records
    with pytest.raises(WrongType):
        await decode.decode_async(msgspec.json.encode({"b": "a", "x": pad}))


def test_arrays_at_the_top() -> None:
    """A list of structs ignores unknown keys, too."""
    assert decoder.Decoder(list[Inner], "test")(b'[{"b":1,"u":2}]') == [Inner(1)]


def test_every_wire_type_has_a_schema() -> None:
    """The OpenAPI document is made of these types, so each must have a JSON schema."""
    kinds = [*vars(decoder).values(), *vars(tei_wire).values()]
    structs = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components(structs)
    assert len(components) == len(structs) > 15
