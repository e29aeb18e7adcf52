"""Long lists of texts and token ids: decoded in turns with the event loop, and no further than they may be long.

The interpreter is held while JSON is decoded, and each text, id or list becomes an object: 32 MB of empty lists take
seconds. To skip over them takes a twentieth of a second, so that a list is first skipped, and known to be JSON; then
it is cut into pieces here.
"""

from __future__ import annotations

import asyncio
import re
from types import GenericAlias, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from shoal.errors import TooLong
from shoal.http.json.objects import find_object_end

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Bounded so that every id fits the integers that engines take; the vocabulary's own bound is the model's to check."""

MAX_IDS = 1_048_576
"""Token ids of one input: far more than any model reads."""

MAX_TEXTS = 2
"""Texts of one input: a pair."""

_TURN = 32_768  # bytes of short elements: about a millisecond as ids, and ten as empty texts
_STEP = 262_144  # bytes of one text that are decoded at once
_IDS = msgspec.json.Decoder(list[TokenId])
_TEXT = msgspec.json.Decoder(str)
_SPACE = re.compile(rb"[ \t\r\n,]*+")
_INSIDE = re.compile(rb'(?s:[^"\\]++|\\u.{4}|\\[^u])*+')
_SCALARS = re.compile(rb'[^"\[\]{}]*+')
_PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]")
_WHERE = re.compile(r"(?s)(.*) - at `\$(?:\[(\d+)\])?([^`]*)`$")
_QUOTE, _OPEN, _CLOSE, _OBJECT = b'"[]{'
_CONTINUED = 3  # bytes of a character after its first one, at most


class ListDecoder:
    """Decodes the field `name` of the type `kind`, which may be a list of texts, of ids, of objects, of lists of ids,
    or of lists of texts.

    Raises what msgspec does, with the place in the body as if all of it had been decoded at once; and TooLong for more
    than MAX_IDS in one list. Of more than `limit` texts, objects and lists, the first `limit` + 1 come back, and so
    they do of an inner list that holds more than MAX_TEXTS.
    """

    def __init__(self, name: str, kind: Any, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._plain = msgspec.json.Decoder(Annotated[kind, Meta()])
        item: Any = _item_type(kind)
        self._item = msgspec.json.Decoder(item)
        self._items = msgspec.json.Decoder(GenericAlias(list, (item,)))
        self._of_texts = _item_type(item) is str

    async def decode(self, raw: memoryview) -> Any:
        """`raw` is JSON; nothing of it is kept."""
        at = _match_end(_SPACE, raw, 0)
        if raw[at] == _QUOTE:
            return (await self._decode_text(raw, at, self._plain, self._name))[0]
        if raw[at] != _OPEN:
            return self._decode_at(self._plain, raw, self._name)
        found: list[Any] = []
        others, turn = 0, at
        at += 1
        while True:
            at = _match_end(_SPACE, raw, at)
            if raw[at] == _CLOSE or others > self._limit:
                return found
            if at - turn > _TURN:
                await asyncio.sleep(0)
                turn = at
            place = f"{self._name}[{len(found)}]"
            first = raw[at]
            if first == _QUOTE:
                text, at = await self._decode_text(raw, at, self._item, place)
                found.append(text)
                others += 1
            elif first == _OPEN:
                self._decode_at(self._item, b"[]", place)
                if self._of_texts:
                    texts, at = await self._decode_texts(raw, at + 1, place)
                    found.append(texts)
                    others += 1
                    if len(texts) > MAX_TEXTS:
                        return found
                    continue
                ids, at = await self._decode_numbers(raw, at + 1, _IDS, place, 0)
                if raw[at] != _CLOSE:
                    self._decode_at(_IDS, _smallest_list(raw[at]), place, len(ids))
                found.append(ids)
                others += 1
                at += 1
            elif first == _OBJECT:
                stop = await find_object_end(raw, at, place)
                found.append(self._decode_at(self._item, raw[at:stop], place))
                others += 1
                at = stop
            else:
                ids, at = await self._decode_numbers(raw, at, self._items, self._name, len(found))
                found += ids

    async def _decode_text(
        self, raw: memoryview, at: int, decoder: msgspec.json.Decoder[Any], place: str
    ) -> tuple[str, int]:
        """The text that begins at `at`, and where it ends."""
        parts: list[str] = []
        at += 1
        while True:
            stop = _match_end(_INSIDE, raw, at, at + _STEP)
            closed = raw[stop] == _QUOTE
            if not closed:
                stop = _find_boundary(raw, stop, at)
            parts.append(self._decode_at(decoder, b'"%b"' % bytes(raw[at:stop]), place))
            if closed:
                return "".join(parts), stop + 1
            at = stop
            await asyncio.sleep(0)

    async def _decode_texts(self, raw: memoryview, at: int, place: str) -> tuple[list[str], int]:
        """A list of texts from `at` on, and where it ends; of one that is too long only the beginning."""
        found: list[str] = []
        while True:
            at = _match_end(_SPACE, raw, at)
            if raw[at] == _CLOSE or len(found) > MAX_TEXTS:
                return found, at + 1
            inner = f"{place}[{len(found)}]"
            if raw[at] != _QUOTE:
                self._decode_at(_TEXT, {_OPEN: b"[]", _OBJECT: b"{}"}.get(raw[at], b"0"), inner)
            text, at = await self._decode_text(raw, at, _TEXT, inner)
            found.append(text)

    async def _decode_numbers(
        self, raw: memoryview, at: int, decoder: msgspec.json.Decoder[list[Any]], place: str, index: int
    ) -> tuple[list[Any], int]:
        """The numbers from `at` on, and where they end: at what closes the list, or at what is no number."""
        found: list[Any] = []
        width = _TURN
        while True:
            stop = _match_end(_SCALARS, raw, at, at + width)
            piece = bytes(raw[at:stop])
            ended = raw[stop] in b'"[]{}'
            if not ended or raw[stop] != _CLOSE:
                cut = piece.rfind(b",")
                if cut < 0 and not ended:
                    width *= 2  # a number of that many digits is JSON, too
                    continue
                piece = piece[: max(cut, 0)]
                stop = stop if ended else at + cut + 1
            found += self._decode_at(decoder, b"[%b]" % piece, place, index + len(found))
            if len(found) > MAX_IDS:
                raise TooLong(
                    f"'{place}' holds more than {MAX_IDS} token ids, which no model reads; cut it.",
                    param=self._name,
                )
            if ended:
                return found, stop
            at = stop
            await asyncio.sleep(0)

    def _decode_at(
        self, decoder: msgspec.json.Decoder[Any], piece: bytes | memoryview, place: str, index: int = 0
    ) -> Any:
        try:
            return decoder.decode(piece)
        except msgspec.ValidationError as error:
            reason, at = str(error), place
            if found := _WHERE.fullmatch(reason):
                inner = "" if found[2] is None else f"[{int(found[2]) + index}]"
                reason, at = found[1], place + inner + found[3]
            raise msgspec.ValidationError(f"{reason} - at `$.{at}`") from None


def _item_type(kind: Any) -> Any:
    """The type of the elements of the list that `kind` is or may be."""
    origin = get_origin(kind)
    if origin is list:
        return get_args(kind)[0]
    if origin is Annotated:
        return _item_type(get_args(kind)[0])
    if origin in (Union, UnionType):
        return next((item for each in get_args(kind) if (item := _item_type(each)) is not None), None)
    return None


def _match_end(pattern: re.Pattern[bytes], raw: memoryview, at: int, stop: int = 2**62) -> int:
    found = pattern.match(raw, at, stop)
    assert found is not None  # each pattern matches nothing at all, too
    return found.end()


def _find_boundary(raw: memoryview, at: int, start: int) -> int:
    """The last place up to `at` that is not inside of a character: of its bytes, or of two escapes that are one.

    Raises UnicodeDecodeError where none of the last bytes begins a character: `raw` is JSON, but maybe not UTF-8.
    """
    least = max(start, at - _CONTINUED)
    while raw[at] & 0xC0 == 0x80:
        if at == least:
            raise UnicodeDecodeError("utf-8", bytes(raw[least : least + _CONTINUED]), 0, 1, "invalid start byte")
        at -= 1
    return at - 6 if _PAIR.fullmatch(raw, at - 6, at + 4) else at


def _smallest_list(first: int) -> bytes:
    """A list of the smallest JSON that begins so."""
    return {_QUOTE: b'[""]', _OPEN: b"[[]]"}.get(first, b"[{}]")
