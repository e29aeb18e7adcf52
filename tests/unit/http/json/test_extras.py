"""Bodies with additional fields."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidValue, Malformed, TooManyInputs, WrongType
from shoal.http.json import extras
from shoal.http.json.decoder import LARGE
from shoal.http.json.extras import ArgumentsLimit, ExtrasDecoder, check_depth, check_pieces, to_json_bytes


class Body(msgspec.Struct, kw_only=True):
    items: list[dict[str, str]]
    size: int | None = None


class Texts(msgspec.Struct, kw_only=True):
    items: str | list[str]
    size: int | None = None


PAD = {"pad": "x" * LARGE}


@pytest.mark.parametrize("pad", [{}, PAD])
async def test_extras(pad: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """They stay unchanged in bodies of any size, and each name is logged once; unlimited names do not fill the log."""
    decode: ExtrasDecoder[Body] = ExtrasDecoder(Body, "x", "items")
    body = orjson.dumps({"items": [{"a": "b"}], "size": 7, "more": {"deep": [1, 2]}, **pad})
    with caplog.at_level(logging.INFO, logger="shoal.http"):
        for _ in range(2):
            value, fields, extras = await decode(body)
        assert (value.items, value.size) == ([{"a": "b"}], 7)
        assert bytes(extras["more"]) == bytes(fields["more"]) == b'{"deep":[1,2]}'
        assert extras.keys() - {"more"} == pad.keys()
        assert len(caplog.records) == 1 + len(pad)
        await decode(orjson.dumps({"items": [], **{f"name{at}": 1 for at in range(1000)}}))
    assert len(caplog.records) == 256
    assert all(len(record.getMessage()) < 200 for record in caplog.records)


@pytest.mark.parametrize("pad", [{}, PAD])
async def test_lists_of_texts(pad: dict[str, str]) -> None:
    """All are returned, so that the caller can count them; lists beyond the decoder's limit are refused."""
    decode: ExtrasDecoder[Texts] = ExtrasDecoder(Texts, "x", "items", 3)
    assert (await decode(orjson.dumps({"items": "one", **pad})))[0].items == "one"
    assert (await decode(orjson.dumps({"items": ["a", "b"], **pad})))[0].items == ["a", "b"]
    long = ["x" * LARGE, "b", "c", "d", "e", "f"]
    assert (await decode(orjson.dumps({"items": long})))[0].items == long
    with pytest.raises(TooManyInputs, match="'items' has more than 1048672 values") as caught:
        await decode(orjson.dumps({"items": ["a"] * 200_000}))
    assert caught.value.param == "items"


@pytest.mark.parametrize("pad", [b"", b'"pad":"%b",' % (b"x" * LARGE)])
@pytest.mark.parametrize(
    ("rest", "error", "param"),
    [
        (b'"size":1}', WrongType, "items"),
        (b'"items":null}', WrongType, "items"),
        (b'"items":[7]}', WrongType, "items"),
        (b'"items":[],"size":"x"}', WrongType, "size"),
        (b'"items":[],"size":\xff}', Malformed, None),
        (b'"items":[]', Malformed, None),
        (b'"items":[],"x":' + b"[" * 100_000, Malformed, None),
    ],
)
async def test_bad_bodies(pad: bytes, rest: bytes, error: type[Exception], param: str | None) -> None:
    """Small and large bodies are refused for the same reason."""
    kinds: list[ExtrasDecoder[Any]] = [ExtrasDecoder(Body, "x", "items"), ExtrasDecoder(Texts, "x", "items", 3)]
    for decode in kinds:
        with pytest.raises(error) as caught:
            await decode(b"{" + pad + rest)
        assert getattr(caught.value, "param", None) == param


async def test_half_a_character() -> None:
    """A text truncated inside an emoji is reported as such."""
    with pytest.raises(Malformed, match="half of a character"):
        await ExtrasDecoder(Body, "x", "items")(b'{"items":[{"a":"\\ud800"}]}')


@pytest.mark.parametrize("body", [b"7", b"[]", b'"x"', b"[%b]" % (b"1," * LARGE + b"1")])
async def test_bodies_that_are_not_objects(body: bytes) -> None:
    """They are refused early in the decode."""
    with pytest.raises(WrongType):
        await ExtrasDecoder(Body, "x", "items")(body)


async def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many objects, or a body that consists of them, would block the loop during the decode."""
    monkeypatch.setattr(extras, "MAX_PIECES", 100)
    monkeypatch.setattr(extras, "MAX_OTHER_BYTES", LARGE + 100)
    decode: ExtrasDecoder[Body] = ExtrasDecoder(Body, "x", "items")
    text = "{[" * 40  # commas in a text count too, and a real conversation stays below the limit
    assert (await decode(orjson.dumps({"items": [{"a": text}], **PAD})))[0].items == [{"a": text}]
    with pytest.raises(InvalidValue) as caught:
        await decode(orjson.dumps({"items": [{}] * 101, **PAD}))
    assert caught.value.param == "items"
    with pytest.raises(InvalidValue, match="besides 'items'"):
        await decode(orjson.dumps({"items": [], "more": "x" * LARGE, "size": 1, **{"pad": "x" * 200}}))
    with pytest.raises(InvalidValue, match="besides 'items'"):
        await decode(b'{"items":[%b],"items":[]}' % (b"{}," * LARGE + b"{}"))


@pytest.mark.parametrize(
    ("number", "fits"), [(2**64 - 1, True), (2**64, False), (-(2**63), True), (-(2**63) - 1, False), (True, True)]
)
def test_integers(number: int, fits: bool) -> None:
    """Only those that can be encoded as JSON again."""
    value = {"a": [1, {"b": number}]}
    if fits:
        check_depth(value, "field")
        assert msgspec.json.encode(value)
        return
    with pytest.raises(InvalidValue, match="64 bits"):
        check_depth(value, "field")


class Wide(msgspec.Struct, kw_only=True):
    items: list[dict[str, str]] | None = None
    more: dict[str, Any] | None = None
    texts: list[str] | None = None
    raw: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Undecodable:
    def decode(self, body: bytes) -> Any:
        raise AssertionError("what is too much was decoded all the same")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [{}] * 40_000}, "items"),
        ({"more": {"a": [{}] * 30_000}}, "more"),
        ({"more": {"a": [0] * 40_000}}, "more"),
        ({"texts": [""] * 40_000}, "texts"),
        ({f"unknown{at}": 1 for at in range(30_000)}, None),
        ({f"unknown{at}": 1 for at in range(1001)}, None),
    ],
)
async def test_fields_that_are_checked(
    fields: dict[str, Any], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field is counted before it is decoded; the error names the field."""
    decode: ExtrasDecoder[Wide] = ExtrasDecoder(Wide, "x", "items", also=("texts",))
    monkeypatch.setattr(decode, "_full_decoder", Undecodable())
    with pytest.raises(InvalidValue) as caught:
        await decode(orjson.dumps(fields))
    assert caught.value.param == param


async def test_fields_that_are_not_checked() -> None:
    """Brackets and commas in texts, fields that stay unparsed, and the values of a long conversation; texts that may be
    long are not counted by bytes.
    """
    decode: ExtrasDecoder[Wide] = ExtrasDecoder(Wide, "x", "items", also=("texts",))
    text = "[{,}]" * 100_000
    request: dict[str, Any] = {"items": [{"a": text}, *[{}] * 30_000], "more": {"a": text}, "raw": [0] * 200_000}
    value, fields, extras = await decode(orjson.dumps(request))
    assert (value.items, value.more, extras) == (request["items"], request["more"], {})
    assert {name: json.loads(bytes(raw)) for name, raw in fields.items()} == request
    assert (await decode(orjson.dumps({"texts": ["x" * 2_000_000]})))[0].texts == ["x" * 2_000_000]
    assert len((await decode(orjson.dumps({f"unknown{at}": 1 for at in range(1000)})))[2]) == 1000


def test_json_in_a_string() -> None:
    """It is counted as its decoded value."""
    check_pieces(b'{"a":"%b"}' % (b"[," * 100_000), "field")
    with pytest.raises(InvalidValue) as caught:
        check_pieces(b"[%b0]" % (b"0," * 40_000), "field")
    assert caught.value.param == "field"


def test_arguments() -> None:
    """All arguments of a request together: a few are not counted, and string contents never are."""
    arguments = ArgumentsLimit("field")
    long = '{"a": "%s"}' % ("[,{" * 100_000)
    assert all(arguments.check(text) == text for text in ("{}", long, "[%s0]" % ("0," * 40_000)))
    with pytest.raises(InvalidValue, match="older calls") as caught:
        arguments.check("[%s0]" % ("0," * 40_000))
    assert caught.value.param == "field"
    arguments = ArgumentsLimit("field")
    with pytest.raises(InvalidValue, match="characters in total"):
        for _ in range(10):
            arguments.check(long)


@given(st.dictionaries(st.text(max_size=6), st.integers() | st.none() | st.text(max_size=6), max_size=6))
async def test_every_field_is_known_or_extra(more: dict[str, object]) -> None:
    """Every field is either known or extra."""
    more = {name: value for name, value in more.items() if name not in ("items", "size")}
    _, fields, extras = await ExtrasDecoder(Body, "x", "items")(json.dumps({"items": [], **more}).encode())
    assert {name: json.loads(bytes(raw)) for name, raw in extras.items()} == more
    assert {name: json.loads(bytes(raw)) for name, raw in fields.items()} == {"items": [], **more}


def test_json_of() -> None:
    """null equals an absent value."""
    assert to_json_bytes(None) is to_json_bytes(msgspec.UNSET) is to_json_bytes(msgspec.Raw(b"null")) is None
    assert to_json_bytes(msgspec.Raw(b"{}")) == b"{}"


@pytest.mark.parametrize(("depth", "fits"), [(64, True), (65, False)])
@pytest.mark.parametrize("kind", [dict, list])
def test_depth(depth: int, fits: bool, kind: type) -> None:
    """Levels are counted along the deepest path."""
    value: object = kind()
    for _ in range(depth - 1):
        value = {"a": value, "b": 1} if kind is dict else [1, value]
    if fits:
        check_depth(value, "field")
        return
    with pytest.raises(InvalidValue) as caught:
        check_depth(value, "field")
    assert caught.value.param == "field"
