"""Decoding: types, unknown fields, and errors that name the field."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shoal.errors import Malformed, WrongType
from shoal.surfaces import _wire


class Inner(msgspec.Struct):
    b: int


class Outer(msgspec.Struct):
    a: int
    inner: Inner | None = None
    rows: list[int] = []


@pytest.fixture
def decode() -> _wire.Decoder[Outer]:
    return _wire.Decoder(Outer, "test")


def test_known_fields(decode: _wire.Decoder[Outer]) -> None:
    """What is known is decoded, and nothing more is done."""
    decoded = decode(b'{"a":1,"inner":{"b":2}}')
    assert isinstance(decoded, Outer)
    assert msgspec.structs.asdict(decoded) == {"a": 1, "inner": Inner(2), "rows": []}


def test_unknown_fields_are_logged_once(decode: _wire.Decoder[Outer], caplog: pytest.LogCaptureFixture) -> None:
    """Each name is logged at its first sight only, with its surface."""
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        for _ in range(3):
            assert decode(b'{"a":1,"x":[1],"y":{}}').a == 1
        decode(b'{"a":1,"z":null}')
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"test: the field '{name}' is not known and was ignored" for name in "xyz"
    ]


def test_made_up_names_do_not_fill_the_log(decode: _wire.Decoder[Outer], caplog: pytest.LogCaptureFixture) -> None:
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
def test_wrong_types(decode: _wire.Decoder[Outer], body: bytes, param: str | None, message: str) -> None:
    """The message has the path, `param` the top-level field."""
    with pytest.raises(WrongType) as caught:
        decode(body)
    assert (caught.value.param, caught.value.message) == (param, message)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"a":1}}', b'{"a":1,"\xff":1}', b'{"u":' + b"[" * 100_000, b'\xef\xbb\xbf{"a":1}'],
)
def test_not_json(decode: _wire.Decoder[Outer], body: bytes) -> None:
    """What is not JSON, not UTF-8, or nested without end is Malformed."""
    with pytest.raises(Malformed):
        decode(body)


class Lists(msgspec.Struct):
    ids: str | list[str | _wire.TokenId | list[_wire.TokenId]]
    more: int = 0


MANY = [[at, 70_000, 2**31 - 1] * 8 for at in range(1000)]


def spaced(text: bytes) -> bytes:
    return text.replace(b",", b" ,\n ").replace(b"]", b" ]")


@pytest.mark.parametrize("spelled", [bytes, spaced])
async def test_many_ids_are_decoded_in_turns(spelled: Callable[[bytes], bytes]) -> None:
    """The same lists as in one go, whatever the white space, with turns for other tasks in between."""
    body = spelled(msgspec.json.encode({"unknown": 1, "ids": MANY, "more": 7}))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    decoded = await _wire.Decoder(Lists, "test", ids="ids").in_turns(body)
    task.cancel()
    assert (decoded.ids, decoded.more) == (MANY, 7)
    assert turns >= 2


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
    decoded = await _wire.Decoder(Lists, "test", ids="ids").in_turns(msgspec.json.encode({"ids": ids}))
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
        await _wire.Decoder(Lists, "test", ids="ids").in_turns(msgspec.json.encode({"ids": ids}))
    assert caught.value.message == message


@pytest.mark.parametrize("broken", [b"[1],,[2]", b"[1]][2]", b"[1,2", b"[1,]"])
async def test_many_ids_that_are_not_json(broken: bytes) -> None:
    """Splitting a body does not make broken JSON whole."""
    body = b'{"ids":[' + b"[1,2,3]," * 20_000 + broken + b"]}"
    with pytest.raises((Malformed, WrongType)):
        await _wire.Decoder(Lists, "test", ids="ids").in_turns(body)


def test_arrays_at_the_top() -> None:
    """A list of structs ignores unknown keys, too."""
    assert _wire.Decoder(list[Inner], "test")(b'[{"b":1,"u":2}]') == [Inner(1)]


def test_every_wire_type_has_a_schema() -> None:
    """The OpenAPI document is made of these types, so each must have a JSON schema."""
    structs = [kind for kind in vars(_wire).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components(structs)
    assert len(components) == len(structs) > 15
